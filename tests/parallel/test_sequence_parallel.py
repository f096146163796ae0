"""Sequence parallel: ranks that run a micro-batch together give the gradient of one rank, in float64.

The oracle is one rank that runs every response alone, without groups (tests/parallel/test_layout.py holds that path to
transformers). The ranks run tests/parallel/sequence_worker.py; tests/parallel/grid.py runs more cases."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from common.batch import Batch
from common.forward.sequence_parallel import zigzag
from common.memory.plan import MemoryPlan
from common.model.policy import ModelConfig
from common.parallel.ranks import World
from common.run import RunArgs
from tests.conftest import ROOT, launch
from tests.parallel.layout_worker import Step
from tests.parallel.sequence_worker import Case, critic_of, in_float64, run

SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 9, "num_hidden_layers": 2, "pad_token_id": 0,
         "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.2}
MODELS = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
    "three heads": LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1),          # 2 and 4 divide neither
    "window": Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
                          use_sliding_window=True, max_window_layers=1),
    # 4 shards divide the experts along another dimension
    "mixture": Qwen3MoeConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6,
                              num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1),
}
CASES = {
    2: [Case("llama", 1, 2), Case("llama", 2), Case("llama", 2, 2, recompute=True), Case("llama", 2, missing="keys"),
        Case("window", 2, aggregation="seq-mean-token-mean"), Case("mixture", 2, budget=10)],
    4: [Case("llama", 1, 2), Case("llama", 2), Case("llama", 2, 2, recompute=True, budget=1), Case("llama", 4, 2),
        Case("three heads", 2, share_prompt=True, recompute=True), Case("three heads", 4, budget=8),
        Case("window", 4, 2, share_prompt=True, budget=12), Case("window", 2, budget=1),
        Case("mixture", 4, aggregation="seq-mean-token-mean"), Case("mixture", 2, 2),
        *(Case("llama", 2, 2, missing=reduction) for reduction in ("log-probs", "shards", "copies"))],
    8: [Case("mixture", 4, 2, share_prompt=True)],
}
TOLERANCE = 1e-12


def save_models(folder: Path) -> dict[str, str]:
    folders = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        folders[name] = str(folder / name.replace(" ", "_"))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


def make_step() -> Step:
    """12 responses to 4 prompts, one of which has one token: fewer than the chunks of four ranks. Some begin with the
    whole of another response, as the turns of an episode do, or with a part of it."""
    generator = torch.Generator().manual_seed(7)

    def draw(n: int) -> list[int]:
        return torch.randint(3, 53, (n,), generator=generator).tolist()

    prompts = [prompt for n in (1, 4, 7, 2) for prompt in [draw(n)] * 3]
    responses = [draw(n) for n in (1, 9, 23, 2, 5, 3, 17, 1, 8, 30, 4, 2)]
    responses[2][:9] = responses[1]
    responses[7][:1] = responses[6][:1]
    responses[9][:5] = responses[10] + responses[11][:1]
    masks = [[i != 3 for i in range(len(response))] for response in responses]
    old = [(-torch.rand(len(r), generator=generator) * 4 - 1).tolist() for r in responses]
    advantages = [(i * 37 % 11 - 5) / 4 + 0.1 for i in range(12)]
    return Step(prompts, responses, masks, old, [float(torch.tensor(a)) for a in advantages], 3, kl_coef=0.3,
                entropy_coef=0.2)


def run_on(ranks: int, cases: list[Case], folder: Path, **todo) -> list[dict]:
    """What each of so many ranks found."""
    torch.save(todo | {"cases": cases}, folder / "todo.pt")
    launch("tests/parallel/sequence_worker.py", folder, ranks=ranks, warm=True)
    return [torch.load(folder / f"found_{ranks}_{rank}.pt", weights_only=False) for rank in range(ranks)]


def on_one_rank(models: dict[str, str], step: Step, world: World) -> Callable[[Case], dict[str, torch.Tensor]]:
    """A function that gives the gradient of a case's model, without groups and every response alone."""
    known = {}

    def gradient_of(case: Case) -> dict[str, torch.Tensor]:
        alone = Case(case.model, 1, budget=1, aggregation=case.aggregation)
        if alone not in known:
            with in_float64():
                known[alone], *_ = run(alone, models[case.model], step, world)
        return known[alone]

    return gradient_of


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def step() -> Step:
    return make_step()


@pytest.fixture(scope="module")
def batch(step) -> Batch:
    return Batch.build(step.prompts, step.responses)


@pytest.fixture(scope="module")
def found(models, step, batch, tmp_path_factory) -> dict[int, list[dict]]:
    """Ranks -> what each of them found."""
    folder = tmp_path_factory.mktemp("sequence_parallel")
    return {ranks: run_on(ranks, cases, folder, models=models, step=step, batch=batch)
            for ranks, cases in CASES.items()}


@pytest.fixture(scope="module")
def expected(models, step, world):
    return on_one_rank(models, step, world)


def relative_error(gradient: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert gradient.keys() == want.keys() and all(w.dtype == torch.float64 for w in want.values())
    return max(float((gradient[name] - w).abs().max() / w.abs().max()) for name, w in want.items())


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks]])
def test_the_gradient_is_that_of_one_rank(ranks, case, found, expected):
    errors = [relative_error(of_rank[case][0], expected(case)) for of_rank in found[ranks]]
    print(f"\n{ranks} ranks, {case}: worst relative gradient error {max(errors):.1e}")
    if case.missing:                                                    # it is seen
        assert min(errors) > 1e-3
    else:
        assert max(errors) < TOLERANCE, errors


def test_the_documents_have_the_whole_grid():
    """As tests/parallel/grid.py prints it: every cell is below the tolerance, and every missing reduction is seen."""
    text = (ROOT / "tests/evidence/accuracy.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    cells = {(int(row[0]), int(row[1]), int(row[2])): row[3:] for row in rows if len(row) == 9 and row[0].isdigit()}
    divides = {(r, n, c) for r in (1, 2, 4, 8) for n in (1, 2, 4) for c in (1, 2) if r % n == 0 and r % c == 0}
    assert cells.keys() == divides and len(cells) == 17
    assert all(0 < float(error) < TOLERANCE for row in cells.values() for error in row)
    left_out = [row[1:] for row in rows if len(row) == 7 and " over the " in row[0]]
    assert len(left_out) == 4 and all(float(error) > 0.1 for row in left_out for error in row)


def test_a_group_holds_as_many_budgets_as_it_has_ranks(found):
    """The same tokens in micro-batches of a group of n ranks, which have n times the budget."""
    of_rank = found[4][0]
    num_microbatches = [of_rank[Case("llama", n, replicas)][1] for n, replicas in ((1, 2), (2, 1), (4, 2))]
    assert num_microbatches[0] >= num_microbatches[1] >= num_microbatches[2] > 1
    assert max(row[2] for row in of_rank.values() if isinstance(row, tuple)) > 0        # ranks without responses


def test_a_critic_has_the_values_and_the_gradient_of_one_rank(models, batch, world, found):
    with in_float64():
        want = critic_of(models["llama"], batch, world, Case("llama", 1))
    starts, values = batch.cu_seqlens.tolist(), want.pop("values")
    want.pop("index")
    for ranks, of_ranks in found.items():
        for rank, ours in enumerate(row["critic"] for row in of_ranks):
            own = [values[starts[i] : starts[i + 1]] for i in range(rank, len(batch), ranks)]
            assert torch.allclose(ours.pop("values"), torch.cat(own), rtol=1e-5, atol=1e-6)     # the head is float32
            assert ours.pop("index").tolist() == list(range(rank, len(batch), ranks))
            assert relative_error(ours, want) < 1e-5


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_token_runs_once_and_ranks_have_as_much_to_do(n):
    """Long-tailed lengths: the most pairs of query and key on a rank over the mean is at most 1.02."""
    generator = torch.Generator().manual_seed(1)
    lengths = (torch.randn(16, generator=generator) * 0.8 + 8).exp().long().clamp(1, 30000).tolist()
    lengths += [1, 2, 3, 2 * n]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    chunk, owner = zigzag(starts, n)
    assert len(chunk) == len(owner) == sum(lengths) and set(owner.tolist()) == set(range(n))
    loads = [0] * n
    for number in chunk.unique().tolist():
        rows, segment = (chunk == number).nonzero()[:, 0], number // (2 * n)
        first, last = int(rows[0] - starts[segment]), int(rows[-1] + 1 - starts[segment])
        assert last - first == len(rows) and first >= 0 and last <= lengths[segment]    # one piece of one sequence
        assert len(rows) <= lengths[segment] / (2 * n) + 1
        rank = owner[rows[0]]
        assert (owner[rows] == rank).all()
        loads[rank] += (last * (last + 1) - first * (first + 1)) // 2
    assert max(loads) / (sum(loads) / n) < 1.02


def test_the_plan_of_memory_has_a_ranks_share():
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)

    def plan(n: int, gpus: int = 8) -> MemoryPlan:
        args = RunArgs(model="", train_data=(), policy=ModelConfig(sequence_parallel=n, gradient_checkpointing=True))
        return MemoryPlan(args, config, gpus, longest=4001)

    assert [plan(n).smallest for n in (1, 2, 4)] == [4001, 2001, 1001]
    kept = [plan(n).policy.kept_by_block(plan(n).keys) for n in (1, 2, 4)]
    key_and_value = 2 * 2 * 6 * 2                                       # bytes: 2 of them, 2 heads of 6, bfloat16
    assert kept[1] - kept[0] == 2 * 2 * key_and_value and kept[2] - kept[1] == 2 * 2 * key_and_value
    with pytest.raises(ValueError, match=r"--policy\.sequence-parallel 3 must be at least 1 and divide the 8 ranks"):
        plan(3)

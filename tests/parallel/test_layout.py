"""The gradient of a mini-batch does not depend on how it was cut: ranks, token budgets, order, skipped responses.

Real gloo ranks and FSDP2, through the lines of grpo.py (tests/parallel/layout_worker.py). The oracle knows no packing:
the plain transformers model in float64, one response at a time, the loss a loop over tokens. Also what else ranks may
not change: the unsharded weights, and one clipped step.
"""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.checkpoint import shards
from tests.conftest import launch
from tests.oracles import AGGREGATIONS
from tests.parallel.layout_worker import LORA, Step

VOCAB = 53                              # rows that no number of ranks divides
TOLERANCE = 1e-6                        # ||g - oracle|| / ||oracle|| of all weights; reached: 4e-7, float32's own
LAYOUT_TOLERANCE = 3e-7                 # the same between two layouts in float32; reached: 3e-7
BUDGETS = (10_000, 40, 1)               # everything in one micro-batch, a few, every response alone
NUM_RESPONSES = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A random Llama whose weights' rows do not divide by the ranks: vocabulary 53; MLP 9, none on rank 3 of 4."""
    folder = tmp_path_factory.mktemp("odd_llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=9, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.08,
    )).save_pretrained(folder)
    return str(folder)


class Oracle:
    """Losses and gradients in float64, one response at a time."""

    def __init__(self, folder: str):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

        def norm(module, x):            # transformers' own computes in float32 whatever the dtype
            return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

        for module in self.model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = norm.__get__(module)

    def log_probs(self, prompt, response, temperature):
        """log p over the vocabulary before each response token: [len(response), V]."""
        logits = self.model(input_ids=torch.tensor([prompt + response])).logits[0]
        return (logits / temperature)[len(prompt) - 1 : -1].log_softmax(-1)

    def gradient(self, step: Step, aggregation: str, order: list[int] | None = None) -> dict[str, torch.Tensor]:
        """`order`: the sequences with the numbers 2k and 2k + 1 in it are one response."""
        found = {}                      # of every response with a sampled token: its token losses
        for i, (prompt, response) in enumerate(zip(step.prompts, step.responses)):
            rows, token_losses = self.log_probs(prompt, response, step.temperature), []
            for j, token in enumerate(response):
                if not step.masks[i][j]:
                    continue
                old, advantage = step.old_logps[i][j], step.advantages[i]
                ratio = (rows[j, token] - old).exp()
                if advantage >= 0:
                    loss = -advantage * min(ratio, 1 + step.clip_high)
                else:
                    loss = -advantage * min(max(ratio, 1 - step.clip_low), step.clip_dual)
                loss = loss + step.kl_coef * (1 / ratio - 1 + ratio.log())
                token_losses.append(loss + step.entropy_coef * (rows[j].exp() * rows[j]).sum())
            if token_losses:
                found.setdefault(order[i] // 2 if order else i, []).extend(token_losses)
        sequences = list(found.values())
        num_tokens, sums = sum(map(len, sequences)), [sum(losses) for losses in sequences]
        objective = {
            "token-mean": sum(sums) / num_tokens,
            "token-sum": sum(sums),
            "seq-mean-token-sum": sum(sums) / len(sequences),
            "seq-mean-token-sum-norm": sum(sums) / len(sequences) / step.norm_length,
            "seq-mean-token-mean": sum(s / len(losses) for s, losses in zip(sums, sequences)) / len(sequences),
        }[aggregation]
        self.model.zero_grad()
        objective.backward()
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


def make_step(oracle: Oracle, num_responses: int, samples_per_prompt: int, seed: int) -> Step:
    """Ragged, with tool output, a response of one token, an empty one and one that was dropped; half of the tokens'
    ratios are outside the clip bounds, some above the dual clip's; a third of the advantages is 0. All numbers are
    float32's, so that nothing is rounded on the way in."""
    rng = random.Random(seed)
    lengths = [rng.randint(2, 12) for _ in range(num_responses)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))] for _ in lengths]
    prompts = [prompts[i // samples_per_prompt] for i in range(num_responses)]
    responses = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    masks = [[rng.random() < 0.8 for _ in response] for response in responses]
    advantages = [0.0 if i % 3 == 2 else rng.choice([-1, 1]) * rng.randint(20, 120) / 64 for i in range(num_responses)]
    if num_responses > 5:
        responses[0], masks[0] = responses[0][:1], [True]
        responses[3], masks[3] = [], []
        masks[4] = [False] * len(masks[4])
    old_logps = []
    for prompt, response in zip(prompts, responses):
        with torch.no_grad():
            rows = oracle.log_probs(prompt, response, 0.7)
        log_ratios = [rng.choice([-0.7, -0.1, 0.1, 0.6, 1.3]) for _ in response]        # far from every bound
        old_logps.append([float((rows[j, token] - log_ratios[j]).float()) for j, token in enumerate(response)])
    return Step(prompts, responses, masks, old_logps, advantages, samples_per_prompt)


@pytest.fixture(scope="module")
def steps(oracle):
    step = make_step(oracle, NUM_RESPONSES, 2, seed=3)
    return {"main": step, "kl and entropy": replace(step, kl_coef=0.3, entropy_coef=0.2),
            "few": make_step(oracle, 3, 3, seed=5), "constant": replace(step, advantages=[0.0] * NUM_RESPONSES)}


def shuffled(num_responses: int, samples_per_prompt: int = 2) -> list[int]:
    """Other numbers for the responses; those of one prompt stay neighbours, as in a step."""
    rng, order = random.Random(num_responses), []
    groups = rng.sample(range(num_responses // samples_per_prompt), num_responses // samples_per_prompt)
    for group in groups:
        order += [group * samples_per_prompt + g for g in rng.sample(range(samples_per_prompt), samples_per_prompt)]
    return order


def make_layouts() -> list[tuple]:
    straight, few = list(range(NUM_RESPONSES)), [2, 0, 1]
    layouts = [("main", budget, straight, "token-mean", "") for budget in BUDGETS]
    layouts += [("main", budget, shuffled(NUM_RESPONSES), aggregation, "")
                for budget, aggregation in itertools.product(BUDGETS, AGGREGATIONS)]
    layouts += [("main", 40, straight, aggregation, "skip") for aggregation in AGGREGATIONS]
    layouts += [("main", 40, straight, aggregation, "each") for aggregation in ("token-mean", "token-sum")]
    layouts += [("few", 10_000, few, aggregation, variant) for aggregation in AGGREGATIONS
                for variant in ("", "skip", "local")]
    layouts += [("main", budget, order, aggregation, "share") for budget in BUDGETS
                for order, aggregation in ((straight, "token-mean"), (shuffled(NUM_RESPONSES), "seq-mean-token-mean"))]
    layouts.append(("few", 1, few, "token-mean", ""))                   # 2 ranks: one runs 2 of the 3, one a dummy
    layouts += [("kl and entropy", budget, shuffled(NUM_RESPONSES), "token-mean", "") for budget in BUDGETS]
    layouts += [("main", 40, shuffled(NUM_RESPONSES), aggregation, "episodes") for aggregation in AGGREGATIONS]
    layouts.append(("constant", 40, straight, "token-mean", "skip"))
    return [*layouts, layouts[0]]                                       # the last one is what the step is made of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layout")


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"{n}_ranks")
def run(request, model, steps, folder):
    """All on this many ranks, in one launch: their number, {layout: (gradient, micro-batches a rank, dummies)}, and all
    that each rank found."""
    ranks = request.param
    todo = {"model": model, "steps": steps, "layouts": make_layouts()}
    torch.save(todo, folder / "todo.pt")
    launch("tests/parallel/layout_worker.py", folder, ranks=ranks, warm=True)
    found = [torch.load(folder / f"found_{ranks}_{rank}.pt") for rank in range(ranks)]
    return ranks, found[0]["gradients"], found


@pytest.fixture(scope="module")
def expected(oracle, steps):
    """Oracle gradients, computed once."""
    names = ["main", "few"]
    found = {(name, a): oracle.gradient(steps[name], a) for name in names for a in AGGREGATIONS}
    return found | {("kl and entropy", "token-mean"): oracle.gradient(steps["kl and entropy"], "token-mean")}


def relative_error(gradient: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert gradient.keys() == want.keys()
    difference = sum((gradient[name].double() - want[name]).square().sum() for name in want)
    return float((difference / sum(w.square().sum() for w in want.values())).sqrt())


def errors(run, expected, name: str, variant: str) -> dict[tuple, float]:
    return {key: relative_error(run[1][key][0], expected[key[0], key[3]])
            for key in run[1] if key[0] == name and key[4] == variant}


def test_the_step_is_a_hard_one(oracle, steps, expected):
    """Guard: tokens on every branch of the loss, no gradient is zero, and the aggregations differ."""
    step = steps["main"]
    sides = {(a > 0) - (a < 0) for a in step.advantages}
    assert sides == {-1, 0, 1}
    assert sum(sum(mask) for mask in step.masks) > 50
    assert {0, 1} <= {len(response) for response in step.responses}
    for want in expected.values():
        assert all(tensor.abs().max() > 1e-6 for tensor in want.values())
    for a, b in itertools.combinations(AGGREGATIONS, 2):
        assert relative_error(expected["main", a], expected["main", b]) > 0.05
    unclipped = oracle.gradient(replace(step, clip_low=1.0, clip_high=1e9, clip_dual=1e9), "token-mean")
    assert relative_error(unclipped, expected["main", "token-mean"]) > 0.1
    no_dual = oracle.gradient(replace(step, clip_dual=1e9), "token-mean")
    assert relative_error(no_dual, expected["main", "token-mean"]) > 0.1


def test_gradient_is_the_same_for_every_layout(run, expected):
    found = errors(run, expected, "main", "") | errors(run, expected, "kl and entropy", "")
    assert len(found) == len(BUDGETS) * (1 + len(AGGREGATIONS) + 1)
    print(f"\n{run[0]} ranks: worst relative gradient error {max(found.values()):.1e} of {len(found)} layouts")
    assert max(found.values()) < TOLERANCE, max(found, key=found.get)
    for aggregation in AGGREGATIONS:
        first, *others = [gradient for (name, _, _, a, variant), (gradient, _, _) in run[1].items()
                          if (name, a, variant) == ("main", aggregation, "")]
        apart = max(relative_error(other, first) for other in others)
        print(f"{aggregation}: worst difference of two layouts {apart:.1e}")
        assert apart < LAYOUT_TOLERANCE, aggregation
    num_microbatches = [run[1]["main", budget, tuple(range(NUM_RESPONSES)), "token-mean", ""][1] for budget in BUDGETS]
    assert num_microbatches[0] == 1
    assert num_microbatches[0] < num_microbatches[1] < num_microbatches[2]


def test_shared_prompts_change_nothing(run, expected):
    """--policy.share-prompt: the prompt of a group is computed once where its responses are in one micro-batch."""
    found = errors(run, expected, "main", "share")
    assert len(found) == 2 * len(BUDGETS)
    assert max(found.values()) < TOLERANCE, max(found, key=found.get)
    shared, plain = (run[1]["main", 40, tuple(range(NUM_RESPONSES)), "token-mean", v][1] for v in ("share", ""))
    assert 1 < shared < plain or run[0] > 1                             # fewer tokens: the budget holds more responses


def test_responses_that_only_count_change_nothing(run, expected):
    found = errors(run, expected, "main", "skip") | errors(run, expected, "few", "skip")
    assert max(found.values()) < TOLERANCE, max(found, key=found.get)


def test_an_episode_of_several_sequences_is_one_response(run, oracle, steps, expected):
    """Its history was rewritten: a mean over sequences counts it once, wherever its sequences are trained."""
    order = shuffled(NUM_RESPONSES)
    for aggregation in AGGREGATIONS:
        want = oracle.gradient(steps["main"], aggregation, order)
        gradient, _, _ = run[1]["main", 40, tuple(order), aggregation, "episodes"]
        assert relative_error(gradient, want) < TOLERANCE, aggregation
        is_per_sequence = aggregation.startswith("seq-")
        assert (relative_error(want, expected["main", aggregation]) > 0.05) == is_per_sequence


def test_more_ranks_than_responses(run, expected):
    found = errors(run, expected, "few", "")
    assert max(found.values()) < TOLERANCE, max(found, key=found.get)
    num_dummies = [run[1][key][2] for key in found]
    assert max(num_dummies) == {1: 0, 2: 1, 4: 1}[run[0]]


def test_a_mini_batch_without_anything_to_train_has_gradient_zero(run):
    gradient, num_microbatches, num_dummies = run[1]["constant", 40, tuple(range(NUM_RESPONSES)), "token-mean", "skip"]
    assert (num_microbatches, num_dummies) == (1, run[0])
    assert all(not tensor.any() for tensor in gradient.values())


def test_local_denominators_would_be_noticed(run, expected):
    """Negative control: the same numbers with each rank's own counts are wrong by many orders of magnitude."""
    for (_, _, _, aggregation, _), error in errors(run, expected, "few", "local").items():      # 3 responses: uneven
        exact = run[0] == 1 or aggregation == "token-sum"               # there is nothing to divide by
        assert error < TOLERANCE if exact else error > 0.02, (aggregation, error)


def test_a_denominator_per_micro_batch_would_be_noticed(run, expected):
    found = errors(run, expected, "main", "each")
    assert len(found) == 2
    # The closer two micro-batches are in tokens, the smaller the mistake: 0.013 on 4 ranks, whose plan is nearly even.
    assert all(error > 1_000 * TOLERANCE for error in found.values()), found


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}_replicas")
def copies(request, run):
    """What each rank found with so many copies of the model over the ranks (of two ranks, each has one)."""
    return [found["replicas"] if request.param > 1 else found for found in run[2] if request.param <= run[0]]


def test_weights_unshard_to_what_was_loaded(copies, model):
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert loaded.pop("lm_head.weight") is not None                     # tied: sent once
    for found in copies:
        assert found["weights"].keys() == loaded.keys()
        assert all(torch.equal(found["weights"][name], loaded[name]) for name in loaded)


def test_the_norm_is_global_and_clips(copies, expected):
    """SGD, whose step shows the clipped gradient: 0.1 * 0.5 / norm."""
    want = expected["main", "token-mean"]
    norm = float(sum(w.square().sum() for w in want.values()).sqrt())
    assert norm > 1
    for found in copies:
        assert found["norm"] == pytest.approx(norm, rel=TOLERANCE)
        before = found["weights"]
        change = {name: (before[name] - found["stepped"][name]) * norm / 0.1 / 0.5 for name in before}
        assert relative_error(change, want) < 1e-4                      # weights of 0.1 to 1 round changes of 1e-4


def test_one_ranks_infinite_gradient_changes_no_rank(copies):
    for found in copies:
        assert found["bad_norm"] == torch.inf
        assert all(torch.equal(found["after_bad"][name], tensor) for name, tensor in found["stepped"].items())
        assert (found["version"], found["grads_left"]) == (1, 0)


def test_the_gradient_is_the_same_with_copies_of_the_model(run, expected):
    name, budget, order, *others = make_layouts()[-1]
    one_copy = run[1][name, budget, tuple(order), *others]
    for found in (found["replicas"] for found in run[2] if run[0] > 1):
        assert relative_error(found["gradient"], expected["main", "token-mean"]) < TOLERANCE
        assert relative_error(found["gradient"], one_copy[0]) < LAYOUT_TOLERANCE


def test_a_checkpoint_of_copies_holds_each_number_once_and_fits_other_ranks(run, folder):
    if run[0] == 1:
        pytest.skip("one rank has one copy")
    saved, single = (folder / f"{name}_2_of_{run[0]}" for name in ("replicas", "single"))
    bytes_of, bytes_of_single = (sum(x.stat().st_size for x in place.iterdir()) for place in (saved, single))
    assert bytes_of < 1.02 * bytes_of_single                            # in fewer pieces; twice, were copies saved
    whole = shards.whole(saved)
    for found in (found["replicas"] for found in run[2]):
        assert sum(name.endswith("exp_avg_sq") for name in whole) == len(found["after_adam"])
        for restored in found["restored"]:
            assert restored.keys() == whole.keys()
            assert all(torch.equal(restored[name], whole[name]) for name in whole)
        for name, tensor in found["after_adam"].items():
            assert torch.equal(whole[f"policy.model.lm.{name}"], tensor)
            assert not torch.equal(tensor, found["loaded"][name])


def test_the_gradient_of_adapters_follows_from_that_of_the_merged_weights(run, oracle, steps):
    """By the chain rule: dA = s B^T dW', dB = s dW' A^T, with dW' of the whole model in float64."""
    adapters, scale = run[2][0]["lora"]["adapters"], LORA.alpha / LORA.rank
    layers = [name.removesuffix(".lora_A") for name in adapters if name.endswith("lora_A")]
    assert len(layers) == 14
    merged = copy.deepcopy(oracle)
    base = dict(merged.model.named_parameters())
    with torch.no_grad():
        for layer in layers:
            a, b = (adapters[f"{layer}.{name}"].double() for name in ("lora_A", "lora_B"))
            base[f"{layer}.weight"] += scale * b @ a
    gradient, want = merged.gradient(steps["main"], "token-mean"), {}
    for layer in layers:
        a, b, of_weight = (x.double() for x in (adapters[f"{layer}.lora_A"], adapters[f"{layer}.lora_B"],
                                                gradient[f"{layer}.weight"]))
        want |= {f"{layer}.lora_A": scale * b.T @ of_weight, f"{layer}.lora_B": scale * of_weight @ a.T}
    assert min(w.abs().max() for w in want.values()) > 1e-3
    for found in (found["lora"] for found in run[2]):
        assert relative_error(found["gradient"], want) < TOLERANCE
        assert found["weights"].keys() == run[2][0]["weights"].keys()
        assert all((found["weights"][name] - base[name]).abs().max() < 1e-6 for name in found["weights"])

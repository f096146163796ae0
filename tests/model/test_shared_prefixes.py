"""What several sequences begin with runs once (--policy.share-prompt): the layout against a slow trie; log-probs and
gradients against every sequence alone; plans against what then runs."""

import contextlib
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.batch import Batch
from common.layout.shared_prefixes import sort_by_prefix
from common.model.loading import Weights, load_policy
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig, Policy
from common.packing import Sequences, plan_step
from tests.model.test_attention import CONFIGS, SIZES
from tests.parallel.sequence_worker import in_float64
from tests.parallel.test_sequence_parallel import save_models

Sequence = tuple[list[int], list[int], list[bool]]
"""Prompt, response, and which of its tokens the policy sampled."""


def draw(generator: random.Random, most: int = 6) -> list[int]:
    return [generator.randrange(3, 53) for _ in range(generator.randint(1, most))]


def rewritten(generator: random.Random, prompt: list[int], num_turns: int) -> list[Sequence]:
    """An episode whose chat template drops what earlier turns thought: a sequence a turn."""
    found = []
    history = prompt
    for _ in range(num_turns):
        thought, answer, result = draw(generator), draw(generator), draw(generator)
        found.append((history, thought + answer, [True] * len(thought + answer)))
        history = history + answer + result
    return found


def branches(generator: random.Random, prompt: list[int], num_branches: int) -> list[Sequence]:
    """An episode of two turns and a result, and conversations that begin with its history up to a branch."""
    first, result, second = draw(generator), draw(generator), draw(generator)
    mask = [True] * len(first) + [False] * len(result) + [True] * len(second)
    found = [(prompt, first + result + second, mask)]
    for _ in range(num_branches):
        answer = draw(generator)
        found.append((prompt + first + result, answer, [True] * len(answer)))
    return found


def make_group(seed: int) -> list[Sequence]:
    """A group of episodes, a conversation with another prompt, a sequence twice, and one that begins another."""
    generator = random.Random(seed)
    prompt = draw(generator, 9)
    found = rewritten(generator, prompt, 4) + branches(generator, prompt, 3) + rewritten(generator, prompt, 2)
    other = prompt[:2] + draw(generator)
    found.append((other, draw(generator, 1), [True]))
    found.append(found[0])
    long = found[0][1]
    found.append((prompt, long[: len(long) // 2 + 1], [True] * (len(long) // 2 + 1)))
    found.append((prompt, [], []))
    generator.shuffle(found)
    return found


def build(sequences: list[Sequence], numbers: list[int] | None = None) -> Batch:
    prompts, responses, masks = (list(part) for part in zip(*sequences))
    return Batch.build(prompts, responses, masks=masks, number=numbers, index=numbers)


def texts(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in batch.tokens.split(batch.host_lengths)]


@pytest.mark.parametrize("seed", range(20))
def test_each_node_of_the_trie_runs_once(seed):
    """A loop over all beginnings of all sequences is the trie."""
    batch = build(make_group(seed) + make_group(seed + 100))
    nodes = {tuple(text[: n + 1]) for text in texts(batch) for n in range(len(text))}
    shared = batch.shared_prefixes
    assert len(shared.run) == len(nodes) < len(batch.tokens)
    assert batch.tokens[shared.run][shared.row].tolist() == batch.tokens.tolist()
    assert batch.sequence_positions[shared.run][shared.row].tolist() == batch.sequence_positions.tolist()
    # a segment's keys are a whole sequence, its queries are the last of them, and no other token runs
    keys = shared.key_rows.split(shared.cu_seqlens_k.diff().tolist())
    queries = torch.arange(len(shared.run)).split(shared.cu_seqlens.diff().tolist())
    for rows, new in zip(keys, queries, strict=True):
        assert torch.equal(rows[-len(new) :], new)
        assert batch.tokens[shared.run[rows]].tolist() in texts(batch)
        assert batch.sequence_positions[shared.run[rows]].tolist() == [*range(len(rows))]
    assert len(shared.key_rows) <= len(batch.tokens)


def test_images_and_experts_that_may_differ_are_not_shared():
    """With images a sequence shares with its own row, up to the first sampled token; experts must be the same."""
    batch = build([([5, 6, 7], [8, 9], [True, True])] * 4)
    batch.image_row = torch.tensor([3, 3, 4, -5])
    assert len(batch.shared_prefixes.run) == 5 + 2 + 5 + 5
    batch = build([([5, 6, 7], [8, 9], [True, True])] * 3)
    batch.routing = torch.zeros(15, 2, 2, dtype=torch.int16)
    batch.routing[12, 1, 1] = 1                                         # the third token of the third sequence
    assert len(batch.shared_prefixes.run) == 5 + 3


def test_a_small_common_part_is_not_worth_a_gather():
    def run(num_common: int) -> int | None:
        prompts = [[5] * num_common + [n] * (1000 - num_common) for n in (6, 7)]
        shared = Batch.build(prompts, [[8], [9]]).shared_prefixes
        return None if shared is None else len(shared.run)

    assert (run(0), run(19), run(30)) == (None, None, 2002 - 30)


def log_probs(policy: Policy, batches: list[Batch]) -> list[torch.Tensor]:
    """Log-probs, entropies and the gradient of a weighted sum, whose weights are of a sequence's number and place."""
    policy.zero_grad()
    found: dict[int, torch.Tensor] = {}
    for batch in batches:
        logp, entropy = policy(batch, 0.7)
        weight = torch.sin(batch.number[batch.sequence_ids] * 7.0 + batch.sequence_positions).to(logp.dtype)
        ((logp + 0.1 * entropy) * weight).sum().backward()
        both = torch.stack([logp, entropy], dim=1).detach()
        found |= dict(zip(batch.number.tolist(), both.split(batch.host_lengths)))
    policy.free_unsharded()
    gradients = [p.grad.full_tensor().flatten() for p in policy.parameters() if p.requires_grad]
    return [torch.cat([found[number] for number in sorted(found)]), torch.cat(gradients)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["llama", "window", "mixture", "adapters, recomputed"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sharing_changes_nothing(name, dtype, models, world):
    """Every sequence alone is the oracle, for one micro-batch and for parts of another order, in which others meet."""
    sequences = make_group(3) + make_group(4)
    weights = Weights()
    if "adapters" in name:
        weights = Weights(lora=LoRAConfig(rank=2))
    folder = models.get(name, models["llama"])
    with in_float64() if dtype == "float64" else contextlib.nullcontext():
        policy, sharing = (
            load_policy(folder, ModelConfig(compute_dtype="float32", share_prompt=share,
                                            gradient_checkpointing=share and "recomputed" in name), world, weights)
            for share in (False, True)
        )
        for one in (policy, sharing):
            torch.manual_seed(5)
            for parameter, weight in one.lm.named_parameters():
                if parameter.endswith("lora_B"):
                    weight.data.normal_()
        alone = log_probs(policy, [build([x], [n]) for n, x in enumerate(sequences)])
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(1))
        whole = build(sequences, [*range(len(sequences))])
        parts = [whole.select(part) for part in order.split(7)]
        tolerance = 1e-9 if dtype == "float64" else 2e-5
        for batches in ([whole], parts):
            for got, want in zip(log_probs(sharing, batches), alone):
                assert got.dtype == getattr(torch, dtype)
                assert (got - want).abs().max() < tolerance * want.abs().max()
                assert want.abs().max() > 0.1
    # of a node, other tokens follow, and each is predicted by its last one
    assert len(whole.shared_prefixes.run) < 0.6 * len(whole.tokens)


@pytest.mark.parametrize("family", CONFIGS)
def test_families_with_windows_and_soft_caps(family):
    """In memory, in float64 but for transformers' norms."""
    config, extra = CONFIGS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(**SIZES | extra), attn_implementation="packed_sdpa", dtype=torch.float64)
    batch = build(make_group(7))
    found = []
    for share in (False, True):
        policy = Policy(model)
        policy.share_prompt = share
        policy.zero_grad()
        logp, entropy = policy(batch, temperature=0.7)
        ((logp + 0.1 * entropy) * torch.arange(len(logp))).sum().backward()
        found.append([logp.detach(), entropy.detach(), *(p.grad.clone() for p in policy.parameters())])
    for apart, shared in zip(*found):
        assert (apart - shared).norm() <= 1e-6 * apart.norm()
    assert found[0][0].abs().sum() > 1


def test_long_queries_run_in_blocks(monkeypatch, models, world):
    """Blocks of queries are those of one call."""
    sequences = make_group(9)
    policy = load_policy(models["window"], ModelConfig(compute_dtype="float32", share_prompt=True), world)
    whole = log_probs(policy, [build(sequences, [*range(len(sequences))])])
    monkeypatch.setattr("common.forward.attention.BLOCK", 2)
    for got, want in zip(log_probs(policy, [build(sequences, [*range(len(sequences))])]), whole):
        assert not torch.equal(got, want)
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_tokens", "most_keys"),
                         [(25, np.inf), (60, np.inf), (60, 2.0), (60, 1.0), (10_000, np.inf)])
def test_a_micro_batch_holds_what_was_planned(seed, max_tokens, most_keys):
    """Also where some sequences do not run, on two ranks, in two mini-batches. A group in one place runs each node of
    its trie once."""
    groups = [make_group(10 * seed + n) for n in range(4)]
    batch = build([x for group in groups for x in group], [*range(sum(map(len, groups)))])
    group = torch.tensor([n for n, of in enumerate(groups) for _ in of])
    order, common = sort_by_prefix(batch.tokens, batch.mask, batch.cu_seqlens, None, None, group)
    for one, other in pairwise(order):
        if group[one] != group[other]:
            assert not common[[*order].index(other)]
    lengths = batch.sequence_lengths.numpy()
    runs = np.random.default_rng(seed).random(len(lengths)) < 0.8
    sequences = Sequences(lengths, lengths, runs, order=order, common=common[order.argsort()], most_keys=most_keys)
    plan = plan_step(sequences, 2, 2, max_tokens, seed)
    seen = []
    for of_ranks in (of_ranks for minibatch in plan.minibatches for of_ranks in minibatch):
        for numbers in of_ranks:
            seen += numbers.tolist()
            if not len(numbers):
                continue
            part = batch.microbatch(numbers)
            run = len(part.shared_prefixes.run) if part.shared_prefixes else len(part.tokens)
            assert run <= max_tokens or len(part) == 1
            assert len(part.tokens) <= most_keys * max_tokens or len(part) == 1
    assert sorted(seen) == np.flatnonzero(runs).tolist()
    if max_tokens == 10_000:
        assert sum(len(of_ranks) for minibatch in plan.minibatches for of_ranks in minibatch) == 4


def test_what_shares_is_planned_together():
    """Two episodes of rewritten histories in few tokens: alone they would need four micro-batches."""
    generator = random.Random(0)
    episodes = [rewritten(generator, draw(generator), 5) for _ in range(2)]
    batch = build([x for episode in episodes for x in episode])
    lengths = batch.sequence_lengths.numpy()
    order, common = sort_by_prefix(batch.tokens, batch.mask, batch.cu_seqlens, None, None,
                                   torch.arange(2).repeat_interleave(5))
    budget = max(len(build(episode).shared_prefixes.run) for episode in episodes)
    plan = plan_step(Sequences(lengths, lengths, order=order, common=common[order.argsort()]), 1, 1, budget, 0)
    assert sorted(map(len, (numbers for numbers, in plan.minibatches[0]))) == [5, 5]
    apart = plan_step(Sequences(lengths, lengths), 1, 1, budget, 0)
    assert len(apart.minibatches[0]) >= 4

"""Packing: flat batches, costs from a config, partitions, plans under a budget. The oracles are slow loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.batch import Batch
from common.model.flops import sequence_cost
from common.packing import Plan, Sequences, partition, plan_step
from common.parallel.exchange import exchange, gather_numbers
from tests.common.weigh import weigh
from tests.oracles import AGGREGATIONS

quick = settings(max_examples=60, deadline=None, derandomize=True)


# --- Batch -----------------------------------------------------------------------------------------------


@st.composite
def samples(draw, min_size: int = 1) -> list[dict]:
    """Responses as plain lists; some are one token long, some empty, some with holes in the mask."""
    rows = []
    for number in range(draw(st.integers(min_size, 7))):
        prompt = draw(st.lists(st.integers(0, 999), min_size=1, max_size=5))
        response = draw(st.lists(st.integers(0, 999), max_size=6))
        mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
        logp = [-(number + 1) / 8 - j / 64 for j in range(len(response))]       # exact in float32
        rows.append({"prompt": prompt, "response": response, "mask": mask, "logp": logp})
    for row, index in zip(rows, draw(st.permutations(range(len(rows))))):
        row["index"] = index
    return rows


def build(rows: list[dict]) -> Batch:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Batch.build(columns["prompt"], columns["response"], rollout_logps=columns["logp"], masks=columns["mask"],
                       index=columns["index"])


def expected(row: dict) -> dict:
    """One response as its batch must hold it."""
    logp = [value if keep else 0.0 for value, keep in zip(row["logp"], row["mask"])]
    blank = len(row["prompt"])
    return {"tokens": row["prompt"] + row["response"], "mask": [False] * blank + row["mask"],
            "rollout_logp": [0.0] * blank + logp, "index": row["index"]}


def unpack(batch: Batch) -> list[dict]:
    rows, start = [], 0
    ends = batch.cu_seqlens.tolist()[1:]
    for i, end in enumerate(ends):
        row = {name: getattr(batch, name)[start:end].tolist() for name in ("tokens", "mask", "rollout_logp")}
        rows.append(row | {"index": batch.index[i].item()})
        start = end
    assert start == len(batch.tokens)
    return rows


@quick
@given(samples())
def test_build_matches_lists(rows):
    batch = build(rows)
    assert unpack(batch) == [expected(row) for row in rows]
    positions, owners = [], []
    for i, row in enumerate(rows):
        for j in range(len(row["prompt"] + row["response"])):
            positions.append(j)
            owners.append(i)
    assert batch.sequence_positions.tolist() == positions
    assert batch.sequence_ids.tolist() == owners
    assert batch.sequence_lengths.tolist() == [len(row["prompt"] + row["response"]) for row in rows]
    assert batch.host_lengths == batch.sequence_lengths.tolist()
    assert batch.response_lengths.tolist() == [max(sum(row["mask"]), 1) for row in rows]
    assert not batch.mask[batch.cu_seqlens[:-1].long()].any()           # never the first token of a sequence
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.tokens.dtype == batch.index.dtype == torch.int64


@quick
@given(samples(), st.data())
def test_select_is_list_indexing(rows, data):
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    assert unpack(build(rows).select(torch.tensor(picks, dtype=torch.int64))) == [expected(rows[i]) for i in picks]


@pytest.mark.usefixtures("world")
@quick
@given(samples(), st.data())
def test_cat_of_pieces_restores_the_batch(rows, data):
    batch = build(rows)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    pieces = [batch.select(order[:cut]), batch.dummy(), batch.select(order[cut:])]
    joined = Batch.cat(pieces)
    assert len(joined) == len(rows) + 1
    restored = sorted(rows, key=lambda row: row["index"])
    assert unpack(joined.sort()) == unpack(exchange(batch, [0] * len(rows))) == [expected(row) for row in restored]
    assert unpack(joined.to("cpu")) == unpack(joined)


def test_select_is_differentiable():
    batch = Batch.build([[1], [2, 3]], [[4, 5], [6]])
    batch.value = torch.arange(6.0, requires_grad=True)
    (batch.select([1, 1]).value * torch.tensor([1.0, 2, 3, 10, 20, 30])).sum().backward()
    assert batch.value.grad.tolist() == [0, 0, 0, 11, 22, 33]


def test_build_defaults():
    batch = Batch.build([[1, 2], [3]], [[4], []])
    assert batch.mask.tolist() == [False, False, True, False]           # the empty response has no mask
    assert batch.index.tolist() == [0, 1]
    assert batch.rollout_logp is batch.value is None
    assert Batch.build([], []).present().keys() == batch.present().keys()
    assert len(Batch.build([], [])) == 0
    assert Batch.build([], []).host_lengths == []


@pytest.mark.parametrize(("arguments", "message"), [
    ({"prompts": [[1]]}, "argument 2 is longer"),
    ({"prompts": [[1], []]}, "a prompt is empty"),
    ({"rollout_logps": [[-1.0, -1.0], [-1.0, -1.0]]}, "one number for each token"),
    ({"masks": [[True], [True]]}, "one number for each token"),
    ({"rollout_logps": [[-1.0, -1.0], [math.nan]]},
     "the engine's log-prob is nan for response 1 at its token 1: check the engine"),
    ({"rollout_logps": [[-1.0, -math.inf], [-1.0]]},
     "the engine's log-prob is -inf for response 0 at its token 2: check the engine"),
    ({"index": [3]}, r"Batch.index has shape \[1\], must be \[2\]: one per response"),
])
def test_build_refuses(arguments, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        Batch.build(**{"prompts": [[1], [2]], "responses": [[5, 6], [7]]} | arguments)


def test_tool_output_needs_no_logp():
    batch = Batch.build([[1]], [[2, 3]], rollout_logps=[[math.nan, -0.5]], masks=[[False, True]])
    assert batch.rollout_logp.tolist() == [0, 0, -0.5]


def test_what_is_kept_of_a_batch_follows_its_tensors():
    """Also a change in place, and other tokens in a copy of the batch, for a pass with another prompt."""
    batch = Batch.build([[1, 2, 3, 4], [1, 2, 3, 4]], [[5, 6], [5, 7]]).to("cpu", share_prompt=True)
    assert batch.sampled.tolist() == [4, 5, 10, 11] and batch.host_lengths == [6, 6]
    assert len(batch.shared_prefixes.run) == 7                          # 1 2 3 4 5 6 and 7
    other = replace(batch, tokens=batch.tokens + torch.arange(12) // 6)
    assert other.shared_prefixes is None and len(batch.shared_prefixes.run) == 7
    longer = replace(batch, cu_seqlens=torch.tensor([0, 3, 12], dtype=torch.int32))
    assert longer.host_lengths == [3, 9] and batch.host_lengths == [6, 6]
    batch.mask[3] = True
    assert batch.sampled.tolist() == [3, 4, 5, 10, 11]
    batch.mask = batch.mask & (batch.tokens > 5)
    assert batch.sampled.tolist() == [5, 11]


@pytest.mark.parametrize("name", ["lengths", "position_ids", "row"])
def test_names_that_mean_something_else_elsewhere_are_refused(name):
    with pytest.raises(AttributeError, match=rf"^Batch has no {name}: write "):
        getattr(Batch.build([[1]], [[2]]), name)
    with pytest.raises(AttributeError, match=r"^Batch has no other$"):
        Batch.build([[1]], [[2]]).other  # noqa: B018


def test_batch_refuses_shapes_and_mixed_fields():
    batch = Batch.build([[1], [2]], [[5, 6], [7]])
    with pytest.raises(ValueError, match=r"Batch.value has shape \[2\], must be \[5\]: one per token"):
        Batch(batch.tokens, batch.mask, batch.cu_seqlens, batch.index, batch.number, value=torch.zeros(2))
    other = batch.select([0])
    other.old_logp = torch.zeros(3)
    with pytest.raises(ValueError, match=r"Batch.cat: old_logp is in some of the batches only"):
        Batch.cat([batch, other])


def test_microbatch_picks_by_global_number():
    batch = Batch.build([[1], [2], [3]], [[5, 6], [7], [8]], index=[9, 4, 2]).sort()
    assert batch.microbatch(np.array([9, 2])).tokens.tolist() == [1, 5, 6, 3, 8]
    with pytest.raises(AssertionError, match="was not exchanged by the plan"):
        batch.microbatch(np.array([4, 3]))
    dummy = batch.microbatch(np.array([], dtype=np.int64))
    assert dummy.index.tolist() == [-1]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dummy_contributes_exactly_zero(aggregation):
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)
    real = Batch.build([[1, 2], [3]], [[4, 5, 6], [7]], rollout_logps=[[-1, -2, -1], [-1]])
    alone, dummy = real.select([0, 1]), real.dummy()
    together = real.select([0, 1])
    weigh([alone], aggregation, norm_length=8)
    weigh([together, dummy], aggregation, norm_length=8)
    weight = alone.extra["weight"]
    assert torch.equal(weight, together.extra["weight"])
    total = {"token-mean": 1, "token-sum": 4, "seq-mean-token-sum": 2, "seq-mean-token-sum-norm": 2 / 8}   # 4 tokens,
    assert weight.sum().item() == pytest.approx(total.get(aggregation, 1))                                 # 2 responses
    logp = head(embed(dummy.tokens)).log_softmax(-1)[torch.arange(2), dummy.tokens]
    (logp.exp() * dummy.extra["weight"]).sum().backward()
    for parameter in (*embed.parameters(), *head.parameters()):         # a gradient is there, so collectives match
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert set(dummy.present()) == set(together.present())


# --- cost ------------------------------------------------------------------------------------------------


def tiny(name: str, **changes):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 48, "vocab_size": 61, "attn_implementation": "eager"}
    return getattr(transformers, name)(**sizes | changes)


def pairs(length: int, window: int | None) -> int:
    return sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}           # of four


@pytest.mark.parametrize(("name", "changes", "windows"), [
    ("LlamaConfig", {}, [None] * 4),
    ("Qwen3Config", {"head_dim": 16}, [None] * 4),
    ("MistralConfig", {"sliding_window": 5}, [5] * 4),
    ("Gemma2Config", {"head_dim": 16, "sliding_window": 3}, [3, None, 3, None]),
    ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, [None] * 4),
    ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}, [None] * 4),
    ("Qwen2MoeConfig", EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40},
     [None] * 4),
    ("Glm4MoeConfig", EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}, [None] * 4),
])
def test_cost_counts_what_the_model_multiplies(name, changes, windows):
    """Against the weights of the real model: each is used once a token but for the experts that are not chosen."""
    import transformers

    config = tiny(name, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    used = 0
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "embed_tokens" in name:
            continue
        used += parameter.numel() * (config.num_experts_per_tok / 4 if ".experts." in name else 1)
    if model.lm_head.weight is model.get_input_embeddings().weight:         # tied: listed once, as the embedding
        used += model.lm_head.weight.numel()
    heads = config.num_attention_heads * (config.to_dict().get("head_dim") or 8)
    lengths = np.array([1, 2, 7, 19])
    want = [2 * n * used + 4 * heads * sum(pairs(n, window) for window in windows) for n in lengths]
    assert sequence_cost(lengths, config).tolist() == want


def test_cost_agrees_with_torch_flop_counter():
    """The eager model multiplies attention's whole square, of which the mask lets about half through."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny("LlamaConfig")
    model = transformers.AutoModelForCausalLM.from_config(config)
    for length in (3, 17):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64))
        masked_out = 4 * 4 * 4 * 8 * (length * length - pairs(length, None))    # layers, 4 FLOPs, heads, head_dim
        counts = counter.get_flop_counts().items()                      # rotary angles are a product before 5.19
        rotary = sum(sum(of.values()) for name, of in counts if name.endswith("rotary_emb"))
        assert counter.get_total_flops() - rotary - masked_out == sequence_cost([length], config)[0]


def test_cost_uses_the_text_part_and_refuses_the_unknown():
    import transformers

    nested = transformers.Gemma3Config(text_config=tiny("Gemma3TextConfig").to_dict())
    assert sequence_cost([9], nested) == sequence_cost([9], nested.text_config)
    with pytest.raises(ValueError, match="layers of the kind 'chunked_attention' can be neither counted nor sharded"):
        sequence_cost([9], transformers.Llama4TextConfig())


# --- partitions ------------------------------------------------------------------------------------------


def slow_greedy(costs: list[float], bins: int) -> list[list[int]]:
    """The rule as its sentence says it; bins in the order in which they were opened."""
    parts = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        sums = [sum(costs[i] for i in part) for part in parts]
        parts[sums.index(min(sums))].append(item)
    return parts


positive = st.floats(0.01, 100).map(lambda x: x + 1e-9)


@quick
@given(st.lists(positive, max_size=40), st.integers(1, 12))
def test_partition_keeps_all_and_bounds_the_spread(costs, bins):
    parts = partition(np.array(costs), bins)
    assert len(parts) == bins
    assert sorted(itertools.chain.from_iterable(part.tolist() for part in parts)) == list(range(len(costs)))
    sums = [math.fsum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-12)
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(sums))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@quick
@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 9))
def test_partition_is_the_greedy_rule(costs, bins):
    """Whole numbers: their sums are exact, and there are many ties."""
    want = sorted(slow_greedy(costs, bins), key=lambda part: -sum(costs[i] for i in part))  # stable: ties by bin
    assert [part.tolist() for part in partition(np.array(costs), bins)] == [sorted(part) for part in want]


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 3))
@example([3, 3, 2, 2, 2], 2)                                            # the bound is reached: 7 for 6
@example([5, 5, 4, 4, 3, 3, 3], 3)                                      # and with three: 11 for 9
def test_partition_is_near_the_optimum(costs, bins):
    best = min(max(sum(cost for cost, b in zip(costs, deal) if b == number) for number in range(bins))
               for deal in itertools.product(range(bins), repeat=len(costs)))
    largest = max(sum(costs[i] for i in part) for part in partition(np.array(costs), bins))
    assert best <= largest <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


def test_partition_by_hand():
    # 8 | 7, the 6 joins the 7, the 5 joins the 8: 13 | 13, and the 4 joins the first of the two: 17 | 13
    parts = partition(np.array([8, 7, 6, 5, 4]), 2)
    assert [[8, 7, 6, 5, 4][i] for i in parts[0]] == [8, 5, 4]
    assert [[8, 7, 6, 5, 4][i] for i in parts[1]] == [7, 6]
    assert [part.tolist() for part in partition(np.array([2.0]), 3)] == [[0], [], []]


# --- plans -----------------------------------------------------------------------------------------------


def first_fit_decreasing(lengths: list[int], budget: int) -> int:
    """How many bins the textbook's heuristic needs; one longer than the budget has its own."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        for i, room in enumerate(rooms):
            if length <= room:
                rooms[i] -= length
                break
        else:
            rooms.append(max(budget - length, 0))
    return len(rooms)


def check_plan(plan: Plan, lengths, costs, num_minibatches, world_size, budget, runs=None) -> None:
    runs = [True] * len(lengths) if runs is None else runs
    seen, sizes = [], []
    for minibatch, left_out in zip(plan.minibatches, plan.left_out, strict=True):
        of_rank = [[] for _ in range(world_size)]
        for microbatch in minibatch:
            assert len(microbatch) == world_size                        # so: as many micro-batches on every rank
            for rank, responses in enumerate(microbatch):
                responses = responses.tolist()
                assert responses == sorted(responses)
                assert sum(lengths[i] for i in responses) <= budget or len(responses) == 1
                assert all(plan.rank[i] == rank for i in responses)
                of_rank[rank].append(responses)
        if len(minibatch) > 1:
            assert any(responses.size for responses in minibatch[-1])   # no micro-batch of dummies alone
        for bins in of_rank:
            load = [math.fsum(costs[i] for i in responses) for responses in bins]
            assert load == sorted(load, reverse=True)
        flat = [list(itertools.chain.from_iterable(bins)) for bins in of_rank]
        lower = max(math.ceil(sum(lengths[i] for i in share) / max(budget, *lengths, 1)) for share in flat)
        upper = max(first_fit_decreasing([lengths[i] for i in share], budget) for share in flat)
        assert lower <= len(minibatch) <= max(upper, 1)
        loads = [math.fsum(costs[i] for i in share) for share in flat]
        members = list(itertools.chain.from_iterable(flat))
        assert max(loads) - min(loads) <= max((costs[i] for i in members), default=0) * (1 + 1e-12)
        assert not any(runs[i] for i in left_out.tolist())
        assert all(runs[i] for i in members)
        assert all(plan.rank[i] == -1 for i in left_out.tolist())
        seen += members + left_out.tolist()
        sizes.append(len(members) + len(left_out))
    assert sorted(seen) == list(range(len(lengths)))                    # none lost, none doubled
    assert len(plan.minibatches) == num_minibatches
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 1000)), min_size=1, max_size=40), st.integers(1, 4),
       st.integers(1, 6), st.integers(1, 120), st.integers(0, 2**31), st.integers(0, 2**40 - 1))
@example([(40, 1.0), (30, 1.0), (20, 50.0), (10, 50.0)], 1, 1, 50, 0, -1)   # balanced costs would be 60 tokens
@example([(30, 10.0), (21, 90.0), (25, 40.0), (24, 60.0)], 1, 1, 50, 0, -1) # nor does anything fit in two
@example([(50, 3.0)] * 3 + [(1, 1.0)], 1, 2, 20, 0, -1)                     # longer than the budget: alone, each
@example([(50, 3.0)] + [(1, 1.0)] * 3, 1, 1, 20, 0, -1)                     # alone, and the three short ones together
@example([(5, 1.0)], 1, 6, 5, 0, -1)                                        # five ranks of dummies
@example([(5, 1.0), (4, 1.0)], 2, 2, 9, 0, 0)                               # nothing to train on
def test_plan_properties(items, num_minibatches, world_size, budget, seed, runs):
    lengths, costs = [n for n, _ in items], [cost for _, cost in items]
    num_minibatches = min(num_minibatches, len(items))
    runs = [bool(runs >> i & 1) for i in range(len(items))]
    sequences, arguments = Sequences(lengths, costs, runs), (num_minibatches, world_size, budget, seed)
    plan = plan_step(sequences, *arguments)
    check_plan(plan, lengths, costs, num_minibatches, world_size, budget, runs)
    again = plan_step(sequences, *arguments)
    assert plan.rank.tolist() == again.rank.tolist()
    every = [[share.tolist() for share in itertools.chain(*itertools.chain(*p.minibatches))] for p in (plan, again)]
    assert every[0] == every[1]


def test_plan_where_balance_does_not_fit():
    """Lengths of about half the budget, costs that have nothing to do with them: ranks differ in what they need."""
    raised = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths, costs = rng.integers(30, 60, 24), rng.lognormal(0, 1, 24)
        plan = plan_step(Sequences(lengths, costs), 2, 3, 100, seed)
        check_plan(plan, lengths.tolist(), costs.tolist(), 2, 3, 100)
        for minibatch in plan.minibatches:
            tokens = [sum(lengths[ranks[rank]].sum() for ranks in minibatch) for rank in range(3)]
            raised += len(minibatch) > math.ceil(max(tokens) / 100)
    assert raised > 10                                                  # the easy count was not enough


def test_plan_seed_moves_minibatches_only():
    lengths = np.arange(1, 65)
    plans = [plan_step(Sequences(lengths, lengths), 4, 2, 200, seed) for seed in (1, 2)]
    groups = [[sorted(np.concatenate(list(itertools.chain(*m))).tolist()) for m in plan.minibatches] for plan in plans]
    assert groups[0] != groups[1]
    assert groups[0][0] != list(range(16))                              # a permutation, not the order as given


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([8, 16, 64]), st.floats(0.3, 0.8))
def test_plan_imbalance_on_log_normal_lengths(seed, world_size, sigma):
    """32 samples a rank, 200 to 4,200 tokens, a 7B model's cost: the slowest rank is within 3% of the mean."""
    rng = np.random.default_rng(seed)
    lengths = 200 + np.minimum(rng.lognormal(6.5, sigma, 32 * world_size), 4000).astype(np.int64)
    costs = sequence_cost(lengths, tiny("Qwen2Config", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
                                        num_key_value_heads=4, intermediate_size=18944, vocab_size=152064))
    plan = plan_step(Sequences(lengths, costs), 1, world_size, 16384, seed)
    check_plan(plan, lengths.tolist(), costs.tolist(), 1, world_size, 16384)
    loads = np.bincount(plan.rank, costs, world_size)
    assert loads.max() / loads.mean() < 1.03
    in_order = costs.reshape(world_size, 32).sum(1)
    assert in_order.max() / in_order.mean() > 1.03                      # what balancing has to beat


@pytest.mark.parametrize("change", [
    {"costs": np.ones(3)}, {"num_minibatches": 0}, {"lengths": np.array([1, 2, 0, 1])},
    {"costs": np.array([1, math.nan, 1, 1])},
])
def test_plan_refuses(change):
    good = {"lengths": np.ones(4), "costs": np.ones(4), "num_minibatches": 1, "world_size": 1, "max_tokens": 9}
    given = good | change
    lengths, costs = given.pop("lengths"), given.pop("costs")
    with pytest.raises((AssertionError, ValueError)):
        plan_step(Sequences(lengths, costs), seed=0, **given)


@pytest.mark.parametrize("num_responses", [0, 1, 4])
def test_mini_batches_without_responses_are_planned(num_responses):
    """A fork may drop groups by their rewards, and one day all of them: each rank then runs dummies, as many."""
    plan = plan_step(Sequences(np.ones(num_responses), np.ones(num_responses)), 5, 2, 9, seed=0)
    shares = [[share for microbatch in minibatch for share in microbatch] for minibatch in plan.minibatches]
    assert [len(of_ranks) for of_ranks in shares] == [2] * 5                # one micro-batch on each of the two ranks
    assert sorted(number for of_ranks in shares for share in of_ranks for number in share) == [*range(num_responses)]


@quick
@given(samples(), st.integers(1, 3), st.integers(4, 30))
def test_plan_then_microbatches_restores_the_batch(rows, world_size, budget):
    batch = build(rows).sort()
    lengths = batch.sequence_lengths.numpy()
    plan = plan_step(Sequences(lengths, lengths), 1, world_size, budget, 0)
    microbatches = [batch.microbatch(responses) for microbatch in plan.minibatches[0] for responses in microbatch]
    assert all(len(microbatch.tokens) <= budget or len(microbatch) == 1 for microbatch in microbatches)
    assert unpack(Batch.cat(microbatches).sort()) == unpack(batch)


# --- one process -----------------------------------------------------------------------------------------


def test_gather_numbers_sorts_and_refuses():
    numbers, index = torch.tensor([[3.0, 30], [1, 10], [2, 20]]), torch.tensor([2, 0, 1])
    gathered = gather_numbers(numbers, index)
    assert gathered.tolist() == [[1, 10], [2, 20], [3, 30]]
    assert gathered.dtype == torch.float64
    with pytest.raises(AssertionError, match="once each"):
        gather_numbers(numbers, torch.tensor([2, 0, 2]))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_groups_stay_together_and_their_prompt_counts_once(world_size, max_tokens):
    rng = np.random.default_rng(0)
    prompts, groups = rng.integers(5, 30, 7).repeat(4), np.arange(28) // 4
    lengths = prompts + rng.integers(1, 12, 28)
    costs = lengths.astype(float)
    common = np.where(np.arange(28) % 4, prompts, 0)            # with the one before it in its group
    sequences = Sequences(lengths, costs, order=np.arange(28), common=common)
    plan = plan_step(sequences, 1, world_size, max_tokens, 0)
    cuts = 0
    seen = []
    for row in plan.minibatches[0]:
        for rank, responses in enumerate(row):
            seen += responses.tolist()
            assert (plan.rank[responses] == rank).all()
            held = set(groups[responses].tolist())
            cuts += len(held)
            tokens = sum(int(prompts[4 * g]) for g in held) + int((lengths - prompts)[responses].sum())
            assert tokens <= max_tokens or len(responses) == 1
    assert sorted(seen) == list(range(28))
    whole = [int(prompts[4 * g] + (lengths - prompts)[4 * g : 4 * g + 4].sum()) for g in range(7)]
    if max(whole) <= max_tokens:
        assert cuts == 7                                        # no group is in two places
    assert (cuts == 28) == (max_tokens == 1)

"""--rollout.drafts: two engines with the same weights in float32, one that drafts and one that does not."""

import contextlib
import copy
import importlib.util
import json
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.engine.base import EngineSetup, Request, RolloutConfig, SamplingConfig
from common.engine.make import check_rollout, make_engine
from common.flags.rules import check_sampling
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import Prompt
from common.speculation import drafts, verify
from envs.runtime.response import Response
from tests.conftest import launch
from tests.engine.engine_models import PROMPTS, make_model, perturb, start
from tests.engine.episode_runs import Runs, make_prompt
from tests.engine.in_flight_runs import Steps, carry
from tests.engine.test_conversation import make_tokenizer
from tests.generate import generate

pytestmark = pytest.mark.engine
SITE = Path(os.environ.get("LIGER", f"{sys.prefix}/liger"))            # Triton, of tools/setup.sh extras
ENDS = tuple(range(0, 512, 40))
# groups of four, prompts of one and of two blocks of vLLM's cache: the second ones find all but one token in it
MANY = [prompt for prompt in [*PROMPTS[:2], PROMPTS[3], [9] * 33, [8] * 65] for _ in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("llama", True, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model, world, frozen_imports):
    """Without drafts, and with; and the policy. In flight: only so that what a rollout leaves is forgotten (below)."""
    plain, policy = start(model, world)
    drafted, _ = start(model, world, drafts=4)
    yield plain, drafted, policy
    plain.close()
    drafted.close()


@pytest.fixture
def both(engines):
    """Awake, the one that drafts with an empty history."""
    plain, drafted, policy = engines
    for engine in (plain, drafted):
        engine.wake(policy)
    drafted.drafts.history.clear()
    drafted.drafts.metrics()
    yield plain, drafted
    for engine in (plain, drafted):
        engine.sleep()


class HalfRight:
    """In place of the history's guesses: what the responses go on with, as far as they are known, and at random places
    another token. So drafts of all lengths are kept and dropped, at any place."""

    def __init__(self, responses, right: float = 0.8):
        self.responses = [response.tokens for response in responses]
        self.right = right
        self.numbers = random.Random(0)

    def guess(self, key, tokens, num_prompt, most):
        ends = [tokens[n:] for n in range(len(tokens))]
        known = [text[n + len(end) :] for end in ends for text in self.responses for n in range(len(text))
                 if text[n : n + len(end)] == end]
        found = list(known[0][:most]) if known else [7] * most
        return [x if self.numbers.random() < self.right else (x + 1) % 512 for x in found]


@pytest.mark.parametrize("sampling", [
    SamplingConfig(1.0, 24), SamplingConfig(0.4, 24, stop_token_ids=ENDS), SamplingConfig(0.7, 24, top_p=0.9, top_k=20),
    SamplingConfig(0.0, 24),
])
def test_no_draft_changes_a_token_or_a_log_prob(sampling, both, monkeypatch):
    """To the last bit, whatever is drafted: by the history, nothing before it, half of it wrong, all of it wrong. Some
    responses are greedy."""
    plain, drafted = both
    seeds = [None if n % 7 == 3 else n for n in range(len(MANY))]
    want = generate(plain, MANY, seeds, sampling)
    shares = []
    for right in (None, None, 0.8, 0.0):
        with monkeypatch.context() as patch:
            if right is not None:
                patch.setattr(drafted.drafts.history, "guess", HalfRight(want, right).guess)
            assert generate(drafted, MANY, seeds, sampling) == want
        shares.append(drafted.drafts.metrics().get("rollout/spec_accept_rate", 0.0))
    assert shares[1] > 0.9                                              # the responses have been there before
    assert 0.2 < shares[2] < 0.9 and shares[3] < 0.3


def test_a_comparison_that_is_wrong_is_seen(both, monkeypatch):
    """Kept without being sampled; or with a generator that has drawn for what was dropped."""
    plain, drafted = both
    sampling = SamplingConfig(0.7, 24)
    want = generate(plain, MANY, range(len(MANY)), sampling)
    monkeypatch.setattr(drafted.drafts.history, "guess", HalfRight(want).guess)
    runner = drafted.drafts.runner
    right = runner.rejection_sampler.forward

    def keep_all(metadata, draft_probs, logits, sampling_metadata):
        output = right(metadata, draft_probs, logits, sampling_metadata)
        for row, draft in enumerate(metadata.draft_token_ids.split(metadata.num_draft_tokens)):
            output.sampled_token_ids[row, : len(draft)] = draft
        return output

    def draw_once_more(*arguments):
        for generator in arguments[-1].generators.values():
            torch.randint(9, (1,), generator=generator)
        return right(*arguments)

    for wrong in (keep_all, draw_once_more):
        monkeypatch.setattr(runner.rejection_sampler, "forward", wrong)
        found = generate(drafted, MANY, range(len(MANY)), sampling)
        assert sum(a.tokens != b.tokens for a, b in zip(found, want)) > len(MANY) / 2
    monkeypatch.setattr(runner.rejection_sampler, "forward", right)
    assert generate(drafted, MANY, range(len(MANY)), sampling) == want


def test_what_is_counted(both, monkeypatch):
    """With perfect drafts of 4: the first token comes from the prompt's pass, then 5 a pass, and the last is cut."""
    plain, drafted = both
    sampling = SamplingConfig(1.0, 22)
    want = generate(plain, MANY[:4], range(4), sampling)
    seed = next(seed for seed, response in enumerate(want) if len(set(response.tokens)) == 22)
    monkeypatch.setattr(drafted.drafts.history, "guess", HalfRight(want[seed : seed + 1], 1.0).guess)
    assert generate(drafted, MANY[:1], [seed], sampling) == want[seed : seed + 1]
    # 21 tokens in passes of 5, 5, 5, 5, 1: the last one has no room for a draft
    assert drafted.drafts.metrics() == {"rollout/spec_accept_length": 21 / 5, "rollout/spec_accept_rate": 1.0}
    assert drafted.drafts.metrics() == {}


def test_only_small_passes_have_drafts(both, monkeypatch):
    plain, drafted = both
    sampling = SamplingConfig(1.5, 24, stop_token_ids=tuple(range(0, 512, 16)))
    generate(drafted, MANY, range(len(MANY)), sampling)
    sizes = []
    guess = drafted.drafts.history.guess

    def counted(*arguments):
        sizes.append(len(drafted.drafts.scheduler.running))
        return guess(*arguments)

    monkeypatch.setattr(drafted.drafts.history, "guess", counted)
    for most in (9, 0):
        sizes.clear()
        drafted.drafts.metrics()
        monkeypatch.setattr(drafts, "FREE_ROWS", 5 * most + 4)
        found = generate(drafted, MANY, range(len(MANY)), sampling)
        assert found == generate(plain, MANY, range(len(MANY)), sampling)
        assert max(sizes, default=0) in range(most // 2, most + 1)
        assert ("rollout/spec_accept_rate" in drafted.drafts.metrics()) == (most > 0)


def test_an_aborted_response_is_the_beginning_of_itself(both):
    plain, drafted = both
    sampling = SamplingConfig(0.5, 40, stop_token_ids=ENDS)
    whole = generate(plain, MANY, range(len(MANY)), sampling)
    ended: list[int] = []
    for _ in range(2):                                                  # the second time with a history
        ended.clear()
        stopped = generate(drafted, MANY, range(len(MANY)), sampling, lambda i, _: ended.append(i),
                           stop=lambda: len(ended) > 4)
        assert 5 <= len(ended) < len(MANY) and not drafted.drafts.begun
        for i, response in enumerate(stopped):
            assert (i in ended) == (response.finish_reason != "")
            assert response.tokens == whole[i].tokens[: len(response.tokens)]
            assert response.logp == whole[i].logp[: len(response.tokens)]
    assert generate(drafted, MANY, range(len(MANY)), sampling) == whole


def test_the_history_outlives_new_weights(engines):
    """And tokens are those of the new ones."""
    plain, drafted, policy = engines
    sampling = SamplingConfig(0.4, 24)
    seen = []
    for scale in (0.3, -0.2):
        for engine in (plain, drafted):
            engine.wake(policy)
            seen.append(generate(engine, MANY, range(len(MANY)), sampling))
            engine.sleep()
        perturb(policy, scale)
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_episodes_say_the_same(both, world):
    """Three turns, and prompts that begin with earlier turns."""
    plain, drafted = both
    tokenizer = make_tokenizer("SmolLM2", 0)
    prompts = [make_prompt(tokenizer, number) for number in range(3)]
    found = []
    for engine in (plain, drafted, drafted):
        run = Runs(engine, tokenizer, world, [*engine.stop_token_ids, tokenizer.eos_token_id], max_length=256)
        samples = run("three_turns", prompts, 3, max_response_length=150, temperature=0.5, lockstep=True)
        found.append([(s.response.tokens, s.response.logp, s.response.mask, s.score) for s in samples])
    assert found[0] == found[1] == found[2]
    assert drafted.drafts.metrics()["rollout/spec_accept_rate"] > 0.5
    assert len(drafted.drafts.history.by_prompt) == 3                   # later turns are of the first one's prompt


def test_a_response_that_continues_has_the_history_of_its_prompt(both, monkeypatch):
    """Its first tokens, which are in the request's prompt, are not the prompt's."""
    _, drafted = both
    prompt = [100, 101, 102, 103, 104]
    generate(drafted, [prompt], [1], SamplingConfig(1.0, 6))
    (key,) = drafted.drafts.history.by_prompt
    seen = []
    monkeypatch.setattr(drafted.drafts.history, "guess", lambda *arguments: seen.append(arguments) or [])
    begun = Request(Prompt(prompt, "", "", {}, []), 2, Response([7, 8, 9], [0.0] * 3, ""))
    (response,) = drafted.complete([begun], SamplingConfig(1.0, 6))
    # after the first of three more tokens there is room for one draft; of the last 8 tokens 4 are the prompt's
    assert seen == [(key, [*prompt[1:], 7, 8, 9, response.tokens[3]], 4, 1)]


@pytest.fixture(scope="module")
def in_flight(model, world, frozen_imports):
    engine, policy = start(model, world, drafts=4, in_flight=2.0)
    yield engine, policy
    engine.close()


def test_in_flight_each_token_is_of_the_weights_that_sampled_it(model, in_flight):
    """New weights in mid-response. Which groups end first may differ from a run without drafts."""
    engine, policy = in_flight
    carried = carry(model, engine, policy, num_steps=6)
    assert max(response["off"] for response in carried) < 1e-4
    assert sum(response["off_now"] is not None for response in carried) > 3


def test_in_flight_a_run_that_is_resumed_repeats(in_flight):
    """What was sampled in earlier steps decides nothing, so that no checkpoint needs it: with drafts from it, other
    groups would end first."""
    engine, policy = in_flight

    def take(steps, numbers):
        found = []
        for step in numbers:
            engine.wake(policy)
            rollout = steps(engine, step)
            engine.sleep()
            found.append([(s.row, s.index, s.response.tokens, s.response.logp) for s in rollout.samples])
        return found

    whole = Steps(engine, stop_token_ids=())
    first = take(whole, range(2))
    saved = copy.deepcopy((whole.state, whole.sampler))
    want = take(whole, range(2, 4))
    again = Steps(engine, stop_token_ids=())
    again.state, again.sampler = saved
    engine.wake(policy)
    generate(engine, MANY, range(len(MANY)), SamplingConfig(1.0, 24))   # what another run would have sampled
    engine.sleep()
    assert take(again, range(2, 4)) == want != first
    assert engine.drafts.history.of_any.size > 0


@pytest.fixture(scope="module")
def small_cache(model, world, frozen_imports):
    """An engine whose cache holds four of the responses below."""
    model_config = ModelConfig(compute_dtype="float32")
    extra = json.dumps({"skip_tokenizer_init": True, "num_gpu_blocks_override": 12})
    config = RolloutConfig(max_response_length=80, max_num_seqs=16, kv_cache_gb=0.1, drafts=4, extra=extra)
    engine = make_engine(EngineSetup(
        model, read_config(model, model_config), config, model_config, world, PROMPTS[:2], [2], 256, 0))
    yield engine
    engine.close()


def test_a_cache_that_is_too_small_changes_nothing(small_cache, both, monkeypatch):
    """Requests are put back and computed again, with their drafts."""
    plain, _ = both
    put_back = []
    scheduler = small_cache.drafts.scheduler
    preempt = scheduler._preempt_request

    def counted(request, *arguments, **options):
        put_back.append(request)
        preempt(request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    small_cache.wake(plain.policy)
    sampling = SamplingConfig(0.5, 80)
    want = generate(plain, MANY, range(len(MANY)), sampling)
    for _ in range(2):
        assert generate(small_cache, MANY, range(len(MANY)), sampling) == want
    assert len(put_back) > 5
    assert small_cache.sleep()["rollout/spec_accept_length"] > 1.5


@pytest.fixture(scope="module")
def on_v2() -> dict:
    """In a process with Triton, which vLLM's CPU build must not find elsewhere."""
    env = {"TRITON_INTERPRET": "1"}
    if importlib.util.find_spec("triton") is None:
        if not (SITE / "triton").is_dir():
            pytest.skip(f"triton is not in {SITE}: tools/setup.sh extras")
        env["PYTHONPATH"] = str(SITE)
    return json.loads(launch("-m", "tests.engine.v2_worker", env=env).stdout.splitlines()[-1])


def test_the_runner_for_gpus_keeps_what_it_samples(on_v2):
    """vLLM's Triton kernels in Triton's interpreter: tokens are those of one row after the other."""
    assert on_v2["before"] == [True, False] and on_v2["after"] == [True, True]      # drafts keep vLLM's choice
    assert on_v2["replaced"] == [True, True]
    assert on_v2["same"]["different"] == 0
    assert 0.3 < on_v2["same"]["kept"] / on_v2["same"]["drafted"] < 0.8


def test_the_runner_for_gpus_reads_its_drafts(on_v2):
    assert on_v2["inputs"] == [10, 11, 12, 13, 20, 30, 31]


def test_the_runner_for_gpus_finds_what_it_asks_of_a_drafter():
    """Read from its source: what it takes from `self.speculator`, without what only models that draft have."""
    found = importlib.util.find_spec("vllm.v1.worker.gpu.model_runner")
    source = Path(found.origin).read_text()
    asked = {*re.findall(r"self\.speculator\.(\w+)", source)}
    of_models = {"dcp_size", "draft_attn_layer_names", "load_model", "model", "set_attn", "observe_verification",
                 "draft_token_confidence_probs", "prepare_watermarking", "pcp_manager"}
    assert asked - of_models == {"init_cudagraph_manager", "capture", "propose", "draft_logits", "supports_mm_inputs",
                                 "num_query_per_req", "num_extra_query_per_req"}
    assert asked - of_models <= {*dir(drafts.NoSpeculator)}


def test_another_vllm_is_refused():
    verify.check_vllm_parts(verify.V1_PARTS)
    for path, parameters in (("vllm.v1.sample.sampler.Sampler.forward", "self logits"),
                             ("vllm.v1.sample.sampler.Sampler.gone", "self"), ("vllm.v1.gone.f", "x")):
        with pytest.raises(ValueError, match=rf"vLLM 0.32.0, where {path} takes \({parameters}\), and here it takes"):
            verify.check_vllm_parts({path: parameters})


def test_an_engine_without_drafts_is_as_it_was(engines):
    plain, drafted, _ = engines
    assert plain.drafts is None and plain.llm.llm_engine.vllm_config.speculative_config is None
    config = drafted.llm.llm_engine.vllm_config
    assert config.speculative_config.num_speculative_tokens == 4 and not config.scheduler_config.async_scheduling
    assert plain.order([None] * 3) == range(3)


@pytest.mark.parametrize(("num_drafts", "max_num_seqs", "schedule"), [
    (4, 256, [(1, 32, 4), (33, 256, 0)]), (4, 32, [(1, 32, 4)]), (16, 256, [(1, 9, 16), (10, 256, 0)]),
])
def test_large_passes_have_no_drafts(num_drafts, max_num_seqs, schedule):
    options = drafts.draft_options(num_drafts, max_num_seqs)["speculative_config"]
    assert options["num_speculative_tokens_per_batch_size"] == schedule
    assert schedule[0][1] * (1 + num_drafts) <= 160


@pytest.mark.parametrize(("flags", "message"), [
    ({"drafts": -1}, "--rollout.drafts -1 must be from 0 to 16"),
    ({"drafts": 17}, "--rollout.drafts 17 must be from 0 to 16"),
    ({"drafts": 4, "engine": "hf"}, "--rollout.drafts 4 needs --rollout.engine vllm"),
    ({"drafts": 4, "extra": '{"speculative_config": {"method": "ngram"}}'}, "4 and --rollout.extra speculative_config"),
    ({"drafts": 4, "layer_types": ["full_attention", "linear_attention"]}, "this one has linear_attention layers"),
    ({"drafts": 4, "router_replay": "rollout"}, "does not go with --policy.router-replay rollout"),
    ({"drafts": 4, "vllm": "0.26.0"}, "needs vllm 0.32.*, installed is 0.26.0"),
    ({"drafts": 4}, ""),
])
def test_where_drafts_cannot_be_they_are_refused(flags, message, model, world, monkeypatch):
    hf_config = read_config(model, ModelConfig())
    if "layer_types" in flags:
        hf_config.layer_types = flags.pop("layer_types")
    if "vllm" in flags:
        installed = [flags.pop("vllm")]
        monkeypatch.setattr("common.engine.make.vllm_versions", lambda: installed)
    replay = flags.pop("router_replay", "none")
    config = RolloutConfig(max_response_length=40, **flags)
    if "extra" in flags:                                                # on a CPU that is refused in any case
        world = replace(world, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_rollout(config, hf_config, world, 200, router_replay=replay)
    if "must be" in message:
        with pytest.raises(ValueError, match=message):
            check_sampling(config)                                      # before torch is imported


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 8)])
def test_sequences_have_the_probabilities_of_transformers(temperature, top_k, world, tmp_path):
    """A model of 64 tokens, all 64 ** 3 responses, 8,000 samples, drafts from their own history: chi-square, the
    responses that are expected less than five times as one cell."""
    V = 64
    count = 8000
    torch.manual_seed(3)
    lm = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
        bos_token_id=None))
    lm.save_pretrained(tmp_path)
    config = RolloutConfig(max_response_length=3, max_num_seqs=8, kv_cache_gb=0.1, drafts=2,
                           extra='{"skip_tokenizer_init": true}')
    model_config = ModelConfig(compute_dtype="float32")
    engine = make_engine(EngineSetup(
        str(tmp_path), read_config(str(tmp_path), model_config), config, model_config, world, [[1, 2]], [], 64, 0))
    engine.wake(load_policy(str(tmp_path), model_config, world))
    prompt = [1, 5, 2, 2, 7]
    responses = generate(engine, [prompt] * count, range(count), SamplingConfig(temperature, 3, top_k=top_k))
    rates = engine.sleep()
    engine.close()

    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))                              # [V * V, 2]
    inputs = torch.cat([torch.tensor([prompt]).expand(V * V, -1), pairs], dim=1)
    with torch.no_grad():
        logits = lm.double()(input_ids=inputs).logits[:, len(prompt) - 1 :] / temperature       # [V * V, 3, V]
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    first, second, third = logits.log_softmax(-1).view(V, V, 3, V).unbind(2)                    # [V, V, V] each
    own = torch.stack([first[0, 0][:, None, None].expand(V, V, V), second[:, 0][:, :, None].expand(V, V, V), third])
    tokens = torch.tensor([response.tokens for response in responses])                          # [count, 3]
    reported = torch.tensor([response.logp for response in responses])
    assert (own[:, *tokens.T].T - reported).abs().max() < 1e-4
    expected = count * own.sum(0).exp().flatten()
    assert expected.sum() == pytest.approx(count)
    found = torch.bincount(tokens @ torch.tensor([V * V, V, 1]), minlength=V**3)
    cells = expected >= 5
    expected = torch.cat([expected[cells], expected[~cells].sum()[None]])
    found = torch.cat([found[cells], found[~cells].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(found) - 1, dtype=torch.float64)
    p = float(torch.special.gammaincc(degrees / 2, statistic / 2))      # of a chi-square at least this large
    print(f"T {temperature} top_k {top_k}: chi2 {statistic:.0f} of {degrees:.0f}, p {p:.2g}, {rates}")
    assert p > 1e-3 and degrees > 50 and rates["rollout/spec_accept_rate"] > 0.1

"""The engines on the real 135M model: agreement with the trainer, weight sync, order of calls, seeds."""

import contextlib
import copy
import inspect
import json
import os
import shutil
import sys
import types
from collections import Counter
from dataclasses import asdict, fields, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.batch import Batch
from common.dataset.store import load_prompts
from common.engine import extra as arguments
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig, validation_sampling
from common.engine.make import check_rollout, check_states, check_vllm, make_engine, stop_tokens
from common.metrics import Meter
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig, Policy
from common.model.sharding import local
from common.prompts import DataConfig
from rewards import json_object
from tests.conftest import FAST_DTYPE, TRAIN
from tests.engine.engine_models import make_model
from tests.engine.episode_runs import Runs, make_prompt
from tests.generate import generate
from tests.model import families

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("frozen_imports")]
SAMPLING = SamplingConfig(temperature=1.0, max_response_length=12)
COMPUTE = FAST_DTYPE[-1] if FAST_DTYPE else "bfloat16"      # of the real model, in engine and trainer


@pytest.fixture(scope="module")
def prompts(smollm):
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    return [p.tokens for p in load_prompts([str(TRAIN)], tokenizer, DataConfig(max_prompt_length=200))[:6]]


def start(kind, model, world, prompts, compute_dtype="bfloat16", **flags):
    model_config = ModelConfig(compute_dtype=compute_dtype)
    config = RolloutConfig(engine=kind, max_response_length=40, max_num_seqs=16, kv_cache_gb=0.25, **flags)
    stops = stop_tokens(model, AutoTokenizer.from_pretrained(model))
    hf_config = read_config(model, model_config)
    engine = make_engine(EngineSetup(model, hf_config, config, model_config, world, prompts[:2], stops, 240, 0))
    engine.probe_every = 1
    return engine


@pytest.fixture(scope="module")
def policy(smollm, world):
    return load_policy(smollm, ModelConfig(compute_dtype=COMPUTE), world)


@pytest.fixture(scope="module")
def process(world):
    """What vLLM may change of this process: its cores, number of threads, functions, environment."""
    def state():
        names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OMP_PROC_BIND")
        return (os.sched_getaffinity(0), torch.get_num_threads(), torch.set_num_threads, torch.bmm,
                [os.environ.get(name) for name in names])

    return state, state()


@pytest.fixture(scope="module")
def vllm(smollm, world, prompts, process):
    engine = start("vllm", smollm, world, prompts, COMPUTE)
    yield engine
    engine.close()


@pytest.fixture
def awake(vllm, policy):
    vllm.wake(policy)
    yield vllm
    if vllm.awake:
        vllm.sleep()


def reference_logp(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Oracle: transformers' own unpacked forward in float32, one sequence at a time."""
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def mean_prob_diff(model, prompts, responses) -> float:
    ours = torch.cat([reference_logp(model, p, r.tokens) for p, r in zip(prompts, responses)])
    theirs = torch.tensor([x for r in responses for x in r.logp], dtype=torch.float64)
    return float((ours.exp() - theirs.exp()).abs().mean())


@pytest.fixture(scope="module")
def oracle(smollm):
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)


def test_vllm_reports_the_log_probs_of_the_model_it_was_given(awake, prompts, oracle):
    responses = generate(awake, prompts, range(len(prompts)), SAMPLING)
    assert all(0 < len(r.tokens) == len(r.logp) <= 12 for r in responses)
    assert {r.finish_reason for r in responses} <= {"stop", "length"}
    assert mean_prob_diff(oracle, prompts, responses) < 0.02      # bfloat16 engine against float32
    metrics = awake.sleep()
    assert 0 < metrics["sync/probe_prob_diff"] < 0.02
    assert metrics["sync/probe_logp_diff"] > 0


def test_vllm_follows_new_weights_and_comes_back(awake, policy, prompts, monkeypatch):
    """Also the tied output head and the prefix cache: scaled embeddings change every log-prob, old tokens return."""
    engine = awake
    before = generate(engine, prompts, range(len(prompts)), SAMPLING)
    engine.sleep()
    with torch.no_grad():
        saved = [p.to_local().clone() for p in policy.parameters()]
        generator = torch.Generator().manual_seed(0)
        for p in policy.parameters():
            p.to_local().mul_(1 + 0.05 * torch.randn(p.to_local().shape, generator=generator))
    policy.version += 1
    engine.wake(policy)
    after = generate(engine, prompts, range(len(prompts)), SAMPLING)
    metrics = engine.sleep()
    assert metrics["sync/probe_prob_diff"] < 0.02
    assert [r.tokens for r in after] != [r.tokens for r in before]

    # negative control: an engine whose sync is skipped is far off, and the probe says so
    monkeypatch.setattr(engine.config, "max_probe_diff", 0.0)
    with torch.no_grad():
        for p, old in zip(policy.parameters(), saved):
            p.to_local().copy_(old)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_sync", lambda policy: {})
        engine.wake(policy)
    assert engine.sleep()["sync/probe_prob_diff"] > 5 * metrics["sync/probe_prob_diff"]

    policy.version += 1
    engine.wake(policy)
    again = generate(engine, prompts, range(len(prompts)), SAMPLING)
    assert [r.tokens for r in again] == [r.tokens for r in before]


def test_a_kept_prefix_cache_is_noticed(awake, policy, prompts, monkeypatch):
    """Keys and values of old weights, left in the cache, change the probe; with the reset they do not."""
    engine = awake
    monkeypatch.setattr(engine.config, "max_probe_diff", 0.0)
    generate(engine, prompts, range(len(prompts)), SAMPLING)
    good = engine.sleep()
    with torch.no_grad():
        for name, p in policy.lm.named_parameters():
            if "v_proj" in name:
                p.to_local().mul_(-1)
    policy.version += 1
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.wake(policy)
    kept = engine.sleep()["sync/probe_prob_diff"]
    engine.wake(policy)
    reset = engine.sleep()["sync/probe_prob_diff"]
    with torch.no_grad():
        for name, p in policy.lm.named_parameters():
            if "v_proj" in name:
                p.to_local().mul_(-1)
    policy.version += 1
    assert kept > 2 * max(reset, good["sync/probe_prob_diff"])


def test_max_probe_diff_stops_the_run(vllm, policy, monkeypatch):
    monkeypatch.setattr(vllm.config, "max_probe_diff", 1e-6)
    vllm.wake(policy)
    with pytest.raises(RuntimeError, match=r"max-probe-diff 1e-06.*does not hold the trainer's weights"):
        vllm.sleep()
    monkeypatch.setattr(vllm.config, "max_probe_diff", 0.5)
    vllm.wake(policy)
    vllm.sleep()


def test_vllm_leaves_the_process_as_it_was(awake, prompts, process):
    """It would set its own threads and cores, in which the trainer computes too."""
    state, before = process
    generate(awake, prompts, range(len(prompts)), SAMPLING)
    assert state() == before


def test_wrong_order_of_calls_is_refused(vllm, policy, prompts):
    with pytest.raises(RuntimeError, match=r"the engine is asleep: call engine\.wake\(policy\) first"):
        generate(vllm, prompts, range(len(prompts)), SAMPLING)
    vllm.wake(policy)
    with pytest.raises(RuntimeError, match="awake already"):
        vllm.wake(policy)
    vllm.sleep()
    with pytest.raises(RuntimeError, match="asleep already"):
        vllm.sleep()


def test_seeds_make_a_response_its_own(awake, prompts):
    """The same seed gives the same tokens in another order; other seeds give others; on_finish sees each once."""
    engine = awake
    seen = {}
    first = generate(engine, prompts, [7, 8, 9, 10, 11, 12], SAMPLING, on_finish=lambda i, r: seen.update({i: r}))
    again = generate(engine, prompts[::-1], [12, 11, 10, 9, 8, 7], SAMPLING)[::-1]
    other = generate(engine, prompts, [1, 2, 3, 4, 5, 6], SAMPLING)
    assert [r.tokens for r in first] == [r.tokens for r in again]
    assert [r.tokens for r in first] != [r.tokens for r in other]
    assert [seen[i] for i in range(6)] == first


def test_episodes_repeat_in_lockstep(awake, policy, smollm, world):
    """Tools of random duration; engine and trainer agree on all turns as they do on single responses."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    prompts = [make_prompt(tokenizer, number, max_sleep_s=0.1) for number in range(6)]
    run = Runs(awake, tokenizer, world, stop_tokens(smollm, tokenizer), 240)
    first, again = (
        run("three_turns", prompts, num_samples=2, lockstep=True, max_response_length=100) for _ in range(2)
    )
    assert [asdict(s.response) | {"tools": {}} for s in first] == [asdict(s.response) | {"tools": {}} for s in again]
    assert all(sample.response.num_turns == 3 for sample in first)
    responses = [sample.response for sample in first]
    batch = Batch.build(
        [sample.prompt.tokens for sample in first], [r.tokens for r in responses],
        rollout_logps=[r.logp for r in responses], masks=[r.mask for r in responses],
    )
    difference = (policy.score(batch, 1.0).exp() - batch.rollout_logp.exp())[batch.mask].abs().mean()
    assert difference < 0.012  # bfloat16; of single responses 0.007


def test_an_engine_start_leaves_the_process_as_it_was(vllm):
    assert torch.set_num_threads.__module__ == "torch" or "built-in" in repr(torch.set_num_threads)
    import os

    assert "LD_PRELOAD" not in os.environ


def test_a_stop_text_ends_a_response(vllm, policy, smollm, prompts):
    """The same response up to the token that completes the text; a text that never comes changes nothing."""
    engine = vllm
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    engine.wake(policy)
    whole = generate(engine, prompts, range(len(prompts)), SAMPLING)
    text = tokenizer.decode(whole[0].tokens[4:6])
    stopped = generate(engine, prompts, range(len(prompts)), SamplingConfig(1.0, 12, stop=(text, "never said")))
    engine.sleep()
    size = len(stopped[0].tokens)
    assert size <= 6 < len(whole[0].tokens) and stopped[0].finish_reason == "stop"
    assert stopped[0].tokens == whole[0].tokens[:size] and text in tokenizer.decode(stopped[0].tokens)
    others = [(a.tokens, b.tokens) for a, b in zip(stopped, whole) if text not in tokenizer.decode(b.tokens)]
    assert others and all(a == b for a, b in others)


def test_a_stop_text_may_be_a_special_token(vllm, policy, smollm, prompts):
    """One that is none of the model's ends; here it is likelier than the token that it takes the place of."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    (number,) = tokenizer.encode("<repo_name>")
    weight = local(policy.lm.get_output_embeddings().weight)
    vllm.wake(policy)
    usual = Counter(token for r in generate(vllm, prompts, range(len(prompts)), SAMPLING) for token in r.tokens)
    vllm.sleep()
    before = weight[number].clone()
    with torch.no_grad():
        weight[number] = 1.3 * weight[usual.most_common(1)[0][0]]
    policy.version += 1
    vllm.wake(policy)
    stopped = generate(vllm, prompts, range(len(prompts)), SamplingConfig(1.0, 12, stop=("<repo_name>",)))
    vllm.sleep()
    with torch.no_grad():
        weight[number] = before
    policy.version += 1
    ended = [response for response in stopped if number in response.tokens]
    assert ended and all(r.tokens.index(number) == len(r.tokens) - 1 for r in ended)
    assert {r.finish_reason for r in ended} == {"stop"}


def test_validation_samples_by_its_own_flags():
    config = RolloutConfig(temperature=0.7, top_p=0.9, val_top_k=7, max_response_length=5, stop=("a",),
                           in_flight=1.5)
    sampling = validation_sampling(config, 0.2)
    found = {field.name: getattr(sampling, field.name) for field in fields(SamplingConfig)}
    assert found == asdict(SamplingConfig(0.2, 5, top_k=7, stop=("a",)))


def test_extra_arguments_reach_vllm_as_json():
    given = {"max_logprobs": 3, "kv_cache_dtype": "auto"}
    assert json_object("--rollout.extra", json.dumps(given)) == given
    for extra in ("max_logprobs=3", "[1]"):
        with pytest.raises(ValueError, match="must be a JSON object"):
            json_object("--rollout.extra", extra)


@pytest.mark.parametrize(("given", "device", "message"), [
    ({"max_num_batched_token": 1}, "cuda", "vLLM's LLM.* has no argument max_num_batched_token, did you mean max_"),
    ({"nonsense": 1}, "cpu", "has no argument nonsense$"),
    ({"quantisation": "fp8"}, "cpu", "has no argument quantisation, did you mean quantization"),
    ({"seed": 1}, "cpu", "seed 1 is what --seed decides"),
    ({"max_model_len": 9}, "cuda", "max_model_len 9 is what --rollout.max-response-length and --data"),
    ({"kv_cache_memory_bytes": 9}, "cpu", "is what --rollout.kv-cache-gb decides"),
    ({"enforce_eager": True}, "cuda", "is what --rollout.enforce-eager decides"),
    ({"logprobs_mode": "raw_logprobs"}, "cuda", "logprobs_mode raw_logprobs cannot be set, because the trainer"),
    ({"load_format": "auto"}, "cpu", "cannot be set, because weights come from the trainer"),
    ({"hf_overrides": {"rope_theta": 1}}, "cuda", "must read the same model"),
    ({"kv_offloading_size": 4}, "cuda", "keys and values that earlier weights computed"),
    ({"override_generation_config": {"eos_token_id": 3}}, "cuda", "what ends a response must be known"),
    ({"speculative_config": {"method": "ngram"}}, "cpu", "on a CPU vLLM's rejection sampler reads memory"),
    ({"spec_method": "ngram"}, "cpu", "on a CPU vLLM's rejection sampler"),
    ({"enable_chunked_prefill": True}, "cpu", "on a CPU prompts are computed whole"),
    ({"speculative_config": {"method": "ngram"}, "kv_cache_memory_bytes": 9}, "cuda", ""),
    ({"max_num_batched_tokens": 8192, "quantization": "fp8_per_tensor", "moe_backend": "cutlass"}, "cuda", ""),
    ({"attention_backend": "FLASH_ATTN", "compilation_config": {}, "kv_cache_dtype": "fp8"}, "cuda", ""),
    ({"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_logprobs": 3}, "cpu", ""),
])
def test_extra_arguments_that_break_what_the_trainer_relies_on_are_refused(given, device, message, smollm, world):
    hf_config, world = read_config(smollm, ModelConfig()), replace(world, device=torch.device(device))
    config = RolloutConfig(max_response_length=40, extra=json.dumps(given))
    with pytest.raises(ValueError, match=f"--rollout.extra: .*{message}") if message else contextlib.nullcontext():
        check_rollout(config, hf_config, world, 200)


def test_every_argument_that_the_engine_sets_itself_is_refused(smollm, world, prompts, monkeypatch):
    """And all of those that are refused are vLLM's."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    given = []
    monkeypatch.setattr("vllm.LLM", lambda **options: given.append(options) or sys.exit())
    with pytest.raises(SystemExit):
        start("vllm", smollm, world, prompts, extra='{"max_logprobs": 3}')
    on_device = arguments.ON_DEVICE
    refused = {*arguments.DECIDED, *arguments.FIXED, *arguments.FIXED_ON_CPU, *on_device["cpu"]}
    assert given[0].keys() - refused == {"max_logprobs"} and given[0]["config_format"] == "hf"
    names = {name for name, parameter in inspect.signature(LLM).parameters.items() if parameter.kind != 4}
    names |= {field.name for field in fields(EngineArgs) if not field.name.startswith("_")}
    assert arguments.arguments_of_vllm() == names
    assert refused | on_device["cuda"].keys() <= names


def hub_model(folder, monkeypatch, **files: dict) -> str:
    """A model that is in the hub's cache and not in a folder of its own."""
    snapshot = folder / "models--someone--model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (folder / "models--someone--model/refs").mkdir()
    (folder / "models--someone--model/refs/main").write_text("0123")
    for name, content in files.items():
        (snapshot / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(folder), raising=False)
    return "someone/model"


LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(("files", "ids"), [
    ({"config": {}}, [7]),
    ({"config": {}, "generation_config": {"eos_token_id": [3, 7]}}, [3, 7]),
    ({"config": {}, "generation_config": {"eos_token_id": 9}}, [7, 9]),
    ({"config": {}, "generation_config": {}}, [7]),
    ({"config": LLAMA | {"eos_token_id": 9}}, [7, 9]),
    ({"config": LLAMA | {"eos_token_id": [8, 9]}}, [7, 8, 9]),
    ({"config": LLAMA | {"eos_token_id": None}}, [7]),
    ({"config": LLAMA}, [2, 7]),                                        # the family's default
    ({"config": {"model_type": "qwen2"}}, [7]),                         # which others do not have
    ({"config": LLAMA | {"eos_token_id": 9}, "generation_config": {"temperature": 0.6}}, [7]),
    ({"config": {"model_type": "qwen2_5_vl", "text_config": {"eos_token_id": 9}}}, [7, 9]),
    ({"config": {"model_type": "gemma3", "eos_token_id": [1, 106]}}, [1, 7, 106]),
    ({"config": {"model_type": "of_its_own_code", "auto_map": {}, "eos_token_id": 9}}, [7, 9]),
])
def test_stop_tokens_of_a_hub_model(files, ids, tmp_path, monkeypatch):
    """As the engine itself finds them beside those that it is given: what ends a response there is in the list."""
    from vllm.transformers_utils.config import try_get_generation_config

    model = hub_model(tmp_path, monkeypatch, **files)
    assert stop_tokens(model, types.SimpleNamespace(eos_token_id=7)) == ids
    if files["config"].get("model_type") in ("llama", "qwen2", "qwen2_5_vl", "gemma3"):     # that vLLM can read
        eos = try_get_generation_config(model, trust_remote_code=False).eos_token_id
        assert {7} | (set(eos) if isinstance(eos, list) else {eos} - {None}) == set(ids)


def test_a_damaged_generation_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"cannot read the end tokens of {tmp_path} from its generation_config.json"):
        stop_tokens(str(tmp_path), types.SimpleNamespace(eos_token_id=7))


def test_a_model_without_an_end_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names an end token"):
        stop_tokens(str(tmp_path), types.SimpleNamespace(eos_token_id=None))


def test_a_probe_fits_into_the_shortest_responses(world, tmp_path):
    """--rollout.max-response-length 3: the cache has room for the longest prompt and three tokens."""
    model, model_config = make_model("llama", True, tmp_path), ModelConfig(compute_dtype="float32")
    config = RolloutConfig(engine="hf", max_response_length=3)
    prompts = [[5] * 9, [7] * 4]
    setup = EngineSetup(model, read_config(model, model_config), config, model_config, world, prompts, [2], 12, 0)
    engine = make_engine(setup)
    engine.wake(load_policy(model, model_config, world))
    assert [len(r.tokens) for r in generate(engine, prompts, [0, 1], config)] == [3, 3]
    assert engine._sample_probe().sequence_lengths.tolist() == [9 + 3, 4 + 3]
    assert engine.sleep()["sync/probe_logp_diff"] < 2e-5


@pytest.mark.parametrize(("flags", "probed"), [
    ({}, [0, 10]), ({"top_p": 0.9}, range(12)), ({"in_flight": 1.5}, range(12)),
])
def test_the_first_sleep_has_a_probe_and_then_every_tenth(tiny_llama, world, flags, probed):
    """With a filter, or tokens of older weights, each one has: the step's own are of another distribution then."""
    model_config = ModelConfig(compute_dtype="float32")
    config = RolloutConfig(engine="hf", max_response_length=2, **flags)
    hf_config = read_config(tiny_llama, model_config)
    engine = make_engine(EngineSetup(tiny_llama, hf_config, config, model_config, world, [[5, 17, 300]], [2], 12, 0))
    policy = load_policy(tiny_llama, model_config, world)
    rows = []
    for _ in range(12):
        policy.version += 1
        engine.wake(policy)
        rows.append(engine.sleep())
    for name in ("sync/probe_prob_diff", "sync/probe_logp_diff", "timing_s/probe"):
        assert [number for number, row in enumerate(rows) if name in row] == [*probed]


def test_seconds_of_the_probe_are_not_those_of_the_sleep(tiny_llama, world, monkeypatch):
    """2 s to sample it, 10 to fall asleep, 3 to score it; the next sleep has none."""
    engine, policy = start("hf", tiny_llama, world, [[5, 17, 300]]), load_policy(tiny_llama, ModelConfig(), world)
    engine.probe_every = 2
    clock = [100.0]

    def takes(seconds: float, result):
        return lambda *_: clock.append(clock[-1] + seconds) or copy.copy(result)

    for name, seconds, result in (("_sample_probe", 2, 1), ("_sleep", 10, {}), ("_check_probe", 3, {})):
        monkeypatch.setattr(engine, name, takes(seconds, result))
    seen = []
    for _ in range(2):
        engine.wake(policy)
        with monkeypatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: clock[-1])
            seen.append(engine.sleep())
    assert seen == [{"timing_s/sleep": 10.0, "timing_s/probe": 5.0}, {"timing_s/sleep": 10.0}]


def test_what_was_sampled_takes_the_place_of_the_probe(tiny_llama, world):
    """Compared before the first update, by the meter's mean over tokens; if there were none, the next sleep probes."""
    engine, policy = start("hf", tiny_llama, world, [[5, 17, 300, 41]]), load_policy(tiny_llama, ModelConfig(), world)
    engine.probe_every = 10
    wrong, right, nothing = Meter(), Meter(), Meter()
    for meter, difference in ((wrong, 0.3), (right, 0.01)):             # means of 0.2 and 0.0067
        values = torch.tensor([difference, difference, 0.0, 9.0])
        meter.mean("_training/rollout_probs_diff_fresh", values, torch.tensor([True, True, True, False]))
    engine.wake(policy)
    assert "sync/probe_prob_diff" in engine.sleep()
    engine.check_sampled(policy, right)
    with pytest.raises(RuntimeError, match=r"is 0\.2000 on the tokens of this step, above --rollout\.max-probe-diff 0"):
        engine.check_sampled(policy, wrong)
    engine.check_sampled(Policy(policy.lm), wrong)                      # another model, and a later update
    policy.version += 1
    engine.check_sampled(policy, wrong)
    engine.wake(policy)
    assert "sync/probe_prob_diff" not in engine.sleep()
    engine.check_sampled(policy, nothing)
    engine.wake(policy)
    assert "sync/probe_prob_diff" in engine.sleep()


def test_a_weight_that_is_not_sent_to_the_hf_engine_stops_the_run(tiny_llama, world, monkeypatch):
    engine, policy = start("hf", tiny_llama, world, [[5, 17, 300, 41]]), load_policy(tiny_llama, ModelConfig(), world)
    read, name = policy.full_tensors, "model.norm.weight"
    monkeypatch.setattr(policy, "full_tensors", lambda dtype: [named for named in read(dtype) if named[0] != name])
    with pytest.raises(RuntimeError, match=r"checksums differ.* in 1 tensors: model\.norm\.weight"):
        engine.wake(policy)


def test_the_hf_engine_stops_between_tokens(tiny_llama, world):
    prompts = [[5, 17, 300, 41], [7] * 9]
    engine = start("hf", tiny_llama, world, prompts)
    engine.wake(load_policy(tiny_llama, ModelConfig(), world))
    answers = iter([False] * 3 + [True] * 100)
    sampling = SamplingConfig(1.0, 40)
    stopped = generate(engine, prompts[:1] * 2, [0, 1], sampling, stop=lambda: next(answers))
    whole = generate(engine, prompts[:1] * 2, [0, 1], sampling)
    assert [(len(r.tokens), r.finish_reason) for r in stopped] == [(3, "")] * 2
    assert [(len(r.tokens), r.finish_reason) for r in whole] == [(40, "length")] * 2
    assert [r.tokens for r in stopped] == [r.tokens[:3] for r in whole]
    engine.sleep()


def test_the_hf_engine_has_the_end_tokens_that_it_is_given(tiny_llama, world, tmp_path):
    """generate() would take those of config.json. One of the prompts is a single token, which has no cache."""
    prompts, found = [[5], [7] * 9], []
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": [*range(3, 2000)]}
    (model / "config.json").write_text(json.dumps(config))
    for path in (tiny_llama, str(model)):
        engine = start("hf", path, world, prompts, "float32")
        engine.wake(load_policy(path, ModelConfig(compute_dtype="float32"), world))
        found.append(generate(engine, prompts, [0, 1], SamplingConfig(1.0, 30)))
        engine.sleep()
    assert found[0] == found[1]
    lm = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for prompt, response in zip(prompts, found[0]):
        expected = reference_logp(lm, prompt, response.tokens)
        assert torch.allclose(torch.tensor(response.logp, dtype=torch.float64), expected, rtol=0, atol=2e-5)


def test_the_probe_is_short_whatever_the_prompts(tiny_llama, world):
    """It is scored in one pass, without a token budget."""
    engine = start("hf", tiny_llama, world, [[5, 17, 300, 41] * 200, [7] * 9], "float32")
    engine.wake(load_policy(tiny_llama, ModelConfig(compute_dtype="float32"), world))
    assert engine.probe == [[5, 17, 300, 41] * 64, [7] * 9]
    assert (engine._sample_probe().sequence_lengths <= torch.tensor([256 + 8, 9 + 8])).all()
    assert engine.sleep()["sync/probe_logp_diff"] < 2e-5


def test_a_probe_that_is_nan_or_far_off_stops_by_default(tiny_llama, world):
    policy = load_policy(tiny_llama, ModelConfig(), world)
    engine = start("hf", tiny_llama, world, [[5, 17, 300, 41], [7] * 9])
    engine.wake(policy)
    batch = engine._sample_probe()
    assert engine._check_probe(batch)["sync/probe_prob_diff"] < 0.02
    for wrong in (torch.nan, 0.0):                                      # 0: the engine says it was certain
        batch.rollout_logp.fill_(wrong)
        with pytest.raises(RuntimeError, match=r"max-probe-diff 0\.1: the engine does not hold the trainer's weights"):
            engine._check_probe(batch)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temperature": 0.0}, r"--rollout.temperature 0.0 must be above 0"),
        ({"temperature": 2.5}, r"--rollout.temperature 2.5: vLLM takes at most 2"),
        ({"tp": 2}, r"world size 1 and the model.s . attention heads must be multiples of --rollout.tp 2"),
        ({"max_response_length": 0}, "--rollout.max-response-length 0 must be at least 1"),
        ({"max_response_length": 9000}, r"exceed the model's context of 8192 tokens: lower --rollout.max-resp"),
        ({"top_p": 0.9, "top_k": 3}, r"top-p 0.9 and --rollout.top-k 3: .* biased unless .* engine correction"),
        ({"top_k": 9}, r"--rollout.top-k 9: responses then come from a filtered distribution"),
        ({"top_p": 0.0}, r"--rollout.top-p 0.0 must be in \(0, 1\]"),
        ({"in_flight": 0.9}, r"--rollout.in-flight 0.9 must be from 1 to 2"),
        ({"in_flight": 2.5}, r"--rollout.in-flight 2.5 must be from 1 to 2"),
        ({"in_flight": 1.5, "max_staleness": -1}, r"--rollout.max-staleness -1 at least 0"),
        ({"in_flight": 1.5, "stop": ("a",)}, r"--rollout.in-flight 1.5 does not go with --rollout.stop"),
        ({"engine": "hf", "in_flight": 1.5}, r"--rollout.in-flight 1.5 needs --rollout.engine vllm"),
        ({"engine": "hf", "stop": ("a",)}, r"--rollout.stop \('a',\) needs --rollout.engine vllm"),
        ({"engine": "hf", "extra": '{"a": 1}'}, r'--rollout.extra {"a": 1} needs --rollout.engine vllm'),
    ],
)
def test_what_cannot_work_is_refused_before_the_engine_starts(smollm, world, flags, message):
    config = RolloutConfig(**({"max_response_length": 40} | flags))
    with pytest.raises(ValueError, match=message):
        check_rollout(config, read_config(smollm, ModelConfig()), world, 200)


@pytest.mark.parametrize(("flags", "samplers", "message"), [
    ({}, 0, "with vLLM on a CPU the experts"), ({"engine": "hf"}, 2, "with --samplers the experts"),
    ({"tp": 3, "in_flight": 1.5}, 3, "with .*in-flight 1.5 and .*tp 3 and --samplers the"),
])
def test_what_tells_no_experts_is_refused(smollm, world, flags, samplers, message):
    config, world = RolloutConfig(**flags, max_response_length=40), replace(world, size=3, num_samplers=samplers)
    with pytest.raises(ValueError, match=f"--policy.router-replay rollout: {message}.* engine chose are not all known"):
        check_rollout(config, read_config(smollm, ModelConfig()), world, 200, True, "rollout")


@pytest.mark.parametrize("has_correction", [False, True])
def test_in_flight_without_correction_is_said(has_correction, smollm, world, capsys):
    config = RolloutConfig(max_response_length=40, in_flight=1.5)
    check_rollout(config, read_config(smollm, ModelConfig()), world, 200, has_correction)
    said = "--rollout.in-flight 1.5 without engine correction: tokens that older weights sampled are trained as if"
    assert (said in capsys.readouterr().out) == (not has_correction)


@pytest.mark.parametrize(("installed", "said"), [
    ("0.11.2", r"\['0.11.2'\]"), ("0.27.0", r"\['0.27.0'\]"), ("0.33.0", r"\['0.33.0'\]"), ("", "none"),
])
def test_other_vllm_versions_are_refused(installed, said, smollm, world, monkeypatch):
    hf_config = read_config(smollm, ModelConfig())
    found = [types.SimpleNamespace(version=installed)] if installed else []
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: found if name == "vllm" else [])
    with pytest.raises(ValueError, match=rf"needs vllm 0.26.\* or 0.32.\*, installed is {said}: install"):
        check_rollout(RolloutConfig(), hf_config, world, 200)


@pytest.mark.parametrize(("installed", "has_torchvision"), [("0.26.0", True), ("0.32.0", False)])
def test_vllm_that_reads_no_images_is_refused(installed, has_torchvision, monkeypatch):
    """Version 0.26 has other options for them, and imports torchvision, too."""
    monkeypatch.setattr("importlib.metadata.distributions",
                        lambda name: [types.SimpleNamespace(version=installed)] if name == "vllm" else [])
    monkeypatch.setattr("common.engine.make.is_torchvision_available", lambda: has_torchvision)
    check_vllm(RolloutConfig(), "qwen2")
    with pytest.raises(ValueError, match=rf"images need vLLM 0.32 \(here is {installed}\) and torchvision"):
        check_vllm(RolloutConfig(), "qwen2_5_vl")


@pytest.mark.parametrize(("family", "device", "message"), [
    ("lfm2", "cpu", "vLLM's CPU build does not run a lfm2 model as the trainer does"),
    ("kimi_linear", "cpu", "vLLM's CPU build does not run a kimi_linear model"),
    ("lfm2_moe", "cuda", "vLLM's lfm2_moe takes experts under other names"),
    ("lfm2", "cuda", None), ("nemotron_h", "cpu", None), ("llama", "cpu", None),
])
def test_states_that_vllm_computes_in_another_way_are_refused(family, device, message):
    if message is None:
        check_states(families.config_of(family), device)
        return
    with pytest.raises(ValueError, match=message + ".*: use --rollout.engine hf"):
        check_states(families.config_of(family), device)


@pytest.mark.parametrize("installed", ["0.26.0", "0.32.0+cu130"])
def test_two_vllm_versions_are_taken(installed, smollm, world, monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions",
                        lambda name: [types.SimpleNamespace(version=installed)] if name == "vllm" else [])
    check_rollout(RolloutConfig(max_response_length=40), read_config(smollm, ModelConfig()), world, 200)

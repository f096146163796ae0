"""Weight sync into real vLLM, family by family: the engine must follow the trainer, and be caught where it does not."""

import gc
import json
import math
import os
import tempfile
import threading
from datetime import timedelta

import psutil
import pytest
import torch

from common.batch import Batch
from common.engine.base import ASK_EVERY, SamplingConfig
from common.forward.vision import auto_class
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.sync import weights
from tests.conftest import VLLM, launch
from tests.engine import engine_models
from tests.engine.engine_models import PROMPTS, SEEDS, make_model, perturb, round_trip, start
from tests.generate import generate
from tests.gpu import check_engine
from tests.model import families, scan_families

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("frozen_imports")]


def check(seen: dict, num_checksums: int) -> None:
    """float32 on both sides: log-probs within rounding, greedy tokens equal, new tokens after new weights only."""
    assert max(seen["logp"]) < 2e-5 and max(seen["probe"]) < 2e-5
    assert seen["greedy"] == [0, 0]
    assert seen["checksums"] == [num_checksums] * 2
    assert seen["after"] != seen["before"] == seen["again"]


# tensors of the two layers; outside are the embedding, the last norm and an untied head
NUM_IN_LAYERS = {"llama": 18, "qwen2": 24, "qwen3": 22, "gemma": 18, "gemma3": 26, "qwen3_moe": 22, "glm4_moe": 22}


def num_compared(family: str, tied: bool) -> int:
    """All tensors that are sent."""
    return NUM_IN_LAYERS[family] + (2 if tied else 3)


# an engine costs about 9 CPU-seconds: six of the thirteen here, all with ENGINE_FAMILIES=all
EVERY = [(family, tied) for family in NUM_IN_LAYERS for tied in (True, False) if (family, tied) != ("glm4_moe", True)]
SOME = [("llama", False), ("qwen2", True), ("qwen3", False), ("gemma", True), ("qwen3_moe", True), ("glm4_moe", False)]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "tied"), EVERY if os.environ.get("ENGINE_FAMILIES") == "all" else SOME)
def test_vllm_follows_every_family_and_comes_back(family, tied, world, tmp_path):
    seen = round_trip(make_model(family, tied, tmp_path), world)
    check(seen, num_compared(family, tied))
    assert sorted(seen["finished"]) == list(range(len(PROMPTS)))


@pytest.mark.parametrize("family", [
    "glm", pytest.param("ernie4_5_moe", marks=pytest.mark.sweep), pytest.param("mixtral", marks=pytest.mark.sweep),
])
def test_vllm_follows_families_that_it_takes_in_another_form(family, world, tmp_path):
    """Mixtures whose experts it loads one by one, as they are published, and a family that it runs with transformers'
    own model: the class of that model, which is the trainer's too, stays as it was."""
    config = scan_families.for_vllm(family)
    families.save(config, tmp_path)
    kind = type(auto_class(config).from_config(config).model)
    before = kind.__bases__, kind.__init__, kind.__call__
    seen = round_trip(str(tmp_path), world)
    assert max(seen["logp"]) < 2e-5 and max(seen["probe"]) < 2e-5 and seen["greedy"] == [0, 0]
    assert seen["after"] != seen["before"] == seen["again"]
    assert (kind.__bases__, kind.__init__, kind.__call__) == before


def test_what_the_engine_keeps_in_float32_beside_bfloat16(world, tmp_path):
    """The routers of GLM-4.5 are compared after a cast."""
    engine, policy = start(make_model("glm4_moe", False, tmp_path), world, dtype="bfloat16")
    for _ in range(4):
        assert engine.wake(policy)["sync/num_checksums"] == 25
        assert engine.sleep()["sync/probe_logp_diff"] < 0.05
        perturb(policy, 0.3)
    engine.close()


def test_a_head_that_the_engine_does_not_tie_is_an_error(world, tmp_path):
    """vLLM 0.32 gives this family a head of its own in any case; the trainer sends a tied one once."""
    engine, policy = start(make_model("glm4_moe", True, tmp_path), world)
    assert engine.expert_layers == [1]                                  # the first is dense
    with pytest.raises(RuntimeError, match=r"goes into 1 weights of the engine.* \(lm_head\.weight\)"):
        engine.wake(policy)
    engine.close()


def test_policies_take_turns_and_each_is_sampled_with_its_own_weights(world, tmp_path):
    """Two policies with the same number of updates, and one that changes without an update: the engine's log-probs are
    those of the policy that it was given."""
    model = make_model("llama", False, tmp_path)
    engine, first = start(model, world, kind="hf")
    engine.probe_every = 10
    second = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    perturb(second, 0.5)
    second.version = first.version
    drawn = []
    for turn, policy in enumerate([first, second, second, first, first, second]):
        engine.wake(policy)
        samples = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 6))
        probed = engine.sleep()
        batch = Batch.build(PROMPTS, [x.tokens for x in samples], rollout_logps=[x.logp for x in samples])
        assert (policy.score(batch, 1.0) - batch.rollout_logp)[batch.mask].abs().max() < 2e-5, turn
        assert ("sync/probe_prob_diff" in probed) == (turn in (0, 1, 3, 5))     # of each policy that is given anew
        drawn.append([x.tokens for x in samples])
        if turn == 3:
            perturb(first, 0.5)
            first.version -= 1                                                  # as after first.lerp_(...)
    assert drawn[0] == drawn[3] != drawn[4] and drawn[1] == drawn[2] == drawn[5] != drawn[0]
    engine.close()


def test_the_probe_sees_experts_in_another_order(world, tmp_path, monkeypatch):
    engine, policy = start(make_model("qwen3_moe", True, tmp_path), world, kind="vllm")
    assert engine.expert_layers == [0, 1]
    load = engine.model.load_weights

    def turned(name, tensor):
        return (name, tensor.roll(1, 0)) if tensor.dim() == 3 else (name, tensor)

    monkeypatch.setattr(engine.model, "load_weights", lambda tensors: load(turned(*x) for x in tensors))
    engine.wake(policy)
    assert engine.sleep()["sync/probe_logp_diff"] > 1e-3
    engine.close()


@pytest.mark.parametrize("family", [*NUM_IN_LAYERS, "gemma2"])
def test_hf_follows_every_family_and_comes_back(family, world, tmp_path):
    seen = round_trip(make_model(family, family == "llama", tmp_path), world, kind="hf")
    assert max(seen["logp"]) < 2e-5 and max(seen["probe"]) < 2e-5
    assert seen["greedy"] == [0, 0]
    assert seen["after"] != seen["before"] == seen["again"]


@pytest.mark.parametrize("drafts", [0, pytest.param(3, marks=pytest.mark.sweep)])
def test_two_ranks_are_one_engine(drafts, tmp_path):
    """tp 2: both ranks return the same responses, which are right, and announce each as it ends. What
    episodes say reaches both ranks at the same step. Both draft the same tokens, or they would wait for each other."""
    names = ("llama", "qwen3") if os.environ.get("ENGINE_FAMILIES") == "all" else ("qwen3",)
    models = [make_model(family, family == "llama", tmp_path) for family in names]
    before = {*os.listdir("/dev/shm")}                                  # also of other people's jobs
    with tempfile.TemporaryDirectory() as files:                        # the paths of sockets must be short
        launch("tests/engine/engine_models.py", tmp_path, drafts, *models, ranks=2, warm=VLLM, env={"TMPDIR": files})
        left = [name for name in os.listdir(files) if not name.startswith("plainrl_")]     # they are just being removed
    left += [name for name in os.listdir("/dev/shm") if "cpushm" in name and name not in before]
    assert left == []
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for seen, other, family in zip(*ranks, names):
        check(seen, num_compared(family, family == "llama"))
        stopped = seen.pop("stopped"), other.pop("stopped")
        assert stopped[0]["sampled"] == stopped[1]["sampled"]
        num_sampled = sum(tokens is not None for tokens in stopped[0]["sampled"])
        print(f"{num_sampled} of 64 responses sampled, {stopped[0]['num_before']} before the stop")
        assert stopped[0]["num_before"] <= num_sampled < 32
        num_steps = stopped[0]["calls"]["step"]
        assert num_steps % ASK_EVERY == 0 and stopped[0]["calls"]["from_first_rank"] == num_steps // ASK_EVERY + 1
        assert "checksums differ" in seen["verdict"] and "model.norm.weight" in seen["verdict"]
        played = seen.pop("episodes"), other.pop("episodes")
        assert [[episode["index"] for episode in found] for found in played] == [[0, 2], [1]]  # each scores its share
        for episode in [*played[0], *played[1]]:
            assert episode["turns"] == 3 and episode["end"] == "done" and episode["off"] < 2e-5
        carried = [seen.pop("carried"), other.pop("carried")]  # --rollout.in-flight: of a group, each scores one
        assert [len(found) for found in carried] == [16, 16]
        assert all(r["off"] < 1e-4 for found in carried for r in found)
        assert max(len(set(r["versions"])) for r in carried[0]) > 1
        assert [r["row"] for r in carried[0]] == [r["row"] for r in carried[1]]
        announced = seen.pop("finished"), other.pop("finished")
        assert [sorted(x) for x in announced] == [[0, 1, 2, 3, 4]] * 2
        assert seen == other


@pytest.fixture(scope="module")
def awake(world, tmp_path_factory):
    engine, policy = start(make_model("llama", True, tmp_path_factory.mktemp("model")), world)
    yield engine, policy
    engine.close()


def test_a_tensor_that_did_not_arrive_stops_the_run(awake, monkeypatch):
    engine, policy = awake
    policy.version += 1
    load = engine.model.load_weights

    def load_and_spoil(tensors):
        loaded = load(tensors)
        engine.model.model.norm.weight.data.add_(1)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "load_weights", load_and_spoil)
        with pytest.raises(RuntimeError, match=r"checksums differ.* in 1 tensors: model\.norm\.weight"):
            engine.wake(policy)
    with monkeypatch.context() as patch:
        pack = weights.pack_on_cpu

        def change_and_pack(model):
            model.model.layers[0].self_attn.o_proj.weight.data.mul_(2)
            pack(model)

        patch.setattr(weights, "pack_on_cpu", change_and_pack)
        engine.wake(policy)                                             # the change is behind the checksum ...
    assert engine.sleep()["sync/probe_logp_diff"] > 1e-3                # ... so it is the probe that sees it
    policy.version += 1
    engine.wake(policy)
    assert engine.sleep()["sync/probe_logp_diff"] < 2e-5


@pytest.mark.parametrize("name", [
    "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight",
])
def test_a_tensor_that_is_not_sent_stops_the_sync(awake, monkeypatch, name):
    """A packed matrix, and weights that are not packed; a later load is complete again."""
    engine, policy = awake
    send = policy.full_tensors
    policy.version += 1
    with monkeypatch.context() as patch:
        patch.setattr(policy, "full_tensors", lambda *args: ((n, t) for n, t in send(*args) if n != name))
        with pytest.raises(RuntimeError, match=rf"nothing that the trainer sends goes into 1 weights .*\({name}\)"):
            engine.wake(policy)
    engine.wake(policy)
    assert engine.sleep()["sync/probe_logp_diff"] < 2e-5


def test_what_stop_left_is_not_in_the_next_rollout(awake):
    engine, policy = awake
    engine.wake(policy)
    seen = []
    sampling = SamplingConfig(1.0, 20)
    generate(engine, PROMPTS * 4, range(20), sampling, lambda i, _: seen.append(i), stop=lambda: len(seen) > 1)
    assert len(seen) < 20 and not engine.llm.llm_engine.has_unfinished_requests()
    before, after = (generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12)) for _ in range(2))
    engine.sleep()
    assert [r.tokens for r in before] == [r.tokens for r in after]


def test_cycles_leave_nothing_behind(awake):
    """Sync, generate, sleep: threads, open files and memory stay where they were. ENGINE_CYCLES sets how many."""
    engine, policy = awake
    cycles, process, sizes = int(os.environ.get("ENGINE_CYCLES", 12)), psutil.Process(), []
    for _ in range(cycles):
        policy.version += 1
        engine.wake(policy)
        generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12))
        engine.sleep()
        gc.collect()
        sizes.append((threading.active_count(), process.num_threads(), process.num_fds(), process.memory_info().rss))
    half = len(sizes) // 2
    assert {x[:3] for x in sizes[half:]} == {sizes[half][:3]}
    grown = sizes[-1][3] - sizes[half][3]
    print(f"{cycles} cycles: {sizes[-1][1]} threads, {sizes[-1][2]} files, last half {grown / 2**20:+.1f} MiB of RSS")
    assert grown < 16 * 2**20


FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.8}]


def filtered_by_hand(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0) -> dict[int, float]:
    """Token -> log-prob in the filtered distribution, in float64, one rule after the other."""
    weights = dict(enumerate((logits.double() / temperature).softmax(-1).tolist()))
    best = sorted(weights, key=weights.get, reverse=True)[: top_k or None]
    total, kept, mass = sum(weights[i] for i in best), [], 0.0
    for i in best:
        if mass < top_p * total:
            kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return {i: math.log(weights[i] / total) for i in kept}


def engine_of(kind, request, world, tmp_path):
    if kind == "vllm":
        return request.getfixturevalue("awake")
    return start(make_model("llama", True, tmp_path), world, kind="hf")


@pytest.mark.parametrize("kind", ["vllm", "hf"])
def test_reported_log_probs_are_those_of_the_filtered_distribution(kind, request, world, tmp_path):
    engine, policy = engine_of(kind, request, world, tmp_path)
    lm = engine_models.oracle(make_model("llama", True, tmp_path), 0.0)
    engine.wake(policy)
    for filters in FILTERS:
        responses = generate(engine, PROMPTS, SEEDS, SamplingConfig(0.8, 16, **filters))
        whole = []
        for prompt, response in zip(PROMPTS, responses):
            with torch.no_grad():
                logits = lm(input_ids=torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1]
            for row, token, logp in zip(logits, response.tokens, response.logp):
                assert abs(filtered_by_hand(row, 0.8, **filters)[token] - logp) < 1e-4
                whole.append(abs(filtered_by_hand(row, 0.8)[token] - logp))
        assert max(whole) > 0.1                                         # the filters are there
    engine.sleep()


@pytest.mark.parametrize("kind", ["vllm", "hf"])
def test_greedy_and_sampled_responses_together_are_those_of_two_calls(kind, request, world, tmp_path):
    """A seed of None is greedy. hf, which samples a group at a time, computes each prompt once for both."""
    engine, policy = engine_of(kind, request, world, tmp_path)
    engine.wake(policy)
    prompts, seeds = [prompt for prompt in PROMPTS for _ in range(4)], [None, 1, 2, 3, None, 4, 5, 6, *range(12)]
    alike = [i for i, seed in enumerate(seeds) if seed is not None]
    greedy = generate(engine, PROMPTS, SEEDS, SamplingConfig(0.0, 16))
    sampled = generate(engine, [prompts[i] for i in alike], [seeds[i] for i in alike], SamplingConfig(0.7, 16))
    shapes = []
    if kind == "hf":
        embedding = engine.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    together = generate(engine, prompts, seeds, SamplingConfig(0.7, 16))
    if kind == "hf":
        assert [length + 1 for rows, length in shapes if rows == 1] == [len(prompt) for prompt in PROMPTS]
        assert {length for rows, length in shapes if rows != 1} == {1}
    engine.sleep()
    assert [together[i].tokens for i in alike] == [r.tokens for r in sampled]
    assert [together[i].tokens for i in (0, 4)] == [r.tokens for r in greedy[:2]]
    assert together[0].tokens not in [together[i].tokens for i in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["vllm", "hf"])
def test_a_response_is_its_own_whoever_is_there(kind, request, world, tmp_path):
    """float32: alone, in another order, among many: the same tokens."""
    engine, policy = engine_of(kind, request, world, tmp_path)
    engine.wake(policy)
    many = [PROMPTS[i // 10] for i in range(40)]                        # a group is more than hf decodes at a time
    among = generate(engine, many, range(40), SamplingConfig(1.0, 20))
    turned = generate(engine, many[::-1], range(39, -1, -1), SamplingConfig(1.0, 20))[::-1]
    alone = [generate(engine, [many[i]], [i], SamplingConfig(1.0, 20))[0] for i in (0, 7, 39)]
    engine.sleep()
    assert [r.tokens for r in among] == [r.tokens for r in turned]
    assert [among[i].tokens for i in (0, 7, 39)] == [r.tokens for r in alone]
    if kind == "hf":                                                    # to the last bit
        assert among == turned and [among[i] for i in (0, 7, 39)] == alone
    assert len({tuple(r.tokens) for r in among}) == 40


def flipped(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return (name, tensor.flip(0)) if name.startswith("model.layers.1.") else (name, tensor)


def transposed(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return (name, tensor.t().contiguous()) if name.endswith("layers.0.self_attn.o_proj.weight") else (name, tensor)


def swapped(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if "layers.1" not in name:
        return name, tensor
    return name.replace("gate_proj", "x").replace("up_proj", "gate_proj").replace("x", "up_proj"), tensor


def exchanged(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if "layers.0" not in name:
        return name, tensor
    return name.replace("k_proj", "x").replace("v_proj", "k_proj").replace("x", "v_proj"), tensor


@pytest.mark.parametrize(("change", "found"), [
    (swapped, "2 tensors: model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj"),
    (exchanged, "2 tensors: model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj"),
])
def test_tensors_under_another_name_stop_the_sync(awake, monkeypatch, change, found):
    """The engine gets every number that was sent, some of them elsewhere."""
    engine, policy = awake
    load = engine.model.load_weights
    policy.version += 1
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "load_weights", lambda tensors: load(change(*x) for x in tensors))
        with pytest.raises(RuntimeError, match=found):
            engine.wake(policy)
    engine.wake(policy)
    assert engine.sleep()["sync/probe_logp_diff"] < 2e-5


@pytest.mark.parametrize("change", [flipped, transposed])
def test_the_probe_sees_elements_in_other_places(awake, monkeypatch, change):
    """Within a tensor, the checksum does not."""
    engine, policy = awake
    load = engine.model.load_weights
    for is_broken in (True, False):
        policy.version += 1
        with monkeypatch.context() as patch:
            if is_broken:
                patch.setattr(engine.model, "load_weights", lambda tensors: load(change(*x) for x in tensors))
            engine.wake(policy)
        difference = engine.sleep()["sync/probe_logp_diff"]
        assert difference > 1e-3 if is_broken else difference < 2e-5


def test_the_models_are_what_they_are_called(tmp_path):
    """A tied head is one tensor, an untied one two: otherwise the tests above would test one thing twice."""
    for tied in (True, False):
        model = engine_models.oracle(make_model("qwen2", tied, tmp_path), 0.0)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_the_gpu_check_runs_here_too(monkeypatch, capsys):
    """The same script, one tiny shape: every row of its table is filled, and its checks are alive."""
    def run(command, **_):
        return launch("tests/gpu/check_engine.py", *command[3:], warm=VLLM)

    monkeypatch.setattr(check_engine.subprocess, "run", run)
    check_engine.main(check_engine.Args(cycles=4, prompts=2, max_tokens=8))
    said = capsys.readouterr().out.splitlines()
    row = json.loads(said[0])
    assert row["parameters"] == 512 * 128 + 2 * (128 * 256 + 256 + 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
    assert 0 < row["probe prob diff"] < 0.02 and row["sync gb_per_s"] > 0
    assert row["tokens/s in the loop"] > 0 and row["asleep growth GiB"] < 0.1
    assert said[-1].startswith("| loop / bare |")


def test_a_collective_of_vllm_waits_as_long_as_those_of_the_trainer(world, tmp_path):
    """--save.timeout-s, and not vLLM's own 30 minutes of gloo."""
    from vllm.distributed import get_tp_group

    engine, _ = start(make_model("llama", True, tmp_path), world)
    backend = get_tp_group().cpu_group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == world.timeout == timedelta(seconds=3900)
    engine.close()


# as vLLM's kernels for CPUs want their heads, and with a norm that is not cut into groups
STATES = {"granitemoehybrid": ("float32", {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_groups": 1}),
          "falcon_h1": ("float32", {}), "nemotron_h": ("float32", {}),
          "qwen3_next": ("bfloat16", {"linear_key_head_dim": 128, "linear_value_head_dim": 128})}
OFF = {"float32": 2e-4, "bfloat16": 0.04}                               # on average; reached: 4e-5, 0.02


@pytest.mark.parametrize("family", [pytest.param(family, marks=[pytest.mark.sweep] * (family != "granitemoehybrid"))
                                    for family in STATES])
def test_a_model_with_states_follows_the_trainer(family, world, tmp_path):
    """Before and after a change of the weights: the engine's states and convolutions are the trainer's."""
    dtype, special = STATES[family]
    config = type(families.config_of(family)).from_dict(families.config_of(family).to_dict() | special)
    engine, policy = start(families.save(config, tmp_path), world, dtype=dtype)
    found = []
    for _ in range(2):
        engine.wake(policy)
        sampled = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12))
        engine.sleep()
        batch = Batch.build(PROMPTS, [response.tokens for response in sampled])
        told = torch.tensor([x for response in sampled for x in response.logp])
        difference = (told - policy.score(batch, 1.0)[batch.mask]).abs()
        assert difference.mean() < OFF[dtype]
        found.append([response.tokens for response in sampled])
        perturb(policy, 0.2)
    assert found[0] != found[1]
    engine.close()

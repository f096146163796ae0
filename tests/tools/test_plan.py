"""`python -m tools.plan`: scripts up to their plan, on no GPU and without data; the smallest change; the table."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.parallel.ranks import SAMPLERS
from tests.conftest import ROOT
from tools import plan

SHAPE = "Qwen2.5-7B"


@pytest.fixture
def model(tmp_path) -> str:
    """A folder with the config of a model of 7B, and nothing else."""
    config = plan.SHAPES[SHAPE].to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def run(model, monkeypatch, capsys):
    """A function that plans a script: what is printed and the exit status."""
    monkeypatch.setenv("WORLD_SIZE", "1")                               # put back at the end
    monkeypatch.setattr("sys.path", list(plan.sys.path))

    def planned(script: str, *flags: str, gpus: str = "8", gb: str = "80") -> tuple[str, int]:
        arguments = [script, "--model", model, "--train-data", "nowhere", *flags, "--gpus", gpus, "--gpu-gb", gb]
        monkeypatch.setattr("sys.argv", ["plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            plan.main()
        said = capsys.readouterr()
        return said.out + said.err, int(stop.value.code)

    return planned


def numbers(said: str, part: str) -> list[float]:
    line = next(line for line in said.splitlines() if line.startswith(part))
    return [float(x) for x in line.removeprefix(part).split()]


@pytest.mark.parametrize("script", ["grpo.py", "dapo.py", "rloo.py", "ppo.py", "grpo_variants.py", "online_dpo.py"])
def test_scripts_are_planned(script, run):
    """Weights are 4 bytes each over 8 ranks, in all four phases; PPO's critic is a second model without a head."""
    said, code = run(str(ROOT / script))
    assert code == 0 and "it fits" in said
    tokens = re.search(r"budget +([\d,]+) tokens a micro-batch \(the most that fit\)", said)[1]
    assert int(tokens.replace(",", "")) >= 16384
    whole, head = 7.6156e9, 152064 * 3584
    weights = (whole + (whole - head) * (script == "ppo.py")) * 4 / 8 / 2**30
    assert numbers(said, "weights") == pytest.approx([weights] * 4, abs=0.01)
    assert numbers(said, "engine's weights") == pytest.approx([whole * 2 / 2**30], abs=0.01)
    totals = numbers(said, "total")
    assert f"fullest  update, {max(totals):.1f} of 79.2 GiB" in said


def test_as_few_layers_are_recomputed_as_fit(run):
    """One fewer does not fit, and the smallest change is then to recompute all of them. Where more memory is left, or
    micro-batches are small, none is."""
    said, code = run(str(ROOT / "grpo.py"))
    count = int(re.search(r"(\d+) of 28 layers recomputed", said)[1])
    assert code == 0 and 0 < count < 28
    tokens = ["--max-tokens-per-gpu", "16384"]
    assert run(str(ROOT / "grpo.py"), *tokens)[0].replace("(--max-tokens-per-gpu)", "") == run(
        str(ROOT / "grpo.py"), *tokens, "--policy.gradient-checkpointing", str(count / 28))[0].replace(
        "(--max-tokens-per-gpu)", "")
    less, code = run(str(ROOT / "grpo.py"), *tokens, "--policy.gradient-checkpointing", str((count - 1) / 28))
    assert code == 1 and f"{count - 1} of 28 layers" in less
    assert less.splitlines()[-1].endswith("makes it fit: --max-tokens-per-gpu 0")
    long = ["--rollout.max-response-length", "8192", "--policy.gradient-checkpointing", "0"]
    less, code = run(str(ROOT / "grpo.py"), *long, gb="48")
    assert code == 1 and less.splitlines()[-1].endswith("makes it fit: --policy.gradient-checkpointing True")
    assert "0 of 28 layers" in run(str(ROOT / "grpo.py"), "--max-tokens-per-gpu", "4096")[0]
    assert "0 of 28 layers" in run(str(ROOT / "grpo.py"), gb="192")[0]


def test_when_sharing_gains_is_said(run):
    """By hand: a key of 4 heads of 128, and its value, in bfloat16, moves 5 times, at 295 FLOPs a byte, against 6 FLOPs
    a weight of a layer. Episodes may gather 4 keys more for each token."""
    said, _ = run(str(ROOT / "grpo.py"), "--policy.share-prompt")
    layer = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    share = 100 * 295 * 5 * 2 * 4 * 256 / (6 * layer)
    line = re.search(r"sharing +([\d.]+) keys gathered for each token; .* more than ([\d.]+)% in common", said)
    keys, gains = line.groups()
    assert float(gains) == pytest.approx(share, abs=0.05) and 0.1 < share < 1
    episodes, _ = run(str(ROOT / "grpo.py"), "--policy.share-prompt", "--rollout.episode", "envs/compacting.py")
    assert f"sharing  {float(keys) + 4:.1f} keys" in episodes
    assert "sharing" not in run(str(ROOT / "grpo.py"))[0]


def test_a_fork_is_planned(run, tmp_path):
    """Whatever it is called; its flags reach the plan: a reference model is 2 bytes a weight over the ranks."""
    shutil.copy(ROOT / "grpo.py", tmp_path / "my_fork.py")
    said, code = run(str(tmp_path / "my_fork.py"), "--kl-loss-coef", "0.1", gpus="4x4")
    assert code == 0 and "on 16 GPUs" in said
    assert numbers(said, "frozen models") == pytest.approx([7.6156e9 * 2 / 16 / 2**30] * 4, abs=0.01)


def test_samplers_hold_none_of_the_trainers_shards(run, monkeypatch):
    """Of 8 GPUs 4 train: weights and moments are over those, and none of them is beside the samplers' engine."""
    monkeypatch.setenv(SAMPLERS, "0")                         # put back at the end
    said, _ = run(str(ROOT / "async_grpo.py"), "--samplers", "4")
    assert "on 4 GPUs" in said
    assert numbers(said, "weights") == pytest.approx([7.6156e9 * 4 / 4 / 2**30] * 3, abs=0.01)
    assert numbers(said, "moments") == pytest.approx([7.6156e9 * 8 / 4 / 2**30] * 3, abs=0.01)
    own = 7.6156e9 * 2 / 2**30 + numbers(said, "engine's activations")[0]
    cache = numbers(said, "engine's cache, 16 sequences")[0]
    assert numbers(said, "total")[0] == pytest.approx(own + cache + 5.5, abs=0.02)
    assert cache_of(said) == pytest.approx(0.92 * 79.2 - own, abs=0.06)             # the most that vLLM takes


def test_no_flag_is_offered_that_samplers_refuse(run, monkeypatch):
    """Neither offloading nor more ranks an engine than there are samplers."""
    monkeypatch.setenv(SAMPLERS, "0")                         # put back at the end
    for gb, change in (("28", "12 GPUs that train"), ("18", "GPUs that train and --rollout.tp 2"), ("14", "none of")):
        said, code = run(str(ROOT / "async_grpo.py"), "--samplers", "2", gpus="8", gb=gb)
        assert code == 1 and "it does not fit" in said and "offload" not in said
        assert change in said.splitlines()[-1]


def test_a_teacher_is_planned(run, model):
    """It is a frozen model of its own shape, here the policy's: 2 bytes a weight over the ranks."""
    said, code = run(str(ROOT / "grpo_variants.py"), "--teacher", model, "--kl-loss-coef", "1", gpus="4x4")
    assert code == 0
    assert numbers(said, "frozen models") == pytest.approx([7.6156e9 * 2 / 16 / 2**30] * 4, abs=0.01)


@pytest.mark.parametrize(("flags", "home", "change"), [
    (["--max-tokens-per-gpu", "131072"], {"gpus": "4"}, "--max-tokens-per-gpu 0"),
    (["--rollout.max-response-length", "4000"], {"gpus": "8", "gb": "35"}, "--offload.optimizer"),
    ([], {"gpus": "1", "gb": "141"}, "--offload.optimizer"),
    ([], {"gpus": "1", "gb": "80"}, "2 GPUs"),
])
def test_the_smallest_change(flags, home, change, run):
    said, code = run(str(ROOT / "grpo.py"), *flags, **home)
    assert code == 1 and "it does not fit" in said
    assert said.splitlines()[-1] == f"change   the smallest that makes it fit: {change}"
    if change.startswith("--"):
        _, code = run(str(ROOT / "grpo.py"), *flags, *change.split(), **home)
        assert code == 0                                                # as it said


def cache_of(said: str) -> float:
    return float(re.search(r"([\d.]+) GiB are (?:left )?for its cache", said)[1])


def test_the_engines_share_is_what_was_given(run):
    """By hand, 7B on 8 GPUs of 79.2 GiB: weights, activations and cache are the share of a GPU, beside the trainer."""
    without, _ = run(str(ROOT / "grpo.py"))
    said, code = run(str(ROOT / "grpo.py"), "--rollout.gpu-memory-utilization", "0.4")
    own = 7.6156e9 * 2 / 2**30 + numbers(said, "engine's activations")[0]
    assert code == 0 and cache_of(said) == pytest.approx(0.4 * 79.2 - own, abs=0.06) != cache_of(without)
    beside = sum(numbers(said, part)[0] for part in ("weights", "moments", "CUDA, NCCL, graphs"))
    assert numbers(said, "total")[0] == pytest.approx(beside + 0.4 * 79.2, abs=0.02)
    assert numbers(said, "total")[0] > numbers(without, "total")[0] + 1
    assert numbers(said, "total")[1:] == numbers(without, "total")[1:]


@pytest.mark.parametrize(("share", "message"), [
    ("0.9", "fullest  rollout, 8"),                                     # 71 beside the trainer's 16
    ("0.2", "engine   --rollout.gpu-memory-utilization 0.2 is 15.8 GiB: its weights, activations and the cache of 16"),
])
def test_a_share_that_is_too_large_or_too_small_does_not_fit(share, message, run):
    flag = "--rollout.gpu-memory-utilization"
    said, code = run(str(ROOT / "grpo.py"), flag, share)
    assert code == 1 and message in said and "it does not fit" in said
    assert said.splitlines()[-1] == f"change   the smallest that makes it fit: {flag} 0"
    _, code = run(str(ROOT / "grpo.py"), flag, share, flag, "0")
    assert code == 0


def test_the_hugging_face_engine_has_no_cache_to_plan(run):
    """Nor a share of the GPU. Its weights, 2 bytes each, stay in all phases."""
    said, code = run(str(ROOT / "grpo.py"), "--rollout.engine", "hf", "--rollout.gpu-memory-utilization", "0.4")
    assert code == 0 and said.splitlines()[-1].startswith("fullest  update") and "cache" not in said
    assert numbers(said, "CUDA, NCCL, graphs") == pytest.approx([5.5 + 7.6156e9 * 2 / 2**30] * 4, abs=0.01)


def test_the_share_of_a_sampler_is_beside_no_trainer(run, monkeypatch):
    monkeypatch.setenv(SAMPLERS, "0")                         # put back at the end
    said, code = run(str(ROOT / "async_grpo.py"), "--samplers", "4", "--rollout.gpu-memory-utilization", "0.8")
    own = 7.6156e9 * 2 / 2**30 + numbers(said, "engine's activations")[0]
    assert code == 0 and cache_of(said) == pytest.approx(0.8 * 79.2 - own, abs=0.06)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"gpus": "8y2"}, "--gpus 8y2 must be a number of GPUs, or GPUs and machines as 8x2"),
    ({"gpus": "0x0"}, "--gpus 0x0 must be"), ({"gpus": "1e9x8"}, "--gpus 1e9x8 must be"),
    ({"gpus": "8x"}, "--gpus 8x must be"), ({"gpus": "\u00b2"}, "--gpus \u00b2 must be"),
    ({"gpus": "9" * 12}, "must be a number of GPUs"), ({"gb": "nan"}, "--gpu-gb nan must be above 0"),
    ({"gb": "0"}, "--gpu-gb 0 must be above 0"), ({"gb": "1e300"}, "--gpu-gb 1e+300 must be above 0, and at most"),
    ({"flags": ["--rollout.max-response-length", "0"]}, "--rollout.max-response-length 0 must be at least 1"),
    ({"script": "nothing.py"}, "nothing.py is no file"),
    ({"script": str(ROOT / "tools/runs.py")}, "runs.py has no `Run`"),
    ({"flags": ["--loss", "gspo"]}, "grpo.py has no flag --loss; it is one of grpo_variants.py"),
    ({"flags": ["--rollout.tp", "3"]}, "must be multiples of --rollout.tp 3"),
])
def test_mistakes_are_one_line(arguments, message, run):
    flags = arguments.pop("flags", [])
    said, code = run(arguments.pop("script", str(ROOT / "grpo.py")), *flags, **arguments)
    assert code == 2 and message in said and said.count("\n") == 1


@pytest.mark.parametrize(("sizes", "message"), [
    ({"hidden_size": 10**12}, "hidden_size is 1000000000000, must be from 1 to 1,000,000"),
    ({"intermediate_size": -5}, "intermediate_size is -5, must be from 1 to"),
    ({"vocab_size": 0}, "vocab_size is 0, must be from 1"),
    ({"num_key_value_heads": 3}, "num_attention_heads 28 must be a multiple of num_key_value_heads 3"),
    ({"num_experts_per_tok": 9, "num_experts": 8}, "num_experts_per_tok 9 must be at most the number of experts, 8"),
])
def test_sizes_that_no_model_has_are_one_line(sizes, message, model, run):
    file = Path(model) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    said, code = run(str(ROOT / "grpo.py"))
    assert code == 2 and message in said and said.count("\n") == 1


def test_a_save_brings_back_the_moments_of_all_models(run):
    """Those of policy and critic, 8 bytes a weight each, over 8 ranks. Between the phases they are on the host."""
    said, code = run(str(ROOT / "ppo.py"), "--offload.optimizer")
    both = 2 * 7.6156e9 - 152064 * 3584                                 # the critic has no head
    assert code == 0 and numbers(said, "moments")[-1] == pytest.approx(both * 8 / 8 / 2**30, abs=0.01)
    assert len(numbers(said, "moments")) <= 2                           # of the save, and of the optimizer step perhaps
    without, _ = run(str(ROOT / "ppo.py"))
    assert numbers(said, "total")[-1] == numbers(without, "total")[-1]


@pytest.mark.parametrize("gpus", ["8x5", "8x7"])
def test_experts_that_no_side_divides_are_one_line(gpus, model, run):
    """Of Qwen3-30B-A3B, whose matrices are 2,048 wide and 768 or 1,536 high."""
    config = plan.SHAPES["Qwen3-30B-A3B"].to_dict()
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    (Path(model) / "config.json").write_text(json.dumps(config))
    n, flags = gpus[-1], ["--policy.expert-parallel", "8", "--prompts-per-step", "840"]
    said, code = run(str(ROOT / "grpo.py"), *flags, gpus=gpus)
    assert code == 2 and said.count("\n") == 1 and f"--policy.expert-parallel 8: {n} ranks would divide each" in said
    assert f"experts.gate_up_proj no side ([1536, 2048]) is a multiple of {n}: choose another value" in said
    # a search that comes to 768 GPUs, of which 96 have the same experts, goes on
    (Path(model) / "config.json").write_text(json.dumps(config | {"hidden_size": 2064, "moe_intermediate_size": 12}))
    said, code = run(str(ROOT / "grpo.py"), *flags, gpus="8x3", gb="5")
    assert code == 1 and "change   none of offloading" in said


@pytest.mark.parametrize("gb", [24, 40, 48, 80, 96, 141, 192])
def test_the_engine_has_the_batch_that_vllm_takes_by_itself(gb, monkeypatch):
    """vLLM's own function is the oracle, on a stand-in for the card."""
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.usage.usage_lib import UsageContext

    card = SimpleNamespace(get_device_total_memory=lambda: int(plan.VISIBLE * gb * 2**30), is_tpu=lambda: False,
                           get_device_name=lambda: "NVIDIA H100", is_cpu=lambda: False)
    monkeypatch.setattr(arg_utils, "current_platform", card)
    tokens = arg_utils.EngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]
    config = plan.SHAPES[SHAPE]
    args = plan.RunArgs(model="", train_data=(), policy=plan.ModelConfig(), rollout=plan.RolloutConfig())
    found = plan.Command(args, config, 8, plan.VISIBLE * gb, 8192).phases()["rollout"]["engine's activations"]
    a_token = 2 * (2 * config.hidden_size + 3 * config.intermediate_size)       # gate, up and product, in bfloat16
    assert found == pytest.approx(tokens * a_token / 2**30)


def test_the_tables_are_those_in_the_documents():
    """Of some models, as all of them take long: as two pages have them, and not all cells alike."""
    text = [line for page in ("docs/gpus.md", "tests/evidence/memory.md")
            for line in Path(ROOT / page).read_text().splitlines()]
    names = ("Qwen3-0.6B", "Qwen2.5-7B", "Qwen3-30B-A3B")
    rows = [row for row in plan.table(names).splitlines() if row.startswith("| Qwen")]
    large = [row for row in plan.large_table(["Qwen2.5-7B"]).splitlines() if row.startswith("| Qwen")]
    assert len(rows) == 3 and len({cell for row in rows for cell in row.split("|")[2:-1]}) > 4
    assert len(large) == 2 and len({cell for row in large for cell in row.split("|")[3:-1]}) == 10
    for row in rows + large:
        assert row in text, row
    long = {row.split(" | ")[0] for row in text if row.split(" | ")[1:2] == ["31,744"]}
    assert long == {f"| {name}" for name in plan.LARGE}


@pytest.mark.parametrize(("name", "gb"), [(name, gb) for name in ("Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-4B", SHAPE)
                                           for gb in ("24", "48")])
def test_the_table_of_adapters_is_that_of_the_recipes(name, gb, run, tmp_path):
    """Each cell of docs/recipes.md: gigabytes and tokens with its flags, or "no"."""
    row = re.search(rf"^\| {re.escape(name)} \| (.*) \|(.*)\|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    cell = row[1 if gb == "24" else 2].strip()
    three = plan.shape("qwen2", 2048, 11008, 36, 16, 2, 151936, True)
    config = plan.SHAPES.get(name, three).to_dict()
    config["architectures"] = [f"{config['model_type'].capitalize()}ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--lora.rank", "16", "--policy.gradient-checkpointing", "True", *re.findall(r"--[\w.-]+", cell)]
    said, code = run(str(ROOT / "grpo.py"), *flags, gpus="1", gb=gb)
    if cell:                                                            # it is empty where less memory is enough
        fits = re.search(r"([\d.]+) GiB, (?:micro-batches of )?([\d,]+) tokens", cell)
        assert (code == 0) == (fits is not None) == (cell != "no")
        assert fits is None or (f", {fits[1]} of" in said and f"{fits[2]} tokens a micro-batch" in said), said


def test_large_models_by_hand():
    """Of 70B on 64 GPUs weights, gradients and moments are 16 bytes each; a response of 32k is one micro-batch of four
    GPUs, and without that does not fit."""
    config = plan.SHAPES["Llama-3.1-70B"]
    found, flags = plan.fitting(config, 64, 80.0, 8192, 31744, 4)
    parts, numbers = found.phases()["update"], 80 * 855654400 + 2 * 128256 * 8192 + 8192
    assert sum(parts[name] for name in ("weights", "gradients", "moments")) == pytest.approx(16 * numbers / 64 / 2**30)
    assert flags == {"--rollout.tp": 8} and found.plan.smallest == found.tokens == 8192
    alone = found.changed({"--policy.sequence-parallel": 1}, 64)
    assert alone.plan.smallest == 32768 and not alone.changed({"--max-tokens-per-gpu": 32768}, 64).fits()

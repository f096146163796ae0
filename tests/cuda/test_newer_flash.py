"""FlashAttention 4 and 3 where they are installed: torch's own switch puts them into the place of its kernels.
Stand-ins have their functions and definition; the choice, torch's switch and what it hands over are the real ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.batch import Batch
from common.forward import attention
from common.model.policy import ModelConfig, Policy
from tests.conftest import launch
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.step_worker import RESPONSES
from tests.cuda.test_flash_package import CONFIGS, SIZES

PACKAGES = {"FA4": ("flash_attn_4", "flash_attn/cute/interface.py"), "FA3": ("flash_attn_3", "flash_attn_interface.py")}
MODELS = {"llama": CONFIGS["llama"], "window": CONFIGS["window"],
          "heads of 136": LlamaConfig(**SIZES | {"head_dim": 136})}
RUNS = {  # package, first number of the card's capability, models in the order in which they are loaded
    "FA4 on Hopper": ("FA4", 9, ["llama", "window", "shared", "heads of 136"]),
    "FA4 on Ampere": ("FA4", 8, ["llama"]),
    "FA3 on Hopper": ("FA3", 9, ["llama", "window"]),
    "FA3 on Blackwell": ("FA3", 10, ["llama"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> dict[str, dict]:
    results = {}
    for run, (kernel, capability, names) in RUNS.items():
        site = tmp_path_factory.mktemp("site")
        package, module = PACKAGES[kernel]
        (site / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).parent / "newer_flash_package.py", site / module)
        info = site / f"{package}-4.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 4.0\n")
        done = launch("-m", "tests.cuda.newer_flash_worker", models, capability, *names, env={"PYTHONPATH": str(site)})
        results[run] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(("run", "name"), [(run, name) for run, (*_, names) in RUNS.items() for name in names])
@pytest.mark.sweep
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_numbers_are_those_of_the_cpu(run, name, models, found):
    """The oracle is a policy in float32 on the CPU, with sdpa for each sequence. A card that a kernel does not know,
    and wider heads, have torch's own."""
    path = models / ("llama" if name == "shared" else name)
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="packed_sdpa")
    logp, entropy = Policy(lm)(Batch.build(*RESPONSES), 1.0)
    (logp.sum() + entropy.sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
    ours = found[run][name]
    assert torch.tensor(ours["logp"]).sub(logp.detach()).abs().mean() < 0.02 < logp.detach().std()
    assert ours["norm"] == pytest.approx(float(norm), rel=0.03)
    kernel, capability, _ = RUNS[run]
    is_used = capability == 9 and name != "heads of 136"
    shown = f"FlashAttention {kernel[-1] if is_used else 2}"
    assert ours["attention"] == "packed_varlen" and f"attention packed_varlen ({shown})" in ours["line"]
    assert ours["is_registered"] == is_used
    names = [call["name"] for call in ours["calls"]]
    assert names == ([kernel] * 2 + [f"{kernel} backward"] * 2 if is_used else [])
    assert (ours["checked"] > 0) == is_used                             # by check_packing
    for call in ours["calls"][:2]:
        assert call["causal"] == (name != "window") and call["window"] == ([2, 0] if name == "window" else [-1, 0])
        lengths = Batch.build(*RESPONSES).cu_seqlens.diff().tolist()
        assert name == "shared" or (call["lengths"] == lengths and min(call["longest"]) >= max(lengths))


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """A set of packages that seem to be installed, on a card that has capability 9."""
    packages: set[str] = set()
    monkeypatch.setattr(attention, "is_installed", packages.__contains__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(attention, "ASKED", set())
    return packages


def test_the_newest_kernel_that_fits_is_chosen(installed, monkeypatch):
    llama, wide, wider = (LlamaConfig(**SIZES | {"head_dim": width}) for width in (128, 136, 264))
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    assert attention.choose_attention("cuda", llama, ModelConfig()) == "flash_attention_2"
    installed |= {"flash-attn-4", "flash-attn-3"}
    assert attention.choose_attention("cuda", llama, ModelConfig()) == "packed_varlen"
    assert [attention.newer_kernel("cuda", config) for config in (llama, wide, wider)] == ["FA4", "FA3", ""]
    for capability, wanted in ((10, ["FA4", "", ""]), (8, ["", "", ""]), (12, ["", "", ""])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None, major=capability: (major, 0))
        assert [attention.newer_kernel("cuda", config) for config in (llama, wide, wider)] == wanted
    llama.model_type = "qwen3_vl"                       # the switch holds for sdpa too, which its tower runs
    assert attention.newer_kernel("cuda", llama) == ""


def test_a_kernel_that_cannot_be_loaded_is_refused(installed):
    """The package is there by its name, and its module is not."""
    installed.add("flash-attn-4")
    llama = LlamaConfig(**SIZES)
    attention.use_kernel(torch.device("cpu"), llama, ModelConfig())
    attention.use_kernel(torch.device("cuda"), llama, ModelConfig(compute_dtype="float32"))
    assert not attention.ASKED and attention.kernel_in_use() == "FlashAttention 2"
    with pytest.raises(ValueError, match=r"flash-attn-4 is installed and cannot be used \(No module named 'flash_attn"):
        attention.use_kernel(torch.device("cuda"), llama, ModelConfig())

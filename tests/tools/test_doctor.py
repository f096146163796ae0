"""`tools/doctor.py`: every line is good on this machine with a tiny model, and each is bad where what it checks is."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.engine import make
from common.engine.hf import HFEngine
from common.engine.vllm import gpu_share
from common.memory.plan import RESERVED_GB
from common.parallel import ranks
from tools import doctor, plan


@pytest.fixture
def examine(world, tiny_llama, monkeypatch, capfd):
    """A function that runs the doctor in the session's process group: what is printed and the exit status."""
    monkeypatch.setattr(ranks, "init", lambda: world)
    monkeypatch.setattr(ranks, "shutdown", lambda: None)

    def run(*flags: str) -> tuple[str, int]:
        monkeypatch.setattr(sys, "argv", ["doctor", "--model", tiny_llama, "--engine", "hf", *flags])
        with pytest.raises(SystemExit) as stop:
            doctor.main()
        return capfd.readouterr().out, int(stop.value.code)

    return run


def lines(said: str) -> dict[str, str]:
    """Name of a check -> ok or FAIL."""
    words = [line.split() for line in said.splitlines()[:-1]]
    return {name: verdict for verdict, name, *_ in words if verdict in ("ok", "FAIL")}


def test_a_machine_that_can_train_passes(examine):
    said, code = examine()
    assert (said.splitlines()[-1], code) == ("PASS", 0), said
    assert lines(said) == dict.fromkeys(doctor.CHECKS, "ok")
    assert "1 rank(s): 64 MiB are summed" in said and "hf: greedy responses follow the weights" in said


def test_an_engine_that_keeps_its_weights_fails(examine, monkeypatch):
    """It loads the first weights and no others; the checksums that would say so are those of what was sent."""
    load = HFEngine._load

    def load_once(self, tensors, sent):
        monkeypatch.setattr(HFEngine, "_load", lambda self, tensors, sent: (len(list(tensors)), set()))
        return load(self, tensors, sent)

    monkeypatch.setattr(HFEngine, "_load", load_once)
    monkeypatch.setattr(HFEngine, "_check_probe", lambda self, batch: {"sync/probe_prob_diff": 0.0})
    said, code = examine("--only", "model", "ranks", "engine")
    assert (lines(said), code) == ({"model": "ok", "ranks": "ok", "engine": "FAIL"}, 1)
    assert "greedy responses are the same after the weights were changed" in said and said.endswith("FAIL\n")


def test_an_engine_that_does_not_return_fails(examine, monkeypatch):
    complete, calls = HFEngine.complete, []

    def drift(self, requests, *arguments, **others):
        responses = complete(self, requests, *arguments, **others)
        calls.append(len(calls))
        responses[0].tokens[-1] = len(calls)
        return responses

    monkeypatch.setattr(HFEngine, "complete", drift)
    monkeypatch.setattr(HFEngine, "_check_probe", lambda self, batch: {"sync/probe_prob_diff": 0.0})
    said, code = examine("--only", "ranks", "engine")
    assert code == 1 and "differ after they were changed and changed back" in said


def test_a_sum_that_is_wrong_fails(examine, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers: numbers[5].zero_())
    said, code = examine("--only", "ranks", "engine")
    assert code == 1 and "is 0 to 1, must be 1" in said and "engine" not in lines(said)     # it needs the ranks


def test_what_an_engine_raises_is_a_line(examine, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(HFEngine, "__init__", broken)
    said, code = examine("--only", "ranks", "engine")
    assert code == 1 and "FAIL engine     RuntimeError: CUDA error: no kernel image" in said


@pytest.mark.parametrize(("shape", "gpus", "gb"), [("Qwen2.5-14B", 8, 80), ("Qwen2.5-7B", 1, 80), ("Qwen3-4B", 8, 24)])
def test_the_engine_has_room_for_the_weights_of_a_large_model(shape, gpus, gb, tiny_llama, tmp_path, monkeypatch):
    """By hand, bfloat16: they and a GiB for a cache fit into the engine's share; with the trainer's shard in float32
    and what is reserved it is at most the GPU. The engine is not started: its flags are what is tested."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    config = plan.SHAPES[shape].to_dict() | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    examined = doctor.Doctor(SimpleNamespace(model=str(tmp_path / "model"), engine="vllm"))
    examined.world = ranks.World(0, gpus, torch.device("cuda"), mesh=None)
    setups = []

    def stop_here(setup):
        setups.append(setup)
        raise doctor.Problem("enough")

    monkeypatch.setattr(make, "make_engine", stop_here)
    monkeypatch.setattr(make, "check_vllm", lambda *args: None)
    with pytest.raises(doctor.Problem, match="enough"):
        examined.engine()
    total = plan.VISIBLE * gb
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((total - 0.5) * 2**30, total * 2**30))
    share = setups[0].config.gpu_memory_utilization or gpu_share(setups[0].trainer_gb, RESERVED_GB)
    weights = {"Qwen2.5-14B": 14.77e9, "Qwen2.5-7B": 7.616e9, "Qwen3-4B": 4.022e9}[shape] / 2**30   # in GiB, of a byte
    assert 2 * weights + 1 < share * total
    assert share * total + 4 * weights / gpus + RESERVED_GB < total


@pytest.mark.parametrize(("check", "patch", "message"), [
    ("limits", lambda m: m.setattr(doctor.resource, "getrlimit", lambda _: (1024, 1024)), "ulimit -n 4096"),
    ("limits", lambda m: m.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26)),
     "0.06 GiB of shared memory (/dev/shm) are free"),
    ("memory", lambda m: m.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0)),
     "0.0 GiB of memory are free, weights, gradients and moments need 0.0: a smaller --model"),
    ("packages", lambda m: None, "built without CUDA"),
])
def test_bad_machines(check, patch, message, examine, monkeypatch):
    patch(monkeypatch)
    said, code = examine("--only", *(["ranks"] if check == "memory" else []), check)
    assert code == 1 and lines(said)[check] == "FAIL" and message in said


def test_a_model_that_is_not_there(examine, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for model, message in {f"{tmp_path}/no": "neither a folder here nor", "some/model": "run `hf download some/model`",
                           doctor.QUICKSTART: "`make model` makes it"}.items():
        said, code = examine("--only", "model", "engine", "--model", model)
        assert code == 1 and message in said and lines(said) == {"model": "FAIL"}


def test_the_failures_of_other_ranks_are_said(examine, monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "3")
    said, code = examine("--only", "limits")
    assert (said, code) == ("", 0)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 1024))
    said, code = examine("--only", "limits")
    assert said.startswith("FAIL limits     rank 3: 1024 open files are allowed") and code == 1

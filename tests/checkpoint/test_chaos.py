"""The short version of `make chaos`: one tiny run of one rank, killed at random instants."""

import importlib
import signal

import pytest

from tests.checkpoint.chaos import Chaos, main
from tests.checkpoint.faulty import LIKE_TORCHRUN, POINTS, server


@pytest.mark.sweep
def test_a_run_that_is_killed_at_random_instants_ends_as_if_it_had_not_been(capsys):
    main(Chaos(kills=2, two_rank_kills=0, seed=5))
    out = capsys.readouterr().out
    assert "2 kills in " in out and out.count("**the same as undisturbed**") >= 1


@pytest.mark.parametrize("point", POINTS)
def test_a_point_of_a_fault_is_in_the_code(point):
    """A fault that is never reached would prove nothing."""
    module, path = POINTS[point].split()
    owner = importlib.import_module(module)
    for attribute in path.split("."):
        owner = getattr(owner, attribute)
    assert callable(owner)


def test_like_torchrun_the_warm_server_ends_all_ranks_when_one_fails(tmp_path):
    """Rank 1 fails; rank 0 ends by the signal, rank 2 in its own way."""
    script = tmp_path / "script.py"
    script.write_text("import os, signal, sys, time\n"
                      "rank = int(os.environ['RANK'])\n"
                      f"ready = {str(tmp_path / 'ready')!r}\n"
                      "if rank == 2:\n"
                      "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
                      "    os.mkdir(ready)\n"
                      "end = time.monotonic() + 300\n"
                      "while time.monotonic() < end and not (rank == 1 and os.path.exists(ready)):\n"
                      "    time.sleep(0.1)\n"
                      "sys.exit(3)\n")
    start = server()
    start(tmp_path / "log", "none", script, ranks=3, env=LIKE_TORCHRUN)
    assert start.codes == [-signal.SIGTERM, 3, 4], (tmp_path / "log").read_text()

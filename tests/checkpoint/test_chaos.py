"""The short version of `make chaos`: one tiny run of one rank, killed at random instants."""

from tests.checkpoint.chaos import Chaos, main


def test_a_run_that_is_killed_at_random_instants_ends_as_if_it_had_not_been(capsys):
    main(Chaos(kills=2, two_rank_kills=0, seed=5))
    out = capsys.readouterr().out
    assert "2 kills in " in out and out.count("**the same as undisturbed**") >= 1

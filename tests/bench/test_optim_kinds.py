"""What optim_kinds measures of each kind."""

import sft
from common.model import optimizers
from tests.bench import optim_kinds


def test_the_step_that_is_timed_rounds_as_the_run_did(monkeypatch, tmp_path):
    seen = []

    def train(args):
        (tmp_path / "nearest/checkpoints").mkdir(parents=True)
        seen.append(optimizers.round_stochastically)

    def measure(model, kind):
        seen.append(optimizers.round_stochastically)
        return {"kind": kind}

    monkeypatch.setattr(sft, "main", train)
    monkeypatch.setattr(optim_kinds, "measure", measure)
    optim_kinds.run(optim_kinds.Args(kind="nearest", out=str(tmp_path)))
    assert seen == [optim_kinds.nearest, optim_kinds.nearest]
    assert (tmp_path / "nearest/optimizer.json").read_text() == '{"kind": "adamw-bf16"}'

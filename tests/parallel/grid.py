"""The gradient on 1 to 8 ranks, by sequence parallel and copies of the model, against one rank: a markdown table.

    python -m tests.parallel.grid               # 80 seconds on two cores; tests/evidence/accuracy.md has its output

Real gloo ranks and FSDP2 in float64, through the lines of grpo.py. The oracle is one rank that runs every response
alone, without groups (tests/parallel/test_sequence_parallel.py, which runs some of these cells in every test run).
"""

import contextlib
import sys
import tempfile
from pathlib import Path

from common.parallel import ranks
from tests.parallel.sequence_worker import Case
from tests.parallel.test_sequence_parallel import make_step, on_one_rank, relative_error, run_on, save_models

MODELS = {"llama": "Llama", "window": "Qwen3, window", "mixture": "Qwen3-MoE"}
COLUMNS = [(model, shares) for shares in (False, True) for model in MODELS]
ROWS = {1: [(1, 1)], 2: [(n, copies) for n in (1, 2) for copies in (1, 2)],
        4: [(n, copies) for n in (1, 2, 4) for copies in (1, 2)],
        8: [(n, copies) for n in (1, 2, 4) for copies in (1, 2)]}
"""Ranks -> sequence parallel and copies, where they divide the ranks."""
REDUCTIONS = {"keys": "gradients of keys and values over the group", "log-probs": "log-probs over the group",
              "shards": "gradients over the shards", "copies": "gradients over the copies"}


def cell(model: str, shares: bool, n: int, copies: int, missing: str = "") -> Case:
    return Case(model, n, copies, share_prompt=shares, missing=missing)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    models, step = save_models(folder / "models"), make_step()
    expected = on_one_rank(models, step, ranks.init())

    def errors(num_ranks: int, cases: list[Case], lowest: bool = False) -> list[str]:
        """Of each case the largest error on any rank, or the lowest."""
        found, worst = run_on(num_ranks, cases, folder, models=models, step=step), min if lowest else max
        with contextlib.redirect_stdout(sys.stderr):                    # what loading a model says
            return [f"{worst(relative_error(of_rank[case][0], expected(case)) for of_rank in found):.0e}"
                    for case in cases]

    names = [MODELS[model] + ", shared prompts" * shares for model, shares in COLUMNS]
    head = "| " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1)
    print("| ranks | sequence parallel | copies " + head + "| --- | --- |")
    for num_ranks, settings in ROWS.items():
        found = errors(num_ranks, [cell(*column, *setting) for setting in settings for column in COLUMNS])
        for i, (n, copies) in enumerate(settings):
            row = found[i * len(COLUMNS) : (i + 1) * len(COLUMNS)]
            print(f"| {num_ranks} | {n} | {copies} | {' | '.join(row)} |", flush=True)
    print("\n| left out, on 4 ranks " + head + "|")
    found = errors(4, [cell(*column, 2, 2, missing) for missing in REDUCTIONS for column in COLUMNS], lowest=True)
    for i, name in enumerate(REDUCTIONS.values()):
        print(f"| {name} | {' | '.join(found[i * len(COLUMNS) : (i + 1) * len(COLUMNS)])} |")
    ranks.shutdown()


if __name__ == "__main__":
    main()

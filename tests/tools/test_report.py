"""The picture of a run."""

import json
import os
import subprocess
import sys

import pytest
import tyro
from matplotlib import image

from tests.bench import quickstart_table
from tests.conftest import ROOT
from tools import report


def write_run(folder, scale: float = 1.0) -> str:
    """Six steps as grpo.py logs them: validation at 0, 3 and 6, nothing else at 0."""
    folder.mkdir(parents=True)
    rows = [{"step": 0, "val-core/sums/acc/greedy": 0.1, "val-core/sums/acc/mean@4": 0.05}]
    for step in range(1, 7):
        rows.append({
            "step": step, "critic/rewards/mean": scale * step / 7, "actor/entropy": 2.0 / step,
            "training/rollout_probs_diff_mean": 0.003, "timing_s/gen": 2.0 + step, "timing_s/update_actor": 5.0,
            "timing_s/step": 8.0 + step,
        })
        if step % 3 == 0:
            rows[-1] |= {"val-core/sums/acc/greedy": step / 8, "val-core/sums/acc/mean@4": step / 10}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def colours(file) -> set[tuple]:
    pixels = image.imread(file)[..., :3]
    return set(map(tuple, pixels[::2, ::2].reshape(-1, 3).round(2).tolist()))


def test_curves_of_a_run(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    file = tmp_path / "a/curves.png"
    report.main(tyro.cli(report.Args, args=[run, "--out", str(file)]))
    assert capsys.readouterr().out == f"curves {file}\n"
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = image.imread(file).shape
    assert (width, height) == (1210, 770)
    assert len(file.read_bytes()) > 20_000
    assert len(colours(file)) > 20                                      # lines, areas and text, not a white sheet


def test_curves_from_a_notebook(tmp_path):
    """Its kernel names a backend of its own to all programs that it starts, which their packages may lack."""
    run = write_run(tmp_path / "a")
    command = [sys.executable, "-m", "tools.report", run, "--out", str(tmp_path / "a/curves.png")]
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a/curves.png").stat().st_size > 20_000


def test_two_runs_in_one_picture(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", scale=0.5)]
    report.main(report.Args((runs[0],), out=str(tmp_path / "one.png")))
    report.main(report.Args(tuple(runs), out=str(tmp_path / "two.png")))
    assert (tmp_path / "two.png").read_bytes() != (tmp_path / "one.png").read_bytes()
    orange = [255, 127, 14]                                             # the second run's line, in the reward's panel
    one, two = ((image.imread(tmp_path / name)[:385, :605, :3] * 255).round() for name in ("one.png", "two.png"))
    assert not (one == orange).all(-1).any()
    assert (two == orange).all(-1).sum() > 50
    assert not (tmp_path / "a/curves.png").exists()


def test_samplers_that_work_at_the_same_time_add_nothing_to_a_step(tmp_path, monkeypatch, capsys):
    """async_grpo.py: steps of 8 s, in which trainers wait 1 s and update 6 s; the samplers' 7 s are beside them."""
    run, stacked = tmp_path / "a", {}
    run.mkdir()
    row = {"critic/rewards/mean": 0.5, "timing_s/gen": 7.0, "timing_s/wait": 1.0, "timing_s/update_actor": 6.0,
           "timing_s/step": 8.0, "perf/cpu_memory_peak_gb": 1.0, "val-core/sums/acc/greedy": 0.0,
           "val-core/sums/acc/mean@2": 0.0, "training/rollout_probs_diff_mean": 0.0, "sync/probe_prob_diff": 0.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(3)))
    monkeypatch.setattr("matplotlib.axes.Axes.stackplot", lambda self, steps, values, labels: stacked.update(
        zip(labels, values)))
    report.main(report.Args((str(run),), out=str(run / "curves.png")))
    assert stacked == {"update_actor": [6.0] * 3, "wait": [1.0] * 3}
    quickstart_table.main([str(run)])
    shares = dict(line.split(" | ")[::2] for line in capsys.readouterr().out.splitlines() if line.endswith("% |"))
    assert shares["| wait"] == "12% |" and shares["| everything else"] == "12% |" and "| gen" not in shares


def test_a_run_without_any_step_but_validation(tmp_path):
    run = tmp_path / "a"
    write_run(run)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    report.main(report.Args((str(run),), out=str(run / "curves.png")))
    assert (run / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(("name", "values", "limits"), [
    ("val-core/sums/acc/greedy", (0.0, 0.2), (0, 1)),                   # shares keep the scale of all runs
    ("val-core/preference/rejected_reward", (0.0, -0.75), None),        # of dpo.py and rm.py
    ("val-core/preference/margin", (0.0, 3.5), None),
])
def test_validation_outside_of_0_to_1_is_in_sight(name, values, limits, tmp_path, monkeypatch):
    from matplotlib import figure

    rows = [{"step": step, name: value} for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures, save = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    report.main(report.Args((str(tmp_path),), out=str(tmp_path / "curves.png")))
    (panel,) = (axis for axis in figures[0].axes if axis.get_title().startswith("validation"))
    low, high = panel.get_ylim()
    assert list(panel.lines[0].get_ydata()) == list(values) and low <= min(values) < max(values) <= high
    assert limits is None or (low, high) == limits
    assert (panel.get_title() == "validation accuracy") == (limits is not None)


def test_series_by_hand(tmp_path):
    rows = report.read_metrics(write_run(tmp_path / "a"))
    assert len(rows) == 7
    assert report.series(rows, "val-core/sums/acc/greedy") == ([0, 3, 6], [0.1, 0.375, 0.75])
    assert report.series(rows, "unknown") == ([], [])


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing/metrics.jsonl does not exist: give the folder of a run"):
        report.main(report.Args((str(tmp_path / "missing"),)))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="is empty: the run has not finished a step"):
        report.main(report.Args((str(tmp_path),)))
    with pytest.raises(ValueError, match="give at least one run folder"):
        report.main(report.Args(()))

"""The target of tests/bench/steps_to.py, and where a run reaches it."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bench.steps_to import crossing, target_of


def test_the_target_is_that_of_the_problems_that_the_runs_validate(tmp_path):
    """Of 8 problems the runs validate 0, 2, 4 and 6, of which 1, 2, 0 and 2 of 2 samples are right, no greedy one."""
    pq.write_table(pa.table({"x": range(8)}), tmp_path / "val.parquet")
    right = {0: (1, 0), 1: (0, 0), 2: (1, 1), 3: (0, 0), 4: (0, 0), 5: (0, 0), 6: (1, 1), 7: (0, 0)}
    rows = [{"row": row, "greedy": greedy, "acc": float(acc)}
            for row, accs in right.items() for greedy, acc in [(True, 0), *((False, acc) for acc in accs)]]
    (tmp_path / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts/0.parquet")
    flags = {"val_data": [str(tmp_path / "val.parquet")], "eval_prompts": 4, "eval_n": 3}
    accuracy, error = target_of(str(tmp_path), flags)
    assert accuracy == 5 / 8
    # the variance of two samples, 1 and 0, is 1/2; of the others 0; a mean over 4 problems of 3 samples each
    assert error == pytest.approx((1 / 2 / 4 / 12) ** 0.5)


def test_where_a_straight_line_reaches_it():
    points = [(0, 0.0, 0.2), (4, 40.0, 0.4), (8, 100.0, 0.8)]
    assert crossing(points, 0.5) == pytest.approx((5, 55))
    assert crossing(points, 0.4) == pytest.approx((4, 40))
    assert crossing(points, 0.9) is None

"""`python -m tests.bench`: which measurements run with which flags, and whose line is kept."""

import pytest

from tests.bench import __main__ as bench


def test_names_and_flags():
    assert bench.parse([]) == bench.FLAGS
    assert set(bench.FLAGS) == {file.stem.removeprefix("bench_") for file in bench.ROOT.glob("tests/bench/bench_*.py")}
    assert bench.parse(["step", "data"]) == {"step": [], "data": ["--rows", "200000"]}
    assert bench.parse(["data", "--rows", "5"]) == {"data": ["--rows", "5"]}
    with pytest.raises(ValueError, match="there is no measurement steps; there are packing"):
        bench.parse(["steps"])
    with pytest.raises(ValueError, match="flags --rows 5 belong to one measurement, and 2 are named"):
        bench.parse(["data", "step", "--rows", "5"])


def test_the_last_good_line_of_each_measurement_is_kept(tmp_path, monkeypatch, capfd):
    """A program stands in for the measurements: it prints a line with its flags, and fails for one of them."""
    program = tmp_path / "python"
    program.write_text('''#!/bin/bash
echo some text
echo "{\\"bench\\": \\"${2#tests.bench.bench_}\\", \\"flags\\": \\"${*:3}\\"}"
[[ $2 != *logging || $3 != --bad ]]
''')
    program.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(program))
    monkeypatch.setattr(bench, "LINES", tmp_path / "bench.jsonl")
    bench.main(["logging", "packing"])
    bench.main(["packing", "--out", "x"])
    kept = '{"bench": "logging", "flags": ""}\n{"bench": "packing", "flags": "--out x"}\n'
    assert (tmp_path / "bench.jsonl").read_text() == kept
    with pytest.raises(ValueError, match="no line from logging"):
        bench.main(["logging", "--bad"])
    assert capfd.readouterr().out.endswith('== bench_logging\nsome text\n{"bench": "logging", "flags": "--bad"}\n')
    assert (tmp_path / "bench.jsonl").read_text() == kept

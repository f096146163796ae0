"""--help of the scripts in data/: each flag says what it is, and its default stands behind it in brackets."""

import argparse
import datetime
import runpy
import sys

import pytest

from tests.conftest import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "data").glob("*.py") if path.name != "verl_rows.py")
IN_WORDS = (None, False, "", "{}", -1, datetime.date.min, datetime.date.max)
"""Defaults for which a help text has words: nothing, all, no limit."""


class Parsed(BaseException):
    """The parser is complete."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_flag_says_what_it_is_and_its_default(name, monkeypatch):
    parsers = []

    def stop(parser, *arguments):
        parsers.append(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.syspath_prepend(str(ROOT / "data"))
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / "data" / name), run_name="__main__")
    (parser,) = parsers
    flags = [action for action in parser._actions if action.dest != "help"]
    assert flags and [action.dest for action in flags if not action.help] == []
    assert [action.dest for action in flags
            if action.default not in IN_WORDS and str(action.default) not in action.help] == []

"""docs/troubleshooting.md: what it quotes is in the sources, the metrics and flags that it names exist, and its index
has every row."""

import ast
import dataclasses
import importlib
import inspect
import re
from functools import cache
from itertools import chain

import pytest

from tests.conftest import ROOT
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
FOLDERS = ("common", "rewards", "envs", "tools", "variants")
OF_OTHERS = {"--mem", "--nodes", "--only"}                              # of Slurm and of tools.doctor
VALUE = re.compile(r"[^ (]*\d[^ ),;:]*|'[^']*'|\b[A-Z]{3,}[^ ]*|\.\.\.")
"""What stands for a user's own in a quoted line: a word with a digit, a word in quotes or in capitals."""
HOLE = "\0"
SPREAD = ("mean", "max", "min")


@cache
def texts() -> tuple[str, ...]:
    """Each string in the sources, with HOLE for what is filled in."""
    paths = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^{}]*\}", HOLE, node.value))
    return tuple(found)


def quoted(page: str) -> list[str]:
    return re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", page))


def is_printed(line: str) -> bool:
    """Whether one text of the sources has the fixed parts of a quoted line, in their order."""
    parts = [re.escape(part.strip()) for part in VALUE.split(line) if len(part.strip()) > 2]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return sum(map(len, parts)) >= 8 and any(pattern.search(text) for text in texts())


def named_metrics(page: str) -> set[str]:
    words = re.findall(r"`([a-z_]+(?:/[\w-]+)+)`", page)
    return {word for word in words if not (ROOT / word).exists()}


def is_metric(name: str) -> bool:
    """Whether the sources spell the name: whole, with a part filled in, or without what `spread` and `Meter` add."""
    short = name.rpartition("/")[0] if name.endswith(SPREAD) else name
    for text in texts():
        if text in (name, short):
            return True
        is_name = HOLE in text and "/" in text and " " not in text and len(text.replace(HOLE, "")) > 8
        if is_name and text != f"timing_s/{HOLE}" and re.fullmatch(re.escape(text).replace(HOLE, r"[\w-]+"), name):
            return True
    phase = name.removeprefix("timing_s/")
    return phase != name and phase in texts()


def flags(args: type, prefix: str = "--") -> set[str]:
    found = set()
    for part in dataclasses.fields(args):
        name = prefix + part.name.rstrip("_").replace("_", "-")
        found |= flags(part.type, f"{name}.") if dataclasses.is_dataclass(part.type) else {name}
        if isinstance(part.default, bool):
            found.add(f"{prefix}no-{name.removeprefix(prefix)}")
    return found


def all_flags() -> set[str]:
    scripts = [importlib.import_module(name.removesuffix(".py")).Args for name in (*SCRIPTS, *OFFLINE, *ALONE)]
    exported = inspect.signature(importlib.import_module("tools.checkpoints").export_checkpoint).parameters
    return {f"--{name}" for name in exported}.union(*map(flags, scripts))


@pytest.mark.parametrize("line", quoted(PAGE))
def test_a_quoted_line_is_printed_by_the_program(line):
    assert is_printed(line), line


def test_the_metrics_exist():
    assert [name for name in sorted(named_metrics(PAGE)) if not is_metric(name)] == []
    assert len(named_metrics(PAGE)) > 25


def test_the_flags_exist():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", re.sub(r"\]\([^)]*\)", "]", PAGE)))
    assert named - all_flags() - OF_OTHERS == set() and len(named) > 40


def test_the_index_names_every_row_in_its_section():
    index, *sections = re.split(r"^## ", PAGE.partition("## By symptom")[2], flags=re.MULTILINE)
    rows = {}
    for section in sections:
        title = section.partition("\n")[0]
        rows[title.lower().replace(" ", "-")] = [int(n) for n in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    listed = {}
    for entry in re.findall(r"^\* (.*(?:\n  .*)*)", index, re.MULTILINE):
        anchor = re.search(r"\(#([\w-]+)\)", entry)[1]
        listed[anchor] = [int(n) for n in re.findall(r"(?:: |· )(\d+) ", entry.replace("\n ", ""))]
    assert listed == rows
    assert [*chain(*rows.values())] == list(range(1, 31))


def test_each_row_links_its_thread_and_the_page_is_short():
    rows = re.findall(r"^\| \d+ \|.*", PAGE, re.MULTILINE)
    thread = re.compile(r"\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)")
    assert all(thread.search(row) for row in rows)
    links = thread.findall(PAGE)
    assert len(links) == len(set(links)) == 30
    assert len(PAGE.split()) <= 2500


def test_what_is_invented_is_found():
    """Guard: one letter of a quoted line, or a metric that nobody logs."""
    assert is_printed("entropy fell to 0.28 nats (mean of 5 steps) from 10: the policy hardly explores any more")
    assert not is_printed("entropy fell by 0.28 nats (mean of 5 steps) from 10: the policy hardly explores any more")
    assert not is_printed("in every group all rewards are equal and checksums differ")           # of two texts
    assert not is_printed("12 34")
    for name in ("actor/entropy", "response_length/mean", "timing_s/update_actor", "sleep/used_gb"):
        assert is_metric(name)
    for name in ("actor/entropie", "response_length/median", "timing_s/updating", "sleep/used_mb"):
        assert not is_metric(name), name
    assert quoted('a "b c" `"d"`') == ["b c"] and named_metrics("`actor/x` `docs/x.md` `common/run.py`") == {"actor/x"}

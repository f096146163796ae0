"""The tables of docs/families.md, from what tests/model/scan_families.py found."""

import json
import re
from collections import defaultdict
from typing import Any

from common.forward.vision import FAMILIES
from tests.conftest import ROOT

FOUND = ROOT / "tests/evidence/families.json"
PAGE = ROOT / "docs/families.md"
BEGIN = "<!-- by python -m tests.model.scan_families --page -->\n"
END = "<!-- end -->\n"
COLUMNS = ("shared prompts", "sequence parallel", "adapters", "vLLM")
REASONS = {
    r"no causal LM|composite model|ConditionalGeneration": "reads images or more: take its language model",
    r"does not support an attention|packed_sdpa": "attention of its own, which takes no other",
    r"do not tell attention|missing \d required": "attention is not told where sequences begin",
    r"output head|must be a \*ForCausalLM": "encoder, or head with a bias",
    r"see each other": "packed sequences see each other",
    r"mask of their own|indexed|compressed": "sparse attention, by a mask of its own",
    r"Mamba-1|num_attention_heads": "state that cannot be told where sequences begin",
    r"kind 'hybrid": "layers that share weights, or of a kind of their own",
}
"""What is said of a refusal -> the reason in the page's words. The first one that is found counts."""


MOST_NAMED = 10
"""A row of more refused families says how many: they are encoders, older than three years, or composites."""


def load() -> dict[str, Any]:
    return json.loads(FOUND.read_text())


def short(cell: str) -> str:
    """The first words: a reason for a refusal is in the file."""
    kind = cell.partition(":")[0]
    return {"does not start": "no", "not made": "not run", "refused": "refused"}.get(kind, cell)


def reason_of(why: str) -> str:
    return next((words for pattern, words in REASONS.items() if re.search(pattern, why)), "other reasons")


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Families with equal columns are in one row, the most families first."""
    trained: dict[tuple[str, ...], list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for family, of_family in found.items():
        if of_family["result"] == "trains packed":
            cells = {name: short(of_family.get(name, "not run")) for name in COLUMNS}
            if family in FAMILIES:
                cells["vLLM"] = "yes, images"           # tests/vision/test_engines.py
            trained[tuple(cells.values())].append(family)
        elif of_family["result"] == "refused":
            refused[reason_of(of_family["why"])].append(family)
    lines = [f"| train packed | {' | '.join(COLUMNS)} |", f"| --- | {'--- | ' * len(COLUMNS)}".rstrip()]
    for cells, families in sorted(trained.items(), key=lambda row: (-len(row[1]), row[0])):
        lines.append(f"| {' '.join(families)} | {' | '.join(cells)} |")
    lines += ["", "| refused | why |", "| --- | --- |"]
    for why, families in sorted(refused.items(), key=lambda row: len(row[1])):
        named = " ".join(families) if len(families) < MOST_NAMED else f"{len(families)} others, in the file"
        lines.append(f"| {named} | {why} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    """Put the tables into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(load()['families'])}\n{END}{after}")

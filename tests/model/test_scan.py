"""Families whose configs or layers are written in other ways than most, by tests/model/scan_families.py; and the tables
of docs/families.md, which are made of what it found."""

import json
from importlib.metadata import version

import pytest

from common.forward import vision
from tests.conftest import launch
from tests.model import families, family_page
from tests.model.family_page import BEGIN, END, PAGE, load, tables
from tests.model.scan_families import RIGHT, architectures

FAMILIES = {
    "afmoe": "it takes a view of the attention's output",
    "aria_text": "its experts a token are moe_topk", "ernie4_5_moe": "... are moe_k",
    "bart": "", "gpt2": "",
}
NO_DECODER = {"bart"}
CHEAP = {
    "qwen3": "", "lfm2": "omit --policy.sequence-parallel",
    "doge": "its layers make a mask of their own",
    "nemotron": "its layers do not tell attention where packed sequences begin",
    "mbart": "packed sequences see each other",                         # its blocks have blocks inside
    "gemma3": "must be a *ForCausalLM",
}
"""Family -> what the refusal of it, or of sequence parallel, must say."""


def scan(tmp_path, *chosen: str) -> dict:
    launch("-m", "tests.model.scan_families", *chosen, "--out", tmp_path / "found.json")
    return json.loads((tmp_path / "found.json").read_text())["families"]


def test_what_a_family_can_do_is_found(tmp_path):
    found = scan(tmp_path, *CHEAP)
    for family, reason in CHEAP.items():
        of_family = found[family]
        if family in families.FAMILIES:
            assert of_family["result"] == "trains packed" and of_family["spread"] > 0.3
            assert of_family["shared prompts"] == of_family["adapters"] == "yes"
            assert of_family["sequence parallel"] == "yes" if not reason else reason in of_family["sequence parallel"]
        else:
            assert of_family["result"] == "refused" and reason in of_family["why"]


def test_the_page_is_what_was_found():
    """`python -m tests.model.scan_families --page` writes it."""
    found = load()
    assert found["transformers"] == version("transformers"), "scan the families again, in about 10 minutes"
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert table.strip() == tables(found["families"]).strip()


def test_no_family_is_claimed_that_was_not_run():
    found = load()["families"]
    assert sorted(found) == architectures()
    assert {of_family["result"] for of_family in found.values()} == {"trains packed", "refused", "not made"}
    for family, of_family in found.items():
        assert "WRONG" not in of_family.values(), family
        if of_family["result"] == "trains packed":
            assert max(of_family["logp"], of_family["gradient"]) < RIGHT < of_family["spread"]
            assert of_family.keys() >= {"shared prompts", "sequence parallel", "adapters"}
        else:
            assert of_family["why"]
    for family in {*families.FAMILIES, *vision.FAMILIES} - families.REFUSED:
        assert found[family]["result"] == "trains packed"
    rows = tables(found).splitlines()
    trained = {name for row in rows[2 : rows.index("")] for name in row.split("|")[1].split()}
    assert trained == {name for name, of_family in found.items() if of_family["result"] == "trains packed"}


def test_a_family_that_is_not_right_is_not_on_the_page():
    found = {name: dict(load()["families"][name]) for name in ("llama", "qwen3")}
    found["llama"]["result"] = "WRONG"
    assert "llama" not in tables(found) and "qwen3" in tables(found)
    found["qwen3"]["shared prompts"] = "refused: for a reason"
    assert "| qwen3 | refused | yes | yes |" in tables(found)
    assert family_page.reason_of("it holds a thing, which is no causal LM: choose") in family_page.REASONS.values()


@pytest.mark.sweep
def test_families_that_are_written_in_other_ways(tmp_path):
    found = scan(tmp_path, *FAMILIES)
    for family in FAMILIES:
        if family in NO_DECODER:
            assert found[family]["result"] == "refused" and "packed sequences see each other" in found[family]["why"]
        else:
            assert found[family]["result"] == "trains packed" and found[family]["shared prompts"] == "yes", family
            assert found[family]["spread"] > 0.1

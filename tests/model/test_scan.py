"""Families whose configs or layers are written in other ways than most, by tests/model/scan_families.py."""

import json

import pytest

from tests.conftest import launch

FAMILIES = {
    "afmoe": "it takes a view of the attention's output",
    "aria_text": "its experts a token are moe_topk", "ernie4_5_moe": "... are moe_k",
    "bart": "", "gpt2": "",
}
NO_DECODER = {"bart"}


@pytest.mark.sweep
def test_families_that_are_written_in_other_ways(tmp_path):
    launch("-m", "tests.model.scan_families", *FAMILIES, "--out", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["families"]
    for family in FAMILIES:
        if family in NO_DECODER:
            assert found[family]["result"] == "refused" and "packed sequences see each other" in found[family]["why"]
        else:
            assert found[family]["result"] == "trains packed" and found[family]["shares prompts"] == "yes", family
            assert found[family]["spread"] > 0.1

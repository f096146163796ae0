"""What can be known of the engine's options for GPUs without the packages of GPUs."""

import dataclasses
import types

import pytest
import torch
from torch import nn

from common.engine.extra import most_sequences
from tests.gpu import engine_configs
from tests.gpu.engine_configs import CASES, Case, failed_imports, options_of

VLLM = pytest.importorskip("vllm")


@pytest.mark.parametrize("name", CASES)
def test_vllm_knows_every_option(name):
    from vllm.engine.arg_utils import EngineArgs

    options = options_of(CASES[name])
    assert options.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert options["enable_sleep_mode"] and options["moe_backend"] == "triton"
    assert "kv_cache_memory_bytes" not in options                       # this one is for CPUs


def test_flags_arrive():
    options = options_of(Case(engine_configs.MIXTURE, {"tp": 4, "max_num_seqs": 7}, {"router_replay": "rollout"}))
    assert (options["tensor_parallel_size"], options["max_num_seqs"]) == (4, 7)
    assert options["enable_return_routed_experts"] and options["distributed_executor_backend"] == "external_launcher"
    assert options["gpu_memory_utilization"] == pytest.approx((79.2 - 10 - 5.5) / 79.2)
    assert options_of(CASES["`quantization` `fp8`"])["quantization"] == "fp8"


def test_an_option_that_is_changed_is_told():
    options = options_of(CASES["no flags"])
    flat = {place: options[option] for option, place in engine_configs.PLACES.items() if option in options}
    flat["model_config.dtype"] = engine_configs.torch.bfloat16

    class Config:
        """Answers for each place with what was asked for."""

        def __init__(self, prefix=""):
            self.prefix = prefix

        def __getattr__(self, name):
            place = self.prefix + name
            if not any(known.startswith(place) for known in flat):
                raise AttributeError(place)
            return flat[place] if place in flat else Config(place + ".")

    assert engine_configs.changes(Config(), options) == []
    flat["scheduler_config.max_num_seqs"] = 128
    assert engine_configs.changes(Config(), options) == ["max_num_seqs 256 -> 128"]
    for place, older in engine_configs.IN_0_26.items():
        flat[older] = not flat.pop(place)
    assert engine_configs.changes(Config(), options) == [
        "max_num_seqs 256 -> 128", "enable_return_routed_experts False -> True"]


def test_what_common_imports_is_there(tmp_path):
    assert failed_imports(engine_configs.ROOT / "common" / "engine") == []
    (tmp_path / "a.py").write_text("def f():\n    from vllm import LLM, Nothing\n    import no_such_package\n")
    found = failed_imports(tmp_path)
    assert len(found) == 2 and "vllm Nothing" in found[0] and "no_such_package" in found[1]


def test_the_table_says_which_gpus_chose_what():
    def row(result, **choices):
        return {"result": result, "choices": choices}

    x, y = (row("accepted", attention=name, graphs="9") for name in "XY")
    rows = {("a", "8.0"): x, ("a", "9.0"): y, ("a", "10.0"): x, ("b", "8.0"): row("refused: no"), ("b", "9.0"): y,
            ("b", "10.0"): y}
    assert engine_configs.table(rows, ["8.0", "9.0", "10.0"]).splitlines()[2:] == [
        "| a | accepted | accepted | accepted | 8.0, 10.0: X, 9<br>9.0: Y, 9 |",
        "| b | refused: no | accepted | accepted | 9.0, 10.0: Y, 9 |",
    ]


def test_what_sleep_loses_is_found():
    """Level 2 keeps buffers, and the trainer sends parameters; whatever else a layer holds on the GPU is gone."""
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
        layer.register_buffer("table", torch.ones(2), persistent=False)
        layer.tied, layer.kv_cache, layer.on_the_host = layer.weight, torch.ones(2), torch.ones(2, device="cpu")
        model = nn.Sequential(layer)
        assert engine_configs.lost_in_sleep(model) == []
        layer.plain, layer.some = torch.ones(2), [1, torch.ones(2)]
        layer.method = types.SimpleNamespace(scale=torch.ones(2), weight=layer.weight)
    assert engine_configs.lost_in_sleep(model) == ["Linear.method", "Linear.plain", "Linear.some"]


@pytest.mark.parametrize(("gib", "num_responses", "most"), [(79.2, 600, 600), (79.2, 4096, 1024), (79.2, 0, 256),
                                                            (44.4, 600, 256)])
def test_an_engine_decodes_what_it_has_up_to_the_limit_for_the_card(gib, num_responses, most, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, int(gib * 2**30)))
    assert most_sequences(torch.device("cuda", 0), num_responses) == most
    assert most_sequences(torch.device("cpu"), num_responses) == 256

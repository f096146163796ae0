"""Every causal language model and every image-text model of the installed transformers, as a tiny random one: does the
trainer take it, and do packed sequences, shared prompts, sequence parallel on two ranks, and adapters give
transformers' own numbers?

    python -m tests.model.scan_families [FAMILY...] --out tests/evidence/families.json
    python -m tests.model.scan_families [FAMILY...] --vllm --out tests/evidence/families.json   # adds vLLM's log-probs
    python -m tests.model.scan_families --page                              # writes the tables of docs/families.md

Each family has processes of its own. `--out` replaces what the file says of these families. Sizes are made small by the
names that configs have for them, or as in SPECIAL; a family whose config or model cannot be made so is `not made`, and
this says nothing of the family. What is compared, and with what, is in tests/model/families.py, whose families have
configs of their own and are compared in float64.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from common.dataset.store import load_prompts
from common.engine.make import check_states
from common.forward import vision
from common.forward.adapted import are_experts
from common.model.loading import Weights, load_policy, read_config
from common.model.lora import LoRAConfig, adapters_of, matrices_of
from common.model.policy import ModelConfig, Policy
from common.parallel import ranks
from common.prompts import DataConfig
from tests.model import families, family_page
from tests.vision import test_trainer, tiny_models

SECONDS = 150
LARGEST = 6 * 2**30
"""Bytes that a family's process may have: a field that is not in SMALL may leave a model large."""
SMALL: dict[str, Any] = families.SIZES | families.HEAD | {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96, "d_model": 64, "n_heads": 4,
    "n_layers": 2, "ffn_dim": 96, "ffn_hidden_size": 96, "word_embed_proj_dim": 64, "hidden_dim": 96, "num_layers": 2,
    "d_ff": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "moe_num_experts": 4, "moe_k": 2, "sliding_window": 4, "multi_query": False, "embedding_size": 64,
    "rotary_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
}
"""Fields of configs, where a config has them."""
WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
AS_PUBLISHED = {
    "afmoe": {"score_func": "sigmoid"},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": SIGMOID,
    "glm4_moe_lite": SIGMOID | {"first_k_dense_replace": 1},
}
"""Fields that published models have, transformers does not read, and vLLM does."""
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": WINDOW | {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in WINDOW["layer_types"]}},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": WINDOW | {
        "num_hidden_layers": 4, "layer_types": 2 * WINDOW["layer_types"], "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "laurel_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32}, "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "longcat_flash": {"zero_expert_num": 2, "expert_ffn_hidden_size": 32, "moe_topk": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 2, "image_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}},
    "qwen4_exp_text": {
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
        "indexer_compress_ratio": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Fields that a family must have besides."""
RIGHT = 1e-4
"""The largest difference of a log-prob in float32, and of gradients as `families.relative` says."""
LORA_RANK = 4


def architectures() -> list[str]:
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def config_of(family: str) -> Any:
    if family in families.FAMILIES:
        return families.config_of(family)
    kind = CONFIG_MAPPING[family]
    fields = kind().to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in fields and fields[name] is not None}
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(fields.get(name), list):
            known = [*dict.fromkeys(fields[name])]
            sizes[name] = [known[0], known[-1]]
    if "kv_lora_rank" in fields:                        # each head has keys of its own, and these widths
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if "head_dim" in sizes:
            sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return kind(**sizes | SPECIAL.get(family, {}))


def in_words(error: BaseException, path: str) -> str:
    return str(error).partition("\n")[0].replace(path, "it")[:250]


def make(family: str, folder: Path) -> dict[str, Any]:
    """Writes a tiny model into the folder, and what transformers says of it, one by one. Returns nothing, or why the
    family is refused or not made."""
    path = str(folder)
    try:
        config = config_of(family)
        config.save_pretrained(path)
    except Exception as error:
        return {"result": "not made", "why": f"{type(error).__name__}: {in_words(error, path)}"}
    try:
        read_config(path, ModelConfig())
    except ValueError as error:
        return {"result": "refused", "why": in_words(error, path)}
    try:
        families.save(config, folder)
        kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
        oracle = transformers.AutoModelForCausalLM.from_pretrained(path, **kinds)
        batch, upstream = batch_of_scan()
        logp, gradient = families.one_by_one(oracle.eval(), batch, upstream)
    except Exception as error:
        return {"result": "not made", "why": f"{type(error).__name__}: {in_words(error, path)}"}
    torch.save((logp, gradient), folder / "want.pt")
    return {}


def batch_of_scan() -> tuple[families.Batch, Tensor]:
    batch = families.make_batch()
    return batch, torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(2))


def wanted(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.load(folder / "want.pt")


def load(folder: Path, world: ranks.World, weights: Weights = families.ALL_TRAINED, **flags: Any) -> Policy:
    return load_policy(str(folder), ModelConfig(compute_dtype="float32", **flags), world, weights)


def is_right(found: Sequence[Any], want_logp: Tensor, want: dict[str, Tensor]) -> bool:
    logp, gradient = found
    return max(families.largest(logp, want_logp), families.relative(gradient, want)) < RIGHT


def packed(folder: Path) -> dict[str, Any]:
    world = ranks.init()
    batch, upstream = batch_of_scan()
    want_logp, want = wanted(folder)
    try:
        policy = load(folder, world)
    except ValueError as error:
        return {"result": "refused", "why": in_words(error, str(folder))}
    logp, gradient = families.packed(policy, batch, upstream)
    found: dict[str, Any] = {
        "logp": families.largest(logp, want_logp), "gradient": families.relative(gradient, want),
        "spread": float(want_logp[batch.mask].std()),
    }
    found["result"] = "trains packed" if max(found["logp"], found["gradient"]) < RIGHT else "WRONG"
    has_experts = any(p.ndim == 3 and "expert" in name for name, p in policy.lm.named_parameters())
    takes_adapters = any(map(are_experts, policy.lm.modules()))
    del policy
    try:
        shared = families.packed(load(folder, world, share_prompt=True), batch, upstream)
        found["shared prompts"] = "yes" if is_right(shared, want_logp, want) else "WRONG"
    except ValueError as error:
        found["shared prompts"] = f"refused: {in_words(error, str(folder))}"
    try:
        targets = ("all-linear", "experts") if takes_adapters else ("all-linear",)
        right = adapters(load(folder, world, Weights(lora=LoRAConfig(LORA_RANK, targets=targets))), want_logp, want)
        found["adapters"] = "WRONG"
        if right:
            found["adapters"] = "not experts" if has_experts and not takes_adapters else "yes"
    except ValueError as error:
        found["adapters"] = f"refused: {in_words(error, str(folder))}"
    return found


def adapters(policy: Policy, want_logp: Tensor, want: dict[str, Tensor]) -> bool:
    """Whether the adapters get the gradient that follows from that of the whole weight."""
    found = families.packed(policy, *batch_of_scan())
    return is_right(found, want_logp, of_adapters(policy, want))


def of_adapters(policy: Policy, want: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of B, which is 0, of adapters W' = W + s B A: s dW A^T."""
    expected = {}
    for name, adapter in adapters_of(policy.lm).items():
        if name in want:
            whole = want[name].mT if adapter.is_transposed else want[name]
            expected[matrices_of(name)[1]] = adapter.scale * whole @ adapter.a.full_tensor().mT
    assert expected
    return expected


def with_images(family: str, folder: Path) -> dict[str, Any]:
    """The same for a family that reads images, on rows with images, as tests/vision/test_trainer.py does."""
    world = ranks.init()
    path = tiny_models.make_vision_model(family, folder)
    rows = [tiny_models.write_rows(folder / "rows.parquet", tiny_models.ROWS)]
    prompts = load_prompts(rows, AutoTokenizer.from_pretrained(path), DataConfig())
    weights = {pair: 0.5 - 0.3 * i for i, pair in enumerate(test_trainer.ORDER)}
    logps, lm = test_trainer.alone(path, prompts, test_trainer.ORDER, with_grad=True)
    sum(weights[pair] * logp.sum() for pair, logp in zip(test_trainer.ORDER, logps)).backward()
    want_logp = torch.cat(logps).detach()
    want = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}

    def run(share_prompt: bool = False, **flags: Any) -> tuple[Policy, Tensor, dict[str, Tensor]]:
        policy = load(folder, world, share_prompt=share_prompt, **flags)
        policy.prompts = prompts
        batch = test_trainer.batch_of(prompts, test_trainer.ORDER).to("cpu", share_prompt)
        gradient = test_trainer.gradients(policy, [(batch, test_trainer.ORDER)], weights)
        return policy, policy.score(batch, 1.0)[batch.mask], gradient

    _, logp, gradient = run()
    found: dict[str, Any] = {
        "logp": families.largest(logp, want_logp), "gradient": families.relative(gradient, want),
        "spread": float(want_logp.std()),
    }
    found["result"] = "trains packed" if max(found["logp"], found["gradient"]) < RIGHT else "WRONG"
    found["shared prompts"] = "yes" if is_right(run(share_prompt=True)[1:], want_logp, want) else "WRONG"
    policy, *adapted = run(weights=Weights(lora=LoRAConfig(LORA_RANK)))
    found["adapters"] = "language model" if is_right(adapted, want_logp, of_adapters(policy, want)) else "WRONG"
    try:
        read_config(path, ModelConfig(sequence_parallel=2))
        found["sequence parallel"] = "WRONG"
    except ValueError as error:
        found["sequence parallel"] = f"refused: {in_words(error, path)}"
    return found


def in_two_ranks(folder: Path) -> dict[str, Any]:
    """Sequence parallel: each rank brings every second sequence."""
    world = ranks.init(sequence_parallel=2)
    batch, upstream = batch_of_scan()
    want_logp, want = wanted(folder)
    mine = torch.arange(world.rank, len(batch), world.size)
    is_mine = (batch.sequence_ids % world.size) == world.rank                                   # [T]
    try:
        policy = load(folder, world, sequence_parallel=2)
    except ValueError as error:
        return {"sequence parallel": f"refused: {in_words(error, str(folder))}"}
    # FSDP2 averages the gradients of the ranks
    found = families.packed(policy, batch.select(mine), world.size * upstream[is_mine])
    return {"sequence parallel": "yes" if is_right(found, want_logp[is_mine], want) else "WRONG"}


def by_vllm(folder: Path) -> dict[str, Any]:
    """vLLM samples after a weight sync, and the trainer scores what it sampled."""
    try:
        check_states(read_config(str(folder), ModelConfig()), "cpu")
    except ValueError as error:
        return {"vLLM": f"refused: {in_words(error, str(folder))}"}
    world = ranks.init()
    try:
        difference = families.compare_engine("vllm", str(folder), world)
    except Exception as error:
        said = in_words(error, str(folder))
        if said.startswith("--"):                       # a flag: the engine's own refusal
            return {"vLLM": f"refused: {said}"}
        return {"vLLM": f"does not start: {type(error).__name__}: {said}"}
    return {"vLLM": "yes" if difference < RIGHT else "differs", "vLLM's difference": difference}


def in_processes(function: Callable[[], dict[str, Any]], count: int = 1, seconds: float = SECONDS) -> dict[str, Any]:
    """`function` on `count` ranks, which are ended after some seconds: what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, pipes = [], []
    for rank in range(count):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                           "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
            try:
                theirs.send(function())
            except BaseException as error:
                theirs.send({"result": "BROKEN", "why": f"{type(error).__name__}: {error}"[:250]})
            os._exit(0)
        theirs.close()
        children.append(child)
        pipes.append(ours)
    end = time.monotonic() + seconds
    answers = []
    for pipe in pipes:
        answer = {"result": "BROKEN", "why": f"no answer in {seconds} s"}
        try:
            if pipe.poll(max(end - time.monotonic(), 0)):
                answer = pipe.recv()
        except EOFError:
            answer = {"result": "BROKEN", "why": "its process ended"}
        answers.append(answer)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    others = [answer for answer in answers if answer != answers[0]]
    return others[0] if others else answers[0]


def examine(family: str) -> dict[str, Any]:
    """What was found: `result` in a word, and why or how far."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if family in vision.FAMILIES:
            return in_processes(partial(with_images, family, folder))
        found = in_processes(partial(make, family, folder))
        if found.get("result") == "BROKEN":             # by transformers alone
            return found | {"result": "not made"}
        if not found:
            found = in_processes(partial(packed, folder))
            if found["result"] == "trains packed":
                found |= in_processes(partial(in_two_ranks, folder), count=2)
        return found


def for_vllm(family: str) -> Any:
    """The config with heads as wide as vLLM's attention on CPUs needs, and an output head that is tied where the
    family's is."""
    fields = config_of(family).to_dict()
    changes = {"tie_word_embeddings": CONFIG_MAPPING[family]().tie_word_embeddings}
    if not fields.get("head_dim") and "kv_lora_rank" not in fields:
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_head": 2}
    elif fields.get("head_dim") == 16:
        changes["head_dim"] = 32
    if "kv_lora_rank" in fields:                        # the widths for which vLLM has latent attention
        changes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64,
                    "qk_head_dim": fields["qk_nope_head_dim"] + 64}
    known = {name: x for name, x in changes.items() if name in fields}
    return CONFIG_MAPPING[family](**fields | known | AS_PUBLISHED.get(family, {}))


def examine_vllm(family: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        try:
            families.save(for_vllm(family), Path(name))
        except Exception as error:
            return {"vLLM": f"not made: {type(error).__name__}: {in_words(error, name)}"}
        return in_processes(partial(by_vllm, Path(name)), seconds=SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", default="")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        family_page.write()
        return
    table: dict[str, dict[str, Any]] = {}
    if options.out and Path(options.out).exists():
        table = json.loads(Path(options.out).read_text())["families"]
    chosen = options.families or architectures()
    if options.vllm:
        importlib.import_module("vllm")                 # once, and not in each process
        chosen = [family for family in chosen if "logp" in table[family] and family not in vision.FAMILIES]
    for family in chosen:
        if options.vllm:
            table[family].pop("why", None)
            answer = examine_vllm(family)
            answer.pop("result", None)
            table[family] |= answer
        else:
            engines = {name: x for name, x in table.get(family, {}).items() if name.startswith("vLLM")}
            table[family] = examine(family) | engines
        print(family, json.dumps(table[family]), flush=True)
        if options.out:
            found = {"transformers": version("transformers"), "families": dict(sorted(table.items()))}
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(Counter(table[family]["result"] for family in chosen))


if __name__ == "__main__":
    main()

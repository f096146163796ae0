"""Every causal language model of the installed transformers, as a tiny random one: does the trainer take it, and do
packed sequences give transformers' own numbers?

    python -m tests.model.scan_families [FAMILY...] --out tests/evidence/families.json

Each family has a process of its own. Sizes are made small by the names that configs have for them; a family whose
config or model cannot be made so is `not made`, and says nothing of the family. What is compared, and with what, is in
tests/model/families.py, whose families have configs of their own and more columns.
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.parallel import ranks
from tests.model import families

SECONDS = 60
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
    "v_head_dim": 16,
}
"""Fields of configs, where a config has them."""
RIGHT = 1e-4
"""The largest difference of a log-prob in float32, and of gradients as `families.relative` says."""


def config_of(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    fields = kind().to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in fields and fields[name] is not None}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(fields.get(name), list):
            known = [*dict.fromkeys(fields[name])]
            sizes[name] = [known[0], known[-1]]
    return kind(**sizes)


def examine(family: str, folder: Path) -> dict[str, Any]:
    """What was found: `result` in a word, and why or how far."""
    world = ranks.init()
    try:
        path = families.save(config_of(family), folder)
        kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
        oracle = transformers.AutoModelForCausalLM.from_pretrained(path, **kinds)
        batch = families.make_batch()
        upstream = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(2))
        want_logp, want = families.one_by_one(oracle.eval(), batch, upstream)
    except Exception as error:
        return {"result": "not made", "why": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"}
    config = ModelConfig(compute_dtype="float32")
    try:
        policy = load_policy(path, config, world)
    except ValueError as error:
        return {"result": "refused", "why": str(error).replace(path, "it")[:250]}
    logp, gradient = families.packed(policy, batch, upstream)
    found: dict[str, Any] = {
        "logp": families.largest(logp, want_logp), "gradient": families.relative(gradient, want),
        "spread": float(want_logp[batch.mask].std()),
    }
    found["result"] = "trains packed" if max(found["logp"], found["gradient"]) < RIGHT else "WRONG"
    try:
        shared = load_policy(path, ModelConfig(compute_dtype="float32", share_prompt=True), world)
        logp, gradient = families.packed(shared, batch, upstream)
        is_right = max(families.largest(logp, want_logp), families.relative(gradient, want)) < RIGHT
        found["shares prompts"] = "yes" if is_right else "WRONG"
    except ValueError as error:
        found["shares prompts"] = f"refused: {str(error).replace(path, 'it')[:120]}"
    return found


def in_a_process(family: str) -> dict[str, Any]:
    """`examine`, ended after SECONDS."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
        with tempfile.TemporaryDirectory() as folder:
            try:
                theirs.send(examine(family, Path(folder)))
            except BaseException as error:
                theirs.send({"result": "BROKEN", "why": f"{type(error).__name__}: {error}"[:250]})
        os._exit(0)
    theirs.close()
    found = {"result": "not made", "why": f"no answer in {SECONDS} s"}
    try:
        if ours.poll(SECONDS):
            found = ours.recv()
    except EOFError:
        found = {"result": "not made", "why": "its process ended"}
    os.kill(child, 9)
    os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    table = {}
    for family in options.families:
        table[family] = in_a_process(family)
        print(family, json.dumps(table[family]), flush=True)
    print(Counter(found["result"] for found in table.values()))
    if options.out:
        text = json.dumps({"transformers": version("transformers"), "families": table}, indent=1)
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()

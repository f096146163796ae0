"""Adapters and vLLM: trainer and engine differ as in full training with the same weights. Of an exported adapter its
own loader takes the files, and what it samples with them has the log-probs of the trainer's merged weights.
tests/model/test_lora.py: the same files in peft."""

# ruff: noqa: F811  (fixtures that are imported)

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from common.batch import Batch
from common.checkpoint.export import export
from common.engine.base import SamplingConfig
from common.model.loading import load_policy
from common.model.lora import LoRAConfig, adapters_of
from tests.checkpoint.test_checkpoint import watch  # noqa: F401 (fixture)
from tests.engine.engine_models import PROMPTS, SEEDS, make_model, start
from tests.generate import generate
from tests.model.test_lora import BF16, FLOAT32, RANK4, adapted, save
from tools import checkpoints

EXPERTS = LoRAConfig(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "experts"))


@pytest.mark.usefixtures("frozen_imports")
@pytest.mark.parametrize(("family", "config"), [("qwen2", RANK4), ("qwen3_moe", EXPERTS)])
def test_trainer_and_engine_differ_as_in_full_training(family, config, world, tmp_path):
    """In bfloat16: the same responses, and to the bit the same log-probs on both sides, as those of a model whose
    trained weights are the merged ones."""
    model = make_model(family, False, tmp_path)
    engine, base = start(model, world, dtype="bfloat16")
    adapters = adapted(model, world, BF16, config)
    content = adapters.lm.config.to_json_string(use_diff=False).encode()
    export(adapters, {"config.json": content}, tmp_path / "merged", world)
    seen = []
    for version, policy in enumerate([base, adapters, load_policy(str(tmp_path / "merged"), BF16, world)]):
        policy.version = version
        engine.wake(policy)
        found = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 24))
        engine.sleep()
        batch = Batch.build(PROMPTS, [response.tokens for response in found])
        theirs = torch.tensor([logp for response in found for logp in response.logp])
        seen.append((batch.tokens, theirs, policy.score(batch, 1.0)[batch.mask]))
    engine.close()
    before, with_adapters, with_all = seen
    assert all(map(torch.equal, with_adapters, with_all))
    off = [float((ours.exp() - theirs.exp()).abs().mean()) for _, theirs, ours in seen]
    print(f"\nmean difference of probabilities, trainer and engine: adapters {off[1]:.6f}, all weights {off[2]:.6f}")
    assert off[1] == off[2] > 0 and not torch.equal(before[0], with_all[0])


@pytest.mark.usefixtures("frozen_imports")
def test_vllm_samples_with_an_exported_adapter(world, watch, tmp_path, monkeypatch):
    """As the adapter of a request: vLLM computes W x + alpha / rank B (A x), the trainer (W + alpha / rank B A) x."""
    model = make_model("qwen2", False, tmp_path)
    base, policy = load_policy(model, FLOAT32, world), adapted(model, world, FLOAT32)
    files = {"config.json": policy.lm.config.to_json_string(use_diff=False).encode()}
    save(policy, model, files, world, watch, tmp_path)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "adapter", adapter=True)

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with mock.patch.dict("os.environ"), mock.patch.object(torch, "set_num_threads", torch.set_num_threads):
        from vllm import LLM, SamplingParams
        from vllm.distributed import parallel_state
        from vllm.lora.request import LoRARequest

        llm = LLM(model, enable_lora=True, max_lora_rank=8, max_loras=1, dtype="float32", enforce_eager=True,
                  max_model_len=64, max_num_seqs=8, kv_cache_memory_bytes=2**26, skip_tokenizer_init=True,
                  distributed_executor_backend="external_launcher")
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    largest = {}
    for name, request in {"adapter": LoRARequest("a", 1, str(tmp_path / "adapter")), "none": None}.items():
        outs = [out.outputs[0] for out in llm.generate(requests, params, lora_request=request, use_tqdm=False)]
        batch = Batch.build(PROMPTS, [list(out.token_ids) for out in outs])
        theirs = torch.tensor([step[t].logprob for out in outs for step, t in zip(out.logprobs, out.token_ids)])
        for kind, ours in (("merged", policy), ("base", base)):
            largest[name, kind] = float((ours.score(batch, 1.0)[batch.mask] - theirs).abs().max())
    with mock.patch.object(parallel_state, "destroy_distributed_environment"):          # it is the tests'
        llm.llm_engine.engine_core.shutdown()
    print(f"\nlargest difference of a log-prob, vLLM and trainer: {largest}")
    assert largest["adapter", "merged"] < 1e-4 > largest["none", "base"]
    assert largest["adapter", "base"] > 0.1 < largest["none", "merged"]


def test_vllm_splits_the_adapters_of_experts_as_they_were_trained(world, watch, tmp_path):
    """vLLM's kernels for adapters of experts need a GPU, its reader does not: what it makes of the exported files gives
    each expert's product. It reads this layout with enable_mixed_moe_lora_format and a request's is_3d_lora_weight."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    model = make_model("qwen3_moe", False, tmp_path)
    policy = adapted(model, world, FLOAT32, EXPERTS)
    save(policy, model, {"config.json": policy.lm.config.to_json_string(use_diff=False).encode()}, world, watch,
         tmp_path, EXPERTS)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "adapter", adapter=True)
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), None)
    read = LoRAModel.from_lora_tensors(1, load_file(tmp_path / "adapter/adapter_model.safetensors"), helper, "cpu")
    manager = SimpleNamespace(_get_lora_layer_weights=lambda lora_model, name: lora_model.get_lora(name),
                              model=SimpleNamespace(config=policy.lm.config))
    policy.lm.config.architectures = ["Qwen3MoeForCausalLM"]
    trained = adapters_of(policy.lm)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        experts = SimpleNamespace(local_num_experts=4, global_num_experts=4, ep_rank=0)
        LoRAModelManager._convert_3d_to_2d_moe_lora(manager, read, experts, name)
        gate, down, up = (b @ a for a, b in zip(read.loras[name].lora_a, read.loras[name].lora_b))
        for own_name, found in {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}.items():
            adapter = trained[f"{name}.{own_name}"]
            want = adapter.b.full_tensor() @ adapter.a.full_tensor()
            assert want.abs().max() > 0.01 and torch.allclose(found, want, atol=1e-6)
            assert helper.vllm_lora_scaling_factor == adapter.scale

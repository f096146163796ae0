"""An exported adapter in vLLM: its own loader takes the files, and what it samples with them has the log-probs of the
trainer's merged weights. tests/model/test_lora.py: the same files in peft."""

# ruff: noqa: F811  (fixtures that are imported)

from unittest import mock

import pytest
import torch

from common.batch import Batch
from common.model.loading import load_policy
from tests.checkpoint.test_checkpoint import watch  # noqa: F401 (fixture)
from tests.engine.engine_models import PROMPTS, make_model
from tests.model.test_lora import FLOAT32, adapted, save
from tools import checkpoints


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

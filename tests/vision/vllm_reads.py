"""Run by test_export.py: vLLM's log-probs of the tokens in a text, with the weights of a folder."""

import sys

import torch

from tests.vision.stand_in import without_torchvision

if __name__ == "__main__":
    without_torchvision()
    from vllm import LLM, SamplingParams

    folder, out, *tokens = sys.argv[1:]
    prompt = [int(token) for token in tokens]
    llm = LLM(folder, dtype="float32", max_model_len=64, enforce_eager=True, block_size=32, disable_log_stats=True,
              kv_cache_memory_bytes=2**26, mm_hasher_algorithm="sha256", mm_device_do_normalize=False,
              enable_chunked_prefill=False, max_num_batched_tokens=2048, limit_mm_per_prompt={"image": 1, "video": 0})
    found, = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    torch.save(torch.tensor([one[token].logprob for one, token in zip(found.prompt_logprobs[1:], prompt[1:])]), out)

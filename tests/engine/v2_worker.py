"""What `common/speculation` puts into vLLM's V2 model runner, with vLLM's own Triton kernels: on a GPU, or with
TRITON_INTERPRET=1 on a CPU. Prints what it found as JSON."""

import json
import os
import tempfile
import types
from pathlib import Path

import torch

if os.environ.get("TRITON_INTERPRET"):  # vLLM's CPU build turns Triton off: its modules are loaded with it on
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as tldevice
    import vllm.triton_utils
    import vllm.triton_utils.importing

    vllm.triton_utils.importing.HAS_TRITON = vllm.triton_utils.HAS_TRITON = True
    vllm.triton_utils.triton = triton
    vllm.triton_utils.tl = tl
    vllm.triton_utils.tldevice = tldevice

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from common.speculation.drafts import NoSpeculator, draft_options, prepare_vllm
from common.speculation.verify import verify_v2, write_v2
from tests.engine.engine_models import make_model

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
V, N = 8, 3  # tokens of the vocabulary, and of the longest draft


def tensor(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def one_by_one(logits, temperature, seed, pos, draft) -> tuple[list[int], int]:
    """A request alone, token after token, each by vLLM's sampler on one row: its tokens, and how many drafts of this
    list were right."""
    tokens = []
    for row in range(len(draft) + 1):
        sampled = gumbel_sample(logits[row : row + 1], tensor([0]), temperature, seed, pos[row : row + 1],
                                apply_temperature=False, is_drafting=False)
        tokens.append(int(sampled))
        if row == len(draft) or tokens[-1] != draft[row]:
            break
    return tokens, len(tokens) - 1


def same_as_one_by_one(num_requests: int) -> dict[str, int]:
    """Requests with drafts of 0 to N tokens in one batch, in another order than in vLLM's state. Half of the drafts are
    what the request will sample, as far as they go; the last one may be -1, which a grammar has ruled out."""
    numbers = torch.Generator().manual_seed(0)
    lengths = [n % (N + 1) for n in range(num_requests)]
    slots = torch.randperm(num_requests, generator=numbers)
    logits = 2 * torch.randn(sum(lengths) + num_requests, V, generator=numbers)
    temperature = torch.tensor([0.0, 1.0, 0.7])[torch.arange(num_requests) % 3].to(DEVICE)
    seed = tensor([7919 * n + 1 for n in range(num_requests)], torch.int64)
    logits = logits.to(DEVICE)
    found = {"requests": num_requests, "kept": 0, "drafted": 0, "different": 0}
    inputs, starts, owners, places, wanted = [], [0], [], [], []
    for request, length in enumerate(lengths):
        slot, first = int(slots[request]), starts[-1]
        pos = tensor([10 + slot + n for n in range(length + 1)], torch.int64)
        draft: list[int] = []
        while len(draft) < length:                                      # what it will sample, or something else
            own = one_by_one(logits[first:], temperature[slot : slot + 1], seed[slot : slot + 1], pos, draft)[0]
            right = own[len(draft)] if len(own) > len(draft) else 0
            draft.append(right if torch.rand((), generator=numbers) < 0.7 else (right + 1) % V)
        if length == N and request % 8 == 3:
            draft[-1] = -1
        wanted.append(one_by_one(logits[first:], temperature[slot : slot + 1], seed[slot : slot + 1], pos, draft))
        inputs += [5, *draft]
        starts.append(first + length + 1)
        owners += [slot] * (length + 1)
        places += pos.tolist()
    order = rejection_sampler.rejection_sample(
        logits, None, tensor(inputs), tensor(starts), tensor(places, torch.int64), slots.to(torch.int32).to(DEVICE),
        tensor(owners), tensor([0] * len(owners)), temperature, seed, N)
    for request, (tokens, counts) in enumerate(zip(order[0].tolist(), order[1].tolist())):
        own, num_kept = wanted[request]
        found["different"] += tokens[:counts] != own
        found["kept"] += num_kept
        found["drafted"] += lengths[request]
    return found


def inputs_of_the_next_pass() -> list[int]:
    """Three requests, in another order than in vLLM's state, the second one without a draft: what vLLM's kernel makes
    of `write_v2`."""
    states = types.SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0, "c": 1}, draft_tokens=torch.zeros(4, N, dtype=torch.int64, device=DEVICE))
    speculator = NoSpeculator(None, torch.device(DEVICE), states)
    states.draft_tokens[tensor([2, 0, 1], torch.int64)] = speculator.propose(types.SimpleNamespace(num_reqs=3))
    write_v2(states, ["a", "b", "c"], [[11, 12, 13], [], [31]])
    lengths = [3, 0, 1]
    starts = [0, 4, 5, 7]
    inputs = tensor([0] * 7)
    combine_sampled_and_draft_tokens(
        inputs, tensor([2, 0, 1]), tensor([[20], [30], [10], [0]], torch.int64), tensor(starts),
        tensor([50 + n for n in lengths]), tensor([5, 5, 5, 5]), states.draft_tokens, tensor(starts), 7)
    return inputs.tolist()


def is_v2(folder: str) -> list[bool]:
    """Whether vLLM's own configuration takes the V2 runner: without drafts, and with them."""
    model = make_model("llama", True, Path(folder))
    found = []
    for options in ({}, draft_options(4, 64)):
        config = EngineArgs(model, max_num_seqs=64, enforce_eager=True, **options).create_engine_config()
        assert options == {} or not config.scheduler_config.async_scheduling
        found.append(config.use_v2_model_runner)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = is_v2(folder)
        prepare_vllm()
        after = is_v2(folder)
    print(json.dumps({
        "before": before,
        "after": after,
        "replaced": [model_runner.init_speculator is NoSpeculator, rejection_sampler.rejection_sample is verify_v2],
        "same": same_as_one_by_one(96),
        "inputs": inputs_of_the_next_pass(),
    }))


if __name__ == "__main__":
    main()

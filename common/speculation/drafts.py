"""--rollout.drafts: several tokens of a response from one pass of the engine, and no token another one.

The history guesses the next tokens of a response (history.py), and one pass computes the logits after each of them.
Those that the engine would have sampled anyway are kept (verify.py). So tokens and log-probs are those of an engine
without drafts, whatever was guessed.

vLLM 0.32 asks its executor for drafts between two passes: `Drafts` answers. vLLM's own drafters are told to do nothing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from common.parallel.ranks import all_sum
from common.speculation.history import LONGEST, History
from common.speculation.verify import V1_PARTS, V2_PARTS, check_vllm_parts, verify_v1, verify_v2, write_v2

FREE_ROWS = 160
"""Most rows (responses times 1 + --rollout.drafts) of a pass with drafts. On a GPU the weights are read in the time in
which about 200 rows are computed (arithmetic for a dense model in bfloat16 on an H100, not measured)."""


@dataclass
class Begun:
    """What a request was added with."""

    key: int  # of its prompt in the history
    last: list[int]  # tokens of its end, at most LONGEST
    num_prompt: int  # the first tokens of `last` that are the prompt's; negative if the prompt ends before them


@dataclass
class Drafted:
    """A request of vLLM's, before the pass that is running."""

    request: Any
    num_before: int  # tokens that had been sampled
    num_drafted: int


def largest_batch(num_drafts: int) -> int:
    """Responses that run at most in a pass with drafts."""
    return FREE_ROWS // (1 + num_drafts)


def draft_options(num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
    """The arguments of LLM(...). With a schedule, vLLM does not pad new requests to the length of a draft, and has CUDA
    graphs for passes without drafts too."""
    largest = min(largest_batch(num_drafts), max_num_seqs)
    schedule = [(1, largest, num_drafts)]
    if largest < max_num_seqs:
        schedule.append((largest + 1, max_num_seqs, 0))
    return {"speculative_config": {
        "method": "custom_class",
        "model": f"{__name__}.{NoDrafter.__name__}",
        "num_speculative_tokens": num_drafts,
        "num_speculative_tokens_per_batch_size": schedule,
    }}


def prepare_vllm() -> None:
    """Before LLM(...). These patches stay, because vLLM asks again while it runs, and do nothing without drafts."""
    from vllm.config.vllm import VllmConfig
    from vllm.triton_utils import HAS_TRITON

    features = VllmConfig._get_v2_model_runner_unsupported_features
    if hasattr(features, "__wrapped__"):
        return
    check_vllm_parts(V1_PARTS)

    @functools.wraps(features)
    def without_drafter(config: Any) -> list[str]:
        """Why not V2: its drafters are its own, but one that drafts nothing can stand for them."""
        return [feature for feature in features(config) if "custom_class" not in feature]

    mock.patch.object(VllmConfig, "_get_v2_model_runner_unsupported_features", without_drafter).start()
    if HAS_TRITON:
        check_vllm_parts(V2_PARTS)
        mock.patch("vllm.v1.worker.gpu.model_runner.init_speculator", NoSpeculator).start()
        mock.patch("vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample", verify_v2).start()


class NoDrafter:
    """In place of V1's drafter."""

    def __init__(self, vllm_config: Any):
        """vLLM passes its configuration."""

    def load_model(self, *_: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: Sequence[Any], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class NoSpeculator:
    """In place of V2's drafter: zeros, over which `Drafts` writes before the next pass reads them."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        self.zeros = torch.zeros_like(req_states.draft_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(self, input_batch: Any, *_: Any, **__: Any) -> Tensor:
        return self.zeros[: input_batch.num_reqs].clone()  # vLLM writes into it


class Drafts:
    """The drafts of one engine. All ranks of an engine make the same calls in the same order, so they draft the same
    tokens: each rank's vLLM decides the size of a pass by itself, and unequal ones would wait for each other forever.
    """

    def __init__(self, num_drafts: int, llm: Any):
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.scheduler = core.scheduler
        self.outputs = llm.llm_engine.output_processor
        self.num_drafts = num_drafts
        self.history = History()
        self.begun: dict[str, Begun] = {}
        self.running: list[Drafted] = []
        self.num_passes = 0  # of one response each, which might have had a draft
        self.num_tokens = 0  # that they sampled
        self.num_drafted = 0
        core.model_executor.take_draft_token_ids = self.draft
        self.is_v2 = llm.llm_engine.vllm_config.use_v2_model_runner
        if not self.is_v2:
            self.runner.rejection_sampler.forward = functools.partial(verify_v1, self.runner.sampler)

    def begin(self, request: int, tokens: Sequence[int]) -> None:
        """A request was added with these tokens."""
        key, num_prompt = self.history.find(tokens)
        last = list(tokens[-LONGEST:])
        self.begun[str(request)] = Begun(key, last, num_prompt - (len(tokens) - len(last)))

    def end(self, request: int, tokens: Sequence[int]) -> None:
        """A request has ended, or was aborted, with these sampled tokens."""
        begun = self.begun.pop(str(request))
        self.history.add(begun.key, begun.last, begun.num_prompt, tokens)

    def draft(self) -> Any:
        """vLLM's DraftTokenIds for the next pass."""
        from vllm.v1.outputs import DraftTokenIds

        self._count()
        requests = self.scheduler.running
        ids = [request.request_id for request in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        if len(requests) <= largest_batch(self.num_drafts):
            drafts = [self._draft_of(request) for request in requests]
            for request, draft in zip(requests, drafts):
                self.running.append(Drafted(request, request.num_output_tokens, len(draft)))
            if self.is_v2:
                write_v2(self.runner.req_states, ids, drafts)
        return DraftTokenIds(ids, drafts)

    def _draft_of(self, request: Any) -> list[int]:
        most = min(self.num_drafts, request.max_tokens - request.num_output_tokens - 1)
        if most < 1 or not request.num_output_tokens:
            return []
        begun = self.begun[self.outputs.request_states[request.request_id].external_req_id]
        last = request.all_token_ids[-LONGEST:]
        # counted from the end, because vLLM expands images in its prompt
        num_prompt = begun.num_prompt - len(begun.last) - request.num_output_tokens + len(last)
        return self.history.guess(begun.key, last, num_prompt, most)

    def _count(self) -> None:
        """What has become of the drafts before the last pass."""
        for drafted in self.running:
            num_sampled = drafted.request.num_output_tokens - drafted.num_before
            if num_sampled and drafted.num_before:  # else the request did not run, or its prompt did
                self.num_passes += 1
                self.num_tokens += num_sampled
                self.num_drafted += drafted.num_drafted
        self.running = []

    def metrics(self) -> dict[str, float]:
        """Of all engines since the last call, under SGLang's names. All ranks call it together."""
        self._count()
        num_passes, num_tokens, num_drafted = all_sum([self.num_passes, self.num_tokens, self.num_drafted]).tolist()
        self.num_passes = self.num_tokens = self.num_drafted = 0
        found = {}
        if num_passes:
            found["rollout/spec_accept_length"] = num_tokens / num_passes
        if num_drafted:
            found["rollout/spec_accept_rate"] = (num_tokens - num_passes) / num_drafted
        return found

"""The tokens and log-probs of responses that go on, appended to vLLM's lists by a short loop.

vLLM 0.32's output processor does for every token of every response what is needed once, when a response ends. Here the
passes in between only append; a response's first and last pass are vLLM's own, so that what it makes of them is the
same. Another vLLM, a request with stop texts, routed experts and statistics are left to vLLM altogether.
"""

import inspect
from collections.abc import Iterable
from typing import Any

PARAMETERS = "engine_core_outputs engine_core_timestamp iteration_stats weight_version"
"""Of vLLM 0.32's `OutputProcessor.process_outputs`."""


def shorten(processor: Any) -> None:
    """Put the short loop before this output processor's `process_outputs`."""
    finish = getattr(processor, "process_outputs", None)
    if finish is None or " ".join(inspect.signature(finish).parameters) != PARAMETERS:
        return
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    def process_outputs(outputs: Iterable[Any], iteration_stats: Any = None, **others: Any) -> Any:
        states = processor.request_states
        left = []
        for output in outputs:
            state = states.get(output.request_id)
            is_plain = (
                state is not None
                and not state.is_prefilling
                and type(state.detokenizer) is IncrementalDetokenizer  # which reads no text
                and type(state.logprobs_processor.logprobs) is FlatLogprobs
                and output.routed_experts is None
                and output.new_logprobs is not None
                and iteration_stats is None
            )
            if is_plain and output.finish_reason is None:
                state.detokenizer.token_ids += output.new_token_ids
                state.logprobs_processor.logprobs.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                continue
            if is_plain:
                complete(state)
            left.append(output)
        return finish(left, iteration_stats=iteration_stats, **others)

    processor.process_outputs = process_outputs


def complete(state: Any) -> None:
    """Before vLLM makes an output of a request's state: the other lists of its log-probs, which have one for each
    token."""
    if state.logprobs_processor is None or not hasattr(state.logprobs_processor.logprobs, "start_indices"):
        return
    flat = state.logprobs_processor.logprobs
    begin = len(flat.start_indices)
    end = len(flat.logprobs)
    flat.start_indices += range(begin, end)
    flat.end_indices += range(begin + 1, end + 1)
    flat.token_ids += state.detokenizer.token_ids[begin:end]
    flat.ranks += [None] * (end - begin)
    flat.decoded_tokens += [None] * (end - begin)
    state.logprobs_processor.cumulative_logprob += sum(flat.logprobs[begin:end])

"""Which drafted tokens are kept, in vLLM 0.32's two model runners: those that the engine samples itself.

A token x is sampled from p with the response's own random numbers, as without a draft. The draft d for its place is
kept if x = d, which has the probability p(d): as often as rejection sampling would keep a draft that is certain of d
(Leviathan et al. 2023, sec. 2.3). And x is the response's token in both cases, so no draft can change a response.

V1 draws from a generator of each response, one token after the other. V2 makes its random numbers of a response's seed
and the place of a token. These modules are vLLM's own, so their parameters are compared with those that they had.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

V1_PARTS = {
    "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features": "self",
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": "self draft_token_ids",
    "vllm.v1.engine.core.EngineCore.post_step": "self model_executed",
    "vllm.v1.sample.rejection_sampler.RejectionSampler.forward":
        "self metadata draft_probs logits sampling_metadata",
    "vllm.v1.sample.sampler.Sampler.forward":
        "self logits sampling_metadata predict_bonus_token logprobs_mode_override",
}
"""What is replaced or called of vLLM -> its parameters in vLLM 0.32."""
V2_PARTS = {
    "vllm.v1.worker.gpu.model_runner.init_speculator": "vllm_config device req_states",
    "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample":
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting logits_cache "
        "logits_cache_col use_fp64 logits_cache_source",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample":
        "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
        "expanded_local_pos temperature seed num_speculative_steps synthetic_conditional_rates use_fp64 "
        "use_block_verification contexts watermarking watermarking_skip_mask watermark_key",
}
"""Those of the V2 runner alone, whose modules need Triton."""


def check_vllm_parts(parts: dict[str, str]) -> None:
    """Raise ValueError if this vLLM has other parts than the one that they were read in."""
    for path, parameters in parts.items():
        found = "nothing of that name"
        part = part_of_vllm(path)
        if part is not None:
            found = " ".join(inspect.signature(part).parameters)
        if found != parameters:
            raise ValueError(f"--rollout.drafts is written for vLLM 0.32.0, where {path} takes ({parameters}), and "
                             f"here it takes ({found}): set --rollout.drafts 0, or install vllm 0.32.0")


def part_of_vllm(path: str) -> Any:
    """The function of this path, which names modules, perhaps a class, and the function; None: there is none."""
    names = path.split(".")
    for i in range(len(names) - 1, 0, -1):
        try:
            part: Any = importlib.import_module(".".join(names[:i]))
        except ModuleNotFoundError:
            continue
        for name in names[i:]:
            part = vars(part).get(name)
            if part is None:
                return None
        return part
    return None


def verify_v1(sampler: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
    """In place of `RejectionSampler.forward`. `logits` [R, V]: of each request the rows of its draft and one more, each
    computed after the drafted tokens before it. Returns vLLM's SamplerOutput: tokens [S, 1 + longest draft], -1 after
    the first one that differs from its draft, and their log-probs.

    One place after the other: a row is sampled only if all drafts before it were kept. So a response's generator draws
    as often as without drafts, and the sampler sees no row that would not be there without them."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    assert draft_probs is None, "a draft with probabilities would be kept less often than rejection sampling keeps it"
    lengths = metadata.num_draft_tokens
    num_places = max(lengths) + 1
    first_rows = []  # of each request
    num_rows = 0
    for length in lengths:
        first_rows.append(num_rows)
        num_rows += length + 1
    drafts = [draft.tolist() for draft in metadata.draft_token_ids.split(lengths)]
    tokens = torch.full((len(lengths), num_places), -1, dtype=torch.int32, device=logits.device)
    logps: dict[str, Tensor] = {}
    going = list(range(len(lengths)))  # requests whose drafts were kept so far
    for place in range(num_places):
        rows = [first_rows[request] + place for request in going]
        output = sampler(logits=logits[rows], sampling_metadata=of_requests(sampling_metadata, going))
        sampled = output.sampled_token_ids[:, 0]
        tokens[going, place] = sampled
        if output.logprobs_tensors is not None:
            for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
                values = getattr(output.logprobs_tensors, name)
                if name not in logps:
                    logps[name] = values.new_zeros((len(lengths), num_places, *values.shape[1:]))
                logps[name][going, place] = values
        kept = []
        for request, token in zip(going, sampled.tolist()):
            if place < lengths[request] and token == drafts[request][place]:
                kept.append(request)
        going = kept
        if not going:
            break
    flat = {name: values.flatten(0, 1) for name, values in logps.items()}
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(**flat) if flat else None)


def of_requests(sampling_metadata: Any, requests: Sequence[int]) -> Any:
    """How these requests of a batch are sampled: vLLM's SamplingMetadata with a row for each of them."""
    assert sampling_metadata.no_penalties and not sampling_metadata.bad_words_token_ids
    assert sampling_metadata.allowed_token_ids_mask is None and not sampling_metadata.logprob_token_ids
    rows = {}
    for name in ("temperature", "top_p", "top_k"):
        values = getattr(sampling_metadata, name)
        rows[name] = values if values is None else values[list(requests)]
    generators = {}
    for row, request in enumerate(requests):
        if request in sampling_metadata.generators:
            generators[row] = sampling_metadata.generators[request]
    return replace(sampling_metadata, generators=generators, **rows)


def verify_v2(target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor,
              pos: Tensor, idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor,
              temperature: Tensor, seed: Tensor, num_speculative_steps: int,
              synthetic_conditional_rates: Tensor | None = None, use_fp64: bool = False,
              use_block_verification: bool = False, contexts: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    """In place of V2's `rejection_sample`, with its parameters: rows of logits [R, V], after temperature and filters,
    and the token that is the input of each [R]. Returns tokens [S, 1 + longest draft] and how many of them [S] count:
    up to the first one that differs from its draft. Nothing waits for the GPU."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    assert draft_logits is None and synthetic_conditional_rates is None and contexts is None
    tokens = gumbel_sample(target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False,
                           is_drafting=False, use_fp64=use_fp64)
    rows = cu_num_logits[:-1, None] + torch.arange(num_speculative_steps + 1, device=tokens.device)
    is_drafted = rows[:, 1:] < cu_num_logits[1:, None]
    rows = rows.clamp(max=len(tokens) - 1)
    # what was drafted for the place of a row's token is the input of the next row
    is_same = is_drafted & (tokens[rows[:, :-1]] == draft_sampled[rows[:, 1:]])
    return tokens[rows], (1 + is_same.cumprod(dim=1).sum(dim=1)).to(torch.int32)


def write_v2(states: Any, requests: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
    """The scheduler tells V2 how many tokens are drafted for each request. Which ones, it reads from its own state on
    the GPU (vLLM's RequestState)."""
    rows = []
    tokens = []
    for request, draft in zip(requests, drafts):
        if draft:
            rows.append(states.req_id_to_index[request])
            tokens.append([*draft, *[0] * (states.draft_tokens.shape[1] - len(draft))])
    if rows:
        device = states.draft_tokens.device
        states.draft_tokens[torch.tensor(rows, device=device)] = torch.tensor(tokens, device=device)

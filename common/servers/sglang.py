"""SGLang's server, from 0.5.23 on.

Of SGLang 0.5.23, below sglang/srt: entrypoints/http_server.py (routes), managers/io_struct.py (their fields),
sampling/sampling_params.py, layers/sampler.py (log-probs and seeds), utils/weight_checker.py (checksums).
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from common.servers.client import Client, Refused
from common.servers.dialect import Answer, Ask, Needs, Weights, versions_of
from common.servers.sglang_sums import checksums_of, parts_of

BYTES_OF_TOKEN = 512  # of an answer, at most
BYTES_OF_ID = 12  # of each token that a filter leaves
MOST_BYTES = 1 << 26  # of the checksums of all tensors
MASK_TOKENS = 4096
"""Most tokens among which --rollout.top-p and --rollout.top-k filter: SGLang's own bound where it tells the log-probs
after its filters."""


class SGLang:
    name: ClassVar[str] = "sglang"

    @staticmethod
    async def is_spoken(client: Client) -> bool:
        try:
            found = await client.call("/model_info")
        except Refused:
            return False
        return isinstance(found, dict) and {"weight_version", "load_format", "is_generation"} <= found.keys()

    @staticmethod
    async def problems(client: Client, needs: Needs) -> list[str]:
        info = await client.call("/server_info")
        found = []
        if info["dtype"] != needs.dtype:
            found.append(f"its dtype is {info['dtype']}, must be --policy.compute-dtype {needs.dtype}: start it with "
                         f"--dtype {needs.dtype}")
        if info["max_req_input_len"] < needs.max_length:
            found.append(f"its sequences have at most {info['max_req_input_len']} tokens, must be {needs.max_length} "
                         f"(--data.max-prompt-length and --rollout.max-response-length): start it with "
                         f"--context-length {needs.max_length + 6} and at least as many --max-total-tokens")
        if needs.transfer != "folder":
            found.append(f"SGLang takes no weights by --rollout.server-transfer {needs.transfer}: set it to folder")
        for flag in ("speculative_algorithm", "quantization"):
            if info[flag]:
                found.append(f"its weights come with --{flag.replace('_', '-')} {info[flag]}, which a sync does not "
                             f"renew: start it without")
        return found

    @staticmethod
    async def version(client: Client) -> str:
        """`/server_info` asks the process that samples, `/model_info` knows the version."""
        await client.call("/server_info")
        return str((await client.call("/model_info"))["weight_version"])

    @staticmethod
    async def generate(client: Client, ask: Ask) -> Answer:
        sampling = ask.sampling
        is_filtered = ask.seed is not None and (sampling.top_p < 1 or sampling.top_k > 0)
        top_k = sampling.top_k or (MASK_TOKENS if is_filtered else -1)
        params: dict[str, Any] = {
            "temperature": 0.0 if ask.seed is None else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "max_new_tokens": sampling.max_response_length,
            "stop": list(sampling.stop),
            "stop_token_ids": ask.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,  # a stop text may be a special token
            "sampling_seed": ask.seed,
        }
        body = {
            "rid": unambiguous(ask.name),
            "input_ids": ask.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # of the response only
            "return_sampling_mask": is_filtered,
        }
        bytes_of_token = BYTES_OF_TOKEN
        if is_filtered:
            bytes_of_token += BYTES_OF_ID * top_k
        most_bytes = (1 << 16) + bytes_of_token * sampling.max_response_length
        found = await client.call("/generate", body, most_bytes, is_long=True)
        try:
            return answer_of(client, found, is_filtered)
        except (KeyError, TypeError, ValueError) as error:
            said = json.dumps(found)[:200]
            raise Refused(client.line(f"/generate has no {error} as SGLang 0.5.23 has it: {said}")) from None

    @staticmethod
    async def abort(client: Client, names: Sequence[str]) -> None:
        for name in names:
            await client.call("/abort_request", {"rid": unambiguous(name)})

    @staticmethod
    async def load(client: Client, weights: Weights, version: str) -> int:
        assert isinstance(weights, Path)  # `problems` refuses others
        folder = weights
        await client.call("/pause_generation", {"mode": "abort"}, is_long=True)
        update = {"model_path": str(folder), "weight_version": version, "flush_cache": True, "load_format": "auto"}
        await client.call("/update_weights_from_disk", update, is_long=True)
        num_compared = await compare(client, folder)
        await client.call("/continue_generation", {})
        return num_compared


def answer_of(client: Client, found: dict[str, Any], is_filtered: bool) -> Answer:
    tokens = found["output_ids"]
    meta = found["meta_info"]
    entries = meta["output_token_logprobs"]
    if tokens != [token for _, token, *_ in entries]:
        raise Refused(client.line("its log-probs are of other tokens than those that it sampled"))
    logp = [value for value, *_ in entries]
    if is_filtered:  # `entries` are without the filters
        logp = meta["output_token_sampling_logprobs"]
    versions = versions_of(meta["weight_versions"], len(tokens))
    return Answer(tokens, logp, meta["finish_reason"]["type"], versions)


def unambiguous(name: str) -> str:
    """SGLang aborts all requests whose names begin with the one that is given."""
    return f"{name}/"


async def compare(client: Client, folder: Path) -> int:
    """The number of the trainer's tensors whose checksums the server has. Raises Refused if some are others.

    On GPUs SGLang's checksums are of a kernel's own; with several ranks, of parts of the tensors. Neither is compared:
    the probe's log-probs judge then."""
    info = await client.call("/server_info")
    if info["device"] != "cpu" or info["tp_size"] * info["pp_size"] > 1:
        return 0
    found = await client.call("/weights_checker", {"action": "checksum"}, MOST_BYTES, is_long=True)
    held = found["ranks"][0]["checksums"]
    sent = await asyncio.to_thread(checksums_of, folder, list(held))
    missing = sorted(held.keys() - sent.keys())
    if missing:
        raise Refused(client.line(f"nothing that the trainer sent goes into {len(missing)} weights of the server "
                                  f"({', '.join(missing[:3])}): it serves another model"))
    differing = sorted(name for name, checksum in sent.items() if held[name] != checksum)
    if differing:
        raise Refused(client.line(f"checksums differ: it does not hold the trainer's weights in {len(differing)} "
                                  f"tensors: {', '.join(differing[:5])}"))
    return sum(len(parts_of(name)) for name in sent)

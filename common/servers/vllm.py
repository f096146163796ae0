"""vLLM's server, from 0.32 on, started with VLLM_SERVER_DEV_MODE=1: its routes for training are there only then.

Of vLLM 0.32: vllm/entrypoints/rl/online/api_router.py (weights), .../scale_out/token_in_token_out (generate), and
.../serve/dev (collective_rpc, reset_prefix_cache).
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from common.servers.client import Client, Gone, Refused, ServerError
from common.servers.dialect import Answer, Ask, Needs, Weights, versions_of
from common.servers.group import BACKEND
from common.servers.transfer import transfer

LOADING = "loading "
"""Before a version's name, while its weights are loaded."""
PREFIX = "generate-tokens-"  # of the engine's names for the requests of this route
BYTES_OF_TOKEN = 512  # of an answer, at most
EXTENSION = "tools.vllm_worker.Extension"
START = {
    403: "--enable-scale-out",
    404: "VLLM_SERVER_DEV_MODE=1 in its environment",
    500: f"""--worker-extension-cls {EXTENSION} --weight-transfer-config '{{"backend": "{BACKEND}"}}'""",
}
"""What a server was not started with that answers with this status."""


class VLLM:
    name: ClassVar[str] = "vllm"

    @staticmethod
    async def is_spoken(client: Client) -> bool:
        try:
            found = await client.call("/version")
        except Refused:
            return False
        return isinstance(found, dict) and found.keys() == {"version"}

    @staticmethod
    async def problems(client: Client, needs: Needs) -> list[str]:
        try:
            await client.call("/inference/v1/abort_requests", {"request_ids": []})
            [found, *_] = (await client.call("/collective_rpc", {"method": "describe"}))["results"]
        except ServerError as error:
            flag = START.get(error.status)
            if flag is None:
                raise
            return [f"{error}; start it with {flag}, as tools.serve does"]
        problems = []
        if found["transfer"] != BACKEND:
            problems.append(f"it does not load weights from a trainer: start it with {START[500]}")
        if found["logprobs_mode"] != "processed_logprobs":
            problems.append(f"its log-probs are {found['logprobs_mode']}, not those of what it samples from: start it "
                            f"with --logprobs-mode processed_logprobs")
        if found["dtype"] != needs.dtype:
            problems.append(f"its dtype is {found['dtype']}, must be --policy.compute-dtype {needs.dtype}: start it "
                            f"with --dtype {needs.dtype}")
        if found["max_model_len"] < needs.max_length:
            problems.append(f"its sequences have at most {found['max_model_len']} tokens, must be {needs.max_length} "
                            f"(--data.max-prompt-length and --rollout.max-response-length): start it with "
                            f"--max-model-len {needs.max_length}")
        for name, expected in needs.sizes.items():
            if found["sizes"][name] != expected:
                problems.append(f"its model has {name} {found['sizes'][name]}, --model has {expected}: serve that")
        return problems

    @staticmethod
    async def version(client: Client) -> str:
        return str((await client.call("/weight_info"))["weight_version"])

    @staticmethod
    async def generate(client: Client, ask: Ask) -> Answer:
        sampling = ask.sampling
        params: dict[str, Any] = {
            "temperature": 0.0 if ask.seed is None else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_response_length,
            "stop": list(sampling.stop),
            "stop_token_ids": ask.stop_token_ids,
            "seed": ask.seed,
            "logprobs": 0,  # of the sampled token only
            "detokenize": bool(sampling.stop), "skip_special_tokens": False,  # a stop text may be a special token
        }
        body = {"request_id": ask.name, "token_ids": ask.tokens, "sampling_params": params}
        most_bytes = (1 << 16) + BYTES_OF_TOKEN * sampling.max_response_length
        found = await client.call("/inference/v1/generate", body, most_bytes, is_long=True)
        try:
            [choice] = found["choices"]
            content = (choice["logprobs"] or {}).get("content") or []
            tokens = choice["token_ids"] or []
            if tokens != [entry["token_id"] for entry in content]:
                raise Refused(client.line("its log-probs are of other tokens than those that it sampled"))
            versions = versions_of(choice["weight_versions"] or [], len(tokens))
            return Answer(tokens, [entry["logprob"] for entry in content], choice["finish_reason"], versions)
        except (KeyError, TypeError, ValueError) as error:
            said = json.dumps(found)[:200]
            raise Refused(client.line(f"/inference/v1/generate has no {error} as vLLM 0.32 has it: {said}")) from None

    @staticmethod
    async def abort(client: Client, names: Sequence[str]) -> None:
        await client.call("/inference/v1/abort_requests", {"request_ids": [PREFIX + name for name in names]})

    @staticmethod
    async def load(client: Client, weights: Weights, version: str) -> int:
        await client.call("/pause?mode=abort", {})
        with contextlib.suppress(Gone):  # an earlier load was left unfinished: what it began is ended here
            await client.call("/start_weight_update", {}, is_long=True)
        # tokens that any run samples from now on, before the end, have no version that a run takes
        await client.call("/update_weight_version", {"new_version": LOADING + version})
        try:
            if isinstance(weights, Path):
                update = {"folder": str(weights), "version": version}
                await client.call("/update_weights", {"update_info": update}, is_long=True)
            else:
                await transfer(client, weights, version)
        except Gone as error:
            if error.status:  # the worker said no
                raise Refused(str(error), error.status) from None
            raise
        flushed = await client.call("/reset_prefix_cache", {})
        await client.call("/reset_encoder_cache", {})
        await client.call("/resume", {})
        if not flushed["success"]:
            raise Refused(client.line("it did not forget the prefixes that older weights computed"))
        # a load that was cut off before has another version, and is done again
        await client.call("/finish_weight_update", {"weight_version": version})
        of_workers = await client.call("/collective_rpc", {"method": "loaded"})
        for held in of_workers["results"]:
            if held["version"] != version:  # this name is not theirs
                await client.call("/update_weight_version", {"new_version": LOADING + version})
                raise Refused(client.line(f"it was given the weights {version}, and {held['version']} at the same "
                                          f"time: does another run use this server?"))
        return int(of_workers["results"][0]["count"])

"""Engines that are HTTP servers, of vLLM or SGLang: --rollout.engine server.

Each rank that samples asks all servers for its own part of the prompts. The first of these ranks writes the weights of
every sync into a folder that the servers read, and gives them to those that come later or back. What a server sampled
with other weights than the present ones is sampled anew, so that every token of a rollout is of the policy that the
engine was given last.
"""

import importlib.util
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.dataset.images import Images
from common.engine.base import Engine, EngineSetup
from common.engine.tail import Tail
from common.flags.rollout import SamplingConfig
from common.flags.servers import read_addresses
from common.parallel.ranks import all_gather_objects, all_max, on_main
from common.servers.client import Limits, ServerError
from common.servers.dialect import RUN, Answer, Ask, Needs, Weights
from common.servers.folder import WeightFolder
from common.servers.pool import Pool
from common.servers.transfer import HeldWeights
from common.sync.checksums import Checksum, as_numbers
from common.sync.names import PublishedNames
from envs.runtime.response import Response
from rewards.runtime.cleaner import own_folder

AT_ONCE = 256
"""Requests that a server has from one rank at a time, without --rollout.max-num-seqs."""
START_S = 60.0
"""Least time in which a server must answer as the engine starts."""
STEP_S = 0.2
"""Longest that `step` waits for a response: stop signals and the tools of episodes are looked for in between."""


class ServerEngine(Engine):
    def __init__(self, setup: EngineSetup):
        """Raises ValueError, on all ranks, if no server answers, or those that answer cannot be used."""
        super().__init__(setup)
        config = setup.config
        if setup.model_config.router_float32:
            raise ValueError("--policy.router-float32 does not go with --rollout.engine server: leave it out")
        self.limit_s = max(setup.world.timeout.total_seconds() - 300, 1.0)  # --save.timeout-s
        text = setup.hf_config.get_text_config()
        sizes = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        check_transfer(config.server_transfer, setup.world.device)
        needs = Needs(setup.model_config.compute_dtype, setup.max_model_len, sizes, config.server_transfer)
        self.pool = Pool(
            lambda: read_addresses(config.servers, config.server_auth_env),
            os.environ.get(config.server_auth_env, ""),
            Limits(config.server_timeout_s, self.limit_s / 2),
            needs,
            config.max_num_seqs or AT_ONCE,
            loads=setup.world.rank == 0,
        )
        self.tail = Tail()
        self.number = 0  # of the requests, which makes their names
        self.name = secrets.token_hex(4)
        self.last_ready = time.monotonic()
        error = ""
        try:
            self.pool.wait_ready(max(config.server_timeout_s, START_S))
        except ServerError as raised:
            error = str(raised)
        for of_rank in all_gather_objects(error):
            if of_rank:
                self.pool.close()
                raise ValueError(f"--rollout.servers: {of_rank}")
        self.names = PublishedNames(setup.hf_config)
        self.weights: WeightFolder | HeldWeights | None = None
        if setup.world.rank == 0:
            run = f"{RUN}{self.name}"
            if config.server_transfer == "folder":
                self.weights = WeightFolder(Path(config.server_weights or own_folder()), run, self.dtype)
            else:
                self.weights = HeldWeights(run, self.dtype, config.server_transfer, setup.world.device)

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Checksum]) -> tuple[int, set[str]]:
        """The first rank writes the weights, or keeps a copy, and the servers load them; then the other ranks may ask
        the servers."""
        if self.weights is None:
            for _ in tensors:
                pass
        else:
            self.weights.write(self.names.of(tensors))
            self.weights.complete(as_numbers(sent))
            self._present(self.weights.last, self.weights.name)
        name, num_compared = on_main(self.world, lambda: (self.weights.name, self.pool.num_compared))
        if self.weights is None:
            self._present(None, name)
        else:
            self.weights.remove_older()
        return num_compared, set()

    def _present(self, weights: Weights | None, version: str) -> None:
        self.pool.present(weights, version)
        try:
            self.pool.wait_ready(self.limit_s)
        except ServerError as error:
            raise RuntimeError(f"weight sync: {error}") from None

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig,
            images: Images | None = None, schema: dict[str, Any] | None = None) -> None:
        if images is not None or schema is not None:
            raise ValueError("--rollout.engine server samples text without images or grammars: use --rollout.engine "
                             "vllm")
        self.number += 1
        stops = [*self.stop_token_ids, *sampling.stop_token_ids]
        self.pool.add(request, Ask(f"{self.name}-{self.number}", list(prompt), seed, sampling, stops))
        self.tail.add()

    def has_unfinished(self) -> bool:
        return bool(self.pool.open)

    def begin(self, stop: Any) -> None:
        super().begin(stop)
        self.tail.begin()
        self.last_ready = time.monotonic()

    def step(self) -> Iterator[tuple[int, Response]]:
        """The responses that have ended, perhaps none. Raises RuntimeError if no server is there for too long."""
        start = time.monotonic()
        if self.pool.num_ready:
            self.last_ready = start
        elif self.pool.are_taken:
            raise RuntimeError(self.pool.troubles())
        elif start - self.last_ready > self.limit_s:
            raise RuntimeError(f"no server is left for {self.limit_s:g} s (--save.timeout-s): {self.pool.troubles()}")
        try:
            ended = self.pool.take(STEP_S)
        except ServerError as error:
            raise RuntimeError(str(error)) from None
        self.tail.step(time.monotonic() - start, len(ended))
        return iter([(number, response_of(answer)) for number, answer in ended])

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        parts = self.pool.abort(requests)
        self.tail.step(0.0, len(parts))
        ended = []
        for number, answer in parts:
            response = response_of(answer)
            if response.finish_reason and self.config.episode:
                # it ended while it was aborted: an episode asks for its last token once more
                response = Response(response.tokens[:-1], response.logp[:-1])
            ended.append((number, response))
        return ended

    def measured(self) -> dict[str, float]:
        ready, moved = all_max([self.pool.num_ready, self.pool.num_moved]).tolist()
        return self.tail.metrics() | {"servers/ready": ready, "servers/moved": moved}

    def close(self) -> None:
        self.pool.close()
        if self.weights is not None:
            self.weights.remove()


def check_transfer(kind: str, device: torch.device) -> None:
    """Raises ValueError, on all ranks, where NCCL cannot send."""
    if kind != "nccl":
        return
    if device.type != "cuda":
        raise ValueError("--rollout.server-transfer nccl needs a GPU on the ranks that sample, which have none here: "
                         "set it to gloo or folder")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("--rollout.server-transfer nccl needs vLLM beside the trainer: install it, or set gloo or "
                         "folder")


def response_of(answer: Answer) -> Response:
    """Without a reason where it was aborted: it has not ended."""
    reason = answer.finish_reason
    if reason == "abort":
        reason = ""
    return Response(answer.tokens, answer.logp, reason)

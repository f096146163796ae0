"""Where environments run programs that a model wrote: the project's sandbox, or your own server.

Two environment variables are read when an environment is loaded: SANDBOX_FUSION_URL names a SandboxFusion server, and
ALLOW_WEAK_SANDBOX=1 accepts machines that cannot isolate programs.
"""

import os
from typing import NamedTuple

from rewards.sandbox import sandbox

FLAGS = ("SANDBOX_FUSION_URL=http://HOST:8080/run_code", "ALLOW_WEAK_SANDBOX=1")


class Sandbox(NamedTuple):
    """`url`: of a server, or ""; `isolated`: False if this machine cannot isolate programs and that is accepted."""

    url: str
    isolated: bool

    @property
    def at_once(self) -> int:
        """Programs that may run here at the same time, over all episodes of an engine. Their limits are seconds by the
        clock: more than there are CPUs would end each other. The processes of torchrun share the CPUs. 0: no limit, a
        server has its own."""
        if self.url:
            return 0
        return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def run(self, program: str, limits: sandbox.Limits) -> sandbox.Result:
        if self.url:
            return sandbox.run_remote(self.url, program, "", limits)
        return sandbox.run(program, "", limits, self.isolated)


def find_sandbox(file: str) -> Sandbox:
    """The sandbox for the environment `file`. Raises ValueError if there is none on this machine."""
    url = os.environ.get("SANDBOX_FUSION_URL", "")
    if url:
        return Sandbox(url, True)
    try:
        return Sandbox("", sandbox.isolation(os.environ.get("ALLOW_WEAK_SANDBOX") == "1", FLAGS))
    except RuntimeError as error:
        raise ValueError(f"--rollout.episode {file}: {error}") from None


def tool_timeout_s() -> float:
    """--rollout.tool-timeout-s, for environments that check it when they are loaded; outside of episodes infinity."""
    return float(os.environ.get("TOOL_TIMEOUT_S", "inf"))

"""An environment of `verifiers` 1 with a role that it does not train."""

import verifiers.v1 as vf
from toy_pair import PairConfig, PairEnv, PairTaskset


class JudgedEnv(PairEnv, vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.checker.trainable = False


__all__ = ["JudgedEnv", "PairTaskset"]

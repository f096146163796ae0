"""A taskset of `verifiers` 1 that gives no reward, and the task `unknown` one that could not be found."""

import verifiers.v1 as vf


class UnscoredTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Nothing scores it."""


class UnscoredTaskset(vf.Taskset[UnscoredTask, vf.TasksetConfig]):
    def load(self):
        yield UnscoredTask(vf.TaskData(prompt="Say something."), self.config.task)


class UnscoredEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class UnscoredEnv(vf.Env[UnscoredEnvConfig]):
    async def run(self, task, agents):
        trace = await agents.agent.run(task)
        if task.data.name == "unknown":
            trace.rewards["grade"] = None


__all__ = ["UnscoredEnv", "UnscoredTaskset"]

"""A taskset of `verifiers` 1 with a server of tools beside each episode."""

import verifiers.v1 as vf


class SumToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        return first + second


class SumTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SumToolset(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("42" in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(vf.TaskData(prompt="2 + 40?"), self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    SumToolset.run()

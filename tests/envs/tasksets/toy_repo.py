"""A taskset of `verifiers` 1: repositories with a bug, and a hidden test that is copied in when the agent has ended."""

import verifiers.v1 as vf

BUG = "def add(a, b):\n    return a - b\n"
TEST = "import calc\nassert calc.add(2, 3) == 5\n"


class RepoConfig(vf.TasksetConfig):
    num_tasks: int = 4


class RepoTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("repo/calc.py", BUG.encode())

    @vf.reward
    async def passed(self, runtime: vf.Runtime) -> float:
        await runtime.write("repo/check_hidden.py", TEST.encode())
        result = await runtime.run(["sh", "-c", "cd repo && timeout 60 python3 check_hidden.py"], {})
        return float(result.exit_code == 0)

    @vf.metric
    async def length(self, runtime: vf.Runtime) -> float:
        return float(len(await runtime.read("repo/calc.py")))


class RepoTaskset(vf.Taskset[RepoTask, RepoConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            prompt = f"The file repo/calc.py has a bug: add(2, 3) returns -1. Fix it. ({number})"
            yield RepoTask(vf.TaskData(name=f"repo {number}", prompt=prompt), self.config.task)


__all__ = ["RepoTaskset"]

"""An environment of `verifiers` 1 with two roles of one model: a writer, and a checker who is asked about its text."""

import verifiers.v1 as vf


class PairConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()


class PairTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Scored by the environment."""


class PairTaskset(vf.Taskset[PairTask, vf.TasksetConfig]):
    def load(self):
        for word in ("cat", "dog"):
            yield PairTask(vf.TaskData(name=word, prompt=f"Write the word {word}."), self.config.task)


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        written = await agents.writer.run(task)
        question = f"Does this have the word {task.data.name}? {written.last_reply}"
        checked = await agents.checker.run(task.with_data(prompt=question))
        is_right = task.data.name in written.last_reply
        written.record_reward("right", float(is_right))
        checked.record_reward("agrees", float(("yes" in checked.last_reply) == is_right))


__all__ = ["PairEnv", "PairTaskset"]

"""Environments of `verifiers` 0.4 (Prime Intellect): its tasksets, harnesses and runtimes, with this run's model.

    VERIFIERS_ENV=bash.toml python data/verifiers_rows.py --out data/bash --num-train 500 --num-test 50
    VERIFIERS_ENV=bash.toml --rollout.episode envs/verifiers_env.py --train-data data/bash/train.parquet

VERIFIERS_ENV is a TOML file whose table [env] is the one of verifiers' own configuration, or that table as JSON:

    [env.taskset]
    id = "my-taskset"
    [env.agent]                                   # a role; the environment says which there are
    harness = {id = "bash"}
    runtime = {type = "docker"}
    max_turns = 8

Each role that names no model and no client is this run's model. Its program talks with the episode's own server
(envs/endpoint/server.py) through the proxy that verifiers starts for the episode; the server records the tokens.
An episode that has no turn or no room left is scored as it is. One without a reward has no score.

With the runtime `subprocess` a harness that executes code runs what the model writes as this user, who can also read
the tests, the rewards and the keys of the trainer: it needs ALLOW_WEAK_SANDBOX=1. Harbor's tasks then have /tests,
/logs, /app and /tmp of each episode's own, and the rest of the machine read-only (envs/tasksets/private_root.py).
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

try:
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import subprocess as subprocess_runtime

    from envs.endpoint.server import Endpoint
    from envs.tasksets import checks
    from envs.tasksets.private_root import enter_private_root
except ImportError as error:
    raise ValueError(f"--rollout.episode envs/verifiers_env.py: verifiers' packages are not installed, or not in "
                     f"PYTHONPATH ({error}); run `pip install --no-deps --target verifiers_packages -r "
                     f"requirements-verifiers.txt`, then this with PYTHONPATH=verifiers_packages") from None

KEY = "POLICY_API_KEY"  # verifiers reads keys from variables, and hides those with API_KEY from programs that it starts
NO_ROOM = ("context_length_exceeded", "turns_exceeded")  # of the endpoint's refusals


def context_of(url: str) -> vf.ModelContext:
    """How verifiers asks the model whose server has this address."""
    return vf.ModelContext(
        model="policy",
        client=vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=KEY),
        sampling=vf.SamplingConfig(),
    )


def load() -> vf.Env:
    """Raises ValueError for an environment that cannot be trained here."""
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # where `make setup` puts uv
    # what a killed episode leaves is in the folder that is removed with the run
    subprocess_runtime.CACHE_DIR = Path(tempfile.gettempdir())
    env = checks.load_environment()
    checks.check(env)
    asyncio.run(checks.check_agents(env, context_of("")))
    asyncio.run(checks.install_harnesses(env))
    set_python_path(env)
    return env


def set_python_path(env: vf.Env) -> None:
    """The programs of harnesses and the tests of tasks have packages of their own, and do not see this process's. Only
    servers of tools are modules of the taskset; they start in another folder."""
    path = os.environ.pop("PYTHONPATH", "")
    task_type = type(env.taskset).task_type()
    if env.taskset.toolsets(env.config.taskset) or task_type.toolsets(env.config.taskset.task):
        folders = [os.path.abspath(folder) for folder in path.split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)


ENV = load()
TASK = type(ENV.taskset).task_type()
HAS_PRIVATE_ROOT = checks.has_private_root(ENV)


async def episode(chat, row):
    """The reward of verifiers' episode, the mean of its roles', with their metrics and each role's ROLE_score."""
    data = TASK.data_type().model_validate_json(row["extra_info"]["verifiers"])
    task = TASK(data, ENV.config.taskset.task)
    if HAS_PRIVATE_ROOT:
        enter_private_root()
    traces: list[vf.Trace] = []

    def stop_agents(code: str) -> None:
        """Without this the refusal is a failure of the model's server, which verifiers does not score."""
        for trace in traces:
            if not trace.is_completed:
                trace.stop(code)

    async with Endpoint(chat, {"policy": ""}, on_refusal=stop_agents) as endpoint:
        os.environ[KEY] = endpoint.token  # in this episode's process alone
        played = await endpoint.run(play(task, context_of(endpoint.url), traces))
    result = result_of(played)
    for name, count in endpoint.counts.items():
        result[f"endpoint/{name}"] = float(count)
    return result


async def play(task: vf.Task, context: vf.ModelContext, traces: list[vf.Trace]) -> vf.Episode:
    async with ENV.serving():
        return await ENV.run_episode(task, context, on_trace=traces.append)


def result_of(played: vf.Episode) -> dict[str, float]:
    """Raises RuntimeError for an episode that failed, or has no reward: verifiers counts what is missing as 0."""
    for part in (*played.traces, played):
        if not part.ok:
            said = "the episode failed without an error"
            for error in part.errors:
                said = f"{error.type}: {error.message}"
            raise RuntimeError(f"verifiers: {said}")
    scores: dict[str, list[float]] = defaultdict(list)
    numbers: dict[str, list[float]] = defaultdict(list)
    for trace in played.traces:
        if checks.is_ours(trace.agent.config.model):
            scores[trace.agent.name].append(reward_of(trace))
            for name, number in numbers_of(trace):
                numbers[name].append(number)
    if not scores:
        raise RuntimeError("verifiers: no role of this run's model took part in the episode")
    result = {name: mean(values) for name, values in numbers.items()}
    if len(scores) > 1:
        for role, values in scores.items():
            result[f"{role}_score"] = mean(values)
    result["score"] = mean([mean(values) for values in scores.values()])
    return result


def reward_of(trace: vf.Trace) -> float:
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise RuntimeError(
            f"verifiers: [env.{trace.agent.name}] has no reward {', '.join(missing)} ({trace.stop_condition})"
        )
    return trace.reward


def numbers_of(trace: vf.Trace) -> Iterator[tuple[str, float]]:
    """The rewards without their weights, the metrics, and how the agent ended."""
    for name, reward in trace.rewards.items():
        yield metric_of(name), reward.score
    for name, number in trace.metrics.items():
        if number is not None:
            yield metric_of(name), number
    yield "timed_out", float(trace.is_timeout)
    yield "truncated", float(trace.is_truncated or trace.stop_condition in NO_ROOM)


def metric_of(name: str) -> str:
    """The name under which a number is logged beside the episode's score."""
    return "score_1" if name == "score" else name


def mean(values: list[float]) -> float:
    return sum(values) / len(values)

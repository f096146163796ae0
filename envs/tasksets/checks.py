"""What is checked of an environment of `verifiers` before a run: each mistake is a ValueError of one line."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import make_runtime
from verifiers.v1.tasksets.harbor import HarborTask
from verifiers.v1.utils.compile import validate_pairing

FLAG = "--rollout.episode envs/verifiers_env.py"
CONTAINERS = {"docker": ["docker", "version"], "podman": ["podman", "info"], "apptainer": ["apptainer", "version"]}
"""Runtimes -> the command that fails where they cannot run."""
CHOICE = 'runtime = {type = "docker"}, "podman", "apptainer", or "subprocess", which isolates nothing'
MAX_SAID = 300  # characters of what another program says


def load_environment() -> vf.Env:
    """That of the table [env] that the environment variable VERIFIERS_ENV names."""
    given = os.environ.get("VERIFIERS_ENV", "")
    if not given:
        raise ValueError(f"{FLAG}: the environment variable VERIFIERS_ENV names no TOML file with a table [env]")
    try:
        if given.startswith("{"):
            table = json.loads(given)
        else:
            table = tomllib.loads(Path(given).read_text())["env"]
        config = vf.resolve_env_config(table)
        return vf.load_environment(with_models(config))
    except (OSError, KeyError, ValueError, ImportError, TypeError, AttributeError) as error:
        name = "" if given.startswith("{") else f"={given}"  # the table may hold keys
        raise ValueError(f"{FLAG}: VERIFIERS_ENV{name}: {text_of(error)}") from None


def text_of(error: Exception) -> str:
    """It in one line, without the values of a table, which may be keys."""
    if isinstance(error, ValidationError):
        fields = [f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
        return "; ".join(fields)
    # where a module is missing in a taskset's own file, verifiers says that there is no such taskset
    cause = f"; {error.__cause__}" if error.__cause__ else ""
    return " ".join(f"{type(error).__name__}: {error}{cause}".split())


def with_models(config: vf.EnvConfig) -> vf.EnvConfig:
    """The roles of this run's model have its name; where they are several, with their own, which the server knows."""
    ours = {}
    for name, spec in agent_config_fields(config).items():
        if spec.model is None and spec.client is None:
            ours[name] = spec
    for name, spec in ours.items():
        model = f"policy:{name}" if len(ours) > 1 else "policy"
        ours[name] = spec.model_copy(update={"model": model})
    return config.model_copy(update=ours)


def is_ours(model: str) -> bool:
    """Whether this run's model has that name."""
    return model.partition(":")[0] == "policy"


def check(env: vf.Env) -> None:
    """Raise ValueError for an environment that cannot be trained on this machine."""
    if repeats(env.config):
        raise ValueError(
            f"{FLAG}: [env.retries]: an episode is played once; --reward.on-error says what a failed one counts"
        )
    if env.config.taskset.id == "openenv":
        raise ValueError(
            f"{FLAG}: the taskset openenv needs a package with mcp 1, and verifiers needs mcp 2.0.0: "
            f"--rollout.episode envs/openenv_env.py is for its servers"
        )
    num_ours = 0
    for name, spec in agent_config_fields(env.config).items():
        role = f"{FLAG}: [env.{name}]"
        check_model(role, spec)
        check_runtime(role, spec, env._harnesses[name], type(env.taskset).task_type())
        num_ours += is_ours(spec.model)
    if not num_ours:
        raise ValueError(f"{FLAG}: each role of [env] has a model of its own: none would be trained")
    if has_private_root(env):
        check_private_root()


def check_private_root() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "envs.tasksets.private_root"],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise ValueError(
            f"{FLAG}: Harbor's tasks use /tests, /logs and /app, which all episodes of the runtime subprocess would "
            f"share, and no episode can have its own here ({end_of(run.stderr)}): give a container runtime"
        )


def check_model(role: str, spec: vf.AgentConfig) -> None:
    if spec.client is None:
        check_policy(role, spec)
    elif spec.model is None:
        raise ValueError(f"{role}: client: a role with a client of its own needs its model, too")
    elif is_ours(spec.model):
        raise ValueError(f"{role}: model {spec.model!r} is this run's, which the role's own client does not serve")


def check_policy(role: str, spec: vf.AgentConfig) -> None:
    if not is_ours(spec.model):
        raise ValueError(
            f"{role}: model {spec.model!r}: a model that is not this run's needs a client, "
            f'client = {{type = "eval", base_url = "...", api_key_var = "..."}}'
        )
    if spec.sampling is not None:
        raise ValueError(f"{role}: sampling: this run's model samples as --rollout.temperature says")
    if repeats(spec):
        raise ValueError(f"{role}: retries: what failed attempts sampled would get the last one's reward")
    if spec.timeout.rollout is not None:
        raise ValueError(
            f"{role}: timeout.rollout counts the time that the model takes: --rollout.tool-timeout-s bounds the "
            f"agent's own, between two replies"
        )


def repeats(config: vf.AgentConfig | vf.EnvConfig) -> bool:
    """Whether it asks for retries."""
    return config.retries.max_retries > 0 or config.retries.rules != []


def check_runtime(role: str, spec: vf.AgentConfig, harness: vf.Harness, task_type: type[vf.Task]) -> None:
    kind = spec.runtime.type
    if "runtime" not in spec.model_fields_set:
        raise ValueError(f"{role} names no runtime, and verifiers would rent a sandbox ({kind}): {CHOICE}")
    if kind != "subprocess" and kind not in CONTAINERS:
        raise ValueError(f"{role}: the runtime {kind} rents sandboxes, and none has been trained with here: {CHOICE}")
    try:
        validate_pairing(harness, task_type, spec.runtime)
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from None
    if kind in CONTAINERS:
        check_container(role, kind)
    elif harness.EXECUTES_CODE and os.environ.get("ALLOW_WEAK_SANDBOX") != "1":
        raise ValueError(
            f"{role}: with the runtime subprocess the harness {harness.config.id} runs what the model writes as this "
            f"user: give a container runtime, or accept it, ALLOW_WEAK_SANDBOX=1"
        )
    elif not shutil.which("uv"):
        raise ValueError(f"{role}: uv, which installs the programs of harnesses, is not in PATH: pip install uv")


def check_container(role: str, kind: str) -> None:
    command = CONTAINERS[kind]
    if not shutil.which(command[0]):
        raise ValueError(f"{role}: runtime {kind}: there is no program {command[0]}")
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"{role}: runtime {kind} does not answer: {end_of(run.stderr or run.stdout)}")


def end_of(text: str) -> str:
    return " ".join(text.split())[-MAX_SAID:]


def has_private_root(env: vf.Env) -> bool:
    """Whether tasks with Harbor's absolute paths run on this machine itself."""
    if not issubclass(type(env.taskset).task_type(), HarborTask):
        return False
    return any(spec.runtime.type == "subprocess" for spec in agent_config_fields(env.config).values())


async def check_agents(env: vf.Env, context: vf.ModelContext) -> None:
    """Let the environment set up its agents once, as each episode does, and refuse a role of this run's model that it
    does not train."""
    agents = env._episode_agents(context, [], None, None)
    await env.setup(agents)
    for name, spec in agent_config_fields(env.config).items():
        if is_ours(spec.model) and not getattr(agents, name).trainable:
            raise ValueError(
                f"{FLAG}: [env.{name}]: the environment does not train this role: give it a model and a client of "
                f"its own"
            )


async def install_harnesses(env: vf.Env) -> None:
    """Let uv install the programs of harnesses here, once: an episode, which is a fork, finds them in memory."""
    for name, spec in agent_config_fields(env.config).items():
        if spec.runtime.type != "subprocess":
            continue
        harness = env._harnesses[name]
        runtime = make_runtime(spec.runtime)
        await runtime.start()
        try:
            await harness.setup(runtime)
        except (RuntimeError, OSError, vf.RolloutError) as error:
            raise ValueError(
                f"{FLAG}: [env.{name}]: the harness {harness.config.id} cannot be installed: {end_of(str(error))}"
            ) from None
        finally:
            await runtime.stop()

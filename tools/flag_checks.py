"""What is refused of the flags that scripts share: numbers, and paths of models, data, rewards and run folders. No
model is read, and nothing here imports torch or transformers."""

import ast
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from common.flags.data import DataConfig, find_files
from common.flags.rules import check_pool, check_sampling, num_shards
from common.flags.secrets import flags_of
from common.flags.served import is_served
from common.source.folder import check_folder
from rewards.runtime.pool import check_reward
from tools.model_name import resolve

LEAST = {
    "--seed": (0, ""), "--total-epochs": (0, " (0: --total-steps counts)"), "--eval-prompts": (0, " (0: all)"),
    "--eval-n": (0, " (0: the greedy response alone)"), "--eval-temperature": (0, ""),
    "--rollout.top-k": (0, " (0: all tokens)"), "--rollout.val-top-k": (0, " (0: all tokens)"),
    "--rollout.tool-result-tokens": (0, " (0: no limit)"), "--rollout.max-num-seqs": (0, " (0: all)"),
    "--rollout.tp": (1, ""),
    "--kl-loss-coef": (0, ""), "--kl-reward-coef": (0, ""), "--overlong-factor": (0, ""),
    "--reward.max-error-frac": (0, " (0: no sample may fail)"),
}
"""The least value of flags, and what it means: verl and vLLM say -1 where 0 means all here."""


def check_numbers(args: Any) -> None:
    """Raise ValueError for a number below the least that its flag takes."""
    given = flags_of(args)
    for flag, (least, meaning) in LEAST.items():
        if given.get(flag, least) < least:
            raise ValueError(f"{flag} {given[flag]:g} must be at least {least}{meaning}")
    if "" in (given.get("--rollout.stop") or ()):
        raise ValueError("--rollout.stop '': an empty text would end each response before it begins; leave it out")
    for flag in ("--rollout.temperature", "--eval-temperature"):
        value = given.get(flag, 1.0)
        if given.get("--rollout.engine") == "vllm" and (value > 2 or 0 < value < 0.01):
            raise ValueError(f"{flag} {value:g}: vLLM takes 0.01 to 2, and would sample at 0.01 what is below that")
    share, prompts = given.get("--rollout.in-flight", 1), given.get("--prompts-per-step", 0)
    if share > 1 and round(share * prompts) <= prompts:
        raise ValueError(f"--rollout.in-flight {share:g} adds no prompt to --prompts-per-step {prompts}: it must be at "
                         f"least {1 + 1 / max(prompts, 1):.4g}")


def check_rollouts(args: Any) -> None:
    """Raise ValueError for flags of sampling and rewards that cannot work."""
    given = vars(args)
    if "rollout" in given:
        check_sampling(given["rollout"])
    if isinstance(given.get("data"), DataConfig):
        check_pool(given["data"])
    if "reward" in given:
        check_reward(given["reward"])


def check_paths(args: Any) -> None:
    """Raise ValueError for a file, folder or hub model that a flag names and that is not there."""
    given = flags_of(args)
    for flag in ("--model", "--critic-model", "--reward-model.path"):
        if given.get(flag):
            check_model(given[flag], flag, is_evaluated="--compare" in given)
    teachers = given.get("--teacher") or ()
    for teacher in (teachers,) if isinstance(teachers, str) else teachers:      # one of grpo_variants.py, or several
        path = teacher.rpartition("=")[2]
        is_asked = is_served(path) and "--served.cache" in given                # a server is asked at the start
        if path != "self" and not is_asked:                                     # the policy, in distill.py
            check_model(path, "--teacher")
    if given.get("--context"):
        check_function(given["--context"], "--context", "context")
    for flag, name in {"--train-data": "--train-data", "--val-data": "--val-data", "--files": "--data"}.items():
        if given.get(flag):
            find_files(given[flag], name)
    for spec in given.get("--reward.function") or ():
        check_function(spec, "--reward.function", "compute_score")
    if episode := given.get("--rollout.episode") or given.get("--episode"):
        from envs.runtime.conversation import environments  # envs brings libraries of templates and images

        for spec in environments(episode).values():
            check_function(spec, "--rollout.episode", "episode")
    for flag in ("--data.chat-template-file", "--compare", "--save.resume"):
        if given.get(flag) not in (None, "", "auto", "none") and not os.path.exists(given[flag]):
            raise ValueError(f"{flag} {given[flag]} does not exist")
    folder = Path(given.get("--run-dir", ".")).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--run-dir {given['--run-dir']} cannot be made: {folder} must be a folder that you may write "
                         f"to")


def check_model(model: str, flag: str, is_evaluated: bool = False) -> None:
    """Raise ValueError if `model` is no folder of a model, and no hub model that is in the cache or that the network
    can bring. What is evaluated may also be a checkpoint, a run or adapters."""
    if os.path.isdir(model) and is_evaluated:
        resolve(model)
        return
    if os.path.exists(model) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        check_folder(model, flag)
        return
    from huggingface_hub import constants, try_to_load_from_cache  # half a second

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    why = "HF_HUB_OFFLINE is set"
    if not constants.is_offline_mode():
        host = urlsplit(constants.ENDPOINT).hostname
        try:
            if getproxies() or socket.getaddrinfo(host, 443):
                return
        except OSError as error:
            why = f"{host} is not reached ({error.strerror})"
    raise ValueError(f"{flag} {model} is neither a folder here nor in the hub's cache {constants.HF_HUB_CACHE}, and "
                     f"{why}: where there is a network, run `hf download {model}` with the same HF_HOME")


def check_function(spec: str, flag: str, default_name: str) -> None:
    """Raise ValueError if the file of path/to/file.py:name is no Python file, or has nothing of that name. It is not
    run, so a name that another module gives it by `import *` is not looked for."""
    file, _, name = spec.rpartition(":") if ":" in spec else (spec, "", default_name)
    path = Path(file).resolve()
    if not path.is_file() and (path.suffix == ".py" or ":" in spec):
        raise ValueError(f"{flag} {spec}: {path} does not exist; the form is path/to/file.py:name")
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{flag} {spec}: {path} is not a Python file; the form is path/to/file.py:name")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{flag} {spec}: {path} is no valid Python: {error}") from None
    names = names_in(tree)
    if name not in names and "*" not in names:
        known = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        raise ValueError(f"{flag} {spec}: no function {name} in {path}; it has {', '.join(known) or 'none'}")
    for node in tree.body if flag == "--reward.function" else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list:
            check_signature(node, f"{flag} {spec}")


def names_in(tree: ast.Module) -> set[str]:
    """The names that the statements of a module define, assign or import."""
    found = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)                           # the names in its body are its own
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            if isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
    return found


def check_signature(function: ast.FunctionDef | ast.AsyncFunctionDef, named: str) -> None:
    """Raise ValueError if a reward function does not take the names that it is called with: verl's, for one sample or
    for a batch."""
    takes = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    wanted = ["data_source", "solution_str", "ground_truth", "extra_info"]
    if "solution_strs" in takes:
        wanted = [f"{name}s" for name in wanted]
    if not function.args.kwarg and (missing := [name for name in wanted if name not in takes]):
        raise ValueError(f"{named} is called with {', '.join(f'{name}=...' for name in wanted)}, and does not take "
                         f"{', '.join(missing)}: name its parameters so, or add **kwargs")


def check_ranks(args: Any) -> None:
    """Raise ValueError if the policy's parallel sizes do not divide torchrun's ranks, of which samplers are not the
    policy's."""
    given = vars(args)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) - given.get("samplers", 0)
    policy = given.get("policy")
    if policy is not None and ranks > 0:
        num_shards(ranks, policy.replicas, policy.sequence_parallel, policy.expert_parallel)



"""Refuses a mistyped command before torch, transformers and vLLM are imported, which takes 5 to 15 seconds.

The scripts import this file first. When a script is what Python runs, its flags, the paths in them and its `check` are
checked here, by the same code that `run_script` calls later: a file's statements run one by one, each when a name that
it defines is first needed, so that neither torch nor a model's code is reached.
"""

import __future__

import ast
import builtins
import contextlib
import dataclasses
import io
import os
import re
import socket
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from common.flags.effect import check_effect
from common.flags.secrets import flags_of
from common.source.folder import check_folder
from tools.flags import exit_with_error, read_flags, run_script

__all__ = ["run_script"]

ROOT = Path(__file__).resolve().parent.parent


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
HEAVY = {"torch", "transformers", "vllm"}
LEAST = {
    "--seed": (0, ""), "--total-epochs": (0, " (0: --total-steps counts)"), "--eval-prompts": (0, " (0: all)"),
    "--eval-n": (0, " (0: the greedy response alone)"), "--eval-temperature": (0, ""),
    "--rollout.top-k": (0, " (0: all tokens)"), "--rollout.val-top-k": (0, " (0: all tokens)"),
    "--rollout.tool-result-tokens": (0, " (0: no limit)"), "--rollout.max-num-seqs": (1, ""), "--rollout.tp": (1, ""),
    "--kl-loss-coef": (0, ""), "--kl-reward-coef": (0, ""), "--overlong-factor": (0, ""),
    "--reward.max-error-frac": (0, " (0: no sample may fail)"),
}
"""The least value of flags, and what it means: verl and vLLM say -1 where 0 means all here."""


class NeedsModels(Exception):
    """A check uses one of the packages that take long to import: it is left to the script."""


class Definitions(dict):
    """The names of a Python file, each defined when it is first asked for: only the statements that bind it are run,
    and those that bind what they use. Python looks here for what its module lacks, because these are its built-in
    names."""

    files: ClassVar[dict[Path, "Definitions"]] = {}

    def __init__(self, file: Path):
        super().__init__(vars(builtins))
        self.files[file] = self
        self.statements: dict[str, list[ast.stmt]] = {}
        tree = ast.parse(file.read_text(), str(file))
        for statement in tree.body:
            for name in bound(statement):
                self.statements.setdefault(name, []).append(statement)
        # a name of its own: the module itself is imported later
        self.module = ModuleType(f"definitions.{'.'.join(file.relative_to(file.anchor).with_suffix('').parts)}",
                                 ast.get_docstring(tree, clean=False))
        self.module.__dict__.update(__file__=str(file), __builtins__=self, __getattr__=self.attribute)
        sys.modules[self.module.__name__] = self.module  # dataclasses and tyro look there

    def __missing__(self, name: str) -> Any:
        """Of the module: the value of a name."""
        defined = vars(self.module)
        for statement in self.statements.get(name, []):
            origin, alias = project_file(statement, name)
            if origin is None:
                if not isinstance(statement, DEFINITIONS) and imported_packages(statement) & HEAVY:
                    raise NeedsModels(name)
                # annotations may name torch; only those of flags are read
                is_flags = isinstance(statement, ast.ClassDef) and statement.name.endswith(("Args", "Config"))
                flags = 0 if is_flags else __future__.annotations.compiler_flag
                exec(compile(ast.Module([statement], []), defined["__file__"], "exec", flags), defined)
            else:
                defined[name] = definitions(origin)[alias] if alias else definitions(origin).module
        return defined[name]

    def attribute(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(f"{self.module.__file__} has no {error}") from None


def definitions(file: Path) -> Definitions:
    return Definitions.files.get(file) or Definitions(file)


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds or changes. Those of a function's body are its own."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    found = set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=alias):
                found.add(alias or name.partition(".")[0])
    return found


def imported_packages(statement: ast.stmt) -> set[str]:
    """Of an import, perhaps below an `if` or a `try`."""
    modules = {node.module or "" for node in ast.walk(statement) if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in ast.walk(statement) if isinstance(node, ast.Import) for alias in node.names}
    return {module.partition(".")[0] for module in modules | names}


def project_file(statement: ast.stmt, name: str) -> tuple[Path | None, str]:
    """The file of this project from which a statement imports `name`, and what that is there ("": the file itself).
    Packages that are installed are imported as usual."""
    if isinstance(statement, ast.ImportFrom) and statement.module:
        folder = ROOT.joinpath(*statement.module.split("."))
        for alias in statement.names:
            if name == (alias.asname or alias.name):
                for file, there in ((folder / f"{alias.name}.py", ""), (folder.with_suffix(".py"), alias.name),
                                    (folder / "__init__.py", alias.name)):
                    if file.is_file():
                        return file, there
    return None, ""


def check_command(script: Path) -> None:
    """Read the flags of a script from the command line; check them and the paths in them. A mistake is one line and
    exit code 2. What is no script of this kind is left alone."""
    framed = io.StringIO()
    try:
        own = definitions(script)
        if not {"Args", "run_script"} <= own.statements.keys():
            return
        with contextlib.redirect_stderr(framed):
            args = read_flags(own["Args"], own.module.__doc__ or "")
        check_numbers(args)
        check_effect(args)
        check_rollouts(args)
        check_paths(args)
        check_ranks(args)
        for name in [name for name in ("check", "check_supervised") if name in own.statements][:1]:
            own[name](args)
    except SystemExit as end:
        if end.code and framed.getvalue():  # tyro's, not that of a fork's own check
            print(f"error: {in_one_line(framed.getvalue(), nested_flags(own['Args']))}", file=sys.stderr)
        raise
    except ValueError as error:
        exit_with_error(error)
    except Exception:  # NeedsModels, or a fork's own code, which fails in the script itself, with all of its lines
        return
    finally:  # pickle asks each module for a name, as torch.compile does in vLLM on a GPU, and would get NeedsModels
        for definition in Definitions.files.values():
            del sys.modules[definition.module.__name__]
        Definitions.files.clear()


def nested_flags(flags: Any) -> list[str]:
    """The flags that have a group, such as --optim.lr."""
    return [f"--{group.name}.{field.name}".replace("_", "-") for group in dataclasses.fields(flags)
            if dataclasses.is_dataclass(group.type) for field in dataclasses.fields(group.type)]


def in_one_line(framed: str, nested: Sequence[str] = ()) -> str:
    """tyro's message without its frame and the help of the flag. Of an unknown option that is one of the `nested` flags
    without its group, that flag is meant; TRL's form of a flag gets the tool that translates its commands."""
    lines = [line.strip("│╭╮╰╯ ") for line in framed.splitlines()]
    groups = groupby(lines, lambda line: line.startswith("─"))
    mistake, *sections = [" ".join(group) for is_rule, group in groups if not is_rule]
    meant = [section.split()[3] for section in sections if section.startswith("Perhaps you meant:")]
    unknown = mistake.removeprefix("Unrecognized options: ").split() if mistake.startswith("Unrecognized") else []
    for word in unknown[:1]:
        name = word.partition("=")[0].strip("-,").replace("_", "-")
        meant = [flag for flag in nested if flag.rpartition(".")[2] == name] or meant[:1]
        if re.match(r"--[a-z]+_\w+", word):
            mistake += "; a command of TRL's is translated by `python -m tools.from_trl`"
    return f"{mistake}; did you mean {' or '.join(meant)}?" if meant else mistake


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
        definitions(ROOT / "common/engine/make.py")["check_sampling"](given["rollout"])
    if "reward" in given:
        definitions(ROOT / "rewards/runtime/pool.py")["check_reward"](given["reward"])


def check_paths(args: Any) -> None:
    """Raise ValueError for a file, folder or hub model that a flag names and that is not there."""
    given = flags_of(args)
    for flag in ("--model", "--critic-model", "--reward-model.path"):
        if given.get(flag):
            check_model(given[flag], flag, is_evaluated="--compare" in given)
    teachers = given.get("--teacher") or ()
    for teacher in (teachers,) if isinstance(teachers, str) else teachers:      # one of grpo_variants.py, or several
        check_model(teacher.rpartition("=")[2], "--teacher")
    find_files = definitions(ROOT / "common/dataset/rows.py")["find_files"]
    for flag, name in {"--train-data": "--train-data", "--val-data": "--val-data", "--files": "--data"}.items():
        if given.get(flag):
            find_files(given[flag], name)
    for spec in given.get("--reward.function") or ():
        check_function(spec, "--reward.function", "compute_score")
    environments = definitions(ROOT / "envs/runtime/conversation.py")["environments"]
    if episode := given.get("--rollout.episode") or given.get("--episode"):
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
        definitions(ROOT / "tools/model_source.py")["resolve"](model)
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
    names = set().union(*map(bound, tree.body))
    if name not in names and "*" not in names:
        known = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        raise ValueError(f"{flag} {spec}: no function {name} in {path}; it has {', '.join(known) or 'none'}")
    for node in tree.body if flag == "--reward.function" else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list:
            check_signature(node, f"{flag} {spec}")


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
        num_shards = definitions(ROOT / "common/parallel/ranks.py")["num_shards"]
        num_shards(ranks, policy.replicas, policy.sequence_parallel, policy.expert_parallel)


def keep_compiled_code_at_home() -> None:
    """torch runs compiled code from a folder, which it chooses when it is imported: by default one in /tmp, under a
    name that another user can take first."""
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(home, ".cache/torchinductor"))


keep_compiled_code_at_home()
if Path(getattr(sys.modules["__main__"], "__file__", "")).suffix == ".py":
    check_command(Path(sys.modules["__main__"].__file__).resolve())

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
import json
import os
import socket
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from common.checkpoint.secrets import flags_of
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
OF_EPISODES = ("max-turns", "tool-timeout-s", "episodes-at-once", "lockstep", "drop", "rewritten-history",
               "tool-result-tokens", "tool-parser")
NEEDED: dict[str, tuple[str, list]] = {
    **{f"--rollout.{name}": ("--rollout.episode", [""]) for name in OF_EPISODES},
    "--rollout.max-staleness": ("--rollout.in-flight", [1]), "--lora.alpha": ("--lora.rank", [0]),
    "--reward-model.weight": ("--reward-model.path", [""]), "--overlong-factor": ("--overlong-buffer", [0]),
    "--kl-controller": ("--kl-reward-coef", [0]),
    **dict.fromkeys(("--kl-target", "--kl-horizon"), ("--kl-controller", ["fixed"])),
    **dict.fromkeys(("--clip-low", "--clip-high", "--clip-dual"), ("--loss", ["reinforce"])),
    "--beta": ("--divergence", ["reverse-kl", "forward-kl"]), "--top-k-of": ("--top-k", [0]),
    "--answer-key": ("--answers-per-step", [0]), "--keep-surplus": ("--max-gen-batches", [1]),
    "--log.wandb-project": ("--log.to", [[], ["tensorboard"]]),
    **{f"{optim}.min-lr-frac": (f"{optim}.schedule", ["constant"]) for optim in ("--optim", "--critic-optim")},
    **dict.fromkeys(("--correction.lower", "--correction.outside"), ("--correction.weights", [None, "none"])),
}
"""A flag -> another one, and the values of that one with which it does nothing. Whoever gives the first and forgets the
second would train without the penalty, the adapters or the filter that the command asks for."""


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
        check_paths(args)
        check_ranks(args)
        for name in [name for name in ("check", "check_supervised") if name in own.statements][:1]:
            own[name](args)
    except SystemExit as end:
        if end.code and framed.getvalue():  # tyro's, not that of a fork's own check
            print(f"error: {in_one_line(framed.getvalue())}", file=sys.stderr)
        raise
    except ValueError as error:
        exit_with_error(error)
    except Exception:  # NeedsModels, or a fork's own code, which fails in the script itself, with all of its lines
        return
    finally:  # pickle asks each module for a name, as torch.compile does in vLLM on a GPU, and would get NeedsModels
        for definition in Definitions.files.values():
            del sys.modules[definition.module.__name__]
        Definitions.files.clear()


def in_one_line(framed: str) -> str:
    """tyro's message without its frame and the help of the flag."""
    lines = [line.strip("│╭╮╰╯ ") for line in framed.splitlines()]
    groups = groupby(lines, lambda line: line.startswith("─"))
    mistake, *sections = [" ".join(group) for is_rule, group in groups if not is_rule]
    meant = [section.split()[3] for section in sections if section.startswith("Perhaps you meant:")]
    return f"{mistake}; did you mean {meant[0]}?" if meant else mistake


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


def check_effect(args: Any) -> None:
    """Raise ValueError for a flag that was given and does nothing, because another one was not. Scripts that lack one
    of the two are left alone."""
    required = {field.name: vars(args)[field.name] for field in dataclasses.fields(args)
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING}
    given, defaults = flags_of(args), flags_of(type(args)(**required))
    has_preset = given.get("--correction.preset", "disabled") != "disabled"     # which may have the weights
    for flag, (other, idle) in NEEDED.items():
        is_given = other in given and given.get(flag) != defaults.get(flag)
        if is_given and given[other] in idle and not (has_preset and other == "--correction.weights"):
            value = given[flag] if isinstance(given[flag], str) else json.dumps(given[flag])
            raise ValueError(f"{flag} {value} does nothing with {other} {given[other] or repr(given[other])}: set "
                             f"{other}, or leave {flag} out")


def check_paths(args: Any) -> None:
    """Raise ValueError for a file, folder or hub model that a flag names and that is not there."""
    given = flags_of(args)
    for flag in ("--model", "--critic-model", "--reward-model.path"):
        if given.get(flag):
            check_model(given[flag], flag, is_evaluated="--compare" in given)
    teachers = given.get("--teacher") or ()
    for teacher in (teachers,) if isinstance(teachers, str) else teachers:      # one of grpo_variants.py, or several
        check_model(teacher.rpartition("=")[2], "--teacher")
    find_files = definitions(ROOT / "common/dataset/store.py")["find_files"]
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
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"{model} holds no config.json: {flag} must be a Hugging Face model folder or hub name")
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
    if path.suffix != ".py" or not path.is_file():
        what = "is not a Python file" if path.exists() else "does not exist"
        raise ValueError(f"{flag} {spec}: {path} {what}; the form is path/to/file.py:name")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{flag} {spec}: {path} is no valid Python: {error}") from None
    names = set().union(*map(bound, tree.body))
    if name not in names and "*" not in names:
        known = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        raise ValueError(f"{flag} {spec}: no function {name} in {path}; it has {', '.join(known) or 'none'}")


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

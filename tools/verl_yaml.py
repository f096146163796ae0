"""YAML files of verl's settings, read as hydra and OmegaConf read them: a file's keys with dots between them, with the
files that it begins with (`defaults:`), and the file that a command names by --config-name."""

import itertools
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tools.terminal import visible

MAX_YAML = 100_000
"""Values of a YAML file; verl's own have about 500."""
GROUPS = {"actor_rollout_ref", "algorithm", "data", "critic", "reward", "reward_model", "custom_reward_function",
          "distillation", "async_training", "rollout", "trainer", "model", "optim"}
"""Top-level keys of verl's settings, one of which each of its files has."""
CONFIG_FLAGS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "path",
                "-cd": "path"}
STOCK = re.compile(r"^(fully_async_|one_step_off_)?(ppo|dapo)(_megatron)?_trainer$")
"""verl's own files, whose values are the defaults that this tool knows."""

FLOAT = re.compile(r"""^(?:
    [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    | [-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)                        # 1e-3, which is text in PyYAML
    | \.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    | [-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    | [-+]?\.(?:inf|Inf|INF)
    | \.(?:nan|NaN|NAN)
)$""", re.VERBOSE)
"""OmegaConf's rule of what is a float (omegaconf 2.3.0, _utils.py)."""


class Loader(yaml.SafeLoader):
    """Reads a file as OmegaConf does, and makes what JSON has: a date is text, and a set is refused."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: [(tag, form) for tag, form in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors: ClassVar = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] not in ("timestamp", "binary", "set", "omap", "pairs")
    }


Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


class WordLoader(Loader):
    """Reads a value of hydra's command line, where `off`, `no`, `yes`, `on` and `010` are text."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: [(tag, form) for tag, form in found if not tag.endswith((":bool", ":int"))]
        for first, found in Loader.yaml_implicit_resolvers.items()
    }


WordLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$", re.IGNORECASE), list("tTfF"))
WordLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("^[-+]?(?:0|[1-9](?:_?[0-9])*)$"),
                                 list("-+0123456789"))


def decode(content: bytes, source: Path) -> str:
    """UTF-8 with or without a byte order mark, and with any line ends."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} must be UTF-8: {error}") from None
    if "\0" in text:
        raise ValueError(f"{source} has a NUL byte, at {text.index(chr(0))}: it is no text")
    return text.replace("\r\n", "\n")


def read_yaml(text: str, name: str, kind: type[Loader] = Loader) -> Any:
    """The value of a YAML text, of types that JSON has: a date is text. `name`: what the text is, for errors."""
    try:
        loader = kind(text)
        node = loader.get_single_node()
        if size_of(node, {}) > MAX_YAML:
            raise ValueError(f"{name} has more than {MAX_YAML:,} values once its aliases (*NAME) are written out, or "
                             f"one that holds itself")
        return loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML that this tool reads: {visible(' '.join(str(error).split()))}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deep") from None


def size_of(node: yaml.Node | None, known: dict[int, float]) -> float:
    """How many values a node has if each of its aliases counts as often as it is used. `known`: of nodes by id."""
    if id(node) not in known:
        known[id(node)] = math.inf                                      # until it is counted: a node that holds itself
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = itertools.chain(*inner) if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] = 1 + sum(size_of(part, known) for part in parts)
    return known[id(node)]


def flat(tree: dict, prefix: str = "") -> dict[str, str]:
    """Nested keys with dots between them. What hydra would fill in (${...}, ???) is left to the defaults."""
    found = {}
    for key, value in (tree or {}).items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif not (isinstance(value, str) and ("${" in value or value == "???")) and not str(key).startswith("_"):
            found[f"{prefix}{key}"] = "null" if value is None else str(value)
    found.pop("defaults", None)
    return found


class MissingFile(ValueError):
    """A file of settings that another file or a command needs is not here."""


def own_keys(source: Path) -> dict[str, str]:
    """The keys of a file of verl's settings, those of the files that it begins with beneath. Raises ValueError for a
    file that has none of verl's keys, and for one of those that is not there."""
    tree = read_yaml(decode(source.read_bytes(), source), str(source)) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{source} must be a mapping of keys to values, and is {type(tree).__name__}")
    if not (GROUPS | {"defaults"}) & {str(key).partition(".")[0] for key in tree}:
        inner = [key for key, value in tree.items() if isinstance(value, str) and re.search("main_|sft_trainer", value)]
        hint = f"; {inner[0]} holds a shell script: give that as a .sh file" if inner else ""
        raise ValueError(f"{source} is no file of verl's settings: it has none of {', '.join(sorted(GROUPS))}, but "
                         f"{visible(', '.join(map(str, tree)))[:200]}{hint}")
    found: dict[str, str] = {}
    for entry in tree.get("defaults") or []:
        # `_self_` is this file; what chooses a file of a group, as GROUP@PACKAGE: NAME, is done by verl's own files
        if isinstance(entry, str) and re.fullmatch(r"[\w./-]+", entry) and entry != "_self_" and not STOCK.match(entry):
            found |= own_keys(file_of(entry, [source.parent], f"{source} begins with it (defaults:)"))
    return found | {key: value for key, value in flat(tree).items() if not key.startswith("hydra.")}


def config_keys(words: list[str], source: str) -> tuple[dict[str, str], list[str], bool]:
    """The keys of the file that --config-name names in a command, the words that are left, and whether it is one of
    verl's own for asynchronous training. Raises ValueError for a file that is neither verl's own nor near the script
    `source`."""
    named, rest = {}, []
    words = list(words)
    while words:
        word = words.pop(0)
        name, separator, value = word.partition("=")
        kind = CONFIG_FLAGS.get(name, "")
        if kind:
            named[kind] = value if separator else words.pop(0) if words else ""
        else:
            rest.append(word)
    name = re.sub(r"\.ya?ml$", "", named.get("name", "").strip("'\""))
    is_async = name.startswith("fully_async")
    if not name:
        return {}, rest, False
    here = Path(source).absolute().parent
    # a path is mostly given from the root of a checkout that lies elsewhere: each end of it is tried above the script
    path = Path(named.get("path", "").strip("'\""))
    ends = [Path(*path.parts[i:]) for i in range(path.is_absolute(), len(path.parts))]
    folders = [path, *(folder / end for end in ends for folder in (here, *here.parents)), here, here / "config"]
    try:
        return own_keys(file_of(name, folders, f"{source} takes its settings from it (--config-name)")), rest, is_async
    except MissingFile as error:
        if STOCK.match(name):
            return {}, rest, is_async
        raise ValueError(f"{error}; without it the command here would have verl's defaults instead") from None


def file_of(name: str, folders: list[Path], why: str) -> Path:
    for folder in folders:
        for file in (folder / f"{name}.yaml", folder / f"{name}.yml"):
            if file.is_file():
                return file
    raise MissingFile(f"{visible(name)}.yaml is not here: {why}; put it beside that file")

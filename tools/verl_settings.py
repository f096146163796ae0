"""What a shell script or YAML file says to verl: its keys and values under today's names, for tools/from_verl.py.

No program of the script is started. Variables, arrays and loops are followed.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml

from tools.verl_keys import OLD_NAMES

PROGRAM = re.compile(r"main_(ppo|dapo)")

RESTRICTED = r"""
command_not_found_handle() {                # every program: PATH is empty
    read -r -N 1 -u "$TAKE"                  # the lock: programs of a pipe write one after the other
    printf '%s\0' "$@" $'\n' >&"$STARTED"
    printf . >&"$GIVE"
    ((BASH_SUBSHELL == 0)) || return 127     # in $(...), for what the script falls back to
}
tee() { :; }
cd() { :; }
exec() { [[ $# == 0 ]] || "$@"; }
enable -n kill
readonly PATH
set -r
set() { :; }                                # set -e would end it at the first program that is not there
"""


class Settings:
    """The keys that were given, under today's names, and which of them were read."""

    def __init__(self, given: dict[str, str]):
        self.given = {}
        self.names = {}
        for key, value in given.items():
            name = key
            for pattern, new in OLD_NAMES.items():
                name = re.sub(pattern, new, name)
            self.given[name] = clean(value)
            self.names[name] = key
        self.read: set[str] = set()

    def get(self, key: str, default: str = "") -> str:
        self.read |= {key} & self.given.keys()
        value = self.given.get(key, "null")
        return default if value in ("null", "None", "") else value

    def is_on(self, key: str, default: bool = False) -> bool:
        return self.get(key, str(default)).lower() in ("true", "1")

    def number(self, key: str, default: float) -> float:
        try:
            value = float(self.get(key, str(default)))
        except ValueError:
            raise ValueError(f"{key}={self.given[key]} must be a number; a variable of the script that is not known "
                             f"here can be given as NAME=VALUE") from None
        return int(value) if value.is_integer() else value

    def items(self, key: str) -> list[str]:
        return [clean(item) for item in self.get(key).strip("[]()").split(",") if clean(item)]


def clean(text: str) -> str:
    """The text without quotes around it; ~ is the home folder."""
    text = text.strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    return os.path.expanduser(text)


def read_settings(source: Path, overrides: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """The keys and values of a script or YAML file, the program it starts, and what was not understood. `overrides`:
    NAME=VALUE of shell variables, and further keys."""
    assigned = dict(item.partition("=")[::2] for item in overrides)
    variables = {name: value for name, value in assigned.items() if name.isidentifier()}
    keys = {name.lstrip("+"): value for name, value in assigned.items() if not name.isidentifier()}
    text = source.read_text()
    if source.suffix in (".yaml", ".yml"):
        return flat(yaml.safe_load(text)) | keys, "main_ppo", []
    commands, notes = shell_commands(text, variables)
    found = [words for words in commands if any(PROGRAM.search(word) for word in words)]
    if len(found) != 1:
        said = f" ({'; '.join(notes)})" if notes else ""
        raise ValueError(f"{source} starts main_ppo or main_dapo {len(found)} times; it must be once{said}")
    start = next(i for i, word in enumerate(found[0]) if PROGRAM.search(word))
    given = {}
    for word in found[0][start + 1 :]:
        key, separator, value = word.partition("=")
        if separator and not key.startswith("-"):
            given[key.lstrip("+")] = value
        else:
            notes.append(f"{word} is no key with a value and not used")
    return given | keys, PROGRAM.search(found[0][start])[0], notes


def shell_commands(text: str, variables: dict[str, str]) -> tuple[list[list[str]], list[str]]:
    """The words of every program that a script would start, and what it left open, for the reader.

    bash itself reads it, in its restricted mode and without a PATH: no program starts and no file is written."""
    text = re.sub(r"(?<=\s)(?:\d|&)?>>?(?!=)[ \t]*[^\s&|;()=]+", "", text)        # > file, which that mode refuses
    environment = {"PATH": "/nonexistent", "HOME": os.environ.get("HOME", ""), **variables}
    take, give = os.pipe()
    with tempfile.TemporaryFile("w+") as started, open(take), open(give, "wb", buffering=0) as lock:
        lock.write(b".")
        files = (started.fileno(), take, give)
        numbers = "readonly STARTED={} TAKE={} GIVE={}".format(*files)
        bash = subprocess.run(
            [shutil.which("bash"), "--norc", "-c", f"{numbers}\n{RESTRICTED}\n{text}"],
            env=environment, pass_fds=files, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20,
        )
        started.seek(0)
        commands = [command.split("\0") for command in started.read().split("\0\n\0")[:-1]]
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)\}?(?![:\w\[-])", text))
    known = set(re.findall(r"\b([A-Za-z_]\w*)\+?=|\bfor (\w+) in", text))
    unset = used - {name for pair in known for name in pair} - environment.keys()
    notes = [f"${name} is not set and counts as empty; give {name}=VALUE" for name in sorted(unset)]
    notes += [line.partition(": line ")[2].partition(": ")[2] for line in bash.stderr.splitlines() if ": line " in line]
    programs = sorted({words[0] for words in commands if not any(PROGRAM.search(word) for word in words)})
    if programs:
        notes.append(f"not run: {', '.join(programs)}; $(PROGRAM) counts as empty, or as what follows || in it")
    return commands, notes


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

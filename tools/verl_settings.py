"""What a shell script or YAML file says to verl: its keys and values under today's names, for tools/from_verl.py.

No program of the script is started. Variables, arrays and loops are followed.
"""

import contextlib
import math
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tools.terminal import visible
from tools.verl_keys import OLD_NAMES
from tools.verl_yaml import WordLoader, config_keys, decode, own_keys, read_yaml

PROGRAM = re.compile("main_ppo|main_dapo|fully_async_main|sft_trainer")
"""verl's programs that have a counterpart: PPO and GRPO, DAPO, asynchronous training, supervised fine-tuning."""

RESTRICTED = r"""
ulimit -c 0 -t 20 -v 1048576 -f 65536        # no core file; seconds of each process, KiB of memory and of a file
command_not_found_handle() {                # every program: PATH is empty
    read -r -N 1 -u TAKE                  # the lock: programs of a pipe write one after the other
    printf 'w%s\0' "$@" >&STARTED
    printf '\0' >&STARTED
    printf . >&GIVE
    ((BASH_SUBSHELL == 0)) || return 127     # in $(...), for what the script falls back to
}
tee() { :; }
cd() { :; }
exec() { [[ $# == 0 ]] || "$@"; }
readonly PATH
set -r
set() { :; }                                # set -e would end it at the first program that is not there
shopt() { :; }
enable -n kill ulimit history fc set shopt  # history writes files; of set -m, jobs would outlive the reading
eval "$(</dev/fd/SCRIPT)"
"""
TIME_LIMIT_S = 20
BACKGROUND_S = 2
"""Seconds after the script's end for what it has started in the background."""
MAX_COMPLAINTS = 20
MAX_COUNT = 10**7

OTHER_PROGRAM = re.compile(r"^[\w./]*(?:\bmain_\w+|\w_main)(?:\.py)?$")

REDIRECTION = re.compile(r"""
    \\. | '[^']*' | "(?:\\.|[^"\\])*" | (?:^|(?<=\s))\#[^\n]*       # these stay: words in quotes, comments,
    | \(\((?:(?!\(\().){,500}?\)\) | \[\[(?:(?!\[\[).){,500}?\]\]          # comparisons
    | (?P<output>(?<=\s)(?:\d|&)?>>?(?!=)[ \t]*
        (?:>\([^()]*\) | "[^"]*" | '[^']*' | \$\([^()]*\) | [^\s&|;()<>"'])+)
""", re.VERBOSE | re.DOTALL)

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
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{key}={visible(self.given[key])} must be a number; a variable of the script that is not "
                             f"known here can be given as NAME=VALUE")
        return int(value) if value.is_integer() else value

    def count(self, key: str, default: int) -> int:
        """A whole number from 1 on."""
        value = self.number(key, default)
        if value < 1 or value != int(value) or value > MAX_COUNT:
            raise ValueError(f"{key}={value} must be a whole number from 1 to {MAX_COUNT:,}")
        return int(value)

    def value(self, key: str) -> Any:
        """The value as hydra reads it."""
        return read_yaml(self.get(key), key, WordLoader)

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
    for item in overrides:
        if "=" not in item:
            raise ValueError(f"{item} must be NAME=VALUE for a variable of the script, or some.key=VALUE")
    assigned = dict(item.partition("=")[::2] for item in overrides)
    variables = {name: value for name, value in assigned.items() if name.isidentifier()}
    keys = {name.lstrip("+"): value for name, value in assigned.items() if not name.isidentifier()}
    text = decode(source.read_bytes(), source)
    if source.suffix in (".yaml", ".yml"):
        found = own_keys(source) | keys
        return found, program_of(found), []
    given, program, notes = find_command(text, variables, str(source))
    return given | keys, program, notes


def find_command(text: str, variables: dict[str, str], source: str) -> tuple[dict[str, str], str, list[str]]:
    """The keys of the one command in a script that starts verl, the program, and what was not understood. A command may
    be a word of another one: bash -c '...'."""
    commands, notes = shell_commands(text, variables)
    found = [words for words in commands if any(PROGRAM.search(word) for word in words)]
    places = max(map(int, re.findall(r"\$\{?([1-9])", text)), default=0)
    if not found and places:  # it ends without its arguments: names stand for them
        arguments = [f"ARGUMENT_{i}" for i in range(1, places + 1)]
        commands, notes = shell_commands(text, variables, arguments)
        found = [words for words in commands if any(PROGRAM.search(word) for word in words)]
        notes.insert(0, f"the script's arguments are not known: {' '.join(arguments)} stand for them")
    if len(found) != 1:
        said = f" ({'; '.join(map(visible, notes))})" if notes else ""
        others = sorted({word for words in commands for word in words if OTHER_PROGRAM.search(word)})
        hint = f"; it starts {', '.join(map(visible, others))}, which has no counterpart here" if others else ""
        raise ValueError(f"{source} starts main_ppo, main_dapo, fully_async_main or sft_trainer {len(found)} times; it "
                         f"must be once{hint}{said}")
    start = next(i for i, word in enumerate(found[0]) if PROGRAM.search(word))
    inner = found[0][start]
    if any(character.isspace() for character in inner.strip()):
        given, program, more = find_command(inner, variables, source)
        return given, program, notes + more
    given, words, is_async = config_keys(found[0][start + 1 :], source)
    given |= launched(found[0][:start])
    for word in words:
        key, separator, value = word.partition("=")
        if separator and not key.startswith("-"):
            given[key.lstrip("+")] = value
        else:
            notes.append(f"{word} is no key with a value and not used")
    return given, "fully_async_main" if is_async else PROGRAM.search(inner)[0], notes


def launched(words: list[str]) -> dict[str, str]:
    """The numbers of nodes and GPUs that torchrun was given, which verl's own keys repeat or, in fine-tuning, lack."""
    said = re.sub(r"=| ", " ", " ".join(words).replace("_", "-"))
    names = {"trainer.nnodes": "nnodes", "trainer.n_gpus_per_node": "nproc-per-node"}
    found = {key: re.search(rf"--{name} (\d+)\b", said) for key, name in names.items()}
    return {key: number[1] for key, number in found.items() if number}


def program_of(keys: dict[str, str]) -> str:
    """The program that a file of settings is for."""
    if any(key.startswith("async_training.") for key in keys):
        return "fully_async_main"
    return "sft_trainer" if not any(key.startswith("actor_rollout_ref.") for key in keys) and any(
        key.startswith("model.") for key in keys) else "main_ppo"


def shell_commands(
    text: str, variables: dict[str, str], arguments: Sequence[str] = ()
) -> tuple[list[list[str]], list[str]]:
    """The words of every program that a script would start, and what it left open, for the reader.

    bash itself reads it, in its restricted mode and without a PATH: no program starts and no file is written. What it
    has started in the background ends with it."""
    if shutil.which("bash") is None:
        raise ValueError("there is no bash on the PATH, which reads the script")
    text = REDIRECTION.sub(lambda found: "" if found["output"] else found[0], text)    # which that mode refuses
    environment = {"PATH": "/nonexistent", "HOME": os.environ.get("HOME", ""), "LC_ALL": "C.UTF-8", **variables}
    (take, give), (left, held) = os.pipe(), os.pipe()
    with (open_text() as script, open_text() as started, open_text() as errors, open(take), open(left),
          open(give, "wb", buffering=0) as lock):
        script.write(text)
        script.flush()
        lock.write(b".")
        files = {"STARTED": started.fileno(), "TAKE": take, "GIVE": give, "SCRIPT": script.fileno()}
        reader = re.sub("|".join(files), lambda name: str(files[name[0]]), RESTRICTED)
        command = [shutil.which("bash"), "--norc", "-c", reader, "script", *arguments]
        bash = subprocess.Popen(
            command, env=environment, pass_fds=(*files.values(), held),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )
        os.close(held)
        all_ended = select.poll()                                       # select() takes no descriptor above 1,023
        all_ended.register(left, select.POLLIN)                         # readable once all have closed `held`
        try:
            bash.wait(TIME_LIMIT_S)
            in_time = bool(all_ended.poll(1000 * BACKGROUND_S))
        except subprocess.TimeoutExpired:
            in_time = True                                              # its exit code will say that it was ended
        finally:
            with contextlib.suppress(ProcessLookupError):               # nothing is left
                os.killpg(bash.pid, signal.SIGKILL)
            bash.wait()
        started.seek(0)
        errors.seek(0)
        commands = [[word[1:] for word in words.split("\0")] for words in started.read().split("\0\0")[:-1]]
        complaints = re.findall(r": line \d+: (.+)|bash: (.+: cannot allocate .+)", errors.read())
        said = [*dict.fromkeys(either or other for either, other in complaints)]
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)\}?(?![:\w\[-])", text))
    known = set(re.findall(r"\b([A-Za-z_]\w*)\+?=|\bfor (\w+) in", text))
    unset = used - {name for pair in known for name in pair} - environment.keys()
    notes = [f"${name} is not set and counts as empty; give {name}=VALUE" for name in sorted(unset)]
    notes += said[:MAX_COMPLAINTS]
    if len(said) > MAX_COMPLAINTS:
        notes.append(f"bash said {len(said) - MAX_COMPLAINTS:,} other things")
    programs = sorted({words[0] for words in commands if not any(PROGRAM.search(word) for word in words)})
    if programs:
        notes.append(f"not run: {', '.join(programs)}; $(PROGRAM) counts as empty, or as what follows || in it")
    if not in_time:
        notes.append(f"what the script started in the background was ended after {BACKGROUND_S} s")
    if bash.returncode < 0:
        notes.append(f"bash was ended by {signal.Signals(-bash.returncode).name}, after {TIME_LIMIT_S} s in an endless "
                     f"loop for instance: what comes after it in the script is not read")
    return commands, notes


def open_text() -> IO[str]:
    """A file without a name, in UTF-8; what is none is read as U+FFFD."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")

"""Reads the command line of a script and checks it. A mistake is one line and exit code 2.

Importing torch, transformers and vLLM takes 5 to 15 seconds. So a script calls `check_command` before it imports them,
as soon as its flags and its `check` are defined, which need none of them. `run_script`, its last line, reads and checks
the command line again: a fork without the early call is only refused later.
"""

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from common.flags.effect import check_effect
from tools.flag_checks import check_numbers, check_paths, check_ranks, check_rollouts
from tools.flags import exit_with_error, read_flags


def check_command(flags: type, check: Callable[[Any], Any], description: str) -> None:
    """End here if the command line is mistaken: if it is none of `flags`, a dataclass, or if `check`, the script's own,
    raises ValueError."""
    try:
        check(read_command(flags, description))
    except ValueError as error:
        exit_with_error(error)


def run_script(main: Callable[[Any], None], flags: type, description: str) -> None:
    """Read `flags`, a dataclass, from the command line and call `main`. A mistake in flags or files, or a full or
    broken disk, is one line and exit code 2."""
    try:
        main(read_command(flags, description))
    except (ValueError, OSError) as error:
        exit_with_error(error)


def read_command(flags: type, description: str) -> Any:
    """`flags`, a dataclass, from the command line. Raises ValueError if they, or the paths in them, cannot work."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = read_flags(flags, description)
    except SystemExit as end:
        if end.code and said.getvalue():
            print(f"error: {in_one_line(said.getvalue(), nested_flags(flags))}", file=sys.stderr)
        raise
    sys.stderr.write(said.getvalue())  # what wandb says of its account
    check_numbers(args)
    check_effect(args)
    check_rollouts(args)
    check_paths(args)
    check_ranks(args)
    return args


def nested_flags(flags: type) -> list[str]:
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
    if "'kto'" in mistake:
        mistake += "; KTO, whose rows are no pairs, is a script of its own, kto.py"
    return f"{mistake}; did you mean {' or '.join(meant)}?" if meant else mistake


def keep_compiled_code_at_home() -> None:
    """torch runs compiled code from a folder, which it chooses when it is imported: by default one in /tmp, under a
    name that another user can take first."""
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(home, ".cache/torchinductor"))


keep_compiled_code_at_home()

"""Reads the flags of a script, a dataclass, from the command line. A mistake in them is one line and exit code 2."""

import copy
import dataclasses
import errno
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.flags.secrets import flags_of

ROOT = Path(__file__).resolve().parent.parent
OF_VERL = re.compile(r"\+{0,2}(data|algorithm|trainer|actor_rollout_ref|critic|reward_model|custom_reward_function)"
                     r"(\.\w+)+=")


def read_flags(flags: type, description: str) -> Any:
    """`flags`, a dataclass, from the command line. --help shows the script's own flags, --help-all also the nested
    dataclasses' flags."""
    arguments = ["--help" if argument == "--help-all" else argument for argument in sys.argv[1:]]
    if {"-h", "--help"} & set(sys.argv):
        flags = without_nested(flags)
        description += "\n\n--help-all also shows the flags of policy, optim, rollout, data, reward, save, log ..."
    for argument in filter(OF_VERL.match, arguments):
        raise ValueError(f"{argument} is a setting of verl's: `python -m tools.from_verl` translates its commands")
    refuse_others_flags(flags, arguments, sys.argv[0])
    args = tyro.cli(flags, description=description, args=arguments)
    refuse_nan(args)
    return args


def refuse_others_flags(flags: type, arguments: list[str], script: str) -> None:
    """Raise ValueError for a flag that only other scripts of this project have, and name them, the most similar first.
    What is unknown to all is left to tyro, as are --help and the flags of nested dataclasses."""
    own = {field.name.rstrip("_") for field in dataclasses.fields(flags)}
    declared = {file.name: declared_flags(file) for file in sorted(ROOT.glob("*.py"))}
    nearest = sorted(declared, key=lambda file: -len(declared[file] & own))
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for flag in [] if {"-h", "--help"} & set(arguments) else given:
        name = flag.removeprefix("--").replace("-", "_")
        names = {name, name.removeprefix("no_")}
        having = [file for file in nearest if names & declared[file]]
        if having and not names & own:
            raise ValueError(f"{Path(script).name} has no flag {flag}; it is one of {', '.join(having)}")


def refuse_nan(args: Any) -> None:
    """Raise ValueError for a flag that is NaN. It is neither above nor below any bound, so that it passes most checks,
    turns off the limits that are flags, and makes every loss NaN."""
    for flag, value in flags_of(args).items():
        if any(x != x for x in (value if isinstance(value, list) else [value])):  # only NaN differs from itself
            raise ValueError(f"{flag} {value} must be a number")


def declared_flags(file: Path) -> set[str]:
    """The fields that the class Args of a script has itself. The script is not imported: one that is being edited may
    be no valid Python. A line of a docstring is no field, because it assigns nothing."""
    body = "".join(re.findall(r"^class Args\b.*\n((?: .*\n|\n)*)", file.read_text(), re.MULTILINE))
    return set(re.findall(r"^    (\w+?)_?: .* = ", body, re.MULTILINE))


def without_nested(flags: type) -> type:
    """The dataclass, with its nested dataclasses left out of its help."""
    nested = [copy.copy(field) for field in dataclasses.fields(flags) if dataclasses.is_dataclass(field.type)]
    hidden = [(field.name, Annotated[field.type, tyro.conf.Suppress], field) for field in nested]
    return dataclasses.make_dataclass(flags.__name__, hidden, bases=(flags,))


def exit_with_error(error: Exception) -> None:
    """A mistake in flags or files that our own checks found, or a full or broken disk: its message and exit code 2.
    Others are re-raised."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename).absolute()      # where it was raised
    is_ours = isinstance(error, ValueError) and file.is_relative_to(ROOT) and ".venv" not in file.parts
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_broken = isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS, errno.ESTALE)
    if not (is_ours or is_full or is_broken):
        raise error
    rank = f"[rank {os.environ.get('RANK', 0)}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    text = f"{rank}error: {'the disk is full: ' if is_full else ''}{error}"
    # the message may quote downloaded data, whose control sequences a terminal would obey
    print("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text), file=sys.stderr, flush=True)
    sys.exit(2)

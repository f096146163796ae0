"""How many options of TRL's own example commands tools.from_trl maps: a table of tests/evidence/users.md.

    git clone https://github.com/huggingface/trl && git -C trl checkout f2cd5771
    python -m tests.bench.trl_examples trl/trl/scripts trl/examples/scripts
"""

import importlib
import sys
from collections import Counter
from pathlib import Path

import tyro

from tools import from_trl


def main(folders: list[str]) -> None:
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    refused = []
    for file in files:
        try:
            found, _ = from_trl.read(str(file))
        except ValueError:
            continue                                                    # no command in it
        counts["files with commands or configurations"] += 1
        for name, options in found:
            try:
                ours = from_trl.translate(name, options)
            except ValueError as error:
                counts["commands without a script here, or refused"] += 1
                refused.append(f"{file.name}: {error}")
                continue
            counts["commands"] += 1
            counts["options: without equivalent"] += len(ours.without)
            counts["options: need no flag"] += len(ours.needless)
            counts["options: unknown"] += len(ours.unknown)
            counts["options: mapped"] += len(options) - len(ours.needless) - len(ours.unknown) - sum(
                shown.lstrip("-").partition(" ")[0] in options for shown in ours.without)
            unknown.update(one.partition(" ")[0] for one in ours.unknown)
            ours.flags.pop("--log.to", None)                            # they need not be installed here
            try:
                tyro.cli(importlib.import_module(ours.script).Args, args=ours.argv(), console_outputs=False)
                counts["commands that parse with our flags"] += 1
            except SystemExit:
                refused.append(f"{file.name}: our flags do not parse: {' '.join(ours.argv())}")
    for what, count in counts.items():
        print(f"{what} | {count}")
    print(*(f"unknown: {option} ({count})" for option, count in unknown.most_common()), *refused, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

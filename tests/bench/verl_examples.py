"""How many of the keys in verl's own scripts tools.from_verl maps: the tables of tests/evidence/from_verl.md.

    git clone https://github.com/verl-project/verl && git -C verl checkout 1dda039b
    python -m tests.bench.verl_examples verl/examples
"""

import importlib
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import tyro

from tools import from_verl, verl_settings
from tools.verl_keys import NEEDLESS, WITHOUT


def kind_of(key: str, is_mapped: bool) -> tuple[str, str]:
    """The kind of a key, and the reason where it has no equivalent."""
    if is_mapped:
        return "mapped to a flag", ""
    if any(fnmatchcase(key, pattern) for pattern in NEEDLESS):
        return "need no flag", ""
    reasons = [why for pattern, why in WITHOUT.items() if fnmatchcase(key, pattern)]
    return ("without equivalent", reasons[0]) if reasons else ("unknown", "")


def main(folder: Path) -> None:
    scripts = sorted(file for file in folder.rglob("*.sh") if verl_settings.PROGRAM.search(file.read_text()))
    used: Counter[str] = Counter()
    scripts_of: dict[str, set[Path]] = defaultdict(set)
    mapped: set[str] = set()
    num_parsed = num_whole = 0
    refused = []
    for script in scripts:
        try:
            given, program, _ = verl_settings.read_settings(script, [])
        except ValueError as error:
            refused.append(str(error))
            continue
        found = from_verl.translate(given, program, rows=1000)
        mapped |= set(found.mapped)
        for key in verl_settings.Settings(given).given:
            used[key] += 1
            scripts_of[key].add(script)
        num_whole += not found.without and not found.unknown
        found.flags.pop("--log.to", None)                               # they need not be installed here
        try:
            tyro.cli(importlib.import_module(found.script).Args, args=found.argv(), console_outputs=False)
            num_parsed += 1
        except SystemExit:
            refused.append(f"{script}: our flags do not parse")
    kinds = {key: kind_of(key, key in mapped) for key in used}
    print(f"scripts | {len(scripts)}", f"commands that parse with our flags | {num_parsed}", sep="\n")
    print(f"of these, every key is mapped or needs no flag | {num_whole}", f"distinct keys | {len(used)}", sep="\n")
    for kind in ("mapped to a flag", "need no flag", "without equivalent", "unknown"):
        keys = [key for key in used if kinds[key][0] == kind]
        print(f"{kind}: keys, times used | {len(keys)}, {sum(used[key] for key in keys)}")
    reasons = Counter(why for kind, why in kinds.values() if kind == "without equivalent")
    for why, number in reasons.most_common():
        print(f"{why} | {number} | {len(set().union(*(scripts_of[key] for key in used if kinds[key][1] == why)))}")
    print(*refused, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Forks of scripts as diffs: those of grpo.py in docs/forks.md; here further ones, and what somebody writes who is
careless. Diffs of another script are in a folder of its name.

    python -m tests.forks.patches       # a script's lines have moved: write the diffs' line numbers again
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
DOCUMENT = ROOT / "docs/forks.md"
HUNK = r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@\n"


def documented() -> dict[str, str]:
    """Title -> diff of each fork in docs/forks.md."""
    return dict(re.findall(r"^## (.*?)\n.*?```diff\n(.*?)```", DOCUMENT.read_text(), re.S | re.M))


def stored() -> dict[str, str]:
    """Name -> diff of each file below this folder: `echo` is of grpo.py, `dpo/orpo` of dpo.py."""
    return {str(path.relative_to(FOLDER).with_suffix("")): path.read_text() for path in sorted(FOLDER.rglob("*.diff"))}


def source_of(name: str) -> str:
    """The text of the script that a diff changes: of a name of `stored`, or of a title of the document."""
    script, slash, _ = name.partition("/")
    return (ROOT / (f"{script}.py" if slash else "grpo.py")).read_text()


def apply(diff: str, source: str) -> tuple[str, str]:
    """The fork, and the diff with the line numbers that are right for this source. A hunk whose lines are not in the
    source, or are there twice, raises ValueError."""
    fork, written, moved = source, "", 0
    for hunk in re.split(HUNK, diff, flags=re.M)[2::2]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        if source.count(old) != 1 or fork.count(old) != 1:
            raise ValueError(f"these lines are {source.count(old)} times in the source, must be there once:\n{old}")
        start = source[: source.index(old)].count("\n") + 1
        counts = old.count("\n"), new.count("\n")
        written += f"@@ -{start},{counts[0]} +{start + moved},{counts[1]} @@\n{hunk}"
        fork = fork.replace(old, new)
        moved += counts[1] - counts[0]
    return fork, written


def num_added(diff: str) -> int:
    return len(re.findall(r"^\+", diff, re.M))


if __name__ == "__main__":
    document = DOCUMENT.read_text()
    for title, diff in documented().items():
        document = document.replace(diff, apply(diff, source_of(title))[1])
    DOCUMENT.write_text(document)
    for name, diff in stored().items():
        (FOLDER / f"{name}.diff").write_text(apply(diff, source_of(name))[1])

"""Change single operators and constants of a file, run its tests on each change, and list what they did not notice.

    python -m tests.mutate common/optim.py 20 tests/common/test_optim.py

The file is written and restored in place, so nothing else may use the working tree meanwhile. Not part of CI.
"""

import ast
import copy
import os
import random
import signal
import sys
from pathlib import Path

import hypothesis  # noqa: F401, imported once, before the forks
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.USub: ast.UAdd,
}


def mutants(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Every single change: (line, before and after, the whole changed file)."""
    found = []
    for number, node in enumerate(ast.walk(tree)):
        for field in ("op", "ops", "value"):
            if isinstance(node, ast.Constant) != (field == "value") or field not in node._fields:
                continue
            changed = copy.deepcopy(tree)
            target = next(other for n, other in enumerate(ast.walk(changed)) if n == number)
            old = node.value if field == "value" else (node.ops[0] if field == "ops" else node.op)
            if isinstance(old, bool):
                target.value = not old
            elif isinstance(old, int | float):
                target.value = old + 1
            elif type(old) in SWAPS:
                new = SWAPS[type(old)]()
                if field == "ops":
                    target.ops[0] = new
                else:
                    target.op = new
            else:
                continue
            found.append((node.lineno, f"{ast.unparse(node)}  ->  {ast.unparse(target)}", ast.unparse(changed)))
    return found


def run(tests: tuple[str, ...]) -> int:
    """pytest's exit status, in a fork of this process: the libraries are imported, nothing of this repository is."""
    child = os.fork()
    if child == 0:
        signal.alarm(300)                                               # a change may loop forever
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
    return os.waitpid(child, 0)[1]


def main(file: str, count: str, *tests: str) -> None:
    path = Path(file)
    original = path.read_text()
    candidates = mutants(ast.parse(original))
    picked = random.Random(0).sample(candidates, min(int(count), len(candidates)))
    survivors = []
    try:
        for line, change, source in sorted(picked):
            path.write_text(source)
            noticed = run(tests) != 0
            print("noticed " if noticed else "SURVIVED", f"{file}:{line}  {change}", flush=True)
            survivors += [] if noticed else [change]
    finally:
        path.write_text(original)
    print(f"{len(survivors)} of {len(picked)} changes survived ({len(candidates)} are possible)")


if __name__ == "__main__":
    main(*sys.argv[1:])

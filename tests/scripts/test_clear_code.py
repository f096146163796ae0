"""What style.md forbids because a reader must decode it, found in the syntax trees of scripts and packages.

`ALLOWED` has the places that are still there. Its numbers only fall: a new place fails, and one that is gone is
taken out of the table. `python -m tests.scripts.test_clear_code` prints the table, and with names of files
their places. """

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ROOT

FOLDERS = ("common", "rewards/runtime", "rewards/sandbox", "envs/runtime")
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
BOOLEAN_CALLS = {"bool", "isinstance", "issubclass", "callable", "hasattr", "any", "all"}
NO_TRUTH = (ast.Subscript | ast.BinOp | ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.Set
            | COMPREHENSIONS)
"""Expressions that are something else than True or False, as far as the text tells."""


def sources() -> dict[str, str]:
    files = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*.py")
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


SOURCES = sources()


def inside(node: ast.AST, kind: type) -> bool:
    """Whether a node of this kind is below this one."""
    return any(isinstance(below, kind) for below in ast.walk(node) if below is not node)


def is_truth(node: ast.expr) -> bool:
    """Whether the text shows that it is True or False (or a mask of such)."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp():
            return all(map(is_truth, node.values))
        case ast.Call(func=ast.Name(id=name)):
            return name in BOOLEAN_CALLS
    return False


def is_python_bool(node: ast.expr) -> bool:
    """Whether it can be no mask of a tensor."""
    return is_truth(node) and not isinstance(node, ast.Compare)


def tuple_of_unrelated(node: ast.AST) -> bool:
    """`a, b = x, y`, unless it swaps (a value names a target), all values are constants, or all are calls of
    one function."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            names = {ast.unparse(target) for target in targets}
            swaps = any(ast.unparse(below) in names for value in values for below in ast.walk(value)
                        if isinstance(below, ast.Name | ast.Attribute | ast.Subscript))
            functions = {ast.unparse(value.func) if isinstance(value, ast.Call) else "" for value in values}
            of_one_function = len(functions) == 1 and "" not in functions
            return not (swaps or all(map(is_constant, values)) or of_one_function)
    return False


def is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return not isinstance(node, ast.List | ast.Dict | ast.Set)


def ternary_as_loop(node: ast.AST) -> bool:
    """`for x in a if b else c:`."""
    return isinstance(node, ast.For | ast.AsyncFor) and isinstance(node.iter, ast.IfExp)


def nested_ternary(node: ast.AST) -> bool:
    return isinstance(node, ast.IfExp) and inside(node, ast.IfExp)


def and_as_if(node: ast.AST) -> bool:
    """`a and b` or `a or b` as a statement; a value `a and b` where b is no truth value, or is made of a, as in
    `x and x.y()`. A default, `a or b`, may be a value."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.BoolOp)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
        match node.value:
            case ast.BoolOp(op=ast.And(), values=[first, *_, last]):
                is_made_of_first = isinstance(last, ast.Call | ast.Attribute) and ast.unparse(last).startswith(
                    ast.unparse(first) + ".")
                return isinstance(last, NO_TRUTH) or is_made_of_first
    return False


def bool_as_number(node: ast.AST) -> bool:
    """`["x"] * (n > 0)`, `1 + (a == b)`, `n * bool(x)`, `n - (not x)`. A mask of a tensor may be multiplied."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Add | ast.Sub | ast.Pow):
        return False
    for one, other in ((node.left, node.right), (node.right, node.left)):
        if is_python_bool(one):
            return True
        if is_truth(one) and isinstance(other, ast.List | ast.Constant | ast.JoinedStr):
            return True
    return False


def walrus_in_condition(node: ast.AST) -> bool:
    """`if (x := f()) > 1`, `while a and (b := f())`. The whole condition may be one: `while line := read()`."""
    return isinstance(node, ast.If | ast.While) and inside(node.test, ast.NamedExpr)


def nested_comprehension(node: ast.AST) -> bool:
    return isinstance(node, COMPREHENSIONS) and inside(node, COMPREHENSIONS)


RULES: dict[str, Callable[[ast.AST], bool]] = {
    "tuple": tuple_of_unrelated,
    "loop": ternary_as_loop,
    "ternary": nested_ternary,
    "and": and_as_if,
    "bool": bool_as_number,
    "walrus": walrus_in_condition,
    "comprehension": nested_comprehension,
}


def places(text: str) -> Iterator[tuple[str, ast.AST]]:
    """(kind, node) of each place."""
    for node in ast.walk(ast.parse(text)):
        for kind, holds in RULES.items():
            if holds(node):
                yield kind, node


def count(text: str) -> dict[str, int]:
    return dict(sorted(Counter(kind for kind, _ in places(text)).items()))


ALLOWED: dict[str, dict[str, int]] = {
    "async_grpo.py": {"tuple": 1},
    "common/batch.py": {"comprehension": 1},
    "common/flags/correction.py": {"tuple": 1},
    "common/curriculum/sampler.py": {"tuple": 1},
    "common/run.py": {"tuple": 1},
    "common/tracking/health.py": {"tuple": 1, "walrus": 1},
    "common/tracking/step.py": {"loop": 1},
    "dapo.py": {"tuple": 1},
    "distill.py": {"tuple": 1},
    "evaluate.py": {"tuple": 2},
    "grpo.py": {"tuple": 1},
    "grpo_variants.py": {"tuple": 1},
    "online_dpo.py": {"tuple": 2},
    "ppo.py": {"tuple": 1},
    "rloo.py": {"tuple": 1},
    "rm.py": {"tuple": 1},
    "sft.py": {"tuple": 1},
}


@pytest.mark.parametrize("file", SOURCES)
def test_nothing_new_must_be_decoded(file):
    allowed = ALLOWED.get(file, {})
    found = count(SOURCES[file])
    more = {kind: number for kind, number in found.items() if number > allowed.get(kind, 0)}
    assert not more, f"write it clearly; python -m tests.scripts.test_clear_code {file} lists the places"


def test_what_is_gone_is_no_longer_allowed():
    """If this fails, be glad, and take the table that `python -m tests.scripts.test_clear_code` prints."""
    assert {file: found for file, text in SOURCES.items() if (found := count(text))} == ALLOWED


BAD = {
    "tuple": [
        "a, b = self.x, 0.0",
        "a, b = {}, []",
        "lengths, text = f(x), config.y",
        "a, b = f(x), g(x)",
        "a.x, a.y = b, c + 1",
    ],
    "loop": [
        "for x in xs if ready else (): f(x)",
    ],
    "ternary": [
        "a = b if c else d if e else f",
        "a = f(b if c else (d if e else h))",
    ],
    "and": [
        "is_main and write()",
        "ready or stop()",
        "a = x and x[0] | {1: 2}",
        "a = x and x.encode()",
        "def f(): return ready and [1]",
    ],
    "bool": [
        "flags = ['--samplers'] * (n > 0)",
        "n = 1 + (per == 'token')",
        "text = ', did you mean ' * bool(near)",
        "n = total - (not x)",
        "n = length * isinstance(x, int)",
        "n = 2 * (a > 0 and b > 0)",
    ],
    "walrus": [
        "if (n := f()) > limit: pass",
        "while ready and (line := read()): pass",
        "if not (found := f()): pass",
    ],
    "comprehension": [
        "a = [[y for y in x] for x in xs]",
        "a = {x: sum(y for y in x) for x in xs}",
        "a = f(any(y in x for y in ys) for x in xs)",
    ],
}
GOOD = [
    "a, b = b, a",                                              # a swap
    "a, b = b, a + b",
    "x[i], x[j] = x[j], x[i]",
    "low, high = 0.2, -0.28",                                   # constants
    "first, last = f(a), f(b)",                                 # calls of one function
    "a, b = f(x)",
    "for x in xs: f(x)",
    "a = b if c else d",
    "a = [x if c else y for x in xs]",
    "a = (b if c else d) + (e if f else g)",
    "a = x or default",
    "def f(): return a > 0 and b in c",
    "is_end = ends_turn and not x",
    "is_end = ends_turn and any(f(x) for x in xs)",
    "if ready and x[0]: pass",
    "loss = loss * (ratio > 0)",                                # a mask
    "a = mask & (x > 0)",
    "while line := read(): pass",
    "if found := search(): pass",
    "n = sum(x > 0 for x in xs)",
    "a = [y for x in xs for y in x]",
]


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in BAD.items() for line in lines])
def test_each_kind_is_found(kind, line):
    assert count(line) == {kind: 1}


@pytest.mark.parametrize("line", GOOD)
def test_clear_lines_are_let_be(line):
    assert count(line) == {}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for kind, node in places(SOURCES[name]):
            print(f"{name}:{node.lineno} {kind}: {ast.unparse(node)[:120]!r}")
    if not sys.argv[1:]:
        total: Counter = Counter()
        for name, text in SOURCES.items():
            numbers = count(text)
            total.update(numbers)
            if numbers:
                print(f'    "{name}": {numbers},'.replace("'", '"'))
        print(f"# in all {dict(total)}")

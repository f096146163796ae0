"""Which names of assertions the program gives: its own, and nothing that decides the verdict.

In `assert sum(f(1)) == 3` it is `f`; `sum` is Python's, although the program may have one for its own use. In
`assert sum(10, 15) == 6` it is `sum`. This reads the assertions alone, before there is a program. The text of this
file, too, is a part of main.py in the sandbox, where harness.py's `judge` calls `asked_by`.
"""

import ast
import builtins
import collections
import symtable
import sys
from collections.abc import Set
from typing import NamedTuple

ALIASES = {"np": "numpy", "numpy": "numpy"}  # of modules that are not Python's own


class Asked(NamedTuple):
    """What the judge asks the program for."""
    names: list[str]
    subject: str                   # the one of them that Python or its libraries have as well, "" if none
    modules: dict[str, list[str]]  # those that are taken from Python where it has such: name -> module, attributes


def asked_by(case: str, known: Set[str]) -> Asked:
    """known: the names that assertions have by themselves. Raises SyntaxError for assertions that are no Python."""
    tree = ast.parse(case)
    free = free_names(case)
    names = sorted(free - known)
    subject = "" if names else subject_of(tree, free)
    return Asked(names or [subject] * bool(subject), subject, modules_used(tree, free - known))


def free_names(case: str) -> set[str]:
    """The names that assertions use and nowhere define."""
    tables = [symtable.symtable(case, "case.py", "exec")]
    bound = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = set()
    for table in tables:  # the list grows
        tables += table.get_children()
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return used - bound


def modules_used(tree: ast.Module, names: set[str]) -> dict[str, list[str]]:
    """The modules of which assertions use attributes without an import."""
    used = collections.defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            used[node.value.id].add(node.attr)
    return {name: [ALIASES.get(name, name), *sorted(used[name])] for name in sorted(used)
            if name in sys.stdlib_module_names or name in ALIASES}


def subject_of(tree: ast.Module, names: set[str]) -> str:
    """Of names that Python or its libraries have, the one that the assertions are about: only one, so that no program
    is asked for its opinion of itself, as by `all(...)`. It is what is given to a function of the assertions,
    `check(sum)`, else what is called: a library's name rather than a function of Python, and that rather than a type;
    then in an assertion, or among the arguments of a function of the assertions, rather than elsewhere; of two calls,
    one in the other, the inner one; then the first."""
    helpers = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def rank_of(name: str) -> int:
        builtin = vars(builtins).get(name)
        return 1 if builtin is None else 2 + isinstance(builtin, type)

    def candidates(node: ast.AST, place: int) -> list[tuple[int, int, int, int, str]]:
        """(rank, place, line, column, name) of the calls in this node."""
        called = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        is_check = called is not None and called.id in helpers
        if is_check or isinstance(node, ast.Assert):
            place = 0
        found = [each for child in ast.iter_child_nodes(node) for each in candidates(child, place)]
        if isinstance(node, ast.Call) and is_check:
            found += [(0, place, arg.lineno, arg.col_offset, arg.id) for arg in node.args
                      if isinstance(arg, ast.Name) and arg.id in names]
        elif called is not None and called.id in names:
            rank = rank_of(called.id)
            if all(inner[0] > rank for inner in found):
                found.append((rank, place, called.lineno, called.col_offset, called.id))
        return found

    return min(candidates(tree, 1), default=(0, 0, 0, 0, ""))[-1]

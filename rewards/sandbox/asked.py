"""Which names of assertions the program gives: its own, and nothing that decides the verdict.

In `assert sum(f(1)) == 3` it is `f`; `sum` is Python's, although the program may have one for its own use. In
`assert sum(10, 15) == 6` it is `sum`. This reads the assertions alone, before there is a program. The text of
this file, too, is a part of main.py in the sandbox, where harness.py's `judge` calls `asked_by`. """

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
    """known: the names that assertions have by themselves. Raises SyntaxError for assertions that are no
    Python."""
    tree = ast.parse(case)
    free = free_names(case)
    names = sorted(free - known)
    subject = ""
    if not names:
        subject = subject_of(tree, free)
        if subject:
            names = [subject]
    return Asked(names, subject, modules_used(tree, free - known))


def free_names(case: str) -> set[str]:
    """The names that assertions use and nowhere define."""
    module = symtable.symtable(case, "case.py", "exec")
    bound = set()
    for symbol in module.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            bound.add(symbol.get_name())
    used = set()
    tables = [module]
    for table in tables:  # the list grows
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.is_global():
                used.add(symbol.get_name())
    return used - bound


def modules_used(tree: ast.Module, names: set[str]) -> dict[str, list[str]]:
    """The modules of which assertions use attributes without an import."""
    used = collections.defaultdict(set)  # name -> attributes
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                used[name].add(attribute)
    modules = sys.stdlib_module_names | ALIASES.keys()
    found = {}
    for name in sorted(used.keys() & names & modules):
        found[name] = [ALIASES.get(name, name), *sorted(used[name])]
    return found


def subject_of(tree: ast.Module, names: set[str]) -> str:
    """Of names that Python or its libraries have, the one that the assertions are about: only one, so that no
    program is asked for its opinion of itself, as by `all(...)`. It is what is given to a function of the
    assertions, `check(sum)`, else what is called: a library's name rather than a function of Python, and that
    rather than a type; then in an assertion, or among the arguments of a function of the assertions, rather
    than elsewhere; of two calls, one in the other, the inner one; then the first."""
    helpers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            helpers.add(node.name)
    found = candidates(tree, ELSEWHERE, names, helpers)
    if not found:
        return ""
    return min(found).name


class Candidate(NamedTuple):
    """A name that may be the subject. The least one is: its fields are compared in this order."""
    rank: int
    place: int
    line: int
    column: int
    name: str


# places
IN_ASSERTION = 0
ELSEWHERE = 1
# ranks
GIVEN = 0           # to a function of the assertions; the others are called
OF_LIBRARY = 1
FUNCTION = 2
TYPE = 3


def candidates(node: ast.AST, place: int, names: set[str], helpers: set[str]) -> list[Candidate]:
    """Those of `names` that this node calls, or gives to one of `helpers`, the functions of the assertions."""
    called = ""
    arguments = []
    match node:
        case ast.Call(func=ast.Name() as function):
            called = function.id
            arguments = node.args
    if called in helpers or isinstance(node, ast.Assert):
        place = IN_ASSERTION
    found = []
    for child in ast.iter_child_nodes(node):
        found += candidates(child, place, names, helpers)
    if called in helpers:
        for argument in arguments:
            match argument:
                case ast.Name(id=name) if name in names:
                    found.append(Candidate(GIVEN, place, argument.lineno, argument.col_offset, name))
    elif called in names:
        rank = rank_of(called)
        if all(inner.rank > rank for inner in found):
            found.append(Candidate(rank, place, function.lineno, function.col_offset, called))
    return found


def rank_of(name: str) -> int:
    """Of a name that is called."""
    if name not in vars(builtins):
        return OF_LIBRARY
    if isinstance(vars(builtins)[name], type):
        return TYPE
    return FUNCTION

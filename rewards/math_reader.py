r"""Reads an answer in LaTeX into a tree of sympy's, for math_values.py, by the parser of the math-verify library
(latex2sympy2_extended).

The parser drops what it has no place for: the base of 1011_2, a transpose, a repeated entry, a prime. Where that is
known, the answer is `Undecided`. Nothing is computed before a bound on its size is known: a policy wrote the text.
"""

import contextlib
import itertools
import re
import signal
import threading
from collections.abc import Iterator

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from sympy import Basic, Expr, S
from sympy.logic.boolalg import Boolean

from rewards.math_text import CONDITION, TRIGONOMETRIC

MAX_BITS = 50_000       # of a number, numerator and denominator together
MAX_FACTORIAL = 2000    # the largest n of n! and of a binomial coefficient
MAX_DEPTH = 40          # of brackets: the parser's time grows with its square

# What the parser reads as something else, or its normalisation drops: primes, conditions, residues, elided terms,
# operators with a meaning of their own (zeros(10^9), a transpose) and functions raised to a bracket, f^{(2)}, f^{-1}.
UNREADABLE = re.compile(r"['\u2032\u2019]|\\prime|\\mid|\\[pb]?mod|\\equiv|\\[lcdv]?dots|\\operatorname|\\top|"
                        r"\^\s*\{?\s*\\?(?:\*|T\b|math\w+\{T)|(?<![a-zA-Z\\])[a-zA-Z]\s*\^\s*\{\s*(?:\(\d+\)|-1)\s*\}\s*\(|"
                        r"\\approx|\\sim\b|\\partial|\\xrightarrow|\\det|\\begin\{[vV]matrix\}|\)\s*_|"
                        r"\\(?:vec|overrightarrow)\s*\{[^{}]*\}\s*\\times|"
                        r"\b(?:for|if|when|where|mod|more|less|not|base|otherwise|remainder)\b")
PERCENT = r"(?:\\?%|(?:\\text\{)?\s*(?:per\s?cent|pct)\s*\}?)"
DEGREES = r"(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0|\\degree|(?:\\text\{)?\s*degrees?\s*\}?)"
# A unit at the end, behind something: no condition (3 \text{ or more}). Without \text behind a number only.
UNIT = re.compile(r"(?<=[\w)}\]])(?:\s|\\[ ,;!])*\\(?:text|mathrm|mbox)\{" + CONDITION +
                  r"[^{}]*\}(?:\^\{?\d\}?)?\s*$|"
                  r"(?<=\d)\s+(?!or\b|and\b|if\b|mod\b)(?:[a-zA-Z]{3,}(?:\s[a-zA-Z]+)*|[ckm]?m|k?g|ft|in|mi|lb|oz|yd)\s*$")
CONFIG = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
NAMES = ConversionConfig(lowercase_symbols=False)


class Undecided(Exception):
    """The text cannot be read whole, or nothing here can decide about it."""


AGAIN_S = 0.1


class TooCostly(Exception):
    """A number is too large to be computed, or the time is up."""


class Span(Basic):
    """(a, b): an interval or a pair, unevaluated. args: both ends, and whether each is open."""


class Items(Basic):
    """a, b, c: a list without brackets, with its repeats."""


class Braces(Basic):
    r"""\{a, b, c\}"""


class Either(Basic):
    """Inequalities of which one holds."""


class Both(Basic):
    """Inequalities that hold together."""


class Reader(_Latex2Sympy):
    """The library's parser, without its losses and without the computations that it does while it reads."""

    def __init__(self, real: bool, degrees: bool, commute: bool):
        super().__init__(None, real, config=NAMES)
        self.degrees = degrees
        self.commute = commute
        self.places: dict[Expr, int] = {}  # of the decimals

    def parse_number(self, text: str) -> Expr:
        number = sympy.Rational(text.replace(",", ""))
        if "." in text:
            self.places[number] = len(text.partition(".")[2])
        return number

    def convert_atom(self, atom):
        if atom.number_subexpr() and atom.number_subexpr().subexpr():
            raise Undecided("a base")
        return super().convert_atom(atom)

    def convert_atom_expr(self, atom_expr):
        symbol = super().convert_atom_expr(atom_expr)
        base = symbol.base if isinstance(symbol, sympy.Pow) else symbol
        if self.commute or not isinstance(base, sympy.Symbol) or len(base.name) > 1 or not base.name.isupper():
            return symbol
        matrix = sympy.Symbol(base.name, commutative=False)
        return sympy.Pow(matrix, symbol.exp, evaluate=False) if isinstance(symbol, sympy.Pow) else matrix

    def convert_postfix(self, postfix):
        tree = self.convert_exp(postfix.exp() if hasattr(postfix, "exp") else postfix.exp_nofunc())
        for operator in postfix.postfix_op():
            if operator.BANG():
                tree = sympy.factorial(tree, evaluate=False)
            elif not operator.degree():
                raise Undecided("a transpose")
            elif self.degrees:
                tree = sympy.Mul(tree, S.Pi / 180, evaluate=False)
        return tree

    def convert_postfix_list(self, arr, i=0):
        """The library adds 2 and 3 in 2(3); mixed numbers are written as sums before."""
        first = self.convert_postfix(arr[i])
        if not isinstance(first, Expr | sympy.MatrixBase):
            raise Undecided("an operator")
        if i == len(arr) - 1:
            return first
        rest = self.convert_postfix_list(arr, i + 1)
        if getattr(first, "is_Number", False) and getattr(rest, "is_Number", False) \
                and not arr[i + 1].start.text.endswith(("(", "{", "[")):
            raise Undecided("two numbers beside each other")
        matrices = isinstance(first, sympy.MatrixBase) or isinstance(rest, sympy.MatrixBase)
        return self.mat_mul_flat(first, rest) if matrices else self.mul_flat(first, rest)

    def convert_interval(self, expr):
        is_open = [any(getattr(expr, f"{side}_{kind}")() is not None for kind in ("PAREN", "GROUP", "PAREN_VISUAL"))
                   for side in "LR"]
        return Span(*map(self.convert_expr, expr.expr()), *map(sympy.sympify, is_open))

    def convert_elements_to_set_or_tuple(self, elements):
        rows = [row[0] if len(row) == 1 else sympy.Tuple(*row) for row in elements]
        if len(rows) > 1:
            return Items(*rows)
        return rows[0] if len(elements[0]) == 1 else Items(*elements[0])

    def convert_finite_set(self, expr):
        return Braces(*itertools.chain(*self.convert_semicolon_elements(expr.semicolon_elements())))

    def convert_binom(self, binom):
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def convert_func(self, func):
        name = func.func_normal_single_arg()
        if func.func_normal_multi_arg() or func.FUNC_INT() or func.FUNC_SUM() or func.FUNC_PROD() or func.FUNC_LIM() \
                or (name and name.start.text in (r"\Gamma", r"\gamma")):
            raise Undecided("a function that would be computed at once, or has several arguments")
        return super().convert_func(func)

    def handle_exp(self, func):
        power = func.supexpr()
        if power is None:
            return S.Exp1
        return sympy.exp(self.convert_expr(power.expr()) if power.expr() else self.convert_atom(power.atom()),
                         evaluate=False)


def bits(tree: Basic) -> float:
    """An upper bound on the bits of a tree's numbers, which nothing has evaluated. Raises TooCostly above MAX_BITS."""
    below = [bits(arg) for arg in tree.args]
    if isinstance(tree, sympy.Rational):
        size = tree.p.bit_length() + tree.q.bit_length()
    elif isinstance(tree, sympy.Pow | sympy.exp) and not tree.exp.free_symbols:
        size = max(2, bits(tree.base)) * max(1.0, magnitude(tree.exp))
    elif isinstance(tree, sympy.factorial | sympy.gamma | sympy.binomial) and not tree.args[0].free_symbols:
        largest = magnitude(tree.args[0])
        if not largest <= MAX_FACTORIAL:
            raise TooCostly(f"a factorial above {MAX_FACTORIAL}!")
        size = 8 + largest * 11  # n <= 2^11
    else:
        size = 8 + sum(below)
    if not size <= MAX_BITS:
        raise TooCostly(f"a number of more than {MAX_BITS} bits")
    return size


def magnitude(number: Basic) -> float:
    """|number|, whose bits were bounded. Infinite where it is no number."""
    value = abs(number.doit().evalf(6))
    return float(value) if value.is_Number else float("inf")


def size_of_all(tree: Basic) -> None:
    """`bits` of a tree and of all in it; matrices are no args of a tree."""
    for entry in tree if isinstance(tree, sympy.MatrixBase) else [tree]:
        bits(entry)


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """TooCostly after so many seconds of this process on the processor. Only the main thread gets signals, and a
    reward worker has no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise TooCostly(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    # again and again: what is raised inside of a finalizer, or where sympy expects errors, is lost
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Value:
    """An answer that was read: its unevaluated tree, the places of its decimals, and whether it is a percentage or an
    angle in degrees. Raises Undecided or TooCostly."""

    def __init__(self, text: str, real: bool = True, commute: bool = True):
        self.percent, text = without_end(text, PERCENT)
        trigonometric = TRIGONOMETRIC.search(text) is not None
        self.degrees = False
        if not trigonometric:
            self.degrees, text = without_end(text, DEGREES)
        text = UNIT.sub("", text)
        depths = itertools.accumulate((char in "({[") - (char in ")}]") for char in text)
        if UNREADABLE.search(text) or max(depths, default=0) > MAX_DEPTH:
            raise Undecided(text)
        reader = Reader(real, trigonometric, commute)
        self.tree = connected(reader, text)
        self.places = reader.places
        size_of_all(self.tree)


def without_end(text: str, pattern: str) -> tuple[bool, str]:
    """Whether the text ends in the pattern, behind a digit or a bracket, and what stands before."""
    shorter = re.sub(rf"(?<=[\d\w)}}\]])(?:\s|\\[ ,;!])*(?<![a-zA-Z]){pattern}\s*$", "", text.strip())
    return shorter != text.strip(), shorter


def connected(reader: Reader, text: str) -> Basic:
    r"""The tree of a text: x < 1 \text{ or } x > 2 is a union, x > 1 \text{ and } x < 2 an intersection."""
    for words, join in ((r"\\lor|\\vee|(?:\\text\{)?\s*\bor\b\s*\}?", Either),
                        (r"\\land|\\wedge|(?:\\text\{)?\s*\band\b\s*\}?", Both)):
        parts = re.split(words, text)
        if len(parts) > 1:
            trees = [connected(reader, part.strip(" ,")) for part in parts]
            if all(isinstance(tree, Boolean) and not isinstance(tree, sympy.Eq) for tree in trees):
                return join(*trees)
    text = normalize_latex(text, CONFIG)
    try:
        tree = reader.parse(text)
    except (Undecided, TooCostly):
        raise
    except Exception as error:  # the parser's own errors are plain Exceptions, and sympy's of any kind
        raise Undecided(f"{text!r} cannot be read") from error
    if not isinstance(tree, Basic | sympy.MatrixBase):
        raise Undecided(text)
    return tree

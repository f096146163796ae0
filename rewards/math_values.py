r"""Whether two answers in LaTeX have the same value, for rewards/math.py.

The comparison of the math-verify library is not used: it rounds to six digits, forgets repeats and the order of a
product, and where its parser fails, it takes any number in the text. Here numbers are compared exactly, and what cannot
be read whole (math_reader.py) or not be proved is not equal.
"""

import contextlib
import re

import sympy
from sympy import Basic, Expr, S
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean, BooleanAtom

from rewards.math_reader import Both, Braces, Either, Items, Span, TooCostly, Undecided, Value, bits, limited_time
from rewards.math_text import Verdict

CPU_S = 2.0     # for one answer, in seconds of the processor: simplifying has no bound that is known before
KEY_S = 0.5     # for the key that counts wrong answers together
DIGITS = 100    # in which irrational numbers must agree before a proof is tried
MIN_PLACES = 6  # 0.333333 stands for 1/3, 0.33 does not
CAPITALS = re.compile(r"(?<![a-zA-Z\\{])[A-Z](?![a-z])|(?<=[A-Z])[A-Z](?![a-z])")


def as_set(tree: Basic) -> sympy.Set:
    """The real numbers that an interval, a set or inequalities in one letter describe."""
    match tree:
        case Span():
            low, high = (evaluated(end) for end in tree.args[:2])
            if low.free_symbols or high.free_symbols or not (high - low).is_extended_nonnegative:
                raise Undecided("no interval of numbers")
            return sympy.Interval(low, high, *map(bool, tree.args[2:]))
        case Braces():
            return sympy.FiniteSet(*map(evaluated, tree.args))
        case sympy.Union() | sympy.Intersection() | sympy.Complement():
            return tree.func(*map(as_set, tree.args))
        case Either():
            return sympy.Union(*map(as_set, tree.args))
        case Both():
            return sympy.Intersection(*map(as_set, tree.args))
        case sympy.Set():
            return tree
        case sympy.Eq(lhs=sympy.Symbol()) if isinstance(tree.rhs, sympy.Set | Span | Braces):
            return as_set(tree.rhs)
        case Relational() | And() if len(tree.free_symbols) == 1 and not isinstance(tree, sympy.Eq):
            relations = tree.args if isinstance(tree, And) else [tree]
            return sympy.Intersection(*(relation.func(evaluated(relation.lhs), evaluated(relation.rhs)).as_set()
                                        for relation in relations))
    raise Undecided("no set")


def evaluated(tree: Basic) -> Basic:
    if isinstance(tree, Span | Items | Braces) or not isinstance(tree, Expr):
        raise Undecided("no expression")
    value = tree.doit()
    if value.has(S.NaN, S.ComplexInfinity):
        raise Undecided("a division by zero")
    return value


def explicit(tree: Basic) -> Basic:
    """A product, a sum or a power of matrices as one matrix."""
    if isinstance(tree, sympy.Pow) and isinstance(tree.base, sympy.MatrixBase):
        return tree.base ** tree.exp.doit()
    return tree.doit().as_explicit() if isinstance(tree, sympy.MatrixExpr) else tree


def is_equation(tree: Basic) -> bool:
    return isinstance(tree, sympy.Eq) or (isinstance(tree, And) and all(isinstance(arg, sympy.Eq) for arg in tree.args))


def name_of(tree: Basic) -> str | None:
    """x of x = 5 and of x in [1, 2], f(x) of f(x) = x^2; None for another tree, and for another equation."""
    if not is_equation(tree):
        return None
    left = equations(tree)[0].lhs
    return str(left) if isinstance(left, sympy.Symbol | AppliedUndef | sympy.Tuple) or (
        left.is_Mul and all(isinstance(arg, sympy.Symbol) for arg in left.args)) else None


def equations(tree: Basic) -> list[Relational]:
    """Of a = b = c both, in their order."""
    return list(getattr(tree, "_unsorted_args", tree.args)) if isinstance(tree, And) else [tree]


class Comparison:
    """Whether trees have the same value. `places`: of the decimals in both answers."""

    def __init__(self, places: dict[Expr, int]):
        self.places = places

    def same(self, left: Basic, right: Basic) -> bool:
        if left == right and not left.has(S.NaN, S.ComplexInfinity):
            return True
        if is_equation(left) != is_equation(right):  # "x = 5" and "5", where the other side is a value
            if is_equation(right):
                left, right = right, left
            last = equations(left)[-1].rhs
            if isinstance(right, Relational | And):
                return False
            if name_of(left) is None and not all(self.same(equation.lhs, last) for equation in equations(left)):
                return False  # 2 + 3 = 5 is 5, 2x = 5 is not
            return self.same(last, right)
        left, right = explicit(left), explicit(right)
        if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
            return (isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase)
                    and left.shape == right.shape and all(map(self.same, left, right)))
        if is_equation(left):
            return self.same_equations(equations(left), equations(right))
        if isinstance(left, Boolean) and isinstance(right, Boolean):
            return self.same_inequalities(left, right)
        lists = Span | Items | Braces | sympy.Tuple
        if isinstance(left, lists) and isinstance(right, lists):
            return self.same_lists(left, right)
        if any(isinstance(tree, sympy.Set | Boolean | Either | Both | lists) for tree in (left, right)):
            return self.same_sets(left, right)
        return self.same_expressions(evaluated(left), evaluated(right))

    def same_lists(self, left: Basic, right: Basic) -> bool:
        if isinstance(left, Span) and isinstance(right, Span) and left.args[2:] != right.args[2:]:
            return False
        entries = [list(tree.args[:2] if isinstance(tree, Span) else tree.args) for tree in (left, right)]
        for tree, row in zip((left, right), entries):
            if isinstance(tree, Braces):  # a set has each of its elements once
                row[:] = [entry for i, entry in enumerate(row) if not any(self.same(entry, other) for other in row[:i])]
        if len(entries[0]) != len(entries[1]):
            return False
        ordered = [isinstance(tree, Span | sympy.Tuple) for tree in (left, right)]
        if any(ordered):  # (1, 2), and 1, 2 for it in this order
            closed = any(isinstance(tree, Span) and S.false in tree.args[2:] for tree in (left, right))
            if isinstance(left, Braces) or isinstance(right, Braces) or (closed and not all(ordered)):
                return False
            named = [[name_of(entry) for entry in row] for row in entries]
            if any(None not in names and names != sorted(names) for names in named) and named[0] != named[1]:
                return False
            return all(map(self.same, *entries))
        for entry in entries[0]:  # in any order, each as often as in the other
            found = next((other for other in entries[1] if self.same(entry, other)), None)
            if found is None:
                return False
            entries[1].remove(found)
        return True

    def same_sets(self, left: Basic, right: Basic) -> bool:
        second = as_set(right)  # before the policy's, which may take long
        first = as_set(left)
        return first == second or (first - second) == (second - first) == S.EmptySet

    def same_equations(self, left: list[Relational], right: list[Relational]) -> bool:
        if len(left) != len(right):
            return False
        if isinstance(left[0].rhs, sympy.Set | Span | Braces | Items | sympy.Tuple | sympy.MatrixBase):
            return all(self.same(a.lhs, b.lhs) and self.same(a.rhs, b.rhs) for a, b in zip(left, right))
        if any(name_of(equation) and equation.lhs == other.lhs for equation, other in zip(left, right)):
            return all(self.same(a.lhs, b.lhs) and self.same(a.rhs, b.rhs) for a, b in zip(left, right))
        for first, second in zip(left, right):  # 2x + y = 1 is y = 1 - 2x: one is a multiple of the other
            sides = [evaluated(equation.lhs) - evaluated(equation.rhs) for equation in (first, second)]
            ratio = sympy.simplify(sides[0] / sides[1]) if sides[1] != 0 else S.NaN
            if not ratio.is_number or not ratio.is_finite or ratio.is_zero is not False:
                return False
        return True

    def same_inequalities(self, left: Basic, right: Basic) -> bool:
        if left.free_symbols != right.free_symbols:
            return False
        if len(left.free_symbols) == 1 and not (isinstance(left, sympy.Ne) and isinstance(right, sympy.Ne)):
            return self.same_sets(left, right)
        first, second = (tree.reversed if isinstance(tree, sympy.Gt | sympy.Ge) else tree for tree in (left, right))
        if first.func != second.func or isinstance(first, And):
            return False
        return self.same_expressions(evaluated(first.lhs) - evaluated(first.rhs),
                                     evaluated(second.lhs) - evaluated(second.rhs))

    def same_expressions(self, left: Expr, right: Expr) -> bool:
        if left == right:
            return True
        if left.is_number and right.is_number:
            return self.same_numbers(left, right)
        difference = left - right
        letters = sorted(difference.free_symbols, key=str)
        if not all(letter.is_commutative for letter in letters):
            return sympy.expand(difference) == 0
        for start in (3, 7):  # most that differ, differ at two points
            point = {letter: sympy.Rational(start + 2 * i, 5 + i) for i, letter in enumerate(letters)}
            value = difference.subs(point).evalf(30)
            if value.is_number and value.is_finite and abs(value) > sympy.Rational(1, 10**20):
                return False
        return sympy.simplify(difference) == 0

    def same_numbers(self, left: Expr, right: Expr) -> bool:
        if not (left.is_finite and right.is_finite):
            return False  # infinities that are equal are the same tree
        if left.is_Rational and right.is_Rational and not (left in self.places or right in self.places):
            return False
        if self.rounded(left, right) or self.rounded(right, left):
            return True
        values = [number.evalf(DIGITS) for number in (left, right)]
        if not all(value.is_number for value in values):
            raise Undecided("no number")
        if abs(values[0] - values[1]) > max(map(abs, values)) * sympy.Rational(1, 10**(DIGITS - 10)):
            return False
        return sympy.simplify(left - right) == 0 or (left - right).equals(0) is True

    def rounded(self, decimal: Expr, exact: Expr) -> bool:
        """Whether the first is a decimal of enough digits to which the other, which is none, is rounded or cut."""
        places = self.places.get(abs(decimal), 0)
        if places < MIN_PLACES or exact in self.places or not exact.is_extended_real:
            return False
        if abs(decimal) * 10**places < 10**(MIN_PLACES - 1):  # 0.000001 has one digit that counts
            return False
        off = (abs(exact) - abs(decimal)).evalf(30) * 10**places
        return bool(exact.is_negative) == bool(decimal.is_negative) and bool(off >= -0.5) and bool(off < 1)


def compare(answer: str, truth: str) -> Verdict:
    """An answer that is too large to be computed is not equal. Raises ValueError if the truth is too large."""
    from math_verify.grader import should_treat_as_complex

    real = not (should_treat_as_complex(answer) or should_treat_as_complex(truth))
    commute = max(len({*CAPITALS.findall(text)}) for text in (answer, truth)) < 2
    expected = None
    try:
        with limited_time(CPU_S), contextlib.suppress(Undecided):
            expected = Value(truth, real, commute)
    except TooCostly as error:
        raise ValueError(f"ground_truth {truth!r:.200} cannot be compared: {error}") from None
    try:
        with limited_time(CPU_S):
            given = Value(answer, real, commute)
            if expected is not None and same_value(given, expected):
                return Verdict(True, None)
    except TooCostly:
        return Verdict(False, None, too_costly=True)
    except Exception:  # Undecided, and sympy's own of any kind: no text may leave its sample without a score
        return Verdict(False, None)
    try:
        with limited_time(KEY_S):
            return Verdict(False, key_of(given.tree))
    except Exception:  # as above
        return Verdict(False, None)


def same_value(given: Value, expected: Value) -> bool:
    compared = Comparison(expected.places | given.places)
    with contextlib.suppress(Undecided):
        if compared.same(given.tree, expected.tree):
            return True
    for one, other in ((given, expected), (expected, given)):
        if isinstance(one.tree, Expr) and isinstance(other.tree, Expr):
            if one.percent and not other.percent and compared.same(one.tree / 100, other.tree):
                return True
            if one.degrees and other.tree.has(S.Pi) and compared.same(one.tree * S.Pi / 180, other.tree):
                return True
    return False


def key_of_set(numbers: sympy.Set) -> str:
    if isinstance(numbers, sympy.Interval):
        ends = (numbers.start, numbers.end, sympy.sympify(numbers.left_open), sympy.sympify(numbers.right_open))
        return key_of(Span(*ends))
    return " or ".join(sorted(map(key_of_set, numbers.args))) if isinstance(numbers, sympy.Union) else str(numbers)


def key_of(tree: Basic) -> str:
    """One text for the ways to write a value."""
    if name_of(tree) is not None:
        return key_of(equations(tree)[-1].rhs)
    if isinstance(tree, Span | Items | Braces | sympy.Tuple):
        entries = [key_of(entry) for entry in tree.args if not isinstance(entry, BooleanAtom)]
        if isinstance(tree, Items | Braces):
            entries.sort()
        marks = ["()"[i] if is_open else "[]"[i] for i, is_open in enumerate(tree.args[2:])] \
            if isinstance(tree, Span) else ["", ""]
        return f"{marks[0]}{', '.join(entries)}{marks[1]}"
    tree = explicit(tree)
    if isinstance(tree, sympy.MatrixBase):
        return f"{tree.shape}: {', '.join(map(key_of, tree))}"
    if not isinstance(tree, Expr):
        return str(tree) if is_equation(tree) else key_of_set(as_set(tree))
    value = tree.doit()
    if value.is_Rational and bits(value) > 10_000:
        return sympy.srepr(value.evalf(DIGITS))
    return str(value if value.is_Rational else value.evalf(15) if value.is_number else sympy.expand(value))

r"""When two answers are equal: pairs worked by hand, in both directions; what is too costly; the votes of maj@N."""

import pytest

from common.rollouts.validation import majority
from rewards import geo3k, math
from rewards.runtime.pool import RewardPool

# Each kind: pairs that differ, and pairs that are equal.
DIFFERENT = {
    "beyond the sixth digit": [
        ("1-1/2^{100}", "1-1/2^{99}"), ("0.1234567", "0.1234568"), ("3.1415927", "3.1415926"),
        ("0.3333331", r"\frac13"),
        ("0.333334", r"\frac13"), ("1.41421357", r"\sqrt{2}"), ("0.0000005", "0"), ("(0.1234567,1)", "(0.1234568,1)"),
        (r"\{0.1234567\}", r"\{0.1234568\}"), (r"2^{100}", r"2^{100}+1"), (r"\sqrt{2}+10^{-50}", r"\sqrt2"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("0.33", r"\frac13"), ("0.9999999", "1")],
    "factors of ten": [
        (r"\frac{1}{10^{20}}", r"\frac{1}{10^{21}}"), (r"10^{-7}", r"10^{-8}"), ("0.0000001", "0.0000002"),
        (r"e^{-50}", r"e^{-60}"), ("1.5e3", "1.5e4"), (r"5\%", "0.5"), ("1e-7", "0"), (r"200\%", "0.02")],
    "bases": [("1011_2", "1011_8"), ("1011_2", "1011"), ("123_{5}", "123_6"), ("(1011)_2", "(1011)_3"), ("52_8", "52")],
    "repeats": [("1,1,2", "1,2"), ("1,2,2", "1,1,2"), ("1,1", "1"), ("2,2,2", "2"), ("(1,2),(1,2)", "(1,2)")],
    "conditions": [
        (r"\{x \mid x > 2\}", r"\{x \mid x > 3\}"), (r"\{x : x>2\}", r"\{x: x<2\}"), (r"\{x \mid x>2\}", r"\{x\}"),
        (r"\{n\in\mathbb{Z}|n>0\}", r"\{n\in\mathbb{Z}|n<0\}"), (r"3\text{ or more}", "3"),
        (r"\frac12\text{ if }n\text{ is even}", r"\frac12"), (r"x\in\mathbb{R}", r"x\in\mathbb{Q}")],
    "residues": [(r"3 \pmod 7", r"4 \pmod 7"), (r"3 \pmod 7", r"3 \pmod 8"),
                 (r"x\equiv 3\pmod 7", r"x\equiv 4 \pmod 7"),
                 (r"3\pmod{7}", "3")],
    "elided terms": [(r"1,2,\ldots,10", r"1,2,10"), (r"1,2,\ldots,10", r"1,2,\ldots,20"), (r"1+2+\cdots+n", "1+2+n"),
                     ("1,2,...,10", "1,2,10"), (r"0.121212\ldots", "0.121212")],
    "primes and transposes": [
        ("f'(x)", "f(x)"), ("f''(x)", "f'(x)"), ("A'", "A"), ("A^T", "A"), (r"A^{T}B", "AB^T"), (r"A^\top B", "AB"),
        (r"f^{(2)}(x)", "f(x)^2"), (r"f^{-1}(x)", r"\frac{1}{f(x)}"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T",
                                                                    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}")],
    "order": [
        ("AB", "BA"), ("ABC", "CBA"), (r"A^{-1}B", r"BA^{-1}"), ("(AB)^{-1}", r"A^{-1}B^{-1}"), ("ABA^{-1}", "B"),
        (r"\vec{a}\times\vec{b}", r"\vec{b}\times\vec{a}"),
        ("(2,1)", "(1,2)"), ("x=2,y=1", "(1,2)"), ("post", "stop"), (r"\{1,2\}", "(1,2)")],
    "what the parser makes of a text": [
        ("1 1/2", "11/2"), ("1 2", "12"), ("2(3)", "5"), (r"\frac{3}{4}\frac12", "1.25"), (r"\frac{n}{N}", "1"),
        ("2m", "2"), (r"x\equiv 3\pmod 7", "7"), ("5th", "5"), ("2+3=6", "6"), ("x=1", "y=1"), ("IV", "VI"),
        (r"\frac{1}{0}", r"\frac{2}{0}"), (r"\sin 30^\circ", r"\sin 30")],
    "sets": [(r"[3,\infty)", "x>3"), ("1<x<2", r"1\le x\le 2"), (r"(0,1)\cup(1,2)", "(0,2)"), ("x<2, x>0", "(0,2)"),
             (r"\emptyset", "0"), (r"\text{one solution}", r"\text{no solution}"), ("x>1", "y>1")],
}
EQUAL = {
    "numbers": [
        ("0.333333", r"\frac13"), ("1.41421356", r"\sqrt{2}"), ("0.1+0.2", "0.3"), (r"2^{10}", "1024"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}"), (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt5}{4}"), (r"\log_2 8", "3"),
        ("2(3)", "6"), (r"\binom{5}{2}", "10"), (r"\frac{10!}{5!5!}", "252"), ("2+3=5", "5"), ("\u22125", "-5"),
        ("½", "0.5"),
        ("√2", r"\sqrt{2}"), ("0.333333, 1", r"\frac13, 1")],
    "mixed numbers": [
        (r"1\frac{1}{2}", r"\frac32"), (r"-1\frac{1}{2}", "-1.5"), ("1 1/2", "1.5"), (r"2\tfrac34", "11/4"),
        (r"3\frac{1}{2}\text{ cm}", "3.5"), ("5 3/4", "23/4"), (r"2 \cdot 1\frac12", "3")],
    "powers of ten": [("1.5e3", "1500"), ("2e-3", "0.002"), ("1.5E3", r"1.5\times10^3"), ("1e-7", r"10^{-7}")],
    "per cent": [(r"50\%", "0.5"), (r"\frac12", r"50\%"), (r"33\frac13\%", r"\frac13"), ("50 percent", r"50\%"),
                 (r"0.5\%", "0.005"), (r"50\text{ percent}", r"\frac12")],
    "degrees": [(r"90^\circ", r"\frac{\pi}{2}"), (r"180^\circ", r"\pi"), (r"90\text{ degrees}", r"90^\circ"),
                (r"\sin 30^\circ", r"\frac12"), (r"\frac{\pi}{3}\text{ radians}", r"60^\circ")],
    "repeating decimals": [(r"0.\overline{3}", r"\frac13"), (r"0.1\overline{6}", r"\frac16"), (r"0.\dot{3}", "1/3"),
                           (r"1.\overline{27}", r"\frac{14}{11}"), (r"0.\bar{3}", r"\frac13"),
                           (r"0.\overline{9}", "1")],
    "intervals": [
        ("1<x<2", "(1,2)"), (r"1\le x<2", "[1,2)"), ("x>3", r"(3,\infty)"), ("2>x>1", "1<x<2"), ("|x|<1", "-1<x<1"),
        (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"), (r"x\in[1,2]", "[1,2]"), ("x^2<4", "(-2,2)"),
        (r"x\geq 0 \text{ and } x\leq 1", "[0,1]"), (r"x\ne 1", r"(-\infty,1)\cup(1,\infty)"), ("a<b", "b>a"),
        (r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)")],
    "no solution": [(r"\text{no solution}", r"\emptyset"), (r"\text{No solutions}", r"\varnothing"), (r"\{\}", "∅")],
    "texts": [("1011_{2}", "1011_2"), (r"x\equiv 3\pmod 7", r"x \equiv 3 \pmod{7}"), (r"2,4,\dots", r"2,4,\ldots"),
              (r"\text{Yes}", r"\text{yes}")],
    "lists and equations": [
        ("1,1,2", "1,2,1"), (r"\{1,1,2\}", r"\{1,2\}"), ("1,-1", r"\pm 1"), ("x=1,y=2", "(1,2)"),
        ("y=2,x=1", "x=1,y=2"),
        ("2x+y=1", "y=1-2x"), (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"), ("y=2x+1", "2x+1"), ("xy", "yx"),
        (r"\begin{pmatrix} 0.5 \\ 1\end{pmatrix}", r"\begin{pmatrix} 1/2\\1\end{pmatrix}"), ("A+B", "B+A")],
}


def pairs(kinds: dict) -> list:
    return [pytest.param(*pair, id=f"{kind}: {pair[0]} and {pair[1]}") for kind in kinds for pair in kinds[kind]]


@pytest.mark.parametrize(("left", "right"), pairs(DIFFERENT))
def test_different_answers_are_told_apart(left, right):
    assert not math.equal(left, right)
    assert not math.equal(right, left)


@pytest.mark.parametrize(("left", "right"), pairs(EQUAL))
def test_the_same_answer_in_another_form_is_equal(left, right):
    assert math.equal(left, right)
    assert math.equal(right, left)


@pytest.mark.parametrize("task", [math, geo3k])
def test_votes_and_scores_have_one_equality(task):
    """Four of nine say one half, each in its own way; the five others say 1/3 in three ways and 2, and lose."""
    answers = ["0.5", r"\frac{2}{4}", r"50\%", r"2^{-1}", r"\frac13", "1/3", r"\frac{2}{6}", "2", r"\sqrt{4}"]
    found = [task.compute_score("", rf"\boxed{{{answer}}}", r"\frac{1}{2}") for answer in answers]
    assert [result["acc"] for result in found] == [True] * 4 + [False] * 5
    votes = [result["pred"] for result in found]
    assert len({*votes[:4]}) == len({*votes[4:7]}) == len({*votes[7:]}) == 1 and len({*votes}) == 3
    assert majority([(float(result["acc"]), result["pred"]) for result in found]) == 1
    sets = [task.compute_score("", rf"\boxed{{{answer}}}", "7")["pred"] for answer in ("x>3", r"(3,\infty)", "[3, 4]")]
    assert sets[0] == sets[1] != sets[2]


# Towers of powers and factorials, also where the parser would compute them while it reads; and texts it reads slowly.
COSTLY = [
    r"9^{9^{9^{9}}}", "10000000000!", r"9^{9^{9^{9^{9}}}} \cdot \frac{1}{3}", r"(9^{9^{9^9}}, 3)",
    r"\{9^{9^{9^9}}, 3\}",
    r"\binom{1000000000}{500000000}", r"\lfloor 9^{9^{9^9}} \rfloor", r"e^{e^{e^{e^{e}}}}", r"9^{9^{9^9}}<x<3",
    "3!!!!!!!!",
    r"x = 9^{9^{9^{9}}}", r"1.5e1000000000", r"x^{9^{9^{9}}} > 3", r"(1,2)\cup(3,9^{9^{9^9}})", r"9^{9^{9^9}}\%",
    r"\begin{pmatrix}1\\9^{9^{9^9}}\end{pmatrix}", r"1^{10^{10^{10}}}", r"(1+x)^{100000000}"]
CHEAP = ["(" * 240 + "1" + ")" * 240, "-" * 400 + "1", r"\sqrt" * 100 + "2", "1 1/2 " * 80, "{" * 500, r"1\frac12" * 60,
         r"\operatorname{zeros}(1000000,1000000)", r"\Gamma(10000000000)", r"\sum_{n=1}^{10000000000} n^{100}"]


def test_an_answer_that_is_too_costly_is_wrong_and_counted():
    for answer in COSTLY + CHEAP:
        for truth in ("7", "(1,2)", "x>3"):
            found = math.compute_score("", rf"\boxed{{{answer}}}", truth)
            assert (found["score"], found["too_costly"]) == (0.0, float(answer in COSTLY)), answer


def test_a_truth_that_is_too_costly_is_an_error():
    assert math.equal(r"9^{9^{9^{9}}}", r"9^{9^{9^9}}")
    with pytest.raises(ValueError, match=r"ground_truth .9.* cannot be compared: a number of more than 50000 bits"):
        math.equal("7", r"9^{9^{9^9}}")


def test_simplifying_ends_after_its_time(monkeypatch):
    """No bound of sizes tells how long an inequality takes; this one takes sympy more than 20 s."""
    from rewards import math_values

    monkeypatch.setattr(math_values, "CPU_S", 0.3)
    found = math.compute_score("", r"\boxed{x^{50}-x+1>0}", "x>3")
    assert (found["score"], found["too_costly"]) == (0.0, 1.0)


def test_a_lost_end_of_the_time_comes_again():
    """As in a finalizer, where Python drops what is raised."""
    from rewards.math_reader import TooCostly, limited_time

    lost = []

    def loses_one():
        with limited_time(0.05):
            try:
                spin()
            except TooCostly as error:
                lost.append(error)
            spin()

    with pytest.raises(TooCostly):
        loses_one()
    assert len(lost) == 1


def spin():
    while True:
        pass


def test_a_time_bomb_does_not_escape_its_score():
    """In the pool, with its deadline: no sample is lost."""
    with RewardPool(num_workers=1, timeout_s=30) as pool:
        for index, answer in enumerate((r"9^{9^{9^{9^{9}}}} \cdot \frac{1}{3}", "10000000000!", "14/2")):
            pool.submit(index, "lighteval/MATH", rf"\boxed{{{answer}}}", "7")
        results = pool.results()
    assert results.failures == [None, None, None]
    assert results.scores == [0.0, 0.0, 1.0]
    assert [extra["too_costly"] for extra in results.extras] == [1.0, 1.0, 0.0]

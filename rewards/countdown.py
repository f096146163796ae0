"""Countdown's score: an expression in <answer>...</answer> that uses every given number once and gives the target.

ground_truth: {"target": int, "numbers": [int, ...]} or that as JSON. The expression is parsed, never evaluated as code,
and computed in exact fractions; + - * / and brackets are allowed, the first three also as the signs of print and LaTeX.
"""

import ast
import json
import operator
import re
from collections import Counter
from fractions import Fraction

from rewards.format import last_between

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {"\u2212": "-", "\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", r"\times": "*", r"\cdot": "*",
         r"\div": "/", r"\left": "", r"\right": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "", "$": ""}
MAX_LENGTH = 200  # characters of an expression: no stack and no number can grow large


def compute(expression: str) -> tuple[Fraction, list[int]]:
    """Value and the numbers used. Raises ValueError, SyntaxError or ZeroDivisionError."""
    if len(expression) > MAX_LENGTH or not re.fullmatch(r"[0-9+\-*/() ]+", expression) or "**" in expression:
        raise ValueError(f"{expression[:MAX_LENGTH]!r} is not made of integers, + - * / and brackets")
    used = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number):
                used.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return value(node.operand)
            case ast.BinOp(op=op) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)!r} is not allowed")

    return value(ast.parse(expression.strip(), mode="eval").body), used


def written_in_ascii(answer: str) -> str:
    r"""3 \times 4, $3*4$ and an expression of several lines as Python's."""
    for sign, character in SIGNS.items():
        answer = answer.replace(sign, character)
    return " ".join(answer.split())


def compute_score(data_source, solution_str, ground_truth, extra_info=None, score=1.0, format_score=0.1) -> dict:
    """`score` for a right expression, `format_score` for another <answer>, 0 without one (verl's values). A response
    without one has no vote in maj@N."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    target, numbers = int(truth["target"]), [int(n) for n in truth["numbers"]]
    answer = last_between(solution_str, "<answer>", "</answer>")
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": None}
    expression = written_in_ascii(answer).partition("=")[0]  # "1 + 2 = 3" is taken as "1 + 2"
    try:
        value, used = compute(expression)
        acc = value == target and Counter(used) == Counter(numbers)
    except (ValueError, SyntaxError, ZeroDivisionError):
        acc = False
    return {"score": score if acc else format_score, "acc": acc, "pred": expression[:MAX_LENGTH]}

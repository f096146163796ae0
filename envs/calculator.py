"""A calculator for word problems: <<12 * 7>> in a reply is answered with its value, `#### 84` is the final answer.

    python data/calculator.py --out data/calculator
    --rollout.episode envs/calculator.py --train-data data/calculator/train.parquet
"""

import ast
import math
import operator

from rewards.format import last_between
from rewards.gsm8k import compute_score, extract_answer

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_LENGTH = 100  # characters of an expression


async def episode(chat, row):
    """The reward is 1 for the right answer."""
    text = await chat.reply()
    num_calls = 0
    while text is not None and "####" not in text and (expression := last_expression(text)) is not None:
        num_calls += 1
        text = await chat.reply({"role": "user", "content": calculate(expression)})
    text = text or ""
    score = compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
    answer = extract_answer(text)
    pred = None if answer is None else f"{answer.normalize():f}"  # 84.0 votes as 84; None: no vote in maj@N
    return {"score": score, "acc": score, "pred": pred, "calls": num_calls}


def last_expression(text: str) -> str | None:
    """The last <<...>> that stands in one line."""
    found = (last_between(line, "<<", ">>") for line in reversed(text.split("\n")))
    return next((expression for expression in found if expression is not None), None)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets; or a message about its error."""
    if len(expression) > MAX_LENGTH:
        return f"Error: the expression has {len(expression)} characters, at most {MAX_LENGTH}."
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            return "Error: the value is too large."
    except ZeroDivisionError:
        return "Error: division by zero."
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "Error: write numbers, + - * / and brackets only."
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def value_of(node: ast.expr) -> int | float:
    """Evaluates only numbers and the four operators."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError(ast.dump(node))

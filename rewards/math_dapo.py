r"""DAPO's score for math_dapo and aime*: the last "Answer: ..." of a response, +1 if it equals the truth, else -1.

Without an "Answer:" line the last \boxed{} that stands in the last 100 characters counts, as in verl 0.9.1. Answers are
compared as text after Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1), as verl does; a boxed one too,
which verl compares as it is written. A response without an answer has no vote in maj@N, where
verl has the answer "[INVALID]".
"""

import re
from numbers import Real

from rewards.math import inside_braces

ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
TAIL = 300      # characters searched, as in verl: an answer stands at the end
BOX_TAIL = 100  # for a box without an "Answer:" line
WORDS = ("square ways integers dollars mph inches hours km units sue points feet minutes digits cents degrees cm gm "
         r"pounds meters meals edges students childrentickets multiples \ldots \text{s} \text{.} \text{}^2 "
         r"\text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " + r'" \dots').split()


def normalise(answer: str) -> str:
    """Minerva's normal form: the right side of the last =, without articles, units, LaTeX's decoration and commas."""
    answer = answer.rpartition("=")[2]
    for before, after in (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
                          (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")):
        answer = answer.replace(before, after)
    for word in WORDS:
        answer = answer.replace(word, "")
    if math := re.search(r"\$(.*?)\$", answer):
        answer = f"${math[1]}$"
    for command in ("text", "textbf", "overline"):  # one after the other: \textbf{\text{5}}
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)  # \frac12: \frac{1}{2}
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "").strip()
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


def truths_of(ground_truth: object) -> list[str]:
    """The texts that count as right: of a text or number itself, of a list (or array) each of its entries."""
    if isinstance(ground_truth, str):
        return [normalise(ground_truth)]
    if isinstance(ground_truth, Real) and not isinstance(ground_truth, bool):
        number = float(ground_truth)
        return [str(int(ground_truth)) if number.is_integer() else str(number)]
    entries = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError(f"ground_truth {ground_truth!r:.100} must be a text, a number or a list of them")
    return [text for entry in entries for text in truths_of(entry)]


def boxed(tail: str) -> str | None:
    r"""What the last \boxed{...} holds; verl reads no other form."""
    start = tail.rfind(r"\boxed{")
    return inside_braces(tail, start + len(r"\boxed")) if start >= 0 else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    truths = truths_of(ground_truth)
    found = ANSWER.findall(solution_str[-TAIL:])
    answer = found[-1] if found else boxed(solution_str[-BOX_TAIL:])
    pred = None if answer is None else normalise(answer)
    acc = pred in truths
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}

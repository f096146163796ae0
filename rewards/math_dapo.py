r"""DAPO's score for math_dapo and aime*: the last "Answer: ..." of a response, +1 if it equals the truth, else -1.

Answers are compared as text after Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1), as verl does.
"""

import re

ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
TAIL = 300  # characters searched, as in verl: an answer stands at the end
WORDS = ("square ways integers dollars mph inches hours km units sue points feet minutes digits cents degrees cm gm "
         r"pounds meters meals edges students childrentickets multiples \ldots \dots \text{s} \text{.} \text{}^2 "
         r"\text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " + '"').split()


def normalise(answer: str) -> str:
    """Minerva's normal form: the right side of the last =, without articles, units, LaTeX's decoration and commas."""
    answer = answer.rpartition("=")[2]
    for before, after in (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
                          (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")):
        answer = answer.replace(before, after)
    for word in WORDS:
        answer = answer.replace(word, "")
    if math := re.search(r"\$(.*?)\$", answer):
        answer = math[1]
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)  # \frac12: \frac{1}{2}
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "").strip()
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    found = ANSWER.findall(solution_str[-TAIL:])
    pred = normalise(found[-1]) if found else "[INVALID]"
    acc = pred == normalise(str(ground_truth))
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}

r"""Score of a multiple-choice answer: the letter after the last "Answer:" of a response, for gpqa*. Without one, the
letter in its last \boxed{}, or after its last "answer is".

The letter may stand in brackets, in bold, in quotes or code marks, or in LaTeX: $B$, \(B\), \boxed{B}, \textbf{B}. "A"
and "I" that begin a sentence ("Answer: a mixture") are words and no letters; two letters ("B or C") are no answer. A
response without a letter scores 0 and has no vote in maj@N.
"""

import re

from rewards.math import last_boxed

COMMANDS = r"\\(?:boxed|text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|boldsymbol)\s*\{"
OPEN = rf"(?:[\s*_$(]|{COMMANDS})"
# Words that follow the letter A and no article: "A because ..."; all others after "A" or "I" make it a word.
AFTER_A_LETTER = "is|as|and|or|because|since|given|due|for|from|by|with|which|that|but|not"
# A letter, not the beginning of a word, a formula (C2H6, C_6) or a compound (I'm, D-glucose).
BARE = rf"(?![AI][ \t]+[*_]*(?!(?:{AFTER_A_LETTER})\b)[A-Z])[A-Z](?![^\W_]|['\u2019]\w|-(?-i:[a-z])|_(?:[^\W_]|{{))"
# These marks may also begin a list, a formula or a line of code: "[A, C]", "\(B = 3\)", "`a = 1`". Only the letter may
# stand in them, or the letter and what it is about: "[B]", "`B. A mixture`".
MARK = r"(?:[\[{`\"']|\\[(\[])"
ALONE = r"[A-Z](?:[.:)]\s|\s*(?:[)\]}$`\"]|\\[)\]])|[*_']+(?![\w*']))"
# "B or C", "(B) and (C)", "B/C"
ANOTHER = r"[)\]}*_$\s]*(?:(?:\\text\{\s*)?\b(?:or|and)\b|[/&])[\s*_$(\[}]*(?-i:[A-HJ-Z])(?![^\W_])"
LETTER = rf"{OPEN}*(?:(?={BARE})|{MARK}(?:{OPEN}|{MARK})*(?={ALONE}))([A-Z])(?!{ANOTHER})"
ANSWER, ANSWER_IS, ALL = (re.compile(before + LETTER, re.IGNORECASE)
                          for before in (r"answer[*_]*\s?:", r"answer\s+is\b\s?:?", r""))


def letter_in_box(text: str) -> list[str]:
    box = last_boxed(text)
    found = box and ALL.match(rf"\boxed{{{box}}}")
    return [found[1]] if found else []


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    truth = str(ground_truth).strip().upper()
    if not re.fullmatch("[A-Z]", truth):
        raise ValueError(f"ground_truth {ground_truth!r:.100} must be a letter, that of the right choice")
    found = ANSWER.findall(solution_str) or letter_in_box(solution_str) or ANSWER_IS.findall(solution_str)
    pred = found[-1].upper() if found else None
    acc = pred == truth
    return {"score": float(acc), "acc": acc, "pred": pred}

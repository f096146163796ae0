r"""Score of a multiple-choice answer: the letter after the last "Answer:" of a response, for gpqa*.

The letter may stand in brackets, in bold, in quotes or code marks, or in LaTeX: $B$, \(B\), \boxed{B}, \textbf{B}. "A"
and "I" that begin a sentence ("Answer: a mixture") are words and no letters. A response without a letter scores 0 and
has no vote in maj@N.
"""

import re

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
LETTER = re.compile(rf"answer[*_]*\s?:{OPEN}*(?:(?={BARE})|{MARK}(?:{OPEN}|{MARK})*(?={ALONE}))([A-Z])", re.IGNORECASE)


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    found = LETTER.findall(solution_str)
    pred = found[-1].upper() if found else None
    acc = pred == str(ground_truth).strip().upper()
    return {"score": float(acc), "acc": acc, "pred": pred}

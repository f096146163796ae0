"""Reads what a shell script assigns and the command that it would start, without running anything.

It knows what launch scripts use: variables with defaults, arrays, integer arithmetic, `if` and `case` on strings and
numbers, continued lines. Loops and functions are skipped, other programs never start; `notes` says what that left out.
"""

import ast
import operator
import re
from fnmatch import fnmatchcase

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
              ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
NUMBER_TESTS = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
                "-le": operator.le}
ENDS_WORD = set(" \t\n;|&()<>")
SKIPPED = re.compile(r"[ \t]+|\\\n|#[^\n]*|\d*(?:>>|>|<)&?[ \t]*[^\s;|&()]+")
OPERATOR = re.compile(r";;|&&|\|\||[\n;|&()]")
PARAMETER = re.compile(r"(\w+)(:?[-=+?])?(.*)", re.DOTALL)


def compute(node: ast.AST) -> int:
    """An integer expression; ValueError for anything else."""
    match node:
        case ast.Expression(body=body):
            return compute(body)
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -compute(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](compute(left), compute(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in ARITHMETIC:
            return int(ARITHMETIC[type(op)](compute(left), compute(right)))
    raise ValueError(f"{ast.unparse(node)} is no integer expression")


def closing(text: str, start: int) -> int:
    """One past the end of the quoted text, {...} or (...) that begins at `start`; quotes and brackets may be nested."""
    end = {"'": "'", '"': '"', "{": "}", "(": ")"}[text[start]]
    i = start + 1
    while i < len(text) and text[i] != end:
        if end == "'":
            i += 1
        elif text[i] == "\\":
            i += 2
        elif text[i] == "$" and text[i + 1 : i + 2] in ("{", "("):
            i = closing(text, i + 1)
        elif text[i] in "'\"(" and end != '"':
            i = closing(text, i)
        else:
            i += 1
    return i + 1


class ShellScript:
    """What is known after the script: `variables` (at the start those of `environment`), `arrays`, `commands` (the
    words of each command that was reached) and `notes`."""

    def __init__(self, text: str, environment: dict[str, str]):
        self.text = text
        self.position = 0
        self.variables = dict(environment)
        self.arrays: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        self.status = True  # of the latest test; other commands count as successful
        while self.position < len(text):
            self.run(True)

    # ---- reading

    def next(self) -> str:
        """The next word as it is written, or an operator; "" at the end. Comments and redirections are skipped."""
        text = self.text
        while self.position < len(text):
            if skipped := SKIPPED.match(text, self.position):
                self.position = skipped.end()
                continue
            if found := OPERATOR.match(text, self.position):
                self.position = found.end()
                return found[0]
            start = self.position
            i = start
            while i < len(text) and text[i] not in ENDS_WORD:
                if text[i] == "\\":
                    i += 2
                elif text[i] in "'\"":
                    i = closing(text, i)
                elif text[i] == "$" and text[i + 1 : i + 2] in ("{", "("):
                    i = closing(text, i + 1)
                else:
                    i += 1
            self.position = max(i, start + 1)
            return text[start : self.position]
        return ""

    # ---- carrying out

    def run(self, active: bool, *ends: str) -> str:
        """Follow statements up to a word of `ends` (or the end), and return it. Not `active`: only read them."""
        follow = active
        while word := self.next():
            if word in ends:
                return word
            if word in ("&&", "||"):
                follow = active and self.status == (word == "&&")
                continue
            if word in ("\n", ";", ";;", "&", "|", ")"):
                follow = active
                continue
            self.statement(word, follow)
        return ""

    def statement(self, word: str, active: bool) -> None:
        if word == "if":
            self.choose(active)
        elif word == "case":
            self.choose_case(active)
        elif word in ("for", "while", "until"):
            self.run(False, "done")
            if active:
                self.notes.append(f"a `{word}` loop is skipped")
        elif word == "{":
            self.run(active, "}")
        elif word == "(" and self.text.startswith("(", self.position):
            end = closing(self.text, self.position - 1)
            if active:
                self.status = bool(self.arithmetic(self.text[self.position + 1 : end - 2]))
            self.position = end
        elif re.fullmatch(r"\w+", word) and self.text.startswith("()", self.position):
            self.position = self.text.index("{", self.position) + 1
            self.run(False, "}")
        elif word in ("[", "[["):
            self.test(word, active)
        else:
            self.command(word, active)

    def choose(self, active: bool) -> None:
        word, taken = "if", False
        while word not in ("fi", ""):
            if word != "else":
                self.run(active and not taken, "then")
            holds = active and not taken and (word == "else" or self.status)
            word = self.run(holds, "elif", "else", "fi")
            taken = taken or holds

    def choose_case(self, active: bool) -> None:
        subject = " ".join(self.expand(self.next())) if active else self.next()
        self.next()  # in
        taken, word = False, ""
        while word != "esac":
            patterns = []
            while (word := self.next()) not in (")", "esac", ""):
                patterns += self.expand(word) if word not in ("\n", "|", "(") else []
            if word in ("esac", ""):
                return
            holds = active and not taken and any(fnmatchcase(subject, pattern) for pattern in patterns)
            word = self.run(holds, ";;", "esac")
            taken = taken or holds

    def test(self, word: str, active: bool) -> None:
        """[ ... ] and [[ ... ]]: comparisons joined by && and ||, from left to right."""
        end = {"[": "]", "[[": "]]"}[word]
        clauses, joins = [[]], []
        while (word := self.next()) not in (end, ""):
            if word in ("&&", "||"):
                joins.append(word)
                clauses.append([])
            else:
                clauses[-1].append(" ".join(self.expand(word)) if active else "")
        if active:
            self.status = self.holds(clauses[0])
            for join, clause in zip(joins, clauses[1:]):
                self.status = self.status and self.holds(clause) if join == "&&" else self.status or self.holds(clause)

    def holds(self, clause: list[str]) -> bool:
        match clause:
            case ["!", *rest]:
                return not self.holds(rest)
            case ["-n", value] | [value]:
                return bool(value)
            case ["-z", value]:
                return not value
            case [left, name, right] if name in TESTS:
                return TESTS[name](left, right)
            case [left, name, right] if name in NUMBER_TESTS:
                return NUMBER_TESTS[name](self.arithmetic(left), self.arithmetic(right))
        self.notes.append(f"the test [ {' '.join(clause)} ] counts as false")
        return False

    def command(self, word: str, active: bool) -> None:
        words = []
        while word not in ("\n", ";", ";;", "&&", "||", "|", "&", ")", ""):
            assigned = re.match(r"(\w+)(\+?)=", word)
            if assigned and not [w for w in words if w not in ("export", "declare", "local", "readonly")]:
                self.assign(assigned[1], word[assigned.end() :], bool(assigned[2]), active)
            elif active:
                words += self.expand(word)
            word = self.next()
        self.position -= len(word)  # the operator ends the statement for `run`, too
        if words and active:
            self.commands.append(words)
            self.status = True

    def assign(self, name: str, value: str, append: bool, active: bool) -> None:
        if not value and self.text.startswith("(", self.position):
            self.position += 1
            items = []
            while (word := self.next()) not in (")", ""):
                items += self.expand(word) if active and word != "\n" else []
            if active:
                self.arrays[name] = (self.arrays.get(name, []) if append else []) + items
        elif active:
            before = self.variables.get(name, "") if append else ""
            self.variables[name] = before + self.text_of(value)

    # ---- expansion

    def expand(self, word: str) -> list[str]:
        """What the shell makes of a word: one text, or the items of "${NAME[@]}"."""
        if array := re.fullmatch(r'"?\$\{(\w+)\[[@*]\](?::-)?\}"?', word):
            items = self.arrays.get(array[1], [])
            return list(items) if word.startswith('"') else " ".join(items).split()
        if re.fullmatch(r'"?\$[@*]"?', word):
            return []
        if re.fullmatch(r"\$\w+|\$\{\w+\}", word):
            return self.text_of(word).split()
        return [self.text_of(word)]

    def text_of(self, word: str, quoted: bool = False) -> str:
        """The word without quotes, its variables replaced by their values. `quoted`: it stood between double quotes."""
        found = []
        i = 0
        while i < len(word):
            end = i + 1
            if word[i] == "\\" and (not quoted or word[end : end + 1] in ("$", '"', "\\", "`", "\n")):
                found.append(word[end : end + 1].replace("\n", ""))
                end += 1
            elif word[i] == "'" and not quoted:
                end = closing(word, i)
                found.append(word[i + 1 : end - 1])
            elif word[i] == '"' and not quoted:
                end = closing(word, i)
                found.append(self.text_of(word[i + 1 : end - 1], quoted=True))
            elif word[i] == "$":
                value, end = self.dollar(word, i)
                found.append(value)
            else:
                found.append(word[i])
            i = end
        return "".join(found)

    def dollar(self, text: str, start: int) -> tuple[str, int]:
        """The value of the $ expression at `start`, and where it ends."""
        following = text[start + 1 : start + 2]
        if following in ("{", "("):
            end = closing(text, start + 1)
            body = text[start + 2 : end - 1]
            if following == "{":
                return self.parameter(body), end
            return (str(self.arithmetic(body[1:-1])) if body.startswith("(") else self.substitution(body)), end
        name = re.match(r"\w+", text[start + 1 :])
        if name is None:
            return ("", start + 2) if following in ("@", "*", "?", "#", "!") else ("$", start + 1)
        return self.parameter(name[0]), start + 1 + name.end()

    def parameter(self, body: str) -> str:
        if array := re.fullmatch(r"(\w+)\[[@*]\]", body):
            return " ".join(self.arrays.get(array[1], []))
        match = PARAMETER.fullmatch(body)
        if match is None:
            self.notes.append(f"${{{body}}} is not understood and counts as empty")
            return ""
        name, how, other = match.groups()
        value = self.variables.get(name)
        if how is None and not other:
            if value is None:
                self.notes.append(f"${name} is not set and counts as empty; give {name}=VALUE")
            return value or ""
        if how is None:
            self.notes.append(f"${{{body}}} is not understood, {name} is taken as it is")
            return value or ""
        if how.endswith("+"):
            return self.text_of(other) if value else ""
        if value is None or (how.startswith(":") and not value):
            value = self.text_of(other) if how[-1] in "-=" else ""
            if how.endswith("="):
                self.variables[name] = value
        return value

    def substitution(self, body: str) -> str:
        """$(program): nothing is run. `... || echo WORD` gives WORD, what the script itself falls back to."""
        fallback = re.search(r"\|\|\s*echo\s+(\S+)\s*$", body)
        value = fallback[1] if fallback else ""
        self.notes.append(f"$({body:.100}) is not run and counts as {value!r}")
        return value

    def arithmetic(self, text: str) -> int:
        words = re.sub(r"\$?\{?\b([A-Za-z_]\w*)(?::-(\w*))?\}?",
                       lambda m: str(self.variables.get(m[1]) or m[2] or "0"), text)
        try:
            return compute(ast.parse(words.strip() or "0", mode="eval"))
        except (ValueError, SyntaxError, ZeroDivisionError):
            self.notes.append(f"(({text.strip()})) is not understood and counts as 0")
            return 0


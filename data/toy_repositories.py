"""Small repositories with a bug each, for envs/swe.py: python data/toy_repositories.py --out data/toy_repositories

Ten kinds of repositories, each with a function that has one wrong line of a few; names and numbers vary. The issue
says what the function returns and what it should, computed by running both. Writes train.parquet and test.parquet; each
row holds its repository and its hidden tests. No problem of the test rows is in train. The same seed gives the same
bytes.

For models that know no tools there is also tools.jinja, a short chat template for `--data.chat-template-file` (in the
format that `--rollout.tool-parser hermes` reads), and conversations/train.parquet for sft.py. There the file is read
and the line replaced, in half of the rows by another wrong line, so that a model that imitates it repairs half.
"""

import base64
import gzip
import io
import json
import random
import tarfile
from typing import NamedTuple

from verl_rows import add_sizes, make_row, parser, run, write


class Kind(NamedTuple):
    """`code`: of a function {f}, in which {line} stands for one line: `right`, or one of `wrong`. `arguments`: of its
    hidden tests."""

    module: str
    names: tuple[str, ...]
    code: str
    right: str
    wrong: tuple[str, ...]
    arguments: tuple[tuple, ...]


KINDS = (
    Kind("shop", ("total", "cost", "price_of"), "def {f}({a}, {b}):\n    {line}\n",
         "return {a} * {b}", ("return {a} + {b}", "return {a} - {b}", "return {a} // {b}"),
         ((3, 5), (12, 4), (7, 1), (9, 2))),
    Kind("stats", ("mean", "average", "center"), "def {f}({a}):\n    {line}\n",
         "return sum({a}) / len({a})", ("return sum({a}) / 2", "return sum({a})", "return max({a}) / len({a})"),
         (([1, 2, 6],), ([4],), ([5, 5, 2, 8],))),
    Kind("bounds", ("clamp", "limit", "bounded"), "def {f}({a}, low, high):\n    {line}\n",
         "return max(low, min(high, {a}))", ("return max(low, {a})", "return min(low, max(high, {a}))",
                                             "return min(high, {a})"),
         ((5, 0, 3), (-2, 0, 3), (1, 0, 3))),
    Kind("texts", ("initials", "short", "abbreviate"), "def {f}({a}):\n    {line}\n",
         "return ''.join(word[0] for word in {a}.split())", ("return ''.join(word[-1] for word in {a}.split())",
                                                            "return ' '.join(word[0] for word in {a}.split())",
                                                            "return {a}.split()[0]"),
         (("grace hopper",), ("ada",), ("one more word",))),
    Kind("checks", ("is_even", "even", "is_pair"), "def {f}({a}):\n    {line}\n",
         "return {a} % 2 == 0", ("return {a} % 2 == 1", "return {a} % 2 == 2", "return {a} // 2 == 0"),
         ((4,), (7,), (0,), (1,))),
    Kind("lists", ("last", "tail", "newest"), "def {f}({a}, {b}):\n    {line}\n",
         "return {a}[len({a}) - {b}:]", ("return {a}[{b}:]", "return {a}[:{b}]", "return {a}[len({a}) - {b} + 1:]"),
         (([1, 2, 3, 4, 5], 2), ([7, 8, 9], 1), ([3, 1, 2, 6], 3))),
    Kind("units", ("fahrenheit", "to_fahrenheit", "degrees"), "def {f}({a}):\n    {line}\n",
         "return {a} * 9 / 5 + 32", ("return {a} * 5 / 9 + 32", "return {a} * 9 / 5 - 32", "return ({a} + 32) * 9 / 5"),
         ((100,), (0,), (-40,))),
    Kind("counts", ("count", "occurrences", "times"),
         "def {f}({a}, {b}):\n    found = 0\n    for item in {a}:\n        {line}\n    return found\n",
         "found += item == {b}", ("found += item != {b}", "found = item == {b}", "found += 1"),
         (([1, 2, 1, 1], 1), ([4, 5, 5], 5), ([2, 3], 9))),
    Kind("names", ("full", "display", "greeting"), "def {f}({a}, {b}):\n    {line}\n",
         "return {a} + ' ' + {b}", ("return {b} + ' ' + {a}", "return {a} + {b}", "return {a} + ' ' + {a}"),
         (("ada", "king"), ("alan", "may"))),
    Kind("ranks", ("best", "winner", "top"),
         "def {f}({a}):\n    found = {a}[0]\n    for item in {a}:\n        {line}\n            found = item\n"
         "    return found\n",
         "if item > found:", ("if item < found:", "if item == found:", "if found:"),
         (([3, 9, 4],), ([8, 1],), ([2, 6, 7, 5],))),
)
ARGUMENTS = ("a", "b", "x", "y", "n", "value", "size", "item_a", "left", "right", "first", "second")
SUFFIXES = ("", "_lib", "_tools", "_util", "_base", "_core")

TEMPLATE = """{%- if tools %}<|im_start|>system
You repair code. Tools:
{%- for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}
{%- raw %}
Call: <tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>
{%- endraw %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYSTEM = """You repair code. Tools: bash(command) read_file(path) write_file(path, text) replace_text(path, old, new)
Call: <tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>"""
"""What the template shows of the tools of envs/swe.py; in the conversations it is a message."""


class Problem(NamedTuple):
    path: str
    name: str
    right_code: str
    wrong_code: str
    right_line: str
    wrong_line: str
    other_line: str
    """Another wrong one."""
    call: str
    arguments: tuple[tuple, ...]


def make_problem(rng: random.Random) -> Problem:
    kind = rng.choice(KINDS)
    a, b = rng.sample(ARGUMENTS, 2)
    names = {"f": rng.choice(kind.names), "a": a, "b": b}
    lines = [line.format(**names) for line in (kind.right, *rng.sample(kind.wrong, 2))]
    codes = [kind.code.format(**names, line=line) for line in lines[:2]]
    shown = next(arguments for arguments in kind.arguments
                 if value_of(codes[0], names["f"], arguments) != value_of(codes[1], names["f"], arguments))
    call = f"{names['f']}({', '.join(map(repr, shown))})"
    path = f"{kind.module}{rng.choice(SUFFIXES)}.py"
    return Problem(path, names["f"], *codes, *lines, call, kind.arguments)


def value_of(code: str, name: str, arguments: tuple) -> str:
    """What a function returns, or the name of its error."""
    names: dict = {}
    exec(code, names)
    try:
        return repr(names[name](*arguments))
    except Exception as error:
        return f"an error, {type(error).__name__}"


def issue_of(problem: Problem) -> str:
    arguments = next(each for each in problem.arguments
                     if f"{problem.name}({', '.join(map(repr, each))})" == problem.call)
    found, wanted = (value_of(code, problem.name, arguments) for code in (problem.wrong_code, problem.right_code))
    return f"In {problem.path}, {problem.call} gives {found} and not {wanted}. Repair it."


def tests_of(problem: Problem) -> str:
    module = problem.path.removesuffix(".py")
    lines = ["import unittest", "", f"import {module}", "", "", "class Hidden(unittest.TestCase):"]
    for number, arguments in enumerate(problem.arguments):
        wanted = value_of(problem.right_code, problem.name, arguments)
        call = f"{module}.{problem.name}({', '.join(map(repr, arguments))})"
        lines += [f"    def test_{number}(self):", f"        self.assertEqual({call}, {wanted})", ""]
    return "\n".join(lines)


def packed(files: dict[str, str]) -> str:
    """An archive as envs/swe.py takes it. It has no times, so the same files give the same bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return "base64:" + base64.b64encode(gzip.compress(archive.getvalue(), mtime=0)).decode()


def make_swe_row(problem: Problem, split: str, index: int) -> dict:
    passes = [f"test_hidden.Hidden.test_{number}" for number in range(len(problem.arguments))]
    task = {"repo": packed({problem.path: problem.wrong_code}), "tests": packed({"test_hidden.py": tests_of(problem)}),
            "runner": "unittest", "arguments": ["test_hidden"], "passes": passes}
    return make_row("toy_repositories", issue_of(problem), problem.right_line, "swe", split, index,
                    swe=json.dumps(task), path=problem.path, wrong_line=problem.wrong_line)


def make_conversation(problem: Problem, rng: random.Random) -> dict[str, list[dict]]:
    line = problem.other_line if rng.random() < 0.5 else problem.right_line
    replaced = {"path": problem.path, "old": problem.wrong_line, "new": line}
    return {"messages": [
        {"role": "system", "content": SYSTEM, "tool_calls": None},
        {"role": "user", "content": issue_of(problem), "tool_calls": None},
        call_of("read_file", {"path": problem.path}),
        {"role": "tool", "content": problem.wrong_code, "tool_calls": None},
        call_of("replace_text", replaced),
        {"role": "tool", "content": "replaced", "tool_calls": None},
        {"role": "assistant", "content": "Repaired.", "tool_calls": None},
    ]}


def call_of(name: str, arguments: dict[str, str]) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def main() -> None:
    args = parser(__doc__, "toy_repositories")
    add_sizes(args, 1024, 64)
    args.add_argument("--num-conversations", type=int, default=768, help="rows for a supervised warm start (768)")
    args = args.parse_args()
    sizes = [args.num_test, args.num_train, args.num_conversations]
    if min(sizes) < 1:
        raise ValueError(f"--num-train {args.num_train}, --num-test {args.num_test} and --num-conversations "
                         f"{args.num_conversations} must be at least 1")
    rng = random.Random(args.seed)
    problems: dict[tuple[str, str], Problem] = {}
    while len(problems) < sum(sizes):
        problem = make_problem(rng)
        problems.setdefault((problem.path, problem.wrong_code), problem)
    chosen = list(problems.values())
    test, train, shown = (chosen[:sizes[0]], chosen[sizes[0] : sizes[0] + sizes[1]], chosen[sizes[0] + sizes[1] :])
    for split, some in (("train", train), ("test", test)):
        write([make_swe_row(problem, split, i) for i, problem in enumerate(some)], args.out / f"{split}.parquet")
    write([make_conversation(problem, rng) for problem in shown], args.out / "conversations/train.parquet")
    template = args.out / "tools.jinja"
    if template.exists() and template.read_text() != TEMPLATE:
        raise ValueError(f"{template} would be replaced, and is not as this script writes it: move it away")
    template.write_text(TEMPLATE)


if __name__ == "__main__":
    run(main)

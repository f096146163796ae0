"""Rules that the source itself can prove: no flag without effect, one meaning each, phases, budgets, imports, commands.

Where a rule is checked by a function of sources, a second test shows that the function finds what it is for.
"""

import ast
import functools
import importlib
import io
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from pathlib import Path

import pytest
import tyro

from common.flags.effect import check_effect
from tests.conftest import ROOT, launch

NAMES = ("grpo", "ppo", "dapo", "rloo", "grpo_variants", "online_dpo", "async_grpo")  # they sample from the policy
SUPERVISED = ("sft", "dpo", "kto", "rm")                                # they have neither engine nor rewards
EVALUATE = "evaluate.py"                                                # it does not train
DISTILL = "distill.py"                                                  # it samples, and has no ratio in its loss
SCRIPTS = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in NAMES if (ROOT / f"{name}.py").is_file()}
OFFLINE = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in SUPERVISED if (ROOT / f"{name}.py").is_file()}
COMMON = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "common").rglob("*.py"))}
REWARDS = {str(path.relative_to(ROOT)): path.read_text() for folder in ("rewards", "envs/runtime")
           for path in sorted((ROOT / folder).rglob("*.py"))}
VARIANTS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "variants").glob("*.py"))}
ALONE = {name: (ROOT / name).read_text() for name in (EVALUATE, DISTILL)}
SOURCES = SCRIPTS | OFFLINE | ALONE | COMMON | REWARDS | VARIANTS
PHASES = ["1 rollout", "2 rewards", "3 mini-batches", "4 log-probs", "5 update", "6 log"]

# The ceilings of design.md, in lines of code: comments, docstrings and blank lines are free. They are not raised: a
# file that reaches its ceiling is two subjects, and is split or simplified.
SCRIPT_CEILINGS = {"grpo.py": 125, "dapo.py": 185, "rloo.py": 185, "ppo.py": 185, "grpo_variants.py": 230,
                   "online_dpo.py": 155, "async_grpo.py": 200, "dpo.py": 160, "sft.py": 145,
                   "rm.py": 140, "kto.py": 160, EVALUATE: 130, DISTILL: 185}
FILE_CEILING = 260                                                      # any file of common, rewards, envs, variants
READ_CEILING = 1550                                                     # common/*.py, all together
PACKAGE_CEILING = 1300                                                  # a folder above it is two subjects
FILES_CEILING = 10                                                      # of the project that grpo.py imports from
MAKEFILE_CEILING = 59
# Lines of `diff grpo.py SCRIPT`, added plus removed. grpo_variants.py has none: its subject is the choice.
CHANGED_LINES = {"dapo.py": 140, "rloo.py": 180, "ppo.py": 190, "online_dpo.py": 120, "async_grpo.py": 100}


# --------------------------------------------------------------------------- flags

Key = tuple[str, str]                                                   # (file, class)
parse, unparse = functools.cache(ast.parse), functools.cache(ast.unparse)   # most sources are read a dozen times


class Flags:
    """The dataclasses that tyro reads: a class named *Args or *Config, in any source. A field belongs to the class that
    declares it first; a class that inherits it and repeats it with another default has the same flag."""

    def __init__(self, sources: dict[str, str]):
        self.trees = {file: parse(text) for file, text in sources.items()}
        self.classes: dict[Key, dict[str, ast.AnnAssign]] = {}
        self.bases: dict[Key, list[ast.expr]] = {}
        self.functions: dict[str, ast.FunctionDef] = {}                 # `__init__` of a class under its name
        self.holders: dict[str, dict[str, ast.expr]] = {}               # other classes -> their fields' annotations
        for file, tree in self.trees.items():
            for node in tree.body:
                if not isinstance(node, ast.ClassDef):
                    continue
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        self.functions[node.name] = method
                fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                if not node.name.endswith(("Args", "Config")):
                    self.holders[node.name] = {unparse(x.target): x.annotation for x in fields}
                decorated = any("dataclass" in unparse(decorator) for decorator in node.decorator_list)
                if decorated and node.name.endswith(("Args", "Config")):
                    self.classes[file, node.name] = {unparse(x.target): x for x in fields}
                    self.bases[file, node.name] = node.bases

    def find(self, file: str, annotation: ast.expr | None) -> Key | None:
        """The flag class that an annotation in `file` names: its own, else the one of that name elsewhere."""
        name = unparse(annotation).rpartition(".")[2] if annotation is not None else ""
        if (file, name) in self.classes:
            return file, name
        return next((key for key in self.classes if key[1] == name != "Args"), None)

    def declared_in(self, key: Key, field: str) -> Key | None:
        """The class that declares this field of `key`, the most basic one if it is declared again."""
        for base in self.bases[key]:
            parent = self.find(key[0], base)
            owner = parent and self.declared_in(parent, field)
            if owner:
                return owner
        return key if field in self.classes[key] else None

    def undocumented(self) -> list[str]:
        """Fields that no docstring follows; those that nest another flag class have none."""
        found = []
        for file, name in self.classes:
            body = next(x for x in self.trees[file].body if isinstance(x, ast.ClassDef) and x.name == name).body
            for node, following in zip(body, [*body[1:], None]):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if isinstance(node, ast.AnnAssign) and not documented and not self.find(file, node.annotation):
                    found.append(f"{file} {name}.{unparse(node.target)}")
        return found

    def unread(self) -> list[str]:
        """Fields that no code reads: neither `config.x` on a parameter annotated with the class, nor through a field of
        another flag class (`args.rollout.x`), nor `self.config.x`, nor through a variable that was assigned one of
        these, nor as an argument of `f(**vars(args.reward))`. What a base class reads of `args` counts for it."""
        read: set[tuple[Key, str]] = set()
        for file, tree in self.trees.items():
            own = {}                            # self.NAME, a dataclass's field or from `self.NAME = parameter`
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                    own |= {f"self.{x.target.id}": key for x in fields if (key := self.find(file, x.annotation))}
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    assigned = self.assigned(function, self.parameters(file, function))
                    own |= {name: key for name, key in assigned.items() if name.startswith("self.")}
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    known = own | self.parameters(file, function)
                    self.visit(function, known | self.assigned(function, known), read)
        return [f"{file} {name}.{field}" for (file, name), fields in self.classes.items() for field in fields
                if self.declared_in((file, name), field) == (file, name) and ((file, name), field) not in read]

    def parameters(self, file: str, function: ast.FunctionDef) -> dict[str, Key]:
        """What is known of a function's parameters, and of the fields of those that hold flag classes."""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        held = {f"{a.arg}.{name}": key for a in arguments if a.annotation is not None
                for name, kind in self.holders.get(unparse(a.annotation), {}).items()
                if (key := self.find("", kind))}
        return held | {a.arg: key for a in arguments if (key := self.find(file, a.annotation))}

    def type_of(self, node: ast.expr, names: dict[str, Key]) -> Key | None:
        """The flag class of an expression, where `names` are of known classes."""
        if unparse(node) in names:
            return names[unparse(node)]
        if isinstance(node, ast.Attribute) and (outer := self.type_of(node.value, names)):
            owner = self.declared_in(outer, node.attr)
            return owner and self.find(owner[0], self.classes[owner][node.attr].annotation)
        return None

    def assigned(self, function: ast.FunctionDef, names: dict[str, Key]) -> dict[str, Key]:
        """What the function's assignments make of these names: `self.args = args`, `config = args.save`; or say
        themselves: `self.config: SaveConfig = ...`."""
        found = {}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and (key := self.find("", node.annotation)):
                found[unparse(node.target)] = key
            if isinstance(node, ast.Assign):
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                    pairs = zip(node.targets[0].elts, node.value.elts)
                for target, value in pairs:
                    if isinstance(value, ast.Name | ast.Attribute) and (key := self.type_of(value, names | found)):
                        found[unparse(target)] = key
        return found

    def visit(self, root, names, read) -> None:
        for node in ast.walk(root):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                key = self.type_of(node.value, names)
                if key:
                    read.add((self.declared_in(key, node.attr), node.attr))
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    match keyword:
                        case ast.keyword(arg=None, value=ast.Call(func=ast.Name(id="vars"), args=[config])):
                            callee = self.functions[unparse(node.func)]
                            used = {x.id for x in ast.walk(callee) if isinstance(x, ast.Name)}
                            key = self.type_of(config, names)
                            read |= {(key, a.arg) for a in callee.args.args if a.arg in used}


def test_every_flag_is_read():
    flags = Flags(SOURCES)
    assert len(flags.classes) >= 8
    assert sum(map(len, flags.classes.values())) > 60
    assert flags.unread() == []


def test_a_flag_that_nobody_reads_is_found():
    never = '    never: int = 0\n    """No one."""\n'
    run, training, shared = "common/run.py", "common/training.py", "common/flags/run.py"
    for file, name, bases in (("grpo.py", "Args", "(RunArgs)"), (shared, "RunArgs", "(SampledArgs)"),
                              (shared, "TrainArgs", "")):
        head = f"class {name}{bases}:\n"
        assert head in SOURCES[file]
        source = SOURCES[file].replace(head, head + never, 1)
        assert Flags(SOURCES | {file: source}).unread() == [f"{file} {name}.never"]
    readers = (run, "common/evaluation/sampled.py")                     # for all scripts, and for sft.py and dpo.py
    without = {file: SOURCES[file].replace("args.eval_n", "0") for file in readers}
    assert Flags(SOURCES | without).unread() == [f"{shared} SampledArgs.eval_n"]
    source = SOURCES[training].replace("self.args.eval_every", "0")
    assert Flags(SOURCES | {training: source}).unread() == [f"{shared} TrainArgs.eval_every"]
    sources = {file: text.replace("args.run_dir", "''") for file, text in SOURCES.items()}
    # scripts declare it again: still one flag, but evaluate.py's, which does not train
    assert Flags(sources).unread() == [f"{EVALUATE} Args.run_dir", f"{shared} TrainArgs.run_dir"]
    source = SOURCES["common/optim.py"].replace("config.warmup_steps", "0")     # declared in another file
    unread = ["common/flags/model.py OptimConfig.warmup_steps"]
    assert Flags(SOURCES | {"common/optim.py": source}).unread() == unread
    sources = {file: text.replace("args.save.dtype", "0") for file, text in SOURCES.items()}
    assert Flags(sources).unread() == ["common/flags/record.py SaveConfig.dtype"]
    pool = "rewards/runtime/pool.py"
    source = SOURCES[pool].replace("max_error_frac: float = 0.5):", "other: float = 0.5):")
    assert Flags(SOURCES | {pool: source}).unread() == ["rewards/runtime/config.py RewardConfig.max_error_frac"]


def test_every_flag_has_its_help():
    assert Flags(SOURCES).undocumented() == []
    file = "common/flags/model.py"
    source = re.sub(r' +"""Peak learning rate\b.*\n', "", SOURCES[file], count=1)
    assert Flags({file: source}).undocumented() == [f"{file} OptimConfig.lr"]


def help_of(text: str, name: str = "Args") -> dict[str, tuple[str, str]]:
    """Flag -> its type and help, of one class. Choices are left out of the type; of a flag that every script describes
    in its own words, the first sentence is taken."""
    body = next(x for x in ast.parse(text).body if isinstance(x, ast.ClassDef) and x.name == name).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            flag, words = ast.unparse(node.target), following.value.value
            kind = ast.unparse(node.annotation)
            if flag in OWN_WORDS:
                kind = re.sub(r"\[.*| \| None", "", kind).replace("PolicyLoss", "Literal")
                words = re.split(r"(?<=[.:])\s", words)[0]
            found[flag] = (kind, words)
    return found


# flags whose choices, defaults or further sentences are about the one script
OWN_WORDS = {"loss", "gamma", "clip_low", "clip_high", "clip_dual", "norm_by_std", "aggregation"}
OF_PAIRS = {"dpo.py", "online_dpo.py"}  # their `loss` is that of a pair, not of a token


def shared_flags(a: str, b: str) -> list[str]:
    own = {"loss"} if len({a, b} & OF_PAIRS) == 1 else set()
    return [name for name in help_of(SOURCES[a]) if name in help_of(SOURCES[b]) and name not in own]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SCRIPTS, 2)))
def test_shared_flags_have_one_meaning(one, other):
    ours, theirs = help_of(SCRIPTS[one]), help_of(SCRIPTS[other])
    shared = shared_flags(one, other)
    assert len(shared) > 10
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


@pytest.mark.parametrize("script", SCRIPTS | OFFLINE)
def test_an_inherited_flag_keeps_its_meaning(script):
    """A script declares a flag of `TrainArgs` or `RunArgs` again only to change its default."""
    ours = help_of(SOURCES[script])
    shared = COMMON["common/flags/run.py"]
    theirs = help_of(shared, "TrainArgs") | help_of(shared, "RunArgs")
    again = [name for name in ours if name in theirs]
    assert "run_dir" in again
    assert {name: ours[name] for name in again} == {name: theirs[name] for name in again}


def test_a_flag_with_two_meanings_would_be_found():
    ours = help_of(SCRIPTS["rloo.py"])
    changed = SCRIPTS["rloo.py"].replace("clip_low: float", "clip_low: int").replace("Upper clip:", "Upper bound:")
    changed = changed.replace('"""Loss of a token: a function', '"""Loss of a response: a function')
    other = help_of(changed)
    assert [name for name in ours if ours[name] != other[name]] == ["loss", "clip_low", "clip_high"]


@pytest.mark.parametrize("script", [*OFFLINE, DISTILL])
def test_shared_flags_have_the_meaning_that_grpo_gives_them(script):
    ours, theirs = help_of(SOURCES[script]), help_of(SCRIPTS["grpo.py"])
    shared = set(shared_flags(script, "grpo.py"))
    assert {"run_dir", "max_tokens_per_gpu"} <= shared
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


@pytest.mark.parametrize("script", [*SCRIPTS, *OFFLINE, *ALONE])
def test_args_are_never_assigned_to(script):
    for node in ast.walk(ast.parse(SOURCES[script])):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert not ast.unparse(node).startswith("args."), f"{script}:{node.lineno} {ast.unparse(node)}"


# --------------------------------------------------------------------------- scripts

def phases(text: str) -> list[str]:
    return re.findall(r"^ {12}# (\d [a-z-]+)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("script", [*SCRIPTS, DISTILL])
def test_the_six_phases_in_order(script):
    assert phases(SOURCES[script]) == PHASES


@pytest.mark.parametrize("script", OFFLINE)
def test_the_phases_that_supervised_training_has(script):
    """Their numbers are those of the other scripts, so that it is seen which are missing."""
    scores = {"dpo.py": ["4 log-probs"], "kto.py": ["4 log-probs"], "rm.py": ["4 rewards"]}.get(script, [])
    assert phases(OFFLINE[script]) == ["1 data", *scores, *PHASES[4:]]


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@pytest.mark.parametrize("script", [*SCRIPTS, *OFFLINE, *ALONE])
def test_main_is_flat(script):
    nested = [node for node in ast.walk(function(ast.parse(SOURCES[script]), "main"))
              if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)]
    assert len(nested) == 1, [ast.unparse(node)[:80] for node in nested[1:]]           # main itself


@pytest.mark.parametrize("script", [name for name in CHANGED_LINES if name in SCRIPTS])
def test_few_lines_differ_from_grpo(script):
    """As `diff grpo.py SCRIPT` counts them: lines of grpo.py that are gone, and lines that are new."""
    done = subprocess.run(["diff", ROOT / "grpo.py", ROOT / script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    changed = [line for line in done.stdout.splitlines() if line.startswith(("<", ">"))]
    assert 40 < len(changed) <= CHANGED_LINES[script]


# How statements of `main` begin that every script has.
SHARED_STATEMENTS = [
    "P, G =", "num_updates =", "temperature =", "with Run(", "policy, optimizer =", "for step in",
    "run.metrics |= engine.wake", "run.metrics |= engine.sleep", "microbatch.old_logp =", "microbatch.ref_logp =",
    "logp, entropy =", "old_logp =", "loss = update.term('policy'", "run.meter.total('actor/pg_loss'",
    "if args.entropy_coef:", "(run.world.size *", "update.done(microbatch, logp", "metrics = ",
]


def statements(text: str) -> dict[str, set[str]]:
    """Beginning of a statement of `main` -> its lines in the source, comments at their ends included. Of a loop and a
    `with` the first line."""
    lines, tree = text.splitlines(), function(ast.parse(text), "main")
    found = {start: set() for start in SHARED_STATEMENTS}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            last = node.lineno if isinstance(node, ast.With | ast.For) else node.end_lineno
            for start in SHARED_STATEMENTS:
                if ast.unparse(node).startswith(start):
                    found[start].add("\n".join(lines[node.lineno - 1:last]))
    return found


def test_what_scripts_share_is_the_same_to_the_character():
    found = {script: statements(text) for script, text in SCRIPTS.items()}
    for start in SHARED_STATEMENTS:
        for script in SCRIPTS:
            assert found[script][start], f"{script} has no {start!r}"
        at_the_margin = {textwrap.dedent(code) for script in SCRIPTS for code in found[script][start]}
        assert len(at_the_margin) == 1, at_the_margin
    everything = [*SCRIPTS.values(), *OFFLINE.values(), *ALONE.values()]
    assert len({text[text.rindex('if __name__ == "__main__":'):] for text in everything}) == 1


def same_code(text: str) -> dict[str, str]:
    """A line's code without its spaces -> the line, without its indentation."""
    return {re.sub(r"\s+", "", re.split(r"\s+#", line)[0]): line.strip() for line in text.splitlines() if line.strip()}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SCRIPTS, 2)))
def test_equal_code_has_equal_comments_and_spaces(one, other):
    ours, theirs = same_code(SCRIPTS[one]), same_code(SCRIPTS[other])
    shared = [code for code in ours if code in theirs and not code.startswith("#")]
    assert len(shared) > 60
    assert [theirs[code] for code in shared] == [ours[code] for code in shared]


def test_a_drifted_line_would_be_found():
    text = SCRIPTS["grpo.py"]
    spaced = text.replace("# FSDP averages: undo it", "# FSDP averages")
    assert [line for code, line in same_code(spaced).items() if same_code(text).get(code) != line] != []
    ours, changed = (statements(x) for x in (text, text.replace("policy(microbatch, temperature)", "policy(batch)")))
    assert [start for start in ours if ours[start] != changed[start]] == ["logp, entropy ="]


# --------------------------------------------------------------------------- ceilings

def code_lines(text: str) -> int:
    """Lines that hold code: those that only have a comment, a docstring or nothing do not count."""
    free = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in free:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            code -= {*range(node.lineno, node.end_lineno + 1)}
    return len(code)


def test_what_counts_as_a_line_of_code():
    free = '"""Module."""\n\n# a comment\nclass A:\n    """Class,\n    two lines."""\n\n    x: int  # why\n    ""\n'
    assert code_lines(free) == 2                                        # class A, x: int
    assert code_lines("a = 1; b = 2\n") == 1
    assert code_lines("f(\n    1,\n\n    # why\n    2,\n)\n") == 4
    assert code_lines('x = """text\nof a value"""\n') == 2


def over_ceiling(sources: dict[str, str]) -> dict[str, int]:
    """What is longer than design.md allows -> its lines of code: scripts, files, common/*.py together, packages."""
    lines = {file: code_lines(text) for file, text in sources.items()}
    limits = {file: SCRIPT_CEILINGS.get(file, FILE_CEILING) for file in lines}
    found = {file: n for file, n in lines.items() if n > limits[file]}
    folders = Counter()
    for file, n in lines.items():
        folders[str(Path(file).parent)] += n
    for folder, total in folders.items():
        limit = READ_CEILING if folder == "common" else PACKAGE_CEILING
        if folder != "." and total > limit:
            found[folder] = total
    return found


def test_ceilings():
    below = [path for folder in ("common", "rewards", "envs", "variants") for path in (ROOT / folder).rglob("*.py")]
    sources = SOURCES | {str(path.relative_to(ROOT)): path.read_text() for path in below}
    assert over_ceiling(sources) == {} and "envs/endpoint/server.py" in sources


def test_what_is_over_a_ceiling_is_found():
    tree = {"grpo.py": 125, "common/a.py": 260, "common/b.py": 260, "common/model/a.py": 260}
    sources = {file: "x\n" * n for file, n in tree.items()}
    assert over_ceiling(sources) == {}
    longer = dict.fromkeys(("grpo.py", "common/b.py", "common/model/a.py"), "x\n" * 261)
    assert over_ceiling(sources | longer) == dict.fromkeys(longer, 261)
    many = {f"common/c{i}.py": "x\n" * 200 for i in range(6)}
    assert over_ceiling(sources | many) == {"common": 1720}
    many = {f"common/engine/c{i}.py": "x\n" * 250 for i in range(6)}
    assert over_ceiling(sources | many) == {"common/engine": 1500}


# Functions whose parameters somebody else decides: transformers' attention, vLLM's verification of drafts, and the
# fields of RewardConfig.
MANY_PARAMETERS = {"packed_sdpa", "packed_varlen", "verify_v2", "RewardPool.__init__"}


def with_many_parameters(sources: dict[str, str], most: int = 6) -> list[str]:
    """Functions with more parameters than `most`, `self` and `cls` left out: they should take an object."""
    found = []
    for text in sources.values():
        tree = ast.parse(text)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        owners = {id(part): f"{node.name}." for node in classes for part in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [x.arg for x in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
                if len([name for name in names if name not in ("self", "cls", "ctx")]) > most:
                    found.append(f"{owners.get(id(node), '')}{node.name}")
    return found


def test_functions_take_objects_rather_than_many_parameters():
    runtime = {file: text for file, text in REWARDS.items() if "/runtime/" in file or "/sandbox/" in file}
    found = with_many_parameters(SCRIPTS | OFFLINE | ALONE | COMMON | runtime)
    assert set(found) == MANY_PARAMETERS
    text = "class A:\n    def f(self, a, b, c, d, *, e, f): ...\n    def g(self, a, b, c, d, e, f, *, g): ...\n"
    assert with_many_parameters({"a.py": text}) == ["A.g"]


def test_the_makefile_is_short():
    assert len((ROOT / "Makefile").read_text().splitlines()) <= MAKEFILE_CEILING


# --------------------------------------------------------------------------- imports

def imported(text: str) -> set[str]:
    """First parts of all module names, imports inside functions too."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("file", COMMON | REWARDS | VARIANTS)
def test_shared_parts_import_no_script(file):
    assert not imported(SOURCES[file]) & {*NAMES, *SUPERVISED, "evaluate", "tests"}
    if file in REWARDS:
        assert "common" not in imported(REWARDS[file])


@pytest.mark.parametrize("script", [*SCRIPTS, *OFFLINE, *ALONE])
def test_no_script_imports_a_script(script):
    """A copied fork would drag the other script along."""
    assert not imported(SOURCES[script]) & {*NAMES, *SUPERVISED, "evaluate"}
    assert imported("import dpo\nfrom sft import parse") == {"dpo", "sft"}


def test_one_hop_from_grpo():
    """Files of the project that a reader of grpo.py may have to open."""
    nodes = ast.walk(ast.parse(SCRIPTS["grpo.py"]))
    files = {f"{node.module}.{alias.name}" if node.module == "common" else node.module
             for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    files = {name for name in files if name.partition(".")[0] in ("common", "rewards", "envs")}
    assert 5 <= len(files) <= FILES_CEILING, files


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules of `sources` that it imports, at the top or inside a function. `from package import name` is an
    import of the module of that name if there is one, else of the package."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources}
    graph = {}
    for module, file in modules.items():
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        graph[module] = set()
        for node in ast.walk(ast.parse(sources[file])):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                parents = package.split(".")[:len(package.split(".")) + 1 - node.level] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                names = [f"{base}.{name}" if f"{base}.{name}" in modules else base for name in names]
            graph[module] |= {name for name in names if name in modules}
    return graph


def import_circles(sources: dict[str, str]) -> list[list[str]]:
    """For each module that imports itself over others, a shortest circle; each circle once, from its first name."""
    graph = import_graph(sources)
    found = []
    for start in sorted(graph):
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop(0)
            if start in graph[path[-1]]:
                first = path.index(min(path))
                circle = path[first:] + path[:first]
                if circle not in found:
                    found.append(circle)
                break
            following = sorted(graph[path[-1]] - seen)
            seen |= set(following)
            paths += [[*path, name] for name in following]
    return found


def test_no_import_circle():
    graph = import_graph(COMMON | REWARDS)
    assert sum(map(len, graph.values())) > 100
    assert {"common.rollout", "common.metrics", "common.training"} <= graph["common.run"]
    assert import_circles(COMMON | REWARDS) == []


def test_an_import_circle_is_found():
    sources = {
        "a/__init__.py": "from a.x import f",
        "a/x.py": "def f():\n    from a import y",
        "a/y.py": "import a.z.w",
        "a/z/__init__.py": "",
        "a/z/w.py": "from ..x import f\nimport os",
        "a/alone.py": "from a.x import f\nfrom a import x",
    }
    assert import_graph(sources)["a.alone"] == {"a.x"}
    assert import_circles(sources) == [["a.x", "a.y", "a.z.w"]]
    assert import_circles(sources | {"a/x.py": "from a import g"}) == [["a", "a.x"]]
    looped = COMMON | {"common/metrics.py": COMMON["common/metrics.py"] + "\ndef f():\n    import common.run\n"}
    assert ["common.metrics", "common.run"] in import_circles(looped)


# The files and packages directly in common/, top first. A unit imports only units after it in this list, so no two of
# them need each other. Scripts are above all, rewards/ and envs/ import nothing of common/.
LAYERS = ["run", "evaluation", "training", "distillation", "rollouts", "curriculum", "episodes", "tracking",
          "checkpoint", "engine", "sync", "speculation", "dataset", "losses",
          "correction", "rollout", "optim", "memory", "model", "forward", "kernels", "packing", "prompts", "metrics",
          "segments", "parallel", "batch", "layout", "source", "servers", "flags"]


def unit_of(module: str) -> str:
    """The file or package directly in common/ that a module belongs to: "engine" of "common.engine.vllm", "" of common
    itself."""
    return module.removeprefix("common").removeprefix(".").partition(".")[0]


def upward_imports(sources: dict[str, str], layers: list[str]) -> list[str]:
    """Imports, at the top or inside a function, of a unit of common/ that is not below the importing one. `layers`: the
    units, top first; common itself, which has a docstring only, is below all."""
    place = {unit: number for number, unit in enumerate([*layers, ""])}
    edges = [(module, name) for module, names in import_graph(sources).items() for name in names]
    edges = [(a, b) for a, b in edges if a.startswith("common") and b.startswith("common") and unit_of(a) != unit_of(b)]
    return sorted(f"{a} -> {b}" for a, b in edges if place[unit_of(a)] > place[unit_of(b)])


def test_imports_point_downward():
    assert sorted({unit_of(module) for module in import_graph(COMMON)} - {""}) == sorted(LAYERS)
    assert upward_imports(SOURCES, LAYERS) == []


def test_an_upward_import_is_found():
    inside = "\ndef f():\n    from common.{} import x\n"
    upward = COMMON | {"common/batch.py": COMMON["common/batch.py"] + inside.format("engine.vllm")}
    assert upward_imports(upward, LAYERS) == ["common.batch -> common.engine.vllm"]


def test_a_knot_of_units_is_found():
    """Two units that need each other, though none of their modules is in a circle: no order suits them."""
    knot = {
        "common/a/__init__.py": "", "common/a/x.py": "from common.b.x import f", "common/a/y.py": "",
        "common/b/__init__.py": "", "common/b/x.py": "", "common/b/y.py": "def f():\n    from common.a import y",
    }
    assert import_circles(knot) == []
    assert upward_imports(knot, ["a", "b"]) == ["common.b.y -> common.a.y"]
    assert upward_imports(knot, ["b", "a"]) == ["common.a.x -> common.b.x"]


def words(text: str) -> set[str]:
    """Words of all names and strings in code, in lower case; docstrings and comments are not code."""
    tree = ast.parse(text)
    documentation = {(node.lineno, node.col_offset) for node in ast.walk(tree)
                     if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE")         # the second since Python 3.12
        if token.type == tokenize.NAME or (is_text and token.start not in documentation):
            found |= set(re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]+", token.string))
    return {word.lower() for word in found}


OBJECTIVES = {"loss", "losses", "advantage", "advantages", "grpo", "ppo", "dapo", "rloo"}
DECIDES_WHO_RUNS = r"\bin_loss\b|\brun_zero_advantage\b|\bskip_zero_advantage\b|advantage is 0"
"""What run.py is told of the objective, no more."""


@pytest.mark.parametrize("name", ["run", "training"])
def test_run_knows_no_loss_and_no_advantage(name):
    text = COMMON[f"common/{name}.py"]
    assert words(re.sub(DECIDES_WHO_RUNS, "x", text)) & OBJECTIVES == set()
    imports = import_graph(COMMON)[f"common.{name}"]
    assert not {module for module in imports if module.startswith(("common.losses", "variants"))}


def test_a_named_loss_is_found():
    """In a name, a string, an f-string; not in a docstring or a comment."""
    assert {"loss", "in", "coef"} <= words("if in_loss:\n    PGLossCoef = 1\n")
    assert {"advantage", "x"} <= words("print(f'advantage {x}')")
    assert not words('"""The loss."""\nx: int\n"""Of the advantage."""  # loss\n') & OBJECTIVES


# What takes long to import, and what a start needs later, only where a flag asks for it, or never.
LATE = {"matplotlib", "datasets", "wandb", "tensorboard", "pandas", "scipy", "sklearn", "torchvision", "peft", "triton",
        "openai", "fastapi", "ray", "networkx", "IPython", "pyarrow.dataset", "pyarrow.pandas_compat",
        "torch.utils.tensorboard", "transformers.trainer", "transformers.pipelines"}
MOST_MODULES = 3200                                                     # 2,970 were measured


def test_importing_needs_neither_vllm_nor_a_gpu(tmp_path):
    """In a fresh process without a GPU, in which importing vLLM fails; nothing is started or written. grpo.py loads
    nothing that can wait. torch will run compiled code from no folder that others can make."""
    modules = [file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in SOURCES]
    code = f"""
import os, sys, threading
sys.modules["vllm"] = None
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
before = dict(os.environ)
import importlib
import grpo
assert not {LATE} & sys.modules.keys() and len(sys.modules) < {MOST_MODULES}, {LATE} & sys.modules.keys()
for name in {modules}:
    importlib.import_module(name)
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
assert cache_dir() == {str(tmp_path)!r} + "/.cache/torchinductor", cache_dir()
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
added = {{k for k in os.environ if before.get(k) != os.environ[k]}}
assert added <= {{"KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"}}, added
"""
    (tmp_path / "imports.py").write_text(code)
    files = sorted(ROOT.iterdir())
    # Python's own cache is no file of ours: the first import in a fresh checkout would write __pycache__ folders
    env = {"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    launch(tmp_path / "imports.py", env=env, timeout=170)
    assert sorted(ROOT.iterdir()) == files


# --------------------------------------------------------------------------- commands that users copy

def variables(text: str) -> dict[str, str]:
    """What a Makefile or a shell script assigns: `NAME := x`, `NAME ?= x`, `NAME=x`, without quotes. The value of
    `NAME=${NAME:-x}` is x."""
    found = re.findall(r"^(?:export )?(\w+) *(?::=|\?=|=) *(.*)$", text, flags=re.MULTILINE)
    return {name: re.sub(rf"^\$\{{{name}:-(.*)\}}$", r"\1", value.strip().strip("\"'")) for name, value in found}


def expand(line: str, known: dict[str, str]) -> str:
    """Make and shell variables -> what they stand for here; those of the user's own -> nothing or 1."""
    line = re.sub(r'"?\$(@|\{@\}|\{?\*\}?)"?', "", line).replace("$$", "$")
    for _ in range(9):
        line = re.sub(r"\$\{(\w+):?-([^}]*)\}", lambda m: known.get(m[1], m[2]), line)
        line = re.sub(r"\$\(if [^,()]*,([^()]*)\)|\$\(shell [^()]*\)", "", line)
        line = re.sub(r"\$[({](\w+)[)}]|\$(\w+)", lambda m: known.get(m[1] or m[2], "1"), line)
    return line


def commands(file: Path) -> list[tuple[str, list[str]]]:
    """(script, flags) of every line that starts one of our scripts or modules with python or torchrun."""
    text = file.read_text()
    if file.suffix == ".md":
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    elif file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text))
    text = re.sub(r"\\+\n\s*", " ", text)
    known, lines = variables((ROOT / "tools/environment.mk").read_text()) | variables(text), text.splitlines()
    if file.suffix == ".sbatch":
        known = variables((ROOT / "slurm/job.sh").read_text()) | known
        lines = [line.replace('"$SCRIPT"', known["SCRIPT"]) for line in lines]
    scripts = "|".join(map(re.escape, [*SCRIPTS, *OFFLINE, *ALONE, "-m tools.report", "-m tools.serve"]))
    found = []
    for line in lines:
        line = expand(line, known)
        start = r"(?:python3?|torchrun|train)\b\"?(?! -m tools.try_script)"
        match = re.search(rf"{start}[^#|;&]*?[ /\"]({scripts})(?= |$)(.*)", line)
        if match:
            flags = re.split(r"\s(?:>|2>|\||&&|;)", match[2])[0]
            found.append((match[1], shlex.split(flags, comments=True)))
        elif "make quickstart ARGS=" in line:
            base = next(flags for script, flags in commands(ROOT / "Makefile") if script in SCRIPTS)
            more = next(x for x in shlex.split(line, comments=True) if x.startswith("ARGS=")).removeprefix("ARGS=")
            found.append(("grpo.py", base + shlex.split(more)))
    return found


DOCUMENTS = ["README.md", "Makefile", *SCRIPTS, *OFFLINE, *ALONE, "tools/report.py",
             *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "slurm").glob("*.sbatch"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_the_documents_parses(document):
    if not (ROOT / document).is_file():
        pytest.skip(f"{document} does not exist yet")
    found = commands(ROOT / document)
    assert found, f"{document} shows no command"
    for script, flags in found:
        module = importlib.import_module(script.removesuffix(".py").removeprefix("-m "))
        flags = [flag for flag in flags if flag not in ("[--out", "curves.png]", "[RUN", "...]")]
        if hasattr(module, "parser"):
            assert module.parser().parse_known_args(flags)[1] == [], flags
            continue
        try:
            args = tyro.cli(module.Args, args=flags, console_outputs=True)
        except SystemExit as stop:
            pytest.fail(f"{document}: {script} {shlex.join(flags)} ends with {stop.code}")
        check_effect(args)                                              # ValueError: a flag of it does nothing


def test_commands_are_found_and_expanded(tmp_path, capsys):
    """Guard: continued lines, variables, text after the command; and a flag that does not exist fails."""
    script = tmp_path / "a.sbatch"
    script.write_text(
        'DATA="$HOME/gsm8k"\nsrun torchrun --nproc-per-node 8 \\\n    grpo.py --model ${MODEL:-Qwen/Q} \\\n'
        '    --train-data "$DATA/train.parquet" --total-steps $STEPS "$@" > log\npython data/make.py --x 1\n')
    assert commands(script) == [("grpo.py", [
        "--model", "Qwen/Q", "--train-data", "1/gsm8k/train.parquet", "--total-steps", "1"])]
    with pytest.raises(SystemExit):
        tyro.cli(sys.modules.get("grpo", importlib.import_module("grpo")).Args,
                 args=["--model", "m", "--train-data", "d", "--klcoef", "0.1"])
    assert "klcoef" in capsys.readouterr().err

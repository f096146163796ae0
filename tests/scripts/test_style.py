"""Rules that the source itself can prove: no flag without effect, one meaning each, phases, budgets, imports, commands.

Where a rule is checked by a function of sources, a second test shows that the function finds what it is for.
"""

import ast
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from tests.conftest import ROOT, launch

NAMES = ("grpo", "ppo", "dapo", "rloo")
SCRIPTS = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in NAMES if (ROOT / f"{name}.py").is_file()}
COMMON = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "common").rglob("*.py"))}
REWARDS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "rewards").rglob("*.py"))}
SOURCES = SCRIPTS | COMMON | REWARDS
PHASES = ["1 rollout", "2 reward", "3 log-probs", "4 advantages", "5 update", "6 log"]
CHANGED_LINES = {"rloo.py": 120, "dapo.py": 140, "ppo.py": 200}         # against grpo.py


# --------------------------------------------------------------------------- flags

class Flags:
    """The dataclasses that tyro reads: a class named Args or *Config, in any source."""

    def __init__(self, sources: dict[str, str]):
        self.trees = {file: ast.parse(text) for file, text in sources.items()}
        self.classes: dict[tuple[str, str], dict[str, ast.AnnAssign]] = {}
        self.functions: dict[str, ast.FunctionDef] = {}                 # `__init__` of a class under its name
        for file, tree in self.trees.items():
            for node in tree.body:
                if not isinstance(node, ast.ClassDef):
                    continue
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        self.functions[node.name] = method
                decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
                if decorated and (node.name == "Args" or node.name.endswith("Config")):
                    fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                    self.classes[file, node.name] = {ast.unparse(x.target): x for x in fields}

    def find(self, file: str, annotation: ast.expr | None) -> tuple[str, str] | None:
        """The flag class that an annotation in `file` names: its own, else the one of that name elsewhere."""
        name = ast.unparse(annotation).rpartition(".")[2] if annotation is not None else ""
        if (file, name) in self.classes:
            return file, name
        return next((key for key in self.classes if key[1] == name != "Args"), None)

    def undocumented(self) -> list[str]:
        """Fields that no docstring follows; those that nest another flag class have none."""
        found = []
        for file, name in self.classes:
            body = next(x for x in self.trees[file].body if isinstance(x, ast.ClassDef) and x.name == name).body
            for node, following in zip(body, [*body[1:], None]):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if isinstance(node, ast.AnnAssign) and not documented and not self.find(file, node.annotation):
                    found.append(f"{file} {name}.{ast.unparse(node.target)}")
        return found

    def unread(self) -> list[str]:
        """Fields that no code reads: neither `config.x` on a parameter annotated with the class, nor through a field of
        another flag class (`args.rollout.x`), nor `self.config.x`, nor as an argument of `f(**vars(args.reward))`."""
        read: set[tuple[tuple[str, str], str]] = set()
        for file, tree in self.trees.items():
            own = {}                                                    # self.NAME, from `self.NAME = parameter`
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    types = self.parameters(file, function)
                    for node in ast.walk(function):
                        if isinstance(node, ast.Assign):
                            pairs = [(node.targets[0], node.value)]
                            if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                                pairs = zip(node.targets[0].elts, node.value.elts)
                            own |= {ast.unparse(to): types[ast.unparse(value)] for to, value in pairs
                                    if ast.unparse(to).startswith("self.") and ast.unparse(value) in types}
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    self.visit(file, function, own | self.parameters(file, function), read)
        return [f"{file} {name}.{field}" for (file, name), fields in self.classes.items() for field in fields
                if ((file, name), field) not in read]

    def parameters(self, file: str, function: ast.FunctionDef) -> dict[str, tuple[str, str]]:
        arguments = [*function.args.args, *function.args.kwonlyargs]
        return {a.arg: key for a in arguments if (key := self.find(file, a.annotation))}

    def visit(self, file, root, names, read) -> None:
        def type_of(node):
            if ast.unparse(node) in names:
                return names[ast.unparse(node)]
            if isinstance(node, ast.Attribute) and (outer := type_of(node.value)) and node.attr in self.classes[outer]:
                return self.find(outer[0], self.classes[outer][node.attr].annotation)
            return None

        for node in ast.walk(root):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (key := type_of(node.value)):
                read.add((key, node.attr))
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    match keyword:
                        case ast.keyword(arg=None, value=ast.Call(func=ast.Name(id="vars"), args=[config])):
                            callee = self.functions[ast.unparse(node.func)]
                            used = {x.id for x in ast.walk(callee) if isinstance(x, ast.Name)}
                            read |= {(type_of(config), a.arg) for a in callee.args.args if a.arg in used}


def test_every_flag_is_read():
    flags = Flags(SOURCES)
    assert len(flags.classes) >= 8
    assert sum(map(len, flags.classes.values())) > 60
    assert flags.unread() == []


def test_a_flag_that_nobody_reads_is_found():
    source = SOURCES["grpo.py"].replace("class Args:\n", 'class Args:\n    never: int = 0\n    """No one."""\n', 1)
    assert Flags(SOURCES | {"grpo.py": source}).unread() == ["grpo.py Args.never"]
    source = SOURCES["common/optim.py"].replace("config.warmup_steps", "0")
    assert Flags(SOURCES | {"common/optim.py": source}).unread() == ["common/optim.py OptimConfig.warmup_steps"]
    sources = {file: text.replace("args.save.best_metric", "0") for file, text in SOURCES.items()}
    assert Flags(sources).unread() == ["common/checkpoint/manager.py SaveConfig.best_metric"]
    pool = "rewards/runtime/pool.py"
    source = SOURCES[pool].replace("max_error_frac: float = 0.5):", "other: float = 0.5):")
    assert Flags(SOURCES | {pool: source}).unread() == [f"{pool} RewardConfig.max_error_frac"]


def test_every_flag_has_its_help():
    assert Flags(SOURCES).undocumented() == []
    source = SOURCES["common/optim.py"].replace('    """Peak learning rate of AdamW."""\n', "", 1)
    assert Flags({"common/optim.py": source}).undocumented() == ["common/optim.py OptimConfig.lr"]


def help_of(text: str) -> dict[str, tuple[str, str]]:
    """Flag -> its type and help, of a script's Args."""
    body = next(x for x in ast.parse(text).body if isinstance(x, ast.ClassDef) and x.name == "Args").body
    return {ast.unparse(node.target): (ast.unparse(node.annotation), ast.get_source_segment(text, following))
            for node, following in itertools.pairwise(body)
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr)}


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "grpo.py"])
def test_shared_flags_have_one_meaning(script):
    ours, theirs = help_of(SCRIPTS["grpo.py"]), help_of(SCRIPTS[script])
    shared = [name for name in ours if name in theirs]
    assert len(shared) > 10
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


def test_a_flag_with_two_meanings_would_be_found():
    ours = help_of(SCRIPTS["grpo.py"])
    changed = SCRIPTS["grpo.py"].replace("clip_low: float", "clip_low: int").replace("Upper clip:", "Upper bound:")
    other = help_of(changed)
    assert [name for name in ours if ours[name] != other[name]] == ["clip_low", "clip_high"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_args_are_never_assigned_to(script):
    for node in ast.walk(ast.parse(SCRIPTS[script])):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert not ast.unparse(node).startswith("args."), f"{script}:{node.lineno} {ast.unparse(node)}"


# --------------------------------------------------------------------------- scripts

def phases(text: str) -> list[str]:
    return re.findall(r"^ {8}# (\d [a-z-]+)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_six_phases_in_order(script):
    assert phases(SCRIPTS[script]) == PHASES


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_is_flat(script):
    nested = [node for node in ast.walk(function(ast.parse(SCRIPTS[script]), "main"))
              if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)]
    assert len(nested) == 1, [ast.unparse(node)[:80] for node in nested[1:]]           # main itself


@pytest.mark.parametrize("script", [name for name in CHANGED_LINES if name in SCRIPTS])
def test_few_lines_differ_from_grpo(script):
    """As `diff grpo.py SCRIPT` counts them: lines that are new in the script."""
    done = subprocess.run(["diff", ROOT / "grpo.py", ROOT / script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    changed = [line for line in done.stdout.splitlines() if line.startswith(">")]
    assert 20 < len(changed) <= CHANGED_LINES[script]


def test_line_budgets():
    lines = {file: len(text.splitlines()) for file, text in SOURCES.items()}
    over = {file: n for file, n in lines.items() if n > (450 if file in SCRIPTS else 400) and file not in REWARDS}
    assert over == {}, "a script has at most 450 lines, a file of common/ 400"
    assert sum(lines[file] for file in COMMON) <= 6000


# --------------------------------------------------------------------------- imports

def imported(text: str) -> set[str]:
    """First parts of all module names, imports inside functions too."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("file", COMMON | REWARDS)
def test_shared_parts_import_no_script(file):
    assert not imported((COMMON | REWARDS)[file]) & {*NAMES, "tests"}
    if file in REWARDS:
        assert "common" not in imported(REWARDS[file])


def test_importing_needs_neither_vllm_nor_a_gpu(tmp_path):
    """In a fresh process that has no GPU and in which importing vLLM fails; nothing is started or written."""
    modules = [file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in SOURCES]
    code = f"""
import os, sys, threading
sys.modules["vllm"] = None
before = dict(os.environ)
import importlib
for name in {modules}:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
added = {{k for k in os.environ if before.get(k) != os.environ[k]}}
assert added <= {{"KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"}}, added
"""
    (tmp_path / "imports.py").write_text(code)
    files = sorted(ROOT.iterdir())
    launch(tmp_path / "imports.py", env={"CUDA_VISIBLE_DEVICES": ""}, timeout=170)
    assert sorted(ROOT.iterdir()) == files


# --------------------------------------------------------------------------- commands that users copy

def variables(text: str) -> dict[str, str]:
    """What a Makefile or a shell script assigns: `NAME := x`, `NAME ?= x`, `NAME=x`, without quotes."""
    found = re.findall(r"^(?:export )?(\w+) *(?::=|\?=|=) *(.*)$", text, flags=re.MULTILINE)
    return {name: value.strip().strip("\"'") for name, value in found}


def expand(line: str, known: dict[str, str]) -> str:
    """Make and shell variables -> what they stand for here; those of the user's own -> nothing or 1."""
    line = re.sub(r'"?\$(@|\{@\}|\{?\*\}?)"?', "", line).replace("$$", "$")
    for _ in range(9):
        line = re.sub(r"\$\{(\w+):?-([^}]*)\}", lambda m: known.get(m[1], m[2]), line)
        line = re.sub(r"\$\(if [^,()]*,([^()]*)\)", "", line)
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
    known, lines = variables(text), text.splitlines()
    scripts = "|".join(map(re.escape, [*SCRIPTS, "-m tools.report"]))
    found = []
    for line in lines:
        match = re.search(rf"(?:python3?|torchrun|train)\b[^#|;&]*?[ /\"]({scripts})(?= |$)(.*)", line)
        if match:
            flags = re.split(r"\s(?:>|2>|\||&&|;)", expand(match[2], known))[0]
            found.append((match[1], shlex.split(flags, comments=True)))
        elif "make quickstart ARGS=" in line:
            base = next(flags for script, flags in commands(ROOT / "Makefile") if script in SCRIPTS)
            more = next(x for x in shlex.split(line, comments=True) if x.startswith("ARGS=")).removeprefix("ARGS=")
            found.append(("grpo.py", base + shlex.split(more)))
    return found


DOCUMENTS = ["README.md", "Makefile", *SCRIPTS, "tools/report.py",
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
        try:
            tyro.cli(module.Args, args=flags, console_outputs=True)
        except SystemExit as stop:
            pytest.fail(f"{document}: {script} {shlex.join(flags)} ends with {stop.code}")


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

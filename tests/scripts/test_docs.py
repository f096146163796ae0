"""Commands that users copy from README.md and docs/*.md: their flags exist and fit together, and each file or folder
that a training command reads is made by a command above it on the same page, or on the README's.
"""

import importlib
import re
import shlex
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import tyro

from tests.conftest import ROOT
from tests.scripts.test_style import EVALUATE, SCRIPTS, commands

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
OURS = re.compile(r"(^|\s)(make|sbatch|hf download|apptainer build|\S*python3?|\S*torchrun) ")
SBATCH_GPUS = 8
WANDB = types.ModuleType("wandb")               # --log.to wandb is refused where the package is missing, as it is here
WANDB.__spec__ = ModuleSpec("wandb", None)


def shown(text: str) -> list[list[str]]:
    """The commands in a page's fenced blocks that have no language, in order, as words without comments."""
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\+\n\s*", " ", "".join(blocks)).splitlines()
    return [shlex.split(part, comments=True) for line in lines if OURS.search(line)
            for part in re.split(r" && (?=[^'\"]*$)", line)]


def value_of(words: list[str], flag: str, default: str) -> str:
    return words[words.index(flag) + 1] if flag in words else default


class Page:
    """What is wrong with the commands of a page: `problems`. `made`: files and folders that they make."""

    def __init__(self, text: str, made: frozenset[str] = frozenset()):
        self.made = set(made)
        self.problems: list[str] = []
        self.num_runs = 0
        for words in shown(text):
            self.read(words)

    def read(self, words: list[str]) -> None:
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        program = Path(words[0]).name if words else ""
        script = next((word for word in words[1:] if word.endswith(".py")), "")
        if program == "make":
            targets = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            self.expect(words[1] in " ".join(targets).split(), f"make {words[1]}: no such target")
        elif words[:2] == ["hf", "download"] and "--local-dir" in words:
            self.made.add(value_of(words, "--local-dir", ""))
        elif words[:2] == ["apptainer", "build"]:
            self.expect((ROOT / words[3]).is_file(), f"{words[3]} does not exist")
        elif program == "sbatch":
            self.submitted(words, variables)
        elif "-m" in words and program.startswith("python"):
            module = value_of(words, "-m", "").replace(".", "/")
            self.expect((ROOT / f"{module}.py").is_file() or (ROOT / module / "__init__.py").is_file(),
                        f"{module} does not exist")
        elif script.startswith("data/"):
            self.data(script, words[words.index(script) + 1:])
        elif script in (*SCRIPTS, EVALUATE):
            self.run(script, words[words.index(script) + 1:], int(value_of(words, "--nproc-per-node", "1")))

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def data(self, script: str, flags: list[str]) -> None:
        done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
        self.expect(done.returncode == 0, f"{script} --help ends with {done.returncode}")
        for flag in flags:
            if flag.startswith("--"):
                self.expect(f" {flag} " in done.stdout, f"{script} has no flag {flag}")
        out = value_of(flags, "--out", "data/" + Path(script).stem)
        self.made |= {f"{out}/train.parquet", f"{out}/test.parquet"}

    def submitted(self, words: list[str], variables: dict[str, str]) -> None:
        file = next(word for word in words if word.endswith(".sbatch"))
        if not (ROOT / file).is_file():
            self.problems.append(f"{file} does not exist")
            return
        (_, flags), = commands(ROOT / file)
        for name, flag in {"MODEL": "--model", "TRAIN_DATA": "--train-data", "VAL_DATA": "--val-data"}.items():
            if name in variables:
                flags = [*flags, flag, variables[name]]
        nodes = int(value_of(words, "--nodes", "1"))
        gpus = int(value_of(words, "--gpus-per-node", str(SBATCH_GPUS)))
        self.run(variables.get("SCRIPT", "grpo.py"), [*flags, *words[words.index(file) + 1:]], nodes * gpus)

    def run(self, script: str, flags: list[str], world_size: int) -> None:
        """The flags parse, the script's own checks accept them on that many ranks, and what it reads was made."""
        self.num_runs += 1
        module = importlib.import_module(script.removesuffix(".py"))
        command = f"{script} {shlex.join(flags)}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(world_size))
            patch.setenv("WANDB_MODE", "offline")
            patch.setitem(sys.modules, "wandb", WANDB)
            try:
                args = tyro.cli(module.Args, args=flags, console_outputs=False)
                module.check(args)
            except SystemExit:
                self.problems.append(f"{command}: the flags do not parse")
                return
            except ValueError as error:                                     # a hub model's config is not at hand here
                self.expect("cannot read a model config" in str(error), f"{command}: {error}")
        for file in (*vars(args).get("train_data", ()), *args.val_data):
            self.expect(file in self.made, f"{command}: nothing above makes {file}")
        if args.model.startswith(("models/", "/", ".")):
            self.expect(args.model in self.made, f"{command}: nothing above makes {args.model}")


@pytest.fixture(scope="module")
def readme() -> Page:
    return Page((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works_after_those_above_it(page, readme):
    made = frozenset() if page == "README.md" else frozenset(readme.made)
    assert Page((ROOT / page).read_text(), made).problems == []


def test_the_pages_for_gpus_show_training_runs(readme):
    """Guard: commands are found at all."""
    assert readme.num_runs >= 1 and "data/gsm8k/train.parquet" in readme.made
    gpus, recipes = (Page((ROOT / f"docs/{name}.md").read_text()) for name in ("gpus", "recipes"))
    assert gpus.num_runs >= 5 and recipes.num_runs >= 7
    assert "data/countdown/test.parquet" in recipes.made and gpus.problems == recipes.problems == []


def test_what_is_wrong_with_a_command_is_found():
    """Guard: one page, one mistake each; the commands without one are accepted."""
    good = ("```\npython data/countdown.py --out c  # makes c\ntorchrun --nproc-per-node 2 grpo.py --model Q/Q \\\n"
            "    --train-data c/train.parquet\nMODEL=Q/Q TRAIN_DATA=c/train.parquet VAL_DATA=c/test.parquet sbatch "
            "--nodes 2 slurm/many_nodes.sbatch --seed 1\n```\n")
    assert Page(good).problems == [] and Page(good).num_runs == 2
    for before, after, problem in (
            ("--out c", "--outt c", "has no flag --outt"), ("countdown", "count", "--help ends with 2"),
            ("--out c ", "--out d ", "nothing above makes c/train.parquet"), ("--seed 1", "--sed 1", "do not parse"),
            ("--seed 1", "--prompts-per-step 9", "must be a multiple of the"), ("L_DATA=c", "L_DATA=e", "makes e/test"),
            ("--model Q/Q", "--model models/Q", "nothing above makes models/Q"), ("many_", "no_", "does not exist")):
        assert before in good
        found = Page(good.replace(before, after)).problems
        assert any(problem in text for text in found), (found, problem)


def test_the_image_is_made_of_files_that_exist():
    definition = (ROOT / "slurm/plainrl.def").read_text()
    copied = re.search(r"^%files\n((?: .*\n)+)", definition, flags=re.MULTILINE)[1].split("\n")[:-1]
    assert len(copied) == 2
    for line in copied:
        source, target = line.split()
        assert (ROOT / source).is_file() and target in definition.partition("%post")[2]


def test_the_readme_says_how_far_scripts_are_from_grpo():
    """Lines added and removed, as `diff` counts them."""
    told = re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+), (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(told) == 6
    for script, *numbers in told:
        diff = subprocess.run(["diff", "grpo.py", script], cwd=ROOT, capture_output=True, text=True, check=False)
        found = [len(re.findall(sign, diff.stdout, re.MULTILINE)) for sign in ("^>", "^<")]
        assert [*map(int, numbers)] == found, script

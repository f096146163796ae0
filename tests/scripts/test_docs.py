"""Commands that users copy from README.md and docs/*.md: their flags parse and fit together, and each file or folder
that a training command reads is made by a command above it on the same page, or on the README's. Links, paths and
flags in the text: test_pages.py.
"""

import argparse
import functools
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import tyro

from tests.conftest import ROOT, launch
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS, commands

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
OURS = re.compile(r"(^|\s)(make|sbatch|hf download|apptainer build|\S*python3?|\S*torchrun) ")
SBATCH_GPUS = 8
OF_MAKE = ("models/SmolLM2-135M-Instruct", "data/word_problems/train.parquet", "data/word_problems/test.parquet")
WANDB = types.ModuleType("wandb")               # --log.to wandb is refused where the package is missing, as it is here
WANDB.__spec__ = ModuleSpec("wandb", None)


def shown(text: str) -> list[list[str]]:
    """The commands in a page's fenced blocks that have no language, in order, as words without comments."""
    found = re.findall(r"^```(\w*)\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [code for language, code in found if language in ("", "bash", "sh")]
    lines = re.sub(r"\\+\n\s*", " ", "".join(blocks)).splitlines()
    return [shlex.split(part, comments=True) for line in lines if OURS.search(line)
            for part in re.split(r" && (?=[^'\"]*$)", line)]


class Parsed(BaseException):
    """The program has read its flags; it goes no further."""


def read_flags(program: str, flags: list[str]) -> str:
    """Run a program of this repository, `data/gsm8k.py` or `tools.plan`, until its flags are read: what it then says
    against them, or nothing."""
    known, cli, said = argparse.ArgumentParser.parse_known_args, tyro.cli, []

    def parse_args(parser, args=None, namespace=None):
        _, unknown = known(parser, args, namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    def parse_known_args(parser, args=None, namespace=None):
        found, unknown = known(parser, args, namespace)
        if unknown and program == "tools.plan":                         # flags of the script, which tyro reads
            return found, unknown
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    def parse_by_tyro(of, **options):
        cli(of, **options | {"console_outputs": False})
        raise Parsed

    def parse_subcommands(functions, **options):
        def without_effect(function):
            stand_in = functools.wraps(function)(lambda **_: None)
            stand_in.__signature__ = inspect.signature(function)
            return stand_in

        subcommands({name: without_effect(function) for name, function in functions.items()}, **options)
        raise Parsed

    subcommands = tyro.extras.subcommand_cli_from_dict
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        patch.setattr(argparse.ArgumentParser, "error", lambda parser, message: (said.append(message), sys.exit(2)))
        patch.setattr(tyro, "cli", parse_by_tyro)
        patch.setattr(tyro.extras, "subcommand_cli_from_dict", parse_subcommands)
        patch.setattr(sys, "argv", [program, *flags])
        patch.delitem(sys.modules, program, raising=False)
        patch.setenv("WORLD_SIZE", "1")                                 # tools.plan sets it
        patch.chdir(ROOT)
        try:
            if program.endswith(".py"):
                patch.syspath_prepend(str((ROOT / program).parent))
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except Parsed:
            return ""
        except SystemExit as error:
            return f"{program} {shlex.join(flags)}: the flags do not parse ({' '.join(said) or error.code})"
    return f"{program} reads no flags"


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
            self.made |= set(OF_MAKE)                                   # all that trains makes both first
        elif words[:2] == ["hf", "download"] and "--local-dir" in words:
            self.made.add(value_of(words, "--local-dir", ""))
        elif words[:2] == ["apptainer", "build"]:
            self.expect((ROOT / words[3]).is_file(), f"{words[3]} does not exist")
        elif program == "sbatch":
            self.submitted(words, variables)
        elif "-m" in words and program.startswith("python"):
            self.module(value_of(words, "-m", ""), words[words.index("-m") + 2:])
        elif script.startswith("data/"):
            self.data(script, words[words.index(script) + 1:])
        elif script in (*SCRIPTS, *OFFLINE, *ALONE):
            self.run(script, words[words.index(script) + 1:], int(value_of(words, "--nproc-per-node", "1")))

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def data(self, script: str, flags: list[str]) -> None:
        if not (ROOT / script).is_file():
            self.problems.append(f"{script} does not exist")
            return
        problem = read_flags(script, flags)
        self.expect(not problem, problem)
        out = value_of(flags, "--out", "data/" + Path(script).stem)
        folders = [out, f"{out}/solved"] if "--solved" in flags else [out]
        self.made |= {f"{folder}/{split}.parquet" for folder in folders for split in ("train", "test")}

    def module(self, name: str, flags: list[str]) -> None:
        file = ROOT / f"{name.replace('.', '/')}.py"
        if not file.is_file():
            self.problems.append(f"{name} does not exist")
        elif re.search(r"tyro|argparse|run_script", file.read_text()):
            problem = read_flags(name, flags)
            self.expect(not problem, problem)

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
                if hasattr(module, "check"):                                # those that only read text have none
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
        self.made.add(f"{args.run_dir}/model")


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
    names = ("gpus", "recipes", "checkpoints", "supervised")
    gpus, recipes, slurm, supervised = (Page((ROOT / f"docs/{name}.md").read_text()) for name in names)
    assert gpus.num_runs >= 2 and recipes.num_runs >= 7 and slurm.num_runs >= 3 and supervised.num_runs >= 6
    assert "data/countdown/test.parquet" in recipes.made and gpus.problems == recipes.problems == []


def test_what_is_wrong_with_a_command_is_found():
    """Guard: one page, one mistake each; the commands without one are accepted."""
    good = ("```\npython data/countdown.py --out c  # makes c\ntorchrun --nproc-per-node 2 grpo.py --model Q/Q \\\n"
            "    --train-data c/train.parquet\nMODEL=Q/Q TRAIN_DATA=c/train.parquet VAL_DATA=c/test.parquet sbatch "
            "--nodes 2 slurm/many_nodes.sbatch --seed 1\npython -m tools.plan grpo.py --model Q/Q --gpus 8 "
            "--train-data c/t\npython -m tools.report runs/a --out a.png\n"
            "python -m tools.checkpoints export runs/a OUT --adapter\npython -m tools.doctor --gpus 1\n"
            "make try SCRIPT=mine.py\n"
            "torchrun sft.py --model Q/Q --rows-per-step 8 --train-data c/train.parquet\n```\n")
    assert Page(good).problems == [] and Page(good).num_runs == 3
    for before, after, problem in (
            ("--out c", "--outt c", "unrecognized arguments: --outt"), ("countdown", "count", "count.py does not"),
            ("Q --gpus 8", "Q --gpu 8", "the flags do not parse"), ("--out a.png", "--ot a.png", "do not parse"),
            ("--adapter", "--adaptor", "the flags do not parse"), ("tor --gpus 1", "tor --gpus a", "invalid int value"),
            ("make try", "make tri", "no such target"), ("tools.rep", "tools.rap", "tools.raport does not exist"),
            ("--rows-per", "--row-per", "the flags do not parse"),
            ("--out c ", "--out d ", "nothing above makes c/train.parquet"), ("--seed 1", "--sed 1", "do not parse"),
            ("--seed 1", "--prompts-per-step 9", "must be a multiple of the"), ("L_DATA=c", "L_DATA=e", "makes e/test"),
            ("--model Q/Q", "--model models/Q", "nothing above makes models/Q"), ("many_", "no_", "does not exist")):
        assert before in good
        found = Page(good.replace(before, after)).problems
        assert any(problem in text for text in found), (found, problem)


TOOLS = sorted({name for page in PAGES for name in re.findall(r"-m tools\.(\w+)", (ROOT / page).read_text())})


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_of_the_pages_says_what_it_is_for(name):
    assert len(TOOLS) >= 8
    done = launch("-m", f"tools.{name}", "--help", check=False)
    assert done.returncode == 0 and f"python -m tools.{name} " in done.stdout, done.stdout + done.stderr


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

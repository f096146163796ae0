"""What the pages for users say: each flag, path, link and anchor exists, and the pages stay few and short. Their
commands: test_docs.py. Where a rule is checked by a function, a second test shows that it finds what it is for.
"""

import ast
import fnmatch
import itertools
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS, SOURCES, Flags

DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", *DOCS]
EVIDENCE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/evidence").glob("*.md")
                  if path.name != "optimizers.md")                      # `make optimizers` writes it
MOST_PAGES = 17                         # in docs/
MOST_WORDS = 18_000                     # of README.md and docs/; a word has a letter or a digit
MOST_WORDS_OF_EVIDENCE = 15_000
FOREIGN = {                             # flags of programs that are not in this repository
    "torchrun": {"--standalone", "--nproc-per-node", "--nnodes", "--log-dir", "--signals-to-handle",
                 "--rdzv-backend", "--rdzv-endpoint", "--numa-binding"},
    "sbatch": {"--nodes", "--gpus-per-node", "--time", "--job-name", "--mem", "--cpus-per-task", "--array"},
    "scancel": {"--signal", "--batch"},
    "pip": {"--no-deps", "--target"}, "hf": {"--local-dir"}, "tensorboard": {"--logdir"},
    "tyro": {"--help", "--help-all"},
    "trl": {"--model_name_or_path"}, "docker": {"--rm", "--gpus", "--shm-size", "--build-arg"},
    "an example of an agent's own flags": {"--fast"},
}
FOLDERS = ("common", "rewards", "envs", "data", "tools", "tests", "slurm", "variants", "docs")
OF_THE_USER = {"mine.py", "my_agent.py", "my_reward.py", "my_env.py", "server.py", "file.py", "a.py", "b.py"}


# --------------------------------------------------------------------------- what exists

def flags_of_scripts() -> set[str]:
    """As tyro names them: the fields of each script's `Args` and of the classes that it inherits or nests."""
    flags = Flags(SOURCES)

    def fields(key, prefix: str) -> set[str]:
        found = set()
        for name, field in flags.classes[key].items():
            flag, nested = name.rstrip("_").replace("_", "-"), flags.find(key[0], field.annotation)
            if nested:
                found |= fields(nested, f"{prefix}{flag}.")
            else:
                found.add(f"--{prefix}{flag}")
                if re.match(r"(Annotated\[)?bool\b", ast.unparse(field.annotation)):
                    found.add(f"--{prefix}no-{flag}")
        for base in flags.bases[key]:
            parent = flags.find(key[0], base)
            found |= fields(parent, prefix) if parent else set()
        return found

    return set().union(*(fields((script, "Args"), "") for script in (*SCRIPTS, *OFFLINE, *ALONE)))


def flags_of_tools() -> set[str]:
    """Of argparse, of tyro's dataclasses and functions, and names that `tyro.conf.arg` gives. A tool that reads its
    command line by `flags_in` has its flags as texts."""
    found = set()
    folders = ("tools", "data", *(f"tests/{name}" for name in ("bench", "gpu", "cuda", "checkpoint", "model")))
    for file in [file for folder in folders for file in (ROOT / folder).glob("*.py")]:
        text = file.read_text()
        found |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text))
        if re.search(r"import .*\bflags_in\b", text):
            found |= set(re.findall(r'"(--[a-z][\w-]*)"', text))
        if "tyro" not in text and "run_script" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add("--" + name.rstrip("_").replace("_", "-"))
                case ast.FunctionDef() if "subcommand_cli" in text:
                    found |= {"--" + argument.arg.replace("_", "-") for argument in node.args.args}
                case ast.keyword(arg="name", value=ast.Constant(value=name)):
                    found.add(f"--{name}")
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    return flags_of_scripts() | flags_of_tools() | set().union(*FOREIGN.values())


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Of all files of Python, wherever they are."""
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {
        path.name for path in ROOT.glob("*.py")}


# --------------------------------------------------------------------------- what a page says

def prose(text: str) -> str:
    """Without addresses on the web."""
    return re.sub(r"https?://[^\s)>\"'`]+", "", text)


def unknown_flags(text: str, known: set[str]) -> set[str]:
    named = set(re.findall(r"(?<![\w.-])--([a-z][\w-]*(?:\.[\w-]+)*(?:\.\*)?)", prose(text)))
    groups = {f"{flag.rpartition('.')[0]}.*" for flag in known if "." in flag}          # --optim.* is all of them
    return {f"--{name}" for name in named} - known - groups


def missing_paths(text: str, names: set[str]) -> set[str]:
    """Paths in folders of this repository; files of Python by their name alone, unless they stand for a user's own.
    In data/ folders and parquet files are made, so only the scripts are looked for."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(text))                     # links are another test's
    found = set()
    for path in re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]", text):
        is_made = path.startswith("data/") and not path.endswith(".py")
        if not is_made and not re.search(r"[A-Z]{4}", path) and not any(ROOT.glob(path.rstrip("/"))):
            found.add(path)
    for name in re.findall(r"(?<![\w./-])[a-z]\w*\.py\b", text):
        if name not in names | OF_THE_USER:
            found.add(name)
    return found


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(text: str, page: Path) -> set[str]:
    """Relative links whose file or heading does not exist."""
    found = set()
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor and file.exists() else []
        if not file.exists() or (anchor and anchor not in map(slug, headings)):
            found.add(link)
    return found


def begins_well(text: str) -> bool:
    """A heading, and then a sentence."""
    heading, _, rest = text.partition("\n")
    first = rest.lstrip("\n").partition("\n\n")[0]
    return bool(re.match(r"# \S", heading) and re.match(r"[`\w]", first) and re.search(r"[.:](\s|$)", first))


def num_words(text: str) -> int:
    return len([word for word in text.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", PAGES)
def test_flags_paths_and_links_of_a_page_exist(page, known, names):
    text = (ROOT / page).read_text()
    assert unknown_flags(text, known) == set()
    assert missing_paths(text, names) == set()
    assert broken_links(text, ROOT / page) == set()


# --------------------------------------------------------------------------- metrics

NO_METRICS = r"_training/.*|runs/\w+|rollouts/\w+|application/json|lighteval/MATH"
TIMES = ("timing_s/", "timing_per_token_ms/")  # by phase: one row is of them all


def metrics_in(source: str) -> set[str]:
    """What looks like a metric's name among the texts of a source. A name that begins with _ is not logged. What an
    f-string fills in is *; a name that begins or ends with it has no row of its own."""
    nodes = list(ast.walk(ast.parse(source)))
    filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in filled for part in node.values}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts}
    names = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]\w*(/[a-z]\w*)+", text)}
    for node in filled:
        text = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
        names |= {text} if re.fullmatch(r"[a-z]\w*(/[\w*]+)*/[\w*]*[a-z]", text) else set()
    return {name for name in names if not re.fullmatch(NO_METRICS, name) and not name.startswith(TIMES)}


def unexplained(names: set[str], text: str) -> set[str]:
    """Names that a page's spans of code do not have: a name with braces is several, `.../x` ends as another does. A row
    of NAME or * is for names that a user gives, and does not explain one that is written in a source; but a/b/NAME
    explains a/b, to which a source adds the rest, and a name with * is explained by one row that it fits."""
    shown, ends = set(), set()
    for span in re.findall(r"`([^`\n]+)`", text):
        parts = [part.split(",") if n % 2 else [part] for n, part in enumerate(re.split(r"[{}]", span))]
        for one in map("".join, itertools.product(*parts)):
            shown |= {one, re.sub(r"[/_]mean$", "", one)}               # of a mean, least and largest
            shown |= {re.sub(r"(?<=\w)/[A-Z]+$", "", one)}
            ends |= {one.removeprefix("...")} if one.startswith(".../") else set()
    missing = {name for name in names - shown if not name.endswith(tuple(ends))}
    return {name for name in missing if "*" not in name or not fnmatch.filter(shown, name)}


def test_every_metric_is_explained():
    sources = [*ROOT.glob("*.py"), *(path for folder in ("common", "variants", "rewards/runtime")
                                     for path in (ROOT / folder).rglob("*.py"))]
    names = set().union(*(metrics_in(path.read_text()) for path in sources))
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert len(names) > 80 and unexplained(names, text) == set()


def test_a_metric_without_a_row_is_found():
    source = 'meter.mean("perf/asked_frac", x)\nmetrics = {"actor/a": 1, f"actor/{x}": 2, "runs/grpo": 3, "val/b": 4}'
    names = metrics_in(source)
    assert names == {"perf/asked_frac", "actor/a", "val/b"}
    assert unexplained(names, "`perf/*` `actor/NAME` `val/{a,b}`") == {"perf/asked_frac", "actor/a"}
    source = 'shares(terms, "signal/share")\nadd("_signal/b", f"_signal/{x}_c", f"signal/near_{x}_frac", f"{x}/d")'
    names = metrics_in(source)
    assert names == {"signal/share", "signal/near_*_frac"}
    assert unexplained(names, "`signal/share/TERM`, `signal/near_*_frac`") == set()
    assert unexplained(names, "`signal/share/TERM`, `signal/near_{a,b}_frac`") == set()
    assert unexplained(names, "`signal/shares/TERM`, `signal/share/a`, `signal/NAME`, `signal/far_a_frac`") == names
    assert unexplained({"x/a", "x/c_high"}, "`x/a/mean`, `x/c{,_high}` `y/b`, `.../d`") == set()
    assert unexplained({"y/d", "y/e"}, "`y/b`, `.../d`") == {"y/e"}


@pytest.mark.parametrize("page", EVIDENCE)
def test_links_of_evidence_exist(page):
    assert broken_links((ROOT / page).read_text(), ROOT / page) == set()


def test_wrong_flags_paths_and_links_are_found(known, names, tmp_path):
    assert len(known) > 250 and len(names) > 200
    good = ("`--optim.lr 1`, `--policy.no-liger`, `--correction.*`, `--save.no-async`, `--critic-optim.kind`, "
            "`--gpus`, `--data.max-length`, `--large-table`, `--adapter`, `--compare`, `--step`, "
            "an em-dash--here, `a--b`")
    assert unknown_flags(good, known) == set()
    wrong = {"--optim.rate", "--policy.no-rank", "--corrections.*", "--lora.lr", "--adaptor", "--stepped"}
    assert unknown_flags(" ".join(f"`{flag} 1`" for flag in wrong) + good, known) == wrong
    good = ("common/losses.py tests/bench `common/*.py` data/gsm8k/train.parquet data/gsm8k.py:f rewards/FUNCTION/mean "
            "(envs/calculator.py), grpo.py mine.py losses.py https://x.org/docs/none.md verl/docs/none.md "
            "envs/calculator.py:episode.")
    assert missing_paths(good, names) == set()
    wrong = {"common/loses.py", "data/gsm9k.py", "envs/no/", "slurm/*.sh2", "grpoo.py", "docs/none.md"}
    assert missing_paths(" ".join(wrong) + " " + good, names) == wrong
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A `flag`, and what\n")
    page.write_text("# Title\n\n## Two words\n")
    good = "[a](other.md) [b](other.md#a-flag-and-what) [c](#two-words) [d](https://x.org/none) `[e](none.md)`"
    assert broken_links(good, page) == set()
    wrong = {"none.md", "other.md#a-flag", "#three-words", "none.png"}
    assert broken_links(" ".join(f"[x]({link})" for link in wrong) + good, page) == wrong


def test_a_server_of_vllm_is_started_in_the_environment_that_has_its_packages():
    """What it needs beside vLLM's engine (uvicorn, watchfiles, ...) is not in requirements-cpu.txt."""
    said = [re.sub(r"\.venv-gpu/bin/vllm serve", "", (ROOT / page).read_text()) for page in ("README.md", *DOCS)]
    assert not any("vllm serve" in text or "vllm.entrypoints" in text for text in said)
    assert any(".venv-gpu/bin/vllm serve" in (ROOT / page).read_text() for page in DOCS)


def test_pages_are_few_and_short():
    assert 10 <= len(DOCS) <= MOST_PAGES
    words = {page: num_words((ROOT / page).read_text()) for page in ("README.md", *DOCS)}
    assert 10_000 < sum(words.values()) <= MOST_WORDS, words
    assert num_words("| two | words --- | -") == 2


def test_evidence_is_short():
    words = {page: num_words((ROOT / page).read_text()) for page in EVIDENCE}
    assert 5_000 < sum(words.values()) <= MOST_WORDS_OF_EVIDENCE, words


def test_every_page_begins_with_a_heading_and_a_sentence():
    assert [page for page in (*DOCS, *EVIDENCE) if not begins_well((ROOT / page).read_text())] == []
    assert begins_well("# T\n\n`a.py` does it:\n\n```\nx\n```\n")
    for text in ("T\n\nA sentence.\n", "# T\n\n| a |\n", "# T\n\n## U\n\nA b.\n", "# T\n\nno end\n\nA b.", "# T\n"):
        assert not begins_well(text), text


def test_every_page_can_be_found():
    """From the start page, or for evidence from the page that lists it."""
    for pages, start in ((DOCS, "docs/README.md"), (EVIDENCE, "docs/evidence.md")):
        linked = {(ROOT / start).parent.joinpath(link.partition("#")[0]).resolve()
                  for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / start).read_text())}
        assert [page for page in pages if (ROOT / page).resolve() not in linked and page != start] == []
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()

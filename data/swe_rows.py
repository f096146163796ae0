"""SWE-bench's and SWE-Gym's rows for envs/swe.py: python data/swe_rows.py --source princeton-nlp/SWE-bench_Verified

Any data set with their columns will do: instance_id, repo, problem_statement, test_patch, FAIL_TO_PASS and PASS_TO_PASS
(lists, or JSON of lists). Each row runs in its image: the column `docker_image` or `image_name` if there is one, else
--images with the instance's name. The images are for apptainer, which pulls each one when it is first used.

The tests of the patch's files run, by pytest; Django's and SymPy's by their own programs, as SWE-bench runs them. Names
that SWE-bench cut at a space cannot be found again: they are left out, and so is a row with no other test to repair.
Without --test-split, --num-test rows of the first split are the test data.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from verl_rows import download, make_row, parser, run, write

SETUP = "source /opt/miniconda3/bin/activate testbed"
INSTRUCTION = """The repository in the present folder has this issue. Change its code so that the issue is resolved. \
Do not change tests.

{}"""
OWN_PROGRAMS = {
    "django/django": ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {}", "{} ... ok"),
    "sympy/sympy": ("PYTHONWARNINGS='ignore::UserWarning' bin/test -C --verbose {}", "{} ok"),
}
"""By repository: the command of its tests, and the line that it prints for one that passes."""


def names_of(value: Any) -> list[str]:
    return json.loads(value) if isinstance(value, str) else list(value)


def is_cut(name: str) -> bool:
    return name.count("[") > name.count("]")


def task_of(row: dict, images: str) -> dict[str, Any] | None:
    """`extra_info.swe`, or None for a row whose tests to repair cannot be found."""
    repaired = [name for name in names_of(row["FAIL_TO_PASS"]) if not is_cut(name)]
    kept = [name for name in names_of(row["PASS_TO_PASS"]) if not is_cut(name)]
    files = sorted(set(re.findall(r"^\+\+\+ b/(\S+\.py)$", row["test_patch"], re.MULTILINE)))
    if not repaired or not files:
        return None
    name = row["instance_id"]
    image = row.get("docker_image") or row.get("image_name")
    if not image:
        image = images.format(name.replace("__", "_1776_").lower(), name.replace("__", "_s_").lower())
    task = {"image": image, "folder": "/testbed", "setup": SETUP, "patch": row["test_patch"], "tests_timeout_s": 900.0,
            "timeout_s": 120.0}
    if row["repo"] not in OWN_PROGRAMS:
        return task | {"runner": "pytest", "arguments": files, "passes": repaired + kept}
    command, line = OWN_PROGRAMS[row["repo"]]
    if row["repo"] == "django/django":
        files = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files]
    expects = [line.format(name) for name in repaired + kept]
    return task | {"command": command.format(" ".join(files)), "expects": expects}


def rows(source_rows: Iterable[dict], split: str, images: str) -> list[dict]:
    made = []
    num_left_out = 0
    for row in source_rows:
        task = task_of(row, images)
        if task is None:
            num_left_out += 1
            continue
        question = INSTRUCTION.format(row["problem_statement"].strip())
        made.append(make_row(f"swe/{row['repo']}", question, "", "swe", split, len(made), swe=json.dumps(task),
                             instance_id=row["instance_id"]))
    if num_left_out:
        print(f"data: {num_left_out} rows of {split} left out: no test to repair that can be found")
    return made


def main() -> None:
    args = parser(__doc__, "swe", "princeton-nlp/SWE-bench_Verified")
    args.add_argument("--images", default="swebench/sweb.eval.x86_64.{0}:latest", help="name of an instance's image, "
                      "where {0} is the instance with _1776_ for __, {1} with _s_, as in "
                      "xingyaoww/sweb.eval.x86_64.{1}:latest (swebench/sweb.eval.x86_64.{0}:latest)")
    args.add_argument("--split", default="test", help="the split of the data set (test)")
    args.add_argument("--test-split", default="", help="another one for test.parquet ('': rows of --split)")
    args.add_argument("--num-test", type=int, default=50, help="rows of test.parquet, if there is no other split (50)")
    args = args.parse_args()
    made = rows(download(args.source, split=args.split), args.split, args.images)
    if args.test_split:
        test = rows(download(args.source, split=args.test_split), args.test_split, args.images)
    else:
        if not 0 < args.num_test < len(made):
            raise ValueError(f"--num-test {args.num_test} must be at least 1 and below the {len(made)} rows")
        test = made[: args.num_test]
        made = made[args.num_test :]
    write(made, args.out / "train.parquet")
    write(test, args.out / "test.parquet")


if __name__ == "__main__":
    run(main)

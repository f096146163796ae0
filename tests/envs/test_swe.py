"""envs/swe.py in its real processes and its real jail: what a model can do there, and what it cannot."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from envs.repository import workspace
from envs.repository.workspace import Container, pack_files, read_reward
from tests.conftest import MODEL, ROOT
from tests.envs.scripted import Player
from tests.rewards.jail_tools import needs_isolation

sys.path.append(str(ROOT / "data"))
import harbor_rows
import swe_rows

pytestmark = needs_isolation
CALC = {"calc.py": "def add(a, b):\n    return a - b\n", "old/test_old.py": "assert True\n"}
HIDDEN = {"test_calc.py": "import unittest\n\nimport calc\n\n\nclass Hidden(unittest.TestCase):\n"
                          "    def test_add(self):\n        self.assertEqual(calc.add(2, 3), 5)\n"}
BY_UNITTEST = {"runner": "unittest", "arguments": ["test_calc"], "passes": ["test_calc.Hidden.test_add"]}
BY_PYTEST = {"runner": "pytest", "arguments": ["test_calc.py"], "passes": ["test_calc.py::Hidden::test_add"]}
BY_LINES = {"command": "python3 -m unittest -v test_calc", "expects": ["test_add (test_calc.Hidden.test_add) ... ok"]}


def packed(files: dict[str, str]) -> str:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return "base64:" + base64.b64encode(archive.getvalue()).decode()


def make_row(**changes) -> dict:
    task = {"repo": packed(CALC), "tests": packed(HIDDEN)} | (changes or BY_UNITTEST)
    return {"prompt": [{"role": "user", "content": "add is wrong"}], "extra_info": {"swe": json.dumps(task)}}


def call(name: str, **arguments) -> list[dict[str, str]]:
    return [{"name": name, "arguments": json.dumps(arguments)}]


def bash(command: str) -> list[dict[str, str]]:
    return call("bash", command=command)


REPAIR = call("replace_text", path="calc.py", old="a - b", new="a + b")


@pytest.fixture(scope="module")
def player():
    with Player("envs/swe.py", 200) as made:
        yield made


def score_of(player, row: dict, *replies) -> float:
    message, _ = player.play(row, [*replies, "done"])
    return message.get("score")


# --------------------------------------------------------------------------- what it is for

@pytest.mark.parametrize("verdict", [BY_UNITTEST, BY_PYTEST, BY_LINES], ids=["unittest", "pytest", "lines"])
def test_the_hidden_tests_give_the_reward(verdict, player):
    assert score_of(player, make_row(**verdict)) == 0.0
    assert score_of(player, make_row(**verdict), REPAIR) == 1.0
    assert score_of(player, make_row(**verdict), call("write_file", path="calc.py", text="def add(a, b")) == 0.0


def test_the_tools(player):
    replies = [bash("ls; cat calc.py; echo to stderr >&2; exit 3"), call("read_file", path="calc.py"), REPAIR,
               call("write_file", path="new/file.txt", text="hello\n"), bash("cat new/file.txt; grep + calc.py"),
               call("read_file", path="none.py"), call("replace_text", path="calc.py", old="a", new="b"),
               bash("true"), bash("sleep 9"), bash("seq 100000"), "done"]
    message, said = player.play(make_row(timeout_s=1.0, **BY_UNITTEST), replies)
    assert message["score"] == 1.0 and message["extra"]["calls"] == 10 and message["num_tool_errors"] == 0
    assert said[0] == "calc.py\nold\ndef add(a, b):\n    return a - b\nto stderr\n\n[exit code 3]"
    assert said[1:5] == [CALC["calc.py"], "replaced", "written", "hello\n    return a + b"]
    assert "No such file" in said[5] and "occurs 3 times in calc.py, and must occur once" in said[6]
    assert said[7] == "[it printed nothing]" and said[8] == "[ended after 1 s]"
    assert said[9].startswith("1\n2\n") and said[9].endswith("99999\n100000") and "characters left out]" in said[9]
    assert len(said[9]) < 8100


def test_all_tests_of_the_list_must_pass(player):
    two = HIDDEN["test_calc.py"] + "\n    def test_zero(self):\n        self.assertEqual(calc.add(2, 0), 2)\n"
    names = ["test_calc.Hidden.test_add", "test_calc.Hidden.test_zero"]
    row = make_row(tests=packed({"test_calc.py": two}), **BY_UNITTEST | {"passes": names})
    message, _ = player.play(row, ["done"])
    assert (message["score"], message["extra"]["tests_passed"]) == (0.0, 0.5)
    assert score_of(player, row, REPAIR) == 1.0


def test_what_is_no_task_is_an_error_that_names_the_rule(player):
    for changes, text in [({"image": "x", **BY_UNITTEST}, "either `repo` or `image`"),
                          ({"repo": "", "image": "python:3.11", **BY_UNITTEST}, "has no apptainer"),
                          ({"repo": "/nowhere", **BY_UNITTEST}, "neither a folder nor a tar archive"),
                          ({"runner": "pytest"}, "`runner` and `passes`"), (BY_LINES | BY_PYTEST, "must have either"),
                          ({"comand": "x", **BY_UNITTEST}, "has comand; it may have repo, "),
                          ({"tests_timeout_s": 190, **BY_UNITTEST}, "tool-timeout-s 200 must be at least 210")]:
        message, _ = player.play(make_row(**changes), ["done"])
        assert message["kind"] == "ValueError" and text in message["text"], message


def test_a_folder_and_an_archive_are_snapshots_without_their_history(tmp_path, player):
    repository = tmp_path / "repo"
    (repository / ".git").mkdir(parents=True)
    (repository / ".git/HEAD").write_text("the solution")
    (repository / "calc.py").write_text(CALC["calc.py"])
    with tarfile.open(tmp_path / "repo.tar", "w") as tar:
        tar.add(repository / "calc.py", "calc.py")
    for source in (repository, tmp_path / "repo.tar"):
        _, said = player.play(make_row(repo=str(source), **BY_UNITTEST), [bash("ls -A"), "done"])
        assert said == ["calc.py"]
    with pytest.raises(ValueError, match="is no tar archive"):
        pack_files(str(repository / "calc.py"))


def test_a_patch_of_the_tests(player):
    """It applies to the snapshot's file, whatever the model has made of that."""
    patch = ("--- a/old/test_old.py\n+++ b/old/test_old.py\n@@ -1 +1,2 @@\n-assert True\n+import calc\n"
             "+assert calc.add(2, 3) == 5\n"
             "--- /dev/null\n+++ b/test_new.py\n@@ -0,0 +1,3 @@\n+import unittest\n+class T(unittest.TestCase):\n"
             "+    def test_it(self): import old.test_old\n")
    verdict = {"tests": "", "patch": patch, "runner": "unittest", "arguments": ["test_new"],
               "passes": ["test_new.T.test_it"]}
    assert score_of(player, make_row(**verdict)) == 0.0
    spoil = bash("echo broken > old/test_old.py; mkdir test_new.py")
    assert score_of(player, make_row(**verdict), REPAIR, spoil) == 1.0
    message, _ = player.play(make_row(**verdict | {"patch": patch.replace("-assert True", "-assert Other")}), ["done"])
    assert (message["score"], message["extra"]["tests_not_run"]) == (0.0, 1.0)


# --------------------------------------------------------------------------- a verdict that cannot be faked by habit

HOOK = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
OWN_TESTS = "import unittest\nclass Hidden(unittest.TestCase):\n    def test_add(self): pass\n"
WRONG = "def add(a, b): return a - b\n"
IDS = "['test_calc.py::Hidden::test_add', 'test_calc.Hidden.test_add']"
CHEATS = {
    "exit code 0": {"calc.py": "import os\nos._exit(0)\n"},
    "printed lines": {"calc.py": "import os\nprint('PASSED test_calc.py::Hidden::test_add\\ntest_calc.Hidden.test_add',"
                                 " flush=True)\nos._exit(0)\n"},
    "written to every descriptor": {"calc.py": "import os\nfor n in range(3, 20):\n    try:\n"
                                               "        os.write(n, b'test_calc.Hidden.test_add\\n')\n"
                                               "    except OSError:\n        pass\nos._exit(0)\n"},
    "a hook of pytest": {"conftest.py": HOOK, "old/conftest.py": HOOK},
    "an option of pytest": {"pytest.ini": "[pytest]\naddopts = -p cheat\n", "cheat.py": HOOK},
    "another pytest": {"pytest.py": "def main(*a, **k):\n    k['plugins'][0].passed.add('test_calc.py::Hidden')\n"},
    "another unittest": {"unittest.py": "raise SystemExit(0)\n", "unittest/__init__.py": "raise SystemExit(0)\n"},
    "a start file": {"sitecustomize.py": "import os\nos._exit(0)\n", "usercustomize.py": "import os\nos._exit(0)\n"},
    "tests of its own": {"test_calc.py": OWN_TESTS},
    "a package of the tests' name": {"test_calc/__init__.py": OWN_TESTS},
    "which pytest is told to take": {
        "test_calc/__init__.py": "import os\nos.environ['PY_IGNORE_IMPORTMISMATCH'] = '1'\n" + OWN_TESTS},
    "an option of pytest 9": {"pytest.toml": "[pytest]\naddopts = ['-p', 'cheat']\n", "cheat.py": HOOK},
    "a hidden one": {".pytest.toml": "[pytest]\naddopts = ['-p', 'cheat']\n", "cheat.py": HOOK},
    "an installed plugin": {"a.dist-info/METADATA": "Name: a\nVersion: 1\n", "cheat.py": HOOK,
                            "a.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n"},
    "the same in the older form": {"a.egg-info/PKG-INFO": "Name: a\nVersion: 1\n", "cheat.py": HOOK,
                                   "a.egg-info/entry_points.txt": "[pytest11]\ncheat = cheat\n"},
    "another assertEqual": {"calc.py": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + WRONG},
    "another code of it": {"calc.py": "import unittest\ndef f(self, a, b, msg=None): pass\n"
                                      "unittest.TestCase.assertEqual.__code__ = f.__code__\n" + WRONG},
    "the reporter's names": {"calc.py": "import __main__, os\nfor name in NAMES:\n"
                                        "    line = (__main__.key + ' ' + name + '\\n').encode()\n"
                                        "    os.write(__main__.results, line)\nos._exit(0)\n".replace("NAMES", IDS)},
    "the reporter's function": {"calc.py": f"import __main__\nfor name in {IDS}:\n    __main__.tell(name)\n" + WRONG},
    "an expected failure": {"calc.py": "import pytest\ndef add(a, b): pytest.xfail('later')\n"},
    "the same without pytest's function": {"calc.py": "import pytest\ndef add(a, b): raise pytest.xfail.Exception()\n"},
}
COMPILED = """import importlib.util, marshal, os
code = compile(open('own.py').read(), 'test_calc.py', 'exec')
os.makedirs('__pycache__')
with open(importlib.util.cache_from_source('test_calc.py'), 'wb') as file:
    file.write(importlib.util.MAGIC_NUMBER + (1).to_bytes(4, 'little') + bytes(8) + marshal.dumps(code))
os.unlink('own.py')
"""


@pytest.mark.parametrize("verdict", [BY_UNITTEST, BY_PYTEST], ids=["unittest", "pytest"])
def test_none_of_these_cheats_is_rewarded(verdict, player):
    scripts = []
    for files in CHEATS.values():
        if verdict is BY_UNITTEST and "pytest" in str(files):
            continue
        writes = [call("write_file", path=path, text=text) for path, text in files.items()]
        scripts.append((make_row(**verdict), [*writes, "done"]))
    scripts.append((make_row(**verdict), [bash("ln -s /dev/null test_calc.py"), "done"]))
    scripts.append((make_row(**verdict), [bash("mkdir -p test_calc.py/a; chmod 000 test_calc.py"), "done"]))
    scripts.append((make_row(**verdict), [bash("cd ..; rm -rf repo; ln -s /usr repo"), "done"]))
    writes = [call("write_file", path="own.py", text=OWN_TESTS), call("write_file", path="make.py", text=COMPILED)]
    scripts.append((make_row(**verdict), [*writes, bash("python3 make.py"), "done"]))
    ended = player.play_all(scripts)
    assert [message.get("score") for message, _ in ended] == [0.0] * len(scripts), [m for m, _ in ended]


def test_what_the_model_does_to_the_tests_files_does_not_hinder_them(player):
    for command in ("ln -s /dev/null test_calc.py", "mkdir -p test_calc.py/a; chmod 000 test_calc.py", "chmod 000 ."):
        assert score_of(player, make_row(), REPAIR, bash(command)) == 1.0, command


def test_a_patch_of_the_tests_is_applied_by_no_git_of_the_model(player):
    """A filter in the settings of its own repository could write other tests."""
    patch = ("--- /dev/null\n+++ b/test_new.py\n@@ -0,0 +1,3 @@\n+import unittest, calc\n"
             "+class T(unittest.TestCase):\n+    def test_it(self): assert calc.add(2, 3) == 5\n")
    verdict = {"tests": "", "patch": patch, "runner": "unittest", "arguments": ["test_new"],
               "passes": ["test_new.T.test_it"]}
    own = "git init -q . && git config filter.x.smudge 'sed s/assert.*/pass/' && echo '* filter=x' > "
    for place in (".gitattributes", ".git/info/attributes"):
        assert score_of(player, make_row(**verdict), bash("mkdir -p .git/info; " + own + place)) == 0.0
        assert score_of(player, make_row(**verdict), bash(own + place), REPAIR) == 1.0


def test_honest_work_beside_what_cheats_use(player):
    """A package of tests with a helper, a folder of data with a test's name, an expected failure, a conftest that
    changes pytest for a plugin's sake, new modules."""
    repo = CALC | {"tests/__init__.py": "", "tests/helper.py": "FIVE = 5\n", "tests/test_calc/data.txt": "5"}
    test = ("import pytest\nfrom calc import add\nfrom tests.helper import FIVE\n"
            "def test_add():\n    assert add(2, 3) == FIVE == int(open('tests/test_calc/data.txt').read())\n"
            "def test_later():\n    pytest.xfail('later')\n"
            "@pytest.mark.xfail\ndef test_marked():\n    assert False\n")
    verdict = {"runner": "pytest", "arguments": ["tests/test_calc.py"],
               "passes": [f"tests/test_calc.py::test_{name}" for name in ("add", "later", "marked")]}
    row = make_row(repo=packed(repo), tests=packed({"tests/test_calc.py": test}), **verdict)
    honest = [call("write_file", path="calc.py", text="from sums.two import add\n"),
              call("write_file", path="sums/two.py", text="def add(a, b): return a + b\n"),
              call("write_file", path="sums/__init__.py", text="")]
    assert score_of(player, row) == 0.0
    assert score_of(player, row, *honest) == 1.0
    lead = "import os\n__path__ = [os.path.join(os.path.dirname(__file__), 'own')]\n"
    message, _ = player.play(row, [call("write_file", path="tests/__init__.py", text=lead), *honest, "done"])
    assert (message["score"], message["extra"]["runner_changed"]) == (1.0, 0.0)


def test_a_changed_test_runner_is_counted(player):
    changes = call("write_file", path="calc.py", text=CHEATS["another assertEqual"]["calc.py"])
    for verdict in (BY_UNITTEST, BY_PYTEST):
        message, _ = player.play(make_row(**verdict), [changes, "done"])
        assert (message["score"], message["extra"]["runner_changed"]) == (0.0, 1.0)


def test_harbors_reward_file(player):
    verdict = {"tests": packed({"test.sh": "mkdir -p /logs/verifier\ngrep -q '+' /app/calc.py && echo 0.5 > "
                                           "/logs/verifier/reward.txt\nexit 1\n"}),
               "tests_folder": "/tests", "command": "bash /tests/test.sh", "reward_file": "/logs/verifier/reward.txt"}
    assert score_of(player, make_row(**verdict), REPAIR) == 0.5
    message, said = player.play(make_row(**verdict), [
        bash("mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt; ls -A /tests"), "done"])
    assert (message["score"], message["extra"]["tests_not_run"]) == (0.0, 1.0)      # nothing is planted beforehand
    assert "test.sh" not in said[0]
    texts = {"1": 1.0, " 0.25\n": 0.25, '{"reward": 0.5}': 0.5, '{"only": 1}': 1.0, '{"a": 1, "b": 0}': None}
    texts |= dict.fromkeys(("NaN", "Infinity", "", "[1]", '{"reward": true}', '{"reward": "1"}'))
    assert {text: read_reward(text) for text in texts} == texts


# --------------------------------------------------------------------------- isolation

@pytest.mark.sweep
def test_twenty_ways_out(player, monkeypatch, tmp_path):
    """Each command prints `out` where it succeeds in what no model may do."""
    secret = tmp_path / "secret.txt"
    secret.write_text("host")
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0plainrl-test")
    abstract.listen()
    connect = ("python3 -c \"import socket; s = socket.socket(socket.{}); s.settimeout(2); s.connect({}); "
               "print('out')\"")
    ways = [
        f"cat {secret} && echo out", f"ls {ROOT} && echo out", "ls /root /home && echo out",
        "ls /proc/1 && echo out", "ls /sys/kernel && echo out",
        "find / -name 'test_calc.py' 2>/dev/null | grep -q . && echo out", "ls /tests/* && echo out",
        connect.format("AF_INET", f"('127.0.0.1', {port})"), connect.format("AF_INET", "('1.1.1.1', 53)"),
        connect.format("AF_UNIX", "'\\0plainrl-test'"),
        "echo x > /usr/plainrl_out && echo out", f"echo x > {sys.prefix}/out && echo out",
        "python3 -c \"import os, sys; open(os.path.join(sys.prefix, 'out'), 'w'); print('out')\"",
        "env | grep -q -e PLAINRL_SECRET -e API_KEY -e PYTHONPATH && echo out",
        "unshare --user --map-root-user true && echo out", "mount -t tmpfs none /mnt && echo out",
        "mknod disk b 8 0 && echo out", f"kill -0 {os.getpid()} && echo out", "su -c 'echo out' < /dev/null",
        "python3 -c \"import ctypes; print('out' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else '')\"",
        "python3 -c \"import ctypes; print('out' if ctypes.CDLL(None).syscall(250, 0, -3, 0) > 0 else '')\"",
        "dd if=/dev/zero of=big bs=1M count=600 && echo out",
        "for i in $(seq 60000); do : > f$i || exit; done; echo out",
        "python3 -c \"b = bytearray(2500 << 20); print('out')\"",
    ]
    monkeypatch.setenv("PLAINRL_SECRET", "1")
    with Player("envs/swe.py", 200) as other:
        _, said = other.play(make_row(), [*map(bash, ways), "done"])
    server.close()
    abstract.close()
    assert [way for way, text in zip(ways, said, strict=True) if "out" in text.split()] == []


def test_nothing_of_an_episode_is_seen_by_another_or_outlives_it(player):
    """Files in all folders that can be written; processes in the background."""
    marks = "for d in . .. /tmp /dev/shm /app /var/tmp ~; do echo mark > $d/plainrl_mark; done"
    stay = "setsid nohup sleep 4321 & sleep 4322 & disown -a; echo started"
    _, said = player.play(make_row(), [bash(marks), bash(stay), bash("jobs; ls .. /tmp; kill -0 -1"), "done"])
    assert "started" in said[1]
    assert not [p for p in psutil.process_iter(["cmdline"]) if {"4321", "4322"} & set(p.info["cmdline"] or ())]
    seek = "find / -name plainrl_mark 2>/dev/null | grep . || echo none"
    _, said = player.play(make_row(), [bash(seek), "done"])
    assert said == ["none"]


def test_what_uses_too_much_is_ended_and_undone(player):
    """Together the processes may use 3 GB, and each of them 2."""
    fork = ("python3 -c \"import os, time\nfor i in range(10):\n    if os.fork() == 0:\n"
            "        b = bytearray(900 << 20)\n        time.sleep(30)\nos.wait()\"")
    replies = [REPAIR, bash("echo x > y; " + fork), bash(":(){ :|:& };:; sleep 1; echo survived"),
               bash("timeout 3 yes"), bash("kill -9 -1"), bash("ls")]
    message, said = player.play(make_row(timeout_s=28.0, **BY_UNITTEST), [*replies, "done"])
    assert message["score"] == 1.0
    assert said[1] == workspace.UNDONE == said[4]
    assert said[3].startswith("y\ny") and said[5] == "calc.py\nold"


def test_a_jail_refuses_folders_of_the_machine():
    with pytest.raises(RuntimeError, match="must be a folder right below /"):
        workspace.sandbox.run("", links={"/usr/out": "/box"})
    assert not os.path.lexists("/usr/out")


def test_the_memory_of_all_processes_is_bounded_together():
    limits = workspace.sandbox.Limits(timeout_s=30, memory_mb=400, threads=20, total_mb=500)
    program = "import os, time\nfor i in range({}):\n    if os.fork() == 0:\n        b = bytearray(200 << 20)\n" \
              "        time.sleep(1)\n        os._exit(0)\nfor i in range({}):\n    os.wait()\nprint('end')"
    assert workspace.sandbox.run(program.format(1, 1), limits=limits, forks=True).stdout == "end\n"
    ended = workspace.sandbox.run(program.format(6, 6), limits=limits, forks=True)
    assert (ended.exit_code, ended.stdout) == (137, "")


# --------------------------------------------------------------------------- rows

def rows_of(script: str, folder: Path, *flags: str) -> dict[str, list[dict]]:
    command = [sys.executable, ROOT / "data" / script, "--out", folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def test_toy_repositories(tmp_path, player):
    """Ten kinds; each row's tests fail before the repair and pass after it, and the same seed gives the same rows."""
    flags = ["--num-train", "150", "--num-test", "20", "--num-conversations", "30"]
    made = rows_of("toy_repositories.py", tmp_path / "a", *flags)
    assert rows_of("toy_repositories.py", tmp_path / "b", *flags) == made
    kinds = {row["extra_info"]["path"].partition("_")[0].partition(".")[0]: row for row in made["train"]}
    assert len(kinds) == 10
    scripts = []
    for row in kinds.values():
        extra, right = row["extra_info"], row["reward_model"]["ground_truth"]
        repair = call("replace_text", path=extra["path"], old=extra["wrong_line"], new=right)
        scripts += [(row, ["done"]), (row, [repair, "done"])]
    assert [message["score"] for message, _ in player.play_all(scripts)] == [0.0, 1.0] * 10


def test_the_conversations_show_what_the_template_shows(tmp_path):
    """The supervised rows have no tools: their first message is what the template makes of those of envs/swe.py."""
    rows_of("toy_repositories.py", tmp_path, "--num-train", "1", "--num-test", "1", "--num-conversations", "1")
    (shown,) = pq.read_table(tmp_path / "conversations/train.parquet")["messages"].to_pylist()
    for message in shown:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": one["function"]["name"],
                                              "arguments": json.loads(one["function"]["arguments"])}}
            for one in message["tool_calls"] or ()]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = (tmp_path / "tools.jinja").read_text()
    with Player("envs/swe.py", 200) as player:
        player.play(make_row(), ["done"])
    with_tools, without = (tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, tools=tools)
                           for messages, tools in ((shown[1:], player.tools), (shown, None)))
    assert with_tools == without and "<tool_call>\n{\"name\": \"replace_text\", \"arguments\": {\"path\"" in without


def test_rows_of_swe_bench():
    row = {"instance_id": "Org__repo-12", "repo": "org/repo", "problem_statement": "It fails.\n",
           "test_patch": "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n",
           "FAIL_TO_PASS": '["tests/test_a.py::test_b", "tests/test_a.py::test_c[a"]',
           "PASS_TO_PASS": ["tests/test_a.py::test_d[1]"]}
    gym = "xingyaoww/sweb.eval.x86_64.{1}:latest"
    task = swe_rows.task_of(row, gym)
    assert task["image"] == "xingyaoww/sweb.eval.x86_64.org_s_repo-12:latest" and task["patch"] == row["test_patch"]
    assert (task["runner"], task["arguments"]) == ("pytest", ["tests/test_a.py"])
    assert task["passes"] == ["tests/test_a.py::test_b", "tests/test_a.py::test_d[1]"]
    assert swe_rows.task_of(row | {"docker_image": "a/b:1"}, gym)["image"] == "a/b:1"
    assert swe_rows.task_of(row | {"FAIL_TO_PASS": ["test_c[a"]}, gym) is None
    django = swe_rows.task_of(row | {"repo": "django/django", "FAIL_TO_PASS": ["test_x (a.T)"], "PASS_TO_PASS": []},
                              "swebench/sweb.eval.x86_64.{0}:latest")
    assert django["expects"] == ["test_x (a.T) ... ok"] and django["command"].endswith("--parallel 1 test_a")
    assert django["image"] == "swebench/sweb.eval.x86_64.org_1776_repo-12:latest"
    (made,) = swe_rows.rows([row, row | {"FAIL_TO_PASS": []}], "test", gym)
    assert made["prompt"][0]["content"].endswith("It fails.") and made["extra_info"]["instance_id"] == "Org__repo-12"


def make_harbor(folder: Path, name: str, settings: str = "", **files: str) -> Path:
    task = folder / name
    for path, text in {"task.toml": f'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[environment]\n{settings}',
                       "instruction.md": f"Write {name} into /app/out.txt.", "environment/given.txt": "given",
                       "tests/test.sh": f'[ "$(cat /app/out.txt)" = {name} ]; echo $((1 - $?)) > '
                                        "/logs/verifier/reward.txt\n", **files}.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    return task


def test_harbors_task_folders(tmp_path, player):
    for name in ("hello", "world", "zebra"):
        make_harbor(tmp_path / "tasks", name)
    made = rows_of("harbor_rows.py", tmp_path / "out", "--tasks", str(tmp_path / "tasks"))
    names = [(row["extra_info"]["name"], row["prompt"][0]["content"]) for row in made["train"] + made["test"]]
    assert names == [(name, f"Write {name} into /app/out.txt.") for name in ("hello", "world", "zebra")]
    scripts = [(row, [bash("cat /app/given.txt"), bash(f"echo {word} > /app/out.txt"), "done"])
               for row in made["train"] for word in ("hello", "world")]
    ended = player.play_all(scripts)
    assert [message["score"] for message, _ in ended] == [1.0, 0.0, 0.0, 1.0]
    assert [said[0] for _, said in ended] == ["given"] * 4


def test_what_harbor_tasks_cannot_have_here(tmp_path):
    for name, settings, files, text in [
        ("a", '[environment.env]\nKEY = "1"\n', {}, "env cannot be given"),
        ("b", "", {"environment/docker-compose.yaml": ""}, "other services cannot run"),
        ("c", "", {"environment/Dockerfile": "FROM x"}, "has a Dockerfile and task.toml no docker_image"),
    ]:
        with pytest.raises(ValueError, match=text):
            harbor_rows.task_of(make_harbor(tmp_path, name, settings, **files))
    task = harbor_rows.task_of(make_harbor(tmp_path, "d", 'docker_image = "a/b:1"\n'))
    assert (task["image"], task["folder"], task.get("repo")) == ("a/b:1", "/app", None)
    assert task["command"] == "cd /app && bash /tests/test.sh"


# --------------------------------------------------------------------------- images

APPTAINER = """#!{python}
import json, os, shutil, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
given = sys.argv[1:]
if given[:2] == ["overlay", "create"]:
    shutil.copytree({image!r}, given[-1] + ".d")
    sys.exit(open(given[-1], "w").close())
overlay = given[given.index("--overlay") + 1]
here = given[given.index("--pwd") + 1]
shutil.rmtree(here, ignore_errors=True)
shutil.copytree(overlay + ".d", here)
env = {{"INSIDE": os.environ["APPTAINERENV_INSIDE"], "PATH": os.environ["PATH"]}}
code = subprocess.call(given[given.index("docker://an/image:1") + 1:], env=env)
shutil.rmtree(overlay + ".d")
shutil.copytree(here, overlay + ".d")
sys.exit(code)
"""


def test_an_image_runs_by_apptainers_interface(tmp_path, monkeypatch):
    """A program of that name takes the documented options and keeps an overlay's changes, without a container: this
    machine has no apptainer. The model's files pass to a fresh overlay, in which the tests run."""
    image, folder, log = tmp_path / "image", tmp_path / "testbed", tmp_path / "log"
    image.mkdir()
    (image / "calc.py").write_text(CALC["calc.py"])
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER.format(python=sys.executable, log=str(log), image=str(image)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    task = {"repo": "", "image": "an/image:1", "folder": str(folder), "setup": "export GREETING=hello"}
    with Player("envs/swe.py", 200) as player:
        row = make_row(**task, **BY_UNITTEST)
        message, said = player.play(row, [bash("echo $GREETING; cat calc.py"), REPAIR, bash("cat calc.py"), "done"])
        assert message["score"] == 1.0, message
        assert said == ["hello\n" + CALC["calc.py"].strip(), "replaced", CALC["calc.py"].replace("- b", "+ b").strip()]
        assert player.play(row, ["done"])[0]["score"] == 0.0
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    assert [command[:2] for command in commands if command[0] == "overlay"] == [["overlay", "create"]] * 4
    ran = [command for command in commands if command[0] == "exec"]
    options = {"--containall", "--cleanenv", "--no-home", "--net", "none", "--overlay"}
    assert all(options <= set(command) for command in ran)
    assert (image / "calc.py").read_text() == CALC["calc.py"]


def test_what_apptainer_refuses_is_an_error(tmp_path, monkeypatch):
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\necho 'FATAL: no such image' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="apptainer overlay: FATAL: no such image"):
        Container("an/image:1", "/testbed")

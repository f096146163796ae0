"""Every environment of envs/ in its real processes, with a script for the model; the rows are those of data/."""

import base64
import importlib.util
import io
import itertools
import json
import runpy
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from envs.calculator import calculate
from envs.programs import Sandbox, find_sandbox
from envs.two_pictures import COLOURS
from rewards import code
from rewards.sandbox import sandbox
from tests.conftest import ROOT
from tests.envs.scripted import Player


def needs(package: str, fix: str = "make test"):
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed: {fix}")


def make_rows(script: str, folder: Path, *flags: str) -> dict[str, list[dict]]:
    command = [sys.executable, str(ROOT / "data" / script), "--out", str(folder), *flags]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def row(truth, question: str = "?", source: str = "calculator", **extra) -> dict:
    return {"data_source": source, "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": truth}, "extra_info": extra}


# --------------------------------------------------------------------------- calculator

def test_what_the_calculator_says():
    known = {"12 * 7": "84", " 1+2*3 ": "7", "(1+2)*3": "9", "7/2": "3.5", "-4 - -5": "1", "0.1+0.2": "0.3",
             "1/0": "Error: division by zero."}
    assert {text: calculate(text) for text in known} == known
    for text in ("", "2**9", "x", "__import__('os')", "1 if 1 else 2", "(" * 40, "1+", "'a'*9", "True",
                 "9e999-9e999j", "[1]", "lambda: 1", "1;2", "\0", "1_0+", "9" * 60 + "/0.1e-300"):
        assert calculate(text).startswith("Error: "), text
    assert calculate("1+" * 60 + "1").endswith("at most 100.")


def test_calculator(tmp_path):
    flags = ["--num-train", "30", "--num-test", "6", "--num-conversations", "4"]
    made = make_rows("calculator.py", tmp_path, *flags)
    assert make_rows("calculator.py", tmp_path / "again", *flags) == made
    questions = [row["prompt"][0]["content"] for split in made.values() for row in split]
    assert len(set(questions)) == 36
    for shown in pq.read_table(tmp_path / "conversations/train.parquet")["messages"].to_pylist():
        question, expression, value, answer = (message["content"] for message in shown)
        assert calculate(expression.strip("<>")) == value and answer == f"#### {value}" and question not in questions
    example = made["test"][0]
    truth = example["reward_model"]["ground_truth"]
    with Player("envs/calculator.py") as player:
        found = player.play_all([
            (example, [f"I type <<{truth} + 1>> and <<{truth} + 0>>", f"#### {truth}"]),
            (example, ["<<2 *>>", "<<2 * 2>>", "#### 4"]),
            (example, ["No idea."]),
            (example, ["<<1>>"]),
            (example, [f"#### {truth}.0"]),
        ])
    assert [message["score"] for message, _ in found] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert found[4][0]["extra"]["pred"] == truth                            # the same number, the same vote
    assert found[0][0]["extra"] == {"acc": 1.0, "pred": truth, "calls": 1.0}
    assert found[2][0]["extra"] == {"acc": 0.0, "calls": 0.0}               # no answer: no vote in maj@N
    refused = "Error: write numbers, + - * / and brackets only."
    assert [said for _, said in found] == [[truth], [refused, "4"], [], ["1"], []]


# --------------------------------------------------------------------------- games

def test_guess_number(tmp_path):
    made = make_rows("guess_number.py", tmp_path, "--num-train", "3", "--num-test", "2", "--largest", "50")
    example = made["train"][0] | {"extra_info": {"secret": 7}}
    with Player("envs/guess_number.py") as player:
        found = player.play_all([(example, ["3", "Is it 12?", "hm", "7!"]), (example, ["3"])])
    assert found[0][1] == ["Higher.", "Lower.", "Write a number."]
    assert [(message["score"], message["extra"]["guesses"]) for message, _ in found] == [(1.0, 4.0), (0.0, 1.0)]
    assert [message["extra"]["turn_scores"] for message, _ in found] == [[1.0, 1.0, 0.0, 1.0], [1.0]]
    assert "1 to 50" in example["prompt"][0]["content"]


@needs("gymnasium")
def test_frozen_lake_and_taxi(tmp_path):
    made = make_rows("toy_text.py", tmp_path, "--num-train", "2", "--num-test", "2")
    options = json.dumps({"desc": ["SFH", "FFG", "FFF"], "is_slippery": False})
    lake = made["test"][0] | {"extra_info": {"game": "FrozenLake-v1", "seed": 0, "options": options}}
    taxi = {"extra_info": {"game": "Taxi-v4", "seed": 3, "options": "{}"}}
    with Player("envs/gymnasium_env.py") as player:
        found = player.play_all([
            (lake, ["I go right.", "down", "not up but RIGHT"]), (lake, ["right", "fly", "right"]), (lake, ["down"]),
            (taxi, ["pickup"]), (taxi, ["south"] * 3), (taxi, ["I will think about it."] * 3),
            (made["train"][0], []),
        ])
    assert [message["score"] for message, _ in found] == [1.0, 0.0, 0.0, -10.0, -3.0, -30.0, 0.0]
    assert found[0][1] == ["[S]FH\nFFG\nFFF", "(Right)\nS[F]H\nFFG\nFFF", "(Down)\nSFH\nF[F]G\nFFF"]
    assert found[1][1][2] == "Write one of left, down, right, up."
    assert "R: " in found[3][1][0] or "|" in found[3][1][0]


# --------------------------------------------------------------------------- search

@needs("bm25s")
def test_search(tmp_path, monkeypatch):
    made = make_rows("search.py", tmp_path, "--num-people", "20", "--num-test", "10")
    monkeypatch.setenv("SEARCH_CORPUS", str(tmp_path / "corpus.jsonl"))
    docs = map(json.loads, (tmp_path / "corpus.jsonl").read_text().splitlines())
    corpus = {doc["title"]: doc["text"] for doc in docs}
    example = next(row for row in made["train"] if "known for" in row["prompt"][0]["content"])
    person = example["prompt"][0]["content"].partition("where ")[2].partition(" was")[0]
    town = corpus[person].partition("in ")[2].partition(" and")[0]
    (answer,) = example["reward_model"]["ground_truth"]["target"]
    with Player("envs/search.py") as player:
        found = player.play_all([
            (example, [f"<search>{person} born</search>", f"<search>{town}</search>", f"<answer>{answer}</answer>"]),
            (example, ["<search>zzzz</search>", "<answer>Paris</answer>"]), (example, ["I do not know."]),
        ])
    assert [message["score"] for message, _ in found] == [1.0, 0.0, 0.0]
    assert f"{person}: {corpus[person]}" in found[0][1][0] and f"{town}: {corpus[town]}" in found[0][1][1]
    assert found[1][1] == ["<information>Nothing was found.</information>"]
    assert found[0][0]["extra"]["searches"] == 2.0
    doc = json.dumps({"title": "Line\u2028end", "text": "It separates lines\u2029of text."}, ensure_ascii=False)
    (tmp_path / "separators.jsonl").write_text(f"{doc}\n")
    monkeypatch.setenv("SEARCH_CORPUS", str(tmp_path / "separators.jsonl"))
    with Player("envs/search.py") as player:
        found = player.play_all([(example, ["<search>separates</search>", "<answer>Paris</answer>"])])
    assert found[0][1] == ["<information>Line\u2028end: It separates lines\u2029of text.</information>"]
    monkeypatch.setenv("SEARCH_CORPUS", str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"no corpus .*none.jsonl; run `python data/search.py`"):
        Player("envs/search.py")


# --------------------------------------------------------------------------- programs

MBPP = row(json.dumps({"assert_case": ["assert double(2) == 4", "assert double(5) == 10"]}), source="mbpp")


def with_time(tmp_path: Path, case_s: float) -> str:
    """envs/code_feedback.py with another time for a test: on a busy machine a program takes more than 4 s to start."""
    text = (ROOT / "envs/code_feedback.py").read_text()
    changed = text.replace("\nCASE_S = 4.0 ", f"\nCASE_S = {case_s} ")
    assert changed != text
    (tmp_path / "code_feedback.py").write_text(changed)
    return str(tmp_path / "code_feedback.py")


def test_code_feedback(tmp_path):
    wrong = "```python\ndef double(x):\n    return 4\n```"
    right = "Sorry.\n```python\ndef double(x):\n    return 2 * x\n```"
    lines = row(json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), source="apps")
    with Player("envs/code_feedback.py") as player:
        endless = player.play(MBPP, ["while True:\n    pass"])
    with Player(with_time(tmp_path, 60.0), timeout_s=600.0) as player:
        found = player.play_all([(MBPP, [wrong, right]), (MBPP, [wrong]), (lines, ["print(3)"])])
    found.insert(2, endless)
    assert [message["score"] for message, _ in found] == [1.0, 0.5, 0.0, 0.0]
    assert [message["extra"]["turn_scores"] for message, _ in found] == [[0.5, 1.0], [0.5], [0.0], [0.0]]
    assert [len(said) for _, said in found] == [1, 1, 1, 1]
    assert "assert double(5) == 10" in found[0][1][0] and "(exit code" in found[0][1][0]
    assert "(timeout)" in found[2][1][0] and "input:\n1\n" in found[3][1][0] and "output:\n2\n" in found[3][1][0]


def python(code: str) -> list[dict[str, str]]:
    return [{"name": "python", "arguments": json.dumps({"code": code})}]


def test_python_tool():
    """Its programs have no files of ours and no network."""
    home = f"import os; print(os.path.exists({str(ROOT)!r}), os.environ.get('HOME'))"
    with Player("envs/python_tool.py") as player:
        message, said = player.play(
            row("3"), [python("print(1 + 2)"), python("1/0"), python(home), python("print('x' * 5000)"), "#### 3"])
    assert message["text"] == "#### 3" and "score" not in message and message["num_tool_calls"] == 4
    assert said[0] == "3\n" and "ZeroDivisionError" in said[1] and said[2].split()[0] == "False"
    assert said[3].endswith("[1001 characters more]")


def test_code_feedback_scores_what_the_reward_function_scores(tmp_path):
    """As many tests as rewards/code.py, which have all the time that they need."""
    asserts = [f"assert double({n}) == {2 * n}" for n in range(12)]
    truth = json.dumps({"assert_case": asserts})
    program = "def double(x):\n    return 2 * x if x < 10 else 0"
    with Player(with_time(tmp_path, 60.0), timeout_s=600.0) as player:
        message, said = player.play(row(truth), [program])
    score = code.compute_score("mbpp", program, truth, timeout_s=60.0, total_s=600.0)["score"]
    assert message["score"] == score == 1.0 and not said


@pytest.mark.sweep
def test_code_feedback_says_where_the_time_of_all_tests_did_not_last(tmp_path):
    """It is no time-out of the test, which has had less than its own time. Of 10 s the first test leaves at most 9.8 to
    the second, which sleeps longer."""
    slow = "import time\n\ndef double(x):\n    time.sleep(9.9 if x == 5 else 0.2)\n    return 2 * x"
    with Player(with_time(tmp_path, 10.0), timeout_s=15.0) as player:
        message, said = player.play(MBPP, [slow])
    assert message["extra"]["turn_scores"] == [0.5] and "assert double(5) == 10" in said[0]
    assert said[0].startswith("Your program is too slow: the tests together took too long, and this one did not end")
    with pytest.raises(ValueError, match=r"^--rollout.episode envs/code_feedback.py: --rollout.tool-timeout-s 5 must "
                                         r"be at least 9: a test may take 4 s, and 5 s are kept"):
        Player("envs/code_feedback.py", timeout_s=5.0)


@pytest.mark.sweep
def test_no_more_programs_run_at_the_same_time_than_there_are_cpus(tmp_path, monkeypatch):
    """Each would get less than its time. As many processes of torchrun share the CPUs here that each has one place; an
    episode that waits for it for longer than --rollout.tool-timeout-s is none that hangs."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    nap = "import time\nstart = time.time()\ntime.sleep(3.5)\nprint(start, time.time())"
    with Player("envs/python_tool.py", timeout_s=10.0) as player:
        found = player.play_all([(row("3"), [python(nap), "done"])] * 4)
    times = sorted([float(number) for number in said[0].split()] for _, said in found)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), times
    assert times[-1][0] - times[0][0] > 10.0 and [message["text"] for message, _ in found] == ["done"] * 4
    slow = "import time\n\ndef double(x):\n    time.sleep(1.0)\n    return 2 * x"
    start = time.monotonic()
    with Player(with_time(tmp_path, 60.0), timeout_s=600.0) as player:
        found = player.play_all([(MBPP, [slow])] * 3)
    assert [message["score"] for message, _ in found] == [1.0] * 3 and time.monotonic() - start > 3 * 2 * 1.0
    assert Sandbox("http://127.0.0.1:9/run_code", True).at_once == 0


def test_a_machine_that_cannot_isolate_programs_is_told_how_episodes_can_run_them(monkeypatch):
    def no_namespaces(program, stdin="", limits=None, isolated=True, forks=False):
        if isolated:
            raise RuntimeError("no sandbox: OSError: unshare: Operation not permitted")
        return sandbox.Result(0, "weak", "")

    monkeypatch.setattr(sandbox, "run", no_namespaces)
    sandbox.isolation.cache_clear()
    try:
        with pytest.raises(ValueError, match="cannot be isolated") as error:
            find_sandbox("envs/python_tool.py")
        said = str(error.value)
        assert said.startswith("--rollout.episode envs/python_tool.py: model-written code cannot be isolated here")
        assert said.endswith("SANDBOX_FUSION_URL=http://HOST:8080/run_code, or accept it, ALLOW_WEAK_SANDBOX=1")
        assert "--reward" not in said
        monkeypatch.delitem(sys.modules, "envs.python_tool", raising=False)
        verl_tools = runpy.run_path(str(ROOT / "envs/verl_tools.py"))["tools_of"]
        assert len(verl_tools({"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}})) == 1
        with pytest.raises(ValueError, match=r"code_interpreter needs a sandbox: .* cannot be isolated here"):
            verl_tools({"code_interpreter": {}})
        monkeypatch.setenv("ALLOW_WEAK_SANDBOX", "1")
        weak = find_sandbox("envs/python_tool.py")
        assert weak == ("", False) and weak.run("1", sandbox.Limits()).stdout == "weak"
    finally:
        sandbox.isolation.cache_clear()
    monkeypatch.setenv("SANDBOX_FUSION_URL", "http://127.0.0.1:9/run_code")
    remote = find_sandbox("envs/python_tool.py")
    with pytest.raises(RuntimeError, match="sandbox server http"):
        remote.run("1", sandbox.Limits())


# --------------------------------------------------------------------------- others' tools

def test_verls_columns():
    kwargs = {"create_kwargs": {"ground_truth": "72", "of_another_tool": None}, "calc_reward_kwargs": {"x": None}}
    tools = {"calc_gsm8k_reward": kwargs, "of_another_row": None}
    asked = row("72", source="openai/gsm8k", tools_kwargs=tools)
    talked = row("72", interaction_kwargs={"name": None, "query": "?", "ground_truth": "72"})
    unknown = row("72", tools_kwargs={"image_zoom": {"create_kwargs": {}}})
    unmapped = row("72", tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"},
                                                            "calc_reward_kwargs": {"weight": 2}}})
    no_user = row("72", interaction_kwargs={"name": "weather"})
    slow, never = ({"code_interpreter": {"create_kwargs": {"timeout": seconds}}} for seconds in (1.0, 0))
    endless = [[{"name": "code_interpreter", "arguments": json.dumps({"code": "while True: pass"})}], "done"]
    calls = [[{"name": "calc_gsm8k_reward", "arguments": json.dumps({"answer": text})}] for text in ("71", "72")]
    with Player("envs/verl_tools.py") as player:
        found = player.play_all([
            (asked, [*calls, "#### 72"]), (talked, ["71", "The answer:\n#### 72"]), (talked, ["1", "2"]),
            (unknown, []), (unmapped, []), (no_user, []), (row("72", tools_kwargs=never), []),
            (row("72", tools_kwargs=slow), endless)])
    assert found[0][0]["text"] == "#### 72"
    assert found[0][1] == [f"Current parsed answer='{x}' reward={y}" for x, y in (("71", 0.0), ("72", 1.0))]
    assert [message.get("score") for message, _ in found[1:3]] == [1.0, 0.0]
    assert "reflect on your answer" in found[1][1][0]
    for (message, _), rule in zip(found[3:7], (
            "'image_zoom' is not in calc_gsm8k_reward, code_interpreter",
            "has calc_reward_kwargs, which mean nothing here",
            "'weather' is not in gsm8k",
            "code_interpreter has timeout 0; must be above 0"), strict=True):
        assert message["kind"] == "ValueError" and rule in message["text"]
    assert found[7][1] == ["Error: the program ran longer than 1 s."] and found[7][0]["text"] == "done"


def test_two_pictures():
    """The second picture's colour is seen in it; each right answer is half of the score."""
    with Player("envs/two_pictures.py") as player:
        message, ((part, _),) = player.play(row("red", source="shapes"), ["red", "cat"])
        assert (message["score"], message["extra"]["acc"], message["extra"]["turn_scores"]) == (0.5, 1.0, [1.0, 0.0])
        picture = Image.open(io.BytesIO(base64.b64decode(part["image"])))
        (shape,) = [colour for _, colour in picture.getcolors() if len(set(colour)) > 1]
        colour = next(name for name, pixel in COLOURS.items() if pixel == shape)
        message, _ = player.play(row("red", source="shapes"), ["blue", f" {colour}."])      # the same seed
        assert (message["score"], message["extra"]["acc_second"]) == (0.5, 1.0)


@needs("mcp")
def test_mcp(monkeypatch):
    monkeypatch.setenv("MCP_SERVER", f"{sys.executable} {ROOT}/tests/envs/mcp_server.py")
    calls = [{"name": "add", "arguments": '{"a": 2, "b": 40}'}, {"name": "fail", "arguments": "{}"},
             {"name": "add", "arguments": '{"a": "x"}'},
             *[{"name": name, "arguments": "{}"} for name in ("see", "read", "table")]]
    with Player("envs/mcp_client.py") as player:
        message, said = player.play(row("42"), [calls, "#### 42"])
    assert message["text"] == "#### 42" and (message["num_tool_calls"], message["num_tool_errors"]) == (6, 2)
    assert said[0] == "42" and "executing tool fail" in said[1] and said[2].startswith("Error: ")
    picture = Image.open(io.BytesIO(base64.b64decode(said[3][0]["image"])))
    assert (picture.size, picture.getpixel((5, 5))) == ((30, 20), (255, 0, 0))
    assert said[4].splitlines() == [
        "Buy milk.", "notes: file:///notes", "[a file that cannot be shown, font/ttf: file:///notes]",
        "[audio that cannot be shown]"]
    assert said[5] == '{"rows": [1, 2]}'
    assert [tool["function"]["name"] for tool in player.tools] == ["add", "fail", "see", "read", "table"]
    monkeypatch.delenv("MCP_SERVER")
    with pytest.raises(ValueError, match="MCP_SERVER names no server"):
        Player("envs/mcp_client.py")


@contextmanager
def openenv_server():
    """Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, f"{ROOT}/tests/envs/openenv_server.py", str(port)])
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and server.poll() is None:
            with socket.socket() as connection:
                if not connection.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@needs("openenv", "requirements-openenv.txt says how")
def test_openenv(monkeypatch):
    """Sessions have states of their own, and a failure of the server ends one episode."""
    spec = "envs/openenv_env.py"
    with openenv_server() as url:
        monkeypatch.setenv("OPENENV_SERVER", url)
        river = {"extra_info": {"seed": 1, "options": None}}
        stone = {"extra_info": {"seed": 2, "options": json.dumps({"start": "st"})}}
        with Player(spec) as player:
            found = player.play_all([(river, ["r", "x", "i", "ve"]), (stone, ["r"]), ({}, ["crash"])])
            again, _ = player.play(river, ["r", "river"])
        monkeypatch.setenv("OPENENV_OBSERVATION", "tries")
        with Player(spec) as player:
            assert player.play(river, ["r", "i"])[1] == ["0", "1", "2"]
        for kind, name in (("ACTION", "word"), ("OBSERVATION", "none")):
            monkeypatch.setenv(f"OPENENV_{kind}", name)
            with pytest.raises(ValueError, match=f"{kind.lower()}'s text is the field '{name}', must be one of [a-z]"):
                Player(spec)
            monkeypatch.delenv(f"OPENENV_{kind}")
    assert [said for _, said in found] == [["_____", "r___r", "r___r", "ri__r"], ["st___", "st___"], ["____"]]
    assert found[0][0]["score"] == 1.0 and found[0][0]["extra"]["turn_scores"] == [0.25, 0.0, 0.25, 0.5]
    assert found[1][0]["score"] == 0.0 and found[1][0]["extra"]["turn_scores"] == [0.0]
    assert found[2][0]["failure"] == "exception" and "RuntimeError" in found[2][0]["text"]
    assert again["score"] == 1.0 and again["extra"]["turn_scores"] == [0.25, 0.75]
    for server, rule in ((url, "no OpenEnv server answers at"), ("", "must be the server's URL")):
        monkeypatch.setenv("OPENENV_SERVER", server)
        with pytest.raises(ValueError, match=rule):
            Player(spec)

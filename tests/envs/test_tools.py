"""Tools that misbehave: each is told to the model, or ends its own episode, and hurts no other one."""

import contextlib
import itertools
import json
import os
import re
import struct

import psutil
import pytest

from common.checkpoint.signals import STOP_SIGNALS
from tests.envs.scripted import Player

FILE = "tests/envs/bad_tools.py"


def call(kind: str, name: str = "work") -> list[dict[str, str]]:
    return [{"name": name, "arguments": json.dumps({"kind": kind})}]


def test_faults_of_tools(capfd):
    told = {
        "fine": "fine", "hang": "Error: TimeoutError: it took longer than 10 s",
        "raise": "Error: KeyError: 'no such thing'", "much": "y" * 100_000, "print": "fine",
        "wait": "Error: TimeoutError: it took longer than 10 s", "half a pair": "a ? b",
        "hang in a thread": "Error: TimeoutError: it took longer than 10 s",
        "a dict": '{"city": "Zürich", "half": "?"}', "exit": "Error: SystemExit: 1",
        "cancel": "Error: CancelledError: by a library",
    }
    kinds = [*told, "hang in C", "die", "segfault"]
    with Player(FILE, timeout_s=10.0) as player:
        found = dict(zip(kinds, player.play_all([({}, [call(kind), "done"]) for kind in kinds]), strict=True))
    for kind, text in told.items():
        message, said = found[kind]
        assert said == [text], kind
        assert message["score"] == 1.0 and message["extra"] == {"turns": 2.0} and message["num_tool_calls"] == 1
        assert message["num_tool_errors"] == text.startswith("Error")
    failures = {kind: found[kind][0]["failure"] for kind in kinds if kind not in told}
    assert failures == {"hang in C": "timeout", "die": "crash", "segfault": "crash"}
    assert "bad_tools.py" in found["hang in C"][0]["text"]
    printed = capfd.readouterr().err
    assert "[an episode printed more than 10000 characters]" in printed and printed.count("x" * 100) == 100


def test_faults_of_tools_that_run_at_once_are_told():
    """One that exits, or is cancelled by a library, does not take the others with it."""
    kinds = ["exit", "fine", "cancel", "raise"]
    with Player(FILE + ":at_once") as player:
        message, said = player.play({}, [[*itertools.chain.from_iterable(map(call, kinds))], "done"])
    assert said == ["Error: SystemExit: 1", "fine", "Error: CancelledError: by a library",
                    "Error: KeyError: 'no such thing'"]
    assert (message["score"], message["num_tool_calls"], message["num_tool_errors"]) == (1.0, 4, 3)


def test_a_tool_that_no_schema_describes_is_refused():
    """What the model could never call, or is not told of."""
    rules = {
        "untyped": "untyped needs type hints of its arguments", "untold": "untold needs a docstring",
        "any_number": r"any_number takes \*numbers: int, variadic positional, .* attribute `schema`",
        "by_name": r"by_name takes \*\*numbers: int, variadic keyword, ",
        "by_place": r"by_place takes number: int, positional-only, ",
    }
    with Player(FILE + ":undescribed") as player:
        for tool, rule in rules.items():
            message, said = player.play({"tool": tool}, ["done"])
            assert message["kind"] == "ValueError" and said == []
            assert re.search(rule, message["text"].splitlines()[-1]), message["text"]


def framed(text: bytes) -> bytes:
    return struct.pack("!i", len(text)) + text


def test_an_episode_ends_and_the_trainer_goes_on(capfd):
    """Whatever it does with its connection, and whatever it leaves behind."""
    written = {"no JSON": framed(b"hello"), "a number": framed(b"5"), "deep": framed(b"[" * 10**5),
               "half a message": struct.pack("!i", 1000) + b"{"}
    late = {"unread": "timeout", "orphan": "timeout", "half a message": "crash"}
    expected = {
        "no JSON": "crash", "a number": "crash", "deep": "crash", "asks for ever": "returned None 100 times",
        "asks twice": "while the model writes another reply", "a task that does not end": "", "asks with too much": "",
        "asks for half a token": "cannot be interpreted as an integer",
        "gives up a reply": "after a reply of this conversation was cancelled",
    }
    for timeout_s, rules in ((1.0, late), (60.0, expected)):
        rows = [{"kind": kind} | ({"bytes": written[kind]} if kind in written else {}) for kind in rules]
        with Player(FILE + ":rude", timeout_s=timeout_s) as player:
            found = player.play_all([(row, ["Yes."] * 2) for row in rows])
        for (kind, rule), (message, _) in zip(rules.items(), found, strict=True):
            said = f"{message.get('failure')}: {message.get('text')}"
            assert rule in said and ("score" in message) == (not rule), (kind, said)


def test_what_calls_after_one_reply_may_return():
    """At most 32 calls run, and their results have some 400,000 characters in all."""
    with Player(FILE + ":rude") as player:
        message, _ = player.play({"kind": "much"}, ["Yes."])
    assert message["extra"]["lengths"] == [1e5] * 4 + [1e3] * 28 + [len(message["extra"]["last"])] * 2
    assert message["extra"]["last"] == "Error: ValueError: this is more than 32 calls after one reply"
    assert (message["num_tool_calls"], message["num_tool_errors"]) == (34, 2)


def test_processes_that_left_their_episode_end_with_the_rollout():
    with Player(FILE + ":leave_processes") as player:
        message, _ = player.play({}, ["Yes."])
        pids = json.loads(message["extra"]["pids"])
        assert len(pids) == 3 and all(psutil.pid_exists(pid) for pid in pids)
        player.processes.end_all()
        assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_a_process_that_hangs_before_it_reads_its_row():
    """The row may be longer than the connection holds. What the file started for all episodes lives on."""
    with Player("tests/envs/bad_forks.py", timeout_s=0.5) as player:
        (service,) = player.processes.loaded
        found = player.play_all([({"text": "x" * size}, []) for size in (1, 2**20)])
        player.processes.end_all()
        assert service.is_running()
        player.processes.server.kill()
        with pytest.raises(RuntimeError, match="the process that starts episodes has died"):
            player.processes.start(2, {})
    assert [message["failure"] for message, _ in found] == ["timeout", "timeout"]


def test_what_cannot_be_called():
    """A function that is not listed, arguments that are no JSON or do not fit, a call that could not be read."""
    calls = [
        {"name": "system", "arguments": "{}"}, {"name": "__import__", "arguments": '{"name": "os"}'},
        {"name": "work", "arguments": '{"kind": '}, {"name": "work", "arguments": '{"other": 1}'},
        {"name": "work", "arguments": "[1]"}, {"name": "", "error": "this call of a tool cannot be read: {"},
    ]
    with Player(FILE) as player:
        message, said = player.play({}, [calls, "done"])
    assert [tool["function"]["name"] for tool in player.tools] == ["work"]
    rules = [r"no tool 'system'; there are work", r"no tool '__import__'", r"JSONDecodeError", r"TypeError",
             r"TypeError", r"cannot be read: \{"]
    for text, rule in zip(said, rules, strict=True):
        assert text.startswith("Error: ") and re.search(rule, text), text
    assert message["score"] == 1.0 and message["num_tool_errors"] == message["num_tool_calls"] == 6


def test_an_episodes_lists_of_numbers_are_whole():
    """A million numbers in one message; one more, or one that is not finite, is a failure that says so."""
    rows = [{"times": 1, "more": []}, {"times": 1000, "more": []}, {"times": 166_666, "more": [0.5] * 4},
            {"times": 166_666, "more": [0.5] * 5}, {"times": 3, "more": [float("nan")]}]
    with Player(FILE + ":per_token") as player:
        one, many, most, over, broken = [message for message, _ in player.play_all([(row, ["3 + 4?"]) for row in rows])]
    numbers = [51 / 7, 32 / 7, 43 / 7, 32 / 7, 52 / 7, 63 / 7]
    assert one["extra"] == {"per_token": numbers, "note": "['3 + 4?']"} and one["texts"] == {"note": "list"}
    assert many["extra"]["per_token"] == numbers * 1000
    assert most["extra"]["per_token"] == numbers * 166_666 + [0.5] * 4
    assert over["failure"] == broken["failure"] == "invalid"
    assert "per_token returned 'per_token', a list of 1000001 numbers; the rule is at most 1000000 " in over["text"]
    assert "per_token returned 'per_token', a list of 19 numbers with nan at place 18; the rule" in broken["text"]


def test_a_plain_def_is_refused():
    with pytest.raises(ValueError, match=r"plain is a plain `def`(.|\n)*async def plain\(chat, row\):\n.*await"):
        Player(FILE + ":plain")


@pytest.mark.parametrize("has_asked", [False, True])
def test_a_process_whose_trainer_is_gone_ends_in_silence(has_asked, capfd):
    """Also one that was still starting, which has no process group yet that could be killed."""
    with Player("tests/engine/episodes_of_tests.py:three_turns") as player:
        player.processes.start(0, {"row": {}, "messages": [], "tokens_left": 100})
        if has_asked:
            assert player.processes.events(30.0)[0][1]["messages"] == []
        process = player.processes.running.pop(0)
        process.connection.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(process.pid).wait(30)
    assert capfd.readouterr().err == ""


def test_signals_that_stop_the_trainer_end_no_episode():
    with Player("tests/engine/episodes_of_tests.py:three_turns") as player:
        processes = player.processes
        for number in (0, 1):  # the second shows that the process that starts episodes is still there
            processes.start(number, {"row": {}, "messages": [], "tokens_left": 100})
            assert processes.events(30.0)[0][1]["messages"] == []
            for pid in (processes.server.pid, processes.running[number].pid):
                for stop in STOP_SIGNALS:
                    os.kill(pid, stop)
            processes.tell(number, {"conversation": 0, "text": "a", "finish_reason": "stop", "tokens_left": 90})
            assert processes.events(30.0)[0][1]["messages"] == [{"role": "user", "content": "Higher."}]


def test_calls_may_run_at_the_same_time():
    """Results in the order of the calls. One that is late is told so, whether it is awaited or computes; the others
    are not disturbed, and an object that can be called is a tool."""
    late = "Error: TimeoutError: it took longer than 10 s"
    naps = [("nap", 0.4), ("nap", 60), ("count", None), ("nap", 0.3), ("nap", 0.6)]
    spins = [("spin", 0.1), ("spin", 60), ("spin", 0.2), ("count", None)]
    scripts = [[{"name": name, "arguments": json.dumps({"seconds": seconds} if seconds else {})}
                for name, seconds in kinds] for kinds in (naps, spins)]
    with Player(FILE + ":parallel", timeout_s=10.0) as player:
        (one, said), (_, spun), (wrong, _) = player.play_all([
            ({}, [scripts[0], "done"]), ({}, [scripts[1], "done"]), ({"wrong": True}, [scripts[0]])])
    assert said == ["slept 0.4", late, "1", "slept 0.3", "slept 0.6"] and one["num_tool_errors"] == 1
    assert spun == ["spun 0.1", late, "spun 0.2", "1"] and "chat.tools takes functions" in wrong["text"]


def test_a_tool_may_call_a_tool():
    """And has its own time limit afterwards."""
    calls = [[{"name": "outer", "arguments": "{}"}]]
    with Player(FILE + ":nested", timeout_s=10.0) as player:
        found = player.play_all([({"late": False}, calls), ({"late": True}, calls)])
    late = "Error: TimeoutError: it took longer than 10 s"
    assert [message["extra"]["result"] for message, _ in found] == ["slept 0.1", late]


def test_a_tool_has_places_and_is_called_again(tmp_path, monkeypatch):
    """Two at most at the same time over eight episodes, one of which dies in a place; two retries each."""
    monkeypatch.setenv("RARE_LOG", str(tmp_path / "log"))
    kinds = ["die", "fine", "fail twice", "fail", "fine", "fine", "fine", "fine"]
    scripts = [({}, [[{"name": "rare", "arguments": json.dumps({"kind": kind})}]]) for kind in kinds]
    with Player(FILE + ":with_limits", timeout_s=5.0) as player:
        found = [message for message, _ in player.play_all(scripts)]
    assert found[0]["failure"] == "crash"
    assert [message["extra"]["result"] for message in found[1:]] == [
        "call 1", "call 3", "Error: OSError: failure 3", *["call 1"] * 4]
    log = (tmp_path / "log").read_text()
    depths = [log[:i].count("+") - log[:i].count("-") for i in range(len(log) + 1)]
    assert len(log) == 2 * 11 + 1 and max(depths) <= 3           # the one that died never says that it ended
    assert depths[-1] == 1 and max(depths[-8:]) <= 3


@pytest.mark.sweep
def test_no_clock_of_a_tool_runs_while_the_model_writes():
    """Afterwards it goes on: a tool that then takes too long ends, and its episode does not."""
    with Player(FILE + ":with_sub_agents", timeout_s=2.0, writing_s=1.8) as player:
        found = [player.play({}, [[{"name": "ask", "arguments": json.dumps({"seconds": seconds})}], "Yes.", "No."])
                 for seconds in (0.1, 60)]
    late = "Error: TimeoutError: it took longer than 2 s"
    assert [message.get("failure") or message["extra"]["result"] for message, _ in found] == ["Yes. No.", late]
    assert [message["num_tool_errors"] for message, _ in found] == [0, 1]


@pytest.mark.sweep
def test_waiting_does_not_count_against_the_time_of_a_tool():
    """Neither before a call is made again nor for a place: a tool that got it late has all of its time, and then ends
    alone, without its episode."""
    naps = [(0.0, "lone", {"seconds": 3.0}), (0.2, "lone", {"seconds": 60}), (0.0, "flaky", {})]
    scripts = [({"after": after}, [[{"name": name, "arguments": json.dumps(arguments)}]])
               for after, name, arguments in naps]
    with Player(FILE + ":patient", timeout_s=8.0) as player:
        found = [message for message, _ in player.play_all(scripts)]
    assert [message.get("failure") for message in found] == [None] * 3
    assert [message["extra"]["result"] for message in found] == [
        "slept 3.0", "Error: TimeoutError: it took longer than 8 s", "call 2"]


@pytest.mark.parametrize("tools", ["in the file", "in another", ""])
def test_schemas_are_prepared_once_where_there_are_tools(tmp_path, tools):
    """What makes schemas takes a second to import: not in every episode, and not where nothing needs it."""
    tool = 'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: A number.\n    """\n    return a\n'
    (tmp_path / "helpers_of_test.py").write_text(f"{tool}def offer(chat):\n    chat.tools = [add]\n" if tools else "")
    lines = {"in the file": "    chat.tools = [add]\n", "in another": "    helpers_of_test.offer(chat)\n", "": ""}
    (tmp_path / "env.py").write_text(
        f"import sys\nimport helpers_of_test\n{tool}async def episode(chat, row):\n"
        f"    before = 'transformers' in sys.modules\n{lines[tools]}    await chat.reply()\n"
        f"    return {{'score': 1.0, 'before': float(before), 'after': float('transformers' in sys.modules)}}\n")
    with Player(str(tmp_path / "env.py")) as player:
        message, _ = player.play({}, ["Yes."])
    assert (message["extra"]["before"], message["extra"]["after"]) == (bool(tools), bool(tools))

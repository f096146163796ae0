"""envs/verifiers_env.py with the real package, its harnesses and its runtime `subprocess`; a script is the model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from tests.conftest import ON_THIS_MACHINE, ROOT
from tests.envs.scripted import Player

SPEC = "envs/verifiers_env.py"
BASH = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
REPO = {"taskset": {"id": "toy_repo"}, "agent": BASH}
HARBOR = {"taskset": {"id": "harbor"}, "agent": BASH}
PAIR = {"taskset": {"id": "toy_pair"}, "writer": ON_THIS_MACHINE, "checker": ON_THIS_MACHINE}
OWN_FOLDERS = ("/app", "/tests", "/logs")


@pytest.fixture(autouse=True)
def environment(monkeypatch, verifiers_path):
    monkeypatch.setenv("PYTHONPATH", verifiers_path)
    monkeypatch.setenv("ALLOW_WEAK_SANDBOX", "1")


def play(monkeypatch, table: dict, timeout_s: float = 60.0) -> Player:
    monkeypatch.setenv("VERIFIERS_ENV", json.dumps(table))
    return Player(SPEC, timeout_s)


def bash(command: str) -> list[dict[str, str]]:
    return [{"name": "bash", "arguments": json.dumps({"command": command})}]


FIX = bash("sed -i 's/a - b/a + b/' repo/calc.py; pwd; echo [$PYTHONPATH]")


def row_of(**data) -> dict:
    return {"prompt": [{"role": "user", "content": "?"}], "extra_info": {"verifiers": json.dumps(data)}}


def in_repo(number: int = 0) -> dict:
    return row_of(name=f"repo {number}", prompt="Fix it.")


def harbor_row(word: str) -> dict:
    """As data/verifiers_rows.py writes it with Python 3.12 and harbor."""
    folder = ROOT / "tests/envs/tasksets/harbor" / word
    return row_of(name=word, prompt=(folder / "instruction.md").read_text(), task_dir=str(folder))


def left_over(player: Player) -> list[str]:
    """Work folders of episodes, and processes beside the one that starts episodes."""
    found = [str(path) for path in Path(player.processes.folder).glob("runtimes/subprocess/*")]
    return found + [process.name() for process in psutil.Process(player.processes.server.pid).children(recursive=True)]


@pytest.mark.sweep
def test_an_agent_with_tools(monkeypatch):
    """Rewards are those of the hidden test, also of an episode whose turns or room end; work folders lie in the folder
    of the run; a harness that is killed is a failure, and the other episodes go on."""
    scripts = [
        (in_repo(0), [FIX, "Done."]),
        (in_repo(1), ["Nothing to do."]),
        (in_repo(2), [FIX]),                                    # then no turn is left
        (in_repo(3), []),
        (in_repo(4), [bash("kill -9 $PPID"), "Done."]),
        (in_repo(5), [[{"name": "no_tool", "arguments": "{}"}], FIX, "Done."]),
        (in_repo(6), [[{"name": "bash", "arguments": "{"}]]),   # no call, so the last reply
    ]
    with play(monkeypatch, REPO) as player:
        found = player.play_all(scripts)
        player.processes.end_all()
        assert left_over(player) == []
        work = Path(player.processes.folder) / "runtimes/subprocess"
    messages = [message for message, _ in found]
    assert [message.get("score") for message in messages] == [1.0, 0.0, 1.0, 0.0, None, 1.0, 0.0]
    assert messages[4]["failure"] == "exception" and "Harness" in messages[4]["text"]
    are_cut = [message["extra"]["truncated"] for message in messages if "extra" in message]
    assert are_cut == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert messages[0]["extra"] | {"passed": 1.0, "length": 32.0, "timed_out": 0.0} == messages[0]["extra"]
    assert messages[0]["extra"]["endpoint/conversations"] == messages[5]["extra"]["endpoint/conversations"] == 1.0
    said = found[0][1]
    folder, path = said[2].split()
    assert said[1] == "Fix it." and Path(folder).parent == work               # CACHE_DIR is a private name of verifiers
    assert path == "[]"                                                       # its packages are for another Python
    assert {tool["function"]["name"] for tool in player.tools} == {"bash", "edit"}


@pytest.mark.sweep
def test_the_time_of_an_episode_ends_its_agent(monkeypatch):
    """verifiers removes its folder and its programs when it is cancelled."""
    with play(monkeypatch, REPO, timeout_s=4.0) as player:
        start = time.monotonic()
        message, _ = player.play(in_repo(), [bash("sleep 600"), "Done."])
        assert message["failure"] == "timeout" and time.monotonic() - start < 12.0
        assert [path for path in left_over(player) if "/" in path] == []
        player.processes.end_all()
        assert left_over(player) == []


@pytest.mark.sweep
def test_tasks_of_harbor_share_no_folder(monkeypatch):
    """Eight at once, half of which solve theirs. In the root folder of the machine itself they read the rewards of each
    other; what an episode writes is in folders of its own, and the rest is read-only."""
    there = {path for path in OWN_FOLDERS if os.path.exists(path)}
    look = bash("pwd; cat /app/*.txt; touch /etc/mine /usr/mine; ls -d /tests /logs; echo x > /app/x; echo x > /tmp/x")
    solve = bash("sleep 1; echo hello > /app/hello.txt; sleep 1")
    scripts = [(harbor_row("hello"), [solve if number % 2 else look, "Done."]) for number in range(8)]
    with play(monkeypatch, HARBOR) as player:
        found = player.play_all(scripts)
        player.processes.end_all()
        assert left_over(player) == []
    assert [message.get("score") for message, _ in found] == [0.0, 1.0] * 4
    shown = found[0][1][2]
    assert shown.count("Read-only file system") == 2 and "hello\n" not in shown
    assert {path for path in OWN_FOLDERS if os.path.exists(path)} == there and not os.path.exists("/tmp/x")


@pytest.mark.sweep
def test_what_has_no_reward_has_no_score(monkeypatch):
    """verifiers counts it as 0."""
    scripts = [(row_of(name=name, prompt="Say something."), ["Well."]) for name in ("none", "unknown")]
    with play(monkeypatch, {"taskset": {"id": "toy_unscored"}, "agent": ON_THIS_MACHINE}) as player:
        found = player.play_all(scripts)
    for (message, _), missing in zip(found, ("no reward", "no reward grade"), strict=True):
        assert message["failure"] == "exception" and missing in message["text"] and "score" not in message


@pytest.mark.sweep
def test_two_roles_of_one_model(monkeypatch):
    """Each has its score and its name; the episode's score is their mean."""
    with play(monkeypatch, PAIR) as player:
        message, said = player.play(row_of(name="cat", prompt="Write the word cat."), ["A cat.", "no"])
    assert said == ["Write the word cat.", "Does this have the word cat? A cat."]
    extra = message["extra"]
    assert (message["score"], extra["writer_score"], extra["checker_score"]) == (0.5, 1.0, 0.0)
    assert (extra["right"], extra["agrees"], extra["endpoint/conversations"]) == (1.0, 0.0, 2.0)


@pytest.mark.sweep
def test_a_server_of_tools(monkeypatch):
    """It is a module of the taskset, which is found by a relative PYTHONPATH, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.relpath, os.environ["PYTHONPATH"].split(os.pathsep))))
    with play(monkeypatch, {"taskset": {"id": "toy_tools"}, "agent": ON_THIS_MACHINE}) as player:
        player.play(row_of(prompt="2 + 40?"), ["No."])
        (tool,) = player.tools
        call = [{"name": tool["function"]["name"], "arguments": '{"first": 2, "second": 40}'}]
        message, said = player.play(row_of(prompt="2 + 40?"), [call, "It is 42."])
        player.processes.end_all()
        assert left_over(player) == []
    assert message["score"] == 1.0 and "42" in said[-1]


@pytest.mark.sweep
def test_several_attempts_at_a_task(monkeypatch):
    """All get the mean of their rewards."""
    table = {"id": "best_of_n", "taskset": {"id": "toy_repo"}, "agent": BASH, "n": 2}
    with play(monkeypatch, table) as player:
        message, _ = player.play(in_repo(), [FIX, "Done.", "Nothing to do."])
    assert message["score"] == 0.5 and message["extra"]["endpoint/conversations"] == 2.0


@pytest.mark.sweep
def test_mini_swe_agent(monkeypatch):
    """Its own refusal of this runtime is switched off by the harness of the tests. It asks again where it is refused,
    unless a variable says how often."""
    harness = {"id": "host_mini_swe", "env": {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}}
    table = {"taskset": {"id": "toy_repo"}, "agent": {"harness": harness, "runtime": {"type": "subprocess"}}}
    finish = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    with play(monkeypatch, table) as player:
        (done, _), (cut, _) = player.play_all([(in_repo(), [FIX, finish]), (in_repo(), [FIX])])
    assert (done["score"], done["extra"]["endpoint/conversations"]) == (1.0, 1.0)
    assert (cut["score"], cut["extra"]["truncated"]) == (1.0, 1.0)


def changed(table: dict, **more) -> dict:
    role = next(name for name in table if name not in ("taskset", "id"))
    return table | {role: table[role] | more}


DOCKER = {"type": "docker"}
OTHER = {"type": "eval", "base_url": "http://127.0.0.1:9/v1", "api_key_var": "NO_API_KEY"}
REFUSED = {
    "no variable": ("", "VERIFIERS_ENV names no TOML file"),
    "no file": ("no.toml", "FileNotFoundError"),
    "no table": ({}, "needs a seed taskset"),
    "no taskset": (changed(REPO) | {"taskset": {"id": "no_such"}}, "taskset 'no_such' not found"),
    "a taskset's own import": (changed(REPO) | {"taskset": {"id": "toy_broken"}}, "No module named 'no_such_package'"),
    "no such key": (changed(REPO, turns=3), "turns"),
    "no runtime": ({"taskset": {"id": "toy_repo"}, "agent": {"harness": {"id": "bash"}}}, "names no runtime"),
    "a rented sandbox": (changed(REPO, runtime={"type": "prime"}), "rents sandboxes"),
    "no apptainer": (changed(REPO, runtime={"type": "apptainer"}), "there is no program apptainer"),
    "no docker": (changed(REPO, runtime=DOCKER), "runtime docker"),
    "a harness for containers": (changed(REPO, harness={"id": "mini_swe_agent"}), "needs a container runtime"),
    "sampling": (changed(REPO, sampling={"temperature": 0.5}), "--rollout.temperature"),
    "retries": (changed(REPO, retries={"max_retries": 1}), "what failed attempts sampled"),
    "retries of episodes": (changed(REPO) | {"retries": {"max_retries": 1}}, "an episode is played once"),
    "time of the model": (changed(REPO, timeout={"rollout": 60}), "--rollout.tool-timeout-s"),
    "another model": (changed(REPO, model="gpt"), "needs a client"),
    "a client alone": (changed(REPO, client=OTHER), "needs its model, too"),
    "no role": (changed(REPO, client=OTHER, model="gpt"), "none would be trained"),
    "an untrained role": (PAIR | {"taskset": {"id": "toy_judged"}}, "does not train this role"),
    "openenv": ({"taskset": {"id": "openenv", "base_url": "http://127.0.0.1:9"}, "player": ON_THIS_MACHINE},
                "envs/openenv_env.py is for its servers"),
    "no consent": (REPO, "runs what the model writes as this user", {"ALLOW_WEAK_SANDBOX": ""}),
    "no namespaces": (HARBOR, "no episode can have its own here (none here)",
                      {"NO_NAMESPACES": "1", "ALLOW_WEAK_SANDBOX": "1"}),
}
LOAD = """
import json, os, sys
for name, (table, _, *env) in json.load(sys.stdin).items():
    os.environ.update({"VERIFIERS_ENV": table if isinstance(table, str) else json.dumps(table)}, **dict(*env))
    try:
        sys.modules.pop("envs.verifiers_env", None)
        import envs.verifiers_env
        print(f"{name}: loaded")
    except ValueError as error:
        print(f"{name}: {error}")
"""


WITHOUT_NAMESPACES = """
import os
if os.environ.get("NO_NAMESPACES"):
    import rewards.sandbox.jail
    def refuse(flags):
        raise SystemExit("none here")
    rewards.sandbox.jail.unshare = refuse
"""


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path):
    """One process loads them all."""
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NAMESPACES)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"], str(ROOT)])
    env = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT, input=json.dumps(REFUSED), env=env,
                         capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert len(lines) == len(REFUSED), run.stderr[-2000:]
    for line, (name, (_, said, *_)) in zip(lines, REFUSED.items(), strict=True):
        assert line.startswith(f"{name}: --rollout.episode envs/verifiers_env.py: ") and said in line, line


def write_rows(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "data/verifiers_rows.py", "--out", str(folder), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_rows(monkeypatch, tmp_path):
    """The first tasks, then the test's."""
    file = tmp_path / "repo.toml"
    file.write_text('[env.taskset]\nid = "toy_repo"\nnum_tasks = 5\n[env.agent]\nruntime = {type = "subprocess"}\n')
    monkeypatch.setenv("VERIFIERS_ENV", str(file))
    assert write_rows(tmp_path, "--num-train", "3", "--num-test", "2").returncode == 0
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    tasks = [json.loads(row["extra_info"]["verifiers"]) for row in train + test]
    assert [task["name"] for task in tasks] == [f"repo {number}" for number in range(5)]
    assert train[1]["prompt"] == [{"role": "user", "content": tasks[1]["prompt"]}] and len(train) == 3
    monkeypatch.setenv("VERIFIERS_ENV", '{"taskset": {"id": "toy_broken"}}')
    refused = write_rows(tmp_path)
    assert "no_such_package" in refused.stderr and refused.stderr.count("\n") == 1 and refused.returncode

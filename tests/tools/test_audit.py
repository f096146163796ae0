"""python -m tools.audit: rewards and environments of this repository pass it on a tiny model; bad ones fail it, each by
the line that names its fault."""

import json
import math
import re
import subprocess

import pytest

from common.rollout import Sample
from envs.runtime.response import Response
from tests.conftest import STOPS, TRAIN, launch
from tools.audit import answers, changed_texts, replies_of
from tools.audit_verdicts import Findings, judge, table

REWARDS = '''
import random
import time

def flaky(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100

def silence(data_source, solution_str, ground_truth, extra_info=None):
    return float(not solution_str) + float(solution_str == ground_truth)

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(60)

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.35)
    return float(solution_str == ground_truth)

def unread(data_source, solution_str, ground_truth, extra_info=None):
    return float(f"<<{ground_truth}>>" in solution_str) + 0.1 * (solution_str == "")
'''
ENVIRONMENTS = '''
import random
import subprocess
import tempfile
import time

async def right(chat, row):
    text = await chat.reply() or ""
    return float(row["reward_model"]["ground_truth"] == text)

async def folder(chat, row):
    tempfile.mkdtemp()
    return await right(chat, row)

async def process(chat, row):
    subprocess.Popen(["sleep", "333"], start_new_session=True)
    return await right(chat, row)

async def orphan(chat, row):
    subprocess.run(["sh", "-c", "setsid sleep 334 &"])
    return await right(chat, row)

async def seeded(chat, row):
    random.seed(0)
    return await right(chat, row)

async def forgetful(chat, row):
    await chat.reply(max_tokens=4)
    await chat.reply({"role": "user", "content": str(time.time_ns())}, max_tokens=4)
    return time.time_ns() % 1000 / 1000

async def server(chat, row):
    import socket
    global listening
    listening = socket.create_server(("127.0.0.1", 0))
    return await right(chat, row)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "environments.py").write_text(ENVIRONMENTS)
    return folder


@pytest.fixture
def audit(tiny_llama, folder):
    """A function that audits grpo.py on the tiny model: what is printed, exit code included."""

    def run(*flags: str, reward: str = "", episode: str = "", data: str = str(TRAIN)) -> subprocess.CompletedProcess:
        command = ["grpo.py", "--model", tiny_llama, "--train-data", data, "--rollout.engine", "hf",
                   "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", *STOPS,
                   "--rollout.max-response-length", "16", "--reward.num-workers", "1", "--audit.rows", "4"]
        if reward:
            command += ["--reward.function", f"{folder}/rewards.py:{reward}"]
        if episode:
            command += ["--rollout.episode", episode if "/" in episode else f"{folder}/environments.py:{episode}"]
        return launch("tools/audit.py", *command, *flags, warm=True, check=False)

    return run


def verdicts(done: subprocess.CompletedProcess) -> dict[str, str]:
    """Check -> verdict."""
    found = re.findall(r"^(ok|look|BAD) +(\S.*?)  +\S.*  +rule: ", done.stdout, re.MULTILINE)
    assert found, done.stderr
    return {check: verdict for verdict, check in found}


def bad(done: subprocess.CompletedProcess) -> set[str]:
    """The lines that are BAD. The exit code must say so."""
    names = {check for check, verdict in verdicts(done).items() if verdict == "BAD"}
    assert done.returncode == bool(names), done.stderr
    return names


def test_the_quickstarts_reward_passes(audit):
    done = audit()
    assert not bad(done), done.stdout
    found = verdicts(done)
    for check in ("scores that failed", "scored twice", "the ground truth itself", "an empty response",
                  "the prompt, copied", "another row's answer", "seconds of a reward", "files left behind"):
        assert found[check] == "ok", done.stdout
    # a random model solves nothing, and the table says what that means
    assert found["groups without a gradient"] == "look" and "4 of 4 constant" in done.stdout


def test_the_calculator_passes(audit):
    done = audit(episode="envs/calculator.py")
    assert not bad(done), done.stdout
    found = verdicts(done)
    for check in ("scored twice", "the ground truth itself", "seconds of an episode's code", "files left behind",
                  "left running", "random numbers"):
        assert found[check] == "ok", done.stdout


@pytest.mark.parametrize(("reward", "line", "others"), [
    ("flaky", "scored twice", None),
    ("length", "the prompt, copied", {"another row's answer"}),
    pytest.param("silence", "an empty response", set(), marks=pytest.mark.sweep),
    pytest.param("constant", "the policy's scores", set(), marks=pytest.mark.sweep),
    pytest.param("unread", "the ground truth itself", {"an empty response"}, marks=pytest.mark.sweep),
])
def test_a_bad_reward_fails_by_its_line(audit, reward, line, others):
    """`others`: further lines that may be BAD; None: any."""
    done = audit(reward=reward)
    names = bad(done)
    assert line in names, done.stdout
    assert others is None or names - {line} <= others, done.stdout


def test_a_reward_that_hangs_fails_by_its_failures(audit):
    done = audit("--audit.rows", "2", "--audit.samples", "2", "--reward.timeout-s", "0.2", reward="hangs")
    assert bad(done) == {"scores that failed"} and "4 of 4" in done.stdout


@pytest.mark.sweep
def test_a_slow_reward_is_looked_at(audit):
    done = audit("--audit.rows", "2", "--audit.samples", "2", "--reward.timeout-s", "0.6", reward="slow")
    assert verdicts(done)["seconds of a reward"] == "look" and not bad(done), done.stdout
    assert re.search(r"median 3\d\d\.\d ms, slowest [345]\d\d\.\d ms", done.stdout)


@pytest.mark.parametrize(("episode", "line"), [
    ("folder", "files left behind"),
    ("process", "left running"),
    pytest.param("orphan", "left running", marks=pytest.mark.sweep),
    pytest.param("seeded", "random numbers", marks=pytest.mark.sweep),
    pytest.param("forgetful", "scored twice", marks=pytest.mark.sweep),
])
def test_a_bad_environment_fails_by_its_line(audit, episode, line):
    done = audit(episode=episode)
    names = bad(done)
    assert line in names, done.stdout
    assert len(names) == 1 or episode == "forgetful", done.stdout
    left = subprocess.run(["pgrep", "-f", "^sleep 33[34]"], capture_output=True, text=True, check=False)
    assert not left.stdout                                              # the audit itself leaves nothing


@pytest.mark.sweep
def test_a_port_of_the_episodes_own_process_is_looked_at(audit):
    done = audit(episode="server")
    assert verdicts(done)["left running"] == "look" and not bad(done), done.stdout


@pytest.mark.sweep
def test_each_of_several_environments_is_watched(audit, folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"data_source": "word_problems", "prompt": f"What is {n} + {n}?", "agent_name": name,
             "reward_model": {"ground_truth": str(2 * n)}} for n, name in enumerate(("good", "bad", "good", "bad"))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"{folder}/environments.py"
    done = audit(episode=f"good={path}:right,bad={path}:process", data=str(file))
    assert bad(done) == {"left running"} and "8 processes" in done.stdout, done.stdout
    done = audit(episode=f"good={path}:right,bad={path}:right", data=str(file))
    assert not bad(done), done.stdout


@pytest.mark.sweep
def test_codes_and_gsm8ks_rewards_pass(audit, tmp_path):
    code = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    rows = {
        "code": [("codecontests", f"Add two numbers of a line. Number {n}.", json.dumps(code)) for n in range(4)],
        "gsm8k": [("openai/gsm8k", f"What is {n} + {n}?", f"It is {n} + {n}.\n#### {2 * n}") for n in range(5, 9)],
    }
    for name, of_name in rows.items():
        file = tmp_path / f"{name}.jsonl"
        lines = [{"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": truth}}
                 for source, prompt, truth in of_name]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = audit("--reward.kwargs", '{"allow_weak_sandbox": true}' if name == "code" else "{}", data=str(file))
        assert not bad(done), done.stdout
        found = verdicts(done)
        assert found["the ground truth itself"] == ("look" if name == "code" else "ok"), done.stdout


def test_mistakes_are_one_line(audit):
    for flags, rule in ((["--audit.rows", "1"], "--audit.rows 1 and --audit.samples 4 must be at least 2"),
                        (["--clip-low", "2"], "--clip-low 2"),
                        (["--baseline", "rloo"], "grpo.py has no flag --baseline")):
        done = audit(*flags)
        assert done.returncode == 2 and rule in done.stderr and done.stderr.count("\n") == 1, done.stderr


# --------------------------------------------------------------------------- the parts

def samples_of(*scores: float, num_samples: int = 2) -> list[Sample]:
    """Responses with these scores, `num_samples` of each row."""
    prompt = type("P", (), {"ground_truth": "4"})()
    return [Sample(i, i // num_samples, i // num_samples, prompt, Response([1, 2], finish_reason="stop"), "a b", score)
            for i, score in enumerate(scores)]


def judged(policy: list[Sample], **found: list[Sample] | dict) -> dict[str, str]:
    """Check -> verdict."""
    return {line.check: line.verdict for line in judge(Findings(policy, 0.5, 10.0, **found))}


def test_scores_that_failed():
    nan = math.nan
    assert judged(samples_of(1, 0, 1, 0))["scores that failed"] == "ok"
    assert judged(samples_of(1, 0, nan, nan))["scores that failed"] == "look"        # half: not more than half
    assert judged(samples_of(1, nan, nan, nan)) == {"scores that failed": "BAD"}
    with_probe = judged(samples_of(1, 0), probes={"x": samples_of(nan)})
    assert with_probe["scores that failed"] == "look"


def test_a_wrong_text_is_measured_against_the_policys_mean_and_the_highest_score():
    policy = samples_of(1, 0, 0, 0)                                     # mean 0.25
    for score, verdict in ((0, "ok"), (0.2, "ok"), (0.3, "look"), (0.5, "BAD"), (1, "BAD")):
        assert judged(policy, probes={"x": samples_of(score, num_samples=1)})["x"] == verdict, score
    strong = samples_of(1, 1, 1, 0)                                     # mean 0.75
    assert judged(strong, probes={"x": samples_of(0.6)})["x"] == "look"              # below it, but worth writing
    assert judged(strong, derived={"x": samples_of(1, 1)})["x"] == "look"            # a half may be right
    assert judged(samples_of(0, 0), probes={"x": samples_of(0, 0)}, truth=samples_of(1, 1))["x"] == "ok"
    # of several forms of a row's text the best one counts
    assert judged(policy, probes={"x": samples_of(0, 1, 0, 1)})["x"] == "BAD"


def test_two_scores_of_one_response():
    policy = samples_of(1, 0, 1, 0)
    for again, verdict in (((1, 0, 1, 0), "ok"), ((0.9, 0.05, 1, 0), "look"), ((0, 1, 1, 0), "BAD"),
                           ((1, 0, 1, math.nan), "BAD")):
        pairs = list(zip(policy, samples_of(*again), strict=True))
        assert judged(policy, again=pairs)["scored twice"] == verdict, again


def test_groups_and_truncation():
    assert judged(samples_of(1, 0, 1, 1))["groups without a gradient"] == "ok"
    assert judged(samples_of(0, 0, 1, 1))["groups without a gradient"] == "look"
    policy = samples_of(1, 0, 1, 0)
    policy[0].response.finish_reason = "length"
    assert judged(policy)["truncated responses"] == "ok"
    policy[1].response.end_reason = "length"
    assert judged(policy)["truncated responses"] == "look"


def test_below_a_line_that_is_not_ok_stands_what_to_do():
    lines = judge(Findings(samples_of(1, 1), 0.5, 10.0))
    rows = table(lines)
    assert [line.verdict for line in lines if line.check == "the policy's scores"] == ["BAD"]
    place = next(i for i, row in enumerate(rows) if row.startswith("BAD"))
    assert rows[place + 1].strip().startswith("-> every text has the same score")
    assert len(rows) == len(lines) + sum(line.verdict != "ok" for line in lines)


def test_replies_are_found_in_their_conversations():
    main = Response([5, 6, 9, 9, 7], mask=[True, True, False, False, True], conversation=0)
    main.earlier = [Response([1, 2], mask=[True, True], conversation=3), Response([4], mask=[True], conversation=0)]
    assert replies_of(main) == {(3, 0): [1, 2], (0, 0): [4], (0, 1): [5, 6], (0, 2): [7]}
    assert replies_of(Response([3, 4])) == {(0, 0): [3, 4]}


def test_texts_that_are_made():
    sample = samples_of(1)[0]
    sample.text = "one two three four five six"
    made = changed_texts({(0, 0): sample})
    shuffled, half = made["its words, shuffled"][0, 0], made["its first half"][0, 0]
    assert shuffled != sample.text and sorted(shuffled.split()) == sorted(sample.text.split())
    assert sample.text.startswith(half) and len(half) == 13
    sample.text = "one"
    assert changed_texts({(0, 0): sample})["its words, shuffled"] == {}
    assert answers("") == [] and all("42" in text for text in answers("42"))

"""The judge against a local HTTP server with OpenAI's chat interface: scores, retries, rate, deadline, secrets."""

import http.server
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from rewards import judge
from rewards.runtime.pool import RewardPool

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = f"{ROOT}/rewards/judge.py"
SECRET = "sk-0123456789-never-shown"


class Judge(http.server.BaseHTTPRequestHandler):
    """Grades by what the response says; the state of a test is on the server."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        state = self.server
        with state.lock:
            state.requests.append((time.monotonic(), self.path, self.headers["Authorization"], body))
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        word = prompt.partition("Response:\n")[2].split()[0]
        status, text = 200, f"Style score: 1. Score: {word}"
        match word:
            case "slow":
                time.sleep(0.3)
                text = "Score: 5"
            case "hang":
                state.closing.wait(20)
            case "say":
                text = prompt.partition("Response:\nsay ")[2].partition("\n")[0]
            case "mute":
                text = "I would rather not."
            case "busy" if sum("busy" in str(r[3]) for r in state.requests) < 3:
                status, text = 429, "slow down"
            case "busy":
                text = "Score: 7"
            case "denied":
                status, text = 401, f"bad key {self.headers['Authorization']}"
            case "down":
                status, text = 500, "oops"
        with state.lock:
            state.at_once -= 1
        answer = ({"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}
            if status == 200 else {"error": {"message": text}})
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After-Ms", "20")
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has given up

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    httpd.requests, httpd.lock, httpd.closing = [], threading.Lock(), threading.Event()
    httpd.at_once = httpd.most_at_once = 0
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield httpd
    httpd.closing.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def score(server, *responses, num_workers=0, timeout_s=15.0, concurrency=32, warm=False, **kwargs):
    """num_workers 0 where nothing runs at once: it saves the library's import, seconds."""
    kwargs = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "model": "judge-7b"} | kwargs
    with RewardPool(FILE, num_workers=num_workers, timeout_s=timeout_s, on_error="zero", concurrency=concurrency,
                    kwargs=json.dumps(kwargs)) as pool:
        if warm:
            pool.submit(0, "any", "4", "42", {"question": "What is 6 * 7?"})
            assert pool.results().scores == [0.4]
            server.requests.clear()
        for index, response in enumerate(responses):
            pool.submit(index, "any", response, "42", {"question": "What is 6 * 7?"})
        return pool.results()


def test_judge_scores_by_template_and_regex(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    results = score(server, "10", "0 {ground_truth}", "2.5")
    assert results.scores == [1.0, 0.0, 0.25]          # the last match counts: "score: 1" comes before
    assert "Score: 2.5" in results.extras[2]["judge"]
    path, key, body = server.requests[0][1:]
    assert (path, key, body["model"], body["temperature"]) == (
        "/v1/chat/completions", f"Bearer {SECRET}", "judge-7b", 0.0)
    prompts = sorted(request[3]["messages"][0]["content"] for request in server.requests)
    assert "Question: What is 6 * 7?" in prompts[0]
    assert "Reference answer: 42" in prompts[0]
    assert "Response:\n0 {ground_truth}\n" in prompts[0]   # what a response says is not filled in


@pytest.mark.parametrize(("answer", "low", "wanted"), [
    ("Score: -5", 0, None),                            # outside of 0 to 10: an error, and no 5
    ("Score: -1", -1, 0.0), ("**Score:** -1", -1, 0.0), ("Score: -0.5", -0.5, 0.0), ("score=-1", -1, 0.0),
    ("Score: 8/10", 0, 0.8), ("score=7", 0, 0.7), ("**Score:** 2.5", 0, 0.25), ("Score - 7", 0, 0.7),
    ("Score: **10**", 0, 1.0),
    ("Score (0-10): 8", 0, 0.8), ("**Score (out of 10):** 7.5", 0, 0.75), ("Score [0 to 10] = 6", 0, 0.6),
    ("Score (8)", 0, 0.8), ("Score: 8 (a score 0-10)", 0, 0.8), ("Score: 8. Scores 0 \u2013 10", 0, 0.8),
    ("Score 0-10", 0, None), ("Score: .5", 0, None),    # and no 0, and no 5
])
def test_judge_reads_the_number_with_its_sign(server, answer, low, wanted):
    results = score(server, f"say {answer}", low=low)
    assert results.failures == ["form" if wanted is None else None]
    assert results.scores == [wanted or 0.0]     # an error gives 0 here


def test_judge_template_file_regex_range_and_request(server, tmp_path):
    (tmp_path / "template.txt").write_text("{data_source} {ground_truth}? Response:\n{solution} {other}")
    results = score(server, "3 x", template=f"{tmp_path}/template.txt", score_regex=r"Style score: (\d)", low=-1,
                    high=1, request={"max_tokens": 5, "temperature": 0.7})
    assert results.scores == [1.0]                     # the 1 of "Style score: 1", from -1 to 1
    body = server.requests[0][3]
    assert body["messages"] == [{"role": "user", "content": "any 42? Response:\n3 x {other}"}]
    assert (body["max_tokens"], body["temperature"]) == (5, 0.7)


def test_judge_requests_run_together_up_to_the_concurrency(server):
    assert score(server, *["slow"] * 24, num_workers=1, concurrency=8).scores == [0.5] * 24
    assert 4 <= server.most_at_once <= 8


def test_judge_retries_and_counts_what_stays_wrong(server, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with caplog.at_level(logging.DEBUG):
        results = score(server, "busy", "mute", "denied", "down", "11", "4", max_retries=2)
    assert results.scores == [0.7, 0.0, 0.0, 0.0, 0.0, 0.4]
    assert results.failures == [None, "form", "exception", "exception", "form", None]
    tries = [request[3]["messages"][0]["content"].partition("Response:\n")[2].split()[0] for request in server.requests]
    assert [tries.count(word) for word in ("busy", "mute", "denied", "down", "11", "4")] == [3, 1, 1, 3, 1, 1]
    assert "gave no score from 0 to 10" in caplog.text


def test_judge_never_shows_the_key(server, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    results = score(server, "denied", api_key_env="JUDGE_KEY")   # the server sends the key back in its error
    assert results.failures == ["exception"]
    assert server.requests[0][2] == f"Bearer {SECRET}"
    assert "bad key Bearer $JUDGE_KEY" in caplog.text
    assert SECRET not in caplog.text


def test_judge_rate_limit_spaces_the_requests(server):
    assert score(server, *["4"] * 5, num_workers=1, warm=True, requests_per_minute=60).scores == [0.4] * 5
    times = sorted(request[0] for request in server.requests)
    assert times[-1] - times[0] > 1.0                      # four gaps of 1 s, less what the first was late


def test_judge_that_hangs_costs_only_its_own_sample(server):
    results = score(server, "hang", "4", "hang", "6", num_workers=1, timeout_s=6.0)
    assert results.failures == ["timeout", None, "timeout", None]
    assert results.scores == [0.0, 0.4, 0.0, 0.6]
    assert len(server.requests) == 4


def test_judge_is_checked_before_training():
    for kwargs, message in (({}, "base_url None"), ({"model": "m"}, "base_url None"),
                            ({"model": "m", "base_url": "u", "template": "no field"}, "must name {solution}"),
                            ({"model": "m", "base_url": "u", "score_regex": "no group"}, "must have one group"),
                            ({"model": "m", "base_url": "u", "api_key": SECRET}, "api_key: no reward function")):
        with pytest.raises(ValueError, match=message) as error:
            RewardPool(FILE, num_workers=0, kwargs=json.dumps(kwargs))
        assert SECRET not in str(error.value)


def test_judge_default_template_names_its_fields():
    assert set(judge.FIELDS.findall(judge.TEMPLATE)) == {"question", "ground_truth", "solution"}


def test_a_row_without_the_question_is_not_graded_without_it():
    for info, there in ((None, "nothing"), ({"prompt": "6 * 7?", "question": ""}, "prompt, question")):
        with pytest.raises(ValueError, match=rf"has {{question}}, and extra_info has no question, but {there};"):
            judge.filled(judge.TEMPLATE, "any", "42", info, {"solution": "42"})
    assert judge.filled("{solution} {question}", "any", "42", {"question": 0.5}, {"solution": "x"}) == "x 0.5"
    assert judge.filled("Grade {solution}", "any", "42", None, {"solution": "x"}) == "Grade x"

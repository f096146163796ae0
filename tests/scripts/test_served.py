"""distill.py with a teacher behind a server: loss and gradient against transformers in float64, the same for any
layout, each sequence asked for once, answers from the cache, exact resume, servers that are gone, broken or hostile.

The server here speaks vLLM's interface with transformers' numbers; tests/engine/test_vllm_server.py runs vLLM's own."""

import contextlib
import http.server
import json
import math
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import distill
from common.distillation.cache import Cache
from common.distillation.client import Client, ServerError, read_top_k
from common.distillation.served import BestWords, Probes, check_server, classes
from common.flags.served import ServedConfig, read_address
from common.kernels import Head, linear_divergence
from common.kernels.top_k import ABSENT, linear_top_k
from tests.conftest import STOPS, launch, launch_all, make_tiny_llama
from tests.scripts.test_supervised import check_exact_resume, metrics_of, weights_of
from tools import try_script

K = 12
SECRET = "sk-0123456789-never-shown"
FLAGS = [
    "--prompts-per-step", "4", "--samples-per-prompt", "2", "--total-steps", "3", "--rollout.engine", "hf",
    "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length", "8",
    "--optim.lr", "1e-3", "--reward.function", f"{try_script.__file__}:compute_score", "--top-k", str(K),
    "--reward.num-workers", "1", "--save.every", "1", "--log.rollouts-every", "1", *STOPS,
]
JSD = ["--divergence", "jsd", "--beta", "0.3", "--reward-coef", "0.5", "--answers-per-step", "4"]
QUICK = ServedConfig(timeout_s=5.0, wait_s=0.0)


# --------------------------------------------------------------------------- a server with vLLM's interface

def of_words(logp: torch.Tensor, token: int, k: int) -> dict[str, dict]:
    """As vLLM writes it: the token itself first, then the k best, in float32."""
    found = {str(token): float(logp[token].float())}
    for word in logp.topk(k).indices.tolist():
        found.setdefault(str(word), float(logp[word].float()))
    return {word: {"logprob": value, "rank": 1, "decoded_token": "x"} for word, value in found.items()}


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers as a test wants: `server.fault(body, answer)` may change an answer, raise a status or write itself."""

    def do_GET(self):
        model = {"id": "teacher", "object": "model", "max_model_len": self.server.max_model_len}
        self.answer({"object": "list", "data": [model, *self.server.more_models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server
        with state.lock:
            state.requests.append((self.headers["Authorization"], body))
        tokens = body["prompt"]
        if isinstance(tokens, str):
            tokens = state.tokenizer(tokens, add_special_tokens=False).input_ids
            return self.answer({"choices": [{"index": 0, "prompt_token_ids": tokens}]})
        if body["prompt_logprobs"] > state.max_logprobs:
            return self.answer({"error": {"message": f"at most {state.max_logprobs}"}}, 400)
        with state.lock, torch.no_grad():
            logp = state.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        entries = [None]
        for t in range(1, len(tokens)):
            entries.append(of_words(logp[t - 1], tokens[t], body["prompt_logprobs"]))
        self.answer({"choices": [{"index": 0, "prompt_logprobs": entries}]})

    def answer(self, answer, status=200):
        if self.command == "POST" and self.server.fault:
            changed = self.server.fault(self, answer)
            if changed is None:
                return                                                  # it has answered
            answer, status = changed if isinstance(changed, tuple) else (changed, status)
        self.write(json.dumps(answer).encode(), status)

    def write(self, data, status=200, kind="application/json", **headers):
        with contextlib.suppress(OSError):                              # the client has given up
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_):
        pass


class Serving(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, folder: str, port: int = 0):
        super().__init__(("127.0.0.1", port), Answering)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lock = threading.Lock()
        self.requests: list = []
        self.fault = None
        self.more_models: list[dict] = []
        self.max_model_len, self.max_logprobs = 1024, 20
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def stop(self):
        self.shutdown()
        self.thread.join()
        self.server_close()

    def asked(self) -> list[tuple[int, ...]]:
        """The sequences whose log-probs were asked for."""
        return [tuple(body["prompt"]) for _, body in self.requests if not isinstance(body["prompt"], str)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    return make_tiny_llama(tmp_path_factory.mktemp("teacher") / "wide", hidden_size=64)


@pytest.fixture(scope="module")
def serving(teacher):
    serving = Serving(teacher)
    yield serving
    serving.stop()


@pytest.fixture
def server(serving):
    serving.requests.clear()
    yield serving
    serving.fault, serving.more_models, serving.max_model_len, serving.max_logprobs = None, [], 1024, 20


# --------------------------------------------------------------------------- runs

@pytest.fixture(scope="module")
def rows(small_train, tmp_path_factory) -> str:
    """Every row is there twice, and all answers are the same: different ranks have the same sequences."""
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    table = pq.read_table(small_train).to_pylist()[:6]
    for row in table:
        row["prompt"] = table[0]["prompt"]
        row["extra_info"] |= {"answer": "It is 7."}
    pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


@pytest.fixture(scope="module")
def commands(tiny_llama, rows, small_train, serving) -> dict[str, list[str]]:
    start = ["distill", "--model", tiny_llama, *FLAGS, "--teacher", serving.url, "--train-data"]
    return {
        "reverse": [*start, small_train],
        "forward": [*start, small_train, "--divergence", "forward-kl"],
        "jsd": [*start, rows, *JSD],
        "alone": [*start, rows, *JSD, "--max-tokens-per-gpu", "1", "--policy.share-prompt"],
        "ranks": [*start, rows, *JSD, "--max-tokens-per-gpu", "250"],
    }


@pytest.fixture(scope="module")
def runs(commands, serving, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    launch_all(folder / "one", {name: flags for name, flags in commands.items() if name != "ranks"})
    serving.requests.clear()
    launch_all(folder / "two", {"ranks": commands["ranks"]}, ranks=2)
    (folder / "asked.json").write_text(json.dumps(serving.asked()))
    return folder


def kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum(-1)


def jsd(logp, logq):
    logm = (0.3 * logq.exp() + 0.7 * logp.exp()).log()
    return 0.3 * kl(logq, logm) + 0.7 * kl(logp, logm)


DENSE = {"reverse": kl, "forward": lambda logp, logq: kl(logq, logp), "jsd": jsd}


def cut(logp: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N, k + 1]: these words, and all others as one."""
    named = logp.exp().gather(1, words)
    return torch.cat([named, 1 - named.sum(1, keepdim=True)], dim=1).log()


@pytest.mark.parametrize("name", DENSE)
def test_loss_and_gradient_are_those_of_the_k_best_words_and_the_rest(name, runs, tiny_llama, teacher):
    """The first step's sequences, as recorded, through transformers' models in float64."""
    recorded = pq.read_table(runs / "one" / name / "rollouts/step_000001.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    student, taught = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                       for path in (tiny_llama, teacher))
    total, divergence, count, rest = 0.0, 0.0, 0, 0.0
    scores: dict[int, list[float]] = {}
    for row in recorded[:8]:
        scores.setdefault(row["group"], []).append(row["score"])
    for row in recorded:
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        sequence = torch.tensor([prompt + row["tokens"]])
        logp, logq = (model(sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (student, taught))
        words = logq.argsort(-1, descending=True)[:, :K]
        value = DENSE[name](cut(logp, words), cut(logq.detach(), words)).sum()
        divergence, count = divergence + value.item(), count + len(row["tokens"])
        rest += cut(logq, words)[:, -1].exp().sum().item()
        if name == "jsd" and row["group"] in scores:
            advantage = row["score"] - sum(scores[row["group"]]) / 2
            value = value - 0.5 * advantage * logp.gather(1, torch.tensor(row["tokens"])[:, None]).sum()
        total = total + value
    assert len(recorded) == (12 if name == "jsd" else 8)
    (total / count).backward()
    norm = sum(p.grad.square().sum() for p in student.parameters()).sqrt().item()
    first = metrics_of(runs / "one" / name)[0]
    assert first["distillation/loss"] == pytest.approx(divergence / count, rel=1e-5) and divergence / count > 1e-3
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["distillation/rest"] == pytest.approx(rest / count, rel=1e-5) and 0.1 < rest / count < 1


@pytest.mark.parametrize("layout", ["one/alone", "two/ranks"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    ours, theirs = metrics_of(runs / layout), metrics_of(runs / "one/jsd")
    for name in ("distillation/loss", "distillation/rest", "actor/grad_norm", "actor/entropy"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4), name
    expected = weights_of(runs / "one/jsd")
    for name, weight in weights_of(runs / layout).items():
        assert ((weight - expected[name]).abs() > 1e-4).float().mean() < 0.02, name


def test_two_ranks_ask_for_each_sequence_once(runs):
    """Each step has the same four answers, two on each rank."""
    asked = [tuple(tokens) for tokens in json.loads((runs / "asked.json").read_text())]
    assert len(asked) == len(set(asked)) == 1 + 1 + 3 * 8               # the check at the start, the answer, responses
    shares = [row["perf/teacher_asked_frac"] for row in metrics_of(runs / "two/ranks")]
    assert shares == pytest.approx([9 / 12, 8 / 12, 8 / 12])


def test_a_killed_run_continues_exactly(commands, runs, tmp_path):
    check_exact_resume(commands["jsd"], runs / "one/jsd", tmp_path, first_step=1)


def test_a_run_from_the_cache_is_the_same_byte_for_byte(commands, runs, server, tmp_path):
    """A server whose numbers differ by rounding is asked for nothing but the check at the start."""
    def rounded(_, answer):
        for entry in filter(None, answer["choices"][0].get("prompt_logprobs", ())):
            for value in entry.values():
                value["logprob"] -= 1e-5
        return answer

    server.fault = rounded
    script, *flags = commands["jsd"]
    launch(f"{script}.py", *flags, "--served.cache", runs / "one/jsd/teacher", "--run-dir", tmp_path, warm=True)
    assert len(server.asked()) == 1
    expected = weights_of(runs / "one/jsd")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(tmp_path).items())
    assert [row["perf/teacher_asked_frac"] for row in metrics_of(tmp_path)] == [0, 0, 0]


def test_a_server_that_fails_ends_both_ranks_in_one_line_and_keeps_what_it_answered(commands, server, tmp_path):
    """Ten sequences are answered; then it fails for longer than --served.wait-s. The next run asks for the others."""
    def tired(_, answer):
        if len(server.asked()) > 10:
            return {"error": "tired"}, 503
        return answer

    server.fault = tired
    script, *flags = commands["ranks"]
    flags += ["--served.wait-s", "0.5", "--served.concurrency", "2", "--run-dir", tmp_path]
    done = launch(f"{script}.py", *flags, ranks=2, warm=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode and f"--teacher {server.url}: answered /completions with status 503" in said
    answered = set(server.asked()[:10])
    server.fault = None
    server.requests.clear()
    launch(f"{script}.py", *flags, ranks=2, warm=True)
    assert len(answered & set(server.asked())) == 1                     # the check asks for the prompt anew


# --------------------------------------------------------------------------- the kernel and the classes

@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (5.0, 0.5, 0.7)])
def test_log_probs_of_words_and_of_the_rest(softcap, scale, temperature, monkeypatch):
    monkeypatch.setattr("common.kernels.top_k.CHUNK_BYTES", {"cpu": 4 * 11 * 3})    # three of seven tokens at a time
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    words = torch.stack([torch.randperm(11, generator=generator)[:4] for _ in range(7)]).int()
    words[2, 1], words[4] = -1, -1                                      # a token without one word, and one without any
    found = linear_top_k(hidden, Head(weight, softcap, scale), words, temperature)
    factors = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    (found * factors).sum().backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    p = (logits / temperature).softmax(1)
    loss = 0.0
    for n in range(7):
        named = [int(word) for word in words[n] if word >= 0]
        others = [word for word in range(11) if word not in named]
        for place, word in enumerate(words[n]):
            want = p[n, word].log() if word >= 0 else torch.tensor(ABSENT, dtype=torch.float64)
            assert found[n, place].item() == pytest.approx(want.item(), abs=1e-12)
            loss = loss + factors[n, place] * want
        rest = sum(p[n, word] for word in others).log()
        assert found[n, 4].item() == pytest.approx(rest.item(), abs=1e-12)
        loss = loss + factors[n, 4] * rest
    loss.backward()
    for mine, want in zip(got, (hidden.grad, weight.grad)):
        assert (mine - want).abs().max() < 1e-12 < want.abs().max()


def test_the_rest_keeps_a_probability_that_1_minus_the_others_would_lose():
    hidden = torch.tensor([[1.0]])
    head = Head(torch.tensor([[40.0], [0.0], [0.0]]))
    found = linear_top_k(hidden, head, torch.tensor([[0]]))
    assert found[0, 1].item() == pytest.approx(math.log(2) - 40, rel=1e-6)


@pytest.mark.parametrize("kind", distill.DIVERGENCES)
def test_the_divergence_of_classes_is_none_above_that_of_all_words(kind):
    """And 0, with a gradient of 0, for equal models; words beyond the policy's vocabulary are part of the rest."""
    generator = torch.Generator().manual_seed(1)
    hidden, theirs = (torch.randn(20, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    head = Head(torch.randn(30, 6, generator=generator, dtype=torch.float64))
    divergence = distill.DIVERGENCES[kind]
    logq = (theirs @ head.weight.T).log_softmax(1)
    best = logq.topk(5)
    words = best.indices.int()
    words[:, 3] = -1
    coarse = divergence(*classes((hidden, head), BestWords(words, best.values), 1.0), 0.3)
    whole = linear_divergence((hidden, head), (theirs, head), lambda p, q: divergence(p, q, 0.3))
    assert (coarse >= 0).all() and (coarse <= whole + 1e-12).all() and coarse.mean() > 0.1
    merged = cut(logq, best.indices[:, [0, 1, 2, 4]])
    ours = cut((hidden @ head.weight.T).log_softmax(1), best.indices[:, [0, 1, 2, 4]])
    assert torch.allclose(coarse, divergence(ours, merged, 0.3), atol=1e-10)
    same = theirs.clone().requires_grad_()
    value = divergence(*classes((same, head), BestWords(words, best.values), 1.0), 0.3)
    (grad,) = torch.autograd.grad(value.sum(), same)
    assert value.detach().abs().max() < 1e-9 and grad.abs().max() < 1e-6


# --------------------------------------------------------------------------- broken and hostile answers

def entries(**changes) -> dict:
    """Of the tokens 5, 6, 7: k is 2."""
    two = [{"6": {"logprob": -1.0}, "9": {"logprob": -2.0}},
           {"7": {"logprob": -5.0}, "8": {"logprob": -0.5}, "2": {"logprob": -1.5}}]
    for place, entry in changes.items():
        two[int(place[1:])] = entry
    return {"choices": [{"prompt_logprobs": [None, *two]}]}


def test_an_answer_is_read_in_the_order_of_its_log_probs():
    words, logps = read_top_k(entries(), [5, 6, 7], 1, 2, 9)
    assert words.tolist() == [[6, -1], [8, 2]] and logps.tolist() == [[-1.0, -2.0], [-0.5, -1.5]]
    assert read_top_k(entries(), [5, 6, 7], 2, 2, 9)[0].tolist() == [[8, 2]]
    same = {"7": {"logprob": -1.0}, "8": {"logprob": -1.0}, "2": {"logprob": -1.0}}
    assert read_top_k(entries(_1=same), [5, 6, 7], 2, 2, 9)[0].tolist() == [[2, 7]]     # a tie: the lower number
    none = {"7": {"logprob": -9999.0}, "8": {"logprob": 1e-5}}
    assert read_top_k(entries(_1=none), [5, 6, 7], 2, 2, 9)[1].tolist() == [[0.0, -9999.0]]


@pytest.mark.parametrize(("answer", "rule"), [
    ({}, "its answer has no prompt_logprobs"), ([], "no prompt_logprobs"), (None, "no prompt_logprobs"),
    ({"choices": []}, "no prompt_logprobs"), ({"choices": [{"prompt_logprobs": None}]}, "no prompt_logprobs"),
    ({"choices": [{"prompt_logprobs": []}] * 2}, "no prompt_logprobs"),
    ({"choices": [{"prompt_logprobs": [None, {}]}]}, "it gave log-probs for 2 tokens, must be 3"),
    (entries(_0=None), "token 1 has no log-probs by number"), (entries(_0=[1]), "token 1 has no log-probs by number"),
    (entries(_0={"word": {"logprob": -1}}), "token 1 has no log-probs by number"),
    (entries(_0={"6": -1.0}), "token 1 has no log-probs by number"),
    (entries(_0={"6": {"logprob": None}}), "token 1 has no log-probs by number"),
    (entries(_1={"8": {"logprob": -0.5}, "2": {"logprob": -1.5}}), "token 2 is 7, and its log-prob is not in"),
    (entries(_1={"7": {"logprob": -0.5}}), "token 2 has 1 words, must be --top-k 2"),
    (entries(_1={"7": {"logprob": math.nan}, "2": {"logprob": -1.5}}), "token 2 has log-probs that are none"),
    (entries(_1={"7": {"logprob": -math.inf}, "2": {"logprob": -1.5}}), "token 2 has log-probs that are none"),
    (entries(_1={"7": {"logprob": 0.5}, "2": {"logprob": -1.5}}), "token 2 has log-probs that are none"),
    (entries(_1={"7": {"logprob": -1}, "-2": {"logprob": -1.5}}), "token 2 has log-probs that are none"),
    (entries(_1={"7": {"logprob": -0.1}, "2": {"logprob": -0.2}}), "words add up to 1.72"),
])
def test_an_answer_that_is_none_is_refused(answer, rule):
    with pytest.raises(ServerError, match=rule):
        read_top_k(answer, [5, 6, 7], 1, 2, 9)


def client_of(server, **changes) -> Client:
    return Client(read_address(f"{server.url}#teacher"), ServedConfig(**vars(QUICK) | changes))


def html(handler, _):
    handler.write(b"<html>gateway</html>", kind="text/html")


def redirect(handler, _):
    handler.write(b"", status=307, Location="http://example.com/v1/completions")


def huge(handler, _):
    handler.write(b"[" * (1 << 22))


def cut_short(handler, _):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.close_connection = True


def dripping(handler, _):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(30):
            handler.wfile.write(b" ")
            time.sleep(0.1)


@pytest.mark.parametrize(("fault", "rule"), [
    (html, "answered /completions with no JSON: '<html>gateway"), (redirect, "with status 307"),
    (huge, "answered more than the [0-9]+ bytes that /completions can have"), (cut_short, "RemoteProtocolError"),
    (dripping, "no whole answer within --served.timeout-s 0.5"),
    (lambda *_: ({"error": "no"}, 500), "with status 500: .*, for 0 s"), (lambda *_: ({}, 401), "with status 401"),
])
def test_what_is_no_answer_is_one_line(fault, rule, server):
    server.fault = fault
    with pytest.raises(ServerError, match=f"^--teacher {server.url}: .*{rule}") as error:
        client_of(server, timeout_s=0.5).top_k([1, 2], 1, 2, 9)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_server_that_comes_back_is_waited_for(teacher, server):
    """Busy twice; then gone, and there again on the same port."""
    server.fault = lambda _, answer: ({}, 429) if len(server.requests) < 3 else answer
    client = client_of(server, wait_s=20.0)
    words, _ = client.top_k([1, 2, 3], 1, 4, 4096)
    assert words.shape == (2, 4) and len(server.requests) == 3
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    later = threading.Timer(0.7, lambda: started.append(Serving(teacher, port)))
    later.start()
    gone = Client(read_address(f"http://127.0.0.1:{port}/v1#teacher"), ServedConfig(wait_s=30.0))
    again, _ = gone.top_k([1, 2, 3], 1, 4, 4096)
    later.join()
    started[0].stop()
    assert np.array_equal(again, words)


def test_a_stop_signal_ends_the_wait():
    client = Client(read_address("http://127.0.0.1:9/v1#m"), ServedConfig(wait_s=600.0), has_stopped=lambda: True)
    with pytest.raises(ServerError, match="ConnectError"):
        client.top_k([1, 2], 1, 2, 9)


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", SECRET)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")              # not used: requests go to the host alone
    server.fault = lambda handler, _: ({"error": f"bad key {handler.headers['Authorization']}"}, 401)
    with pytest.raises(ServerError, match=r"bad key Bearer \$TEACHER_KEY") as error:
        client_of(server, auth_env="TEACHER_KEY").top_k([1, 2], 1, 2, 9)
    assert server.requests[0][0] == f"Bearer {SECRET}" and SECRET not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)                        # a key that was not named is not sent
    with pytest.raises(ServerError):
        client_of(server).top_k([1, 2], 1, 2, 9)
    assert server.requests[1][0] is None


# --------------------------------------------------------------------------- the checks at the start

@pytest.fixture(scope="module")
def probes(teacher) -> Probes:
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    return Probes(tokenizer, 4096, tokenizer("What is 2 + 3?<|im_end|>").input_ids, 200)


def check(server, probes, folder, k=K, name="", **changes):
    return check_server(read_address(server.url + name), k, ServedConfig(**vars(QUICK) | changes), folder, probes)


def test_a_server_that_can_teach_passes(server, probes, tmp_path):
    address, cache = check(server, probes, tmp_path)
    assert address.model == "teacher" and cache.parent == tmp_path
    assert check(server, probes, tmp_path, name="#teacher@2")[1] != cache != check(server, probes, tmp_path, k=3)[1]
    texts = [body["prompt"] for _, body in server.requests if isinstance(body["prompt"], str)]
    assert len(texts) == 9 and "<|im_end|>" in texts[1] and "<|im_start|>" in texts[2]


def test_servers_that_cannot_teach_are_refused(server, probes, tmp_path, tiny_llama):
    def refused(rule, **arguments):
        with pytest.raises(ValueError, match=rule) as error:
            check(server, probes, tmp_path, **arguments)
        assert "\n" not in str(error.value)

    refused("status 400: .*at most 20", k=21)
    refused("--top-k 4096 must be below the 4096 words", k=4096)
    refused("serves the models teacher: name one of them, as in http://.*#MODEL", name="#other")
    server.more_models = [{"id": "second"}, "no model"]
    refused("serves the models teacher, second")
    server.more_models, server.max_model_len = [], 200
    refused("takes 200 tokens, and must take the 200 of a prompt and its response, and one more")
    server.max_model_len = 1024
    server.fault = lambda _, answer: {"choices": [{"index": 0}]}
    refused("its answers have no prompt_token_ids")
    server.fault = lambda _, answer: {"choices": [{k: v for k, v in answer["choices"][0].items()
                                                   if k != "prompt_logprobs"}]}
    refused("its answer has no prompt_logprobs")
    added = AutoTokenizer.from_pretrained(tiny_llama)
    added.add_tokens(["<tool>"])
    rule = r"must have the tokens of --model: what --model writes as \[4096.*<tool>.*, it writes as"
    with pytest.raises(ValueError, match=rule):
        check(server, probes._replace(tokenizer=added), tmp_path)


def test_a_server_that_is_not_there_is_told_in_seconds(probes, tmp_path, monkeypatch):
    monkeypatch.setattr("common.distillation.served.START_S", 0.3)
    with pytest.raises(ValueError, match=r"--teacher http://127.0.0.1:9/v1: ConnectError"):
        check_server(read_address("http://127.0.0.1:9/v1"), K, QUICK, tmp_path, probes)


def test_another_model_does_not_continue_a_cache(server, probes, tmp_path):
    check(server, probes, tmp_path)
    with torch.no_grad():
        before = server.model.lm_head.weight.clone()
        server.model.lm_head.weight.mul_(200.0)
    try:
        with pytest.raises(ValueError, match="is another model than the one whose answers are in"):
            check(server, probes, tmp_path)
        check(server, probes, tmp_path, name="#teacher@2")
    finally:
        with torch.no_grad():
            server.model.lm_head.weight.copy_(before)


def test_a_broken_file_of_the_cache_is_told(tmp_path):
    answer = np.zeros((2, 3), np.int32), np.full((2, 3), -1.0, np.float32)
    Cache(tmp_path).put({"a": answer})
    again = Cache(tmp_path)
    assert "a" in again and "b" not in again
    assert all(np.array_equal(*pair) for pair in zip(again.read(["a"])["a"], answer))
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"cannot be read .*delete it"):
        Cache(tmp_path)


@pytest.mark.parametrize(("flags", "rule"), [
    ({"top_k": 0}, "--top-k 0 --top-k-of teacher: a teacher behind a server tells its k best words"),
    ({"top_k_of": "student"}, "--top-k-of student: a teacher behind"),
    ({"teacher": ("a=http://h:1/v1", "b=folder")}, "must be all behind servers or none"),
    ({"teacher": ("folder",), "served": QUICK}, "--served.\\* does nothing without"),
    ({"teacher": ("http:///v1",)}, "must be http://host:port/v1"),
    ({"teacher": ("http://h:x/v1",)}, "must be http://host:port/v1"),
    ({"teacher": ("http://u:secret@h/v1",)}, "--teacher http://h: an address has no password"),
    ({"served": ServedConfig(concurrency=0)}, "--served.concurrency 0 must be at least 1"),
    ({"served": ServedConfig(auth_env="NO_SUCH_KEY")}, "NO_SUCH_KEY: this environment variable is not set"),
    ({"rollout": distill.Args("", ()).rollout.__class__(temperature=0.7)}, "--rollout.temperature 0.7 must be 1"),
    ({"policy": distill.Args("", ()).policy.__class__(sequence_parallel=2)}, "--policy.sequence-parallel 2 must be 1"),
])
def test_flags_that_cannot_work_are_refused(flags, rule):
    given = {"teacher": ("http://h:1/v1",), "top_k": 5} | flags
    with pytest.raises(ValueError, match=rule) as error:
        distill.check(distill.Args(model="m", train_data=("x",), **given))
    assert "secret" not in str(error.value)

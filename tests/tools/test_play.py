"""python -m tools.play: real episodes on a tiny model with the Hugging Face engine."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
import torch

from common.flags.rollout import EpisodeConfig
from common.rollout import Sample
from envs.runtime.response import Response
from tests.conftest import TRAIN, launch
from tools.play import GREEN, described

EPISODE = r'''
async def episode(chat, row):
    first = await chat.reply(max_tokens=5)
    evil = "\x1b]0;title\x07 \u202e <|im_end|>\nsecond line"
    second = await chat.reply({"role": "user", "content": evil}, max_tokens=3)
    critic = chat.begin("critic\x1b[2J")
    await critic.reply({"role": "user", "content": "Judge."}, max_tokens=4)
    return {"score": 0.5, "note": "\x1b[31mred", "turn_scores": [0.25, 1.0]}


async def fail(chat, row):
    await chat.reply(max_tokens=2)
    raise OSError("no such place")
'''


def play(*flags: str) -> subprocess.CompletedProcess:
    return launch("tools/play.py", *flags, warm=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    (folder / "mine.py").write_text(EPISODE)
    return folder


def test_conversations_masks_and_scores_are_printed(folder, tiny_llama):
    flags = ["--model", str(tiny_llama), "--rollout.engine", "hf", "--rollout.max-response-length", "64",
             "--policy.compute-dtype", "float32"]
    done = play(f"{folder}/mine.py", *flags, "--prompt", "One?", "Two?", "Three?", "--rows", "2", "--samples", "2")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert len(re.findall(r"^row [01], episode [0-3]$", printed, re.MULTILINE)) == 4 and "Three?" not in printed
    assert not [c for c in printed if not c.isprintable() and c != "\n"]
    assert printed.count(r"\x1b]0;title\x07 \u202e <|im_end|>") == 4 and printed.count(r"critic\x1b[2J") == 4
    assert printed.count(r"note: \x1b[31mred") == 4 and printed.count("turn_scores: 0.25, 1") == 4
    turns = [(int(turn), int(tokens)) for turn, tokens in re.findall(r"turn (\d), (\d+) tokens, trained", printed)]
    assert len(turns) == 12 and all(tokens <= {1: 5, 2: 3}[turn] for turn, tokens in turns)
    totals = re.findall(r"score 0.5; it ended with done after 3 turns, (\d+) tokens to train", printed)
    assert sum(map(int, totals)) == sum(tokens for _, tokens in turns) and len(totals) == 4
    marked = re.findall(r"^  \| (.*)$", printed, re.MULTILINE)
    assert marked and not any("Two?" in line or "Judge." in line for line in marked)
    again = play(f"{folder}/mine.py", *flags, "--prompt", "One?", "Two?", "--rows", "2", "--samples", "2")
    assert re.findall(r"^  \| .*$", again.stdout, re.MULTILINE) == re.findall(r"^  \| .*$", printed, re.MULTILINE)
    failed = play(f"{folder}/mine.py:fail", *flags, "--prompt", "One?")
    assert failed.returncode == 0 and "OSError: no such place" in failed.stderr
    assert "it ended with error after 1 turns" in failed.stdout


def test_every_flag_of_episodes_is_taken(folder, tiny_llama):
    flags = ["--rollout.max-turns", "2", "--rollout.tool-timeout-s", "20", "--rollout.episodes-at-once", "2",
             "--rollout.lockstep", "--rollout.drop", "error", "--rollout.rewritten-history", "append",
             "--rollout.tool-result-tokens", "20", "--rollout.tool-parser", "hermes", "--rollout.max-num-seqs", "4"]
    names = {f"--rollout.{field.name.replace('_', '-')}" for field in dataclasses.fields(EpisodeConfig)}
    assert names - {*flags} == {"--rollout.episode"}
    flags += ["--rollout.engine", "hf", "--rollout.kv-cache-gb", "9", "--rollout.max-response-length", "64"]
    done = play(f"{folder}/mine.py", "--model", str(tiny_llama), "--prompt", "One?", "--policy.compute-dtype",
                "float32", *flags)
    assert "ended with turns after 2 turns" in done.stdout, done.stderr                 # and not after its 3
    assert "flags  --rollout.kv-cache-gb 9.0 is only for --rollout.engine vllm: " in done.stdout


def test_each_prompt_is_played(folder, tiny_llama):
    flags = ["--model", str(tiny_llama), "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
             "--rollout.max-response-length", "64"]
    done = play(f"{folder}/mine.py", *flags, "--prompt", *"abcde")
    assert re.findall(r"^row (\d), episode \d$", done.stdout, re.MULTILINE) == [*"01234"], done.stderr
    rows = ["--data", str(TRAIN), "--data.max-prompt-length", "200"]
    done = play(f"{folder}/mine.py", *flags, *rows)
    assert re.findall(r"^row (\d), episode \d$", done.stdout, re.MULTILINE) == [*"012"], done.stderr


@pytest.mark.sweep
def test_a_tokenizer_whose_code_comes_with_it_runs_if_it_is_trusted(folder, tiny_llama, tmp_path):
    own = shutil.copytree(tiny_llama, tmp_path / "own")
    (own / "own.py").write_text("from transformers import PreTrainedTokenizerFast\n\n\n"
                                "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n")
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    command = ["tools/play.py", f"{folder}/mine.py", "--model", str(own), "--rollout.engine", "hf", "--prompt", "One?",
               "--policy.compute-dtype", "float32", "--rollout.max-response-length", "64"]
    env = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert "trust_remote_code" in launch(*command, check=False, env=env).stderr
    assert "score 0.5" in launch(*command, "--policy.trust-remote-code", env=env).stdout


def test_mistakes_are_one_line(folder, tiny_llama):
    model = ["--model", str(tiny_llama), "--rollout.engine", "hf"]
    both = ["--data", str(TRAIN), "--prompt", "One?"]
    for flags, rule in (([], "--data is not given and --prompt is not given"), (both, "--prompt is given"),
                        (["--data", f"{folder}/none.parquet"], "none.parquet"),
                        (["--prompt", "One?", "--rows", "-1"], "--rows -1 must be at least 0, --samples 1 at least 1")):
        done = play(f"{folder}/mine.py", *model, *flags)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and rule in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_colours_are_the_only_control_characters():
    class Letters:
        def decode(self, tokens):
            return "".join(map(chr, tokens))

    response = Response([97, 27, 98, 10, 99], [0.0] * 5, "stop", [True, True, False, False, True], [112, 7],
                        tools={"tool_calls": 0, "tool_errors": 0, "tool_s": 0.0}, end_reason="done")
    prompt = type("P", (), {"tokens": [1]})()
    sample = Sample(0, 0, 0, prompt, response, score=float(torch.nan), extras={})
    lines = described(sample, Letters(), has_colour=True)
    assert lines[2] == "\x1b[90m    p\\x07\x1b[0m" and lines[4] == GREEN + "  | a\\x1b\x1b[0m"
    assert lines[3] == "  turn 1, 2 tokens, trained" and lines[5] == "  told, 2 tokens, not trained"
    assert [line.strip("\x1b[0m9") for line in lines[6:8]] == ["    b", "    "]
    assert lines[10].startswith("no score, it failed; it ended with done") and "3 tokens to train" in lines[10]

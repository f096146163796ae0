"""Prompts from real files in verl's layout, written here with pyarrow; their order; the quickstart's generator."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from common.data import DataConfig, PromptSampler, find_files, load_prompts

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    assert MODEL.is_dir(), f"{MODEL} is missing: run make model"
    return AutoTokenizer.from_pretrained(MODEL)


def row(content="What is 2 + 2?", truth="4", **changes) -> dict:
    """One row as verl's own preprocessing scripts write it."""
    return {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": content}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": 7, "answer": "so #### 4", "nested": {"a": [1, 2]}}} | changes


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return str(path)


def chatml(*turns: tuple[str, str]) -> str:
    """SmolLM2's template by hand: the default system turn unless one is given, then the assistant's opening."""
    text = "" if turns[0][0] == "system" else SYSTEM
    for role, content in turns:
        text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def test_tokens_are_the_chat_template_by_hand(tokenizer, tmp_path):
    turns = [("system", "Be brief."), ("user", "Hello  world\n 12"), ("assistant", "Hi."), ("user", "2 + 2?")]
    rows = [row(), row(prompt=[{"role": role, "content": content} for role, content in turns])]
    prompts = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig())
    for prompt, expected in zip(prompts, [chatml(("user", "What is 2 + 2?")), chatml(*turns)]):
        assert tokenizer.decode(prompt.tokens) == expected
        assert prompt.tokens == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert prompts[0].data_source == "openai/gsm8k"
    assert prompts[0].ground_truth == "4"
    assert prompts[0].extra_info == row()["extra_info"]  # untouched
    assert prompts[0].messages == row()["prompt"]
    assert prompts.data_sources == ["openai/gsm8k"]


def test_string_prompts_and_other_columns(tokenizer, tmp_path):
    rows = [{"question": "What is 2 + 2?", "source": "mine", "answer": {"ground_truth": 4}}]
    config = DataConfig(prompt_column="question", data_source_column="source", reward_model_column="answer")
    prompt = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, config)[0]
    assert tokenizer.decode(prompt.tokens) == chatml(("user", "What is 2 + 2?"))
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("mine", 4, {})


def test_json_lines_folders_and_globs(tokenizer, tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.parquet", [row("b0"), row("b1")])
    write(tmp_path / "deep" / "c.parquet", [row("c0")])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row(f"a{i}")) + "\n\n" for i in range(2)))
    (tmp_path / "notes.txt").write_text("not data")

    def contents(*files):
        return [prompt.messages[0]["content"] for prompt in load_prompts(files, tokenizer, DataConfig())]

    assert contents(str(tmp_path)) == ["a0", "a1", "b0", "b1", "c0"]
    assert contents(f"{tmp_path}/*.parquet") == ["b0", "b1"]
    assert contents(f"{tmp_path}/**/*.parquet") == ["b0", "b1", "c0"]
    assert contents(f"{tmp_path}/deep", f"{tmp_path}/a.jsonl") == ["c0", "a0", "a1"]
    for entry, rule in [("absent.parquet", "does not exist"), ("*.csv", "matches no"), ("notes.txt", "must end in")]:
        with pytest.raises(ValueError, match=rule):
            find_files([f"{tmp_path}/{entry}"])
    with pytest.raises(ValueError, match="no data files"):
        find_files([])


@pytest.mark.parametrize(("changes", "rule"), [
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [{"role": "user", "content": " \n"}]}, "prompt is empty"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": None}, "prompt is None; must be a string or a list"),
    ({"prompt": 5}, "prompt is 5; must be a string or a list"),
    ({"prompt": ["text"]}, "must be a string or a list"),
    ({"prompt": [{"role": "user"}]}, "a message whose content is None"),
    ({"prompt": [{"content": "x"}]}, "a message whose role is None"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a message whose content is"),
    ({"data_source": None}, "data_source is None; it must be a name"),
    ({"data_source": 3}, "data_source is 3"),
    ({"reward_model": None}, "reward_model is None; it must have a ground_truth"),
    ({"reward_model": {"style": "rule"}}, "must have a ground_truth"),
    ({"reward_model": "4"}, "must have a ground_truth"),
    ({"extra_info": [1]}, "extra_info is"),
])
def test_bad_rows_name_file_row_rule_and_flag(tokenizer, tmp_path, changes, rule):
    rows = [row("zero"), row("one"), row(**changes), row("three")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 2 .*{rule}.*--data.on-bad-row skip"):
        load_prompts([str(path)], tokenizer, DataConfig())
    prompts = load_prompts([str(path)], tokenizer, DataConfig(on_bad_row="skip"))
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["zero", "one", "three"]
    assert (len(prompts), prompts.loaded.num_rows, len(prompts.loaded.bad_rows)) == (3, 4, 1)
    assert re.search(rule, prompts.loaded.bad_rows[0]["rule"])
    assert "1 bad" in prompts.summary()


def test_bad_rows_of_parquet_and_broken_lines(tokenizer, tmp_path):
    path = write(tmp_path / "a.parquet", [row(str(i), truth=None if i == 5 else "4") for i in range(7)])
    with pytest.raises(ValueError, match=r"a.parquet, row 5 .*ground_truth"):
        load_prompts([path], tokenizer, DataConfig())
    (tmp_path / "b.jsonl").write_bytes(json.dumps(row()).encode() + b'\n{"prompt": \n\xff\xfe\n[1]\n')
    prompts = load_prompts([str(tmp_path / "b.jsonl")], tokenizer, DataConfig(on_bad_row="skip"))
    assert (len(prompts), len(prompts.loaded.bad_rows)) == (1, 3)
    assert all("must be a JSON object" in bad["rule"] for bad in prompts.loaded.bad_rows)


def test_unreadable_parquet_names_the_file(tokenizer, tmp_path):
    path = Path(write(tmp_path / "a.parquet", [row(str(i) * 50) for i in range(400)]))
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:3], b"", b"PAR1" + bytes(100) + b"PAR1",
                    content[:20] + bytes(200) + content[220:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.parquet (is not a readable parquet file|is damaged)"):
            load_prompts([str(path)], tokenizer, DataConfig(on_bad_row="skip"))


def test_missing_columns_are_named_with_those_that_exist(tokenizer, tmp_path):
    rows = [{"question": "2 + 2?", "data_source": "mine"}]
    with pytest.raises(ValueError, match=r"a.parquet has no column prompt, reward_model; it has question, data_source"
                                         r".*--data.prompt-column"):
        load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig())


def test_long_prompts_are_filtered_cut_or_refused(tokenizer, tmp_path):
    short, long = row("x"), row("one two three four five six seven eight nine ten")
    path = write(tmp_path / "a.parquet", [short, long, short])
    full = load_prompts([path], tokenizer, DataConfig())
    limit = len(full[0].tokens)
    whole = full[1].tokens
    assert len(whole) > limit

    def load(mode, limit=limit):
        return load_prompts([path], tokenizer, DataConfig(max_prompt_length=limit, on_long_prompt=mode))

    kept = load("filter")
    assert [prompt.tokens for prompt in kept] == [full[0].tokens, full[2].tokens]
    assert (kept.loaded.num_rows, kept.loaded.num_filtered, kept.loaded.num_truncated) == (3, 1, 0)
    assert "1 filtered" in kept.summary()
    left = load("truncate-left")
    assert left[1].tokens == whole[-limit:]
    assert (left.loaded.num_filtered, left.loaded.num_truncated) == (0, 1)
    for odd_or_even in (limit, limit - 1, 1):
        middle = load("truncate-middle", odd_or_even)[1].tokens
        half = odd_or_even // 2
        assert middle == whole[:half] + whole[len(whole) - (odd_or_even - half):]
        assert len(middle) == odd_or_even
    with pytest.raises(ValueError, match=rf"row 1 .*{len(whole)} tokens, more than --data.max-prompt-length {limit}"):
        load("error")
    with pytest.raises(ValueError, match=r"none of 3 rows is left: 3 have more than --data.max-prompt-length 5"):
        load("filter", 5)
    with pytest.raises(ValueError, match="must be at least 1"):
        load("filter", 0)
    assert len(load("filter", len(whole))) == 3  # the limit itself is allowed


def test_nothing_left_shows_the_first_bad_row(tokenizer, tmp_path):
    path = write(tmp_path / "a.parquet", [row(truth=None), row(truth=None)])
    with pytest.raises(ValueError, match=r"none of 2 rows is left: 0 have more.*2 are bad; the first bad row.*row 0"):
        load_prompts([path], tokenizer, DataConfig(on_bad_row="skip"))


def test_chat_template_settings(tokenizer, tmp_path):
    path = write(tmp_path / "a.parquet", [row("hi")])
    template = tmp_path / "mine.jinja"
    template.write_text("{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('no assistant first') }}"
                        "{% endif %}{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
                        "{% if add_generation_prompt %} >{% endif %}")
    config = DataConfig(chat_template_file=str(template), chat_template_kwargs='{"loud": true}')
    assert tokenizer.decode(load_prompts([path], tokenizer, config)[0].tokens) == "hi! >"
    refused = write(tmp_path / "b.parquet", [row(prompt=[{"role": "assistant", "content": "x"}])])
    with pytest.raises(ValueError, match=r"row 0 .*the chat template refuses it: no assistant first"):
        load_prompts([refused], tokenizer, config)
    for changes, rule in [({"chat_template_kwargs": "loud"}, "must be a JSON object"),
                          ({"chat_template_kwargs": "[1]"}, "must be a JSON object"),
                          ({"chat_template_file": "absent.jinja"}, "absent.jinja does not exist")]:
        with pytest.raises(ValueError, match=rule):
            load_prompts([path], tokenizer, DataConfig(**changes))


def test_base_models_need_a_template_or_plain(tokenizer, tmp_path):
    base = AutoTokenizer.from_pretrained(MODEL)
    base.chat_template = None
    path = write(tmp_path / "a.parquet", [row(prompt=[{"role": "user", "content": "Q: 2 + 2?"},
                                                      {"role": "user", "content": "A:"}])])
    with pytest.raises(ValueError, match=r"has no chat template.*--data.template plain.*--data.chat-template-file"):
        load_prompts([path], base, DataConfig())
    tokens = load_prompts([path], base, DataConfig(template="plain"))[0].tokens
    assert tokens == tokenizer("Q: 2 + 2?\n\nA:")["input_ids"]


def test_sampler_gives_every_prompt_once_an_epoch():
    sampler = PromptSampler(10, seed=1)
    taken = [sampler.take(4) for _ in range(5)]  # two epochs; the third batch lies across them
    flat = [index for batch in taken for index in batch]
    assert Counter(flat[:10]) == Counter(flat[10:]) == Counter(range(10))
    assert flat[:10] != flat[10:] != list(range(10))
    assert all(len(batch) == 4 for batch in taken)
    assert PromptSampler(10, seed=1).take(20) == flat  # neither the batch size nor the caller matters
    assert PromptSampler(10, seed=2).take(20) != flat
    assert Counter(PromptSampler(3, seed=1).take(9)) == Counter({0: 3, 1: 3, 2: 3})  # more than an epoch at once


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_sampler_resumes_anywhere(steps):
    straight, first = PromptSampler(10, seed=3), PromptSampler(10, seed=3)
    for _ in range(steps):
        assert straight.take(5) == first.take(5)
    state = json.loads(json.dumps(first.state_dict()))
    assert set(state) == {"epoch", "position"}
    resumed = PromptSampler(10, seed=3)
    resumed.load_state_dict(state)
    assert [resumed.take(5) for _ in range(6)] == [straight.take(5) for _ in range(6)]


def test_sampler_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="there must be at least 1"):
        PromptSampler(0, seed=0)
    with pytest.raises(ValueError, match="was at prompt 9 of its epoch, but there are only 5"):
        PromptSampler(5, seed=0).load_state_dict({"epoch": 0, "position": 9})


# ---- the quickstart's generator ----

def solve(question: str) -> int:
    """The answer from the text alone: the wording decides the operation."""
    a, b = map(int, re.findall(r"\d+", question))
    if "boxes" in question:
        return a * b
    return a - b if "left" in question else a + b


def generate(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(ROOT / "data" / "word_problems.py"), "--out", str(folder), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_word_problems_are_right_disjoint_and_repeatable(tmp_path, tokenizer):
    assert "written" in generate(tmp_path / "a")
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert {split: len(items) for split, items in rows.items()} == {"train": 2048, "test": 96}
    questions = Counter()
    for split, items in rows.items():
        for index, item in enumerate(items):
            assert list(item) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert item["data_source"] == "word_problems"
            assert item["extra_info"] == {"split": split, "index": index}
            example, solution, question = (message["content"] for message in item["prompt"])
            assert [message["role"] for message in item["prompt"]] == ["user", "assistant", "user"]
            assert int(item["reward_model"]["ground_truth"]) == solve(question) > 0
            working, answer = solution.split("\n")
            assert answer == f"#### {solve(example)}"
            a, operation, b, equals, result = working.split()
            assert equals == "="
            assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
            assert [int(a), int(b)] == list(map(int, re.findall(r"\d+", example)))
            questions[question] += 1
    assert max(questions.values()) == 1  # so no test problem is in train
    assert not questions.keys() & {item["prompt"][0]["content"] for items in rows.values() for item in items}
    share = Counter(question.split()[-1] for question in questions)  # now? left? have? together?
    assert set(share) == {"now?", "left?", "have?", "together?"}
    assert min(share.values()) > 0.15 * len(questions)
    prompts = load_prompts([str(tmp_path / "a" / "train.parquet")], tokenizer, DataConfig(max_prompt_length=128))
    assert len(prompts) == 2048

    generate(tmp_path / "b")
    generate(tmp_path / "c", "--seed", "1")
    same, other = [(tmp_path / name / "train.parquet").read_bytes() for name in "bc"]
    assert (tmp_path / "a" / "train.parquet").read_bytes() == same != other


def test_word_problems_leave_a_complete_file_and_repair_a_damaged_one(tmp_path):
    flags = ("--num-train", "20", "--num-test", "5")
    generate(tmp_path, *flags)
    train = tmp_path / "train.parquet"
    before, modified = train.read_bytes(), train.stat().st_mtime_ns
    assert generate(tmp_path, *flags).count("is complete") == 2
    assert train.stat().st_mtime_ns == modified
    train.write_bytes(before[:100])
    assert "train.parquet written" in generate(tmp_path, *flags)
    assert train.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]

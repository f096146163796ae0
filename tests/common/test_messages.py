"""What a row of data means does not depend on its file's format, and is rendered as other tools render it."""

import json
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import sft
from common.dataset.conversations import RowParser, load_conversations
from common.dataset.messages import as_text, as_written, parse_messages, with_response
from common.dataset.pairs import parse_pair
from common.dataset.store import load_prompts
from common.prompts import DataConfig
from envs.endpoint.asked import call_of
from envs.runtime.template import form_of_calls, rendered

TEMPLATES = sorted((Path(__file__).parents[1] / "engine/templates").glob("*.jinja"))
SFT = RowParser({name: name for name in ("messages", "prompt", "response", "tools")}, sft.parse)


@pytest.fixture(scope="module")
def tokenizer(smollm):
    return AutoTokenizer.from_pretrained(smollm)


def call(arguments, name="weather") -> dict:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


def both_formats(rows: list[dict], folder: Path) -> list[str]:
    """The rows as parquet, where all structs have all keys, and as JSON lines."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / "rows.parquet"), str(folder / "rows.jsonl")]


# --------------------------------------------------------------------------- nulls that a format adds

def talk(arguments: dict, **more) -> list[dict]:
    return [{"role": "user", "content": "q"} | more,
            {"role": "assistant", "content": "See.", "tool_calls": [call(arguments)]},
            {"role": "tool", "content": "r", "tool_call_id": "call00001"}, {"role": "user", "content": "n"}]


INFOS = [{"a": 1}, {"b": {"c": 2}}, {"b": {"d": [{"x": 1}, {"y": "z"}]}}, {"list": ["p", "q"]},
         {"flag": False, "zero": 0}, {"empty": ""}]
QWEN = {"chat_template_file": str(Path(__file__).parents[1] / "engine/templates/qwen2_5.jinja")}


def test_a_prompt_is_the_same_from_parquet_and_json_lines(tokenizer, tmp_path):
    """Arguments of calls, further keys of messages, and what the reward gets, at any depth."""
    calls = [{"city": "Rome"}, {"days": 3}, {"place": {"lat": 1.5}}, {"place": {"name": "x"}, "tags": ["a"]}, {},
             {"n": 0}]
    rows = [{"data_source": "x", "prompt": talk(arguments, **({"name": "me"} if i == 2 else {})),
             "reward_model": {"ground_truth": "1", **({"style": "rule"} if i else {})}, "extra_info": info}
            for i, (arguments, info) in enumerate(zip(calls, INFOS))]
    ours, theirs = (load_prompts([file], tokenizer, DataConfig(**QWEN)) for file in both_formats(rows, tmp_path))
    for row, one, other in zip(rows, ours, theirs, strict=True):
        assert one.tokens == other.tokens and one.messages == other.messages
        assert one.extra_info == other.extra_info == row["extra_info"]
        text = tokenizer.decode(one.tokens)
        arguments = row["prompt"][1]["tool_calls"][0]["function"]["arguments"]
        assert f'"arguments": {json.dumps(arguments)}' in text and "null" not in text and "None" not in text


def test_a_conversation_is_the_same_from_parquet_and_json_lines(tokenizer, tmp_path):
    calls = {"a": 1}, {"b": {"c": None, "d": 2}}, {"e": [None, 1]}
    rows = [{"messages": talk(arguments)[:2]} for arguments in calls]
    loaded = [load_conversations([file], tokenizer, [tokenizer.eos_token_id], sft.SFTConfig(**QWEN), SFT)
              for file in both_formats(rows, tmp_path)]
    ours, theirs = ([row.as_py() for row in data.tokens] for data in loaded)
    assert ours == theirs and len({*map(tuple, ours)}) == 3
    assert '{"e": [null, 1]}' in tokenizer.decode(ours[2])                     # of a list, a null is a value


def test_a_map_of_parquet_is_an_object(tokenizer, tmp_path):
    """As Spark and DuckDB write objects with any keys."""
    kind = pa.map_(pa.string(), pa.struct({"a": pa.int64(), "b": pa.binary()}))
    info = pa.array([[("k", {"a": 1, "b": None}), ("l", {"a": None, "b": b"x"})]], kind)
    pq.write_table(pa.table({"prompt": ["q"], "data_source": ["x"], "gt": ["1"], "extra_info": info}),
                   tmp_path / "m.parquet")
    (prompt,) = load_prompts([str(tmp_path / "m.parquet")], tokenizer, DataConfig(ground_truth_column="gt"))
    assert prompt.extra_info == {"k": {"a": 1}, "l": {"b": "x"}}


def test_pairs_are_the_same_from_parquet_and_json_lines():
    pair = {"prompt": [{"role": "user", "content": "q"}], "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "b"}]}
    filled = json.loads(json.dumps(pair))
    for messages in filled.values():
        messages[0] |= {"name": None, "tool_calls": None, "weight": None}
    assert parse_pair(as_written(filled)) == parse_pair(pair)


@pytest.mark.parametrize(("value", "want"), [
    ({"a": None}, {}), ({"a": {"b": None}}, {"a": {}}), ([{"a": None}, None], [{}, None]), (None, None), (0, 0),
    ({"a": False, "b": "", "c": [], "d": {}}, {"a": False, "b": "", "c": [], "d": {}}), (b"42", "42"),
    ({"k": [b"\xc3\xa9", {"x": b""}]}, {"k": ["\u00e9", {"x": ""}]}),
])
def test_a_value_is_what_somebody_wrote(value, want):
    assert as_written(value) == want


# --------------------------------------------------------------------------- texts as bytes, and other types

def test_texts_in_binary_columns_are_text(tokenizer, tmp_path):
    table = pa.table({"prompt": pa.array([b"hi", b"ho"], pa.binary()),
                      "data_source": pa.array([b"x", b"x"], pa.large_binary()),
                      "gt": pa.array([b"42", "\u00e9".encode()], pa.binary(2)),
                      "extra_info": pa.array([{"k": b"v"}, {"k": b"w"}], pa.struct({"k": pa.binary()}))})
    pq.write_table(table, tmp_path / "b.parquet")
    prompts = load_prompts([str(tmp_path / "b.parquet")], tokenizer, DataConfig(ground_truth_column="gt"))
    assert [(p.ground_truth, p.data_source, p.extra_info) for p in prompts] == [
        ("42", "x", {"k": "v"}), ("\u00e9", "x", {"k": "w"})]
    assert [p.messages[0]["content"] for p in prompts] == ["hi", "ho"]


def test_bytes_that_are_no_text_are_named(tokenizer, tmp_path):
    pq.write_table(pa.table({"prompt": ["hi"], "data_source": ["x"], "gt": pa.array([b"\xff\xfe"], pa.binary())}),
                   tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"row 0 .*: the column ground_truth has bytes that are no UTF-8 text: b'"):
        load_prompts([str(tmp_path / "b.parquet")], tokenizer, DataConfig(ground_truth_column="gt"))


@pytest.mark.parametrize(("value", "text"), [
    (Decimal("1.50"), "1.50"), (date(2020, 1, 2), "2020-01-02"), (time(1, 2), "01:02:00"),
    (timedelta(seconds=61), "0:01:01"),
])
def test_what_json_lacks_is_text(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, range(2), b"x"])
def test_another_type_is_refused(value):
    with pytest.raises(ValueError, match="write it as a text or a number"):
        as_text(value)


# --------------------------------------------------------------------------- arguments of calls

ARGUMENTS = [{"city": "Rome"}, {"days": 3, "on": True}, {"q": 'say "hi"'}, {"deep": {"list": [1, {"a": "b"}]}}, {}]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_arguments_as_text_and_as_an_object_are_one_call(path, tokenizer):
    """vLLM's server parses the text; a template that puts text in as it is gets it. The oracle is the call's JSON,
    which stands in the prompt once, wherever the template writes JSON."""
    source = path.read_text()
    renderings = set()
    for arguments in ARGUMENTS[:4]:
        texts = []
        for given in (arguments, json.dumps(arguments)):
            messages = [{"role": "user", "content": "q"},
                        {"role": "assistant", "content": "", "tool_calls": [call(given)]}]
            try:
                texts.append(rendered(tokenizer, messages, chat_template=source))
            except ValueError as error:                                         # a template that knows no calls
                texts.append(str(error))
        assert texts[0] == texts[1], arguments
        assert "\\\"" not in texts[0] or "hi" in texts[0]                       # nothing is encoded twice
        assert "{'" not in texts[0]                                             # nor is it Python's form
        renderings.add(texts[0])
        if json.dumps(arguments) in texts[0]:
            assert texts[0].count(json.dumps(arguments)) == 1
    without = "idefics3", "phi3", "phi3_5", "qwen2_5_vl", "smollm2", "smolvlm"
    assert ("weather" in "".join(renderings)) == (path.stem not in without)


def test_which_templates_take_text(tokenizer):
    assert [path.stem for path in TEMPLATES if form_of_calls(tokenizer, path.read_text())[0]] == [
        "deepseek_r1_distill", "deepseekv3"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": ', "7", "", "[1]"])
def test_an_episode_and_a_row_have_the_same_call(arguments, tokenizer):
    """What a model wrote and is no object stays its text in an episode, and is a bad row."""
    told = call_of({"id": "call00001", "name": "weather", "arguments": arguments})
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
    if arguments in ('{"a": 1}', ""):
        source = Path(QWEN["chat_template_file"]).read_text()
        in_episode = rendered(tokenizer, [row[0], row[1] | {"tool_calls": [told]}], chat_template=source)
        assert rendered(tokenizer, parse_messages(row, "messages"), chat_template=source) == in_episode
    else:
        assert told["function"]["arguments"] == arguments
        with pytest.raises(ValueError, match="a name, and arguments that are an object or JSON text of one"):
            parse_messages(row, "messages")


@pytest.mark.parametrize("calls", [5, True, "text", [{"function": "f"}], [{"function": ["f"]}], [{"name": 3}], ["f"],
                                   {"name": "f"}, [{"name": "f", "arguments": "[1]"}]])
def test_what_is_no_call_is_a_bad_row(calls):
    with pytest.raises(ValueError, match=r"messages has a call .*; calls are a list, each must have a name"):
        parse_messages([{"role": "assistant", "content": "x", "tool_calls": calls}], "messages")


@pytest.mark.parametrize("content", [None, "", "absent", "text"])
def test_a_message_of_calls_needs_no_content(content, tokenizer, tmp_path):
    """OpenAI's form has null, and a last message may have calls alone."""
    message = {"role": "assistant", "tool_calls": [call('{"city": "Rome"}')]}
    message |= {} if content == "absent" else {"content": content}
    row = {"messages": [{"role": "user", "content": "q"}, message]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    stops, config = [tokenizer.eos_token_id], sft.SFTConfig(**QWEN)
    data = load_conversations([str(tmp_path / "a.jsonl")], tokenizer, stops, config, SFT)
    trained = tokenizer.decode([x for x, own in zip(data.tokens[0].as_py(), data.mask[0].as_py()) if own])
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in trained and "None" not in trained
    assert trained.startswith("text" if content == "text" else "<tool_call>")
    with pytest.raises(ValueError, match="is None; it must be a string"):
        parse_messages([{"role": "user", "content": None}], "prompt")


# --------------------------------------------------------------------------- a prompt that has begun its answer

def prompt_of(messages: list[dict], tokenizer, folder: Path, all_columns: bool = False, **flags) -> str:
    row = {"data_source": "x", "reward_model": {"ground_truth": "1"}, "prompt": messages}
    (folder / "a.jsonl").write_text(json.dumps(row))
    (prompt,) = load_prompts([str(folder / "a.jsonl")], tokenizer, DataConfig(**flags), all_columns)
    assert prompt.messages == messages
    return tokenizer.decode(prompt.tokens)


@pytest.mark.parametrize("said", ["Let me think.", "<think>\nFirst,", "x", "  two  spaces", "1. a\n2."])
def test_a_last_message_of_the_assistant_goes_on(said, tokenizer, tmp_path):
    talks = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
    want = tokenizer.apply_chat_template([*map(dict, talks)], tokenize=False, continue_final_message=True)
    assert prompt_of(talks, tokenizer, tmp_path) == want and want.endswith(f"assistant\n{said}")
    longer = [*map(dict, talks), {"role": "user", "content": "n"}, *map(dict, talks)]
    assert prompt_of(longer, tokenizer, tmp_path) == tokenizer.apply_chat_template(
        [*map(dict, longer)], tokenize=False, continue_final_message=True)
    assert prompt_of(talks, tokenizer, tmp_path, template="plain") == f"q\n\n{said}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_goes_on_as_transformers_does(path, tokenizer, tmp_path):
    talks = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So far"}]
    arguments = {"chat_template": path.read_text(), "tokenize": False, "continue_final_message": True}
    try:
        want = tokenizer.apply_chat_template(talks, **arguments)
    except Exception:                                                           # some close what they render otherwise
        with pytest.raises(ValueError, match="the chat template"):
            prompt_of(talks, tokenizer, tmp_path, chat_template_file=str(path))
        return
    assert prompt_of(talks, tokenizer, tmp_path, chat_template_file=str(path)).endswith(want[-20:])


def test_a_reward_model_reads_one_turn():
    talks = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}]
    assert with_response(talks, " far") == [talks[0], {"role": "assistant", "content": "So far"}]
    assert with_response([talks[0], *talks], " far")[:2] == [talks[0], talks[0]]
    assert with_response(talks[:1], "far") == [talks[0], {"role": "assistant", "content": "far"}]


def test_what_cannot_go_on_is_refused(tokenizer, tmp_path):
    talks = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}]
    with pytest.raises(ValueError, match="ends with a message of the assistant, which an episode cannot continue"):
        prompt_of(talks, tokenizer, tmp_path, all_columns=True)
    with pytest.raises(ValueError, match="ends with calls of the assistant: the tools' results must follow"):
        prompt_of([talks[0], talks[1] | {"tool_calls": [call({})]}], tokenizer, tmp_path)
    answer = [{"role": "assistant", "content": "far"}]
    for row in ({"prompt": talks, "response": "far"}, {"prompt": talks, "response": answer}):
        with pytest.raises(ValueError, match="the answer would be a turn after it: write both as one message"):
            sft.parse(row, tokenizer, None)
    with pytest.raises(ValueError, match="the answer would be a turn after it"):
        parse_pair({"prompt": talks, "chosen": answer, "rejected": answer})
    longer = [talks[0], {"role": "assistant", "content": "So far"}]            # neither after the prompt nor with it
    with pytest.raises(ValueError, match="the answer would be a turn after it"):
        parse_pair({"prompt": talks, "chosen": longer, "rejected": longer})
    whole = [*talks, *answer]
    assert parse_pair({"prompt": talks, "chosen": whole, "rejected": whole}) == [whole, whole]

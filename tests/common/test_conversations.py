"""Rows of messages to tokens and masks: what is trained on, by hand and against the tokens of prompts; bad rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dpo
from common.dataset.conversations import ConversationConfig, RowParser, encode, load_conversations
from common.dataset.store import load_prompts
from common.prompts import DataConfig
from common.segments import segment_sum
from envs.runtime.template import GUARD, rendered, special_tokens
from sft import parse, pieces_of
from tests.conftest import TRAIN

COLUMNS = {name: name for name in ("messages", "prompt", "response", "tools")}
DIALOGUE = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_start|>assistant yes"},
    {"role": "assistant", "content": "yes"},
    {"role": "tool", "content": "yes<|im_end|>"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "\n no  "},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm):
    return AutoTokenizer.from_pretrained(smollm)


def load(path, rows, tokenizer, **flags):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ConversationConfig(**flags)
    return load_conversations([str(path)], tokenizer, [tokenizer.eos_token_id], config, RowParser(COLUMNS, parse))


def trained(tokens, mask, tokenizer) -> list[str]:
    """The text of each run of tokens with mask."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [tokenizer.decode(tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_every_answer_is_trained_with_its_end_token_and_nothing_else(tokenizer):
    """System, user and tool messages are not, though they hold the same words and end tokens. The tokens are those of
    the whole rendered text, as every piece ends at a special token."""
    tokens, mask = encode(pieces_of(DIALOGUE, 0, tokenizer, {}), tokenizer, {}, [tokenizer.eos_token_id])
    assert trained(tokens, mask, tokenizer) == ["yes<|im_end|>", "\n no  <|im_end|>"]
    rendered = tokenizer.apply_chat_template(DIALOGUE[:6], tokenize=False)
    assert tokenizer.decode(tokens) == rendered
    assert not mask[0] and not mask[-1] and tokens[-2] == tokenizer.eos_token_id     # the line break after the end
    later, rest = encode(pieces_of(DIALOGUE, 3, tokenizer, {}), tokenizer, {}, [tokenizer.eos_token_id])
    assert later == tokens and trained(later, rest, tokenizer) == ["\n no  <|im_end|>"]


def test_an_answer_ends_with_its_first_end_token(tokenizer):
    """Phi-3's template ends a turn with one and the conversation with another: `<|end|>` and `</s>`."""
    template = {"chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"
                                 "{{ 'assistant:' if add_generation_prompt else '<|endoftext|>' }}"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    tokens, mask = encode(pieces_of(messages, 0, tokenizer, template), tokenizer, template, stops)
    assert tokens[-1] == stops[1] and trained(tokens, mask, tokenizer) == ["fine<|im_end|>"]


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space first. "prepend": before each text between special tokens (Llama 2, Mistral,
    TinyLlama, by their tokenizer.json); "always" and "first": transformers' own for the same files. A line break is a
    byte of its own, as theirs is."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if kind == "prepend" else kind, split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    texts = ["Yes, it is 12 How many? <|user|> <|assistant|> [INST] [/INST]", "Yes", "How many?<|user|>", "[INST]Yes"]
    made.train_from_iterator(texts * 50, trainers.BpeTrainer(vocab_size=400, special_tokens=special[:3]))
    content = json.loads(made.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {token: len(vocab) + n for n, token in enumerate(special[3:])}
    made = Tokenizer.from_str(json.dumps(content))
    if kind == "prepend":
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


ZEPHYR = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
LLAMA_2 = ("{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} "
           "{{ m.content }} </s>{% endif %}{% endfor %}")
MISTRAL = ("{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
           "{% endif %}{% endfor %}")


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
@pytest.mark.parametrize(("template", "answers"), [(ZEPHYR, ["Yes, it is 12</s>", "Yes</s>"]),
                                                  (LLAMA_2, ["Yes, it is 12 </s>", "Yes </s>"]),
                                                  (MISTRAL, ["Yes, it is 12</s>", "Yes</s>"])])
def test_no_space_is_written_before_a_piece(kind, template, answers):
    """The tokens are those of the whole text, where such tokenizers write a space at the beginning only: the prompt of
    a second question is what a rollout would be given, and an answer begins as the model begins it."""
    tokenizer = sentencepiece(kind)
    tokenizer.chat_template = template
    messages = [{"role": role, "content": text} for role, text in
                (("user", "How many?"), ("assistant", "Yes, it is 12"), ("user", "Yes?"), ("assistant", "Yes"))]
    tokens, mask = encode(pieces_of(messages, 0, tokenizer, {}), tokenizer, {}, [tokenizer.eos_token_id])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"] and len(tokens) > 10
    assert trained(tokens, mask, tokenizer) == answers                  # the decoder strips one space at the beginning


def test_an_answer_has_the_tokens_that_a_policy_would_sample(tokenizer):
    """The prompt is encoded as for rollouts, the answer by itself: here the tokens of both together are others."""
    template = {"chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}"
                                 "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"}
    messages = [{"role": "user", "content": "hi\n"}, {"role": "assistant", "content": ":) fine"}]
    tokens, mask = encode(pieces_of(messages, 0, tokenizer, template), tokenizer, template, [tokenizer.eos_token_id])
    prompt = tokenizer("user:hi\nassistant:")["input_ids"]
    assert tokens == prompt + tokenizer(":) fine<|im_end|>")["input_ids"]
    assert tokens != tokenizer("user:hi\nassistant::) fine<|im_end|>")["input_ids"]
    assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


def test_prompts_are_those_of_a_rollout(tokenizer, tmp_path):
    """The quickstart's prompts, whose solved example is an answer, too, and is not trained on; in both file formats."""
    prompts = load_prompts([str(TRAIN)], tokenizer, DataConfig(max_prompt_length=200))[:4]
    rows = [{"prompt": prompt.messages, "response": f"#### {prompt.ground_truth}"} for prompt in prompts]
    for name in ("rows.parquet", "rows.jsonl"):
        data = load(tmp_path / name, rows, tokenizer)
        assert len(data) == 4 and data.sequence_lengths.min() > 90
        assert data.loaded.lengths == f"{data.sequence_lengths.min()} to {data.sequence_lengths.max()}"
        for i, prompt in enumerate(prompts):
            tokens, mask = data.tokens[i].as_py(), data.mask[i].as_py()
            assert tokens[: len(prompt.tokens)] == prompt.tokens and not any(mask[: len(prompt.tokens)])
            assert trained(tokens, mask, tokenizer) == [f"#### {prompt.ground_truth}<|im_end|>"]
        assert data.loaded.data_hash == load(tmp_path / name, rows, tokenizer).loaded.data_hash
    assert data.loaded.data_hash != load(tmp_path / name, rows[::-1], tokenizer).loaded.data_hash


def test_content_may_be_a_list_of_texts(tokenizer, tmp_path):
    parted = [x | {"content": [{"type": "text", "text": part} for part in (x["content"][:2], x["content"][2:])]}
              for x in DIALOGUE]
    for name in ("a.parquet", "a.jsonl"):
        whole, same = (load(tmp_path / name, [{"messages": rows}], tokenizer) for rows in (DIALOGUE, parted))
        assert whole.tokens[0] == same.tokens[0] and whole.mask[0] == same.mask[0]
    image = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(ValueError, match=r"row 0 .*there are images, and .* is a llama model"):
        load(tmp_path / "a.jsonl", [{"messages": image}], tokenizer)


def test_a_minibatch_has_every_row_once_and_keeps_the_budget(tokenizer, tmp_path, world):
    from transformers import LlamaConfig

    rows = [{"prompt": "x " * n, "response": "y " * n} for n in (3, 50, 9, 20, 1)]
    data = load(tmp_path / "a.jsonl", rows, tokenizer)
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    chosen = [4, 1, 2]
    microbatches = list(data.minibatch(chosen, config, world, max_tokens=60))
    assert len(microbatches) > 1 and sorted(int(i) for b in microbatches for i in b.index) == [0, 1, 2]
    for batch in microbatches:
        assert len(batch) == 1 or len(batch.tokens) <= 60
        counts = segment_sum(batch.mask.double(), batch.cu_seqlens)
        for i, length, count in zip(batch.index, batch.sequence_lengths, counts):
            row = chosen[i]
            assert length == data.sequence_lengths[row] and count == sum(data.mask[row].as_py()) > 1


def test_a_response_may_be_messages(tokenizer, tmp_path):
    """TRL's conversational prompt and completion."""
    rows = [{"prompt": "hi", "response": "good day"},
            {"prompt": [{"role": "user", "content": "hi"}], "response": [{"role": "assistant", "content": "good day"}]}]
    data = load(tmp_path / "a.jsonl", rows, tokenizer)
    assert data.tokens[0] == data.tokens[1] and data.mask[0] == data.mask[1] and sum(data.mask[0].as_py()) > 1


def test_long_rows_are_left_out_or_cut_and_counted(tokenizer, tmp_path):
    rows = [{"prompt": "hi", "response": "a " * n} for n in (1, 30, 400)] + [{"prompt": "long " * 90, "response": "x"}]
    whole = load(tmp_path / "a.jsonl", rows, tokenizer)
    limit = int(whole.sequence_lengths[1]) - 5
    kept = load(tmp_path / "a.jsonl", rows, tokenizer, max_length=limit)
    assert kept.sequence_lengths.tolist() == [whole.sequence_lengths[0]] and kept.loaded.num_filtered == 3
    cut = load(tmp_path / "a.jsonl", rows, tokenizer, max_length=limit, on_long_row="truncate")
    assert cut.sequence_lengths.tolist() == [whole.sequence_lengths[0], limit, limit]
    assert (cut.loaded.num_truncated, cut.loaded.num_filtered) == (2, 1)       # of the last no answer would be left
    assert cut.tokens[1].as_py() == whole.tokens[1].as_py()[:limit]


def test_a_pair_without_a_difference_is_left_out(tokenizer, tmp_path):
    """Two answers that begin alike and are cut before they differ: both would be trained, in opposite directions."""
    pairs = [{"prompt": "hi", "chosen": "so " * n + "yes", "rejected": "so " * n + "no"} for n in (2, 50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    config = ConversationConfig(max_length=40, on_long_row="truncate")
    data = load_conversations([str(tmp_path / "a.jsonl")], tokenizer, [2], config, RowParser(columns, dpo.parse, 2))
    assert (len(data), data.loaded.num_filtered, data.loaded.num_truncated) == (1, 1, 0)
    assert data.tokens[0] != data.tokens[1]


THINKING = ("{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
            "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}")


@pytest.mark.parametrize(("row", "flags", "rule"), [
    ({"text": "hi"}, {}, "neither messages, nor a prompt and a response"),
    ({"prompt": "hi", "response": 5}, {}, "response is 5; it must name a column of strings or lists"),
    ({"prompt": "hi", "answer": "5"}, {}, "neither messages, nor a prompt and a response: name the columns"),
    ({"prompt": "hi", "response": " "}, {"template": "chat"}, None),
    ({"messages": [{"role": "user", "content": "hi"}]}, {}, "there must be an answer"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, {}, "and a message before it"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, {}, "whose content is None"),
    ({"messages": DIALOGUE}, {"template": "plain"}, "plain knows no turns"),
    ({"messages": [DIALOGUE[1], DIALOGUE[2] | {"weight": 0}]}, {}, "a message has a weight that is not 1"),
    ({"messages": [DIALOGUE[1], DIALOGUE[2] | {"weight": 1}], "tools": []}, {}, None),
    ({"messages": DIALOGUE, "tools": [{"type": "function"}]}, {}, "tools is not empty"),
    ({"prompt": "a", "response": "b", "tools": '[{"type": "function"}]'}, {}, "tools is not empty"),
    ({"messages": [*DIALOGUE[1:3], *DIALOGUE[4:6]]}, {"chat_template_file": THINKING}, None),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"},
                   {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]},
     {"chat_template_file": THINKING}, r"what comes before message 3 \(from 0\) otherwise .*a row of its own"),
    ({"prompt": "a", "response": "b"},
     {"chat_template_file": THINKING.replace("%}<|im_start|>{% endif", "%}?{% endif")},
     r"what comes before message 1 \(from 0\) otherwise"),
    ({"prompt": "a", "response": "b"}, {"chat_template_file": "{% for m in messages %}{{ m.content }}{% endfor %}"},
     r"no end token \(<\|im_end\|>\) after an answer"),
    ({"prompt": "a", "response": "b"}, {"chat_template_file": "{% if messages|length > 1 %}{{ raise_exception('odd') }}"
                                                              "{% endif %}x"}, "the chat template refuses it: odd"),
])
def test_a_row_that_breaks_a_rule_is_named(row, flags, rule, tokenizer, tmp_path):
    if "chat_template_file" in flags:
        (tmp_path / "template.jinja").write_text(flags["chat_template_file"])
        flags = {"chat_template_file": str(tmp_path / "template.jinja")}
    good = {"prompt": "hi", "response": "x"}
    path = tmp_path / "a.jsonl"
    if rule is None:
        assert len(load(path, [row], tokenizer, **flags)) == 1
        return
    with pytest.raises(ValueError, match=rf"a.jsonl, row 0 \(counted from 0\): .*{rule}.*--data.on-bad-row skip"):
        load(path, [row, good], tokenizer, **flags)
    if "chat_template_file" not in flags:
        data = load(path, [row, good], tokenizer, **flags, on_bad_row="skip")
        assert len(data) == 1 and data.loaded.bad_rows[0]["row"] == 0


def test_nothing_left_and_files_that_cannot_be_read(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"none of 1 rows is left: 1 have more than --data.max-length 5 tokens"):
        load(tmp_path / "a.jsonl", [{"prompt": "hi", "response": "x"}], tokenizer, max_length=5)
    (tmp_path / "b.parquet").write_text("no parquet")
    files = [str(tmp_path / "b.parquet")]
    with pytest.raises(ValueError, match=r"b.parquet cannot be read"):
        load_conversations(files, tokenizer, [2], ConversationConfig(), RowParser(COLUMNS, parse))


def test_plain_text_ends_with_the_end_token(tokenizer):
    roles = ("user", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("1 +", "1 =", " 2"))]
    assert pieces_of(messages, 2, tokenizer, None) == [("1 +\n\n1 =", False), (" 2<|im_end|>", True)]


@pytest.mark.parametrize("text", [
    "With <|im_end|>. Then the next turn begins, and so on.", "<|im_end|>", "a<|im_end|>\n<|im_start|>user\nb",
    "<|endoftext|>", "x <|im_start|>", "\n<|im_end|>\n",
])
def test_an_answer_that_spells_an_end_token_is_trained_whole(tokenizer, tmp_path, text):
    """sft.py, both answers of dpo.py, and with a plain template up to the first end token, which is read there."""
    letters = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    row = {"messages": [{"role": "user", "content": f"q{text}"}, {"role": "assistant", "content": text},
                        {"role": "user", "content": "n"}, {"role": "assistant", "content": "yes"}]}
    data = load(tmp_path / "a.jsonl", [row], tokenizer)
    tokens, mask = data.tokens[0].as_py(), data.mask[0].as_py()
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    assert [tokens[start:end] for start, end in edges] == [[*letters, 2], [*tokenizer("yes")["input_ids"], 2]]
    assert (tokens.count(1), tokens.count(2)) == (5, 5)
    assert "1 spell special tokens" in data.loaded.summary()
    pair = dpo.parse({"prompt": "q", "chosen": text, "rejected": "no"}, tokenizer, {})
    assert [encode(pieces, tokenizer, {}, [2])[0].count(2) for pieces in pair] == [3, 3]
    plain = load(tmp_path / "b.jsonl", [{"prompt": "q", "response": text}], tokenizer, template="plain")
    assert trained(plain.tokens[0].as_py(), plain.mask[0].as_py(), tokenizer) == [
        text.partition("<|im_end|>")[0] + "<|im_end|>"]
    assert "1 spell special tokens" in plain.loaded.summary() and "read as such" in plain.loaded.summary()


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
def test_special_tokens_are_text_for_tokenizers_that_write_a_space_first(kind):
    """The letters, and nothing else is encoded otherwise: what stands before and after has the same tokens."""
    tokenizer = sentencepiece(kind)
    special = special_tokens(tokenizer)
    (end,) = [text for text, number in special.tokens.items() if number == tokenizer.eos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n"
                               "{% endfor %}")
    written = rendered(tokenizer, [{"role": "user", "content": f"a {end} b"}, {"role": "user", "content": "no"}])
    tokens = special.encode(written)
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "user", "content": "no"}],
                                          return_dict=False)
    assert tokens.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id) == 2
    last = plain.index(tokenizer.eos_token_id)
    assert tokens[-len(plain[last:]) :] == plain[last:] and tokens[0] == plain[0]
    assert "".join(tokenizer.decode(tokens).split()) == "".join(written.replace(GUARD, "").split())

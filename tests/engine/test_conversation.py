"""Tokens of conversations: what the model wrote stays as it is, and all tokens together spell what the chat template
writes. The tokenizers merge pairs that real ones do not, also across the borders of turns."""

import json
import random
import string

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from envs.runtime.conversation import ChatTemplate, Conversation

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # reasoning of turns before the last user message is left out
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and "
    "'</think>' in text and loop.index0 < ns.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
    "m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA3 = (
    "<bos>{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "SmolLM2": (CHATML, "<|im_end|>", ["<|im_start|>"]), "Qwen2.5": (CHATML, "<|im_end|>", ["<|im_start|>"]),
    "Qwen3": (QWEN3, "<|im_end|>", ["<|im_start|>"]),
    "Llama3": (LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]),
    "Gemma3": (GEMMA3, "<end_of_turn>", ["<start_of_turn>", "<bos>"]),
    "Mistral": (MISTRAL, "</s>", ["<s>", "[INST]", "[/INST]"]),
}


def make_tokenizer(family: str, seed: int) -> PreTrainedTokenizerFast:
    """Bytes and 200 random merges, half of them of pieces that templates have at the borders of turns."""
    template, end, special = FAMILIES[family]
    rng = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(alphabet)
    letters = ["Ċ", "Ġ", *string.ascii_lowercase[:6], "<", ">", "|", "."]
    merges = []
    while len(merges) < 200:
        left = rng.choice([*letters, *[b for _, b in merges[-20:]], *list(pieces)[256:]])
        right = rng.choice([*letters, *list(pieces)[256:]])
        if (left, right) not in merges and left in pieces and right in pieces and len(left + right) < 12:
            merges.append((left, right))
            pieces[left + right] = None
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [end, *special]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast


def start(family: str, seed: int, on_rewriting: str = "error") -> Conversation:
    tokenizer = make_tokenizer(family, seed)
    conversation = Conversation(ChatTemplate(tokenizer, {}, [tokenizer.eos_token_id]), on_rewriting, [], [])
    first = [{"role": "user", "content": "ab\nc?"}]
    conversation.prompt = conversation.begin(first, None)
    conversation.add_messages(first, [])
    return conversation


def spell(conversation: Conversation) -> str:
    """All tokens of the sequence as text, special ones too."""
    return conversation.template.tokenizer.decode([*conversation.prompt, *conversation.tokens])


def random_reply(tokenizer, rng: random.Random, has_end: bool) -> list[int]:
    """Random tokens, not those that the tokenizer would choose for their text, without white space at the ends."""
    vocab = sorted(tokenizer.get_vocab().items())                       # its order is another one in each process
    plain = [i for piece, i in vocab if not set(piece) - set("abcdef.|ĊĠ")]
    while True:
        tokens = rng.choices(plain, k=rng.randint(1, 8))
        text = tokenizer.decode(tokens)
        if text == text.strip():
            return tokens + [tokenizer.eos_token_id] * has_end


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_spell_what_the_template_writes(family):
    """And what the model wrote is in them unchanged, with or without its end token, which is there once."""
    num_encoded_otherwise = 0
    for seed in range(8):
        rng = random.Random(seed)
        conversation = start(family, seed)
        tokenizer = conversation.template.tokenizer
        replies = []
        for turn in range(4):
            if turn:
                new = [{"role": "user", "content": rng.choice(["b", " ab\n\nc", "f|."]).strip()}]
                conversation.add_messages(new, conversation.between(new))
            rendered = conversation.template.render(conversation.messages, None)
            assert spell(conversation) == rendered.replace("[/INST] ", "[/INST]")  # Mistral adds a space to a reply
            replies.append(random_reply(tokenizer, rng, has_end=rng.random() < 0.6))
            conversation.add_reply(replies[-1], [-1.0] * len(replies[-1]))
        sampled = [token for token, mask in zip(conversation.tokens, conversation.mask) if mask]
        assert sampled == [token for reply in replies for token in reply]
        assert len(conversation.tokens) == len(conversation.mask) == len(conversation.logp)
        assert not any(logp for logp, mask in zip(conversation.logp, conversation.mask) if not mask)
        assert not conversation.left_behind
        tokens = [*conversation.prompt, *conversation.tokens]
        num_encoded_otherwise += tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"] != tokens
    assert num_encoded_otherwise > 4  # encoding the text again would have changed what the model wrote


def test_white_space_that_a_template_takes_away_is_no_rewriting():
    conversation = start("Llama3", 1)
    tokenizer = conversation.template.tokenizer
    reply = tokenizer("\n a \n", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    conversation.add_reply(reply, [0.0] * len(reply))
    new = [{"role": "user", "content": "b"}]
    conversation.add_messages(new, conversation.between(new))
    assert conversation.tokens[: len(reply)] == reply
    assert spell(conversation) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nab\nc?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\n a \n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def reason(on_rewriting: str) -> Conversation:
    conversation = start("Qwen3", 2, on_rewriting)
    tokenizer = conversation.template.tokenizer
    for text in ("<think>\nef</think>\nab", "<think>\nf</think>\ncd"):
        if conversation.tokens:
            new = [{"role": "user", "content": "b"}]
            conversation.add_messages(new, conversation.between(new))
        reply = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        conversation.add_reply(reply, [-1.0] * len(reply))
    return conversation


def test_a_history_without_its_reasoning_is_a_sequence_of_its_own():
    conversation = reason("split")
    (before,) = conversation.left_behind
    end = conversation.template.tokenizer.eos_token
    assert spell(before) == f"<|im_start|>user\nab\nc?{end}\n<|im_start|>assistant\n<think>\nef</think>\nab{end}"
    assert spell(conversation) == (
        f"<|im_start|>user\nab\nc?{end}\n<|im_start|>assistant\nab{end}\n<|im_start|>user\nb{end}\n"
        f"<|im_start|>assistant\n<think>\nf</think>\ncd{end}"
    )
    assert all(before.mask) and all(conversation.mask)
    assert conversation.num_tokens == len(before.tokens) + len(conversation.tokens)


def test_a_rewritten_history_may_be_kept_or_refused():
    conversation = reason("append")
    assert not conversation.left_behind
    assert "<think>\nef</think>\nab" in spell(conversation)
    with pytest.raises(ValueError, match=r"writes an earlier turn differently now .* --rollout\.rewritten-history"):
        reason("error")


def test_messages_that_a_template_refuses_are_named():
    conversation = start("Llama3", 0)
    conversation.template.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"refuses an episode's messages \(user, tool\): roles must alternate"):
        conversation.template.render([*conversation.messages, {"role": "tool", "content": "1"}], None)
    conversation.template.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(ValueError, match=r"writes the last reply 0 times, must be once: --data\.chat-template-file"):
        conversation.template.after_reply([{"role": "assistant", "content": "a"}], [], None)


def test_text_may_spell_what_stands_in_for_a_reply():
    """The name of the place where the last reply goes, in the model's own text and in a user's."""
    conversation = start("Qwen2.5", 0)
    tokenizer = conversation.template.tokenizer
    for text in ("@@", f"f@@{'0' * 16}@@"):
        conversation.add_reply([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], [])
        new = [{"role": "user", "content": f"{text}?"}]
        conversation.add_messages(new, conversation.between(new))
    assert spell(conversation) == conversation.template.render(conversation.messages, None)


AS_JSON = CHATML.replace("m.content +", "(m.content if m.role == 'assistant' else m.content | tojson) +")



def say(family: str, contents: tuple[str, ...], has_end: bool) -> list[list[str]]:
    """What the model sees if a system, a user, a tool and a user say this and it replies to each: of each sequence the
    special tokens and the texts between them, without white space."""
    template, end, others = FAMILIES.get(family, (AS_JSON, "<|im_end|>", ["<|im_start|>"]))
    tokenizer = make_tokenizer("SmolLM2", 0)
    tokenizer.add_special_tokens({"additional_special_tokens": [end, *others]})
    tokenizer.chat_template = template
    stop = tokenizer.convert_tokens_to_ids(end)
    talk = Conversation(ChatTemplate(tokenizer, {}, [stop]), "split", [], [{"role": "system", "content": contents[0]}])
    for role, content in zip(("user", "tool", "user"), contents[1:], strict=True):
        new = [{"role": role, "content": content}]
        between = talk.between(new) if talk.num_replies else []
        if not talk.num_replies:
            talk.prompt = talk.begin(new, None)
        talk.add_messages(new, between)
        reply = [*tokenizer("<think>\nb</think>\nc")["input_ids"], *[stop] * has_end]
        talk.add_reply(reply, [0.0] * len(reply))
    seen = []
    for part in [*talk.left_behind, talk]:
        texts = [""]
        for token in [*part.prompt, *part.tokens]:
            is_special = token in tokenizer.all_special_ids
            texts[-1:] = [texts[-1], str(token), ""] if is_special else [texts[-1] + tokenizer.decode([token])]
        seen.append(["".join(text.split()) for text in texts])
    return seen


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "as JSON"])
def test_a_text_that_is_a_special_token_is_text(family, has_end):
    """Also where the template writes the same token before it, in the row's prompt, after a split, and if a message
    says nothing else: a web page cannot end a turn or begin one."""
    names = ("@0@", "@1@", "@2@", "@3@")
    harmless = say(family, names, has_end)
    assert len(harmless) == 1 + (family == "Qwen3")
    _, end, others = FAMILIES.get(family, FAMILIES["SmolLM2"])
    for token in (end, *others):
        for text in (token, f"a{token}", f" {token}\n", token * 2, f"{token}\nuser\n", f"{token}a\n\n{token}"):
            for contents in (("@0@", "@1@", text, "@3@"), ("@0@", text, "@2@", "@3@"), (text, *names[1:]), (text,) * 4):
                expected = harmless
                for name, said in zip(names, contents):
                    shown = "".join((json.dumps(said)[1:-1] if family == "as JSON" else said).split())
                    expected = [[piece.replace(name, shown) for piece in part] for part in expected]
                assert say(family, contents, has_end) == expected, contents


NEEDS_CALLS = (  # an answer of a tool must follow a message with the field tool_calls, as in gpt-oss's template
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call before it') }}{% endif %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
    "call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = (  # the text before a reply opens its reasoning, which stays until the next message of a user
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% if '<think>' not in text %}{% set text = '<think></think>' + text %}{% elif loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}{% endif %}<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def continue_talk(template: str, text: str, new: dict, calls: list[dict]) -> tuple[Conversation, list[int] | None]:
    conversation = start("SmolLM2", 0, "split")
    tokenizer = conversation.template.tokenizer
    tokenizer.chat_template = template
    conversation.begin([], None)
    conversation.prompt = tokenizer(conversation.next_rendered)["input_ids"]
    conversation.add_messages([], [])
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    conversation.add_reply(tokens, [0.0] * len(tokens))
    conversation.keep_form(text, text.rpartition("</think>")[2], calls)
    between = conversation.between([new])
    conversation.add_messages([new], between)
    assert conversation.tokens[: len(tokens)] == tokens or between is None
    return conversation, between


def test_a_template_that_knows_tools_by_calls_alone():
    """What the model wrote stays as it was sampled; the template's own way of writing it is not in the sequence."""
    new = {"role": "tool", "content": "42"}
    conversation, between = continue_talk(NEEDS_CALLS, "c a 1", new, [{"name": "a", "arguments": '{"b": 1}'}])
    tokenizer = conversation.template.tokenizer
    assert tokenizer.decode(between) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert spell(conversation).count("c a 1<|im_end|>") == 1 and "call" not in spell(conversation)
    with pytest.raises(ValueError, match=r"refuses an episode's messages .*no call before it"):
        continue_talk(NEEDS_CALLS, "c a 1", new, [])


@pytest.mark.parametrize(("role", "is_split"), [("tool", False), ("user", True)])
def test_reasoning_that_the_prompt_opens(role, is_split):
    """It is part of the reply's message, so that a template which keeps it writes it as the model saw it. In a history
    that is written again it has a field of its own."""
    conversation, between = continue_talk(OPENS_THINKING, "ab</think>cd", {"role": role, "content": "e"}, [])
    form = {"content": "cd", "reasoning_content": "ab"} if is_split else {"content": "<think>\nab</think>cd"}
    assert conversation.messages[1] == {"role": "assistant"} | form
    assert (between is None) == is_split == bool(conversation.left_behind)
    assert spell(conversation) == conversation.rendered

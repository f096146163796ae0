"""common/distillation: spelling, alignment and the divergence at spans, against slow loops."""

import random

import pytest
import torch
from transformers import AutoTokenizer

import distill
from common.batch import Batch
from common.distillation import alignment, reading, spelling
from common.distillation.alignment import align
from common.distillation.spelling import SharedWords, Spelling
from common.kernels import Head
from tests.common.other_tokenizers import TEXTS, save_byte_level, save_sentencepiece

MORE = ["", "a", " 🙂🙂", "naïve", "  two  spaces\n\n\tand tabs ", "<|im_end|> is spelled, as is </s>", "12345678 + 99"]


@pytest.fixture(scope="module")
def spellings(tiny_llama, tmp_path_factory) -> dict[str, Spelling]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for name, save in {"bytes": save_byte_level, "pieces": save_sentencepiece}.items():
        (folder / name).mkdir()
        save(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        found[name] = Spelling(tokenizer, spelling.end_of_turn(str(folder / name), tokenizer, {}), "--teacher t")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    found["ours"] = Spelling(tokenizer, spelling.end_of_turn(tiny_llama, tokenizer, {}), "--model m")
    return found


def bytes_of(spelling: Spelling, tokens: list[int]) -> bytes:
    """The bytes by the tokenizer's own decoder, token by token where a token alone is text."""
    return b"".join(spelling.text[token] for token in tokens)


def slow_spans(ours: list[bytes], theirs: list[bytes]) -> tuple[list[int], list[int]]:
    """Every pair of beginnings that spell the same bytes is a boundary."""
    cuts = []
    for i in range(1, len(ours) + 1):
        for j in range(1, len(theirs) + 1):
            if b"".join(ours[:i]) == b"".join(theirs[:j]):
                cuts.append((i, j))
    spans = [[], []]
    for side, last in ((0, len(ours)), (1, len(theirs))):
        for t in range(last):
            spans[side].append(next((n for n, cut in enumerate(cuts) if t < cut[side]), -1))
    return spans[0], spans[1]


def test_tokens_spell_what_the_tokenizer_decodes(spellings):
    """Whole texts, so that a character of several tokens is one; the space before a text is the tokenizer's own."""
    for name, spelt in spellings.items():
        for text in TEXTS[:4] + MORE:
            whole = bytes_of(spelt, spelt.encode(text)).decode()
            assert whole.removeprefix(" " if name == "pieces" else "") == text, (name, text)
    assert spellings["ours"].tokenizer.convert_ids_to_tokens(spellings["ours"].end) == "<|im_end|>"
    assert spellings["bytes"].tokenizer.convert_ids_to_tokens(spellings["bytes"].end) == "<|stop|>"
    assert spellings["pieces"].tokenizer.convert_ids_to_tokens(spellings["pieces"].end) == "</s>"


@pytest.mark.parametrize("teacher", ["bytes", "pieces"])
def test_spans_are_those_of_a_slow_loop(teacher, spellings):
    """Texts as the policy's tokenizer cuts them, and cut at random: single bytes split characters."""
    ours, theirs = spellings["ours"], spellings[teacher]
    words = SharedWords(ours, theirs)
    generator = random.Random(0)
    of_byte = {spelt: token for token, spelt in ours.text.items() if len(spelt) == 1}
    several = 0
    for text in TEXTS[:4] + MORE:
        for share in (0.0, 0.5, 1.0):
            response = []
            for token in ours.encode(text):
                in_bytes = [of_byte[bytes([byte])] for byte in ours.text[token] if bytes([byte]) in of_byte]
                is_cut = len(in_bytes) == len(ours.text[token]) and generator.random() < share
                response += in_bytes if is_cut else [token]
            found = align([*response, ours.end], ours, theirs, words)
            their_bytes = [theirs.text[token] for token in found.tokens[:-1]]
            alignment.drop_first_space(their_bytes, text.encode())
            assert b"".join(their_bytes).decode() == text and found.tokens[-1] == theirs.end
            our_spans, their_spans = slow_spans([ours.text[token] for token in response], their_bytes)
            count = max([*our_spans, -1]) + 1
            assert found.ours == [*our_spans, count] and found.theirs == [*their_spans, count], text
            assert found.num_spans == count + 1
            several += sum(found.ours.count(span) > 1 or found.theirs.count(span) > 1 for span in range(count))
    assert several > 20


def test_equal_tokenizers_have_a_span_for_each_token(spellings):
    ours = spellings["ours"]
    words = SharedWords(ours, ours)
    response = [*ours.encode(TEXTS[0]), ours.end]
    found = align(response, ours, ours, words)
    assert found.tokens == response and found.ours == found.theirs == [*range(len(response))]
    assert len(words.ours) == len(ours.tokenizer) and torch.equal(words.ours, words.theirs)


def test_bytes_that_are_no_text_are_left_out_and_what_follows_is_not(spellings):
    ours, theirs = spellings["ours"], spellings["bytes"]
    of_byte = {spelt: token for token, spelt in ours.text.items() if len(spelt) == 1}
    broken = [of_byte[bytes([byte])] for byte in "🙂".encode()[:2]]
    begin, end = ours.encode("so"), ours.encode(" it is")
    found = align(begin + broken + end, ours, theirs, SharedWords(ours, theirs))
    assert theirs.tokenizer.decode(found.tokens) == "so\ufffd it is"
    assert found.ours[len(begin) : len(begin) + 2] == [-1, -1]
    assert -1 not in found.ours[: len(begin)] + found.ours[len(begin) + 2 :]
    assert found.theirs.count(-1) == len(theirs.encode("\ufffd"))
    cut = align(begin + broken, ours, theirs, SharedWords(ours, theirs))    # a response that ended within a character
    assert cut.ours[-2:] == [-1, -1] and cut.ours[0] >= 0


def test_a_teacher_that_reads_another_text_is_left_out_from_there_on(spellings):
    """A normalizer: the teacher reads what follows "Ü" otherwise."""
    ours = spellings["ours"]
    lower = Spelling(AutoTokenizer.from_pretrained(ours.tokenizer.name_or_path), ours.end, "t")
    plain = lower.encode
    lower.encode = lambda text: plain(text.replace("A", "a"))
    response = [*ours.encode("no A here"), ours.end]
    found = align(response, ours, lower, SharedWords(ours, lower))
    at = next(n for n, token in enumerate(response) if b"A" in ours.text.get(token, b""))
    assert found.ours[:at] == [*range(at)] and set(found.ours[at:-1]) == {-1} and found.ours[-1] == at


def test_special_tokens_are_paired_by_name_and_the_end_by_what_it_does(spellings):
    """<|endoftext|> is in both; <|im_start|> only in one, and in the middle it is read as text."""
    ours, theirs = spellings["ours"], spellings["bytes"]
    names = {name: number for number, name in ours.special.items()}
    middle = [names["<|im_start|>"], *ours.encode("x"), names["<|endoftext|>"]]
    found = align([*middle, *ours.encode("y"), ours.end], ours, theirs, SharedWords(ours, theirs))
    assert theirs.tokenizer.decode(found.tokens) == "<|im_start|>x<|endoftext|>y<|stop|>" and -1 not in found.ours
    assert [found.tokens[-1], found.ours[-1]] == [theirs.end, found.num_spans - 1]
    last = align([*ours.encode("x"), names["<|im_start|>"]], ours, theirs, SharedWords(ours, theirs))
    assert last.ours == [0, -1] and theirs.tokenizer.decode(last.tokens) == "x"


def test_tokenizers_without_bytes_are_refused(spellings):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="--teacher t: its tokens differ from those of --model and cannot be compared"):
        Spelling(PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]"), 0, "--teacher t")


# --------------------------------------------------------------------------- the divergence at spans

def slow_divergence(name, p, q, beta=0.3):
    """Of two lists of probabilities, event by event."""
    def kl(a, b):
        return sum(x * (x.log() - y.log()) for x, y in zip(a, b))

    if name == "jsd":
        m = [beta * y + (1 - beta) * x for x, y in zip(p, q)]
        return beta * kl(q, m) + (1 - beta) * kl(p, m)
    return kl(p, q) if name == "reverse-kl" else kl(q, p)


@pytest.mark.parametrize("divergence", ["reverse-kl", "forward-kl", "jsd"])
@pytest.mark.parametrize("teacher", ["bytes", "pieces"])
def test_value_and_gradient_are_those_of_a_slow_loop(teacher, divergence, spellings):
    """float64, for a response with spans of one and of several tokens: sums of probabilities, one word at a time."""
    ours, theirs = spellings["ours"], spellings[teacher]
    words = SharedWords(ours, theirs)
    response = [*ours.encode("naïve 12 apples, 🙂"), ours.end]
    found = align(response, ours, theirs, words)
    sizes = len(ours.tokenizer) + 2, len(theirs.tokenizer) + 3      # heads are padded
    generator = torch.Generator().manual_seed(1)
    hidden, weight, their_hidden, their_weight = (
        torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        for rows, columns in ((len(response), 4), (sizes[0], 4), (len(found.tokens), 5), (sizes[1], 5))
    )
    for states, head, tokens in ((hidden, weight, response), (their_hidden, their_weight, found.tokens)):
        states[:, 0] = 1                                            # the response is likely: spans have some weight
        head[tokens, 0] = 7
    both = [hidden.requires_grad_(), weight.requires_grad_()]
    args = distill.Args(model="m", train_data=("x",), divergence=divergence, beta=0.3)
    mine = reading.Reading(hidden, Head(weight), torch.tensor(response), torch.tensor(found.ours))
    other = reading.Reading(their_hidden, Head(their_weight), torch.tensor(found.tokens), torch.tensor(found.theirs))
    values = reading.Comparison([], [], distill.divergence_of(args), 0.7).of_spans(mine, other, words)
    weights = torch.linspace(1, 2, len(response), dtype=torch.float64)
    grads = torch.autograd.grad((values * weights).sum(), both)

    p = (hidden @ weight.T / 0.7).softmax(1)
    q = (their_hidden @ their_weight.T / 0.7).softmax(1)
    shared = {}
    for number in range(len(ours.tokenizer)):
        for other_number in words.theirs.tolist():
            same_text = number in ours.text and ours.text[number] == theirs.text.get(other_number)
            same_name = ours.special.get(number, 0) == theirs.special.get(other_number, 1) and number != ours.end
            if same_text or same_name or (number, other_number) == (ours.end, theirs.end):
                shared[number] = other_number
    total = 0.0
    kinds = set()
    for span in range(found.num_spans):
        at = [t for t, number in enumerate(found.ours) if number == span]
        there = [t for t, number in enumerate(found.theirs) if number == span]
        if len(at) == len(there) == 1 and shared.get(response[at[0]]) == found.tokens[there[0]]:
            a = [p[at[0], x] for x in shared]
            b = [q[there[0], y] for y in shared.values()]
        else:
            a = [torch.stack([p[t, response[t]] for t in at]).prod()]
            b = [torch.stack([q[t, found.tokens[t]] for t in there]).prod()]
        kinds.add(len(a))
        value = slow_divergence(divergence, [*a, 1 - sum(a)], [*b, 1 - sum(b)])
        assert values[at[0]].item() == pytest.approx(value.item(), rel=1e-8, abs=1e-12)
        assert not values[at[1:]].any()
        total = total + value * weights[at[0]]
    assert kinds == {1, len(shared)} and len(shared) > 100 and total > 0.1
    for ours_, expected in zip(grads, torch.autograd.grad(total, both)):
        assert torch.allclose(ours_, expected, rtol=1e-8, atol=1e-12) and expected.abs().max() > 1e-3


def test_with_equal_tokenizers_the_numbers_are_those_of_today(spellings):
    """To the digit, values and gradients: through words and spans, and token by token."""
    ours = spellings["ours"]
    words = SharedWords(ours, ours)
    response = [*ours.encode(TEXTS[0]), ours.end]
    generator = torch.Generator().manual_seed(2)
    size = len(ours.tokenizer)
    hidden, weight, their_hidden, their_weight = (torch.randn(rows, 8, generator=generator) / 2
                                                  for rows in (len(response), size, len(response), size))
    both = [hidden.requires_grad_(), weight.requires_grad_()]
    spans, tokens = torch.arange(len(response)), torch.tensor(response)
    mine = reading.Reading(hidden, Head(weight), tokens, spans)
    other = reading.Reading(their_hidden, Head(their_weight), tokens, spans)
    for divergence in distill.DIVERGENCES:
        of_words = distill.divergence_of(distill.Args(model="m", train_data=("x",), divergence=divergence))
        comparison = reading.Comparison([], [], of_words, 0.7)
        aligned, today = comparison.of_spans(mine, other, words), comparison.of_tokens((hidden, Head(weight)), other)
        assert torch.equal(aligned, today) and today.min() > 0
        for one, same in zip(torch.autograd.grad(aligned.sum(), both), torch.autograd.grad(today.sum(), both)):
            assert torch.equal(one, same)


def test_spans_that_are_certain_have_finite_numbers(spellings):
    ours, theirs = spellings["ours"], spellings["bytes"]
    words = SharedWords(ours, theirs)
    hidden = torch.ones(2, 1, requires_grad=True)
    weight = torch.full((len(ours.tokenizer), 1), -1e4).index_fill(0, torch.tensor([5]), 1e4)
    token = torch.tensor([5, 5])
    mine = reading.Reading(hidden, Head(weight), token, torch.tensor([0, 0]))
    head = Head(torch.zeros(len(theirs.tokenizer), 1))
    other = reading.Reading(torch.zeros(1, 1), head, token[:1], torch.tensor([0]))
    for divergence in distill.DIVERGENCES:
        args = distill.Args(model="m", train_data=("x",), divergence=divergence)
        comparison = reading.Comparison([], [], distill.divergence_of(args), 1.0)
        value = comparison.of_spans(mine, other, words)
        (grad,) = torch.autograd.grad(value.sum(), hidden)
        assert value.isfinite().all() and grad.isfinite().all() and value[0] > 0.1


@pytest.mark.parametrize("has_other_tokens", [False, True])
def test_a_rejected_token_takes_its_span_along(has_other_tokens, spellings):
    """--correction.reject takes tokens out of the mask after the lesson was made: the others keep their values."""
    ours = spellings["ours"]
    theirs = spellings["bytes"] if has_other_tokens else ours
    words = SharedWords(ours, theirs)
    of_byte = {spelt: token for token, spelt in ours.text.items() if len(spelt) == 1}
    response = [of_byte[b"t"], of_byte[b"h"], of_byte[b"e"], *ours.encode(" apples are left"), ours.end]
    found = align(response, ours, theirs, words)
    if not has_other_tokens:
        found.tokens, found.theirs, found.ours = response, [*range(len(response))], [*range(len(response))]
    generator = torch.Generator().manual_seed(4)
    head, their_head = (Head(torch.randn(len(x.tokenizer), 4, generator=generator)) for x in (ours, theirs))
    hidden, their_hidden = (torch.randn(len(tokens), 4, generator=generator) for tokens in (response, found.tokens))

    class Teacher:
        def hidden_states(self, part):
            return their_hidden

        def free_unsharded(self):
            pass

    batches = []
    for tokens, spans in ((response, found.ours), (found.tokens, found.theirs)):
        batch = Batch.build([[1, 2]], [tokens])
        batch.extra["span"] = torch.tensor([-1, -1, *spans])
        batch.response_extra["teacher"] = torch.tensor([0])
        batches.append(batch)
    microbatch, lesson = batches
    divergence = distill.divergence_of(distill.Args(model="m", train_data=("x",)))
    comparison = reading.Comparison([Teacher()], [words if has_other_tokens else None], divergence, 1.0)
    whole = comparison.of(microbatch, lesson, [their_head])(hidden, head)
    rejected = 1
    microbatch.mask = microbatch.mask.index_fill(0, torch.tensor([2 + rejected]), False)
    kept = [t for t in range(len(response)) if t != rejected]
    rest = comparison.of(microbatch, lesson, [their_head])(hidden[kept], head)
    lost = [t for t in range(len(response)) if found.ours[t] == found.ours[rejected]]
    assert (len(lost) > 1) == has_other_tokens
    want = whole.index_fill(0, torch.tensor(lost), 0.0)[kept]
    assert torch.allclose(rest, want) and want.count_nonzero() > 1
    is_taught = reading.spans_of(microbatch) >= 0
    assert is_taught.tolist() == [False, False, *(t not in lost for t in range(len(response)))]

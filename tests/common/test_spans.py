"""Scores of parts of a text on the tokens of those parts, against a search character by character."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.prompts import Prompt
from common.rollout import Sample
from common.rollouts.gather import gather_rollout
from common.rollouts.spans import find_spans
from envs.runtime.response import Response
from tests.conftest import MODEL

TEXTS = ["First, add 3 and 4.\nThat is 7.\n#### 7", "Ünïcödé 🙂🙂 and 日本語 <think>no</think> end", " a", "x" * 40,
         "one  two\t\tthree\n\n\nfour   "]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def sampled(tokenizer, text: str, index: int, extras: dict, stop: bool = True) -> Sample:
    """A response of the model, with its stop token."""
    tokens = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * stop
    prompt = Prompt(tokenizer.encode("<|im_start|>assistant\n"), "source", "0", {}, [])
    response = Response(tokens, [-0.5] * len(tokens), "stop" if stop else "length")
    return Sample(index, index // 2, 10 + index, prompt, response, score=1.0, extras=extras,
                  text=response.text(tokenizer))


def steps_of(text: str, width: int) -> dict[str, list[float]]:
    """Steps of `width` characters, the last one shorter; as a reward worker hands them over."""
    ends = [float(end) for end in [*range(width, len(text), width), len(text)]]
    return {"step_scores": [float(n + 1) for n in range(len(ends))], "step_ends": ends}


@pytest.mark.parametrize("width", [1, 3, 7, 50])
def test_each_token_has_the_score_of_its_span(tokenizer, world, width):
    samples = [sampled(tokenizer, text, i, steps_of(text, width)) for i, text in enumerate(TEXTS)]
    rollout = gather_rollout(samples)
    spans = find_spans(rollout, tokenizer)
    assert spans.scores.tolist() == [x for s in samples for x in s.extras["step_scores"]]
    assert spans.group.tolist() == [s.group for s in samples for _ in s.extras["step_scores"]]
    got = spans.to_tokens(spans.scores)
    at_ends = spans.on_last_token(spans.scores)
    assert at_ends.sum() == spans.scores.sum()                             # nothing is lost
    for n, s in enumerate(samples):
        first = int(rollout.batch.cu_seqlens[n]) + len(s.prompt.tokens)
        for k, _ in enumerate(s.response.tokens):
            end = len(tokenizer.decode(s.response.tokens[: k + 1]).removesuffix("\ufffd"))
            want = 0.0
            if s.response.tokens[k] != tokenizer.eos_token_id:             # the step of its last character
                want = next(x for x, stop in zip(s.extras["step_scores"], s.extras["step_ends"]) if end <= stop)
            is_part = tokenizer.decode(s.response.tokens[: k + 1]).endswith("\ufffd")
            assert is_part or got[first + k] == want, (s.text, k)
        assert not got[int(rollout.batch.cu_seqlens[n]) : first].any()     # the prompt


def test_statistics_over_the_spans_of_a_group(tokenizer, world):
    """What a script does with them: each step relative to all steps of its group."""
    extras = [{"step_scores": [1.0, 3.0], "step_ends": [3, 7]}, {"step_scores": [5.0], "step_ends": [7]}]
    rollout = gather_rollout([sampled(tokenizer, "one two", i, extras[i]) for i in range(2)])
    spans = find_spans(rollout, tokenizer)
    centred = spans.scores - spans.scores.mean()
    numbers = spans.to_tokens(centred)[rollout.batch.mask].tolist()
    assert numbers == [-2, 0, 0, 2, 2, 0]                                  # each: two words and the stop token
    assert spans.on_last_token(spans.scores)[rollout.batch.mask].tolist() == [1, 3, 0, 0, 5, 0]


def test_what_tools_say_has_no_score(tokenizer, world):
    """A step that ends in a tool's text ends with the model's last token before it."""
    before, tool, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("call it", " 42 is", " said"))
    tokens = [*before, *tool, *after]
    mask = [True] * len(before) + [False] * len(tool) + [True] * len(after)
    response = Response(tokens, [-0.5] * len(tokens), "length", mask=mask)
    extras = {"step_scores": [1.0, 2.0], "step_ends": [10, 18]}
    prompt = Prompt([1, 2], "source", "0", {}, [])
    sample = Sample(0, 0, 0, prompt, response, score=1.0, extras=extras, text=response.text(tokenizer))
    rollout = gather_rollout([sample])
    assert sample.text == "call it 42 is said"
    spans = find_spans(rollout, tokenizer)
    numbers = spans.to_tokens(spans.scores)[2:].tolist()
    assert numbers == [1.0] * len(before) + [0.0] * len(tool) + [2.0] * len(after)
    ends = spans.on_last_token(spans.scores)[2:].tolist()
    assert ends.index(1.0) == len(before) - 1 and ends[-1] == 2.0 and sum(ends) == 3


def test_a_tokenizer_that_drops_the_first_space(world):
    """As Llama 2's: the first token's text is shorter in the whole text than in the middle of one."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "▁Hello": 3, "▁there": 4, "!": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Metaspace()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    response = Response([3, 4, 5, 1], [-0.5] * 4, "stop")
    text = response.text(tokenizer)
    assert text == "Hello there!"
    sample = Sample(0, 0, 0, Prompt([0], "s", "0", {}, []), response, score=1.0, text=text,
                    extras={"step_scores": [1.0, 2.0], "step_ends": [5, 12]})
    spans = find_spans(gather_rollout([sample]), tokenizer)
    assert spans.to_tokens(spans.scores).tolist() == [0, 1, 2, 2, 0]


@pytest.mark.parametrize(("extras", "message"), [
    ({}, r"step_scores = None, must be a list of numbers"),
    ({"step_scores": [1.0]}, r"step_ends = None, must be a list of numbers"),
    ({"step_scores": [1.0, 2.0], "step_ends": [3]}, r"2 step_scores and 1 step_ends, must be as many"),
    ({"step_scores": [1.0, float("nan")], "step_ends": [3, 7]}, r"step_scores = \[1.0, nan\], must be a list of numb"),
    ({"step_scores": [1.0, 2.0], "step_ends": [7, 3]}, r"step_ends = \[7, 3\], must be whole numbers .* each above"),
    ({"step_scores": [1.0, 2.0], "step_ends": [3, 3]}, r"each above the one before"),
    ({"step_scores": [1.0], "step_ends": [0]}, r"each above the one before"),
    ({"step_scores": [1.0], "step_ends": [3.5]}, r"must be whole numbers"),
    ({"step_scores": [1.0], "step_ends": [8]}, r"the last at most 7, the length of the text"),
    ({"step_scores": 1.0, "step_ends": [7]}, r"step_scores = 1.0, must be a list"),
    ({"step_scores": "ab", "step_ends": [3, 7]}, r"step_scores = 'ab', must be a list"),
])
def test_other_lists_are_refused_by_row(tokenizer, world, extras, message):
    samples = [sampled(tokenizer, "one two", 0, {"step_scores": [1.0], "step_ends": [7]}),
               sampled(tokenizer, "one two", 1, extras)]
    with pytest.raises(ValueError, match=r"^row 11 of --train-data: the reward function returned .*" + message):
        find_spans(gather_rollout(samples), tokenizer)


def test_a_response_without_a_score_has_no_spans(tokenizer, world):
    samples = [sampled(tokenizer, "one two", i, {"step_scores": [1.0], "step_ends": [7]}) for i in range(2)]
    samples[0].score, samples[0].extras = float("nan"), {}
    spans = find_spans(gather_rollout(samples), tokenizer)
    assert spans.response.tolist() == [1] and spans.scores.tolist() == [1.0]
    samples[1].extras = {"step_scores": [], "step_ends": []}
    assert len(find_spans(gather_rollout(samples), tokenizer).scores) == 0


def test_an_episode_of_several_sequences_and_another_text_are_refused(tokenizer, world):
    sample = sampled(tokenizer, "one two", 0, {"step_scores": [1.0], "step_ends": [5]})
    sample.text = "another"
    with pytest.raises(ValueError, match=r"^row 10 .* cannot be cut into those of its tokens, at 'another'"):
        find_spans(gather_rollout([sample]), tokenizer)
    sample = sampled(tokenizer, "one two", 0, {"step_scores": [1.0], "step_ends": [5]})
    sample.response.earlier.append(Response([5], [-0.5], "stop", prompt=[5, 5]))
    with pytest.raises(ValueError, match=r"^row 10 .* has 2 sequences, must be one: --rollout.rewritten-history"):
        find_spans(gather_rollout([sample]), tokenizer)


def test_the_lists_come_from_the_workers_as_they_are(tokenizer, world):
    """Numbers survive the way from a reward worker, where lists are packed."""
    from rewards.runtime.replies import packed, unpacked

    extras = {"step_scores": [0.1, 2.0], "step_ends": [3, 7]}
    way = unpacked(json.loads(json.dumps(packed({"score": 1.0, "extra": extras}))))["extra"]
    spans = find_spans(gather_rollout([sampled(tokenizer, "one two", 0, way)]), tokenizer)
    assert torch.equal(spans.scores, torch.tensor([0.1, 2.0], dtype=torch.float64))

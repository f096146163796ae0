"""What is guessed of a response from earlier ones, against a search that looks at every place of every list."""

import random
from collections import Counter

import numpy as np
import pytest

from common.speculation import history
from common.speculation.history import BYTES_OF_PROMPT, FLOOR, LONGEST, NEWEST, History, sample_major


class Slow:
    """The same history as lists of (token, whether it was sampled), searched place by place."""

    def __init__(self):
        self.by_prompt, self.of_any = {}, []

    def find(self, tokens):
        known = [p for p in self.by_prompt if tuple(tokens[: len(p)]) == p]
        prompt = max(known, key=len, default=tuple(tokens))
        self.by_prompt.setdefault(prompt, [])
        return prompt

    def add(self, prompt, before, sampled):
        marked = [(token, n >= len(prompt)) for n, token in enumerate(before)][-LONGEST:]
        text = [*marked, *((token, True) for token in sampled)]
        self.by_prompt[prompt] += text
        self.of_any += text

    def guess(self, prompt, tokens, most):
        marked = [(token, n >= len(prompt)) for n, token in enumerate(tokens)][-LONGEST:]
        return self.after(self.by_prompt[prompt], marked, most, 1) or self.after(self.of_any, marked, most, 2)

    def after(self, texts, marked, most, least):
        for length in range(len(marked), least - 1, -1):
            places = [n for n in range(length, len(texts))
                      if texts[n - length : n] == marked[-length:] and texts[n][1]]
            if places:
                return self.vote(texts, places[-NEWEST:], most)
        return []

    def vote(self, texts, places, most):
        guess, chance = [], 1.0
        while len(guess) < most:
            places = [n for n in places if n < len(texts) and texts[n][1]]
            votes = Counter(texts[n][0] for n in places)
            best = [token for token in votes if votes[token] == max(votes.values())]
            if not best:
                break
            token = next(texts[n][0] for n in reversed(places) if texts[n][0] in best)
            chance *= votes[token] / (len(places) + 0.5)
            if chance < FLOOR:
                break
            guess.append(token)
            places = [n + 1 for n in places if texts[n][0] == token]
        return guess


@pytest.mark.parametrize("num_tokens", [3, 8, 30])
def test_guesses_are_those_of_a_slow_search(num_tokens):
    """Random texts of few tokens, so that matches are long, ties frequent and votes divided. Requests begin with a
    prompt, or go on after a part of a response."""
    numbers = random.Random(num_tokens)
    fast, slow = History(), Slow()
    prompts = [[numbers.randrange(num_tokens) for _ in range(numbers.randrange(1, 14))] for _ in range(6)]
    lengths = Counter()
    for _ in range(120):
        before = [*numbers.choice(prompts)]
        if numbers.random() < 0.3:
            before += [numbers.randrange(num_tokens) for _ in range(numbers.randrange(12))]
        key, num_prompt = fast.find(before)
        prompt = slow.find(before)
        assert prompt == tuple(before[:num_prompt])
        response = []
        while numbers.random() < 0.93:
            tokens = [*before, *response]
            most = numbers.randrange(1, 7)
            guess = fast.guess(key, tokens, num_prompt, most)
            assert guess == slow.guess(prompt, tokens, most)
            last = tokens[-LONGEST - 3 :]                               # the engine gives the last tokens only
            assert guess == fast.guess(key, last, num_prompt - (len(tokens) - len(last)), most)
            lengths[len(guess)] += 1
            response.append(guess[0] if guess and numbers.random() < 0.6 else numbers.randrange(num_tokens))
        last = before[-LONGEST:]
        fast.add(key, last, num_prompt - (len(before) - len(last)), response)
        slow.add(prompt, before, response)
    assert len(lengths) > 5 and min(lengths[n] for n in range(5)) > 5


def test_a_prompts_own_tokens_are_matched_and_never_guessed():
    made = History()
    key, num_prompt = made.find([5, 6, 7, 8])
    made.add(key, [5, 6, 7, 8], num_prompt, [1, 2, 9, 10])
    assert made.guess(key, [5, 6, 7, 8], 4, 9) == [1, 2, 9]             # for four the chance is (1 / 1.5) ** 4 = 0.2
    assert made.guess(key, [5, 6, 7], 3, 9) == []                       # 8 follows, in a prompt
    assert made.guess(key, [5, 6, 7, 8, 6], 4, 9) == []                 # a 6 that was sampled
    other, num_other = made.find([50, 7, 8])
    assert made.guess(other, [50, 7, 8], num_other, 2) == [1, 2]        # of another prompt's responses
    assert made.guess(other, [50, 8], num_other, 2) == []               # where one equal token is not enough


def test_memory_is_bounded(monkeypatch):
    """Of a prompt and of all, the newest tokens; of the prompts, those that were sampled last."""
    monkeypatch.setattr(history, "PROMPT_TOKENS", 40)
    monkeypatch.setattr(history, "ANY_TOKENS", 100)
    made = History(kept_bytes=5 * (BYTES_OF_PROMPT + 4 * 40))
    kept = []
    for number in range(40):
        prompt = [1000 + (number % 20 if number % 3 else 0)] * (1 + number % 4)
        key, num_prompt = made.find(prompt)
        kept = [*(x for x in kept if x != key), key]
        made.add(key, prompt, num_prompt, [number] * 30)
        assert made.num_bytes == sum(x.nbytes + BYTES_OF_PROMPT for x in made.by_prompt.values()) <= made.kept_bytes
        assert [*made.by_prompt] == kept[-len(made.by_prompt) :] and len(made.by_prompt) <= 5 + 3
        assert made.by_prompt[key].tolist()[-30:] == [number] * 30 and len(made.by_prompt[key]) <= 40
        assert made.of_any.tolist()[-30:] == [number] * 30 and len(made.of_any) <= 100
        assert made.lengths.keys() == made.by_prompt.keys()
        assert made.of_length == Counter(made.lengths.values())
    made.add(-1, [1, 2], 2, [3])                                        # of a prompt that was dropped meanwhile
    assert -1 not in made.by_prompt and made.of_any.tolist()[-1] == 3
    made.clear()
    assert made.num_bytes == 0 and made.guess(key, [1, 2], 2, 4) == [] and not made.of_length


def test_what_is_said_of_its_bytes():
    """64 MiB by prompt, and 256 KiB of any."""
    assert history.KEPT_BYTES == 64 * 2**20 and 4 * history.ANY_TOKENS == 256 * 2**10
    assert np.zeros(1, np.int32).nbytes == 4


def test_the_first_samples_of_all_prompts_run_first():
    prompts = [[1], [1], [1], [2, 3], [2, 3], [4], [1], [4]]
    assert sample_major(prompts) == [0, 3, 5, 1, 4, 7, 2, 6]
    assert sample_major([]) == []

"""Guesses of a response's next tokens, from the responses that the run has sampled before.

Responses to the same prompt are searched first: those of this step that have ended, and those of earlier epochs. Then
the newest responses to any prompt. What follows the longest match there is the guess. Whether a guess is right decides
how fast a response is sampled and nothing else (drafts.py), so the history is in no checkpoint.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

LONGEST = 8
"""Tokens at the end of a response that are compared with those of the history."""
NEWEST = 16
"""Places of the history that vote for the next token."""
FLOOR = 0.25
"""A guess ends where the chance that all of it is right would be estimated below this."""
PROMPT_TOKENS = 1 << 15
"""Tokens that are kept of the responses to one prompt: the newest."""
ANY_TOKENS = 1 << 16
"""Tokens that are kept of the responses to any prompt: the newest."""
KEPT_BYTES = 1 << 26
"""Memory of all tokens that are kept by prompt: 64 MiB. The prompts that were sampled longest ago are dropped."""
BYTES_OF_PROMPT = 512
"""What a prompt takes beside its tokens, in Python's objects."""


class History:
    """Sampled tokens by prompt [num_tokens], int32. Each response follows the last tokens of its prompt, so that its
    first tokens have something to match. Those of the prompt are stored as -1 - token: they match a prompt's tokens and
    are never guessed."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self.kept_bytes = kept_bytes
        self.clear()

    def clear(self) -> None:
        self.by_prompt: dict[int, np.ndarray] = {}  # the prompt that was sampled longest ago is the first
        self.lengths: dict[int, int] = {}  # tokens of each prompt
        self.of_length: Counter[int] = Counter()  # how many prompts have a length
        self.of_any = np.zeros(0, np.int32)
        self.num_bytes = 0

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The prompt's key, and how many of the tokens it has. They may begin with a known prompt: then the rest is the
        beginning of a response, or earlier turns of an episode. An unknown prompt is known from now on."""
        keys = prefix_keys(tokens)
        known = int(keys[-1])
        num_prompt = len(tokens)
        if self.lengths.get(known) != num_prompt:
            for length in sorted(self.of_length, reverse=True):
                if length < len(tokens) and self.lengths.get(int(keys[length - 1])) == length:
                    known = int(keys[length - 1])
                    num_prompt = length
                    break
        self._insert(known, num_prompt, self.by_prompt.get(known, np.zeros(0, np.int32)))
        return known, num_prompt

    def add(self, key: int, before: Sequence[int], num_prompt: int, tokens: Sequence[int]) -> None:
        """Keep what was sampled for the prompt `key`. `before`: the last tokens before it, at most LONGEST are looked
        at, of which the first `num_prompt` (0 or less: none) are the prompt's."""
        begin = max(len(before) - LONGEST, 0)
        text = encode([*before[begin:], *tokens], num_prompt - begin)
        self.of_any = np.concatenate([self.of_any, text])[-ANY_TOKENS:]
        if key in self.by_prompt:  # not dropped in the meantime
            self._insert(key, self.lengths[key], np.concatenate([self.by_prompt[key], text])[-PROMPT_TOKENS:])

    def guess(self, key: int, tokens: Sequence[int], num_prompt: int, most: int) -> list[int]:
        """At most `most` tokens that may come next. `tokens`: the last ones, at most LONGEST are looked at, of which
        the first `num_prompt` (0 or less: none) are the prompt's."""
        begin = max(len(tokens) - LONGEST, 0)
        context = encode(tokens[begin:], num_prompt - begin)
        own = self.by_prompt.get(key)
        found: list[int] = []
        if own is not None:
            found = continuation(own, context, most)
        if not found:
            # a single token that is equal says little where the prompt is another
            found = continuation(self.of_any, context, most, least=2)
        return found

    def _insert(self, key: int, num_prompt: int, texts: np.ndarray) -> None:
        """Keep these tokens of a prompt, as the one that was sampled last."""
        self._drop(key)
        self.by_prompt[key] = texts
        self.lengths[key] = num_prompt
        self.of_length[num_prompt] += 1
        self.num_bytes += texts.nbytes + BYTES_OF_PROMPT
        while self.num_bytes > self.kept_bytes and len(self.by_prompt) > 1:
            self._drop(next(iter(self.by_prompt)))

    def _drop(self, key: int) -> None:
        if key not in self.by_prompt:
            return
        self.num_bytes -= self.by_prompt.pop(key).nbytes + BYTES_OF_PROMPT
        length = self.lengths.pop(key)
        self.of_length[length] -= 1
        if not self.of_length[length]:
            del self.of_length[length]


def encode(tokens: Sequence[int], num_prompt: int) -> np.ndarray:
    """Tokens as the history stores them: the first `num_prompt` (0 or less: none) as -1 - token."""
    encoded = np.array(tokens, np.int32)
    prompt = encoded[: max(num_prompt, 0)]
    np.invert(prompt, out=prompt)
    return encoded


def prefix_keys(tokens: Sequence[int]) -> np.ndarray:
    """[num_tokens] uint64: element i depends on the first i + 1 tokens, modulo 2^64. Two prompts with one key would
    share their history, which is allowed."""
    factors = np.full(len(tokens), 6364136223846793005, np.uint64)
    return np.cumsum((np.array(tokens, np.uint64) + np.uint64(1)) * np.cumprod(factors))


def continuation(texts: np.ndarray, context: np.ndarray, most: int, least: int = 1) -> list[int]:
    """What the NEWEST longest matches of the context's end in `texts` [N] are followed by, as long as they agree.
    Matches shorter than `least` do not count."""
    if len(texts) < 2 or not len(context):
        return []
    ends = np.flatnonzero(texts[:-1] == context[-1])  # last tokens of the matches
    ends = ends[texts[ends + 1] >= 0]
    matched = 1
    while len(ends) and matched < len(context):
        longer = ends[ends >= matched]
        longer = longer[texts[longer - matched] == context[-1 - matched]]
        if not len(longer):
            break
        ends = longer
        matched += 1
    if matched < least:
        return []
    return vote(texts, ends[-NEWEST:] + 1, most)


def vote(texts: np.ndarray, places: np.ndarray, most: int) -> list[int]:
    """The most frequent token at these places, then at those after it, and so on. The newest one wins a tie."""
    guess: list[int] = []
    chance = 1.0
    while len(guess) < most:
        places = places[places < len(texts)]
        followed = texts[places]
        is_sampled = followed >= 0
        places = places[is_sampled]
        followed = followed[is_sampled]
        if not len(places):
            break
        token, votes = Counter(followed[::-1].tolist()).most_common(1)[0]
        chance *= votes / (len(places) + 0.5)
        if chance < FLOOR:
            break
        guess.append(token)
        places = places[followed == token] + 1
    return guess


def sample_major(prompts: Sequence[Sequence[int]]) -> list[int]:
    """An order of requests with these prompts: the first request of each prompt, then the second of each, and so on. By
    the time the later ones run, the first ones have ended and are their history."""
    counts: Counter[tuple[int, ...]] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(counts[tuple(prompt)])
        counts[tuple(prompt)] += 1
    return sorted(range(len(prompts)), key=turns.__getitem__)

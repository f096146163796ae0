"""How many tokens a text has at the least, by its characters alone. A tokenizer needs a few hundred bytes of memory for
each of them, and is not asked about a text that is far too long.

A token stands for so many characters at most as the longest token has. That bounds a text where the tokenizer drops
none, and where those that it drops are known.
"""

import itertools
import json
import math
import re
from functools import lru_cache
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from envs.runtime.template import GUARD

BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


class Lengths:
    """The bounds of one tokenizer."""

    def __init__(self, tokenizer: Any):
        self.longest = math.inf
        """The most characters of a text that one token stands for; infinite where that is not known."""
        self.uncounted = re.compile("(?!)")
        """Finds the characters that may be in no token."""
        self.counted = re.compile(r"[\s\S]")
        """And the others."""
        if not tokenizer.is_fast:
            return
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        steps = steps_of(state["normalizer"]) + steps_of(state["pre_tokenizer"])
        if state["model"]["type"] != "BPE":
            return
        if not all(map(keeps_text, steps)):
            return
        kinds = {step["type"] for step in steps}
        vocabulary = state["model"]["vocab"]
        if "ByteLevel" in kinds:
            # a vocabulary may lack bytes: then characters of one byte are dropped, and of others a part
            dropped = [chr(n) for n in range(128) if letters_of(chr(n)) not in vocabulary]
            needed = set(letters_of("".join(map(chr, range(0x80, 0xC0)))))
        else:
            dropped = []
            needed = {f"<0x{n:02X}>" for n in range(256)}
        if needed <= vocabulary.keys():
            self.longest = max(map(len, tokenizer.get_vocab()))
            if kinds & {"NFC", "NFKC"}:
                self.longest *= 4  # Unicode's composition joins 4 characters at most
        inside = re.escape("".join(dropped))  # square brackets of a regular expression
        if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
            inside += r"\s"  # white space beside a special token may be a part of it
        if inside:
            self.uncounted = re.compile(f"[{inside}]")
            self.counted = re.compile(f"[^{inside}]")

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at the least."""
        if math.isinf(self.longest):
            return 0
        counted = self.uncounted.sub("", text.replace(GUARD, ""))
        return math.ceil(len(counted) / self.longest)

    def part(self, text: str, limit: int, at_end: bool = False) -> str:
        """The text, or its beginning or end with more than `limit` tokens."""
        if self.least_tokens(text) <= limit:
            return text
        longest = self.longest
        if GUARD in text:
            longest *= 10  # a special token of two letters is ten times as long with its guard
        num_characters = int((limit + 1) * longest)
        if at_end:
            backwards = text[::-1]
            length = self.length_with(num_characters, backwards)
            return backwards[:length][::-1]
        return text[: self.length_with(num_characters, text)]

    def length_with(self, num_characters: int, text: str) -> int:
        """The length of the longest beginning of a text that has no more than so many counted characters."""
        counted = self.counted.finditer(text)
        following = next(itertools.islice(counted, num_characters, None), None)
        if following is None:
            return len(text)
        return following.start()


def letters_of(text: str) -> str:
    """The text's bytes, as the letters that stand for them in vocabularies."""
    return BYTES.pre_tokenize_str(text)[0][0]


def steps_of(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer or pre-tokenizer, as its file has them."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    parts = part.get("normalizers", part.get("pretokenizers", []))
    return list(itertools.chain.from_iterable(map(steps_of, parts)))


def keeps_text(step: dict[str, Any]) -> bool:
    """Whether such a step drops no character."""
    match step:
        case {"type": "ByteLevel" | "Digits" | "Lowercase" | "Metaspace" | "NFC" | "NFD" | "NFKC" | "NFKD" | "Prepend"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behaviour}:
            return behaviour != "Removed"
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new) >= len(old)
    return False


def lengths_of(tokenizer: Any) -> Lengths:
    return _lengths_of(tokenizer, len(tokenizer))


@lru_cache(8)
def _lengths_of(tokenizer: Any, size: int) -> Lengths:
    """`size`: of the tokenizer, which may get further tokens."""
    return Lengths(tokenizer)

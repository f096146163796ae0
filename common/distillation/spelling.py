"""What the tokens of a tokenizer spell, and which tokens of two tokenizers spell the same."""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.dataset.conversations import encode, pieces_of
from common.engine.make import stop_tokens

FLOOR = -18.4
"""log 1e-8: the log-prob of "any other word" in a vocabulary that has no other word."""
END_OF_TURN = "end of turn"
Key = tuple[str, str | bytes]


class Spelling:
    """The bytes of each token of a tokenizer. Raises ValueError, naming `flag`, for a tokenizer whose tokens do not
    have any: one without tokenizer.json, or whose tokens are no pieces of the text (WordPiece)."""

    def __init__(self, tokenizer: Any, end: int, flag: str):
        """`end`: the token with which the chat template ends an answer."""
        self.tokenizer = tokenizer
        self.end = end
        self.text: dict[int, bytes] = {}
        """Of the tokens that are text, also of added ones such as <think>."""
        self.special: dict[int, str] = {}
        """The names of the others."""
        refusal = (f"{flag}: its tokens differ from those of --model and cannot be compared with them, because their "
                   f"bytes are not known ({type(tokenizer).__name__}): choose a teacher whose tokenizer.json has a "
                   f"byte-level or SentencePiece vocabulary")
        if not tokenizer.is_fast:
            raise ValueError(refusal)
        kinds, spaces = decoder_of(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        if not kinds & {"ByteLevel", "ByteFallback"}:
            raise ValueError(refusal)
        letters = byte_of_letter() if "ByteLevel" in kinds else {}
        added = tokenizer.added_tokens_decoder
        for piece, number in tokenizer.get_vocab().items():
            if number in added:
                if added[number].special:
                    self.special[number] = added[number].content
                else:
                    self.text[number] = added[number].content.encode()
            elif letters:
                self.text[number] = bytes(letters[letter] for letter in piece)
            elif is_byte(piece):
                self.text[number] = bytes([int(piece[3:5], 16)])
            else:
                self.text[number] = piece.replace(spaces, " ").encode()
        # an ordinary token may end turns, too
        self.special[end] = tokenizer.convert_ids_to_tokens(end)
        self.text.pop(end, None)

    def key(self, number: int) -> Key | None:
        """What makes a token the same word as one of another tokenizer. None: the tokenizer has no such token."""
        if number == self.end:
            return END_OF_TURN, ""
        if number in self.special:
            return "special", self.special[number]
        if number in self.text:
            return "text", self.text[number]
        return None

    def words(self) -> dict[Key, int]:
        """The token of each word. Of several that spell the same, the last: pieces stand behind single bytes."""
        found = {}
        for number in sorted({*self.text, *self.special}):
            key = self.key(number)
            if key is not None and self.text.get(number) != b"":
                found[key] = number
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in which no special token is read."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


class Side(NamedTuple):
    """The words that two vocabularies share, in one of them."""

    shared: Tensor  # [C] int64, their tokens
    rest: Tensor  # [V - C] int64, all other rows of the head, its padding included


class SharedWords:
    """The words that policy and teacher both have as one token: texts with the same bytes, special tokens of the same
    name, and the end of turn, whatever its name."""

    def __init__(self, ours: Spelling, theirs: Spelling):
        our_words = ours.words()
        their_words = theirs.words()
        self.partner: dict[int, int] = {}
        """A token of the policy -> the teacher's."""
        for key, number in our_words.items():
            if key in their_words:
                self.partner[number] = their_words[key]
        self.ours = torch.tensor([*self.partner], dtype=torch.int64)
        self.theirs = torch.tensor([*self.partner.values()], dtype=torch.int64)
        self.sides: dict[tuple[str, int, torch.device], Side] = {}
        self.partners: dict[torch.device, Tensor] = {}

    def partner_of(self, tokens: Tensor) -> Tensor:
        """Tokens of the policy -> the teacher's token for the same word; -1: it has none."""
        device = tokens.device
        if device not in self.partners:
            size = int(self.ours.max()) + 1
            table = torch.full((size + 1,), -1)
            table[self.ours] = self.theirs
            self.partners[device] = table.to(device)
        table = self.partners[device]
        return table[tokens.clamp(max=len(table) - 1)]

    def _side(self, of: str, size: int, device: torch.device) -> Side:
        if (of, size, device) not in self.sides:
            shared = self.ours if of == "ours" else self.theirs
            is_rest = torch.ones(size, dtype=torch.bool)
            is_rest[shared] = False
            self.sides[of, size, device] = Side(shared.to(device), is_rest.nonzero()[:, 0].to(device))
        return self.sides[of, size, device]

    def events(self, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [n, V] of the policy and [n, V'] of the teacher -> [n, C + 1] each: of the shared words, and of any
        other word. Without that last column if neither has another word."""
        ours = self._side("ours", logp.shape[1], logp.device)
        theirs = self._side("theirs", logq.shape[1], logq.device)
        found = []
        for values, side in ((logp, ours), (logq, theirs)):
            words = values[:, side.shared]                                                      # [n, C]
            if len(ours.rest) or len(theirs.rest):
                other = values.new_full((len(values), 1), FLOOR)
                if len(side.rest):
                    other = values[:, side.rest].logsumexp(dim=1, keepdim=True)
                words = torch.cat([words, other], dim=1)
            found.append(words)
        return found[0], found[1]


def decoder_of(decoder: dict[str, Any] | None) -> tuple[set[str], str]:
    """The kinds of a decoder's steps, and the letter that it replaces by a space."""
    steps = [decoder or {"type": "none"}]
    if steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    spaces = "\u2581"
    for step in steps:
        if step["type"] == "Metaspace":
            spaces = step["replacement"]
    return {step["type"] for step in steps}, spaces


def byte_of_letter() -> dict[str, int]:
    """The letters of byte-level vocabularies (GPT-2): bytes that can be printed are their own letters, and the others
    have those from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    for number, byte in enumerate(others):
        letters[chr(256 + number)] = byte
    return letters


def is_byte(piece: str) -> bool:
    """Whether a piece of a SentencePiece vocabulary is a single byte: <0x0A>."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def end_of_turn(path: str, tokenizer: Any, template: dict[str, Any] | None) -> int:
    """The token with which the chat template ends an answer; without a template (None) the tokenizer's own end."""
    if template is None:
        return tokenizer.eos_token_id
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pieces = pieces_of(messages, 1, tokenizer, template)
    tokens, mask = encode(pieces, tokenizer, template, stop_tokens(path, tokenizer))
    answer = [token for token, is_answer in zip(tokens, mask) if is_answer]
    return answer[-1]

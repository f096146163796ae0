"""A response in the teacher's tokens, and which tokens of both spell the same bytes (GOLD: Patiño et al. 2025,
"Unlocking On-Policy Distillation for Any Model Family", section "Cross-tokenizer sequence alignment").

Both tokenizations are walked to the bytes at which both have a boundary. What lies between two of them is a span: of
one token each where both tokenizers agree, and else of several. A token that splits a character of UTF-8 needs no care,
because boundaries are of bytes. The policy can sample bytes that are no text at all; the teacher reads U+FFFD for them,
and a span with such bytes is left out. So is what follows the byte from which on a teacher's tokens spell another text
(a normalizer), up to the next special token.
"""

from dataclasses import dataclass, field

import numpy as np

from common.distillation.spelling import SharedWords, Spelling


@dataclass
class Aligned:
    """The response as the teacher reads it."""

    tokens: list[int] = field(default_factory=list)
    """The teacher's."""
    theirs: list[int] = field(default_factory=list)
    """The span of each of them, numbered from 0; -1: in none."""
    ours: list[int] = field(default_factory=list)
    """The span of each token of the policy."""
    num_spans: int = 0


def align(response: list[int], ours: Spelling, theirs: Spelling, words: SharedWords) -> Aligned:
    """The response, tokens of the policy, in those of the teacher. The texts between special tokens are encoded one by
    one. A special token that both have is a span of its own; of the others, a name in the middle is encoded as text,
    and an end is left out: a teacher that ends its turns with no such token has no probability for it."""
    found = Aligned()
    text: list[int] = []
    for place, token in enumerate(response):
        is_last = place == len(response) - 1
        partner = words.partner.get(token) if token in ours.special else None
        if token in ours.special and (partner is not None or is_last):
            add_text(found, text, ours, theirs)
            text = []
            found.ours.append(-1)
            if partner is not None:
                found.ours[-1] = found.num_spans
                found.tokens.append(partner)
                found.theirs.append(found.num_spans)
                found.num_spans += 1
        else:
            text.append(token)
    add_text(found, text, ours, theirs)
    return found


def add_text(found: Aligned, tokens: list[int], ours: Spelling, theirs: Spelling) -> None:
    """Append the teacher's tokens for the text of these tokens of the policy, and the spans of both."""
    if not tokens:
        return
    pieces = [spelt(token, ours) for token in tokens]
    whole = b"".join(pieces)
    text, broken = as_text(whole)
    place, is_bad = places(len(whole), broken)
    encoded = theirs.encode(text)
    their_pieces = [spelt(token, theirs) for token in encoded]
    wanted = text.encode()
    drop_first_space(their_pieces, wanted)
    first_wrong = common_length(b"".join(their_pieces), wanted)
    is_bad[first_wrong:] = True
    our_ends = place[np.cumsum([len(piece) for piece in pieces])]
    their_ends = np.cumsum([len(piece) for piece in their_pieces], dtype=np.float64)
    # the bytes at which both have a boundary; what a teacher spells beyond the text has none of ours
    cuts = np.intersect1d(our_ends, their_ends)                                                 # [K]
    cuts = cuts[cuts > 0]
    num_bad = np.concatenate([[0], np.cumsum(is_bad)])
    ends = cuts.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    is_good = num_bad[ends] == num_bad[starts]
    number = np.where(is_good, found.num_spans + np.cumsum(is_good) - 1, -1)
    number = np.append(number, -1)  # of tokens beyond the last cut
    found.ours += number[np.searchsorted(cuts, our_ends)].tolist()
    found.theirs += number[np.searchsorted(cuts, their_ends)].tolist()
    found.tokens += encoded
    found.num_spans += int(is_good.sum())


def spelt(token: int, spelling: Spelling) -> bytes:
    """A special token is spelt by its name; padding of the vocabulary spells nothing."""
    if token in spelling.special:
        return spelling.special[token].encode()
    return spelling.text.get(token, b"")


def as_text(spelt: bytes) -> tuple[str, list[tuple[int, int]]]:
    """The text of these bytes, with U+FFFD for those that are no UTF-8; and where these are, from and to."""
    text = ""
    broken = []
    at = 0
    while True:
        try:
            return text + spelt[at:].decode(), broken
        except UnicodeDecodeError as error:
            start = at + error.start
            end = at + error.end
            text += spelt[at:start].decode() + "\ufffd"
            broken.append((start, end))
            at = end


def places(length: int, broken: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """For each of `length` bytes and the end where it stands in the encoded text, [length + 1] float64; and of each
    byte of that text whether it is one of a U+FFFD, bool. Within bytes that are no text no place is whole."""
    replacement = len("\ufffd".encode())
    place = np.arange(length + 1, dtype=np.float64)
    bad = []
    for start, end in broken:
        at = place[start]
        place[start + 1 : end] = at + 0.5
        place[end:] += at + replacement - place[end]
        bad.append(int(at))
    is_bad = np.zeros(int(place[-1]), dtype=bool)
    for at in bad:
        is_bad[at : at + replacement] = True
    return place, is_bad


def drop_first_space(pieces: list[bytes], wanted: bytes) -> None:
    """Tokenizers of SentencePiece's kind write a space before a text, some also before a space. It is no part of it."""
    whole = b"".join(pieces)
    if common_length(whole.removeprefix(b" "), wanted) <= common_length(whole, wanted):
        return
    for number, piece in enumerate(pieces):
        if piece:
            pieces[number] = piece[1:]
            return


def common_length(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin."""
    length = min(len(one), len(other))
    differs = np.frombuffer(one[:length], np.uint8) != np.frombuffer(other[:length], np.uint8)
    if differs.any():
        return int(differs.argmax())
    return length

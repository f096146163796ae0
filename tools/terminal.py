"""Text of others on a terminal: of scripts, data sets and models. It may hold control sequences and line ends."""

import shlex


def visible(text: str) -> str:
    """The text in one line, without what a terminal would obey: escapes, line ends, marks of writing direction and all
    else that is no visible character stand as Python writes them, `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(word: str) -> str:
    """A word for bash in one line: it says the same, and the terminal obeys nothing in it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (c if c.isprintable() and c not in "\\'" else f"\\U{ord(c):08x}" for c in word)
    return f"$'{''.join(plain)}'"

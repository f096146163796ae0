"""Compares scripts with a peer in a process of its own, because the peers' packages change what transformers finds.

Reads [peer, [[script, arguments, seed], ...]] as JSON from the standard input, and writes a line of JSON for each: the
lines of the comparison as [name, apart, text], the notes and the peer's settings, or {"error": text}."""

import importlib
import json
import sys

import torch

from tools import same_as
from tools.peers import report
from tools.peers.compared import compare
from tools.peers.installed import is_installed
from tools.peers.recorded import made_up


def main() -> None:
    peer, cases = json.load(sys.stdin)
    torch.set_num_threads(1)
    assert is_installed(peer)
    for name in report.MODULES:
        importlib.import_module(name)
    for script, arguments, seed in cases:
        words = dict(word.partition("=")[::2] for word in arguments if same_as.is_setting(word))
        flags = [word for word in arguments if not same_as.is_setting(word)]
        try:
            ours, theirs, notes, keys = report.compared_numbers(peer, script, flags, words, made_up(seed))
            lines = [(line.name, line.apart, str(line)) for line in compare(ours, theirs, peer)]
            told = {"lines": lines, "notes": notes, "keys": keys}
        except ValueError as error:
            told = {"error": str(error)}
        print("told", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

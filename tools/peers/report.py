"""Compares a script with a peer and prints the list: what tools/same_as.py does after its command line is read."""

import contextlib
import importlib
import io
import os
import traceback
import warnings
from pathlib import Path

import torch

from tools.compare import read_start
from tools.flags import ROOT
from tools.peers import recorded as batches
from tools.peers.compared import Line, compare
from tools.peers.installed import PEERS, is_installed
from tools.peers.numbers import Numbers
from tools.peers.recorded import Recorded
from tools.peers.replay import replay
from tools.peers.settings import BOTH, ELSEWHERE, FROM_SCRIPT, Objective, trl_settings, verl_settings
from tools.terminal import visible
from tools.twin import flags_in, merged

MODULES = ("common.correction", "common.engine.hf", "pandas", "torch._dynamo",
           "transformers.models.llama.modeling_llama")
"""What takes long to import, and what the script needs: before this process is forked."""
SETTINGS = {"verl": verl_settings, "trl": trl_settings}


def run(peer: str, script: str, flags: dict[str, list[str]], words: dict[str, str], run_dir: str, step: int) -> int:
    """The exit code: 0 if no number differs, 1 if one does."""
    script = str(Path(script).absolute())
    os.chdir(ROOT)
    batch = batches.made_up()
    if run_dir:
        batch = batches.read_run(Path(run_dir), step)
        given = flags_in(read_start(Path(run_dir))["command"][1:])
        not_of_a_loss = [f"--{name.replace('_', '-')}" for name in ELSEWHERE]
        flags = flags_in(merged(batches.own_flags(given, not_of_a_loss), flags))
    elif not {"--epochs-per-step", "--minibatches-per-step"} & flags.keys():
        flags["--epochs-per-step"] = ["2"]                              # with one update no ratio is other than 1
    arguments = [word for name, values in flags.items() for word in (name, *values)]
    found, theirs, notes, keys = compared_numbers(peer, script, arguments, words, batch)
    name = PEERS[peer]
    lines = compare(found, theirs, name)
    print(f"batch   {batch.source}, {ratios_of(found, batch)}")
    for note in [*batch.notes, *notes]:
        print(f"note    {visible(note)}")
    shown = " ".join(f"{key.removeprefix('actor_rollout_ref.')}={value}" for key, value in keys.items())
    print(f"{peer:7} {shown}\n")
    print(*lines, sep="\n")
    print(f"\n{verdict(lines, script, name)}")
    return int(any(line.differs for line in lines))


def ratios_of(found: Numbers, batch: Recorded) -> str:
    """How far the updates are from the old policy: where no ratio is beyond a clip bound, none is compared."""
    ratios = []
    for update in found.updates:
        logp = batch.logp[min(update.number_of_pass, len(batch.logp) - 1)]
        old_logp = batch.old_logp if update.has_old_logp else logp
        ratios.append((logp - old_logp)[update.responses][update.mask].exp())
    every = torch.cat(ratios)
    return f"ratios of {every.min():.3g} to {every.max():.3g}"


def verdict(lines: list[Line], script: str, name: str) -> str:
    for line in lines:
        if line.differs:
            return f"{Path(script).name} is not {name}: the first number that differs is {line.name}"
    missing = [line.name for line in lines if line.apart is None]
    but = f", as far as it was compared: not {', '.join(missing)}" if missing else ""
    return f"{Path(script).name} has {name}'s numbers{but}"


def compared_numbers(peer: str, script: str, arguments: list[str], words: dict[str, str],
                     batch: Recorded) -> tuple[Numbers, Numbers, list[str], dict[str, str]]:
    """The script's numbers, the peer's, what is to be said of the two, and the peer's settings."""
    for name in MODULES:
        importlib.import_module(name)
    found = replay(script, arguments, batch)
    objective = Objective(found.flags)
    notes = [f"{PEERS[peer]} has no such option, and is compared without it: {flag}"
             for flag in objective.unknown(BOTH | {"gamma"})]
    keys = SETTINGS[peer](objective) | words
    own_rewards = any(found.flags.get(name) not in (None, 0, 1) for name in FROM_SCRIPT)
    if own_rewards:
        notes.append("the script changes the scores: its rewards are what the peer gets")
    if not any(update.logp_grad.nan_to_num().any() for update in found.updates):
        raise ValueError(f"{script} cannot be compared: no token of this batch has a gradient (a group's scores are "
                         f"equal, all responses were rejected, or the loss does not depend on log-probs)")
    in_updates = {int(i) for update in found.updates for i in update.responses}
    if len(in_updates) < len(batch):
        notes.append(f"{len(in_updates)} of {len(batch)} responses are in the script's mini-batches, and in the peer's")
    theirs = peer_numbers(peer, keys, batch, found, own_rewards)
    for name in theirs.unread:
        if name in words:
            raise ValueError(f"{name}={words[name]}: {PEERS[peer]} reads no such key for these numbers; "
                             f"docs/from_verl.md has the keys")
    return found, theirs, notes, keys


def peer_numbers(peer: str, keys: dict[str, str], batch: Recorded, found: Numbers, own_rewards: bool) -> Numbers:
    is_installed(peer)
    before = torch.get_default_dtype()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):      # what their imports say
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"tools.peers.of_{peer}")
    torch.set_default_dtype(torch.float64)                              # of numbers that they make themselves
    try:
        return module.numbers(keys, batch, found, own_rewards)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        own = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if ROOT in own.parents and ".venv" not in str(own):
            raise
        raise ValueError(f"{PEERS[peer]} refuses {' '.join(f'{key}={value}' for key, value in keys.items())}: "
                         f"{' '.join(str(error).split())}") from None
    finally:
        torch.set_default_dtype(before)

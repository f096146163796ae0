"""Whether a script, your fork perhaps, has the numbers of verl or TRL: advantages, loss, denominators and gradient on
log-probs of one step, by the script's own loop and by the peer's own functions, in float64.

    python -m tools.same_as verl mine.py --clip-high 0.28             # on a batch that is made up
    python -m tools.same_as trl mine.py loss_type=dr_grpo scale_rewards=none --run runs/mine

The peer's settings follow from the script's flags, as tools/from_verl.py and tools/from_trl.py translate them;
NAME=VALUE sets one of the peer's own, for what a fork does without a flag. The first number that differs is named, and
the exit code is 1. `tools/setup.sh peers` installs both.
"""

import sys
from pathlib import Path

from tools.flags import exit_with_error
from tools.peers.installed import PEERS, folder_of, is_installed
from tools.twin import flags_in

OWN = {"--model": "models are not run", "--train-data": "responses are those of the batch",
       "--run-dir": "nothing is written", "--total-steps": "one step is compared",
       "--prompts-per-step": "the batch has its own", "--samples-per-prompt": "the batch has its own"}
"""Flags that cannot be given, and why."""


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    peer, script = [*arguments, "", ""][:2]
    if peer not in PEERS or not Path(script).is_file():
        raise ValueError(f"{' '.join(arguments[:2]) or 'nothing given'}: name verl or trl, and a script, such as "
                         f"python -m tools.same_as verl grpo.py")
    if not is_installed(peer):
        raise ValueError(f"{PEERS[peer]} is not installed in {folder_of(peer)}: tools/setup.sh peers installs it")
    words = [word for word in arguments[2:] if is_setting(word)]
    flags = flags_in([word for word in arguments[2:] if not is_setting(word)])
    run, step = (" ".join(flags.pop(name, [])) for name in ("--run", "--step"))
    for name in flags:
        if name in OWN:
            raise ValueError(f"{name} cannot be given here: {OWN[name]}")
    from tools.peers import report

    given = {}
    for word in words:
        name, _, value = word.partition("=")
        if peer == "verl" and name.startswith("actor."):                # as the report prints it
            name = f"actor_rollout_ref.{name}"
        given[name] = value
    return report.run(peer, script, flags, given, run, int(step or 0))


def is_setting(word: str) -> bool:
    """NAME=VALUE of the peer, such as loss_type=dapo or algorithm.adv_estimator=rloo."""
    name, equals, _ = word.partition("=")
    return bool(equals) and all(part.isidentifier() for part in name.split("."))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        exit_with_error(error)

"""Kills tiny runs at random instants and starts them again until they end; each must end as an undisturbed run does.

    python -m tests.checkpoint.chaos --kills 55 > docs/chaos.md        # make chaos

An instant is a call (of a rollout, a forward, the optimizer, a write of one tensor, a checksum, the manifest, a rename,
a prune, the export), counted from the start of the process, plus up to 0.2 s in half of the cases. Killed are one rank
or all of them with SIGKILL; or the job gets SIGTERM, SIGINT or SIGUSR1. After every kill no folder called step_N may be
incomplete or damaged.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from common.checkpoint import files
from tests.checkpoint.faulty import Server
from tests.checkpoint.faulty import server as warm_server
from tests.checkpoint.test_resume import assert_same_run, steps_on_disk, tiny_run
from tests.conftest import launch, make_tiny_llama

TOTAL = 6
INSTANTS = {  # calls of each point in about two steps
    "rollout": 80, "reward": 2, "forward": 12, "optimizer": 4, "optimizer after": 4, "log": 2, "log after": 2,
    "save": 2, "write": 130, "checksum": 10, "manifest": 2, "manifest after": 2, "rename": 5, "rename after": 5,
    "prune": 5, "prune after": 5, "export": 1,
}
EXPECTED = {-9, 130, 138, 143}                              # of one rank; of torchrun it is 1, and its report says more
EXPECTED_TEXT = ("(SIGKILL)", "stopped by SIG", "death signal")
ACTIONS = ["kill"] * 4 + ["killall"] * 2 + ["term", "int", "usr1"]


@dataclass
class Chaos:
    kills: int = 55
    """Kills in all, spread over runs that are killed up to five times each."""
    two_rank_kills: int = 15
    """How many of them in runs of two ranks under torchrun."""
    vllm_kills: int = 0
    """How many of them in runs that sample with vLLM; these start slowly."""
    seed: int = 0


def start(server: Server, ranks: int, log: Path, fault: str, *flags: str) -> int:
    if ranks == 1:
        return server(log, fault, "grpo.py", *flags)
    done = launch("tests/checkpoint/faulty.py", fault, "grpo.py", *flags, ranks=ranks, check=False)
    log.write_text(done.stdout + done.stderr)
    return done.returncode


def random_fault(numbers: random.Random, ranks: int) -> str:
    point = numbers.choice(list(INSTANTS))
    count, rank = numbers.randint(1, INSTANTS[point]), numbers.randrange(ranks)
    delay_s = round(numbers.uniform(0, 0.2), 3) if numbers.random() < 0.5 else 0
    main_only = ("log", "manifest", "rename", "prune", "export")                        # the other ranks do not do that
    return f"{point}:{count}:{0 if point.split()[0] in main_only else rank}:{numbers.choice(ACTIONS)}:{delay_s}"


def damage(run: Path) -> list[str]:
    """Checkpoints that look finished and are not."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    found = {folder.name: "; ".join(files.check_files(folder)) for folder in folders}
    return [f"{name}: {what}" for name, what in found.items() if what]


def disturb(server: Server, folder: Path, name: str, ranks: int, kills: int, flags: list[str], want: Path,
            numbers: random.Random) -> int:
    """One run, killed up to `kills` times. Prints a table row for each start; returns how often it was killed."""
    run, log, killed = folder / name, folder / f"{name}.log", 0
    flags = [*flags, "--run-dir", str(run), *(["--save.async"] if numbers.random() < 0.5 else [])]
    for begin in range(1, 99):
        fault = random_fault(numbers, ranks) if killed < kills else "none"
        code = start(server, ranks, log, fault, *flags)
        resumed = [line.split()[3] for line in log.read_text().splitlines() if line.startswith("resumed after step")]
        saved, wrong = steps_on_disk(run), damage(run)
        outcome = f"saved: {', '.join(map(str, saved)) or 'nothing yet'}"
        assert not wrong, (fault, wrong)
        if code == 0:
            assert_same_run(run, want, TOTAL)
            outcome = "finished, **the same as undisturbed**"
        elif fault == "none":
            raise AssertionError(f"{name} does not finish:\n{log.read_text()[-6000:]}")
        else:
            killed += 1
            text = log.read_text()
            assert code in EXPECTED or any(x in text for x in EXPECTED_TEXT), (fault, text[-6000:])
        point, count, rank, action, delay = fault.split(":") if fault != "none" else [""] * 5
        instant = f"{point} {count}{f' + {delay} s' if delay not in '0' else ''}"
        action += f" rank {rank}" if action == "kill" and ranks > 1 else ""
        print(f"| {name} | {begin} | {resumed[0] if resumed else 'new'} | {instant} | {action} | {code} | {outcome} |",
              flush=True)
        if code == 0:
            return killed
    raise AssertionError(f"{name} does not end")


def main(chaos: Chaos) -> None:
    numbers = random.Random(chaos.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = warm_server()
        model = make_tiny_llama(folder / "model", 128)
        flags = [*tiny_run(model, folder), "--total-steps", str(TOTAL), "--save.every", "1", "--save.keep", "1",
                 "--eval-every", "2"]
        vllm = ["--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1", "--rollout.max-num-seqs", "8"]
        kinds = [("one rank", 1, [], chaos.kills - chaos.two_rank_kills - chaos.vllm_kills),
                 ("two ranks", 2, [], chaos.two_rank_kills), ("vLLM", 1, vllm, chaos.vllm_kills)]
        print(f"`python -m tests.checkpoint.chaos --kills {chaos.kills} --two-rank-kills {chaos.two_rank_kills} "
              f"--vllm-kills {chaos.vllm_kills} --seed {chaos.seed}`\n\n"
              "| run | start | resumed after step | instant | what happens | exit code | outcome |\n"
              "| --- | --- | --- | --- | --- | --- | --- |")
        total = runs = 0
        for kind, ranks, more, kills in kinds:
            if kills:
                want = folder / f"undisturbed {kind}"
                code = start(server, ranks, folder / "log", "none", *flags, *more, "--run-dir", str(want))
                assert code == 0, (folder / "log").read_text()[-6000:]
            killed = 0
            while killed < kills:
                runs += 1
                name, most = f"{kind} {runs}", min(5, kills - killed)
                killed += disturb(server, folder, name, ranks, most, flags + more, want, numbers)
            total += killed
        print(f"\n{total} kills in {runs} runs: every run ended with the weights, optimizer state, metrics and "
              f"exported model of the undisturbed one, byte for byte; no kill left a damaged checkpoint.")


if __name__ == "__main__":
    main(tyro.cli(Chaos, description=__doc__))

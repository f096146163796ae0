"""Kills tiny runs at random instants and starts them again until they end; each must end as an undisturbed run does.

    python -m tests.checkpoint.chaos --kills 100       # make chaos

An instant is a call (of a rollout, a decoding step, an episode's turn, a forward, the optimizer, a message between the
sides of async_grpo.py, a write of one tensor, a checksum, the manifest, a rename, a prune, the export), counted from
the start of the process, plus up to 0.2 s in half of the cases. Killed are one rank or all of them with SIGKILL; or the
job gets SIGTERM, SIGINT or SIGUSR1. After every kill no folder called step_N may be incomplete or damaged.

Episodes without --rollout.lockstep depend on the speed of their tools. Of these runs no step may be lost or doubled,
and no prompt of the data's order lost or used twice.
"""

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import tyro

from common.checkpoint import files
from common.curriculum.sampler import PromptSampler
from tests.checkpoint.faulty import LIKE_TORCHRUN, Server
from tests.checkpoint.faulty import server as warm_server
from tests.checkpoint.test_resume import PROMPTS, SAMPLES, assert_same_run, metrics, steps_on_disk, tiny_run
from tests.conftest import VLLM, VOCAB, launch, make_tiny_llama
from tests.engine.episode_runs import FILE

TOTAL = 6
INSTANTS = {  # calls of each point in about two steps
    "rollout": 80, "reward": 2, "forward": 12, "optimizer": 4, "optimizer after": 4, "log": 2, "log after": 2,
    "save": 2, "write": 2, "checksum": 10, "manifest": 2, "manifest after": 2, "rename": 5, "rename after": 5,
    "prune": 5, "prune after": 5, "export": 1,
}
MAIN_ONLY = ("log", "manifest", "rename", "prune", "export")        # the other ranks do not do that
EXPECTED = {-9, 130, 138, 143}                              # of one rank; of torchrun it is 1, and its report says more
EXPECTED_TEXT = ("(SIGKILL)", "stopped by SIG", "death signal", "another rank ended")
ACTIONS = ["kill"] * 4 + ["killall"] * 2 + ["term", "int", "usr1"]
ENDS = ["--rollout.stop-token-ids", *map(str, range(0, VOCAB, 16))]
ON_VLLM = ["--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1", "--rollout.max-num-seqs", "8"]
IN_FLIGHT = [*ON_VLLM, *ENDS, "--rollout.in-flight", "2", "--rollout.max-response-length", "50",
             "--correction.preset", "decoupled-token-is"]
EPISODES = [*IN_FLIGHT, "--rollout.episode", f"{FILE}:long_talk", "--rollout.max-response-length", "150"]


@dataclass
class Chaos:
    kills: int = 55
    """Kills in all, spread over runs that are killed up to five times each."""
    two_rank_kills: int = 15
    """How many of them in runs of two ranks under torchrun."""
    vllm_kills: int = 0
    """How many of them in runs that sample with vLLM; these start slowly."""
    in_flight_kills: int = 0
    """How many of them in runs with --rollout.in-flight 2 (with vLLM)."""
    episode_kills: int = 0
    """How many of them in runs with episodes in flight, in lockstep; as many again where they do not wait."""
    async_kills: int = 0
    """How many of them in runs of async_grpo.py with a trainer and a sampler; as many again with two samplers."""
    seed: int = 0


@dataclass
class Kind:
    name: str
    kills: int
    ranks: int = 1
    flags: list[str] = field(default_factory=list)
    instants: dict[str, int] = field(default_factory=dict)
    """Beside INSTANTS; 0: never."""
    samplers: int = 0
    is_exact: bool = True

    def start(self, server: Server, log: Path, fault: str, *flags: str) -> int:
        script = "async_grpo.py" if self.samplers else "grpo.py"
        if self.ranks == 1 or self.samplers:
            env = LIKE_TORCHRUN if self.ranks > 1 else None
            return server(log, fault, script, *flags, *self.flags, ranks=self.ranks, env=env)
        done = launch("tests/checkpoint/faulty.py", fault, script, *flags, *self.flags, ranks=self.ranks, check=False)
        log.write_text(done.stdout + done.stderr)
        return done.returncode

    def random_fault(self, numbers: random.Random) -> str:
        instants = {point: count for point, count in (INSTANTS | self.instants).items() if count}
        point = numbers.choice(list(instants))
        count, rank = numbers.randint(1, instants[point]), numbers.randrange(self.ranks)
        if self.samplers:                                   # the first ranks train, the last ones sample
            trainers = self.ranks - self.samplers
            here = range(trainers, self.ranks) if point in ("rollout", "reward") else range(trainers)
            rank = rank if point in ("send", "receive") else here[rank % len(here)]
        delay_s = round(numbers.uniform(0, 0.2), 3) if numbers.random() < 0.5 else 0
        rank = 0 if point.split()[0] in MAIN_ONLY else rank
        return f"{point}:{count}:{rank}:{numbers.choice(ACTIONS)}:{delay_s}"

    def compare(self, run: Path, want: Path) -> str:
        if self.is_exact:
            assert_same_run(run, want, TOTAL)
            return "finished, **the same as undisturbed**"
        assert_nothing_lost(run, TOTAL)
        return "finished, **each step and prompt once**"


def assert_nothing_lost(run: Path, total: int) -> None:
    """Each step once; of the data's order (rows have different answers) each prompt once, trained or in flight."""
    assert [row["step"] for row in metrics(run)] == list(range(total + 1))
    last = files.read_manifest(run / f"checkpoints/step_{total:06d}")["state"]
    in_flight = [group["row"] for group in last["script"]["in_flight"]]
    used: list[int] = []
    for step in range(1, total + 1):
        answers = [row["ground_truth"] for row in pq.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()]
        assert len(answers) == PROMPTS * SAMPLES and answers[::SAMPLES] == answers[SAMPLES - 1 :: SAMPLES], step
        used += [int(answer) // 2 for answer in answers[::SAMPLES]]
    sampler = PromptSampler(last["sampler"]["num_prompts"], "", 0)
    drawn = sampler.take(len(used) + len(in_flight))
    assert sorted(used + in_flight) == sorted(drawn)
    assert (sampler.epoch, sampler.position) == (last["sampler"]["epoch"], last["sampler"]["position"])


def damage(run: Path) -> list[str]:
    """Checkpoints that look finished and are not."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    found = {folder.name: "; ".join(files.check_files(folder)) for folder in folders}
    return [f"{name}: {what}" for name, what in found.items() if what]


def disturb(server: Server, folder: Path, name: str, kind: Kind, kills: int, flags: list[str], want: Path,
            numbers: random.Random) -> int:
    """One run, killed up to `kills` times. Prints a table row for each start; returns how often it was killed."""
    run, log, killed = folder / name, folder / f"{name}.log", 0
    flags = [*flags, "--run-dir", str(run), *(["--save.async"] if numbers.random() < 0.5 else [])]
    for begin in range(1, 99):
        fault = kind.random_fault(numbers) if killed < kills else "none"
        code = kind.start(server, log, fault, *flags)
        resumed = [line.split()[3] for line in log.read_text().splitlines() if line.startswith("resumed after step")]
        saved, wrong = steps_on_disk(run), damage(run)
        outcome = f"saved: {', '.join(map(str, saved)) or 'nothing yet'}"
        assert not wrong, (fault, wrong)
        if code == 0:
            outcome = kind.compare(run, want)
        elif fault == "none":
            raise AssertionError(f"{name} does not finish:\n{log.read_text()[-6000:]}")
        else:
            killed += 1
            text = log.read_text()
            assert code in EXPECTED or any(x in text for x in EXPECTED_TEXT), (fault, text[-6000:])
        point, count, rank, action, delay = fault.split(":") if fault != "none" else [""] * 5
        instant = f"{point} {count}{f' + {delay} s' if delay not in '0' else ''}"
        action += f" rank {rank}" if action == "kill" and kind.ranks > 1 else ""
        print(f"| {name} | {begin} | {resumed[0] if resumed else 'new'} | {instant} | {action} | {code} | {outcome} |",
              flush=True)
        if code == 0:
            return killed
    raise AssertionError(f"{name} does not end")


def kinds_of(chaos: Chaos) -> list[Kind]:
    more = 2 * (chaos.episode_kills + chaos.async_kills) + chaos.in_flight_kills
    one_rank = chaos.kills - chaos.two_rank_kills - chaos.vllm_kills - more
    decoding = {"rollout": 0, "decode": 60}
    turns = {"rollout": 0, "decode": 200, "episode": 60}
    between = {"send": 20, "receive": 20}
    split = ["--correction.weights", "token"]
    return [
        Kind("one rank", one_rank),
        Kind("two ranks", chaos.two_rank_kills, ranks=2),
        Kind("vLLM", chaos.vllm_kills, flags=ON_VLLM, instants=decoding),
        Kind("in flight", chaos.in_flight_kills, flags=IN_FLIGHT, instants=decoding),
        Kind("episodes in flight", chaos.episode_kills, flags=[*EPISODES, "--rollout.lockstep"], instants=turns),
        Kind("episodes that race", chaos.episode_kills, flags=EPISODES, instants=turns, is_exact=False),
        Kind("async", chaos.async_kills, 2, split, between, samplers=1),
        Kind("async, 2 samplers", chaos.async_kills, 3, [*split, "--samplers", "2"], between, samplers=2),
    ]


def main(chaos: Chaos) -> None:
    numbers = random.Random(chaos.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "model", 128)
        flags = [*tiny_run(model, folder), "--total-steps", str(TOTAL), "--save.every", "1", "--save.keep", "1",
                 "--eval-every", "2", "--log.rollouts-every", "1"]
        given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(chaos).items())
        print(f"`python -m tests.checkpoint.chaos {given}`\n\n"
              "| run | start | resumed after step | instant | what happens | exit code | outcome |\n"
              "| --- | --- | --- | --- | --- | --- | --- |")
        total = runs = 0
        for kind in kinds_of(chaos):
            server = warm_server(VLLM) if "vllm" in kind.flags else warm_server()
            want, killed = folder / f"undisturbed {kind.name}", 0
            if kind.kills:
                code = kind.start(server, folder / "log", "none", *flags, "--run-dir", str(want))
                assert code == 0, (folder / "log").read_text()[-6000:]
                kind.compare(want, want)
            while killed < kind.kills:
                runs += 1
                name, most = f"{kind.name} {runs}", min(5, kind.kills - killed)
                killed += disturb(server, folder, name, kind, most, flags, want, numbers)
            total += killed
        print(f"\n{total} kills in {runs} runs: every run ended with the weights, optimizer state, metrics and "
              f"exported model of the undisturbed one, byte for byte (episodes that race: with each step and each "
              f"prompt once); no kill left a damaged checkpoint.")


if __name__ == "__main__":
    main(tyro.cli(Chaos, description=__doc__))

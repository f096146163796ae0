"""Which way to wait for long responses, for a model, lengths and a number of GPUs:

    python -m tests.bench.advise --model 7B --gpus 64 --median 2000 --sigma 0.8 --longest 8192

synchronous, carried over (--rollout.in-flight), or a split of the ranks into samplers and trainers (async_grpo.py). All
seconds are PREDICTIONS of simulate.py for H100s (h100.py has what they stand on): nothing was measured on a GPU.
`--run RUN --gpus N` replays the responses of a run on N GPUs instead (recorded.py). `--published` prints what the same
arithmetic says of steps and recipes that others published.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from transformers import AutoConfig

from tests.bench import published, recorded
from tests.bench.h100 import H100, SIZES, TP
from tests.bench.simulate import Job, Machine, Shape, memory, split_seconds, step_seconds

WORTH = 1.05
"""Times as fast as the synchronous step: below, older data is not worth it."""


@dataclass
class Question:
    model: str = "7B"
    """7B, 32B, 70B, or a Hugging Face folder or hub name."""
    gpus: int = 8
    tp: int = 0
    """Tensor-parallel ranks per engine. 0: 1 for 7B, 4 for 32B, 8 for 70B; 1 for others."""
    prompts: int = 128
    """Of one step, over all GPUs."""
    samples: int = 8
    prompt: int = 512
    """Tokens of a prompt."""
    median: int = 2000
    """Of the response lengths, tokens; they are log-normal."""
    sigma: float = 0.8
    """Of the logarithm of the response lengths."""
    longest: int = 8192
    """Tokens of a response at most."""
    max_tokens: int = 16384
    """Of a micro-batch."""
    max_num_seqs: int = 256
    offload: bool = False
    run: str = ""
    """A run folder: what its recorded responses would have taken, in passes of an engine."""
    published: bool = False
    """Print the table of published.py: steps of NeMo-RL, verl and slime, beside predictions."""


def ways(machine: Machine, shape: Shape, job: Job) -> dict[str, dict[str, float]]:
    """What a step takes in each way that fits; of the splits the fastest."""
    found = {"synchronous": step_seconds(machine, shape, job)}
    for in_flight in (1.5, 2.0):
        found[f"--rollout.in-flight {in_flight:g}"] = step_seconds(machine, shape, job, in_flight)
    splits = {}
    for eighths in range(1, 8):
        samplers = job.ranks * eighths // 8 // job.tp * job.tp
        if 0 < samplers < job.ranks:
            splits[f"async_grpo.py --samplers {samplers}"] = split_seconds(machine, shape, job, samplers)
    splits = {way: row for way, row in splits.items() if row["fits"]}
    if splits:
        best = min(splits, key=lambda way: splits[way]["step_s"])
        found[best] = splits[best]
    return {way: row for way, row in found.items() if row["fits"]}


def advice(machine: Machine, shape: Shape, job: Job) -> str:
    """A table of the ways, which one to take, and why."""
    found = ways(machine, shape, job)
    if "synchronous" not in found:
        room = memory(machine, shape, job)
        return (f"training takes {room['train_gb']:.0f} of {machine.memory_gb:g} GiB and {room['cache_gb']:.0f} are "
                f"left for the cache: more GPUs, --offload, or fewer --max-tokens")
    base = found["synchronous"]
    lines = ["| way | rollout s | update s | step s | times as fast |", "| --- | --- | --- | --- | --- |"]
    for way, row in found.items():
        lines.append(f"| {way} | {row['rollout_s']:.1f} | {row['update_s']:.1f} | {row['step_s']:.1f} | "
                     f"{base['step_s'] / row['step_s']:.2f} |")
    fastest = min(found, key=lambda way: found[way]["step_s"])
    gain = base["step_s"] / found[fastest]["step_s"]
    share = base["rollout_s"] / base["step_s"]
    tail = job.response_lengths.max() / job.response_lengths.mean()
    queue = len(job.response_lengths) * job.tp / job.ranks / base["slots"]
    why = (f"The rollout is {share:.0%} of a synchronous step, and its longest response {tail:.1f} times the mean. An "
           f"engine has {queue:.1f} times as many responses as it decodes at once"
           f"{', so what ends makes room for others' if queue > 1 else ': at the end few are left'}.")
    if gain < WORTH:
        return "\n".join([*lines, "", f"Take: synchronous. {why} Nothing else is {WORTH:g} times as fast."])
    older = "all of it is a step older"
    if "samplers" not in fastest:
        older = "{spanning_frac:.0%} of the groups span steps, the oldest {oldest:.0f} of them".format(**found[fastest])
    return "\n".join([*lines, "", f"Take: {fastest}. {why} The price is older data: {older}."])


def main(question: Question) -> None:
    if question.published:
        return published.main()
    if question.run:
        return print(recorded.advice(Path(question.run), question.gpus // (question.tp or 1)))
    config = SIZES.get(question.model) or AutoConfig.from_pretrained(question.model)
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(question.median), question.sigma, question.prompts * question.samples)
    lengths = np.clip(lengths, 1, question.longest).astype(int)
    job = Job(
        np.full(len(lengths), question.prompt), lengths, question.samples, question.gpus,
        question.tp or TP.get(question.model, 1), max_tokens=max(question.max_tokens, question.prompt + lengths.max()),
        max_num_seqs=question.max_num_seqs, checkpointing=True, offload=question.offload,
    )
    print("H100s: PREDICTED, not measured\n")
    print(advice(H100, Shape.of(config), job))


if __name__ == "__main__":
    main(tyro.cli(Question, description=__doc__))

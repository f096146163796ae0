"""Seconds that default logging adds to a step of the quickstart's size: `python -m tests.bench.bench_logging`.

64 responses (8 prompts x 8) of 98 + 27 tokens in micro-batches of up to 2,048 tokens, on one process: what the loop
calls of common/tracking.py, common/record.py and correction.measure. Files of responses are written every 5th step, so
a fifth of their seconds counts. The share is of --step-s, or of the median step of --run.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer

import grpo
from common import correction
from common.batch import Batch
from common.metrics import Meter, Timer
from common.parallel import ranks
from common.prompts import Prompt
from common.rollout import Response, Rollout, Sample
from common.rollouts.record import Recorder, write_step
from common.tracking.console import step_line
from common.tracking.logger import LogConfig, Tracker
from common.tracking.step import rollout_metrics, step_metrics
from tests.bench.record import report


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    step_s: float = 10.0
    """Seconds of a step without logging."""
    run: str = ""
    """A run whose median step is taken instead."""
    repeats: int = 20
    log: LogConfig = field(default_factory=LogConfig)


def main(args: Args) -> None:
    world, tokenizer, seconds = ranks.init(), AutoTokenizer.from_pretrained(args.model), {}
    step_s = args.step_s
    if args.run:
        rows = [json.loads(line) for line in (Path(args.run) / "metrics.jsonl").read_text().splitlines()]
        step_s = statistics.median(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    P, G, prompt_length, response_length = 8, 8, 98, 27
    text = "Emma has 7 apples. Ben gives Emma 5 more apples. How many apples does Emma have now? 7 + 5 = 12\n"
    prompt, response = (tokenizer(text * 9)["input_ids"][:length] for length in (prompt_length, response_length))
    minibatches = [[]]
    for start in range(0, P * G, 16):
        batch = Batch.build([prompt] * 16, [response] * 16, index=list(range(start, start + 16)),
                            rollout_logps=[[-0.5] * response_length] * 16)
        batch.advantage = torch.randn(len(batch.tokens)) * batch.mask
        minibatches[0].append(batch)
    samples = [
        Sample(i, i // G, 0, Prompt(prompt, "word_problems", "12", {}, []),
               Response(response, [-0.5] * response_length, "stop"), tokenizer.decode(response), score=1.0)
        for i in range(P * G)
    ]
    no = torch.zeros(P * G, dtype=torch.bool)
    scores = torch.ones(P * G, dtype=torch.float64)
    group = torch.arange(P * G) // G
    lengths = [torch.full((P * G,), length) for length in (98.0, 27.0, 0.0)]
    rollout = Rollout(samples, scores, group, group, torch.zeros_like(group), *lengths, torch.ones(P * G), no)
    rewards = torch.zeros(P * G, dtype=torch.float64)

    def measure(name: str, share: float, work) -> None:
        took = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        seconds[name] = share * statistics.median(took)

    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(args.log, folder, args, world, {})
        meter, timer = Meter(), Timer()
        timer.seconds |= {"gen": 4.0, "update_actor": 5.0}
        batch = minibatches[0][0]
        logp = torch.randn(len(batch.tokens)) - 2
        _, stats = grpo.clipped_loss(logp, logp, batch.advantage, grpo.Args("", ()))

        def meters() -> None:
            for _ in minibatches[0]:
                for name, values in stats.items():
                    meter.mean(name, values, batch.mask)
                meter.mean("actor/entropy", logp, batch.mask)
                correction.measure(meter, batch, logp)

        def responses() -> None:
            for microbatch in minibatches[0]:
                microbatch.last_pass = stats | {"logp": logp, "entropy": logp}
            write_step(Recorder(args.log, Path(folder), tokenizer), 5, rollout, minibatches, rewards)

        def numbers() -> dict[str, float]:
            of_update = step_metrics(meter, timer, world, rollout.sequence_lengths, minibatches, (1e12, 1e12, 0))
            return of_update | rollout_metrics(rollout, P * G * 27, 4.0, max_prompt_length=160, max_response_length=40)

        measure("meters of 4 micro-batches", 1.0, meters)
        measure(f"responses, every {args.log.rollouts_every} steps", 1 / args.log.rollouts_every, responses)
        measure("metrics of the step", 1.0, numbers)
        metrics = numbers()
        measure("warnings", 1.0, lambda: tracker.health.look(1, metrics))
        with contextlib.redirect_stdout(io.StringIO()):                 # its lines would stand between ours
            measure("line and metrics.jsonl", 1.0, lambda: tracker.log(1, metrics, step_line(1, 25, metrics)))
        size = (Path(folder) / "rollouts/step_000005.parquet").stat().st_size
    print("| part | ms a step | share of the step |\n| --- | --- | --- |")
    for name, s in [*seconds.items(), ("all", sum(seconds.values()))]:
        print(f"| {name} | {1000 * s:.2f} | {s / step_s:.4%} |")
    print(f"\na step of {step_s:.2f} s; {P * G} responses take {size / 1024:.0f} KiB on disk")
    report("logging", step_s=step_s, responses_kib=size / 1024, all_frac=sum(seconds.values()) / step_s,
           parts={name: {"ms": 1000 * s, "frac": s / step_s} for name, s in seconds.items()})
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

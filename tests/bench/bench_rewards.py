"""What scoring adds to a step: responses finish over a generation of --gen-s seconds and are scored meanwhile.

    python -m tests.bench.bench_rewards [--samples 4096] [--gen-s 120] [--score-s 0.05] [--workers 4 8 32] [--out FILE]

One JSON line a case on stdout (and in --out), then a table. The generation is a clock (nothing is generated): a
response's length is log-normal, cut at the longest, and it finishes at that share of --gen-s. So the clock's times are
an engine's that decodes all at once; `burst` is the worst case, all finish at the last moment. The scorer is gsm8k's
after --score-s seconds of sleep, so the cores of this machine do not count: a judge's or sandbox's time, elsewhere.
Columns:
    wait_s         how long `RewardPool.results` had to wait when generation was over
    added          wait_s over gen_s: what scoring adds to a step that has nothing but generation (the goal is under 5%)
    alone_s        the same scores without overlap: samples * score_s / workers, at least
    trainer_cpu_s  CPU seconds of this process and its threads for all of it, which generation loses
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from rewards.runtime.pool import RewardPool
from tests.bench.record import report

SLOW = """
import time
from rewards.gsm8k import compute_score as gsm8k

def compute_score(data_source, solution_str, ground_truth, extra_info=None, score_s=0.05):
    time.sleep(score_s)
    return gsm8k(data_source, solution_str, ground_truth)
"""
MEDIAN, SIGMA, LONGEST = 250, 0.6, 1024  # tokens of a response


def measure(samples: int, gen_s: float, score_s: float, workers: int, burst: bool, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(MEDIAN), SIGMA, samples), LONGEST)
    order = np.argsort(lengths)
    done_at = np.full(samples, gen_s) if burst else gen_s * lengths / lengths.max()
    truths = rng.integers(0, 100, samples)
    answers = [f"{'so it goes. ' * 60}\n#### {truth + rng.integers(0, 2)}" for truth in truths]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow.py")
        file.write_text(SLOW)
        with RewardPool(str(file), num_workers=workers, kwargs=json.dumps({"score_s": score_s})) as pool:
            while pool.num_ready < workers:  # they start during the engine's start, minutes before the first response
                time.sleep(0.01)
            cpu, start = time.process_time(), time.monotonic()
            for i in order:
                time.sleep(max(0.0, start + done_at[i] - time.monotonic()))
                pool.submit(int(i), "openai/gsm8k", answers[i], str(truths[i]))
            generated_s = time.monotonic() - start
            scores = pool.results()
            cpu = time.process_time() - cpu
    right = [float(answer.endswith(f" {truth}")) for answer, truth in zip(answers, truths)]
    assert scores.failures == [None] * samples
    assert scores.scores == right
    return {"samples": samples, "gen_s": gen_s, "score_s": score_s, "workers": workers, "burst": burst, "seed": seed,
            "generated_s": generated_s, "wait_s": scores.wait_s, "added": scores.wait_s / gen_s,
            "alone_s": samples * score_s / workers, "trainer_cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--gen-s", type=float, default=120.0)
    parser.add_argument("--score-s", type=float, default=0.05)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [(args.score_s, workers, False) for workers in args.workers]
    cases += [(args.score_s, args.workers[-1], True), (0.0, args.workers[0], False)]
    rows = []
    print(json.dumps({"machine": platform.node(), "python": platform.python_version()}))
    for score_s, workers, burst in cases:
        rows.append(measure(args.samples, args.gen_s, score_s, workers, burst, args.seed))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"\n{'score_s':>8}{'workers':>8}{'burst':>7}{'gen_s':>7}{'wait_s':>8}{'added':>8}{'alone_s':>9}{'cpu_s':>7}")
    for row in rows:
        print(f"{row['score_s']:8.2f}{row['workers']:8d}{row['burst']!s:>7}{row['gen_s']:7.0f}{row['wait_s']:8.2f}"
              f"{row['added']:8.2%}{row['alone_s']:9.1f}{row['trainer_cpu_s']:7.2f}")
    report("rewards", rows=rows)


if __name__ == "__main__":
    main()

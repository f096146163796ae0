"""Two tables from finished runs: what they learned, and where a step's time goes.
`python -m tests.bench.quickstart_table runs/seed1 runs/seed2 runs/seed3`"""

import statistics
import sys

from tools.runs import read_metrics


def main(runs: list[str]) -> None:
    print("| run | validation sampled | greedy | training reward, means of 5 steps | training | peak memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    shares = []
    for run in runs:
        rows = read_metrics(run)
        steps = [row for row in rows if "timing_s/step" in row]
        (greedy,) = [key for key in rows[0] if key.endswith("/acc/greedy")]
        (sampled,) = [key for key in rows[0] if "/acc/mean@" in key and key.startswith("val-core/")]
        rewards = [row["critic/rewards/mean"] for row in steps]
        means = " ".join(f"{statistics.mean(rewards[i : i + 5]):.2f}" for i in range(0, len(rewards), 5))
        seconds = sum(row["timing_s/step"] for row in steps)
        peak = max(row["perf/cpu_memory_peak_gb"] for row in steps)
        print(f"| {run} | {rows[0][sampled]:.2f} -> {rows[-1][sampled]:.2f} | {rows[0][greedy]:.2f} -> "
              f"{rows[-1][greedy]:.2f} | {means} | {seconds:.0f} s | {peak:.1f} GiB |")
        shares += steps[1:]
    # async_grpo.py's samplers work at the same time, and a step has the seconds that trainers wait for them
    rollout = "wait" if any("timing_s/wait" in row for row in shares) else "gen"
    names = [rollout, "reward", "update_weights", "sleep", "probe", "update_actor", "testing", "save_checkpoint"]
    print("\n| phase | median s of a step | share of all seconds |\n| --- | --- | --- |")
    total = sum(row["timing_s/step"] for row in shares)
    for name in names:
        values = [row.get(f"timing_s/{name}", 0.0) for row in shares]
        print(f"| {name} | {statistics.median(values):.2f} | {sum(values) / total:.0%} |")
    rest = [row["timing_s/step"] - sum(row.get(f"timing_s/{name}", 0.0) for name in names) for row in shares]
    print(f"| everything else | {statistics.median(rest):.2f} | {sum(rest) / total:.0%} |")
    for name in ("training/rollout_probs_diff_mean", "sync/probe_prob_diff"):
        values = [row[name] for row in shares if name in row]  # absent where nothing was trained
        print(f"\n`{name}`: first five steps {statistics.mean(values[:5]):.4f}, all {statistics.mean(values):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])

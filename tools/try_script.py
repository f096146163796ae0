"""Run a script, your fork perhaps, for three steps on a tiny random model, and show what it does in numbers.

    python -m tools.try_script mine.py --my-flag 0.5                # 20 seconds; flags after the script go to it

The Hugging Face engine samples, in float32. The reward is 1 for texts of odd length: it needs no capable model. The
first step runs again with --run-zero-advantage: where responses were left out, the gradient must be the same.
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "models/SmolLM2-135M-Instruct"
TINY = ROOT / "models/tiny"
DATA = ROOT / "data/word_problems/train.parquet"
STEPS = 3


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)


def make_tiny_model(folder: Path = TINY) -> None:
    """A random Llama of two layers with the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def run_script(script: str, flags: list[str], run_dir: Path, output: int | None = None) -> int:
    """The script's exit code. It runs in a fork of this process, which must have imported and started nothing but
    modules: so two runs need one import. `output`: a file descriptor for what it prints."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    if not (TINY / "config.json").is_file():
        make_tiny_model()
    sys.argv[:] = [
        script, "--model", str(TINY), "--train-data", str(DATA), "--run-dir", str(run_dir),
        "--total-steps", str(STEPS), "--prompts-per-step", "4", "--samples-per-prompt", "4",
        "--data.max-prompt-length", "200", "--rollout.max-response-length", "12", "--rollout.temperature", "0.7",
        "--rollout.stop-token-ids", *map(str, range(0, 49152, 64)),
        "--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--optim.lr", "1e-3",
        "--reward.function", f"{__file__}:compute_score", "--reward.num-workers", "1", "--log.rollouts-every", "1",
        "--save.resume", "none", "--save.hf", "never", *flags,
    ]
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


def describe(run_dir: Path) -> str:
    """What a reader asks first of a loop, answered by the last step of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    flags = json.loads((run_dir / "config.json").read_text())
    recorded = pq.read_table(run_dir / f"rollouts/step_{last['step']:06d}.parquet").to_pylist()
    ran = [row for row in recorded if row["trained"] is not None]
    trained = sum(sum(row["trained"]) for row in ran)
    sampled = sum(row["response_length"] for row in recorded)
    ended = [row for row in ran if row["finish_reason"] == "stop"]
    cut = [row for row in ran if row["finish_reason"] == "length"]
    ratios = [abs(ratio - 1) for row in ran for ratio, used in zip(row["ratio"], row["trained"]) if used]
    differences = [
        abs(engine - trainer) for row in ran
        for engine, trainer, used in zip(row["rollout_logp"], row["old_logp"], row["trained"]) if used
    ]
    dropped = {name: last.get(name, 0.0) for name in (
        "reward/error_frac", "reward/timeout_frac", "reward/constant_group_frac", "actor/skipped_steps")}
    updates = flags.get("minibatches_per_step", 1) * flags.get("epochs_per_step", 1)
    answers = {
        "reward": " -> ".join(f"{row['critic/rewards/mean']:.3f}" for row in rows if "critic/rewards/mean" in row),
        "gradient norm": " -> ".join(f"{row['actor/grad_norm']:.3g}" for row in rows if "actor/grad_norm" in row),
        "advantages": f"{last['critic/advantages/mean']:.3g} mean, {last['critic/advantages/min']:.3g} to "
                      f"{last['critic/advantages/max']:.3g}",
        "tokens with a gradient": f"{trained}, of {sampled} sampled on all ranks",
        "KL to a reference": f"{last['actor/kl_loss']:.3g}" if "actor/kl_loss" in last else "no term in the loss",
        "old log-probs": f"|ratio - 1| is at most {max(ratios, default=0.0):.2g}",
        "stop tokens trained": f"{sum(row['trained'][-1] for row in ended)} of {len(ended)}",
        "truncated responses trained": f"{sum(any(row['trained']) for row in cut)} of {len(cut)}",
        "left out": ", ".join(f"{name} {value:g}" for name, value in dropped.items()),
        "updates per rollout": str(updates),
        "temperature": f"{flags['rollout']['temperature']}; log-probs of engine and trainer differ by at most "
                       f"{max(differences, default=0.0):.2g} nats",
        "tokens of a micro-batch": f"up to {flags.get('max_tokens_per_gpu') or TOKENS_ON_CPU} on one rank; other counts"
                                   " are global",
    }
    return "\n".join(f"{question:28}  {answer}" for question, answer in answers.items())


def main(arguments: list[str]) -> None:
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(f"error: {' '.join(arguments[:1]) or 'no script given'}: name a script, such as grpo.py")
    script, *flags = arguments
    run_dir = ROOT / f"runs/try/{Path(script).stem}-{time.strftime('%m%d-%H%M%S')}"
    start = time.monotonic()
    try:
        run_script(script, flags, run_dir)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    print(f"\n{describe(run_dir)}\n\n{time.monotonic() - start:.0f} s, {run_dir}")


if __name__ == "__main__":
    main(sys.argv[1:])

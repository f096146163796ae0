"""Run a script, your fork perhaps, for three steps on a tiny random model, and show what it does in numbers.

    python -m tools.try_script mine.py --my-flag 0.5                # 20 seconds; flags after the script go to it

The Hugging Face engine samples, in float32. The reward needs no capable model: it is 1 for texts of odd length, and in
some groups the same for all. The steps run twice more: with --run-zero-advantage, where each gradient must be the same,
and in the data type that the script has by default, where numbers may differ by rounding only.
"""

import importlib
import json
import os
import re
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "models/SmolLM2-135M-Instruct"
TINY = ROOT / "models/tiny"
DATA = ROOT / "data/word_problems/train.parquet"
STEPS = 3
SAME = 1e-4  # of two gradient norms in float32
MANY_NATS = 0.05  # between the log-probs of engine and trainer: rounding of a tiny model is far below it
FAR = 0.5  # of a number in the script's data type and in float32: rounding of a tiny model is far below it
FOUND = "the loss has a gradient on responses that were left out: give skip_zero_advantage=False to run.to_minibatches"
MODULES = ("common.run", "common.correction", "common.losses", "common.engine.hf", "pandas", "torch._dynamo",
           "transformers.models.llama.modeling_llama")
"""What takes long to import, for all runs at once."""
OWN = {"--run-dir": "the run is below runs/try",
       "--log.rollouts-every": "the numbers come from the responses of each step"}
"""Flags that cannot be given, and why."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)


def compute_score_of_some(data_source, solution_str, ground_truth, extra_info=None):
    """The same, but to some problems all responses are correct and to some none: groups without an advantage.
    The first four problems of the order that seed 0 gives have some of each."""
    return {1: 1.0, 2: 0.0}.get(int(ground_truth) % 6, float(len(solution_str) % 2))


def is_supervised(script: Path) -> bool:
    """Whether it is a script that trains on rows of data and does not sample, such as sft.py."""
    return "rows_per_step" in script.read_text()


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
        "--reward.function", f"{__file__}:compute_score_of_some", "--reward.num-workers", "1",
        "--log.rollouts-every", "1", "--save.resume", "none", "--save.hf", "never", *flags,
    ]
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rows_of(run_dir: Path, step: int) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(run_dir / f"rollouts/step_{step:06d}.parquet").to_pylist()


def describe(run_dir: Path) -> str:
    """What a reader asks first of a loop, answered by the last step of a run."""
    from common.memory.plan import TOKENS_ON_CPU

    rows = metrics_of(run_dir)
    last = rows[-1]
    flags = json.loads((run_dir / "config.json").read_text())
    recorded = rows_of(run_dir, int(last["training/global_step"]))
    ran = [row for row in recorded if row["trained"] is not None]
    trained = sum(sum(row["trained"]) for row in ran)
    sampled = sum(sum(row["mask"] or [1] * row["response_length"]) for row in recorded)     # not tokens of tools
    ended = [row for row in ran if row["finish_reason"] == "stop"]
    cut = [row for row in ran if row["finish_reason"] == "length"]

    def numbers(*names: str) -> list[list[float]]:
        """Of each token that was trained, in the responses that have them all: a fork may not report some."""
        complete = [row for row in ran if all(row[name] is not None for name in names)]
        return [values for row in complete
                for used, *values in zip(row["trained"], *(row[name] for name in names)) if used]

    def course(name: str, form: str) -> str:
        return " -> ".join(f"{row[name]:{form}}" for row in rows if name in row) or f"no {name} was reported"

    ratios = [abs(ratio - 1) for ratio, in numbers("ratio")]
    # the data's answers have no log-prob of the engine: 0
    differences = [abs(engine - trainer) for engine, trainer in numbers("rollout_logp", "old_logp") if engine]
    difference = max(differences, default=0.0)
    why = ": far more than rounding: other tokens, temperatures or prompts were scored than sampled"
    dropped = {name: last.get(name, 0.0) for name in (
        "reward/error_frac", "reward/timeout_frac", "reward/constant_group_frac", "actor/skipped_steps")}
    advantages = [last.get(f"critic/advantages/{name}") for name in ("mean", "min", "max")]
    updates = flags.get("minibatches_per_step", 1) * flags.get("epochs_per_step", 1)
    answers = {
        "reward": course("critic/rewards/mean", ".3f"),
        "gradient norm": course("actor/grad_norm", ".3g"),
        "advantages": "{:.3g} mean, {:.3g} to {:.3g}".format(*advantages) if None not in advantages else "not reported",
        "tokens with a gradient": f"{trained}, of {sampled} sampled on all ranks",
        "KL to a reference": f"{last['actor/kl_loss']:.3g}" if "actor/kl_loss" in last else "no term in the loss",
        **({"divergence from the teacher": course("distillation/loss", ".3g")} if "distillation/loss" in last else {}),
        "old log-probs": f"|ratio - 1| is at most {max(ratios):.2g}" if ratios else "no ratio was reported",
        "stop tokens trained": f"{sum(row['trained'][-1] for row in ended)} of {len(ended)}",
        "truncated responses trained": f"{sum(any(row['trained']) for row in cut)} of {len(cut)}",
        "left out": ", ".join(f"{name} {value:g}" for name, value in dropped.items()),
        "updates per rollout": str(updates),
        "temperature": f"{flags['rollout']['temperature']}; log-probs of engine and trainer differ by at most "
                       f"{difference:.2g} nats{why if difference > MANY_NATS else ''}",
        "tokens of a micro-batch": f"up to {flags.get('max_tokens_per_gpu') or TOKENS_ON_CPU} on one rank; other counts"
                                   " are global",
    }
    return "\n".join(f"{question:28}  {answer}" for question, answer in answers.items())


def can_compare(run_dir: Path) -> bool:
    """The script has --run-zero-advantage, and this run was without it."""
    return json.loads((run_dir / "config.json").read_text()).get("run_zero_advantage") is False


def compare(run_dir: Path, all_ran: Path) -> str:
    """The steps of two runs of the same flags, the second with --run-zero-advantage: what the first one left out must
    have no gradient. `FOUND` begins the answer if it has one. A step is compared if it left responses out and has a
    gradient at all."""
    seen, left_out = [], 0
    for step, (ours, theirs) in enumerate(zip(metrics_of(run_dir), metrics_of(all_ran), strict=True), 1):
        pairs = list(zip(rows_of(run_dir, step), rows_of(all_ran, step), strict=True))
        norms = [ours.get("actor/grad_norm"), theirs.get("actor/grad_norm")]
        if None in norms:
            return "not compared: no actor/grad_norm was reported"
        lost = sum(row["trained"] is None and other["trained"] is not None for row, other in pairs)
        if abs(norms[0] - norms[1]) > SAME * max(norms):
            return (f"{FOUND} (gradient norm of step {step} {norms[0]:.6g}, with --run-zero-advantage {norms[1]:.6g}); "
                    f"or it is divided by a number of the micro-batch, such as len(logp): losses.token_weights has the "
                    f"denominators")
        if lost and max(norms):
            seen.append(f"{norms[0]:.6g} in step {step}")
            left_out += lost
    if not seen:
        return "not compared: in each step all responses ran, or no response has a gradient"
    return (f"the same gradient norms, {', '.join(seen)}, with --run-zero-advantage; {left_out} responses were left "
            f"out without it")


def compare_types(in_float32: Path, in_own: Path) -> str:
    """Which numbers of the last step are not those of float32, within what rounding explains."""
    ours, theirs = metrics_of(in_own)[-1], metrics_of(in_float32)[-1]
    far = []
    for name in sorted(ours.keys() & theirs.keys()):
        largest = max(abs(ours[name]), abs(theirs[name]))
        is_compared = name.startswith(("actor/", "critic/", "distillation/")) and largest > 1e-6
        if is_compared and abs(ours[name] - theirs[name]) > FAR * largest:
            far.append(f"{name} {ours[name]:.3g} (float32 {theirs[name]:.3g})")
    dtype = json.loads((in_own / "config.json").read_text())["policy"]["compute_dtype"]
    if not far:
        return f"{dtype}: each number of the loss is that of float32 within rounding"
    return f"{dtype}: not rounding alone: {', '.join(far)}"


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(f"error: {' '.join(arguments[:1]) or 'no script given'}: name a script, such as grpo.py")
    script, *flags = arguments
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in OWN:
            sys.exit(f"error: {name} cannot be given here: {OWN[name]}")
    if is_supervised(Path(script)):
        sys.exit(f"error: {script} does not sample, and the table is of responses: make test SCRIPT={script} compares "
                 f"its gradient on 1 and 2 ranks and in other micro-batches, and kills and resumes it")
    run_dir = ROOT / f"runs/try/{Path(script).stem}-{time.strftime('%m%d-%H%M%S')}"
    start = time.monotonic()
    os.chdir(ROOT)
    for name in MODULES:
        importlib.import_module(name)
    if code := run_script(script, flags, run_dir):
        sys.exit(code)
    said = "not compared: the script has no --run-zero-advantage, or ran with it"
    if can_compare(run_dir):
        said = compare(run_dir, run_again(script, flags, run_dir, "all", ["--run-zero-advantage"]))
    own_type = default_type(Path(script))
    types = f"not compared: {own_type} is float32, or a flag says which"
    if own_type != "float32" and not any(flag.startswith(("--policy.compute", "--optim.kind")) for flag in flags):
        types = compare_types(run_dir, run_again(script, flags, run_dir, "own", ["--policy.compute-dtype", own_type]))
    print(f"\n{describe(run_dir)}\n{'with all responses':28}  {said}\n{'data type of a run':28}  {types}\n")
    print(f"{time.monotonic() - start:.0f} s, {run_dir}")
    if said.startswith(FOUND):
        sys.exit(f"error: {said}")


def run_again(script: str, flags: list[str], run_dir: Path, name: str, more: list[str]) -> Path:
    """The run folder of the same steps with more flags."""
    folder = run_dir.with_name(f"{run_dir.name}-{name}")
    with open(run_dir / f"{name}.log", "w+") as log:
        if run_script(script, [*flags, *more], folder, log.fileno()):
            log.seek(0)
            sys.exit(f"{log.read()}\nerror: this is what it says with {' '.join(more)}")
    return folder


def default_type(script: Path) -> str:
    """The compute dtype that a run has without a flag."""
    from common.flags.model import ModelConfig

    changed = re.search(r'ModelConfig\(.*compute_dtype="(\w+)"', script.read_text())
    return changed[1] if changed else ModelConfig().compute_dtype


if __name__ == "__main__":
    main(sys.argv[1:])

"""Evaluation of a model on verl's parquet files, by the code with which training validates.

Of every prompt: a greedy response and --eval-n sampled ones, scored by reward functions, a reward model or an episode.
Of every data source: mean@n, pass@k and maj@k with 95% intervals, length, truncation. RUN_DIR has the responses
(rollouts/*.parquet, python -m tools.report shows them) and the numbers (evaluation.json). A killed evaluation continues
where it was when the same command runs again. --compare OTHER pairs it with another evaluation, prompt by prompt.

    torchrun --standalone --nproc-per-node 8 evaluate.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --val-data data/gsm8k/test.parquet --eval-n 8 --run-dir runs/evaluate
"""

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from common.flags.data import DataConfig
from common.flags.model import ModelConfig, RewardModelConfig
from common.flags.rollout import RolloutConfig, changed_flags
from rewards.runtime.pool import RewardConfig
from tools.command_line import check_command, run_script


@dataclass
class Args:
    model: str
    """Hugging Face folder or hub name; a checkpoint of a run, or a run folder (its newest checkpoint); or a folder of
    LoRA adapters in peft's format."""
    val_data: tuple[str, ...]
    """Parquet or JSON-lines files, folders or globs with verl's columns."""
    run_dir: str = "runs/evaluate"
    """Folder for responses and numbers. The same command continues in it what was killed."""
    seed: int = 0
    """Random seed of sampling; a run's own validations have that of the run."""
    compare: str = ""
    """Folder of another evaluation of the same data, with which this one is compared prompt by prompt."""

    eval_n: int = 4
    """Sampled responses per validation prompt (mean@N, best@N, maj@N), besides the greedy response; 0: greedy only."""
    eval_temperature: float = 1.0
    """Sampling temperature of these responses. 0: all are greedy. Needs --eval-n."""
    eval_prompts: int = 0
    """Most validation prompts, spread evenly over the files; 0: all."""
    prompts_per_chunk: int = 512
    """Prompts that are sampled together and then written; a killed evaluation loses at most these."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    for name, least in {"eval_n": 0, "eval_temperature": 0, "eval_prompts": 0, "prompts_per_chunk": 1}.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    if found := changed_flags(args.rollout, "temperature", "top_p", "top_k", "in_flight", "max_staleness", "drop"):
        raise ValueError(f"{' and '.join(found)} is of training: evaluation has --eval-temperature, "
                         f"--rollout.val-top-p and --rollout.val-top-k")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

from torch.distributed.elastic.multiprocessing import errors

from common.checkpoint.run_folder import open_run_folder
from common.dataset.store import load_prompts
from common.dataset.videos import check_engine
from common.engine.base import EngineSetup, validation_sampling
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.flags.effect import check_effect
from common.metrics import Meter
from common.model.loading import Weights, load_policy, read_config, read_tokenizer
from common.model.policy import Policy
from common.model.reward_model import RewardModel, check_reward_model
from common.parallel import ranks
from common.parallel.ranks import all_gather_objects, on_main, print_on_main
from common.rollouts.episodes import start_episodes
from common.rollouts.record import row_of, write_rows
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from common.rollouts.validation import spread_rows
from envs.runtime.template import Clock
from tools import evaluation, model_source


def evaluate_chunk(args: Args, source: RolloutSource, policy: Policy, rows: list[int], first: int) -> None:
    """Sample, score and write the responses to the prompts from number `first` on. `rows`: of all prompts."""
    start, meter, chunk = time.perf_counter(), Meter(), rows[first : first + args.prompts_per_chunk]
    sampling = validation_sampling(args.rollout, args.eval_temperature)
    request = RolloutRequest(chunk, args.eval_n, sampling, (args.seed, "val"), with_greedy=True, first=first)
    source.engine.wake(policy)                      # with an empty cache: a chunk does not depend on those before it
    pending = start_rollout(source, request)
    source.engine.sleep()
    found = []
    for sample in pending.collect(meter).samples:
        greedy, group = sample.index >= len(chunk) * args.eval_n, first + sample.group
        number = args.eval_n if greedy else sample.index % args.eval_n
        numbers = {"index": group * (args.eval_n + 1) + number, "group": group}
        row = row_of(source.scoring.tokenizer, sample, 0, sample.score)
        found.append(row | numbers | evaluation.own_columns(sample, greedy))
    found = [*chain(*all_gather_objects(found))]
    about = {"data_hash": source.data.loaded.data_hash, "responses": len(found), "metrics": meter.reduce(),
             "seconds": time.perf_counter() - start}
    write_rows(evaluation.file_of(Path(args.run_dir), first), found, evaluation.schema_with(about))


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    if args.compare:
        evaluation.read_answers(Path(args.compare))  # refuses what is no evaluation
    sizes = args.policy.replicas, args.policy.sequence_parallel, args.policy.expert_parallel
    world = ranks.init(0.0, *sizes)                 # without a time limit: ranks may wait long for the slowest chunk
    for line in check_effect(args, world.device.type):
        print_on_main(world, f"flags  {line}")
    open_run_folder(args.run_dir, world)
    folder = Path(args.run_dir)
    source = on_main(world, partial(model_source.resolve, args.model))
    Clock.keep(on_main(world, partial(evaluation.begin, args, source, world.size)))
    model = on_main(world, partial(model_source.write_model, source, folder / "model", args.policy))
    hf_config = read_config(model, args.policy)
    tokenizer = read_tokenizer(model, args.policy)
    longest = check_rollout(args.rollout, hf_config, world, args.data.max_prompt_length, has_correction=True)
    if args.reward_model.path:
        check_reward_model(args.reward_model, args.policy, longest)
    data = load_prompts(args.val_data, tokenizer, args.data, all_columns=bool(args.rollout.episode))
    check_engine(args.rollout.engine, data)
    print_on_main(world, f"val    {data.loaded.summary()}")
    data.loaded.write_skipped(folder / "skipped_val.jsonl")
    rows = spread_rows(len(data), args.eval_prompts)
    chunks = on_main(world, partial(evaluation.missing_chunks, args, len(rows), data.loaded.data_hash))
    if chunks:
        stops = stop_tokens(model, tokenizer)
        scoring = Scoring(tokenizer, args.reward, args.reward_model, data.loaded.data_sources, args.rollout.episode)
        on_main(world, partial(scoring.try_function, [data]))
        scoring.episodes = start_episodes(args.rollout, tokenizer, args.data, stops, longest, world)
        # the models first: the engine takes a part of the memory that they leave free
        policy = load_policy(model, args.policy, world, Weights(frozen=True))
        if args.reward_model.path:
            scoring.model = RewardModel(args.reward_model, args.policy, world)
        probe = [prompt.tokens for prompt in data[:4]]
        engine = make_engine(EngineSetup(
            model, hf_config, args.rollout, args.policy, world, probe, stops, longest, args.seed,
        ))
        for first in chunks:
            evaluate_chunk(args, RolloutSource(engine, scoring, data), policy, rows, first)
            print_on_main(world, f"{min(first + args.prompts_per_chunk, len(rows)):,} of {len(rows):,} prompts")
        engine.close()
        scoring.close()
    for line in on_main(world, partial(evaluation.report, folder, args.compare, data)):
        print_on_main(world, line)
    ranks.shutdown()


if __name__ == "__main__":
    run_script(main, Args, __doc__)

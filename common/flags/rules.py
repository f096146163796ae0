"""What flags must be that several scripts have. The rules need no model: a command that breaks one is refused before
torch is imported."""

import os
from typing import Any, Literal

from common.flags.data import DataConfig
from common.flags.effect import with_defaults
from common.flags.rollout import RolloutConfig, changed_flags
from common.flags.secrets import flags_of

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def check_at_least(least: int, flags: dict[str, float]) -> None:
    """Raises ValueError for a flag (--NAME -> its value) below `least`."""
    for flag, value in flags.items():
        if value < least:
            raise ValueError(f"{flag} {value} must be at least {least}")


def check_shares(flags: dict[str, float]) -> None:
    """Raises ValueError for a flag (--NAME -> its value) outside of [0, 1]."""
    for flag, value in flags.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{flag} {value} must be in [0, 1]")


def num_shards(num_ranks: int, replicas: int, sequence_parallel: int = 1, expert_parallel: int = 1) -> int:
    """Ranks over which each copy of the model is sharded. Raises ValueError if they cannot be divided this way."""
    sizes = {"replicas": replicas, "sequence-parallel": sequence_parallel, "expert-parallel": expert_parallel}
    for flag, value in sizes.items():
        if value < 1 or num_ranks % value:
            raise ValueError(f"--policy.{flag} {value} must be at least 1 and divide the {num_ranks} ranks evenly")
    return num_ranks // replicas


def check_sizes(tp: int, prompts_per_step: int, samples_per_prompt: int, minibatches_per_step: int,
                **others: int) -> None:
    """Refuse batch sizes below 1, or that do not divide over engines (of `samplers` or all ranks) and mini-batches."""
    sizes = {
        "prompts_per_step": prompts_per_step,
        "samples_per_prompt": samples_per_prompt,
        "minibatches_per_step": minibatches_per_step,
        **others,
    }
    check_at_least(1, {f"--{name.replace('_', '-')}": value for name, value in sizes.items()})
    ranks = "world size"
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "samplers" in others:
        ranks = "--samplers"
        num_ranks = others["samplers"]
    num_engines = num_ranks // tp
    if prompts_per_step % max(num_engines, 1):
        raise ValueError(
            f"--prompts-per-step {prompts_per_step} must be a multiple of the {num_engines} engines "
            f"({ranks} {num_ranks} / --rollout.tp {tp})"
        )
    num_responses = prompts_per_step * samples_per_prompt
    if num_responses % minibatches_per_step:
        raise ValueError(f"{num_responses} responses a step (--prompts-per-step {prompts_per_step} x "
                         f"--samples-per-prompt {samples_per_prompt}) must be a multiple of "
                         f"--minibatches-per-step {minibatches_per_step}")


def check_sampling(config: RolloutConfig) -> None:
    """Refuse what cannot work with any model. Mistyped commands meet it before torch is imported."""
    if config.temperature <= 0:
        raise ValueError(f"--rollout.temperature {config.temperature} must be above 0: training needs a distribution")
    for flag, top_p in (("top-p", config.top_p), ("val-top-p", config.val_top_p)):
        if not 0 < top_p <= 1:
            raise ValueError(f"--rollout.{flag} {top_p} must be in (0, 1]")
    check_at_least(1, {"--rollout.max-response-length": config.max_response_length})
    if not 0 <= config.drafts <= 16:
        raise ValueError(f"--rollout.drafts {config.drafts} must be from 0 to 16: a pass has a row for each of them")
    given = f"--rollout.in-flight {config.in_flight:g}"
    if not 1 <= config.in_flight <= 2 or config.max_staleness < 0:
        raise ValueError(f"{given} must be from 1 to 2, so that what a step carries over fits into the next one, and "
                         f"--rollout.max-staleness {config.max_staleness} at least 0")
    if config.in_flight > 1 and config.stop:
        raise ValueError(f"{given} does not go with --rollout.stop: only the tokens of a response are carried over, "
                         f"not a text that is half written")


def check_pool(config: DataConfig) -> None:
    """Refuse pools of rows that cannot be meant."""
    if config.pool_hard >= config.pool_easy:
        raise ValueError(f"--data.pool-hard {config.pool_hard} must be below --data.pool-easy {config.pool_easy}")
    if not 0 < config.pool_rest <= 1:
        raise ValueError(f"--data.pool-rest {config.pool_rest} must be in (0, 1]: with 0 no row would ever come back")


def check_clip(low: float, high: float, dual: float) -> None:
    """Refuse bounds of a clipped loss that cannot be meant."""
    if not 0 <= low <= 1:
        raise ValueError(f"--clip-low {low} must be in [0, 1]")
    if high < (low if low < 1 else 0):
        raise ValueError(f"--clip-high {high} must be at least --clip-low {low} (or 0, if that is 1: no lower bound)")
    if dual <= 1:
        raise ValueError(f"--clip-dual {dual} must be above 1")


def check_group(samples_per_prompt: int, least: int = 2) -> None:
    """Refuse a group that is too small for its baseline."""
    if samples_per_prompt < least:
        raise ValueError(f"--samples-per-prompt {samples_per_prompt} must be at least {least}: a group of one has no "
                         f"baseline")


def check_turns(config: RolloutConfig, per_turn: bool, per_role: bool = False) -> None:
    """Refuse advantages of turns or roles where there are none."""
    if (per_turn or per_role) and not config.episode:
        flag = "--advantage-per-step" if per_turn else "--advantage-per-role"
        raise ValueError(f"{flag} needs --rollout.episode: only an episode has turns and roles")
    if per_turn and per_role:
        raise ValueError("--advantage-per-step and --advantage-per-role exclude each other: a token has one advantage")


def check_sampled_validation(args: Any, samples: bool) -> None:
    """Refuse flags of sampling where nothing is sampled, and those of training on what was sampled."""
    given = flags_of(args)
    for flag, value in flags_of(with_defaults(args)).items():
        is_of_sampling = flag.startswith(("--rollout.", "--reward.", "--eval-n", "--eval-temperature"))
        if is_of_sampling and given[flag] != value and not samples:
            raise ValueError(f"{flag} does nothing without --eval-by sampling: leave it out, or set that")
    found = changed_flags(args.rollout, "temperature", "top_p", "top_k", "in_flight", "max_staleness", "drop")
    if found:
        raise ValueError(f"{' and '.join(found)} is of training on what was sampled: validation has "
                         f"--eval-temperature, --rollout.val-top-p and --rollout.val-top-k")


def check_supervised(args: Any) -> None:
    """Refuse flags of a script that does not sample and that cannot work with any model."""
    check_at_least(1, {"--rows-per-step": args.rows_per_step, "--total-steps": args.total_steps})
    check_at_least(0, {"--max-tokens-per-gpu": args.max_tokens_per_gpu})
    samples = vars(args).get("eval_by") == "sampling"
    if "eval_by" in vars(args):
        check_sampled_validation(args, samples)
    defaults = type(args.log)()
    for name in ("rollouts_every", "rollouts_max"):
        value = vars(args.log)[name]
        if value != vars(defaults)[name] and not samples:
            raise ValueError(f"--log.{name.replace('_', '-')} {value}: there are no rollouts here")
    if args.policy.router_replay != "none":
        raise ValueError("--policy.router-replay: there are no log-probs of an old policy here, set it to none")

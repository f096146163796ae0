"""All that surrounds a loop that samples from its policy: what training.py has, and rewards, engine and rollouts.

`Run` is a helper, not a framework. It has no hooks, is never subclassed, never calls back into the script, and knows
nothing of what is optimised: the loop, its phases and every formula are in the script.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from common.correction import CorrectionConfig
from common.dataset.store import load_prompts
from common.engine.base import Engine, RolloutConfig
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.metrics import Meter
from common.model.loading import load_reference
from common.model.offload import Offload, OffloadConfig
from common.model.policy import PackedModel, Policy
from common.model.reward_model import RewardModel, RewardModelConfig
from common.parallel.ranks import print_on_main, seed_of
from common.prompts import DataConfig
from common.rollout import Minibatch, Rollout, to_minibatches
from common.rollouts.episodes import start_episodes
from common.rollouts.in_flight import continue_rollout
from common.rollouts.record import write_step, write_validation
from common.rollouts.scoring import PendingRollout, Scoring, start_rollout
from common.rollouts.validation import evaluate, spread_rows
from common.tracking.step import rollout_metrics
from common.training import TrainArgs, Training
from rewards.runtime.pool import RewardConfig


@dataclass
class RunArgs(TrainArgs):
    """Flags that every script has which samples from its policy."""

    eval_n: int = 4
    """Sampled responses per validation prompt (mean@N, best@N, maj@N), besides the greedy one; 0: greedy only."""
    eval_temperature: float = 1.0
    """Temperature of the sampled ones."""
    teacher: str = ""
    """Model that takes the reference's place in every KL: distillation on the policy's own samples. Same tokens."""
    reward_coef: float = 1.0
    """Factor of the scores in the rewards. 0: they are only reported, and the KL to a teacher alone is learned from."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)


class Run(Training):
    """One run of a script that samples, from `with Run(args) as run:` to the end of that block."""

    def __init__(self, args: RunArgs, prompts_per_step: int, is_corrected: bool = False):
        """`is_corrected`: see `check_rollout`."""
        super().__init__(args)
        self.args = args
        self.prompts_per_step = prompts_per_step
        self.is_corrected = is_corrected
        self.num_sampled_tokens = 0.0  # in this step

    def __enter__(self) -> Self:
        """Also check the flags of the engine, read the prompts, start the reward workers."""
        super().__enter__()
        args = self.args
        self.max_sequence_length = check_rollout(
            args.rollout, self.hf_config, self.world, args.data.max_prompt_length, self.is_corrected,
            args.policy.router_replay,
        )
        all_columns = bool(args.rollout.episode)
        self.load_data(lambda files: load_prompts(files, self.tokenizer, args.data, all_columns), self.prompts_per_step)
        sources = {*self.train_set.loaded.data_sources, *(self.val_set.loaded.data_sources if self.val_set else ())}
        self.scoring = Scoring(
            self.tokenizer, args.reward, args.reward_model, sources, args.rollout.episode, self.world.samples
        )
        self.closing.callback(self.scoring.close)
        self.scoring.episodes = start_episodes(
            args.rollout, self.tokenizer, args.data, stop_tokens(args.model, self.tokenizer), self.max_sequence_length,
            self.world,
        )
        return self

    def start_engine(self) -> Engine:
        """Start the engine before the models, because it reads how much memory is free."""
        args = self.args
        print_on_main(self.world, f"engine {args.rollout.engine}")
        self.watchdog.phase("start of the engine")
        self.engine = make_engine(
            args.model, self.hf_config, args.rollout, args.policy, self.world,
            [prompt.tokens for prompt in self.train_set[:4]], stop_tokens(args.model, self.tokenizer),
            self.max_sequence_length, args.seed, sum(self.plan.beside_engine().values()) if self.world.trains else 0.0,
        )
        self.closing.callback(self.engine.close)
        if args.reward_model.path and self.world.samples:
            self.scoring.model = RewardModel(args.reward_model, args.policy, self.world)
        return self.engine

    def load_reference(self) -> Policy:
        """The teacher, or the policy's model as it is before training, frozen."""
        return load_reference(self.args.teacher, self.args, self.models, self.world)

    def resume(self) -> None:
        """Continue from a checkpoint. A run that starts is validated."""
        for model in self.models.values():
            model.prompts = self.train_set if self.train_set.first_with_images >= 0 else None
        self.engine.offload = Offload(self.args.offload, list(self.models.values()), list(self.optimizers.values()))
        super().resume()
        if self.val_set is not None and not self.is_validated:
            self.watchdog.phase("validation")
            self.log_validation(self._validate(self.first_step))

    def sample(
        self, rows: Sequence[int], num_samples: int, sampling: RolloutConfig, *seed: int | str
    ) -> PendingRollout:
        """Sample responses to these rows; scoring of each one starts as it ends. With --rollout.in-flight, to as many:
        what steps before have begun comes first. `seed`: the step's number, and perhaps more."""
        num_responses = len(self.engine.local_prompts(len(rows))) * num_samples
        arguments = (self.engine, self.scoring, self.train_set, rows, num_samples, sampling, (self.args.seed, *seed),
                     self.checkpoints.stopping)
        with self.timer("gen"), self.tracker.progress("rollout", num_responses) as self.scoring.advance:
            if sampling.in_flight > 1 or self.script_state.get("in_flight"):    # of a checkpoint, to be dropped
                return continue_rollout(*arguments, self.script_state, self.sampler, self.meter)
            return start_rollout(*arguments)

    def collect(self, pending: PendingRollout, meter: Meter | None = None) -> Rollout:
        """Wait for the scores. `meter` takes the scorers' numbers; default: that of the step."""
        self.checkpoints.check()
        with self.timer("reward"):
            rollout = pending.collect(self.meter if meter is None else meter)
        self.num_sampled_tokens += float(rollout.response_lengths.sum())
        return rollout

    def to_minibatches(self, rollout: Rollout, in_update: Tensor, num_minibatches: int, max_tokens: int, step: int,
                       ) -> list[Minibatch]:
        """Send every response to the rank that trains on it; see `rollout.to_minibatches`."""
        return to_minibatches(
            rollout, in_update, self.hf_config, self.world, num_minibatches=num_minibatches, max_tokens=max_tokens,
            seed=seed_of(self.args.seed, step, "minibatches"), share_prompt=self.args.policy.share_prompt,
        )

    def optimizer_step(self, name: str, model: PackedModel, *rest: Any) -> None:
        """As Training's. Before, what the engine sampled is compared with what the policy says of it."""
        self.engine.check_sampled(model, self.meter)
        super().optimizer_step(name, model, *rest)

    def finish(self, step: int, rollout: Rollout, minibatches: list[Minibatch], rewards: Tensor,
               metrics: dict[str, float], num_epochs: int, sampled: Rollout | None = None) -> None:
        """End a step: validate when it is time to, log, save. `rewards` [S]: what the update was made from; `metrics`:
        the script's own; `num_epochs`: passes of the policy's update over `minibatches`; `sampled`: all that was
        sampled for the step, if that is more than `rollout`."""
        args = self.args
        results: dict[str, float] | None = {}
        if self.is_validation_due(step):
            with self.timer("testing"):
                results = self._validate(step + 1)
        write_step(args.log, self.tracker.run_dir, step + 1, self.tokenizer, rollout, minibatches, rewards)
        metrics = rollout_metrics(
            sampled or rollout, self.num_sampled_tokens, self.timer.seconds["gen"], args.data.max_prompt_length,
            args.rollout.max_response_length,
        ) | metrics
        self.num_sampled_tokens = 0.0
        self.end_step(step, minibatches, rollout.lengths, metrics, results, num_epochs)

    def _validate(self, step: int) -> dict[str, float] | None:
        """Validation results after `step`; None after a stop signal. The engine sleeps before and after."""
        args = self.args
        rows = spread_rows(len(self.val_set), args.eval_prompts)
        num_responses = len(self.engine.local_prompts(len(rows))) * (1 + args.eval_n)
        with self.tracker.progress("validation", num_responses) as self.scoring.advance:
            self.engine.wake(self.policy)
            metrics = evaluate(
                self.engine, self.scoring, self.val_set, rows, args.rollout, args.eval_n, args.eval_temperature,
                (args.seed, "val"), stop=lambda: bool(self.watchdog.signal),
                record=lambda samples: write_validation(args.log, self.tracker.run_dir, step, self.tokenizer, samples),
            )
            self.engine.sleep()
        return metrics

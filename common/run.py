"""All that surrounds a loop that samples from its policy: what training.py has, and rewards, engine and rollouts.

`Run` is a helper, not a framework. It has no hooks, is never subclassed, never calls back into the script, and knows
nothing of what is optimised: the loop, its phases and every formula are in the script.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from common.curriculum.rates import from_text, pool_metrics, pool_weights, to_text, update_rates
from common.dataset.store import load_prompts
from common.dataset.videos import check_engine
from common.engine.base import Engine, EngineSetup
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.evaluation.sampled import ResponseValidation
from common.flags.correction import CorrectionConfig
from common.flags.rollout import RolloutConfig
from common.flags.rules import check_pool
from common.flags.run import RunArgs
from common.memory.offload import Offload
from common.memory.plan import keys_per_token
from common.metrics import Meter
from common.model.policy import PackedModel
from common.model.reward_model import RewardModel
from common.parallel.exchange import check_sizes
from common.parallel.ranks import on_main, print_on_main, seed_of
from common.rollout import Layout, Minibatch, Rollout, to_minibatches
from common.rollouts.episodes import start_episodes
from common.rollouts.in_flight import continue_rollout
from common.rollouts.record import Recorder, write_step
from common.rollouts.scoring import PendingRollout, RemoteRollout, RolloutRequest, RolloutSource, Scoring, start_rollout
from common.tracking.phase import Phase
from common.tracking.reward_parts import shares_of_parts
from common.tracking.step import rollout_metrics
from common.training import BEGIN, START, Training


class Run(Training):
    """One run of a script that samples, from `with Run(args, ...) as run:` to the end of that block."""

    scoring: Annotated[Scoring, BEGIN]
    recorder: Annotated[Recorder, BEGIN]
    engine: Annotated[Engine, START]
    success_rates: Annotated[Tensor, BEGIN]  # [N] of each row the mean of its recent scores; NaN: it has none yet

    def __init__(self, args: RunArgs, prompts_per_step: int, correction: CorrectionConfig):
        """`correction`: from `resolve_correction`."""
        super().__init__(args)
        self.args: RunArgs = args
        self.prompts_per_step = prompts_per_step
        self.correction = correction
        self.num_sampled_tokens = 0.0  # in this step
        self.num_collected = (0, 0)  # responses of the rollout that was collected last: of all ranks, and of this one

    def __enter__(self) -> Self:
        """Also check the flags of the engine, read the prompts, start the reward workers."""
        super().__enter__()
        args = self.args
        self.max_sequence_length = check_rollout(args.rollout, self.hf_config, self.world, args.data.max_prompt_length,
                                                 self.correction.covers_cut_sampling, args.policy.router_replay)
        all_columns = bool(args.rollout.episode)
        self.load_data(lambda files: load_prompts(files, self.tokenizer, args.data, all_columns), self.prompts_per_step)
        check_pool(args.data)
        self.success_rates = torch.full((len(self.train_set),), torch.nan)
        check_engine(args.rollout.engine, self.train_set, self.val_set)
        sources = {*self.train_set.loaded.data_sources, *(self.val_set.loaded.data_sources if self.val_set else ())}
        self.scoring = Scoring(
            self.tokenizer, args.reward, args.reward_model, sources, args.rollout.episode, self.world.samples
        )
        self.closing.callback(self.scoring.close)
        on_main(self.world, partial(self.scoring.try_function, filter(None, [self.train_set, self.val_set])))
        self.recorder = Recorder(args.log, Path(args.run_dir), self.tokenizer)
        self.scoring.episodes = start_episodes(
            args.rollout, self.tokenizer, args.data, stop_tokens(args.model, self.tokenizer), self.max_sequence_length,
            self.world,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """As Training's. An error that comes from a rank's own responses says so."""
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            frame = extract_tb(trace)[-1]
            check_sizes(error, *self.num_collected, f"{frame.filename}:{frame.lineno}")

    def start_engine(self, max_tokens: int = 0, frozen: str | tuple = "", critic: str = "") -> tuple[Engine, int]:
        """Start the engine, before any model is loaded, because it reads how much memory is free. Returns it and the
        token budget of a micro-batch; the arguments are those of `plan_memory`. Ranks that only sample have no budget.
        """
        args, beside_engine_gb = self.args, 0.0
        if self.world.trains:
            self.plan_memory(max_tokens, frozen, critic)
            beside_engine_gb = sum(self.plan.beside_engine().values())
        print_on_main(self.world, f"engine {args.rollout.engine}")
        self.watchdog.phase("setup of the engine")
        self.engine = make_engine(EngineSetup(
            args.model, self.hf_config, args.rollout, args.policy, self.world,
            [prompt.tokens for prompt in self.train_set[:4]], stop_tokens(args.model, self.tokenizer),
            self.max_sequence_length, args.seed, beside_engine_gb, self._responses_of_an_engine(),
        ))
        self.engine_bytes = self.engine.pool_bytes
        self.closing.callback(self.engine.close)
        if args.reward_model.path and self.world.samples:
            self.scoring.model = RewardModel(args.reward_model, args.policy, self.world)
        return self.engine, self.max_tokens if self.world.trains else 0

    def _responses_of_an_engine(self) -> int:
        """In a step, with those in flight. 0 where a script has no --samples-per-prompt."""
        num_engines = (self.world.num_samplers or self.world.size) // self.args.rollout.tp
        num_responses = self.prompts_per_step * getattr(self.args, "samples_per_prompt", 0)
        return math.ceil(num_responses * self.args.rollout.in_flight / num_engines)

    def _before_loading(self, name: str) -> None:
        super()._before_loading(name)
        if "engine" not in vars(self):
            raise RuntimeError("call run.start_engine(...) before the models are loaded: it measures the memory that "
                               "is free for it")

    def _resume(self) -> None:
        """Continue from a checkpoint. A run that starts is validated."""
        # a stop signal may save while the engine is awake, and what is offloaded has no room beside it
        for optimizer in self.optimizers.values():
            optimizer.register_state_dict_pre_hook(
                lambda *_: self.engine.awake and self.engine.sleep())  # type: ignore[arg-type]
        self.engine.offload = Offload(self.args.offload, list(self.models.values()), list(self.optimizers.values()))
        super()._resume()
        if "success_rates" in self.script_state:
            self.success_rates.copy_(torch.from_numpy(from_text(self.script_state["success_rates"])))
        if "weights" in self.script_state:
            self.sampler.weights = from_text(self.script_state["weights"])
        if self.val_set is not None and not self.is_validated:
            self.watchdog.phase("validation")
            self.log_validation(self._validate(self.first_step))

    def next_rows(self, count: int) -> list[int]:
        """As Training's. With --data.pool learning, or the `weights` that a script gave the sampler, some rows of an
        epoch are passed over."""
        if self.args.data.pool == "learning":
            self.sampler.weights = pool_weights(self.success_rates, self.args.data)
        return super().next_rows(count)

    def sample(
        self, rows: Sequence[int], num_samples: int, sampling: RolloutConfig, *seed: int | str
    ) -> PendingRollout | RemoteRollout:
        """Sample responses to these rows; scoring of each one starts as it ends. With --rollout.in-flight, the same
        number of responses; those begun in earlier steps come first. `seed`: the step's number, and perhaps more; a
        second call with the same seed and flags would sample the same responses, and raises ValueError. Rows that
        differ between ranks are refused by `collect`."""
        self.engine.must_be(True, "asleep: call run.metrics |= engine.wake(policy) before run.sample")
        num_responses = len(self.engine.local_prompts(len(rows))) * num_samples
        source = RolloutSource(self.engine, self.scoring, self.train_set, self.checkpoints.stopping)
        request = RolloutRequest(rows, num_samples, sampling, (self.args.seed, *seed))
        self.scoring.check_new(request)
        with self.timer("gen"), self.tracker.progress("rollout", num_responses) as self.scoring.advance:
            # a checkpoint may hold what is in flight, which is dropped if --rollout.in-flight is 1 now
            if sampling.in_flight > 1 or self.script_state.get("in_flight"):
                self._check_in_flight()
                pending = continue_rollout(source, request, self.script_state, self.sampler, self.meter)
            else:
                pending = start_rollout(source, request)
                pending.rows = rows
            # a safe point, and the slowest engine ends the phase: its seconds are those of all tokens
            self.checkpoints.check()
        pending.step = self.step
        return pending

    def _check_in_flight(self) -> None:
        """Raise ValueError if responses that one policy began would be continued by another."""
        sampler = next((name for name, model in self.models.items() if model is self.engine.policy), "policy")
        began = self.script_state.setdefault("in_flight_policy", sampler)
        if began != sampler:
            raise ValueError(f"--rollout.in-flight: responses that the policy {began} began would be continued by the "
                             f"policy {sampler}: set --rollout.in-flight 1 where several policies sample")

    def collect(self, pending: PendingRollout | RemoteRollout, meter: Meter | None = None) -> Rollout:
        """Wait for the scores. `meter` takes the scorers' numbers; default: that of the step. An engine that is awake
        sleeps while a reward model scores, whose passes have no memory beside it."""
        must_sleep = self.engine.awake and self.scoring.model is not None
        if must_sleep:
            self.metrics |= self.engine.sleep()
        with self.timer("reward"):
            rollout = pending.collect(self.meter if meter is None else meter)
        if must_sleep:
            self.engine.wake(self.engine.policy)
        if pending.rows and not torch.equal(rollout.row, torch.tensor(pending.rows)[rollout.group]):
            raise ValueError("run.sample: the rows differ between ranks: take them from run.next_rows, or draw them "
                             "with the same seed on all ranks, np.random.default_rng(seed_of(args.seed, step, NAME))")
        self.num_sampled_tokens += float(rollout.response_lengths.sum())
        update_rates(self.success_rates, rollout)
        self.num_collected = len(rollout), len(rollout.samples)
        return rollout

    def to_minibatches(self, rollout: Rollout, in_loss: Tensor, num_minibatches: int, max_tokens: int, step: int,
                       skip_zero_advantage: bool = False) -> list[Minibatch]:
        """Send every response of `in_loss` to the rank that trains on it. `skip_zero_advantage`: those whose advantage
        is 0 do not run through the model and only count in the denominators, unless --run-zero-advantage; see
        `rollout.to_minibatches`."""
        seed = seed_of(self.args.seed, step, "minibatches")
        most_keys = math.inf
        if self.args.rollout.episode:
            most_keys = keys_per_token(self.args.rollout, self.max_sequence_length)
        if self.args.log.signal_rewards and self.tracker.terms.is_due(step):
            self.tracker.terms.factors = shares_of_parts(rollout, self.args.log.signal_rewards)
        layout = Layout(self.hf_config, self.world, num_minibatches, max_tokens, seed, self.policy.share_prompt,
                        most_keys)
        runs_all = self.args.run_zero_advantage or self.args.policy.router_aux_coef > 0     # a loss on every token
        skip = skip_zero_advantage and not runs_all
        minibatches = to_minibatches(rollout, in_loss, layout, step, skip)
        self.train_set.take_images(rollout, minibatches)
        return minibatches

    def phase(self, name: str, minibatches: list[Minibatch]) -> AbstractContextManager[Phase]:  # type: ignore[override]
        """As Training's. The engine must sleep: it holds the memory that the models need."""
        self.engine.must_be(False, f"awake in the phase {name}: call run.metrics |= engine.sleep() after run.sample")
        return super().phase(name, minibatches)

    def before_update(self, model: PackedModel) -> None:
        """Compare what the engine sampled with what the policy says of it."""
        self.engine.check_sampled(model, self.meter)

    def finish(self, step: int, rollout: Rollout, minibatches: list[Minibatch], rewards: Tensor,
               metrics: dict[str, float], sampled: Rollout | None = None) -> None:
        """End a step: validate when it is time to, log, save. `rewards` [S]: what the update was made from; `metrics`:
        the script's own; `sampled`: all that was sampled for the step, if that is more than `rollout`."""
        self.check_unfinished(step)
        results: dict[str, float] | None = {}
        if self.is_validation_due(step):
            with self.timer("testing"):
                results = self._validate(step + 1)
        write_step(self.recorder, step + 1, rollout, minibatches, rewards)
        limits = self.args.data.max_prompt_length, self.args.rollout.max_response_length
        gen_s = self.timer.seconds["gen"]
        metrics = rollout_metrics(sampled or rollout, self.num_sampled_tokens, gen_s, *limits) | metrics
        self.num_sampled_tokens = 0.0
        self._keep_curriculum()
        self.end_step(step, minibatches, rollout.sequence_lengths, metrics, results)

    def _keep_curriculum(self) -> None:
        """Write into the checkpoint how well each row is solved, and into the metrics what follows from it."""
        self.script_state["success_rates"] = to_text(self.success_rates)
        self.script_state.pop("weights", None)
        if self.sampler.weights is None:
            return
        if self.args.data.pool == "all":                # the script's own
            self.script_state["weights"] = to_text(self.sampler.weights)
        self.metrics |= pool_metrics(self.success_rates, self.args.data, self.sampler.num_passed_over)
        self.sampler.num_passed_over = 0

    def _validate(self, step: int) -> dict[str, float] | None:
        """Validation results after `step`; None after a stop signal. The engine sleeps before and after."""
        validation = ResponseValidation(self, self.engine, self.scoring, self.recorder)
        return validation(self.args, self.policy, step)

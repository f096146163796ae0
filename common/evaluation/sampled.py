"""Validation with responses of the policy, on the task's own reward; --eval-by sampling: also in sft.py and dpo.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.dataset.store import PromptSet, load_prompts
from common.dataset.videos import check_engine
from common.engine.base import Engine, EngineSetup, validation_sampling
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.flags.data import ConversationConfig, DataConfig
from common.flags.model import RewardModelConfig
from common.flags.run import SampledArgs, SupervisedArgs
from common.model.flops import context_length
from common.model.policy import Policy
from common.parallel.ranks import on_main, print_on_main
from common.rollouts.episodes import start_episodes
from common.rollouts.record import Recorder, write_validation
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring
from common.rollouts.validation import evaluate, spread_rows
from common.training import Training


def prompt_config(args: SupervisedArgs, data: ConversationConfig, hf_config: Any) -> DataConfig:
    """How the validation prompts are read: in verl's columns, with the chat template of the training rows. As long as
    those at most, and so that a response fits into the model's context behind them."""
    room = context_length(hf_config.get_text_config()) - args.rollout.max_response_length
    if room < 1:
        raise ValueError(f"--rollout.max-response-length {args.rollout.max_response_length} leaves no token of the "
                         f"model's context of {context_length(hf_config.get_text_config())} for a prompt")
    return DataConfig(
        on_bad_row=data.on_bad_row,
        template=data.template,
        chat_template_file=data.chat_template_file,
        chat_template_kwargs=data.chat_template_kwargs,
        max_prompt_length=int(min(data.max_length, room)),
    )


def load_val_prompts(args: SupervisedArgs, data: ConversationConfig,
                     run: Training) -> Callable[[Sequence[str]], PromptSet] | None:
    """What reads the files of --val-data where it has prompts; None: it has rows as --train-data has them."""
    if args.eval_by == "loss":
        return None
    config = prompt_config(args, data, run.hf_config)
    return lambda files: load_prompts(files, run.tokenizer, config, bool(args.rollout.episode))


@dataclass
class ResponseValidation:
    """Samples and scores responses to the prompts of --val-data."""

    run: Training
    engine: Engine
    scoring: Scoring
    recorder: Recorder

    def __call__(self, args: SampledArgs, policy: Policy, step: int) -> dict[str, float] | None:
        """Results after `step`; None after a stop signal. The engine sleeps before and after."""
        run = self.run
        rows = spread_rows(len(run.val_set), args.eval_prompts)
        num_responses = len(self.engine.local_prompts(len(rows))) * (1 + args.eval_n)
        source = RolloutSource(self.engine, self.scoring, run.val_set, lambda: bool(run.watchdog.signal))
        sampling = validation_sampling(args.rollout, args.eval_temperature)
        request = RolloutRequest(rows, args.eval_n, sampling, (args.seed, "val"))
        with run.tracker.progress("validation", num_responses) as self.scoring.advance:
            self.engine.wake(policy)
            return evaluate(source, request, partial(write_validation, self.recorder, step))


class SampledValidation:
    """An engine that sleeps but for the validations, and the scorers of its responses."""

    def __init__(self, args: SupervisedArgs, data: ConversationConfig, run: Training):
        """Starts both: after `run.plan_memory`, and before a model is loaded, because the engine reads how much memory
        is free."""
        self.args = args
        self.run = run
        prompts = run.val_set
        config = prompt_config(args, data, run.hf_config)
        longest = check_rollout(args.rollout, run.hf_config, run.world, config.max_prompt_length, has_correction=True)
        check_engine(args.rollout.engine, prompts)
        self.scoring = Scoring(
            run.tokenizer, args.reward, RewardModelConfig(), prompts.loaded.data_sources, args.rollout.episode
        )
        run.closing.callback(self.scoring.close)
        on_main(run.world, partial(self.scoring.try_function, [prompts]))
        stops = stop_tokens(args.model, run.tokenizer)
        self.scoring.episodes = start_episodes(args.rollout, run.tokenizer, config, stops, longest, run.world)
        print_on_main(run.world, f"engine {args.rollout.engine}")
        run.watchdog.phase("setup of the engine")
        self.engine = make_engine(EngineSetup(
            args.model, run.hf_config, args.rollout, args.policy, run.world, [prompt.tokens for prompt in prompts[:4]],
            stops, longest, args.seed, sum(run.plan.beside_engine().values()),
        ))
        run.engine_bytes = self.engine.pool_bytes
        run.closing.callback(self.engine.close)
        self.recorder = Recorder(args.log, Path(args.run_dir), run.tokenizer)

    def __call__(self, policy: Policy, step: int) -> dict[str, float] | None:
        """Validation results after `step`; None after a stop signal."""
        validation = ResponseValidation(self.run, self.engine, self.scoring, self.recorder)
        with self.run.timer("testing"):
            return validation(self.args, policy, step)

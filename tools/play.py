"""Play episodes without training, and print each conversation as the model sees it, token for token.

    python -m tools.play envs/guess_number.py --model models/SmolLM2-135M-Instruct --data data/guess_number --rows 3
    python -m tools.play envs/mine.py --model Qwen/Qwen3-0.6B --prompt "What is 12 * 7?" --rollout.engine hf

The model's tokens, on which a script would train, are green and have `|` before each line; those of the prompt, of
users and of tools are grey. The flags are those of training: --rollout.max-turns, --rollout.tool-parser, ...
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.flags.data import DataConfig
from common.flags.model import ModelConfig
from common.flags.rollout import RolloutConfig
from rewards.runtime.pool import RewardConfig
from tools.command_line import check_command, run_script


@dataclass
class Args:
    episode: Annotated[str, tyro.conf.Positional]
    """The environment, FILE.py or FILE.py:NAME, as --rollout.episode."""
    model: str
    """Folder or hub name of the model."""
    files: Annotated[tuple[str, ...], tyro.conf.arg(name="data")] = ()
    """Files with rows, as --train-data."""
    prompt: tuple[str, ...] = ()
    """Instead of --data: texts, each of which is the user's first message of one row."""
    rows: int = 0
    """Number of rows to play, the first ones; 0: three of --data, or each --prompt."""
    samples: int = 1
    """Episodes of each row."""
    seed: int = 0
    """Random seed of the sampling."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_num_seqs=16))
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(num_workers=1, max_error_frac=1.0))


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    if args.rows < 0 or args.samples < 1:
        raise ValueError(f"--rows {args.rows} must be at least 0, --samples {args.samples} at least 1")
    if args.rollout.episode:
        raise ValueError(f"--rollout.episode {args.rollout.episode}: the environment is the first argument here")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

from transformers import PreTrainedTokenizerBase

from common.dataset.store import PromptSet, load_prompts
from common.engine.base import EngineSetup
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.flags.effect import check_effect
from common.flags.model import RewardModelConfig
from common.metrics import Meter
from common.model.loading import load_policy, read_config, read_tokenizer
from common.parallel import ranks
from common.rollout import Sample
from common.rollouts.episodes import start_episodes
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from envs.runtime.response import Response
from tools.terminal import visible

MAX_SHOWN = 6000  # characters of one stretch of tokens
GREEN, GREY, BOLD, PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[1m", "\x1b[0m"


def read_rows(args: Args, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The rows of --data, or one for each --prompt. Raises ValueError if there are neither, or both."""
    if bool(args.files) == bool(args.prompt):
        raise ValueError(f"--data is {' '.join(args.files) or 'not given'} and --prompt is "
                         f"{'given' if args.prompt else 'not given'}: name files with rows, or write texts")
    if args.files:
        return load_prompts(args.files, tokenizer, args.data, all_columns=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.jsonl")
        rows = [{"prompt": text, "data_source": "play", "reward_model": {"ground_truth": ""}} for text in args.prompt]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts([str(file)], tokenizer, args.data, all_columns=True)


def play(args: Args) -> None:
    """Play the episodes and print them."""
    check(args)
    config = replace(args.rollout, episode=args.episode)
    hf_config, tokenizer = read_config(args.model, args.policy), read_tokenizer(args.model, args.policy)
    data = read_rows(args, tokenizer)
    rows = range(min(args.rows or max(3, len(args.prompt)), len(data)))
    stops = stop_tokens(args.model, tokenizer)
    world = ranks.init()
    for line in check_effect(args, world.device.type):
        print(f"flags  {line}")
    longest_prompt = max(len(data[row].tokens) for row in rows)
    longest = check_rollout(config, hf_config, world, longest_prompt, has_correction=True)
    scoring = Scoring(tokenizer, args.reward, RewardModelConfig(), data.loaded.data_sources, args.episode)
    try:
        scoring.episodes = start_episodes(config, tokenizer, args.data, stops, longest, world)
        probe = [prompt.tokens for prompt in data[:1]]
        engine = make_engine(EngineSetup(args.model, hf_config, config, args.policy, world, probe, stops, longest,
                                         args.seed))
        engine.wake(load_policy(args.model, args.policy, world))
        start = time.perf_counter()
        request = RolloutRequest(rows, args.samples, config, (args.seed,))
        pending = start_rollout(RolloutSource(engine, scoring, data), request)
        samples = pending.collect(Meter()).samples
        seconds = time.perf_counter() - start
        engine.close()
    finally:
        scoring.close()
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for sample in samples:
        print("\n".join([*described(sample, tokenizer, has_colour), ""]))
    print(f"{len(samples)} episodes in {seconds:.1f} s, the start left out")
    ranks.shutdown()


def described(sample: Sample, tokenizer: PreTrainedTokenizerBase, has_colour: bool) -> list[str]:
    """The lines of one episode. Nothing in them is a control character but our own colours."""
    response = sample.response
    lines = [painted(f"row {sample.row}, episode {sample.index}", BOLD, has_colour)]
    for number, sequence in enumerate(response.parts):
        if response.earlier:
            role = f", {visible(sequence.role)}" if sequence.role else ""
            lines.append(painted(f"sequence {number}: conversation {sequence.conversation}{role}", BOLD, has_colour))
        lines += sequence_lines(sequence, sample.prompt.tokens, tokenizer, has_colour)
    score = "no score, it failed" if math.isnan(sample.score) else f"score {sample.score:g}"
    sampled = sum(sequence.num_sampled for sequence in response.parts)
    lines += [
        f"{score}; it ended with {response.end_reason} after {response.num_turns} turns, {sampled} tokens to train",
        f"{response.tools['tool_calls']:g} calls of tools, {response.tools['tool_errors']:g} errors, "
        f"{response.tools['tool_s']:.2f} s in the episode's own code",
        *(f"{visible(name)}: {shown(value)}" for name, value in sample.extras.items()),
    ]
    return lines


def shown(value: Any) -> str:
    text = ", ".join(f"{number:g}" for number in value) if isinstance(value, list) else str(value)
    return visible(text[:MAX_SHOWN])


def sequence_lines(sequence: Response, prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase,
                   has_colour: bool) -> list[str]:
    """A sequence: the prompt, then each stretch of tokens that are trained, or are not."""
    prompt = prompt if sequence.prompt is None else sequence.prompt
    lines = stretch_lines("prompt", prompt, tokenizer, False, has_colour)
    mask = sequence.mask or [True] * len(sequence.tokens)
    turn = 0
    for is_trained, group in groupby(zip(mask, sequence.tokens, strict=True), key=lambda pair: pair[0]):
        turn += is_trained
        name = f"turn {turn}" if is_trained else "told"
        lines += stretch_lines(name, [token for _, token in group], tokenizer, is_trained, has_colour)
    return lines


def stretch_lines(name: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, is_trained: bool,
                  has_colour: bool) -> list[str]:
    text = tokenizer.decode(tokens)
    if len(text) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        text = f"{text[:half]}\n[{len(text) - MAX_SHOWN} characters more]\n{text[-half:]}"
    colour, mark = (GREEN, "|") if is_trained else (GREY, " ")
    return [f"  {name}, {len(tokens)} tokens, {'trained' if is_trained else 'not trained'}",
            *(painted(f"  {mark} {visible(line)}", colour, has_colour) for line in text.split("\n"))]


def painted(text: str, colour: str, has_colour: bool) -> str:
    return f"{colour}{text}{PLAIN}" if has_colour else text


if __name__ == "__main__":
    run_script(play, Args, __doc__)

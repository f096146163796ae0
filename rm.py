"""A reward model from preference pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, section 3.5).

    d = r(chosen) - r(rejected) - margin                     r: a scalar head on the conversation's last hidden state
    loss = mean over pairs of  -(1 - eps) log sigmoid(d) - eps log sigmoid(-d) + c (r(chosen) + r(rejected))^2

The margin is the row's, 0 without one (Touvron et al. 2023, arXiv 2307.09288, section 3.2.2). c holds the rewards near
0, which the difference leaves open (Eisenstein et al. 2023, arXiv 2312.09244, section 2). Rows are those of dpo.py. As
there, two answers need not share a micro-batch: first all are scored, then the derivative of the loss by each reward is
a known number, and the update's loss is the sum of these numbers times the rewards. RUN_DIR/model is a sequence
classifier for --reward-model.path and ppo.py --critic-model.

    torchrun --standalone --nproc-per-node 8 rm.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/pairs/train.parquet --val-data data/pairs/test.parquet --run-dir runs/rm
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.flags import TrainArgs, rules
from common.flags.data import ConversationConfig
from common.flags.model import OptimConfig
from tools.command_line import check_command, run_script


@dataclass
class PairConfig(ConversationConfig):
    prompt_column: str = "prompt"
    """Column with the prompt: a list of {role, content}, or a string. Absent: chosen and rejected begin with it."""
    chosen_column: str = "chosen"
    """Column with the better answer: a string, or messages (with or without those of the prompt)."""
    rejected_column: str = "rejected"
    """Column with the worse answer."""
    margin_column: str = "margin"
    """Column (may be absent) with a number by how much the better answer is better, in units of the reward."""


@dataclass
class Args(TrainArgs):
    run_dir: str = "runs/rm"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    rows_per_step: int = 64
    """Rows of data of one optimizer step, over all ranks."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    label_smoothing: float = 0.0
    """eps, the share of pairs whose label is taken to be wrong, in [0, 0.5)."""
    centre_coef: float = 0.01
    """c, factor of the squared sum of a pair's rewards. 0: where rewards lie is left open."""

    data: PairConfig = field(default_factory=PairConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    if not 0 <= args.label_smoothing < 0.5 or not 0 <= args.centre_coef < math.inf:
        raise ValueError(f"--label-smoothing {args.label_smoothing} must be in [0, 0.5), --centre-coef "
                         f"{args.centre_coef} at least 0")
    own = {name: vars(args.data)[name] for name in ("template", "chat_template_file", "chat_template_kwargs")}
    if own != {name: vars(PairConfig())[name] for name in own} or args.data.on_long_row != "filter":
        raise ValueError("what reads the model renders whole conversations with its own chat template: put the "
                         "template into the folder of --model, and leave out --data.template, "
                         "--data.chat-template-file, --data.chat-template-kwargs and --data.on-long-row")
    rules.check_supervised(args)


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors
from torch.nn.functional import logsigmoid

from common.batch import Batch
from common.dataset.conversations import (
    Piece,
    RowParser,
    check_length,
    load_conversations,
)
from common.dataset.pairs import parse_pair
from common.engine.make import stop_tokens
from common.losses import derivative
from common.model.scorer import Scorer, load_scorer
from common.parallel.ranks import all_max
from common.rollout import Minibatch, sum_per_response
from common.rollouts.validation import spread_rows
from common.tracking.preferences import preference_metrics
from common.training import Training
from envs.runtime.template import rendered
from tools.evaluation import calibration


def parse(row: dict[str, Any], tokenizer: Any, template: dict[str, Any] | None) -> list[list[Piece]]:
    """The chosen and the rejected conversation of a row, each as a whole, and a token after it: `Critic` gives a value
    to a token from the tokens before it, and this one is masked. Raises ValueError for a bad row."""
    margin = row.get("margin")
    if margin is not None and (not isinstance(margin, int | float) or not math.isfinite(margin)):
        raise ValueError(f"margin is {margin!r:.80}; it must be a finite number (--data.margin-column)")
    texts = [rendered(tokenizer, messages, **template) for messages in parse_pair(row)]
    if texts[0] == texts[1]:
        raise ValueError("chosen and rejected are the same")
    return [[(text, False), (tokenizer.eos_token, True)] for text in texts]


def pair_loss(rewards: Tensor, margin: Tensor, args: Args) -> Tensor:
    """Rewards of answers that are chosen, rejected, chosen, ... [2 P], margins [P] -> the loss of each pair [P]."""
    difference = rewards[0::2] - rewards[1::2] - margin
    loss = -(1 - args.label_smoothing) * logsigmoid(difference) - args.label_smoothing * logsigmoid(-difference)
    return loss + args.centre_coef * (rewards[0::2] + rewards[1::2]).square()


def score(run: Training, model: Scorer, minibatch: Minibatch, num_sequences: int, phase: str) -> Tensor:
    """The reward of every sequence, float64 [S], on every rank."""
    with run.phase(phase, [minibatch]) as microbatches:
        for microbatch in microbatches:
            microbatch.value = model.score(microbatch)                                          # [T]
    batch = Batch.cat(minibatch.microbatches).to("cpu")
    return sum_per_response(batch, batch.value, num_sequences)


def margins_of(data: Any, rows: list[int]) -> Tensor:
    """The margins of these rows, float64 [P], 0 where a row has none."""
    return torch.tensor([data.margin[2 * row].as_py() or 0.0 for row in rows], dtype=torch.float64)


def validate(args: Args, run: Training, model: Scorer) -> dict[str, float] | None:
    """Loss, accuracy, rewards and calibration on the validation pairs. None after a stop signal."""
    found, rows = [], spread_rows(len(run.val_set), args.eval_prompts)
    for start in range(0, len(rows), args.rows_per_step):
        if all_max([run.watchdog.signal]).item():
            return None
        some = rows[start : start + args.rows_per_step]
        minibatch = run.val_set.minibatch(some, run.hf_config, run.world, run.max_tokens)
        found.append(score(run, model, minibatch, 2 * len(some), "testing"))
    rewards = torch.cat(found)                                                                  # [2 P]
    metrics = {"val/loss": pair_loss(rewards, margins_of(run.val_set, rows), args).mean().item()}
    metrics |= {f"val-core/{name}": value for name, value in preference_metrics(rewards, 1.0).items()}
    return metrics | {f"val-aux/{name}": value for name, value in calibration(rewards).items()}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    check_length(args)
    with Training(args) as run:
        columns = {
            "prompt": args.data.prompt_column, "chosen": args.data.chosen_column, "rejected": args.data.rejected_column,
            "margin": args.data.margin_column,
        }
        run.load_data(partial(
            load_conversations, tokenizer=run.tokenizer, stops=stop_tokens(args.model, run.tokenizer),
            config=args.data,
            # transformers reads the reward at the last token that is not padding
            parser=RowParser(columns, parse, per_row=2, padding=run.hf_config.get_text_config().pad_token_id),
        ), args.rows_per_step)
        run.max_sequence_length = int(run.train_set.sequence_lengths.max())
        max_tokens = run.plan_memory(args.max_tokens_per_gpu)
        model, optimizer = run.load_policy("policy", args.model, args.optim, load_scorer)
        assert isinstance(model, Scorer)
        num_epochs = run.total_steps * args.rows_per_step / len(run.train_set)
        run.describe(
            f"reward model, label smoothing {args.label_smoothing:g}, centring {args.centre_coef:g}, "
            f"{num_epochs:.2f} epochs", args.rows_per_step, 2, 1, 1,
        )
        run.resume()
        if run.val_set is not None and not run.is_validated:
            run.log_validation(validate(args, run, model))
        for step in run.steps():
            # 1 data: pairs, chosen and rejected one after the other
            rows = run.next_rows(args.rows_per_step)
            minibatch = run.train_set.minibatch(rows, run.hf_config, run.world, max_tokens)

            # 4 rewards: the current ones; coefficients: the loss's derivative by the reward of each answer
            rewards = score(run, model, minibatch, 2 * len(rows), "old_reward").requires_grad_()    # [2 P]
            loss = pair_loss(rewards, margins_of(run.train_set, rows), args).mean()
            coefficients = derivative(loss, rewards).to(run.world.device)                           # [2 P]

            # 5 update
            with run.phase("update_actor", [minibatch]) as update:
                for microbatch in minibatch:                                                    # as many on every rank
                    reward = model(microbatch)                                                  # [T]
                    weighted = coefficients[microbatch.index][microbatch.sequence_ids] * reward     # [T]
                    (run.world.size * weighted.sum()).backward()                                # FSDP averages: undo it
                    update.done(microbatch, reward)
                update.optimizer_step(model, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = {"train/loss": loss.item()} | preference_metrics(rewards, 1.0)
            results = validate(args, run, model) if run.is_validation_due(step) else {}
            lengths = run.train_set.sequence_lengths[run.train_set.sequences(rows)]
            run.end_step(step, [minibatch], lengths, metrics, results)


if __name__ == "__main__":
    run_script(main, Args, __doc__)

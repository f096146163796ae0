"""DPO: preference optimisation on pairs of answers, without rewards (Rafailov et al. 2023, arXiv 2305.18290).

    r(y) = log p(y) - log p_ref(y), summed over the answer's tokens, its end token included
    dpo = mean over pairs of  -(1 - eps) log sigmoid(margin) - eps log sigmoid(-margin),   margin = beta (r_c - r_r)
    ipo = mean over pairs of  (r_c - r_r - 1 / (2 beta))^2                     (Azar et al. 2023, arXiv 2310.12036)

A row has a `prompt` and the answers `chosen` and `rejected`, each text or messages. Two answers need not share a
micro-batch: first all are scored, then the derivative of the loss by each log p(y) is a known number, and the update's
loss is the sum of these numbers times log p(y). The reference is scored once, before the first step.

    torchrun --standalone --nproc-per-node 8 dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/pairs/train.parquet --val-data data/pairs/test.parquet --run-dir runs/dpo
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from common.flags import SupervisedArgs, rules
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


@dataclass
class Args(SupervisedArgs):
    run_dir: str = "runs/dpo"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    rows_per_step: int = 64
    """Rows of data of one optimizer step, over all ranks."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    loss: Literal["dpo", "ipo"] = "dpo"
    """Loss of a pair: a function in this file."""
    beta: float = 0.1
    """How strongly the policy is held near the reference. dpo: factor of the margin; ipo: the aim of the margin, a sum
    over tokens (TRL: a mean), is half its inverse."""
    label_smoothing: float = 0.0
    """eps, the share of pairs whose label is taken to be wrong, in [0, 0.5). Only dpo."""

    data: PairConfig = field(default_factory=PairConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-7))


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    if args.beta <= 0:
        raise ValueError(f"--beta {args.beta} must be above 0")
    if not 0 <= args.label_smoothing < 0.5 or (args.label_smoothing and args.loss != "dpo"):
        raise ValueError(f"--label-smoothing {args.label_smoothing} must be in [0, 0.5), and 0 for --loss {args.loss}")
    rules.check_supervised(args)


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors
from torch.nn.functional import logsigmoid

from common.batch import Batch
from common.curriculum.sampler import PromptSampler
from common.dataset.conversations import (
    ConversationSet,
    Piece,
    RowParser,
    check_length,
    load_conversations,
    pieces_of,
)
from common.dataset.pairs import parse_pair
from common.engine.make import stop_tokens
from common.evaluation.sampled import SampledValidation, load_val_prompts
from common.losses import derivative
from common.model.lora import Reference
from common.model.policy import Policy
from common.parallel.ranks import all_max
from common.rollout import Minibatch, sum_per_response
from common.rollouts.validation import spread_rows
from common.tracking.preferences import preference_metrics
from common.training import Training


def parse(row: dict[str, Any], tokenizer: Any, template: dict[str, Any] | None) -> list[list[Piece]]:
    """The pieces of the chosen and of the rejected conversation of a row. Raises ValueError for a bad row."""
    pair = parse_pair(row)
    if pair[0] == pair[1]:
        raise ValueError("chosen and rejected are the same")
    num_given = next(i for i in range(len(pair[0]) + 1) if pair[0][: i + 1] != pair[1][: i + 1])
    return [pieces_of(messages, num_given, tokenizer, template) for messages in pair]


def dpo_loss(log_ratio: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """log p / p_ref of answers that are chosen, rejected, chosen, ... [2 P] -> the loss of each pair [P]."""
    margin = beta * (log_ratio[0::2] - log_ratio[1::2])
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo_loss(log_ratio: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """The same for IPO, which has no label smoothing."""
    return (log_ratio[0::2] - log_ratio[1::2] - 1 / (2 * beta)).square()


LOSSES = {"dpo": dpo_loss, "ipo": ipo_loss}


def score(run: Training, model: Policy | Reference, minibatch: Minibatch, num_sequences: int, phase: str) -> Tensor:
    """log p of every sequence's answer, float64 [S], on every rank."""
    with run.phase(phase, [minibatch]) as microbatches:
        for microbatch in microbatches:
            microbatch.old_logp = model.score(microbatch, temperature=1.0)                      # [T]
    batch = Batch.cat(minibatch.microbatches).to("cpu")
    return sum_per_response(batch, batch.old_logp, num_sequences)


def score_rows(args: Args, run: Training, model: Policy | Reference, data: ConversationSet, rows: list[int],
               phase: str) -> Tensor | None:
    """log p of both answers of these rows, float64 [2 N] for the N rows of `data`, NaN for other rows. None: a signal
    asked to stop during a validation; elsewhere the run ends in this function."""
    logp = torch.full((2 * len(data),), torch.nan, dtype=torch.float64)
    for start in range(0, len(rows), args.rows_per_step):
        if phase == "testing" and all_max([run.watchdog.signal]).item():
            return None
        some = rows[start : start + args.rows_per_step]
        minibatch = data.minibatch(some, run.hf_config, run.world, run.max_tokens)
        logp[data.sequences(some)] = score(run, model, minibatch, 2 * len(some), phase)
    return logp


class PairValidation:
    """Loss, accuracy and rewards on the validation pairs, whose reference log-probs are those of the start."""

    def __init__(self, args: Args, run: Training, reference: Policy | Reference):
        self.args = args
        self.run = run
        self.rows = spread_rows(len(run.val_set), args.eval_prompts)
        self.ref_logp = score_rows(args, run, reference, run.val_set, self.rows, "ref")         # [2 N]

    def __call__(self, policy: Policy, step: int) -> dict[str, float] | None:
        """None after a stop signal. `step`: unused, the loss has no random numbers."""
        args = self.args
        data = self.run.val_set
        logp = score_rows(args, self.run, policy, data, self.rows, "testing")
        if logp is None:
            return None
        log_ratio = (logp - self.ref_logp)[data.sequences(self.rows)]                           # [2 P]
        loss = LOSSES[args.loss](log_ratio, args.beta, args.label_smoothing).mean()
        metrics = preference_metrics(log_ratio, args.beta)
        return {"val/loss": loss.item()} | {f"val-core/{name}": value for name, value in metrics.items()}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    check_length(args)
    with Training(args) as run:
        columns = {
            "prompt": args.data.prompt_column, "chosen": args.data.chosen_column, "rejected": args.data.rejected_column,
        }
        run.load_data(partial(
            load_conversations, tokenizer=run.tokenizer, stops=stop_tokens(args.model, run.tokenizer),
            config=args.data, parser=RowParser(columns, parse, per_row=2),
        ), args.rows_per_step, load_val_prompts(args, args.data, run))
        run.max_sequence_length = int(run.train_set.sequence_lengths.max())
        max_tokens = run.plan_memory(args.max_tokens_per_gpu)
        validation: SampledValidation | PairValidation | None = None
        if args.eval_by == "sampling":
            validation = SampledValidation(args, args.data, run)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        num_epochs = run.total_steps * args.rows_per_step / len(run.train_set)
        run.describe(
            f"{args.loss}, beta {args.beta:g}, label smoothing {args.label_smoothing:g}, {num_epochs:.2f} epochs",
            args.rows_per_step, 2, 1, 1,
        )
        # the reference is scored once: the rows of all steps, those before a resume too, and those of validation
        reference = run.load_frozen("reference", args.model)
        run.resume()
        num_before = run.sampler.epoch * len(run.train_set) + run.sampler.position  # perhaps with other --rows-per-step
        num_drawn = num_before + args.rows_per_step * (run.total_steps - run.first_step)
        drawn = PromptSampler(len(run.train_set), "", args.seed).take(num_drawn)
        ref_logp = score_rows(args, run, reference, run.train_set, sorted(set(drawn)), "ref")   # [2 N]
        if run.val_set is not None and validation is None:
            validation = PairValidation(args, run, reference)
        if validation is not None and not run.is_validated:
            run.log_validation(validation(policy, run.first_step))
        del reference
        run.models.pop("reference", None)                               # its log-probs are enough: free its memory
        for step in run.steps():
            # 1 data: pairs, chosen and rejected one after the other
            rows = run.next_rows(args.rows_per_step)
            minibatch = run.train_set.minibatch(rows, run.hf_config, run.world, max_tokens)

            # 4 log-probs: the current policy's; coefficients: the loss's derivative by the log-prob of each answer
            numbers = run.train_set.sequences(rows)                                             # [2 P]
            if ref_logp[numbers].isnan().any():
                raise RuntimeError("the reference, which is gone, was not scored on a row of this step: `drawn` must "
                                   "have the rows of all steps")
            logp = score(run, policy, minibatch, len(numbers), "old_log_prob").requires_grad_() # [2 P]
            log_ratio = logp - ref_logp[numbers]                                                # [2 P]
            pair_loss = LOSSES[args.loss](log_ratio, args.beta, args.label_smoothing).mean()
            coefficients = derivative(pair_loss, logp).to(run.world.device)                         # [2 P]

            # 5 update
            with run.phase("update_actor", [minibatch]) as update:
                for microbatch in minibatch:                                                    # as many on every rank
                    logp, entropy = policy(microbatch, temperature=1.0)                         # [T], [T]
                    loss = coefficients[microbatch.index][microbatch.sequence_ids] * logp       # [T] 0 on the prompt
                    (run.world.size * loss.sum()).backward()                                    # FSDP averages: undo it
                    update.done(microbatch, logp, entropy)
                update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = {"train/loss": pair_loss.item()} | preference_metrics(log_ratio, args.beta)
            results = validation(policy, step + 1) if run.is_validation_due(step) else {}
            run.end_step(step, [minibatch], run.train_set.sequence_lengths[numbers], metrics, results)


if __name__ == "__main__":
    run_script(main, Args, __doc__)

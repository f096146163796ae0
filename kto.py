"""KTO: preference optimisation on single answers with a thumb up or down (Ethayarajh et al. 2024, arXiv 2402.01306).

    r(x, y) = log p(y | x) - log p_ref(y | x), summed over the answer's tokens, its end token included
    z       = max(0, mean over the mini-batch's rows of  r(x_i, y_{i-1})),   without a gradient
    loss    = mean over rows of  w_up (1 - sigmoid(beta (r - z)))  where the label is true,
                                 w_down (1 - sigmoid(beta (z - r)))  where it is false

z estimates KL(p || p_ref): each prompt is scored with the answer of the row before it in the mini-batch, the first one
with the last row's (TRL's choice; the paper shifts the other way), cut at --data.max-length. The rows are those of the
mini-batch on all ranks in the order in which they were drawn, so that ranks and packing do not matter. A row has a
`prompt`, a `completion` (text or messages) and a `label`. As in dpo.py all answers are scored first; the derivative of
the loss by each log p(y) is then a known number, and the update's loss is the sum of these numbers times log p(y).

It is not a loss of dpo.py: its rows are not pairs, and the reference, which scores other pairs of a prompt and an
answer in each step, stays in memory.

    torchrun --standalone --nproc-per-node 8 kto.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/labelled/train.jsonl --val-data data/labelled/test.jsonl --run-dir runs/kto
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.flags import TrainArgs, rules
from common.flags.data import ConversationConfig
from common.flags.model import OptimConfig
from tools.command_line import check_command, run_script


@dataclass
class LabelConfig(ConversationConfig):
    prompt_column: str = "prompt"
    """Column with the prompt: a list of {role, content}, or a string (one user message)."""
    completion_column: str = "completion"
    """Column with the assistant's answer to the prompt: a string, or a list of {role, content}."""
    label_column: str = "label"
    """Column that is true for an answer that is desired, and false for one that is not."""


@dataclass
class Args(TrainArgs):
    run_dir: str = "runs/kto"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    rows_per_step: int = 64
    """Rows of data of one optimizer step, over all ranks."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    beta: float = 0.1
    """How strongly the policy is held near the reference."""
    desirable_weight: float = 1.0
    """w_up, factor of the loss of rows whose label is true. Times their number it should be 1 to 4/3 times as much as
    --undesirable-weight times the number of the others (section 4.2)."""
    undesirable_weight: float = 1.0
    """w_down, factor of the loss of rows whose label is false."""

    data: LabelConfig = field(default_factory=LabelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-7))


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    if args.beta <= 0:
        raise ValueError(f"--beta {args.beta} must be above 0")
    for flag, weight in (("desirable", args.desirable_weight), ("undesirable", args.undesirable_weight)):
        if weight <= 0:
            raise ValueError(f"--{flag}-weight {weight} must be above 0")
    if args.rows_per_step == 1:
        raise ValueError("--rows-per-step 1 must be at least 2: the KL is estimated with the answers of other rows")
    rules.check_supervised(args)


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common.batch import Batch
from common.dataset.conversations import (
    ConversationSet,
    Piece,
    RowParser,
    check_length,
    load_conversations,
    pieces_of,
)
from common.dataset.labelled import label_of, mismatched
from common.dataset.messages import check_turns, parse_messages
from common.engine.make import stop_tokens
from common.losses import derivative
from common.model.lora import Reference
from common.model.policy import Policy
from common.parallel.ranks import all_max
from common.rollout import Minibatch, sum_per_response
from common.rollouts.validation import spread_rows
from common.tracking.preferences import label_metrics
from common.training import Training


def parse(row: dict[str, Any], tokenizer: Any, template: dict[str, Any] | None) -> list[list[Piece]]:
    """The pieces of the one conversation of a row. Raises ValueError for a bad row."""
    label_of(row)
    prompt = parse_messages(row.get("prompt"), "prompt")
    answer = parse_messages(row.get("completion"), "completion", "assistant")
    check_turns(prompt, answer)
    return [pieces_of([*prompt, *answer], len(prompt), tokenizer, template)]


def kto_loss(log_ratio: Tensor, kl: Tensor, label: Tensor, args: Args) -> Tensor:
    """log p / p_ref of answers [S], the KL [] and the labels, bool [S] -> the loss of each row [S] (equation 8)."""
    margin = args.beta * (log_ratio - kl)
    return torch.where(
        label,
        args.desirable_weight * (1 - margin.sigmoid()),
        args.undesirable_weight * (1 - (-margin).sigmoid()),
    )


def score(run: Training, model: Policy | Reference, parts: list[Minibatch], num_rows: int,
          phase: str) -> list[Tensor] | None:
    """log p of every sequence's answer, float64 [num_rows] of each part, on every rank. None: a signal asked to stop
    during a validation; elsewhere the run ends in this function."""
    with run.phase(phase, parts) as microbatches:
        for microbatch in microbatches:
            if phase == "testing" and all_max([run.watchdog.signal]).item():
                return None
            microbatch.old_logp = model.score(microbatch, temperature=1.0)                      # [T]
    found = []
    for part in parts:
        batch = Batch.cat(part.microbatches).to("cpu")
        found.append(sum_per_response(batch, batch.old_logp, num_rows))
    return found


def parts_of(args: Args, run: Training, data: ConversationSet, rows: list[int]) -> list[Minibatch]:
    """These rows, and their prompts with the answers of other rows."""
    others = mismatched(data, rows, args.data.max_length)
    return [
        data.minibatch(rows, run.hf_config, run.world, run.max_tokens),
        others.minibatch(range(len(rows)), run.hf_config, run.world, run.max_tokens),
    ]


def kl_estimate(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """log p of prompts with the answers of other rows [S] -> z, [], without a gradient."""
    return (logp - ref_logp).mean().clamp(min=0)


def validate(args: Args, run: Training, policy: Policy, rows: list[int],
             ref_logp: list[Tensor]) -> dict[str, float] | None:
    """Loss and rewards on these rows of the validation data. None after a stop signal."""
    logp = score(run, policy, parts_of(args, run, run.val_set, rows), len(rows), "testing")
    if logp is None:
        return None
    log_ratio = logp[0] - ref_logp[0]                                                           # [S]
    kl = kl_estimate(logp[1], ref_logp[1])
    label = run.val_set.label[rows]
    loss = kto_loss(log_ratio, kl, label, args).mean()
    metrics = label_metrics(log_ratio, kl, label, args.beta)
    return {"val/loss": loss.item()} | {f"val-core/{name}": value for name, value in metrics.items()}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    check_length(args)
    with Training(args) as run:
        columns = {
            "prompt": args.data.prompt_column, "completion": args.data.completion_column,
            "label": args.data.label_column,
        }
        run.load_data(partial(
            load_conversations, tokenizer=run.tokenizer, stops=stop_tokens(args.model, run.tokenizer),
            config=args.data, parser=RowParser(columns, parse),
        ), args.rows_per_step)
        run.max_sequence_length = min(args.data.max_length, 2 * int(run.train_set.sequence_lengths.max()))
        run.plan_memory(args.max_tokens_per_gpu, args.model)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", args.model)
        num_epochs = run.total_steps * args.rows_per_step / len(run.train_set)
        run.describe(
            f"kto, beta {args.beta:g}, weights {args.desirable_weight:g} {args.undesirable_weight:g}, "
            f"{num_epochs:.2f} epochs",
            args.rows_per_step, 1, 1, 1,
        )
        run.resume()
        if run.val_set is not None:
            val_rows = spread_rows(len(run.val_set), args.eval_prompts)
            val_ref_logp = score(run, reference, parts_of(args, run, run.val_set, val_rows), len(val_rows), "ref")
            if not run.is_validated:
                run.log_validation(validate(args, run, policy, val_rows, val_ref_logp))
        for step in run.steps():
            # 1 data: rows, and their prompts with the answers of other rows
            rows = run.next_rows(args.rows_per_step)
            parts = parts_of(args, run, run.train_set, rows)
            minibatch = parts[0]

            # 4 log-probs: the reference's and the current policy's; coefficients: the loss's derivative by them
            ref_logp, ref_kl_logp = score(run, reference, parts, len(rows), "ref")              # [S], [S]
            logp, kl_logp = score(run, policy, parts, len(rows), "old_log_prob")                # [S], [S]
            kl = kl_estimate(kl_logp, ref_kl_logp)                                              # []
            label = run.train_set.label[rows]                                                   # [S]
            logp.requires_grad_()
            log_ratio = logp - ref_logp                                                         # [S]
            row_loss = kto_loss(log_ratio, kl, label, args).mean()
            coefficients = derivative(row_loss, logp).to(run.world.device)                      # [S]

            # 5 update
            with run.phase("update_actor", [minibatch]) as update:
                for microbatch in minibatch:                                                    # as many on every rank
                    logp, entropy = policy(microbatch, temperature=1.0)                         # [T], [T]
                    loss = coefficients[microbatch.index][microbatch.sequence_ids] * logp       # [T] 0 on the prompt
                    (run.world.size * loss.sum()).backward()                                    # FSDP averages: undo it
                    update.done(microbatch, logp, entropy)
                update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = {"train/loss": row_loss.item()} | label_metrics(log_ratio, kl, label, args.beta)
            results = validate(args, run, policy, val_rows, val_ref_logp) if run.is_validation_due(step) else {}
            run.end_step(step, [minibatch], run.train_set.sequence_lengths[rows], metrics, results)


if __name__ == "__main__":
    run_script(main, Args, __doc__)

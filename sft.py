"""SFT: supervised fine-tuning on conversations, packed without padding.

    loss = mean over the tokens y_t of a mini-batch that the assistant wrote, end tokens included, of  -log p(y_t)

A row has `messages`, and every turn of the assistant is trained on; or `prompt` and `response`, and the response is.

    torchrun --standalone --nproc-per-node 8 sft.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/word_problems/solved/train.parquet --val-data data/word_problems/solved/test.parquet
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.flags import SupervisedArgs, rules
from common.flags.data import ConversationConfig
from common.flags.model import OptimConfig
from tools.command_line import check_command, run_script


@dataclass
class SFTConfig(ConversationConfig):
    messages_column: str = "messages"
    """Column with a list of {role, content}. Where a row has none, prompt and response are read."""
    prompt_column: str = "prompt"
    """Column with the prompt: a list of {role, content}, or a string (one user message)."""
    response_column: str = "response"
    """Column with the assistant's answer to the prompt: a string, or a list of {role, content}."""


@dataclass
class Args(SupervisedArgs):
    run_dir: str = "runs/sft"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    rows_per_step: int = 64
    """Rows of data of one optimizer step, over all ranks."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    data: SFTConfig = field(default_factory=SFTConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


if __name__ == "__main__":
    check_command(Args, rules.check_supervised, __doc__)  # a mistyped command ends here, before the slow imports

from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.dataset.conversations import (
    Piece,
    RowParser,
    check_length,
    load_conversations,
    pieces_of,
)
from common.dataset.messages import check_turns, parse_messages
from common.engine.make import stop_tokens
from common.evaluation.sampled import SampledValidation, load_val_prompts
from common.metrics import Meter
from common.model.policy import Policy
from common.parallel.ranks import all_max
from common.rollouts.validation import spread_rows
from common.training import Training


def parse(row: dict[str, Any], tokenizer: Any, template: dict[str, Any] | None) -> list[list[Piece]]:
    """The pieces of the one conversation of a row. Raises ValueError for a bad row."""
    if row.get("tools"):
        raise ValueError("tools is not empty: no tool is shown to the chat template here; write them into a system "
                         "message, and leave the column out")
    if row.get("messages") is not None:
        messages = parse_messages(row["messages"], "messages")
        if any(message.get("weight", 1) != 1 for message in messages):
            raise ValueError("a message has a weight that is not 1, and all answers in messages are trained on alike: "
                             "give each answer a row with what is before it as prompt, and itself as response")
        return [pieces_of(messages, 0, tokenizer, template)]
    if row.get("prompt") is None or row.get("response") is None:
        raise ValueError("it has neither messages, nor a prompt and a response: name the columns with "
                         "--data.messages-column, or --data.prompt-column and --data.response-column")
    prompt, response = parse_messages(row["prompt"], "prompt"), row["response"]
    is_text = isinstance(response, str)
    answer = [{"role": "assistant", "content": response}] if is_text else parse_messages(response, "response")
    check_turns(prompt, answer)
    return [pieces_of([*prompt, *answer], len(prompt), tokenizer, template)]


def validate(args: Args, run: Training, policy: Policy, step: int) -> dict[str, float] | None:
    """The mean loss of the validation tokens, and exp(-loss), their mean probability, which is better the higher it is.
    None after a stop signal. `step`: unused, the loss has no random numbers."""
    meter = Meter()
    rows = spread_rows(len(run.val_set), args.eval_prompts)
    minibatch = run.val_set.minibatch(rows, run.hf_config, run.world, run.max_tokens)
    with run.phase("testing", [minibatch]) as microbatches:
        for microbatch in microbatches:
            if all_max([run.watchdog.signal]).item():
                return None
            meter.mean("val/loss", -policy.score(microbatch, 1.0), microbatch.mask)
    loss = meter.reduce()["val/loss"]
    return {"val/loss": loss, "val-core/probability": math.exp(-loss)}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    rules.check_supervised(args)
    check_length(args)
    with Training(args) as run:
        columns = {
            "messages": args.data.messages_column, "prompt": args.data.prompt_column,
            "response": args.data.response_column, "tools": "tools",
        }
        run.load_data(partial(
            load_conversations, tokenizer=run.tokenizer, stops=stop_tokens(args.model, run.tokenizer),
            config=args.data, parser=RowParser(columns, parse),
        ), args.rows_per_step, load_val_prompts(args, args.data, run))
        run.max_sequence_length = int(run.train_set.sequence_lengths.max())
        max_tokens = run.plan_memory(args.max_tokens_per_gpu)
        validation = partial(validate, args, run) if args.eval_by == "loss" else SampledValidation(args, args.data, run)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        num_epochs = run.total_steps * args.rows_per_step / len(run.train_set)
        run.describe(f"sft, {num_epochs:.2f} epochs", args.rows_per_step, 1, 1, 1)
        run.resume()
        if run.val_set is not None and not run.is_validated:
            run.log_validation(validation(policy, run.first_step))
        for step in run.steps():
            # 1 data
            rows = run.next_rows(args.rows_per_step)
            minibatch = run.train_set.minibatch(rows, run.hf_config, run.world, max_tokens)

            # 5 update
            with run.phase("update_actor", [minibatch]) as update:
                # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                weights = losses.token_weights(minibatch, "token-mean")
                for microbatch, weight in zip(minibatch, weights):                              # as many on every rank
                    logp, entropy = policy(microbatch, temperature=1.0)                         # [T], [T]
                    loss = -logp
                    (run.world.size * (loss * weight).sum()).backward()                         # FSDP averages: undo it
                    update.done(microbatch, logp, entropy, {"train/loss": loss})
                update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            results = validation(policy, step + 1) if run.is_validation_due(step) else {}
            lengths = run.train_set.sequence_lengths[run.train_set.sequences(rows)]
            run.end_step(step, [minibatch], lengths, {}, results)


if __name__ == "__main__":
    run_script(main, Args, __doc__)

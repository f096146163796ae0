"""Responses on disk, RUN_DIR/rollouts/*.parquet: of steps, with what the update did to each token, and of validations.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.batch import Batch
from common.parallel.ranks import all_gather_objects
from common.rollout import Rollout, Sample
from common.tracking.logger import LogConfig

FLOATS = pa.list_(pa.float32())

SCHEMA = pa.schema({
    "step": pa.int32(), "index": pa.int32(), "group": pa.int32(), "data_source": pa.string(), "prompt": pa.string(),
    "response": pa.string(), "ground_truth": pa.string(), "score": pa.float32(), "reward": pa.float32(),
    "reward_parts": pa.string(), "advantage": pa.float32(), "finish_reason": pa.string(), "prompt_length": pa.int32(),
    "response_length": pa.int32(), "tokens": pa.list_(pa.int32()), "token_texts": pa.list_(pa.string()),
    "trained": pa.list_(pa.bool_()), "clipped": pa.list_(pa.bool_()), "rollout_logp": FLOATS, "old_logp": FLOATS,
    "ref_logp": FLOATS, "token_advantage": FLOATS, "value": FLOATS, "returns": FLOATS, "entropy": FLOATS,
    "ratio": FLOATS, "mask": pa.list_(pa.bool_()), "num_turns": pa.int32(), "end_reason": pa.string(),
    "messages": pa.string(), "version": pa.list_(pa.int32()),
})
"""One row a response. `score` is the reward function's, `reward` what the advantages were made from, `reward_parts` the
rest of its dict as JSON. Lists have one entry per response token; they are null where there was none (no reference, no
critic, a response that was not trained). `trained` is the loss mask; `advantage` the mean of `token_advantage` over it.
After several passes, entropy, ratio and clipped are those of the last one. Of episodes only: `mask` is true for tokens
that the model wrote, and `messages` is the conversation as JSON, with calls of tools and results. With
--rollout.in-flight only: `version` is the number of steps that the policy had been trained when it sampled a token."""


class Record:
    """One step's file. `add` each micro-batch as it is trained; at the end of the step all ranks `write`. Does nothing
    in steps that have no file (--log.rollouts-every), and keeps nothing of responses past --log.rollouts-max."""

    def __init__(self, config: LogConfig, run_dir: Path, step: int):
        """`step` counts from 1."""
        self.on = config.rollouts_every > 0 and (step == 1 or step % config.rollouts_every == 0)
        self.path = run_dir / f"rollouts/step_{step:06d}.parquet"
        self.step = step
        self.max_responses = config.rollouts_max
        self.limit = 0                                                  # responses from this number on are not kept
        self.numbers: dict[int, dict[str, np.ndarray]] = {}             # sequence -> name -> one number per token

    def keep(self, rollout: Rollout) -> None:
        """Keep the first whole groups, at least one; of an episode of several sequences the last one."""
        self.sequence = (rollout.num_sequences.cumsum(0) - 1).long().tolist()                   # [S]
        ends = rollout.group.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
        self.limit = max([end for end in ends if end <= self.max_responses], default=ends[0] if ends else 0)

    def add(self, microbatch: Batch, logp: Tensor, entropy: Tensor, stats: dict[str, Tensor]) -> None:
        """Numbers per token [T] of a micro-batch: those it carries, and those of this forward. `stats`: the loss's."""
        if not self.on:
            return
        index, number = torch.stack([microbatch.index, microbatch.number]).tolist()            # one read of a GPU
        chosen = [s for s, i in enumerate(index) if 0 <= i < self.limit]
        if not chosen:
            return
        old_logp = logp if microbatch.old_logp is None else microbatch.old_logp
        found = {
            "trained": microbatch.mask, "old_logp": old_logp, "ref_logp": microbatch.ref_logp,
            "token_advantage": microbatch.advantage, "value": microbatch.value, "returns": microbatch.returns,
            "entropy": entropy, "ratio": stats["actor/ratio"],
            "clipped": stats["actor/pg_clipfrac"] + stats["actor/pg_clipfrac_lower"],
        }
        found = {name: values.detach().float().cpu().numpy() for name, values in found.items() if values is not None}
        bounds = microbatch.cu_seqlens.tolist()
        for s in chosen:
            self.numbers[number[s]] = {name: values[bounds[s] : bounds[s + 1]] for name, values in found.items()}

    def write(self, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], rewards: Tensor) -> None:
        """Every rank calls it. `samples`: those that this rank scored; `rewards` [S]: what the update was made from."""
        if not self.on:
            return
        rows = []
        for sample in samples:
            if sample.index < self.limit:
                response = sample.response
                rows.append(row_of(tokenizer, sample, self.step, float(rewards[sample.index])) | {
                    "tokens": response.tokens,
                    "token_texts": token_texts(tokenizer, sample.prompt.tokens, response.tokens),
                    "rollout_logp": response.logp,
                    "mask": response.mask,
                    "version": [step for step, count in response.versions for _ in range(count)] or None,
                })
        shares = all_gather_objects((rows, self.numbers))
        numbers = {i: found for _, share in shares for i, found in share.items()}
        rows = [row for share, _ in shares for row in share]
        for row in rows:
            length = row["response_length"]
            for name, values in numbers.get(self.sequence[row["index"]], {}).items():  # of prompt and response
                row[name] = values[len(values) - length :].astype(SCHEMA.field(name).type.value_type.to_pandas_dtype())
            if "trained" in row and row["trained"].any():
                row["advantage"] = float(row["token_advantage"][row["trained"]].mean())
        write_rows(self.path, rows)


def write_validation(config: LogConfig, run_dir: Path, step: int, tokenizer: PreTrainedTokenizerBase,
                     samples: list[Sample]) -> None:
    """Write RUN_DIR/rollouts/val_STEP.parquet: the first --log.rollouts-max responses, without numbers per token, if
    steps have such files. Every rank calls it, with its own samples."""
    if not config.rollouts_every:
        return
    rows = [row_of(tokenizer, sample, step, sample.score) for sample in samples if sample.index < config.rollouts_max]
    write_rows(run_dir / f"rollouts/val_{step:06d}.parquet", [*chain(*all_gather_objects(rows))])


def row_of(tokenizer: PreTrainedTokenizerBase, sample: Sample, step: int, reward: float) -> dict[str, Any]:
    prompt = sample.prompt
    response = sample.response
    return {
        "step": step,
        "index": sample.index,
        "group": sample.group,
        "data_source": prompt.data_source,
        "prompt": tokenizer.decode(response.prompt or prompt.tokens),
        "ground_truth": str(prompt.ground_truth),
        "response": tokenizer.decode(response.tokens, skip_special_tokens=True),
        "score": sample.score,
        "reward": reward,
        "reward_parts": json.dumps(sample.extras),
        "finish_reason": response.finish_reason,
        "prompt_length": len(response.prompt or prompt.tokens),
        "response_length": len(response.tokens),
        "num_turns": response.num_turns if response.messages else None,
        "end_reason": response.end_reason or None,
        "messages": json.dumps(response.messages) if response.messages else None,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if dist.is_initialized() and dist.get_rank():
        return
    rows.sort(key=lambda row: row["index"])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd")
    temporary.rename(path)


def token_texts(tokenizer: PreTrainedTokenizerBase, prompt: list[int], response: list[int]) -> list[str]:
    """What each response token adds to the text. Of a character that is spread over several tokens, the last has it."""
    plain = {"clean_up_tokenization_spaces": False}
    texts, before, pending = [], prompt[-1:], []        # with what stands before: some drop a first token's space
    for token in response:
        pending.append(token)
        text = tokenizer.decode(before + pending, **plain)[len(tokenizer.decode(before, **plain)) :]
        if text.endswith("\ufffd") and len(pending) < 4:                # UTF-8 has at most 4 bytes a character
            texts.append("")
        else:
            texts.append(text)
            before, pending = pending, []
    return texts

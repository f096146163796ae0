"""Responses on disk, RUN_DIR/rollouts/*.parquet: of training steps, with the update's numbers for each token, and of
validations."""

import json
from functools import cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.batch import Batch
from common.checkpoint.files import naming
from common.dataset.videos import pictures_of
from common.flags.record import LogConfig
from common.parallel.ranks import all_gather_objects
from common.rollout import Minibatch, Rollout, Sample
from envs.runtime.response import Response

COLUMNS = {
    pa.int32(): "step index group prompt_length response_length num_turns",
    pa.float32(): "score reward advantage",
    pa.string(): "data_source prompt response ground_truth reward_parts finish_reason end_reason messages",
    pa.list_(pa.int32()): "tokens version",
    pa.list_(pa.string()): "token_texts",
    pa.list_(pa.binary()): "images",
    pa.list_(pa.bool_()): "mask trained clipped",
    pa.list_(pa.float32()): "rollout_logp old_logp ref_logp token_advantage value returns entropy ratio",
}
"""One row a response. `score` is the reward function's, `reward` is the number that the advantages were made from,
`reward_parts` the rest of its dict as JSON (a list above 1,000
numbers only as "a list of N numbers"). Lists have one entry per response token; they are null if there was none
(no reference, no critic, a response that was not trained). `trained` is the loss mask; `advantage` the mean of
`token_advantage` over it. After several passes, entropy, ratio and clipped are from the last pass. For episodes only:
`mask` is true for the model's tokens, and `messages` is the conversation as JSON, with calls of tools and results. With
--rollout.in-flight only: `version` is the number of steps that the policy had been trained when it sampled a token.
`images`: files of the prompt's images, only in the first response of a group."""
SCHEMA = pa.schema({name: kind for kind, names in COLUMNS.items() for name in names.split()})


class Recorder(NamedTuple):
    """Where a run's tables of responses go, and what they are decoded with."""

    config: LogConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase


def write_step(recorder: Recorder, step: int, rollout: Rollout, minibatches: list[Minibatch], rewards: Tensor) -> None:
    """Write RUN_DIR/rollouts/step_STEP.parquet, if that step has a file (--log.rollouts-every): the first whole groups,
    at least one, up to --log.rollouts-max responses. Every rank calls it. `step` counts from 1; `minibatches` are those
    after the update; `rewards` [S]: the numbers that the advantages were made from."""
    config = recorder.config
    if config.rollouts_every == 0 or (step > 1 and step % config.rollouts_every):
        return
    ends = rollout.group.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    limit = ends[0] if ends else 0
    for end in ends:
        if end <= config.rollouts_max:
            limit = max(limit, end)
    rows = [
        row_of(recorder.tokenizer, sample, step, float(rewards[sample.index])) | {
            "tokens": sample.response.tokens,
            "token_texts": token_texts(recorder.tokenizer, sample.prompt.tokens, sample.response.tokens),
            "rollout_logp": sample.response.logp,
            "mask": sample.response.mask,
            "version": versions_of(sample.response),
        }
        for sample in rollout.samples if sample.index < limit
    ]
    sequences = (rollout.num_sequences.cumsum(0) - 1).long()[:limit].tolist()   # of an episode of several, the last
    numbers = []
    for microbatch in chain(*minibatches):
        if microbatch.last_pass:
            numbers += numbers_of_tokens(microbatch, sequences)
    row_at = {row["index"]: row for row in chain(*all_gather_objects(rows))}
    for i, found in chain(*all_gather_objects(numbers)):
        row = row_at[i]
        for name, values in found.items():
            row[name] = values[len(values) - row["response_length"] :]
        if row["trained"].any():
            row["advantage"] = float(row["token_advantage"][row["trained"]].mean())
    write_rows(recorder.run_dir / f"rollouts/step_{step:06d}.parquet", [*row_at.values()])


def numbers_of_tokens(microbatch: Batch, sequences: list[int]) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Numbers of a response and, by name, of all its tokens, prompts included; for responses in `sequences`."""
    update = microbatch.last_pass
    clips = [update[name] for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower") if name in update]
    found = {
        "trained": microbatch.mask, "clipped": sum(clips).bool() if clips else None,
        "old_logp": update["logp"] if microbatch.old_logp is None else microbatch.old_logp,
        "ref_logp": microbatch.ref_logp, "token_advantage": microbatch.advantage, "value": microbatch.value,
        "returns": microbatch.returns, "entropy": update.get("entropy"), "ratio": update.get("actor/ratio"),
    }
    arrays = {name: values.cpu().numpy() for name, values in found.items() if values is not None}
    bounds = microbatch.cu_seqlens.tolist()
    is_canary = [False] * len(microbatch)
    if microbatch.canary is not None:
        is_canary = microbatch.canary.tolist()
    numbers = []
    for s, (i, number) in enumerate(zip(microbatch.index.tolist(), microbatch.number.tolist())):
        if not 0 <= i < len(sequences) or number != sequences[i]:
            continue
        if is_canary[s]:                                            # it was not trained
            continue
        own = slice(bounds[s], bounds[s + 1])
        numbers.append((i, {name: values[own] for name, values in arrays.items()}))
    return numbers


def write_validation(recorder: Recorder, step: int, samples: list[Sample]) -> None:
    """Write RUN_DIR/rollouts/val_STEP.parquet: the first --log.rollouts-max responses, without numbers per token, if
    steps have such files. Every rank calls it, with its own samples."""
    if not recorder.config.rollouts_every:
        return
    shown = [sample for sample in samples if sample.index < recorder.config.rollouts_max]
    rows = [row_of(recorder.tokenizer, sample, step, sample.score) for sample in shown]
    write_rows(recorder.run_dir / f"rollouts/val_{step:06d}.parquet", [*chain(*all_gather_objects(rows))])


def row_of(tokenizer: PreTrainedTokenizerBase, sample: Sample, step: int, reward: float) -> dict[str, Any]:
    prompt = sample.prompt
    response = sample.response
    images = prompt.images
    shown = response.prompt
    if not shown:
        shown = images.engine_tokens(prompt.tokens) if images else prompt.tokens
    parts = {}
    for name, value in sample.extras.items():
        is_long = isinstance(value, list) and len(value) > 1000
        parts[name] = f"a list of {len(value)} numbers" if is_long else value
    return {
        "step": step,
        "index": sample.index,
        "group": sample.group,
        "data_source": prompt.data_source,
        "prompt": tokenizer.decode(shown),
        "images": pictures_of(images.files) if images else None,
        "ground_truth": str(prompt.ground_truth),
        "response": response.text(tokenizer),
        "score": sample.score,
        "reward": reward,
        "reward_parts": json.dumps(parts),
        "finish_reason": response.finish_reason,
        "prompt_length": len(response.prompt or prompt.tokens),
        "response_length": len(response.tokens),
        "num_turns": response.num_turns if response.messages else None,
        "end_reason": response.end_reason or None,
        "messages": json.dumps(response.messages) if response.messages else None,
    }


def versions_of(response: Response) -> list[int | None] | None:
    """One entry for each token that the model sampled."""
    if not response.versions:
        return None
    versions = iter(response.versions)
    mask = response.mask or [True] * len(response.tokens)
    return [next(versions) if is_sampled else None for is_sampled in mask]


def write_rows(path: Path, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> None:
    if dist.is_initialized() and dist.get_rank():
        return
    rows.sort(key=lambda row: row["index"])
    for _, group in groupby(rows, key=lambda row: row["group"]):
        for row in islice(group, 1, None):
            row["images"] = None
    table = pa.Table.from_pylist(rows, schema=schema)
    temporary = path.with_suffix(".partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary, compression="zstd")
        temporary.rename(path)


def token_texts(tokenizer: PreTrainedTokenizerBase, prompt: list[int], response: list[int]) -> list[str]:
    """The text that each response token adds. A character that spans several tokens belongs to the last of them."""
    decode = cache(lambda *tokens: tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
    texts = []
    before = prompt[-1:]                              # with what stands before: some drop a first token's space
    pending: list[int] = []
    for token in response:
        pending.append(token)
        text = decode(*before, *pending)[len(decode(*before)) :]
        is_part = text.endswith("\ufffd") and len(pending) < 4          # UTF-8 has at most 4 bytes a character
        texts.append("" if is_part else text)
        if not is_part:
            before = pending
            pending = []
    return texts

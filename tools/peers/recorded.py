"""A step's responses with all numbers that a loss is computed from: made up, or read from a run's recorded rollouts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPTS, SAMPLES, LONGEST = 4, 4, 12
"""Groups, responses of each, and tokens of the longest response, in a batch that is made up."""


@dataclass
class Recorded:
    """The numbers of S responses, padded on the right to L tokens: float64 [S, L], 0 outside `mask`. Responses stand
    group by group."""

    source: str  # in words
    group: Tensor  # [S] int64
    score: Tensor  # [S] float64; NaN: the scorers failed
    lengths: Tensor  # [S] int64, tokens of the response
    mask: Tensor  # [S, L] bool, True where the policy sampled
    rollout_logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    logp: list[Tensor]
    """The policy's, one [S, L] for each pass over the responses; the last one stands for further passes."""
    entropy: Tensor
    truncated: Tensor  # [S] bool
    greedy: Tensor  # [P] float64, the score of a greedy response to each prompt; for --baseline remax
    extras: list[dict[str, Any]] = field(default_factory=list)  # what the reward function returned beside each score
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.score)

    @property
    def num_groups(self) -> int:
        return len(self.group.unique())

    @property
    def samples_per_prompt(self) -> int:
        """Of the largest group."""
        return int(self.group.bincount().max())


def made_up(seed: int = 0) -> Recorded:
    """A batch in which each part of a loss acts: ratios beyond the usual clip bounds on both sides of 1 and beyond the
    dual clip, KLs of all sizes, responses of many lengths, a group whose scores are equal, and every other response
    far from what the engine sampled. Numbers of an engine are in float32, as engines report them."""
    rng = torch.Generator().manual_seed(seed)
    count = PROMPTS * SAMPLES
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=rng)
    mask = torch.arange(LONGEST) < lengths[:, None]                                             # [S, L]

    def spread(scale: float) -> Tensor:
        values = scale * torch.randn(count, LONGEST, generator=rng, dtype=torch.float64)
        return torch.where(mask, values, 0)

    group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    score = torch.rand(count, generator=rng, dtype=torch.float64).mul(8).round() / 8            # some are equal
    score[-SAMPLES:] = 0.5
    old_logp = torch.where(mask, -spread(1.5).abs() - 0.05, 0)
    apart = torch.where(torch.arange(count) % 2 == 0, 0.03, 0.5).double()[:, None]      # of engine and trainer, in nats
    rollout_logp = torch.where(mask, (old_logp + apart * spread(1.0)).clamp(max=-1e-3).float().double(), 0)
    logp = [(old_logp + spread(scale)).clamp(max=-1e-3).where(mask, 0) for scale in (0.4, 0.8)]
    # k3 stays below 10, where this project's and verl's is bounded and TRL's is not
    least = torch.stack(logp).amin(0)
    ref_logp = torch.minimum(old_logp + spread(0.7), least + 2.3).clamp(max=-1e-3).where(mask, 0)
    entropy = spread(1.0).abs()
    greedy = torch.rand(PROMPTS, generator=rng, dtype=torch.float64)
    return Recorded(f"made up: {count} responses in {PROMPTS} groups", group, score, lengths, mask, rollout_logp,
                    old_logp, ref_logp, logp, entropy, lengths == LONGEST, greedy, [{} for _ in range(count)])


def read_run(run: Path, step: int = 0) -> Recorded:
    """The responses of RUN/rollouts/step_STEP.parquet, of the last step that has a file for step 0. The policy's
    log-probs are the old ones plus the log of the recorded ratio, which is that of the step's last pass. Raises
    ValueError, in one line, for a run that has none, and for what was not recorded."""
    import pyarrow.parquet as pq

    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if step:
        files = [file for file in files if int(file.stem.removeprefix("step_")) == step]
    if not files:
        raise ValueError(f"{run} has no recorded responses{f' of step {step}' if step else ''}: --log.rollouts-every "
                         f"of the run says of which steps there are")
    rows = pq.read_table(files[-1]).to_pylist()
    numbers = ("rollout_logp", "old_logp", "ref_logp", "entropy", "ratio")
    # what was not trained has the engine's log-probs alone
    untrained = [row for row in rows if row["ratio"] is None]
    if len(untrained) == len(rows):
        raise ValueError(f"{files[-1]}: no response has a recorded ratio, so the policy's log-probs are not known: "
                         f"give update.done(...) the stats of losses.ratio_stats")
    lengths = torch.tensor([row["response_length"] for row in rows])
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    found = {name: torch.zeros(len(rows), longest, dtype=torch.float64) for name in numbers}
    for i, row in enumerate(rows):
        if row["mask"] is not None:
            mask[i, : lengths[i]] &= torch.tensor(row["mask"])
        for name in numbers:
            values = row[name]
            if values is None and name == "old_logp":
                values = row["rollout_logp"]
            if values is not None:
                found[name][i, : len(values)] = torch.tensor(values, dtype=torch.float64)
            elif name == "ratio":
                found[name][i] = 1.0
    padded = {name: torch.where(mask, values, 0) for name, values in found.items()}
    logp = padded["old_logp"] + torch.where(mask, found["ratio"].clamp(min=1e-9).log(), 0)
    group = torch.tensor([row["group"] for row in rows]).unique(return_inverse=True)[1]
    order = group.argsort(stable=True)
    score = torch.tensor([float("nan") if row["score"] is None else row["score"] for row in rows], dtype=torch.float64)
    recorded = Recorded(
        f"{files[-1]}: {len(rows)} responses in {len(group.unique())} groups", group[order], score[order],
        lengths[order], mask[order], padded["rollout_logp"][order], padded["old_logp"][order],
        padded["ref_logp"][order], [logp[order]], padded["entropy"][order],
        torch.tensor([row["finish_reason"] == "length" for row in rows])[order],
        torch.zeros(len(group.unique()), dtype=torch.float64),
        [json.loads(rows[i]["reward_parts"] or "{}") for i in order.tolist()],
    )
    if untrained:
        recorded.notes.append(f"{len(untrained)} responses were not trained: the engine's log-probs stand for theirs")
    return recorded


def own_flags(flags: dict[str, list[str]], not_of_a_loss: Sequence[str]) -> dict[str, list[str]]:
    """Those of a run's flags that say what a step computes: the script's own and --correction.*, and the longest
    response, by which some losses divide. Those of models, data, engine and logs are left out."""
    kept = {}
    for name, values in flags.items():
        is_grouped = "." in name and not name.startswith("--correction.")
        if name == "--rollout.max-response-length" or not (is_grouped or name in not_of_a_loss):
            kept[name] = values
    return kept

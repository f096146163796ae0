"""From prompts to micro-batches: sample groups, score them, tell all ranks the numbers, deal out the work."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch
from common.dataset.store import PromptSet
from common.engine.base import Engine, Response, Sampling
from common.metrics import Meter
from common.model.flops import sequence_cost
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModel, RewardModelConfig
from common.packing import plan_step
from common.parallel.exchange import exchange, gather_numbers
from common.parallel.ranks import World, all_names
from common.prompts import Prompt
from common.seeds import seed_of
from rewards import lookup
from rewards.runtime.pool import RewardConfig, RewardPool, Scores


@dataclass
class Samples:
    """The responses that this rank scores. Over all ranks `index` is 0 .. S-1: prompt number * G + sample number."""

    index: list[int]
    rows: list[int]  # of their prompts in the data set
    prompts: list[Prompt]
    responses: list[Response]
    rewards: list[float]  # NaN: lost
    extras: list[dict[str, Any]]  # what the reward function said besides its score

    def cat(self, other: "Samples", shift: int) -> "Samples":
        """Both, the other's numbers raised by `shift`."""
        both = Samples(*(vars(self)[f.name] + vars(other)[f.name] for f in fields(self)))
        both.index = self.index + [i + shift for i in other.index]
        return both

    def take_groups(self, groups: Sequence[int], group_size: int) -> "Samples":
        """Those of these groups, numbered anew in this order."""
        number = {group: n for n, group in enumerate(groups)}
        mine = [j for j, i in enumerate(self.index) if i // group_size in number]
        taken = Samples(*([vars(self)[f.name][j] for j in mine] for f in fields(self)))
        taken.index = [number[i // group_size] * group_size + i % group_size for i in taken.index]
        return taken

    def state_dict(self) -> list[list]:
        """Everything that all ranks have, for JSON."""
        mine = [
            [i, row, response.tokens, response.logp, response.finish_reason, reward, extra]
            for i, row, response, reward, extra
            in zip(self.index, self.rows, self.responses, self.rewards, self.extras)
        ]
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        return sorted((saved for share in shares for saved in share), key=lambda saved: saved[0])

    @classmethod
    def from_state(cls, state: list[list], data: PromptSet, group_size: int, world: World) -> "Samples":
        """This rank's share of what `state_dict` returned, whole groups of it; none of an empty one."""
        mine = [saved for saved in state if saved[0] // group_size % world.size == world.rank]
        index, rows, tokens, logps, reasons, rewards, extras = zip(*mine) if mine else [()] * 7
        responses = [Response(*parts) for parts in zip(tokens, logps, reasons)]
        return cls(list(index), list(rows), [data[row] for row in rows], responses, list(rewards), list(extras))

    def batch(self) -> Batch:
        if not self.index:
            return Batch.empty()
        return Batch.build(
            [prompt.tokens for prompt in self.prompts],
            [response.tokens for response in self.responses],
            rollout_logps=[response.logp for response in self.responses],
            index=self.index,
        )


@dataclass
class Results:
    """What every rank knows of every response, by its number: [S] each."""

    rewards: Tensor  # float64, NaN: lost
    response_lengths: Tensor  # tokens
    prompt_lengths: Tensor  # tokens
    truncated: Tensor  # bool, cut at the longest response
    masked: Tensor = field(default=None)  # bool, in no loss and no denominator: at first those without a reward

    def __post_init__(self):
        self.masked = ~self.rewards.isfinite() if self.masked is None else self.masked

    def cat(self, other: "Results") -> "Results":
        return Results(*(torch.cat([vars(self)[f.name], vars(other)[f.name]]) for f in fields(self)))

    def take_groups(self, groups: Sequence[int], group_size: int) -> "Results":
        rows = (torch.as_tensor(groups, dtype=torch.int64)[:, None] * group_size + torch.arange(group_size)).flatten()
        return Results(*(vars(self)[f.name][rows] for f in fields(self)))

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64, tokens of prompt and response."""
        return (self.prompt_lengths + self.response_lengths).numpy().astype(np.int64)


class Scoring:
    """Who scores responses: the reward functions' workers, and a reward model where there is one."""

    def __init__(self, tokenizer, config: RewardConfig, model_config: RewardModelConfig, data_sources: Iterable[str]):
        """Starts the workers; raises ValueError for a data source that no reward function is known for."""
        if not config.function and not model_config.alone:
            lookup(set(data_sources), config.kwargs)
        self.tokenizer, self.model = tokenizer, None
        self.advance: Callable[[], None] = _nothing  # called as each response ends, for a progress bar
        self.pool = None if model_config.alone else RewardPool(**vars(config))

    def load_model(self, config: RewardModelConfig, model_config: ModelConfig, world: World) -> None:
        if config.path:
            self.model = RewardModel(config, model_config, world)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def _nothing() -> None: ...


class Asked:
    """Responses that were generated and are being scored; `collect` waits for the scores."""

    def __init__(self, engine: Engine, scoring: Scoring, data: PromptSet, rows: Sequence[int], num_samples: int,
                 sampling: Sampling, *seed: int | str, stop: Callable[[], bool] = bool):
        """Sample `num_samples` responses to each prompt `data[row]`, scoring each as it finishes.

        Engine e takes prompts e, e + engines, ...; a group never leaves its engine. `seed` and the number of a response
        are all that its own seed depends on. When `stop()` turns true (`bool()` never
        is), sampling ends; then do not `collect`.
        """
        self.scoring, self.texts = scoring, {}
        self.requests = [(p, g) for p in engine.local_prompts(len(rows)) for g in range(num_samples)]
        self.index = [p * num_samples + g for p, g in self.requests]
        self.rows = [rows[p] for p, _ in self.requests]
        self.prompts = [data[row] for row in self.rows]
        self.responses = engine.generate(
            [prompt.tokens for prompt in self.prompts],
            [seed_of(*seed, p, g) for p, g in self.requests],
            sampling,
            on_finish=self._score,
            stop=stop,
        )

    def _score(self, i: int, response: Response) -> None:
        prompt, text = self.prompts[i], self.scoring.tokenizer.decode(response.tokens, skip_special_tokens=True)
        self.texts[i] = text
        self.scoring.advance()
        if self.scoring.pool is not None:
            self.scoring.pool.submit(i, prompt.data_source, text, prompt.ground_truth, prompt.extra_info)

    def collect(self, meter: Meter) -> Samples:
        """The samples that this rank scores; adds to `meter` reward/error_frac, reward/timeout_frac and reward/NAME of
        the numbers that a reward function returned besides its score. All ranks call this together."""
        mine = sorted(self.texts)
        scores = Scores(mine, [0.0] * len(mine), [{} for _ in mine], [None] * len(mine))
        if self.scoring.pool is not None:
            scores = self.scoring.pool.results()
        timeout = torch.tensor([kind == "timeout" for kind in scores.failures], dtype=torch.float64)
        failed = torch.tensor([kind is not None for kind in scores.failures], dtype=torch.float64)
        meter.mean("reward/timeout_frac", timeout)
        meter.mean("reward/error_frac", failed - timeout)
        numbers = {name for extra in scores.extras for name, value in extra.items() if isinstance(value, float)}
        for name in all_names(numbers):
            values = [extra[name] for extra in scores.extras if isinstance(extra.get(name), float)]
            meter.mean(f"reward/{name}", torch.tensor(values, dtype=torch.float64))
        rewards = scores.scores
        if self.scoring.model is not None:
            judged = self.scoring.model.score([self.prompts[i] for i in mine], [self.texts[i] for i in mine])
            meter.mean("reward/model", torch.tensor(judged, dtype=torch.float64))
            rewards = [reward + self.scoring.model.weight * score for reward, score in zip(rewards, judged)]
        return Samples(
            [self.index[i] for i in mine], [self.rows[i] for i in mine], [self.prompts[i] for i in mine],
            [self.responses[i] for i in mine], rewards, scores.extras,
        )


def gather_results(samples: Samples) -> Results:
    """The numbers of all ranks' samples on every rank."""
    rows = [
        (math.isfinite(reward), np.nan_to_num(reward), len(response.tokens), len(prompt.tokens),
         response.finish_reason == "length")
        for reward, response, prompt in zip(samples.rewards, samples.responses, samples.prompts)
    ]
    numbers = gather_numbers(torch.tensor(rows, dtype=torch.float64).view(-1, 5), torch.tensor(samples.index).long())
    scored, rewards, response_lengths, prompt_lengths, truncated = numbers.unbind(1)            # [S] each
    return Results(torch.where(scored > 0, rewards, torch.nan), response_lengths, prompt_lengths, truncated > 0)


def deal(samples: Samples, results: Results, trained: Tensor, hf_config, world: World, *, num_minibatches: int,
         max_tokens: int, seed: int, share_groups_of: int = 0) -> tuple[list[list[Batch]], list[Tensor]]:
    """Send every response to the rank that trains on it: this rank's micro-batches, by mini-batch, and per mini-batch
    the lengths [idle] of responses that no rank runs (`trained` [S] False), which only count in the denominators.

    `share_groups_of` G: the micro-batches keep groups of G together (--policy.share-prompt); 0: they need not.
    """
    lengths, trained = results.lengths, trained.numpy()
    plan = plan_step(
        lengths, sequence_cost(lengths, hf_config), num_minibatches, world.size, max_tokens, seed, trained=trained,
        groups=np.arange(len(lengths)) // share_groups_of if share_groups_of else None,
        prompt_lengths=results.prompt_lengths.numpy(),
    )
    batch = samples.batch()
    batch = batch.select(torch.from_numpy(np.flatnonzero(trained[batch.index.numpy()])))
    batch = exchange(batch, plan.rank[batch.index.numpy()])
    batch.mask &= ~results.masked[batch.index][batch.sequence_ids]
    batch = batch.to(world.device)
    minibatches = [[batch.microbatch(shares[world.rank]) for shares in planned] for planned in plan.minibatches]
    return minibatches, [(results.response_lengths * ~results.masked)[idle] for idle in plan.idle]


def give_out(minibatches: list[list[Batch]], **fields: Tensor) -> None:
    """Write per-token tensors of `Batch.cat` over all micro-batches back to each of them."""
    microbatches = list(chain(*minibatches))
    for name, whole in fields.items():
        for microbatch, share in zip(microbatches, whole.split([len(b.tokens) for b in microbatches])):
            setattr(microbatch, name, share.to(microbatch.tokens.device))


def check_sizes(world: World, tp: int, prompts_per_step: int, samples_per_prompt: int, minibatches_per_step: int,
                **others: int) -> None:
    """Refuse batch sizes below 1, or that do not divide over engines and mini-batches. `others`: also at least 1."""
    sizes = {"prompts_per_step": prompts_per_step, "samples_per_prompt": samples_per_prompt,
             "minibatches_per_step": minibatches_per_step, **others}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if prompts_per_step % max(world.size // tp, 1):
        raise ValueError(
            f"--prompts-per-step {prompts_per_step} must be a multiple of the {world.size // tp} engines "
            f"(world size {world.size} / --rollout.tp {tp})"
        )
    if prompts_per_step * samples_per_prompt % minibatches_per_step:
        raise ValueError(
            f"{prompts_per_step * samples_per_prompt} responses a step (--prompts-per-step {prompts_per_step} x "
            f"--samples-per-prompt {samples_per_prompt}) must be a multiple of --minibatches-per-step "
            f"{minibatches_per_step}"
        )


# --------------------------------------------------------------------------- validation

def validation_metrics(samples: Samples, num_samples: int, greedy: bool) -> dict[str, float]:
    """Per data source, over all ranks, with verl's names: val-core/SOURCE/acc/{greedy or mean@N, best@N/mean,
    maj@N/mean} and, in val-aux/, the standard error over prompts and best@k for powers of two below N.

    acc is the reward dict's "acc", else its score; a lost one counts 0. best@k/mean is for scores of 0 and 1 the
    unbiased pass@k (Chen et al. 2021, sec. 2.1). maj@N needs the dict's "pred": the most frequent answer's acc, ties
    shared.
    """
    rows = [
        (prompt.data_source, i // num_samples, float(np.nan_to_num(extra.get("acc", reward))), extra.get("pred"))
        for i, prompt, reward, extra in zip(samples.index, samples.prompts, samples.rewards, samples.extras)
    ]
    shares = [rows]
    if dist.is_initialized():
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, rows)
    groups: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for source, group, acc, pred in sorted((row for share in shares for row in share), key=lambda row: row[:3]):
        groups[source][group].append((acc, pred))
    metrics = {}
    for source, found in groups.items():
        accs = np.array([[acc for acc, _ in group] for group in found.values()])                # [P, N]
        core, aux, N = f"val-core/{source}/acc", f"val-aux/{source}/acc", accs.shape[1]
        name = "greedy" if greedy else f"mean@{N}"
        metrics[f"{core}/{name}"] = float(accs.mean())
        metrics[f"{aux}/{name}/stderr"] = float(accs.mean(1).std(ddof=1) / len(accs) ** 0.5) if len(accs) > 1 else 0.0
        if N > 1:
            metrics[f"{core}/best@{N}/mean"] = float(best_at(accs, N).mean())
            for k in (2**e for e in range(1, (N - 1).bit_length())):
                metrics[f"{aux}/best@{k}/mean"] = float(best_at(accs, k).mean())
            if all(pred is not None for group in found.values() for _, pred in group):
                metrics[f"{core}/maj@{N}/mean"] = float(np.mean([majority(group) for group in found.values()]))
    return metrics


def best_at(accs: np.ndarray, k: int) -> np.ndarray:
    """Expected best of k samples drawn from each row without replacement: [P, N] -> [P]. For 0/1 scores with c ones
    this is pass@k = 1 - C(N - c, k) / C(N, k)."""
    N = accs.shape[1]
    shares = np.array([math.comb(i, k - 1) / math.comb(N, k) for i in range(N)])    # that the i-th smallest is the best
    return np.sort(accs, axis=1) @ shares


def majority(group: list[tuple[float, Any]]) -> float:
    """Mean acc of the samples whose answer is the most frequent one (of the most frequent ones)."""
    counts = Counter(str(pred) for _, pred in group)
    return float(np.mean([acc for acc, pred in group if counts[str(pred)] == max(counts.values())]))

"""The metrics of episodes: turns, ends and tools, also of each environment where a row names one of several."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.flags.rollout import RolloutConfig
from common.metrics import Meter
from common.prompts import Prompt
from common.rollout import Sample
from envs.runtime.conversation import FlagError, environments

END_REASONS = ("done", "length", "turns", "timeout", "error")


def measure_episodes(meter: Meter, samples: Sequence[Sample], config: RolloutConfig) -> None:
    """Add to `meter` the metrics of this rank's episodes. They have verl's names where verl has them."""
    num_turns: list[float] = []
    num_calls: list[float] = []
    tool_seconds: list[float] = []
    tool_errors: list[float] = []
    num_sequences: list[float] = []
    end_reasons: list[str] = []
    for sample in samples:
        response = sample.response
        num_turns.append(response.num_turns)
        num_calls.append(response.tools["tool_calls"])
        tool_seconds.append(response.tools["tool_s"])
        tool_errors.append(response.tools["tool_errors"])
        num_sequences.append(len(response.parts))
        end_reasons.append(response.end_reason)
    meter.spread("num_turns", numbers(num_turns))
    meter.spread("tool_call_counts", numbers(num_calls))
    meter.spread("timing_s/agent_loop/tool_calls", numbers(tool_seconds))
    meter.mean("episode/tool_errors", numbers(tool_errors))
    meter.mean("episode/num_sequences", numbers(num_sequences))
    is_dropped = []
    for reason in end_reasons:
        is_dropped.append(reason in config.drop)
    meter.mean("episode/dropped_frac", numbers(is_dropped))
    for reason in END_REASONS:
        has_reason = []
        for end_reason in end_reasons:
            has_reason.append(end_reason == reason)
        meter.mean(f"episode/{reason}_frac", numbers(has_reason))
    of_environment: dict[str, list[Sample]] = {}                # also those without a sample
    for name in environments(config.episode):
        of_environment[name] = []
    for sample in samples:
        name = environment_of(sample.prompt, config.episode)
        of_environment[name].append(sample)
    for name, mine in of_environment.items():
        if name:                                                # the only one has no name
            measure_environment(meter, name, mine)


def measure_environment(meter: Meter, name: str, samples: Sequence[Sample]) -> None:
    """The same of the episodes in one of several environments."""
    scores: list[float] = []
    num_turns: list[float] = []
    has_failed: list[float] = []
    for sample in samples:
        scores.append(sample.score)
        num_turns.append(sample.response.num_turns)
        has_failed.append(sample.response.end_reason in ("timeout", "error"))
    values = numbers(scores)
    meter.mean(f"episode/{name}/score", values, values.isfinite())
    meter.mean(f"episode/{name}/num_turns", numbers(num_turns))
    meter.mean(f"episode/{name}/error_frac", numbers(has_failed))


def numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def environment_of(prompt: Prompt, spec: str) -> str:
    """The row's environment among those of --rollout.episode; "" if there is one. Raises FlagError if it has none."""
    names = environments(spec)
    if "" in names:
        return ""
    name = prompt.row.get("agent_name")
    if name not in names:
        raise FlagError(f"a row's agent_name is {name!r}, and --rollout.episode names {', '.join(names)}")
    return name

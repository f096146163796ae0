"""Episodes of many turns: the engine decodes while users' coroutines, each in its own process, run tools.

Between two steps of the engine, every episode with a pending request is served: it asks for the model's next turn,
which is queued, or it ends. All ranks of an engine run the same loop. The first rank owns the processes and sends their
messages to the other ranks.
"""

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.dataset.store import template_arguments
from common.engine.base import Engine, Request, RolloutConfig
from common.metrics import Meter
from common.parallel.ranks import World, seed_of
from common.prompts import TemplateConfig
from common.rollout import Sample
from envs.runtime.conversation import ChatTemplate, Conversation
from envs.runtime.processes import EpisodeProcesses
from envs.runtime.response import Episode, Response, response_of
from envs.runtime.tool_calls import make_parser

SLICE_S = 1.0  # while all episodes wait for tools, stop signals are looked for this often
OTHER_FILES = 100  # open files that a rank has beside one an episode
END_REASONS = ("done", "length", "turns", "timeout", "error")


@dataclass
class Episodes:
    """The processes and settings that episodes need beside the engine."""

    config: RolloutConfig
    template: ChatTemplate
    max_sequence_length: int
    processes: EpisodeProcesses | None  # None on all ranks of an engine but its first
    parse: Callable[[str, list[dict]], list[dict]] | None  # a reply with special tokens, the tools' schemas -> calls

    def run(self, engine: Engine, requests: Sequence[Request], sampling: RolloutConfig,
            on_end: Callable[[int, Response, dict[str, Any]], None], stop: Callable[[], bool]) -> None:
        """Run an episode for each request. `on_end(i, response, reply)` is called as episode i ends, with the last
        message of its process. Once `stop()` is true, no more is sampled. An unfinished episode restarts; the model's
        earlier replies are replayed to it as long as the environment repeats what it said before."""
        engine.begin(stop)
        waiting = [i for i in reversed(range(len(requests))) if not requests[i].response.finish_reason]
        running: dict[int, Episode] = {}
        while (running or waiting) and not engine.stop():
            while waiting and len(running) < self.config.episodes_at_once:
                number = waiting.pop()
                running[number] = self.start(number, requests[number], sampling)
            heard: list[tuple[int, dict[str, Any]]] = []
            if self.processes is not None:
                wait_s = SLICE_S if self.config.lockstep or not engine.has_unfinished() else 0.0
                heard = self.processes.events(wait_s, wait_for_all=self.config.lockstep)
            for number, message in engine.from_first_rank(heard):
                episode = running[number]
                episode.tool_s += message["seconds"]
                if "messages" in message:
                    self.next_turn(engine, number, episode, message, sampling)
                else:
                    del running[number]
                    on_end(number, response_of(episode, message), message)
            if self.config.lockstep and any(not episode.is_sampling for episode in running.values()):
                continue
            if engine.has_unfinished():
                for number, part in engine.step():
                    running[number].begun.earlier[-1].extend(part, part.finish_reason)
                    self.take_reply(number, running[number])
        for number, part in engine.abort(set(running)):
            running[number].begun.earlier[-1].extend(part, finish_reason="")
        if self.processes is not None:
            self.processes.end_all()

    def start(self, number: int, request: Request, sampling: RolloutConfig) -> Episode:
        prompt = request.prompt
        if self.processes is not None:
            start = {"row": prompt.row, "messages": prompt.messages, "tokens_left": sampling.max_response_length}
            self.processes.start(number, start)
        messages = list(prompt.messages)
        conversation = Conversation(self.template, self.config.rewritten_history, prompt.tokens, messages)
        return Episode(conversation, request.seed, request.response)

    def next_turn(self, engine: Engine, number: int, episode: Episode, message: dict[str, Any],
                  sampling: RolloutConfig) -> None:
        """Queue the model's next turn, or refuse it."""
        conversation = episode.conversation
        if episode.num_turns >= self.config.max_turns:
            self.refuse(number, episode, "turns")
            return
        new = message["messages"]
        between: list[int] | None = []
        prompt = conversation.prompt
        if episode.num_turns == 0:
            prompt = conversation.begin(new, message["tools"])
        else:
            between = conversation.between(new)
        seen = [*prompt, *conversation.tokens, *(between or [])]
        if between is None:
            seen = conversation.template.encode(conversation.rendered)
        added = conversation.num_tokens + len(between or [])
        room = min(sampling.max_response_length - added, self.max_sequence_length - len(seen))
        if room < 1:
            self.refuse(number, episode, "length")
            return
        conversation.prompt = prompt
        conversation.add_messages(new, between)
        episode.limit = room
        reply = episode.next_reply(between or conversation.prompt)
        if reply.finish_reason:
            self.take_reply(number, episode)
            return
        episode.is_sampling = True
        begun = [len(reply.tokens)] if reply.tokens else []
        seed = None if episode.seed is None else seed_of(episode.seed, episode.num_turns, *begun)
        max_tokens = min(room, message["max_tokens"] or room) - len(reply.tokens)
        engine.add(
            number, [*conversation.prompt, *conversation.tokens, *reply.tokens], seed,
            replace(sampling, max_response_length=max_tokens),
        )

    def refuse(self, number: int, episode: Episode, reason: str) -> None:
        """Tell an episode that it gets no further reply, and why."""
        episode.end_reason = reason
        self.tell(number, episode, {"text": None, "finish_reason": reason})

    def take_reply(self, number: int, episode: Episode) -> None:
        """Add the next complete reply and send it to the episode."""
        conversation, response = episode.conversation, episode.begun.earlier[episode.num_turns]
        text = conversation.add_reply(response.tokens, response.logp, response.routing)
        episode.is_sampling = False
        episode.num_turns += 1
        is_truncated = response.finish_reason == "length" and len(response.tokens) == episode.limit
        episode.end_reason = "length" if is_truncated else "done"
        reply = {"text": text, "finish_reason": response.finish_reason}
        if conversation.tools and self.parse is not None:
            ended = response.tokens[-1] in conversation.template.stops
            written = response.tokens[:-1] if ended else response.tokens
            reply["tool_calls"] = self.parse(conversation.template.tokenizer.decode(written), conversation.tools)
        self.tell(number, episode, reply)

    def tell(self, number: int, episode: Episode, reply: dict[str, Any]) -> None:
        if self.processes is not None:
            tokens_left = max(self.config.max_response_length - episode.conversation.num_tokens, 0)
            self.processes.tell(number, reply | {"tokens_left": tokens_left})


def start_episodes(config: RolloutConfig, tokenizer: Any, template_config: TemplateConfig, stops: Sequence[int],
                   max_sequence_length: int, world: World) -> Episodes | None:
    """Start the processes of episodes; None without --rollout.episode. Raises ValueError for flags that cannot work."""
    if not config.episode or not world.samples:
        return None
    if template_config.template == "plain":
        raise ValueError("--rollout.episode needs a chat template between turns, --data.template is plain")
    if config.max_turns < 1 or config.episodes_at_once < 1 or config.tool_timeout_s <= 0:
        raise ValueError(f"--rollout.max-turns {config.max_turns} and --rollout.episodes-at-once "
                         f"{config.episodes_at_once} must be at least 1, --rollout.tool-timeout-s "
                         f"{config.tool_timeout_s:g} above 0")
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < config.episodes_at_once + OTHER_FILES:
        raise ValueError(f"--rollout.episodes-at-once {config.episodes_at_once} needs an open file each, and this "
                         f"process may have {most_files} in all: lower it, or raise `ulimit -n`")
    template = ChatTemplate(tokenizer, template_arguments(tokenizer, template_config), stops)
    parse = make_parser(config.tool_parser, tokenizer) if config.tool_parser else None
    processes = EpisodeProcesses(config.episode, config.tool_timeout_s) if world.rank % config.tp == 0 else None
    return Episodes(config, template, max_sequence_length, processes, parse)


def measure_episodes(meter: Meter, samples: Sequence[Sample], dropped: Sequence[str]) -> None:
    """Add to `meter` the turns, ends and tools of this rank's episodes; `dropped`: ends that leave the loss
    (--rollout.drop). Metrics have verl's names where verl has them."""

    def of_each(number: Callable[[Response], float]) -> Tensor:
        return torch.tensor([number(sample.response) for sample in samples], dtype=torch.float64)

    meter.spread("num_turns", of_each(lambda response: response.num_turns))
    meter.spread("tool_call_counts", of_each(lambda response: response.tools["tool_calls"]))
    meter.spread("timing_s/agent_loop/tool_calls", of_each(lambda response: response.tools["tool_s"]))
    meter.mean("episode/tool_errors", of_each(lambda response: response.tools["tool_errors"]))
    meter.mean("episode/num_sequences", of_each(lambda response: 1 + len(response.earlier)))
    meter.mean("episode/dropped_frac", of_each(lambda response: response.end_reason in dropped))
    for reason in END_REASONS:
        meter.mean(f"episode/{reason}_frac", of_each(lambda response, reason=reason: response.end_reason == reason))

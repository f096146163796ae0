"""Episodes of many turns: the engine decodes while users' coroutines, each in its own process, run tools.

Between two steps of the engine, every episode with a pending request is served: it asks for the model's next turn,
which is queued, or it ends. All ranks of an engine run the same loop. The first rank owns the processes and sends their
messages to the other ranks.
"""

import resource
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.dataset.images import Images, check_sequence, embedding_size, show
from common.dataset.store import template_arguments
from common.engine.base import Engine, Request, Until
from common.episodes.metrics import environment_of
from common.episodes.replies import Parse, reply_of, seed_of_reply
from common.flags.data import TemplateConfig
from common.flags.rollout import RolloutConfig
from common.flags.rules import check_at_least
from common.parallel.ranks import World
from envs.pictures import joined
from envs.runtime.conversation import ChatTemplate, Conversation, FlagError, constrains
from envs.runtime.processes import EpisodeProcesses
from envs.runtime.response import Episode, Response, response_of
from envs.runtime.template import check_tokens
from envs.runtime.tool_calls import make_parser
from rewards.runtime.replies import failure_of

SLICE_S = 1.0  # while all episodes wait for tools, stop signals are looked for this often
OTHER_FILES = 100  # open files that a rank has beside one an episode


@dataclass
class Episodes:
    """The processes and settings that episodes need beside the engine."""

    config: RolloutConfig
    template: ChatTemplate
    max_sequence_length: int
    processes: EpisodeProcesses | None  # None on all ranks of an engine but its first
    parse: Parse | None
    kept: dict[Hashable, Episode] = field(default_factory=dict)  # that go on between two rollouts
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)  # a request to the engine -> episode, conversation
    num_asked: int = 0
    num_restarted: int = 0  # episodes in the last call of `run` that had replies and lost their process

    def run(self, engine: Engine, requests: Sequence[Request], sampling: RolloutConfig,
            on_end: Callable[[int, Response, dict[str, Any]], None], until: Until,
            keep: bool = False) -> None:
        """Run an episode for each request. `on_end(i, response, reply)` is called as episode i ends, with the last
        message of its process. Where `until` ends sampling, no more is sampled. `keep`: the processes of unfinished
        episodes go on until the next call with `keep`, whose requests continue them. Otherwise an unfinished episode
        restarts; the model's earlier replies are replayed to it as long as the environment repeats what it said
        before."""
        engine.begin(until.stop)
        self.num_restarted = 0
        keys = [(request.seed, *request.prompt.tokens) for request in requests]
        if keep:
            self.end_kept(but=keys)
        waiting = [i for i, request in enumerate(requests) if not request.response.finish_reason]
        place = {i: n for n, i in enumerate(engine.order(requests))}
        waiting.sort(key=lambda i: (keys[i] not in self.kept, place[i]), reverse=True)      # the last one starts first
        running: dict[int, Episode] = {}
        while (running or waiting) and not until.is_complete() and not engine.stop():
            while waiting and len(running) < self.config.episodes_at_once:
                number = waiting.pop()
                running[number] = self.start(engine, number, requests[number], sampling, keys[number])
            self.serve(engine, running, sampling, on_end)
            is_ready = True
            if self.config.lockstep:
                is_ready = all(episode.num_asked for episode in running.values())
            if is_ready and engine.has_unfinished():
                self.decode(engine, running)
        for request, part in engine.abort(set(self.asked)):
            number, conversation = self.asked[request]
            running[number].replies(conversation)[-1].extend(part, finish_reason="")
        self.asked = {}
        if keep:
            for number, episode in running.items():
                self.keep_episode(keys[number], number, episode)
        if self.processes is not None:
            self.processes.end_all(with_strays=not self.kept)  # which may belong to those that go on

    def serve(self, engine: Engine, running: dict[int, Episode], sampling: RolloutConfig,
              on_end: Callable[[int, Response, dict[str, Any]], None]) -> None:
        """Queue the turns that the processes have asked for, and end the episodes that are done."""
        heard: list[tuple[int, dict[str, Any]]] = []
        if self.processes is not None:
            nothing_else_to_do = self.config.lockstep or not engine.has_unfinished()
            wait_s = SLICE_S if nothing_else_to_do else 0.0
            heard = self.processes.events(wait_s, wait_for_all=self.config.lockstep)
        for number, message in engine.from_first_rank(heard):
            if number not in running:  # it has been ended
                continue
            episode = running[number]
            episode.tool_s += message.get("seconds", 0.0)
            if "messages" in message:
                message = self.next_turn(engine, number, episode, message, sampling)
            if message is not None:
                del running[number]
                own = {request for request, (owner, _) in self.asked.items() if owner == number}
                engine.abort(own)
                on_end(number, response_of(episode, message), message)

    def decode(self, engine: Engine, running: dict[int, Episode]) -> None:
        """One step of the engine. Replies that are complete go to their episodes."""
        for request, part in engine.step():
            number, conversation = self.asked.pop(request)
            running[number].replies(conversation)[-1].extend(part, part.finish_reason)
            self.take_reply(number, running[number], conversation)

    def keep_episode(self, key: Hashable, number: int, episode: Episode) -> None:
        """Keep an unfinished episode, and its process, for the next rollout."""
        self.kept[key] = episode
        episode.process = None
        if self.processes is not None:
            episode.process = self.processes.running.pop(number)

    def end_kept(self, but: Sequence[Hashable] = ()) -> None:
        for key in self.kept.keys() - set(but):
            episode = self.kept.pop(key)
            if episode.process is not None:
                episode.process.end()

    def start(self, engine: Engine, number: int, request: Request, sampling: RolloutConfig, key: Hashable) -> Episode:
        """Start an episode, or continue it where it is."""
        if key in self.kept:
            return self.go_on(engine, number, request, key)
        prompt = request.prompt
        files = prompt.images.files if prompt.images else []
        if request.response.earlier:
            self.num_restarted += 1
        if self.processes is not None:
            self.processes.start(number, {
                "environment": environment_of(prompt, self.config.episode),
                "row": prompt.row | {"images": files} if prompt.images else prompt.row,
                "seed": request.seed,
                "messages": prompt.messages,
                "tokens_left": sampling.max_response_length,
            })
        messages = [*prompt.messages]                           # which the conversation appends to
        if files:
            place = self.template.place
            messages = [m | {"content": m["content"].replace("<image>", place)} for m in messages]
        conversation = Conversation(self.template, self.config.rewritten_history, prompt.tokens, messages)
        conversation.images = files
        return Episode({0: conversation}, request.seed, prompt, request.response)

    def go_on(self, engine: Engine, number: int, request: Request, key: Hashable) -> Episode:
        """Continue an episode that was kept, where it is."""
        episode = self.kept.pop(key)
        episode.begun = request.response
        if self.processes is not None:
            self.processes.running[number] = episode.process
        waiting = [asked for asked, conversation in episode.conversations.items() if conversation.asked]
        for asked in waiting:
            self.sample(engine, number, episode, asked)
        return episode

    def next_turn(self, engine: Engine, number: int, episode: Episode, message: dict[str, Any],
                  sampling: RolloutConfig) -> dict[str, Any] | None:
        """Queue the model's next turn, or refuse it. An error ends the episode: returns what its process would say."""
        try:
            asked = message["conversation"]
            refusal = self.prepare(episode, message, sampling)
            if not refusal:
                self.sample(engine, number, episode, asked)
        except FlagError:
            raise
        except Exception as error:  # of the chat template, of a message, of the engine: what one episode can cause
            if self.processes is not None:
                self.processes.running[number].end()
            return failure_of(error)
        if refusal:
            episode.end_reason = refusal
            self.tell(number, episode, {"conversation": asked, "text": None, "finish_reason": refusal})
        return None

    def prepare(self, episode: Episode, message: dict[str, Any], sampling: RolloutConfig) -> str:
        """Add the messages to their conversation, and the reply to sample, which may be there already. Returns why
        there is none: turns or length; else ""."""
        if message["tools"] and self.parse is None:
            raise FlagError("chat.tools needs --rollout.tool-parser: nothing reads the calls that the model writes")
        is_by_tokens = self.config.engine == "hf" or self.config.in_flight > 1
        if message["stop"] and is_by_tokens:
            raise FlagError("chat.reply(stop=...) needs --rollout.engine vllm and --rollout.in-flight 1: tokens alone "
                            "are carried over to the next step, not a text that is half written")
        if message["schema"] is not None and not constrains():
            raise FlagError("chat.reply(schema=...) needs the environment variable AGENT_STRUCTURED=constrain")
        if episode.num_turns + episode.num_asked >= self.config.max_turns:
            return "turns"
        conversation = episode.conversations.get(message["conversation"])
        if conversation is None:
            conversation = Conversation(self.template, self.config.rewritten_history, [], [], role=message["role"])
        shorten = partial(self.template.shortened, limit=self.config.tool_result_tokens)
        new, files = joined(message["messages"], self.template.place, shorten)
        images = [*conversation.images, *files]
        if conversation.num_replies:
            prompt = conversation.prompt
            between = conversation.between(new, files)
        else:
            prompt = conversation.begin(new, message["tools"], files)
            between = []
        if between is None:
            seen = self.template.encode(conversation.next_rendered, images)
        else:
            seen = [*prompt, *conversation.tokens, *between]
        tokenizer = self.template.tokenizer
        check_sequence(seen, images, tokenizer.name_or_path)
        check_tokens(seen, tokenizer, embedding_size(tokenizer.name_or_path))
        added = episode.num_tokens + len(between or [])
        room = min(sampling.max_response_length - added, self.max_sequence_length - len(seen))
        if room < 1:
            return "length"
        temperature = message["temperature"]
        if temperature is None:
            temperature = sampling.temperature
        episode.conversations[message["conversation"]] = conversation
        conversation.prompt = prompt
        conversation.add_messages(new, between, files)
        conversation.room = room
        conversation.asked = replace(
            sampling,
            max_response_length=min(room, message["max_tokens"] or room),
            temperature=temperature,
            stop=(*sampling.stop, *message["stop"]),
        )
        conversation.schema = message["schema"]
        is_trained = temperature == sampling.temperature
        episode.next_reply(message["conversation"], between or conversation.prompt, is_trained, files)
        return ""

    def sample(self, engine: Engine, number: int, episode: Episode, asked: int) -> None:
        """Let the engine write the next reply, or the rest of it. One that is complete is taken as it is."""
        conversation = episode.conversations[asked]
        sampling = conversation.asked
        reply = episode.replies(asked)[conversation.num_replies]
        if reply.finish_reason:
            self.take_reply(number, episode, asked)
            return
        seed = None                                             # greedy
        if episode.seed is not None and sampling.temperature:
            seed = seed_of_reply(episode.seed, asked, conversation.num_replies, len(reply.tokens))
        images = None
        if conversation.images:
            images = Images(conversation.images, self.template.tokenizer.name_or_path)
        self.num_asked += 1
        self.asked[self.num_asked] = (number, asked)
        engine.add(
            self.num_asked,
            [*conversation.prompt, *conversation.tokens, *reply.tokens],
            seed,
            replace(sampling, max_response_length=sampling.max_response_length - len(reply.tokens)),
            images,
            conversation.schema,
        )

    def take_reply(self, number: int, episode: Episode, asked: int) -> None:
        """Add the next reply, which is complete, and send it to the episode."""
        conversation = episode.conversations[asked]
        response = episode.replies(asked)[conversation.num_replies]
        is_truncated = response.finish_reason == "length" and len(response.tokens) == conversation.room
        reply = reply_of(self.template, self.parse, conversation, response)
        conversation.asked = None
        episode.num_turns += 1
        episode.end_reason = "length" if is_truncated else "done"
        self.tell(number, episode, {"conversation": asked} | reply)

    def tell(self, number: int, episode: Episode, reply: dict[str, Any]) -> None:
        if self.processes is not None:
            tokens_left = max(self.config.max_response_length - episode.num_tokens, 0)
            self.processes.tell(number, reply | {"tokens_left": tokens_left})


def start_episodes(config: RolloutConfig, tokenizer: Any, template_config: TemplateConfig, stops: Sequence[int],
                   max_sequence_length: int, world: World) -> Episodes | None:
    """Start the processes of episodes; None without --rollout.episode. Raises ValueError for flags that cannot work."""
    if not config.episode or not world.samples:
        return None
    if template_config.template == "plain":
        raise ValueError("--rollout.episode needs a chat template between turns, --data.template is plain")
    config = replace(config, episodes_at_once=config.episodes_at_once or config.max_num_seqs or 256)
    check_at_least(1, {"--rollout.max-turns": config.max_turns, "--rollout.episodes-at-once": config.episodes_at_once})
    if not 0 < config.tool_timeout_s <= 1e9:  # sockets take no more, nor infinity
        raise ValueError(f"--rollout.tool-timeout-s {config.tool_timeout_s:g} must be above 0 and at most 1e9")
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < config.episodes_at_once + OTHER_FILES:
        raise ValueError(f"--rollout.episodes-at-once {config.episodes_at_once} needs an open file each, and this "
                         f"process may have {most_files} in all: lower it, or raise `ulimit -n`")
    arguments = template_arguments(tokenizer, template_config)
    template = ChatTemplate(tokenizer, arguments, stops, partial(show, model=tokenizer.name_or_path))
    parse = make_parser(config.tool_parser, tokenizer) if config.tool_parser else None
    processes = None
    if world.rank % config.tp == 0:
        processes = EpisodeProcesses(config.episode, config.tool_timeout_s)
    return Episodes(config, template, max_sequence_length, processes, parse)

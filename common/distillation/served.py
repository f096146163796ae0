"""A teacher behind a server: what it says of the sampled sequences, and the divergence from its k best words.

The server tells the log-probs q of its k best words of each token. All other words are one class, the rest, whose
probability is 1 minus theirs; the policy's p of the same k words, and its rest, make a distribution over the same
k + 1 classes. So every divergence is defined, is 0 where both distributions are equal, and is at most that over the
whole vocabulary. This is the top-K distillation with a tail term of Huebotter et al. 2026 (SDPO, arXiv 2601.20802),
there with the K best words of the policy; sums over k words without the rest are no divergence, and can be negative.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.batch import Batch
from common.distillation.cache import Answer, Cache, key_of
from common.distillation.client import Client, ServerError
from common.flags.served import Address, ServedConfig, is_served, read_address
from common.kernels import Head
from common.kernels.top_k import ABSENT, linear_top_k
from common.metrics import Meter
from common.parallel.ranks import all_gather_objects, on_main, together
from common.rollout import Rollout

START_S = 10.0  # for which a request is repeated at the start: nothing was computed yet that could be lost
MAX_CHANGE = 0.25  # nats by which the best words' log-probs may differ on average: bfloat16 rounds by about 0.02
LEAST_REST = 1e-7  # probability of the teacher's rest: 1 minus a sum of float32 numbers is no more exact
# What tokenizers write differently: digits, spaces, capitals, other scripts, symbols, bytes that are no letters.
TEXT = ("The 12,345 tokens' end:\n\n\tdef f(x):  return x**2 # \u00e9\u00df \u4f60\u597d \u043f\u0440\u0438 "
        "\U0001f600 \ufffd\r\n  OK?")


class BestWords(NamedTuple):
    """What a served teacher says of the N sampled tokens of a micro-batch."""

    words: Tensor  # [N, k] int, -1: none
    logps: Tensor  # [N, k] float32


class Probes(NamedTuple):
    """What is compared between the server and this run."""

    tokenizer: Any
    vocabulary: int  # rows of the policy's embedding
    tokens: list[int]  # of a prompt of the data
    max_length: int  # most tokens of a prompt and its response


class ServedTeacher:
    """One teacher behind a server, and what it has answered."""

    def __init__(self, address: Address, k: int, config: ServedConfig, cache: Path, probes: Probes,
                 has_stopped: Callable[[], bool]):
        """`address` with the model's name, as `check_server` returned it."""
        self.client = Client(address, config, has_stopped)
        self.k = k
        self.vocabulary = probes.vocabulary
        self.concurrency = config.concurrency
        self.cache = Cache(cache)

    def whole_head(self) -> None:
        """It has none here: a model of this process gives its output head."""

    def answers(self, sequences: dict[str, tuple[list[int], int]]) -> tuple[dict[str, Answer], int]:
        """What the teacher says of this rank's sequences, key -> (tokens, where the response begins), and how many
        of them this rank asked for. A sequence that several ranks have is asked for by the first of them. All ranks
        call this together."""
        missing = [key for key in sequences if key not in self.cache]
        taken: set[str] = set()
        for earlier in all_gather_objects(missing)[: rank_of_process()]:
            taken.update(earlier)
        mine = [key for key in missing if key not in taken]
        together(partial(self._ask, {key: sequences[key] for key in mine}), ServerError)
        self.cache.refresh()
        unseen = [key for key in sequences if key not in self.cache]  # another rank's, on a disk that is not shared
        together(partial(self._ask, {key: sequences[key] for key in unseen}), ServerError)
        return self.cache.read(sequences), len(mine) + len(unseen)

    def _ask(self, sequences: dict[str, tuple[list[int], int]]) -> None:
        """Ask for these sequences. Those that were answered before an error are kept."""
        found: dict[str, Answer] = {}
        with ThreadPoolExecutor(self.concurrency) as threads:
            asked = {}
            for key, (tokens, first) in sequences.items():
                asked[threads.submit(self.client.top_k, tokens, first, self.k, self.vocabulary)] = key
            try:
                for done in as_completed(asked):
                    found[asked[done]] = done.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                self.cache.put(dict(sorted(found.items())))


def rank_of_process() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def has_signal(watchdog: Any) -> bool:
    """A stop signal came: a server that is gone is not waited for."""
    return bool(watchdog.signal)


def start_teachers(run: Any, paths: Iterable[str], k: int, config: ServedConfig) -> list[ServedTeacher]:
    """Those of the teachers that are behind servers, before any model is loaded. Raises ValueError on all ranks, in one
    line, for a server that is not there or cannot be a teacher of this run. All ranks call this together."""
    addresses = [read_address(path) for path in paths if is_served(path)]
    if not addresses or "train_set" not in vars(run):  # tools.plan has read no data, and asks nobody
        return []
    if run.images is not None:
        raise ValueError(f"--teacher {addresses[0].url}: a teacher behind a server reads no images: choose a teacher "
                         f"of this process, or data without images")
    vocabulary = run.hf_config.get_text_config().vocab_size
    probes = Probes(run.tokenizer, vocabulary, [*run.train_set[0].tokens], run.max_sequence_length)
    args = run.args
    folder = Path(config.cache or f"{args.run_dir}/teacher")
    teachers = []
    for given in addresses:
        address, cache = on_main(run.world, partial(check_server, given, k, config, folder, probes))
        teachers.append(ServedTeacher(address, k, config, cache, probes, partial(has_signal, run.watchdog)))
    return teachers


def check_server(address: Address, k: int, config: ServedConfig, folder: Path, probes: Probes) -> tuple[Address, Path]:
    """The address with the model's name, and the folder of its answers. Raises ValueError if the server is not there,
    has another model than named or that answered before, another tokenizer, or too short a context; or if it gives no k
    log-probs of a prompt."""
    if k >= probes.vocabulary:
        raise ValueError(f"--top-k {k} must be below the {probes.vocabulary} words of --model")
    client = Client(address, config)
    served = client.call("/models", None, 1 << 24, START_S)
    limits = {}
    match served:
        case {"data": [*models]}:
            limits = {str(model.get("id")): model.get("max_model_len") for model in models if isinstance(model, dict)}
    name = address.model
    if not name and len(limits) == 1:
        name = next(iter(limits))
    if name not in limits:
        raise client.error(f"serves the models {', '.join(limits) or 'none'}: name one of them, as in "
                           f"{address.url}#MODEL")
    if isinstance(limits[name], int) and limits[name] <= probes.max_length:
        raise client.error(f"{name} takes {limits[name]} tokens, and must take the {probes.max_length} of a prompt and "
                           f"its response, and one more: start it with a larger --max-model-len")
    client.address = address = address._replace(model=name)
    check_tokenizer(client, probes)
    label = re.sub(r"[^\w.-]", "_", name)[-60:]
    digest = hashlib.sha256(json.dumps([name, address.revision, k]).encode()).hexdigest()[:12]
    cache = folder / f"{label}-k{k}-{digest}"
    check_model(client, k, cache, probes)
    return address, cache


def check_tokenizer(client: Client, probes: Probes) -> None:
    """Raises ValueError if the server writes texts in other tokens: a text of many scripts, a prompt of the data with
    its special tokens, and the added tokens one by one."""
    tokenizer = probes.tokenizer
    texts = [TEXT, tokenizer.decode(probes.tokens), "".join(sorted(tokenizer.get_added_vocab())[:100])]
    for text in filter(None, texts):
        ours = tokenizer(text, add_special_tokens=False).input_ids
        if len(ours) > probes.max_length:
            text = tokenizer.decode(ours[: probes.max_length])
            ours = tokenizer(text, add_special_tokens=False).input_ids
        theirs = client.tokens_of(text, START_S)
        if ours != theirs:
            t = next((t for t, (own, other) in enumerate(zip(ours, theirs)) if own != other), len(theirs))
            raise client.error(f"must have the tokens of --model: what --model writes as {ours[t : t + 3]}, "
                               f"{tokenizer.decode(ours[t : t + 3])!r}, it writes as {theirs[t : t + 3]}")


def check_model(client: Client, k: int, cache: Path, probes: Probes) -> None:
    """Ask for the log-probs of a prompt; raises ValueError if the server gives no k of them, or if the folder's answers
    are those of a model that said otherwise of the prompt that it was asked for first."""
    file = cache / "first.json"
    if not file.is_file():
        tokens = [*probes.tokens, probes.tokens[-1]]  # a second one, where there is only one
        words, logps = client.top_k(tokens, 1, k, probes.vocabulary, START_S)
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / "first.part"
        part.write_text(json.dumps({"tokens": tokens, "words": words[:, 0].tolist(), "logps": logps[:, 0].tolist()}))
        os.replace(part, file)
        return
    before = json.loads(file.read_text())
    words, logps = client.top_k(before["tokens"], 1, k, probes.vocabulary, START_S)
    was = np.array(before["words"])[:, None] == words                                           # [n, k]
    # a word that is none of the k best now has at most the log-prob of the last of them
    now = np.where(was.any(axis=1), np.where(was, logps, -np.inf).max(axis=1), logps[:, -1])    # [n]
    change = float(np.abs(now - np.array(before["logps"])).mean())
    if change > MAX_CHANGE:
        raise client.error(f"is another model than the one whose answers are in {cache}: the log-prob of its best word "
                           f"differs by {change:.2g} nats. Give it a revision, {client.address.url}#"
                           f"{client.address.model}@2, or delete the folder")


def write_best_words(rollout: Rollout, in_loss: Tensor, teachers: Sequence[ServedTeacher], meter: Meter) -> None:
    """Write what each sequence's teacher says of its response into `rollout.batch.extra`: best_words int32 [T, k],
    -1 elsewhere, and best_logps float32 [T, k]. Only responses of `in_loss` [S] are asked for. A sequence's teacher is
    the one with the number in `response_extra["teacher"]`. All ranks call this together.

    Adds to `meter` the share of sequences that were asked for, and the mean probability of the teachers' rest."""
    batch = rollout.batch
    numbers = batch.response_extra["teacher"]                                                # of this rank's sequences
    best_words = torch.full((len(batch.tokens), teachers[0].k), -1, dtype=torch.int32)
    best_logps = torch.full_like(best_words, ABSENT, dtype=torch.float32)
    parts = []
    for start, number, (_, sample, prompt, response) in zip(batch.cu_seqlens.tolist(), numbers.tolist(),
                                                            rollout.sequences()):
        if in_loss[sample.index] and response.tokens:
            tokens = [*prompt, *response.tokens]
            parts.append((number, key_of(tokens, len(prompt)), start, tokens, len(prompt)))
    num_asked = 0
    for number, teacher in enumerate(teachers):
        sequences = {key: (tokens, first) for of, key, _, tokens, first in parts if of == number}
        found, num_new = teacher.answers(sequences)
        num_asked += num_new
        for of, key, start, tokens, first in parts:
            if of != number:
                continue
            words, logps = found[key]
            place = slice(start + first, start + len(tokens))
            best_words[place] = torch.from_numpy(words)
            best_logps[place] = torch.from_numpy(logps).clamp(min=ABSENT)
    batch.extra["best_words"] = best_words
    batch.extra["best_logps"] = best_logps
    is_asked = [True] * num_asked + [False] * (len(parts) - num_asked)
    meter.mean("perf/teacher_asked_frac", torch.tensor(is_asked))
    is_known = (best_words[:, 0] >= 0) & batch.mask
    rest = rest_of(BestWords(best_words[is_known], best_logps[is_known])).exp()
    meter.mean("distillation/rest", rest)


def best_words(batch: Batch) -> BestWords:
    """What `write_best_words` wrote, of the sampled tokens of a micro-batch."""
    return BestWords(batch.extra["best_words"][batch.sampled], batch.extra["best_logps"][batch.sampled])


def rest_of(theirs: BestWords) -> Tensor:
    """[N, k] -> float64 [N]: log of the probability of all other words, at least LEAST_REST."""
    named = theirs.logps.double().exp().where(theirs.words >= 0, 0.0).sum(dim=1)
    return (1 - named).clamp(min=LEAST_REST).log()


def classes(student: tuple[Tensor, Head], theirs: BestWords, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the policy, from its hidden states [N, H] and its head, and of the teacher over the k best words of
    the teacher and the rest: [N, k + 1] each, the first with a gradient. Both are ABSENT where a word is none."""
    hidden, head = student
    logp = linear_top_k(hidden, head, theirs.words, temperature)
    named = theirs.logps.where(theirs.words >= 0, ABSENT)
    logq = torch.cat([named.to(logp.dtype), rest_of(theirs)[:, None].to(logp.dtype)], dim=1)
    return logp, logq

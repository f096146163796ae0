"""Four made-up responses logged on one rank or on two: used by test_record.py and test_view_page.py, and run under
torchrun as `log_worker.py FOLDER`."""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from common.batch import Batch
from common.metrics import Meter, Timer
from common.parallel import ranks
from common.prompts import Prompt
from common.rollout import Response, Rollout, Sample
from common.rollouts.record import Recorder, write_step, write_validation
from common.tracking.logger import LogConfig
from common.tracking.step import rollout_metrics, step_metrics

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ["What is 2 + 3?", "How many apples </script> <b>& pears</b>?"]
RESPONSES = ["5", "2 + 3 = 5\n#### 5", "naïve 🍎 apples", "<img src=x onerror=alert(1)></script>{{data}}"]
GROUP = 2


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models/SmolLM2-135M-Instruct")


def tokens(tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Of the four prompts and responses."""
    prompts = [tokenizer(PROMPTS[i // GROUP])["input_ids"] for i in range(4)]
    return prompts, [tokenizer(text)["input_ids"] for text in RESPONSES]


def samples(tokenizer, mine: list[int]) -> list[Sample]:
    """What a rank sampled and scored: these of the four."""
    prompts, responses = tokens(tokenizer)
    return [
        Sample(
            i, i // GROUP, 0, Prompt(prompts[i], "sums", 5 + i // GROUP, {}, []),
            Response(responses[i], [-(t + 1) / (i + 1) for t in range(len(responses[i]))],
                     "length" if i == 3 else "stop"),
            text=tokenizer.decode(responses[i], skip_special_tokens=True), score=[1.0, 0.0, 0.5, 0.0][i],
            extras={"acc": i / 4, "pred": f"<i>{i}"} if i else {},
        )
        for i in mine
    ]


TURNS = [("assistant", "I ask: <<6*7>>"), ("tool", "42 </script><b>"), ("assistant", "#### 42")]


def episode(tokenizer, index: int = 0) -> Sample:
    """An episode of two turns with a tool's result between them, as the engine gives it."""
    pieces = [tokenizer(text)["input_ids"] for _, text in TURNS]
    mask = [role == "assistant" for (role, _), piece in zip(TURNS, pieces) for _ in piece]
    found = [token for piece in pieces for token in piece]
    messages = [{"role": "user", "content": PROMPTS[0]}, *({"role": role, "content": text} for role, text in TURNS)]
    messages[2]["name"] = "calculator"
    response = Response(found, [-0.5 * sampled for sampled in mask], "stop", mask, num_turns=2, end_reason="done",
                        messages=messages)
    prompt = Prompt(tokenizer(PROMPTS[0])["input_ids"], "sums", 42, {}, [])
    return Sample(index, 0, 0, prompt, response, text=tokenizer.decode(found), score=1.0)


def microbatch(tokenizer, mine: list[int]) -> Batch:
    """What a rank trained on: these of the four, after a dummy, with numbers that say whose they are. Token t of
    response i has old_logp -(i + t / 100), advantage i, entropy t, ratio 1 + i / 10, and is clipped where t is 1."""
    prompts, responses = tokens(tokenizer)
    batch = Batch.build([[7, 8], *(prompts[i] for i in mine)], [[9], *(responses[i] for i in mine)],
                        index=[90, *mine])
    batch.index[0], batch.mask[:3] = -1, False
    i = batch.index[batch.sequence_ids].float()                         # [T]
    first = torch.tensor([2, *(len(prompts[i]) for i in mine)])
    t = (batch.sequence_positions - first[batch.sequence_ids]).float()
    batch.old_logp, batch.advantage = -(i + t / 100), i * batch.mask
    batch.last_pass = {"logp": batch.old_logp, "entropy": t, "actor/ratio": 1 + i / 10,
                       "actor/pg_clipfrac": (t == 1).float(), "actor/pg_clipfrac_lower": 0 * t}
    return batch


def scored(group: torch.Tensor, samples: list[Sample]) -> SimpleNamespace:
    """A rollout of responses in these groups, none of them of several sequences; `samples`: this rank's."""
    return SimpleNamespace(group=group, num_sequences=torch.ones(len(group)), samples=samples)


def record(run_dir: Path, sampled: list[int], trained: list[int], config: LogConfig, step: int = 1) -> None:
    """One step's file, of a rank that sampled and trained on these."""
    tok = tokenizer()
    rewards = torch.tensor([1.25, 0.0, 0.5, -0.5], dtype=torch.float64)
    rollout = scored(torch.arange(4) // GROUP, samples(tok, sampled))
    write_step(Recorder(config, run_dir, tok), step, rollout, [[microbatch(tok, trained)]], rewards)


def metrics(rank: int, size: int) -> dict[str, float]:
    """A step of four responses, dealt to one or two ranks."""
    mine = [[0, 1, 2, 3]] if size == 1 else [[0, 3], [1, 2]]
    differences = [[0.1, 0.3], [0.2], [0.0, 0.4, 0.2], []]              # a number per token of each response
    meter, timer = Meter(), Timer()
    world = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), num_samplers=0)
    for i in mine[rank]:
        values = torch.tensor(differences[i], dtype=torch.float64)
        meter.mean("training/rollout_probs_diff_mean", values)
        meter.max("training/rollout_probs_diff_max", values)
        meter.spread("critic/values", values - 1, values < 0.35)
        meter.total("actor/pg_loss", values.sum(), per=2)
        meter.mean("never", values, values > 9)
        meter.max("never", values[values > 9])
    prompt_lengths, response_lengths = torch.tensor([3.0, 3, 8, 8]), torch.tensor([2.0, 4, 10, 1])
    lengths = (prompt_lengths + response_lengths).long()
    timer.seconds |= {"gen": 2.0, "reward": 0.5, "update_actor": 4.0, "adv": 0.1}
    scores = torch.tensor([1.0, 0.0, 0.5, torch.nan], dtype=torch.float64)
    rollout = Rollout(
        [], scores, group=torch.arange(4) // GROUP, row=torch.arange(4) // GROUP,
        step=torch.zeros(4, dtype=torch.int64), prompt_lengths=prompt_lengths, response_lengths=response_lengths,
        other_lengths=torch.zeros(4), num_sequences=torch.ones(4), truncated=torch.tensor([False, False, True, False]),
    )
    minibatches = [[SimpleNamespace(tokens=torch.zeros(int(lengths[i])))] for i in mine[rank]]
    found = step_metrics(meter, timer, world, rollout.sequence_lengths, minibatches, (8e9, 5e9, 0))
    return found | rollout_metrics(rollout, 17, 2.0, max_prompt_length=8, max_response_length=10)


if __name__ == "__main__":
    folder, world = Path(sys.argv[1]), ranks.init()
    (folder / f"metrics_{world.rank}.json").write_text(json.dumps(metrics(world.rank, world.size)))
    record(folder, [[0, 1], [2, 3]][world.rank], [[2], [1, 0]][world.rank], LogConfig())
    of_validation = samples(tokenizer(), [[0, 3], [1, 2]][world.rank])
    write_validation(Recorder(LogConfig(), folder, tokenizer()), 20, of_validation)
    ranks.shutdown()

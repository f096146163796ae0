"""Router replay of the engine's choice: what the engines tell, on its way to the log-probs of the trainer."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.engine.vllm import to_response
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import Prompt
from common.rollout import Layout, Response, Sample, to_minibatches
from common.rollouts.gather import gather_rollout
from envs.runtime.conversation import ChatTemplate, Conversation
from tests.conftest import launch
from tests.engine.engine_models import make_model
from tests.engine.in_flight_runs import NoText
from tests.generate import generate
from tests.model.test_policy import save_model
from tests.model.test_router_replay import FAMILIES

PROMPTS = [[5, 17, 30, 41]] * 9 + [[7], [7] * 9]                       # more than a block; a prompt without a cache
CONFIG = ModelConfig(compute_dtype="float32", router_replay="rollout")


@torch.no_grad()
def experts_of(lm: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[tokens, layers, k], sorted, by hooks on transformers' own routers."""
    found = []
    routers = [module for module in lm.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda *call: found.append(call[2][2])) for router in routers]
    lm(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])           # the second has a dense layer first
def test_what_the_hf_engine_tells_is_replayed(family, world, tmp_path):
    """It is what transformers' routers choose on the whole sequence, and replaying it changes no bit."""
    model = save_model(FAMILIES[family], tmp_path)
    hf_config = read_config(model, CONFIG)
    rollout = RolloutConfig(engine="hf", max_response_length=6)
    engine = make_engine(EngineSetup(model, hf_config, rollout, CONFIG, world, PROMPTS[-2:], [2], 64, 0))
    policy = load_policy(model, CONFIG, world)
    engine.wake(policy)
    responses = generate(engine, PROMPTS, range(len(PROMPTS)), SamplingConfig(1.0, 6))
    engine.sleep()
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    told = []
    for prompt, response in zip(PROMPTS, responses):
        want = experts_of(lm, [*prompt, *response.tokens])
        assert torch.equal(response.routing.long().sort(-1).values, want[:-1])
        told.append(torch.cat([response.routing, torch.full_like(response.routing[-1:], -1)]))
    assert len({str(rows[-2].tolist()) for rows in told}) > 3           # experts differ, else this shows nothing

    samples = [Sample(i, i // 9, i // 9, Prompt(prompt, "", "", {}, []), response, score=1.0)
               for i, (prompt, response) in enumerate(zip(PROMPTS, responses))]
    samples[3].response = Response([], [], "stop")                      # of an episode that ended before its first turn
    told[3] = torch.full_like(told[3][:4], -1)
    gathered = gather_rollout(samples)
    [minibatch] = to_minibatches(gathered, gathered.has_score, Layout(hf_config, world, 1, max_tokens=40, seed=0))
    for batch in minibatch:
        own = Batch(batch.tokens, batch.mask, batch.cu_seqlens, batch.index, batch.number)
        assert torch.equal(policy.score(batch, 1.0), policy.score(own, 1.0))
        assert policy.router_changed is None
        policy.score(batch, 1.0)
        assert not policy.router_changed.any()
    whole = Batch.cat(minibatch.microbatches).sort()
    assert torch.equal(whole.routing, torch.cat(told))
    whole.routing[whole.routing >= 0] = 5 - whole.routing[whole.routing >= 0]
    assert (policy.score(whole, 1.0) - whole.rollout_logp)[whole.mask].abs().max() > 0.01


@pytest.mark.parametrize("kind", ["vllm", pytest.param("hf", marks=pytest.mark.sweep)])
def test_routers_in_float32_on_both_sides(kind, tmp_path):
    """--policy.router-float32: weights and hidden states of the engine are bfloat16, its logits are not rounded to it
    (to 4e-3). Trainer and engine then differ as little as ever."""
    model = make_model("qwen3_moe", False, tmp_path)
    launch("tests/engine/router_worker.py", model, kind, tmp_path / "found.json", warm=True)
    found = json.loads((tmp_path / "found.json").read_text())
    print(f"\nmean difference of probabilities, by where routers are float32: {found['differences']}")
    assert found["dtypes"] == ["torch.bfloat16 torch.bfloat16 torch.float32"]
    assert 0 < found["error"] < 1e-5
    assert 0 < found["differences"]["both"] < 1.5e-4


def test_what_vllm_tells():
    """An output as vLLM's own class: all layers, the prompt's tokens too, all tokens but the last."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    prompt, tokens, table = [5, 6, 7], [8, 9], np.arange(4 * 3 * 2).reshape(4, 3, 2)
    logprobs = FlatLogprobs(start_indices=[0, 1], end_indices=[1, 2], token_ids=tokens, logprobs=[-0.5, -0.25])

    def output(told):
        completion = CompletionOutput(0, "", tokens, None, logprobs, routed_experts=told, finish_reason="stop")
        return RequestOutput("7", None, prompt, None, [completion], True)

    for dtype in (np.uint8, np.uint16):
        number, response = to_response(output(table.astype(dtype)), [1, 2])
        assert (number, response.tokens, response.logp) == (7, tokens, [-0.5, -0.25])
        assert response.routing.dtype == torch.int16 and response.routing.tolist() == table[:, 1:].tolist()
    assert to_response(output(None), [1, 2])[1].routing is None         # without the flag
    with pytest.raises(AssertionError, match="vLLM told no experts of some of 4 tokens"):
        to_response(output(table[1:]), [1, 2])


def test_the_last_reply_tells_of_the_whole_conversation(monkeypatch):
    """And the last before a rewritten history of what was left behind."""
    monkeypatch.setattr(ChatTemplate, "encode", lambda *_: [1])
    monkeypatch.setattr(ChatTemplate, "decode", lambda *_: "")
    conversation = Conversation(ChatTemplate(NoText(), {}, []), "split", [1], [])
    conversation.add_reply([2], [0.0], "first")
    conversation.add_messages([], [3])
    conversation.add_reply([4], [0.0], "second")
    conversation.add_messages([], None)
    assert (conversation.left_behind[0].routing, conversation.routing) == ("second", None)
    conversation.add_reply([5], [0.0], "third")
    assert (conversation.left_behind[0].routing, conversation.routing) == ("second", "third")

"""Replies under the grammar of a JSON schema, by the real vLLM: what they are, and of which distribution."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from envs.runtime.conversation import FlagError
from tests.conftest import MODEL
from tests.engine.episode_runs import Runs, make_prompt

pytestmark = [pytest.mark.engine, pytest.mark.sweep]
FLOAT32 = ModelConfig(compute_dtype="float32")
WORDS = ["red", "reddish", "blue"]
ENVIRONMENT = """
async def colour(chat, row):
    first = await chat.reply(schema={"type": "string", "enum": ["red", "reddish", "blue"]})
    second = await chat.reply({"role": "user", "content": "An object?"}, schema={
        "type": "object", "properties": {"n": {"enum": [1, 22, 333]}, "is_odd": {"type": "boolean"}},
        "required": ["n", "is_odd"], "additionalProperties": False})
    return {"score": 1.0, "first": first, "second": second or ""}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def samples(tokenizer, world, tmp_path_factory):
    """Twelve episodes with a real model."""
    file = tmp_path_factory.mktemp("environment") / "colour.py"
    file.write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_STRUCTURED", "constrain")
        stops, hf_config = stop_tokens(str(MODEL), tokenizer), read_config(str(MODEL), FLOAT32)
        config = RolloutConfig(max_response_length=120, episode=f"{file}:colour")
        assert check_rollout(config, hf_config, world, 100, has_correction=True) == 220
        with pytest.raises(ValueError, match=r"AGENT_STRUCTURED=constrain: responses then come from a filtered"):
            check_rollout(config, hf_config, world, 100)
        for flags, text in (({"engine": "hf"}, "constrain needs --rollout.engine vllm"),
                            ({"in_flight": 1.5}, "does not go with AGENT_STRUCTURED=constrain")):
            with pytest.raises(ValueError, match=text):
                check_rollout(replace(config, **flags), hf_config, world, 100, has_correction=True)
        engine = make_engine(EngineSetup(str(MODEL), hf_config, config, FLOAT32, world, [[5, 6, 7]], stops, 400, 0))
        drafting = make_engine(EngineSetup(
            str(MODEL), hf_config, replace(config, drafts=4), FLOAT32, world, [[5, 6, 7]], stops, 400, 0))
        assert engine.probe_every == 1                          # the step's own tokens are no probe
        policy = load_policy(str(MODEL), FLOAT32, world)
        prompts = [make_prompt(tokenizer, n) for n in range(3)]
        drafting.wake(policy)
        run = Runs(drafting, tokenizer, world, engine.stop_token_ids)
        drafted = [run(f"{file}:colour", prompts, num_samples=4, lockstep=True) for _ in range(2)]
        rate = drafting.drafts.metrics()["rollout/spec_accept_rate"]
        engine.wake(policy)
        run = Runs(engine, tokenizer, world, engine.stop_token_ids)
        found = run(f"{file}:colour", prompts, num_samples=4, lockstep=True)
        patch.delenv("AGENT_STRUCTURED")
        with pytest.raises(FlagError, match="needs the environment variable AGENT_STRUCTURED=constrain"):
            run(f"{file}:colour", [make_prompt(tokenizer, 0)])
        engine.close()
        drafting.close()
    for samples in drafted:                                     # no draft changes a reply under a grammar
        assert [sample.response.tokens for sample in samples] == [sample.response.tokens for sample in found]
        off = [abs(a - b) for x, y in zip(samples, found) for a, b in zip(x.response.logp, y.response.logp)]
        assert max(off) < 1e-4
    assert rate > 0.3
    return found


def test_each_reply_obeys_its_schema(samples):
    firsts = {json.loads(sample.extras["first"]) for sample in samples}
    assert firsts <= set(WORDS) and len(firsts) > 1
    for sample in samples:
        found = json.loads(sample.extras["second"])
        assert found.keys() == {"n", "is_odd"} and found["n"] in (1, 22, 333) and type(found["is_odd"]) is bool


def test_log_probs_are_of_the_constrained_distribution(samples, tokenizer):
    """Of a token among those that continue one of the three texts, or end it: transformers' logits, and a mask made by
    trying each token of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    wanted = [f'"{word}"' for word in WORDS]
    checked = 0
    for sample in samples:
        response = sample.response
        length = next(n for n, is_sampled in enumerate(response.mask) if not is_sampled)
        tokens = response.tokens[:length]
        logits = model(torch.tensor([[*sample.prompt.tokens, *tokens]])).logits[0, len(sample.prompt.tokens) - 1 : -1]
        written = ""
        for place, token in enumerate(tokens):
            if written in wanted:
                assert token == tokenizer.eos_token_id
                break
            allowed = [number for number, text in enumerate(texts)
                       if text and any(word.startswith(written + text) for word in wanted)]
            logp = logits[place, allowed].log_softmax(-1)[allowed.index(token)].item()
            assert response.logp[place] == pytest.approx(logp, abs=1e-4), (written, texts[token])
            written += texts[token]
            checked += 1
    assert checked > 24

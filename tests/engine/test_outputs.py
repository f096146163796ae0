"""The short loop of common/engine/outputs.py against vLLM's own: the same responses, and what of it is vLLM's."""

from collections import Counter

import pytest
from vllm.v1.engine import output_processor

from common.engine.base import SamplingConfig
from common.engine.outputs import shorten
from tests.engine.engine_models import PROMPTS, SEEDS, make_model, start
from tests.generate import generate

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("frozen_imports")]
SAMPLING = SamplingConfig(temperature=1.0, max_response_length=20)


@pytest.fixture(scope="module", params=[0, 3], ids=["", "drafts"])
def engine(request, world, tmp_path_factory):
    model = make_model("qwen2", True, tmp_path_factory.mktemp("model"))
    engine, policy = start(model, world, drafts=request.param)
    engine.stop_token_ids = [*range(40)]                                # some responses end early
    engine.wake(policy)
    yield engine
    engine.close()


def sampled(engine, stop=lambda: False) -> list[tuple[list[int], list[float], str]]:
    engine.llm.reset_prefix_cache()
    responses = generate(engine, PROMPTS, SEEDS, SAMPLING, stop=stop)
    return [(response.tokens, response.logp, response.finish_reason) for response in responses]


@pytest.fixture
def by_vllm(engine, monkeypatch):
    """Call it: from then on all is vLLM's own."""
    processor = engine.llm.llm_engine.output_processor
    own = output_processor.OutputProcessor.process_outputs
    return lambda: monkeypatch.setattr(processor, "process_outputs", own.__get__(processor))


def test_responses_are_those_of_vllms_own_loop(engine, by_vllm):
    sampled(engine)                                                     # so that drafts have a history
    engine.measured()
    ours = sampled(engine)
    assert engine.drafts is None or engine.measured()["rollout/spec_accept_length"] > 1.5
    by_vllm()
    assert ours == sampled(engine)
    assert {finish for _, _, finish in ours} == {"stop", "length"}


def test_an_aborted_response_has_all_that_was_sampled(engine, by_vllm):
    def first_passes():
        if engine.drafts is not None:
            engine.drafts.history.clear()                               # it knows how the responses go on
        calls = iter(range(3))
        return sampled(engine, lambda: next(calls, None) is None)

    ours = first_passes()
    by_vllm()
    assert ours == first_passes()
    lengths = [len(tokens) for tokens, _, finish in ours if not finish]
    assert min(lengths) >= 2 and all(len(tokens) == len(logp) for tokens, logp, _ in ours)


@pytest.fixture
def given(engine, monkeypatch):
    """What vLLM's own loop is given: the request's id for each pass of a request."""
    processor = engine.llm.llm_engine.output_processor
    own = output_processor.OutputProcessor.process_outputs.__get__(processor)
    ids = []

    def count(engine_core_outputs, engine_core_timestamp=None, iteration_stats=None, weight_version=None):
        ids.extend(output.request_id for output in engine_core_outputs)
        return own(engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version)

    monkeypatch.setattr(processor, "process_outputs", count)
    shorten(processor)
    return ids


def test_vllm_gets_the_first_and_the_last_pass_of_a_response(engine, given):
    assert max(len(tokens) for tokens, _, _ in sampled(engine)) > 15
    assert set(Counter(given).values()) <= {1, 2}


def test_with_statistics_vllm_gets_all(engine, given, monkeypatch):
    vllm = engine.llm.llm_engine
    monkeypatch.setattr(vllm, "log_stats", True)
    monkeypatch.setattr(vllm.output_processor, "log_stats", True)
    responses = sampled(engine)
    if engine.drafts is None:
        assert len(given) == sum(len(tokens) for tokens, _, _ in responses)
    assert max(Counter(given).values()) > 2


def test_another_vllm_is_left_as_it_is():
    class Processor:
        def process_outputs(self, outputs, stats):
            """Of other parameters."""

    processor = Processor()
    shorten(processor)
    assert "process_outputs" not in vars(processor)

"""What a checkpoint and the samplers' bridge hold of responses."""

import random
from array import array

import pytest
import torch

from envs.runtime.response import Response
from envs.stored import SIZES, join, pack, split, unpack, write_parts


def make_response(size: int, seed: int = 0, **fields) -> Response:
    rng = random.Random(seed)
    tokens = [rng.randrange(150_000) for _ in range(size)]
    return Response(tokens, [*array("f", (-rng.expovariate(1.0) for _ in range(size)))], "stop", **fields)


def make_episode(size: int, seed: int = 0) -> Response:
    """In flight: half of it is what tools said, and four steps sampled it. `{"tokens": ...}` is what a user wrote."""
    mask = [i // 100 % 2 == 0 for i in range(size)]
    versions = [4 * i // sum(mask) + 200_000 for i in range(sum(mask))]
    messages = [{"role": "user", "content": "\0response", "tokens": [1], "arguments": {"logp": [0.5], "x": None}},
                {"role": "assistant", "content": "\ud800\u00fc", "tool_calls": [{"arguments": {"\0response": 1}}]},
                {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"\0response": {"tokens": None}}}]}]
    earlier = make_response(3, prompt=[7, 8], mask=[False, True, True], images=["a" * 64], role="critic")
    return make_response(size, seed, mask=mask, versions=versions, earlier=[earlier], messages=messages, prompt=[],
                         tools={"tool_s": 0.1}, end_reason="done", num_turns=3)


def test_what_is_stored_is_what_is_read():
    items = [{"a": [make_episode(700), None, 0.1]}, [make_response(0), make_response(5)], "\0part", 3]
    assert unpack(pack(items)) == items and unpack(b"") == []
    assert unpack(pack(items) + pack([]) + pack([make_response(9, 1)])) == [*items, make_response(9, 1)]
    assert unpack(pack([Response([3], [float("-inf")])]))[0].logp == [float("-inf")]


def test_messages_of_an_older_version_are_read():
    """It had them as JSON among the other fields."""
    response = make_response(3, messages=[{"role": "user", "content": "a"}])
    packed = pack([response])
    size, num_bytes = SIZES.unpack_from(packed)
    text = packed[SIZES.size :][:size].replace(b'"[{\\"role\\": \\"user\\", \\"content\\": \\"a\\"}]"',
                                               b'[{"role": "user", "content": "a"}]')
    assert len(text) < size
    assert unpack(SIZES.pack(len(text), num_bytes) + text + packed[SIZES.size + size :]) == [response]


@pytest.mark.parametrize("make", [make_response, make_episode])
def test_a_token_has_at_most_nine_bytes(make):
    responses = [make(2000, seed) for seed in range(20)]
    assert 8 < len(pack(responses)) / sum(len(part.tokens) for r in responses for part in r.parts) < 9


def test_log_probs_keep_all_that_training_uses():
    """A batch has them in float32: there, no bit of any number differs."""
    logps = [*torch.randn(1000).exp().neg().tolist(), 0.1, -1e-30, -1e-45]
    found = unpack(pack([Response([1] * len(logps), logps)]))[0].logp
    assert torch.equal(torch.tensor(found, dtype=torch.float32), torch.tensor(logps, dtype=torch.float32))


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(TypeError, match="Response cannot be stored: only JSON and responses without routing can"):
        pack([Response([1], [0.0], routing=torch.zeros(1, 1, 1))])
    with pytest.raises(TypeError, match="set cannot be stored"):
        pack([{1}])
    with pytest.raises(TypeError, match="Response cannot be stored: a state holds only JSON and bytes"):
        split({"script": make_response(3)})
    with pytest.raises(OverflowError):
        pack([Response([2**31], [0.0])])


def test_a_state_is_split_and_joined(tmp_path):
    state = {"step": 3, "script": {"a": b"one", "b": [{"c": b""}, 1.5, None]}}
    plain, parts = split(state)
    assert parts == [b"one", b""] and plain["step"] == 3
    for rank in range(3):
        write_parts(tmp_path, rank, [bytes([rank]) * 2, b""])
    assert join(plain, tmp_path, [0, 2])["script"] == {"a": b"\0\0\2\2", "b": [{"c": b""}, 1.5, None]}


def test_responses_in_the_json_of_an_old_checkpoint_are_refused(tmp_path):
    response = {"tokens": [1], "logp": [0.5], "mask": None}
    old = {"step": 3, "script": {"in_flight": [{"row": 1, "responses": [response]}]}}
    with pytest.raises(ValueError, match=r"holds responses as JSON.*: finish the run with the version that began it"):
        join(old, tmp_path, [0])
    nothing = {"script": {"in_flight": [], "surplus": []}}
    assert join(nothing, tmp_path, [0]) == nothing

"""Each family that is trained most, as a tiny random model: exact."""

import pytest

from common.model.loading import load_policy
from common.model.policy import ModelConfig
from tests.model.families import FAMILIES, REFUSED, WITH_STATE, config_of, measure, save

LOGP = 1e-5                             # of log-probs around 6 in float32; reached: 2e-6, with a state 5e-6
GRADIENT = 2e-5                         # of a weight's gradient; reached: 1.4e-6, of delta nets 1.2e-5
STATE_ENGINE = 2e-4                     # an engine computes a state by tokens, the trainer by chunks; reached: 7e-5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_a_family_is_exact(family, world, tmp_path):
    found = measure(family, tmp_path, world)
    assert found.refused == ""
    assert found.spread > 0.3
    shared = found.shared_logp, found.shared_gradient
    for logp, gradient in ((found.logp, found.gradient), (found.adapted_logp, found.checkpointed_gradient), shared):
        assert logp < LOGP and gradient < GRADIENT
    assert found.engines["hf"] < (STATE_ENGINE if family in WITH_STATE else LOGP)
    assert found.bfloat16 < 0.05
    assert found.num_adapters >= 8 and found.adapts_experts


def test_blocks_that_share_weights_are_refused_in_words(world, tmp_path):
    path = save(config_of("zamba2"), tmp_path)
    with pytest.raises(ValueError, match=r"holds a zamba2 model, .*layers of the kind 'hybrid' can be neither counted"):
        load_policy(path, ModelConfig(compute_dtype="float32"), world)


def test_a_state_needs_whole_sequences(world, tmp_path):
    path = save(config_of("lfm2"), tmp_path)
    with pytest.raises(ValueError, match=r"has layers with a state: omit --policy\.sequence-parallel"):
        load_policy(path, ModelConfig(compute_dtype="float32", sequence_parallel=2), world)

"""Each family that is trained most, as a tiny random model: exact."""

import pytest

from common.model.loading import load_policy
from common.model.policy import ModelConfig
from tests.model.families import FAMILIES, WITH_STATE, config_of, measure, save

LOGP = 1e-5                             # of log-probs around 6 in float32; reached: 2e-6
GRADIENT = 1e-5                         # of a weight's gradient; reached: 1.3e-6, with a state 5e-6
STATE_ENGINE = 2e-4                     # an engine computes a state by tokens, the trainer by chunks; reached: 7e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact(family, world, tmp_path):
    found = measure(family, tmp_path, world)
    assert found.refused == ""
    assert found.spread > 0.3
    shared = [] if family in WITH_STATE else [(found.shared_logp, found.shared_gradient)]
    for logp, gradient in [(found.logp, found.gradient), (found.adapted_logp, found.checkpointed_gradient), *shared]:
        assert logp < LOGP and gradient < GRADIENT
    assert found.engines["hf"] < (STATE_ENGINE if family in WITH_STATE else LOGP)
    assert found.bfloat16 < 0.05
    assert found.num_adapters >= 8 and found.adapts_experts


@pytest.mark.parametrize("flags", [{"share_prompt": True}, {"sequence_parallel": 2}])
def test_a_state_needs_whole_sequences(flags, world, tmp_path):
    path = save(config_of("lfm2"), tmp_path)
    with pytest.raises(ValueError, match="has layers with a state: omit --policy"):
        load_policy(path, ModelConfig(compute_dtype="float32", **flags), world)

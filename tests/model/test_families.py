"""Each family that is trained most, as a tiny random model: exact, or refused for the reason that is written here."""

import pytest

from tests.model.families import FAMILIES, measure

REFUSED = {
    "deepseek_v3": "latent_attention",
    "qwen3_next": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "nemotron_h": "packed sequences see each other",
    "lfm2": "'conv'",
}
LOGP = 1e-5                             # of log-probs around 6 in float32; reached: 2e-6
GRADIENT = 1e-5                         # of a weight's gradient; reached: 1.3e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_or_refused(family, world, tmp_path):
    found = measure(family, tmp_path, world)
    assert REFUSED.get(family, "") in found.refused
    assert bool(found.refused) == (family in REFUSED)
    if family in REFUSED:
        return
    assert found.spread > 0.3
    for logp in (found.logp, found.shared_logp, found.adapted_logp, *found.engines.values()):
        assert logp < LOGP
    for gradient in (found.gradient, found.shared_gradient, found.checkpointed_gradient):
        assert gradient < GRADIENT
    assert found.bfloat16 < 0.05
    assert found.num_adapters >= 8

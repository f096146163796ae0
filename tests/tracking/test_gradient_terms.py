"""What the policy's gradient is made of: against backward passes of transformers' model in float64, one for each term."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import launch
from tests.tracking.terms_worker import ENTROPY, KL, LENGTH, PROMPT, numbers

BUDGETS = ("1", "3", "8")


@pytest.fixture(scope="module")
def found(tiny_llama, tmp_path_factory) -> dict[tuple[int, str], dict[str, float]]:
    """(ranks, responses in a micro-batch) -> metrics."""
    folder = tmp_path_factory.mktemp("terms")
    for ranks in (1, 2):
        launch("tests/tracking/terms_worker.py", tiny_llama, folder, ranks=ranks, warm=True)
    return {(ranks, size): json.loads((folder / f"found_{ranks}.json").read_text())[size]
            for ranks in (1, 2) for size in BUDGETS}


@pytest.fixture(scope="module")
def want(tiny_llama) -> dict[str, float]:
    """Each response by itself through transformers' model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    known = numbers()
    losses = dict.fromkeys(("policy", "kl", "entropy", "other", "style", "right"), 0.0)
    strength = []
    count = int(known["lengths"].sum())
    for i, length in enumerate(known["lengths"].tolist()):
        tokens = torch.tensor(PROMPT + known["tokens"][i, :length].tolist())
        log_p = model(tokens[None]).logits[0, 2:-1].log_softmax(-1)
        logp = log_p.gather(1, tokens[3:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(1)
        ref = known["ref"][i, 3 : 3 + length].double()
        advantage = known["advantage"][i]
        losses["policy"] -= advantage * logp.sum() / count
        for part in ("style", "right"):
            losses[part] -= advantage * known[part][i] * logp.sum() / count
        losses["kl"] += KL * ((logp - ref) ** 2).sum() / 2 / count
        losses["entropy"] -= ENTROPY * entropy.sum() / count
        losses["other"] += LENGTH * logp.square().sum() / count
        strength.append(((KL * (logp - ref) - advantage + 2 * LENGTH * logp).abs() + ENTROPY).detach())
    gradients = {}
    for name, loss in losses.items():
        parts = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        gradients[name] = torch.cat([part.flatten() for part in parts])
    terms = ("policy", "kl", "entropy", "other")
    whole = sum(gradients[name] for name in terms)
    metrics = {}
    for prefix, names, total in (("signal/share", terms, whole),
                                 ("signal/reward_share", ("style", "right"), gradients["policy"])):
        norms = sum(gradients[name].norm() for name in names)
        for name in names:
            metrics[f"{prefix}/{name}"] = float(gradients[name].norm() / norms)
            metrics[f"{prefix}/{name}_cosine"] = float(torch.cosine_similarity(gradients[name], total, dim=0))
    for kind, sizes in (("tokens", torch.cat(strength)), ("sequences", torch.stack([s.sum() for s in strength]))):
        metrics[f"signal/{kind}_frac"] = 1.0
        metrics[f"signal/effective_{kind}_frac"] = float(sizes.sum() ** 2 / sizes.square().sum() / len(sizes))
    return metrics


def test_shares_are_those_of_backward_passes_by_hand(found, want):
    """On one rank and two, with 1, 3 and 8 responses in a micro-batch."""
    assert all(0.05 < want[f"signal/share/{name}"] < 0.7 for name in ("policy", "kl", "entropy", "other"))
    assert want["signal/share/kl_cosine"] < 0.9 and want["signal/effective_sequences_frac"] < 0.95
    for metrics in found.values():
        seen = {name: x for name, x in metrics.items() if name.startswith("signal/")}
        assert seen == pytest.approx(want, rel=1e-4)


def test_the_update_is_the_same_to_the_bit(found):
    assert all(metrics["same"] and metrics["num"] > 10 for metrics in found.values())

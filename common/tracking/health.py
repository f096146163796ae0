"""The well-known failures of a run, reported in words: the symptom, the likely cause, the flag to change."""

import math
from statistics import mean

REPEATED_AFTER = 20
"""Steps before a warning of the same kind is given again."""

TERMS = {
    "kl": ("--kl-loss-coef", "the KL to the reference"),
    "entropy": ("--entropy-coef", "the entropy bonus"),
}
"""Terms of the loss beside the rewards' -> the flag to lower, and what they are called."""


class HealthCheck:
    """`look` at each step's metrics in turn."""

    def __init__(self):
        self.said: dict[str, int] = {}                                  # kind -> the step that last told it
        self.entropies: list[float] = []

    def look(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The step's warnings. `metrics` has the scripts' names; absent metrics are not judged."""
        found = {}

        def over(kind: str, name: str, limit: float, text: str) -> None:
            """`text` if metric `name` is above `limit` (or not a number)."""
            if name in metrics and not metrics[name] <= limit:
                found[kind] = text.format(metrics[name])

        low, high = (metrics.get(f"critic/advantages/{end}", 0.0) for end in ("min", "max"))
        # not all compare within a group: a critic, a whole batch, the data's answers, or a teacher can teach, too
        if max(abs(low), abs(high)) < 1e-6 and "distillation/loss" not in metrics:
            over("constant", "reward/constant_group_frac", 0.999,
                 "in every group all rewards are equal, so no response is better than another and nothing is learned: "
                 "prompts too easy or too hard, or a reward that is always the same. Read the rollouts; other "
                 "--train-data, more --samples-per-prompt, a higher --rollout.temperature")
        over("kl", "actor/ppo_kl", 0.05,
             "the policy is {:.2g} nats a token from the one that sampled, usual is under 0.05: it moves too far in "
             "one step; lower --optim.lr or --minibatches-per-step")
        if math.isfinite(entropy := metrics.get("actor/entropy", math.nan)):
            self.entropies.append(entropy)
            first, last = self.entropies[0], self.entropies[-5:]
            if len(last) == 5 and mean(last) < 0.05 * first:
                found["entropy"] = (f"entropy fell to {mean(last):.2g} nats (mean of 5 steps) from {first:.2g}: the "
                                    f"policy hardly explores any more; set --entropy-coef, raise --clip-high, or lower "
                                    f"--optim.lr")
        over("lengths", "response_length/clip_ratio", 0.5,
             "{:.0%} of the responses reach the longest length, their answers cut: raise "
             "--rollout.max-response-length, or the policy no longer ends its responses (read some)")
        compared = "training/rollout_probs_diff_mean"
        if "rollout_corr/rollout_is_mean" in metrics:
            # top-p, a grammar and older weights make other probabilities, and the weights correct for it; they change
            # nothing in the probe
            compared = "sync/probe_prob_diff"
        over("mismatch", compared, 0.01,
             "engine and trainer differ by {:.3f} in the mean probability of a token, usual is under 0.01: stale "
             "weights if it jumped from one step to the next, else precision; correct for it (--correction.preset) or "
             "run both in float32 (--policy.compute-dtype float32)")
        if "critic/rewards/mean" in metrics:  # a supervised run that has converged is mostly noise
            over("noise", "signal/noise_to_signal", 30.0,
                 "in the gradient of a mini-batch the noise is {:.0f} times the signal (squared): twice the prompts of "
                 "a mini-batch would halve it; raise --prompts-per-step, or lower --minibatches-per-step or --optim.lr")
        for name, (flag, advice) in TERMS.items():
            over(f"share of {name}", f"signal/share/{name}", 0.9,
                 f"{{:.0%}} of the gradient is {advice}, so the rewards hardly move the policy: lower {flag}")
        failed = metrics.get("reward/error_frac", 0.0) + metrics.get("reward/timeout_frac", 0.0)
        if failed > 0:
            found["reward"] = (f"{failed:.1%} of the samples have no reward (errors and timeouts): the log has the "
                               f"first traceback of each kind; --reward.timeout-s, --reward.on-error")
        news = [kind for kind in found if step - self.said.get(kind, -math.inf) >= REPEATED_AFTER]
        self.said |= dict.fromkeys(news, step)
        return [f"warning, step {step}: {found[kind]}" for kind in news]

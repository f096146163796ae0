"""Slow float64 oracles in plain Python: loops, case distinctions and gradients derived by hand, no tensor expressions.

Sequences are lists; a response is a list of tokens, `None` nowhere. Nothing here imports `common`.
"""

import itertools
import math

AGGREGATIONS = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)


def spans(cu_seqlens):
    return [range(a, b) for a, b in itertools.pairwise(cu_seqlens)]


# --------------------------------------------------------------------------- log-probs

def linear_logp(hidden, weight, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    """logp, entropy, and their gradients by the chain rule, token by token and word by word.

    Returns logp [N], entropy [N], d_logp and d_entropy; d_x(upstream [N]) -> (grad hidden [N][H], grad weight [V][H]).
    """
    H, V = len(weight[0]), len(weight)
    logps, entropies, probs, inner = [], [], [], []
    for h in hidden:
        z, dz = [], []
        for w in weight:
            u = logit_scale * math.fsum(a * b for a, b in zip(h, w))
            if softcap is None:
                z.append(u / temperature)
                dz.append(logit_scale / temperature)
            else:
                z.append(softcap * math.tanh(u / softcap) / temperature)
                dz.append(logit_scale / math.cosh(u / softcap) ** 2 / temperature)
        top = max(z)
        log_total = top + math.log(math.fsum(math.exp(x - top) for x in z))
        probs.append([math.exp(x - log_total) for x in z])
        logps.append([x - log_total for x in z])
        entropies.append(-math.fsum(p * l for p, l in zip(probs[-1], logps[-1])))
        inner.append(dz)

    def pull(per_logit):                                                  # per_logit(n, v) -> d objective / d z[n][v]
        grad_hidden, grad_weight = [[0.0] * H for _ in hidden], [[0.0] * H for _ in weight]
        for n, h in enumerate(hidden):
            for v in range(V):
                g = per_logit(n, v) * inner[n][v]
                for k in range(H):
                    grad_hidden[n][k] += g * weight[v][k]
                    grad_weight[v][k] += g * h[k]
        return grad_hidden, grad_weight

    def d_logp(up):
        return pull(lambda n, v: up[n] * ((1.0 if v == targets[n] else 0.0) - probs[n][v]))

    def d_entropy(up):
        return pull(lambda n, v: -up[n] * probs[n][v] * (logps[n][v] + entropies[n]))

    return [row[y] for row, y in zip(logps, targets)], entropies, d_logp, d_entropy


# --------------------------------------------------------------------------- policy losses

def policy_loss(name, logp, old, adv, mask, cu, lo=None, hi=None, *, selected=None, weight, clip_dual=3.0, coef=1.0,
                tau_pos=1.0, tau_neg=1.05, cap=20.0, beta=None):
    """loss [T] and the gradient of sum(weight * loss) with regard to logp [T], case by case."""
    T = len(logp)
    loss, grad = [0.0] * T, [0.0] * T

    def log_ratio(t):                                                     # clamped, and whether a gradient passes
        d = logp[t] - old[t]
        return max(-20.0, min(20.0, d)), abs(d) < 20.0

    def surrogate(a, q, flows, cap):
        """min(q A, clip(q) A) of PPO, negated, as the four cases of sign and side."""
        if a > 0 and q > 1 + hi:
            return -a * (1 + hi), 0.0
        if a < 0 and q < 1 - lo:
            return -a * (1 - lo), 0.0
        if a < 0 and cap is not None and q > cap:
            return -a * cap, 0.0
        return -a * q, -a * q if flows else 0.0

    if name in ("gspo", "gmpo"):
        for span in spans(cu):
            kept = [t for t in span if mask[t]]
            if not kept:
                continue
            if name == "gspo":
                mean = sum(logp[t] - old[t] for t in kept) / len(kept)
                q = math.exp(max(-20.0, min(20.0, mean)))
                for t in kept:
                    loss[t], slope = surrogate(adv[t], q, abs(mean) < 20.0, None)
                    grad[t] = weight[t] * slope
            else:
                logs, passes = [], []
                for t in kept:
                    d, flows = log_ratio(t)
                    if adv[t] > 0 and d > hi:
                        d, flows = hi, False
                    if adv[t] < 0 and d < -lo:
                        d, flows = -lo, False
                    logs.append(d)
                    passes.append(flows)
                value = -sum(adv[t] for t in kept) / len(kept) * math.exp(sum(logs) / len(logs))
                total = sum(weight[t] for t in kept)
                for t, flows in zip(kept, passes):
                    loss[t], grad[t] = value, total * value / len(kept) if flows else 0.0
        return loss, grad

    for t in range(T):
        if not mask[t]:
            continue
        a, (d, flows) = adv[t], log_ratio(t)
        q = math.exp(d)
        if name in ("ppo", "grpo", "dapo", "dr_grpo"):
            value, slope = surrogate(a, q, flows, clip_dual)
        elif name == "clip_cov":
            value, slope = (0.0, 0.0) if selected[t] else surrogate(a, q, flows, None)
        elif name == "kl_cov":
            value, slope = -a * q, -a * q if flows else 0.0
            if selected[t]:
                value += coef * abs(logp[t] - old[t])
                slope += coef * math.copysign(1.0, logp[t] - old[t])
        elif name == "cispo":
            q = min(max(q, 1 - lo), 1 + hi)
            value, slope = -q * a * logp[t], -q * a
        elif name == "sapo":
            tau = tau_pos if a > 0 else tau_neg
            gate = 1 / (1 + math.exp(-tau * (q - 1)))
            value, slope = -a * gate * 4 / tau, -4 * a * gate * (1 - gate) * q if flows else 0.0
        elif name in ("dppo_tv", "dppo_kl"):
            p, r = math.exp(logp[t]), math.exp(old[t])
            if name == "dppo_tv":
                keep = p - r <= hi if a > 0 else r - p <= lo
            else:
                kl = r * math.log(r / p) + (1 - r) * (math.log1p(-r) - math.log1p(-p))
                keep = (p <= r or kl <= hi) if a > 0 else (p >= r or kl <= lo)
            slope = -a * min(q, cap) if keep else 0.0
            value = slope * logp[t]
        elif name == "dro":
            d = logp[t] - old[t]
            value, slope = beta * d * d / 2 - a * logp[t], beta * d - a
        elif name == "reinforce":
            value, slope = -a * logp[t], -a
        else:
            raise KeyError(name)
        loss[t], grad[t] = value, weight[t] * slope
    return loss, grad


def kl(kind, logp, ref):
    """The estimator's value and its derivative with regard to logp, for one token."""
    d = logp - ref
    if kind.endswith("+"):
        return kl(kind[:-1], logp, ref)[0], d
    if kind == "k1":
        return d, 1.0
    if kind == "abs":
        return abs(d), math.copysign(1.0, d)
    if kind in ("k2", "mse"):
        return d * d / 2, d
    if kind in ("k3", "low_var_kl"):
        if d > 20:
            return 10.0, 0.0
        value = math.exp(-max(d, -20.0)) - 1 + max(d, -20.0)
        return (10.0, 0.0) if value > 10 else (value, 1 - math.exp(-d))
    raise KeyError(kind)


def value_loss(value, old, ret, mask, clip, weight):
    loss, grad = [0.0] * len(value), [0.0] * len(value)
    for t, m in enumerate(mask):
        if not m:
            continue
        kept = max(old[t] - clip, min(old[t] + clip, value[t]))
        if abs(value[t] - ret[t]) >= abs(kept - ret[t]):
            loss[t], grad[t] = (value[t] - ret[t]) ** 2 / 2, weight[t] * (value[t] - ret[t])
        else:                                                             # the clipped one is worse: no gradient
            loss[t] = (kept - ret[t]) ** 2 / 2
    return loss, grad


# --------------------------------------------------------------------------- advantages over time, aggregation

def gae(reward, value, mask, cu, gamma, lam):
    """The definition: A_t = sum over l of (gamma lam)^l delta_{t+l}, over the tokens with mask alone."""
    advantage, returns = [0.0] * len(reward), [0.0] * len(reward)
    for span in spans(cu):
        kept = [t for t in span if mask[t]]
        for i, t in enumerate(kept):
            terms = []
            for l, u in enumerate(kept[i:]):
                after = value[kept[i + l + 1]] if i + l + 1 < len(kept) else 0.0
                terms.append((gamma * lam) ** l * (reward[u] + gamma * after - value[u]))
            advantage[t] = math.fsum(terms)
            returns[t] = advantage[t] + value[t]
    return advantage, returns


def whiten(x, mask):
    kept = [v for v, m in zip(x, mask) if m]
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in zip(x, mask)]


def explained_variance(value, returns, mask):
    def variance(x):
        mean = math.fsum(x) / len(x)
        return math.fsum((v - mean) ** 2 for v in x) / len(x)
    pairs = [(v, r) for v, r, m in zip(value, returns, mask) if m]
    return 1 - variance([r - v for v, r in pairs]) / variance([r for _, r in pairs])


def aggregate(loss, mask, cu, aggregation, norm_length=None):
    """The aggregated number itself, from its sentence in the papers."""
    rows = [[loss[t] for t in span if mask[t]] for span in spans(cu)]
    rows = [row for row in rows if row]
    sums, flat = [math.fsum(row) for row in rows], [x for row in rows for x in row]
    return {
        "token-mean": lambda: math.fsum(flat) / len(flat),
        "token-sum": lambda: math.fsum(flat),
        "seq-mean-token-sum": lambda: math.fsum(sums) / len(rows),
        "seq-mean-token-sum-norm": lambda: math.fsum(s / norm_length for s in sums) / len(rows),
        "seq-mean-token-mean": lambda: math.fsum(s / len(row) for s, row in zip(sums, rows)) / len(rows),
    }[aggregation]()


def covariance(adv, logp, mask):
    n = sum(mask)
    mean_adv = math.fsum(a for a, m in zip(adv, mask) if m) / n
    mean_logp = math.fsum(l for l, m in zip(logp, mask) if m) / n
    return [(a - mean_adv) * (l - mean_logp) for a, l in zip(adv, logp)]


# --------------------------------------------------------------------------- attention

def attention(q, k, v, scale, window=None, softcap=None, sink=None):
    """Causal attention of one head over one sequence: q, k, v [L][D] -> [L][D]. A sink adds its exponential to the
    softmax's sum and nothing to the values."""
    out = []
    for i, row in enumerate(q):
        first = 0 if window is None else max(0, i - window + 1)
        scores = [scale * math.fsum(a * b for a, b in zip(row, k[j])) for j in range(first, i + 1)]
        if softcap is not None:
            scores = [softcap * math.tanh(s / softcap) for s in scores]
        weights = [math.exp(s - max(scores)) for s in scores]
        total = math.fsum(weights) + (0.0 if sink is None else math.exp(sink - max(scores)))
        out.append([math.fsum(w * v[first + j][c] for j, w in enumerate(weights)) / total for c in range(len(v[0]))])
    return out

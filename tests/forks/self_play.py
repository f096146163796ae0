"""A fork of grpo.py with two policies that play against each other, each with a baseline of its role (RAE, Liu et al.
2025, arXiv 2506.24119): both answer the same prompts, response k of one meets response k of the other, and the better
score wins: R = 1, 0 or -1. Of each role a baseline b follows its mean reward, b <- 0.95 b + 0.05 R, and A = R - b."""

from tests.forks.two_policies import two_policies

BOTH = "for name, model, model_optimizer, sign in "
CHANGED = {
    "        for step in run.steps():\n": (
        '        baselines = run.resume().setdefault("baselines", {"actor": 0.0, "rival": 0.0})\n'
        "        for step in run.steps():\n"),
    f"            {BOTH}": f"            rollouts = []\n            {BOTH}",
    "                rollout = run.collect(pending)\n": (
        "                rollouts.append(run.collect(pending))\n"
        "            games = zip((PLAYERS), rollouts, rollouts[::-1])\n"
        "            for (name, model, model_optimizer, sign), rollout, other in games:\n"),
    "rewards = rollout.scores     ": "rewards = (rollout.scores - other.scores).sign()     ",
    "advantages = group_advantages(sign * rewards, rollout.group, args.norm_by_std)": (
        "baselines[name] = 0.95 * baselines[name] + 0.05 * float(rewards.nanmean())\n"
        '                run.metrics[f"{name}/baseline"] = baselines[name]\n'
        "                advantages = (rewards - baselines[name]).nan_to_num()"),
}


def self_play(grpo: str) -> str:
    """The fork of this source. Raises ValueError if one of its places is not there once."""
    source = two_policies(grpo)
    players = source.partition(BOTH)[2].partition(":\n")[0]
    for old, new in CHANGED.items():
        if source.count(old) != 1:
            raise ValueError(f"{old} is {source.count(old)} times in the fork with two policies")
        source = source.replace(old, new.replace("(PLAYERS)", players))
    return source


def with_forgotten_baselines(grpo: str) -> str:
    """The same, where a resumed run does not know the baselines."""
    return self_play(grpo).replace('run.resume().setdefault("baselines", {"actor": 0.0, "rival": 0.0})',
                                   '{"actor": 0.0, "rival": 0.0}')

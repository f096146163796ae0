"""A fork of grpo.py with two policies that sample, are trained and are saved: the second one is rewarded for the
opposite. It reports how far each one's log-probs are from those that the engine reported."""

LOADED = '        reference = run.load_frozen("reference", reference_path) if reference_path else None\n'
FIRST, LAST = "            # 1 rollout: ", "            # 6 log, validate, save\n"
CHANGED = {
    "engine.wake(policy)": "engine.wake(model)",
    "run.sample(run.next_rows(P), G, args.rollout, step)": "run.sample(rows, G, args.rollout, step, name)",
    "group_advantages(rewards, ": "group_advantages(sign * rewards, ",
    '"update_actor"': 'f"update_{name}"',
    "logp, entropy = policy(": "logp, entropy = model(",
    "update.optimizer_step(policy, optimizer,": "update.optimizer_step(model, model_optimizer,",
    "                            update.done(": (
        "                            off = (logp.detach() - microbatch.rollout_logp).abs() * microbatch.mask\n"
        '                            run.meter.max(f"{name}/engine_is_off_by", off)\n'
        "                            update.done("),
}


def two_policies(grpo: str) -> str:
    """The fork of this source. Raises ValueError if one of its places is not there once."""
    before, rest = grpo.split(FIRST)
    loop, after = rest.split(LAST)
    loop = "".join(f"    {line}" if line.strip() else line for line in (FIRST + loop).splitlines(keepends=True))
    for old, new in CHANGED.items():
        if loop.count(old) != 1:
            raise ValueError(f"{old} is {loop.count(old)} times in the loop of grpo.py")
        loop = loop.replace(old, new)
    both = '("actor", policy, optimizer, 1), ("rival", rival, rival_optimizer, -1)'
    rival = '        rival, rival_optimizer = run.load_policy("rival", args.model, args.optim)\n'
    turns = f"            rows = run.next_rows(P)\n            for name, model, model_optimizer, sign in ({both}):\n"
    return before.replace(LOADED, rival + LOADED) + turns + loop + LAST + after

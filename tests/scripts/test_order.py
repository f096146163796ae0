"""A call that was forgotten, or made too early or twice: the error names the call to make."""

import json
import re

import pytest

from tests.conftest import launch
from tools import try_script

pytestmark = pytest.mark.sweep

LOOP = """
with Run(args, 2, correction) as run:
    engine, max_tokens = run.start_engine()
    policy, optimizer = run.load_policy("policy", args.model, args.optim)
    reference = run.load_frozen("reference", args.model)
    run.describe("a loop", 2, 2, 1, 1)
    for step in run.steps():
        run.metrics |= engine.wake(policy)
        pending = run.sample(run.next_rows(2), 2, args.rollout, step)
        run.metrics |= engine.sleep()
        rollout = run.collect(pending)
        rollout.batch.advantage = rollout.to_tokens(rollout.scores - 0.5)
        minibatches = run.to_minibatches(rollout, rollout.has_score, 1, max_tokens, step)
        with run.phase("ref", minibatches) as phase:
            for microbatch in phase:
                microbatch.ref_logp = reference.score(microbatch, 1.0)
        with run.phase("update_actor", minibatches) as update:
            for minibatch in update.minibatches:
                weights = losses.token_weights(minibatch, "token-mean")
                for microbatch, weight in zip(minibatch, weights):
                    logp, entropy = policy(microbatch, 1.0)
                    (-logp * microbatch.advantage * weight).sum().backward()
                    update.done(microbatch, logp, entropy)
                update.optimizer_step(policy, optimizer, args.optim, step)
        run.finish(step, rollout, minibatches, rollout.scores, {})
"""

WITH = "with Run(args, 2, correction) as run:"
START = "    engine, max_tokens = run.start_engine()\n"
TRAINED = '    policy, optimizer = run.load_policy("policy", args.model, args.optim)\n'
FROZEN = '    reference = run.load_frozen("reference", args.model)\n'
DESCRIBE = '    run.describe("a loop", 2, 2, 1, 1)\n'
STEPS = "    for step in run.steps():\n"
WAKE = "        run.metrics |= engine.wake(policy)\n"
SAMPLE = "        pending = run.sample(run.next_rows(2), 2, args.rollout, step)\n"
SLEEP = "        run.metrics |= engine.sleep()\n"
COLLECT = "        rollout = run.collect(pending)\n"
DONE = "                    update.done(microbatch, logp, entropy)\n"
OPTIMIZER = "                update.optimizer_step(policy, optimizer, args.optim, step)\n"
PHASE = """        with run.phase("ref", minibatches) as phase:
            for microbatch in phase:
                microbatch.ref_logp = reference.score(microbatch, 1.0)
"""
FINISH = "        run.finish(step, rollout, minibatches, rollout.scores, {})\n"

MISTAKES = {  # name -> (lines of the loop, what stands there instead, what the error says)
    "Run without with": (WITH, "run = Run(args, 2, correction)\nif True:",
        r"call with Run\(args, ...\) as run: .* first"),
    "load_policy before start_engine": (
        START + TRAINED, TRAINED + START, r"call run.start_engine\(...\) before the models are loaded"),
    "start_engine forgotten": (START, "", r"call run.start_engine\(...\) before the models are loaded"),
    "load_frozen before load_policy": (TRAINED + FROZEN, FROZEN + TRAINED, r"call run.load_policy\(.*\) first"),
    "load_policy forgotten": (TRAINED + FROZEN, "    policy = reference = None\n",
        r"call run.load_policy\(.*\) first"),
    "two critics of one name": (
        TRAINED, TRAINED + 2 * '    run.load_critic("critic", args.model, args.optim)\n',
        r"critic is loaded already, and a checkpoint would hold one of the two: give the second another name"),
    "two policies of one name": (
        TRAINED, TRAINED + TRAINED, r"policy is loaded already, and a checkpoint would hold one of the two: give the"),
    "two references of one name": (FROZEN, FROZEN + FROZEN, r"reference is loaded already, and a checkpoint"),
    "describe before start_engine": (
        START + TRAINED + FROZEN + DESCRIBE, DESCRIBE + START + TRAINED + FROZEN,
        r"call run.start_engine\(.*\) .* first"),
    "load_frozen after resume": (
        FROZEN, "    run.resume()\n" + FROZEN, r"models must be loaded before run.resume\(\) and before the loop"),
    "load_policy in the steps": (STEPS, STEPS + "    " + TRAINED.replace('"policy"', '"second"'),
        r"models must be loaded before run.resume\(\)"),
    "meter before steps": (STEPS, "    run.meter\n" + STEPS,
        r"run.meter does not exist yet: call for step in run.steps\(\): first"),
    "metrics before steps": (STEPS, "    run.metrics\n" + STEPS,
        r"run.metrics does not exist yet: call run.resume\(\) first"),
    "sample before steps": (
        STEPS, "    engine.wake(policy)\n    run.sample([0], 2, args.rollout, 0)\n" + STEPS,
        r"call .*run.steps\(\)|run.resume\(\) first"),
    "phase before steps": (STEPS, '    with run.phase("x", []):\n        pass\n' + STEPS,
        r"run.timer does not exist yet: call for step in run.steps\(\): first"),
    "wake forgotten": (WAKE, "", r"the engine is asleep: call run.metrics \|= engine.wake\(policy\) before run.sample"),
    "sample before wake": (WAKE + SAMPLE, SAMPLE + WAKE,
        r"call run.metrics \|= engine.wake\(policy\) before run.sample"),
    "complete without wake": (WAKE, "        engine.complete([], args.rollout)\n",
        r"call engine.wake\(policy\) first"),
    "wake twice": (WAKE, 2 * WAKE, r"the engine is awake already: call engine.sleep\(\) first"),
    "sleep forgotten": (SLEEP, "",
        r"the engine is awake in the phase ref: call run.metrics \|= engine.sleep\(\) after"),
    "sleep twice": (SLEEP, 2 * SLEEP, r"the engine is asleep already: call engine.wake\(policy\) first"),
    "sleep forgotten before finish": (
        PHASE, "        run.metrics |= engine.wake(policy)\n" + PHASE, r"the engine is awake in the phase ref: call"),
    "select after a field was written": (
        FINISH, "        rollout.batch.extra['x'] = rollout.batch.mask\n        rollout.select([0])\n" + FINISH,
        r"would lose the fields \['x'\] of rollout.batch: write them afterwards"),
    "done forgotten": (DONE, "", r"call phase.done\(microbatch, logp, entropy, stats\) after each backward"),
    "done and optimizer_step forgotten": (
        DONE + OPTIMIZER, "",
        r"update_actor has 1 micro-batches and 0 were reported: .* call phase.done\(.*\) after each"),
    "optimizer_step forgotten": (OPTIMIZER, "",
        r"call phase.optimizer_step\(model, optimizer, config, step\) after each"),
    "optimizer_step twice": (OPTIMIZER, 2 * OPTIMIZER, r"no micro-batch was reported before this optimizer step"),
    "finish forgotten": (FINISH, "", r"step 1 was neither logged nor saved: call run.finish\(...\)"),
    "finish twice": (FINISH, 2 * FINISH, r"step 1 was ended twice: call run.finish\(...\) .* once a step"),
    "finish after the steps": (FINISH, "    " + FINISH.strip() + "\n",
        r"step 1 was neither logged nor saved: call run.finish"),
    "finish after the last step": (
        FINISH, FINISH + "    " + FINISH.strip() + "\n", r"step 1 was ended twice: call run.finish\(...\)"),
}


def loop_of(old: str, new: str) -> str:
    assert LOOP.count(old) == 1, old
    return LOOP.replace(old, new)


@pytest.fixture(scope="module")
def said(tiny_llama, small_train, tmp_path_factory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("order")
    flags = ["--model", tiny_llama, "--train-data", small_train, "--total-steps", "1", "--rollout.engine", "hf",
             "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length",
             "4", "--reward.function", f"{try_script.__file__}:compute_score", "--reward.num-workers", "1",
             "--save.hf", "never", "--save.resume", "none"]
    sources = {"": LOOP} | {name: loop_of(old, new) for name, (old, new, _) in MISTAKES.items()}
    (folder / "jobs.json").write_text(json.dumps([flags, str(folder), sources]))
    launch("tests/scripts/order_worker.py", folder / "jobs.json", warm=True)
    return json.loads((folder / "said.json").read_text())


def test_the_loop_itself_runs(said):
    assert said[""] == ["", ""]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_call_to_make(said, name):
    kind, message = said[name]
    assert kind in ("RuntimeError", "ValueError") and re.search(MISTAKES[name][2], message), f"{kind}: {message}"
    assert "\n" not in message

"""`tools.same_as` against real verl and TRL: equal where scripts are theirs, and five planted differences, each named
at its first number. `tools/setup.sh peers` installs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from common.segments import group_mean
from tests.conftest import ROOT, STOPS, launch
from tools import from_trl, from_verl, same_as, try_script
from tools.peers.compared import IN_FLOAT32, compare, line_of
from tools.peers.installed import PEERS, folder_of
from tools.peers.numbers import Numbers, Update
from tools.peers.recorded import made_up, read_run
from tools.peers.settings import Objective, trl_settings, verl_settings
from tools.peers.watch import Watch

NEEDS = {peer: pytest.mark.skipif(
    not (folder_of(peer).parents[2] / "complete").is_file(),
    reason=f"{name} is not installed beside .venv: tools/setup.sh peers") for peer, name in PEERS.items()}
GRPO = (ROOT / "grpo.py").read_text()
TWO = ["--epochs-per-step", "2"]                                        # else no ratio is other than 1
KL = ["--kl-loss-coef", "0.1"]
LOSS, AGGREGATION, BASELINE = "--loss", "--aggregation", "--baseline"
FLAT = "--no-norm-by-std"                                               # TRL divides by the deviation and 1e-4
VARIANT = ["--norm-by-std", "False"]
EPS = ("+ 1e-6)", "+ 1e-4)")

VERL = {
    "grpo": ("grpo.py", [*TWO, *KL, "--entropy-coef", "0.01", "--clip-high", "0.28", "--clip-dual", "2"]),
    "drgrpo": ("grpo_variants.py", [*TWO, LOSS, "dr_grpo"]),
    "several": ("grpo.py", ["--minibatches-per-step", "2", FLAT, *KL, "--kl-estimator", "k3+"]),
    "gspo": ("grpo_variants.py", [*TWO, LOSS, "gspo"]),
    "rloo": ("rloo.py", [*TWO, "--kl-reward-coef", "0.05"]),
    "reinforce++": ("rloo.py", [*TWO, BASELINE, "reinforce++", LOSS, "ppo", "--gamma", "0.9"]),
    "rejection": ("grpo.py", [*TWO, "--correction.preset", "decoupled-k3-rs-token-tis"]),
}
MORE_VERL = {
    "sequence": ("grpo_variants.py", [*TWO, AGGREGATION, "seq-mean-token-sum", *KL, "--kl-estimator", "k2"]),
    "one update": ("grpo.py", ["--epochs-per-step", "1"]),
    "k1": ("grpo.py", [*TWO, *KL, "--kl-estimator", "k1"]),
    "abs": ("grpo.py", [*TWO, *KL, "--kl-estimator", "abs"]),
    "token sum": ("grpo_variants.py", [*TWO, AGGREGATION, "token-sum"]),
    **{loss: ("grpo_variants.py", [*TWO, LOSS, loss]) for loss in ("cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl")},
    "dro": ("grpo_variants.py", [*TWO, LOSS, "dro", "--loss-numbers", "beta", "0.1"]),
    "kl_cov": ("grpo_variants.py", [*TWO, LOSS, "kl_cov", "--loss-numbers", "fraction", "0.1"]),
    "passk": ("grpo_variants.py", [*TWO, "--advantage", "passk"]),
    "remax": ("rloo.py", [*TWO, BASELINE, "remax", "--kl-reward-coef", "0.05"]),
    "opo": ("rloo.py", [*TWO, BASELINE, "opo"]),
    "reinforce++-baseline": ("rloo.py", [*TWO, BASELINE, "reinforce++-baseline"]),
    "sequence weights": ("grpo.py", [*TWO, "--correction.preset", "decoupled-seq-is-rs"]),
    "bypass": ("grpo.py", [*TWO, "--correction.preset", "bypass-ppo-clip"]),
    "dapo": ("dapo.py", [*TWO, "--max-gen-batches", "1", AGGREGATION, "seq-mean-token-mean"]),
}
TRL = {
    "dapo": ("grpo.py", [*TWO, FLAT, *KL, "--clip-high", "0.28"]),
    "grpo": ("grpo_variants.py", [*TWO, *VARIANT, AGGREGATION, "seq-mean-token-mean", "--clip-dual", "2"]),
    "dr_grpo": ("grpo_variants.py", [*TWO, LOSS, "dr_grpo"]),
    "sequence": ("grpo_variants.py", [*TWO, *VARIANT, LOSS, "gspo"]),
    "group": ("eps", [*TWO, "--entropy-coef", "0.01"]),
}
MORE_TRL = {
    "cispo": ("grpo_variants.py", [*TWO, *VARIANT, LOSS, "cispo"]),
    "sapo": ("grpo_variants.py", [*TWO, *VARIANT, LOSS, "sapo"]),
    "one update": ("grpo.py", ["--epochs-per-step", "1", FLAT]),
    "token weights": ("grpo.py", [*TWO, FLAT, "--correction.weights", "token"]),
    "sequence mask": ("grpo.py", [*TWO, FLAT, "--correction.weights", "sequence", "--correction.outside", "zero",
                                  "--correction.upper", "3"]),
}
# what is written instead, with which flags, and the first number that must differ
PLANTED = {
    "denominator": (('token_weights(minibatch, "token-mean")', 'token_weights(minibatch, "seq-mean-token-mean")'), [],
                    "denominators"),
    "clip": (("clamp(max=1 + args.clip_high)", "clamp(max=1.25)"), [], "loss of each token"),
    "mask": (("            reject_and_weight(", """            for minibatch in minibatches:
                for microbatch in minibatch:
                    microbatch.mask = microbatch.mask & microbatch.mask.roll(1)     # without each first token
            reject_and_weight("""), [], "mask"),
    "kl": (("microbatch.ref_logp, args.kl_estimator)", 'microbatch.ref_logp, "k2")'), KL, "KL"),
    "eps": (EPS, [], "advantages"),
}
CARELESS = {  # written instead -> what is said in one line, or the first number that differs
    "two losses": (("                        update.done(", """                        (logp * 0).sum().backward()
                        update.done("""), "it calls backward on"),
    "states": (("logp, entropy = policy(microbatch, temperature)", """policy.hidden_states(microbatch)
                        logp, entropy = policy(microbatch, temperature)"""), "it reads hidden states of a model"),
    "no step": (("update.optimizer_step(policy, optimizer, args.optim, step)", "break"), "RuntimeError"),
    "microbatch": (("(loss * weight).sum()).backward()", "loss[microbatch.mask].mean() / len(minibatch)).backward()"),
                   "denominators"),
    "unscored": (("rewards = rollout.scores ", "rewards = rollout.scores * 2 "), "rewards"),
}


def first_difference(told: dict) -> str:
    return next((name for name, apart, _ in told["lines"] if apart is not None and not apart <= IN_FLOAT32), "")


def written(folder: Path, name: str, change: tuple[str, str]) -> str:
    old, new = change
    assert old in GRPO
    file = folder / f"{name.replace(' ', '_')}.py"
    file.write_text(GRPO.replace(old, new))
    return str(file)


def compared(peer: str, cases: list[tuple[str, list[str]]], seed: int = 0) -> list[dict]:
    """What the worker tells of each case."""
    given = json.dumps([peer, [[str(ROOT / script), flags, seed] for script, flags in cases]])
    # accelerate, which TRL stands on, takes these for torchrun's: other tests leave some
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.tools.compare_worker"], input=given, text=True,
                          capture_output=True, cwd=ROOT, env=env)
    found = [json.loads(line.removeprefix("told ")) for line in done.stdout.splitlines() if line.startswith("told ")]
    assert len(found) == len(cases), done.stderr
    return found


def equal_cases(settings: dict[str, tuple[str, list[str]]], folder: Path) -> list[tuple[str, list[str]]]:
    eps = written(folder, "own_eps", EPS)
    return [(eps if script == "eps" else script, flags) for script, flags in settings.values()]


def planted_cases(planted: dict, folder: Path, more: list[str]) -> list[tuple[str, list[str]]]:
    return [(written(folder, name, change), [*TWO, *flags, *more]) for name, (change, flags, _) in planted.items()]


def check_equal(settings: dict, found: list[dict]) -> None:
    for name, told in zip(settings, found, strict=True):
        assert "error" not in told, (name, told)
        assert not first_difference(told), (name, told["lines"])
        names = {line[0] for line in told["lines"]}
        assert {"rewards", "mask", "advantages", "loss", "gradient on log-probs", "denominators"} <= names


def check_planted(planted: dict, found: list[dict]) -> None:
    for (name, (*_, first)), told in zip(planted.items(), found, strict=True):
        assert "error" not in told, (name, told)
        assert first_difference(told) == first, (name, told["lines"])


def check_careless(careless: dict, found: list[dict]) -> None:
    for (name, (_, expected)), told in zip(careless.items(), found, strict=True):
        if "error" in told:
            assert re.match(rf"\S+{name.replace(' ', '_')}\.py cannot be compared: {expected}", told["error"]), told
            assert "\n" not in told["error"]
        else:
            assert first_difference(told) == expected, (name, told)


@NEEDS["verl"]
def test_verls_numbers_and_planted_differences(tmp_path):
    """In one process, which imports verl once."""
    careless = {name: CARELESS[name] for name in ("two losses", "microbatch")}
    cases = [*equal_cases(VERL, tmp_path), *planted_cases(PLANTED, tmp_path, []),
             *((written(tmp_path, name, change), TWO) for name, (change, _) in careless.items())]
    found = compared("verl", cases)
    check_equal(VERL, found[: len(VERL)])
    check_planted(PLANTED, found[len(VERL) : -len(careless)])
    check_careless(careless, found[-len(careless) :])


@NEEDS["trl"]
def test_trls_numbers_and_its_own_eps(tmp_path):
    *found, own = compared("trl", [*equal_cases(TRL, tmp_path), ("grpo.py", TWO)])
    check_equal(TRL, found)
    assert first_difference(own) == "advantages"                        # the deviation plus 1e-4, here plus 1e-6
    text = next(text for name, _, text in own["lines"] if name == "advantages")
    assert re.search(r"DIFFERS in \d+ of 116, .* first update 1, response 0, token 0: script 1\.0954\d+, trl 1\.0949",
                     text), text


@pytest.mark.sweep
@pytest.mark.parametrize(("peer", "settings"), [
    pytest.param("verl", VERL | MORE_VERL, marks=NEEDS["verl"]),
    pytest.param("trl", TRL | MORE_TRL, marks=NEEDS["trl"]),
])
def test_the_numbers_of_peers_on_another_batch(peer, settings, tmp_path):
    check_equal(settings, compared(peer, equal_cases(settings, tmp_path), seed=1))


@pytest.mark.sweep
@NEEDS["trl"]
def test_planted_differences_from_trl(tmp_path):
    """Where the deviation does not count, as its 1e-4 would come first."""
    planted = {name: of_one for name, of_one in PLANTED.items() if name != "eps"}
    check_planted(planted, compared("trl", planted_cases(planted, tmp_path, [FLAT])))


@pytest.mark.sweep
@NEEDS["verl"]
def test_careless_forks_stop_with_one_line(tmp_path):
    check_careless(CARELESS, compared("verl", [(written(tmp_path, name, change), TWO)
                                               for name, (change, _) in CARELESS.items()]))


@pytest.mark.sweep
@NEEDS["verl"]
def test_a_setting_of_the_peer_replaces_the_one_that_follows_from_flags():
    key = f"{from_verl.ACTOR}.clip_ratio_high=0.3"
    typo = "algorithm.adv_estimatr=rloo"
    other, unknown, mistyped = compared("verl", [("grpo.py", [*TWO, key]), ("ppo.py", TWO), ("grpo.py", [*TWO, typo])])
    assert f"{typo}: verl reads no such key" in mistyped["error"]
    assert other["keys"][key.partition("=")[0]] == "0.3" and first_difference(other) == "loss of each token"
    assert "critic" in unknown["error"]


@pytest.mark.sweep
@NEEDS["verl"]
def test_the_recorded_batch_of_a_run(tiny_llama, small_train, tmp_path):
    """A run's last step, with its own flags; and with a bound that is not the run's."""
    flags = ["--model", tiny_llama, "--train-data", small_train, "--prompts-per-step", "4", "--samples-per-prompt", "4",
             "--total-steps", "1", "--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--optim.lr", "1e-2",
             "--data.max-prompt-length", "200", "--rollout.max-response-length", "12", "--reward.num-workers", "1",
             "--reward.function", f"{try_script.__file__}:compute_score", "--log.rollouts-every", "1",
             "--save.hf", "never", "--save.resume", "none", "--minibatches-per-step", "2", "--clip-high", "0.25", *KL]
    launch(ROOT / "grpo.py", *flags, *STOPS, "--run-dir", tmp_path / "run", warm=True)
    command = [sys.executable, "-m", "tools.same_as", "verl", "grpo.py", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step_000001.parquet: 16 responses in 4 groups, ratios of 0." in done.stdout
    assert "actor.clip_ratio_high=0.25" in done.stdout and "grpo.py has verl's numbers" in done.stdout
    batch = read_run(tmp_path / "run")
    rows = pq.read_table(tmp_path / "run/rollouts/step_000001.parquet").to_pylist()
    row = next(row for row in rows if row["index"] == 5)
    torch.testing.assert_close(batch.logp[0][5][batch.mask[5]].exp(), torch.tensor(row["old_logp"]).double().exp()
                               * torch.tensor(row["ratio"]).double())
    assert batch.score.tolist() == pytest.approx([row["score"] for row in rows])
    with pytest.raises(ValueError, match=r"has no recorded responses of step 7: --log.rollouts-every"):
        read_run(tmp_path / "run", 7)


# --------------------------------------------------------------------------- without a peer

def flags_of(**given) -> dict:
    return {"rollout": {"max_response_length": 512}, "correction": {}, "clip_low": 0.2, "clip_high": 0.28,
            "clip_dual": 3.0, "norm_by_std": True, "kl_loss_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0,
            **given}


VARIANTS = {"loss": "grpo", "loss_numbers": {}, "aggregation": None, "clip_low": None, "clip_high": None,
            "clip_dual": None, "norm_by_std": None, "advantage": "group"}


@pytest.mark.parametrize("given", [
    {}, {"norm_by_std": False, "kl_loss_coef": 0.1, "kl_estimator": "k1+", "entropy_coef": 0.01},
    {"baseline": "opo", "loss": "ppo", "gamma": 0.9}, {"baseline": "rloo", "loss": "reinforce", "gamma": 1.0},
    VARIANTS | {"loss": "gspo"}, VARIANTS | {"loss": "dr_grpo"}, VARIANTS | {"loss": "sapo"},
    VARIANTS | {"loss": "dppo_tv"}, VARIANTS | {"loss": "kl_cov"}, VARIANTS | {"advantage": "passk"},
    {"correction": {"preset": "decoupled-seq-is-rs"}}, {"correction": {"weights": "token", "upper": 3.0}},
], ids=str)
def test_verls_settings_are_what_from_verl_translates(given):
    """from_verl gives the flags back that the settings were made from."""
    objective = Objective(flags_of(**given))
    back = from_verl.translate(verl_settings(objective)).flags
    expected = {"--clip-low": objective.clip_low, "--clip-high": objective.clip_high, "--clip-dual":
                objective.clip_dual, "--loss": given.get("loss"), "--baseline": given.get("baseline"),
                "--kl-loss-coef": objective.kl_coef, "--kl-estimator": objective.kl_estimator,
                "--entropy-coef": objective.entropy_coef, "--correction.upper": objective.correction.upper,
                "--correction.weights": objective.correction.weights}
    seen = 0
    for flag, value in expected.items():
        if flag in back and value is not None:
            known = {"dr_grpo": "grpo"}.get(value, value)
            assert back[flag] == [str(known)] or float(back[flag][0]) == value, (flag, back)
            seen += 1
    assert seen >= 1 and ("--baseline" in back) == ("baseline" in given)


def test_trls_options_are_what_from_trl_translates():
    objective = Objective(flags_of(norm_by_std=False, kl_loss_coef=0.1, entropy_coef=0.01))
    options = {name: [value] for name, value in trl_settings(objective).items()}
    back = from_trl.translate("grpo", options | {"per_device_train_batch_size": ["16"]}).flags
    assert back["--clip-high"] == ["0.28"] and back["--clip-dual"] == ["3.0"] and "--no-norm-by-std" in back
    assert back["--kl-loss-coef"] == ["0.1"] and back["--kl-estimator"] == ["k3"] and back["--entropy-coef"] == ["0.01"]
    for given, said in (({"baseline": "rloo"}, "RLOOTrainer"), (VARIANTS | {"loss": "gmpo"}, "no loss gmpo"),
                        ({"kl_loss_coef": 0.1, "kl_estimator": "k2"}, "k3 alone"),
                        (VARIANTS | {"aggregation": "token-sum"}, "no aggregation token-sum")):
        with pytest.raises(ValueError, match=said):
            trl_settings(Objective(flags_of(**given)))


@pytest.mark.parametrize("form", ["weights", "mean", "where", "scaled", "two sums"])
def test_the_watch_sees_losses_of_tokens_and_their_factors(form):
    logp = torch.linspace(-1, -2, 6, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    weight = torch.where(mask, 0.25, 0.0).double()
    watch = Watch()
    with watch:
        watch.begin((6,))
        token = logp.exp() * 2 + 0.1 * logp
        loss = {
            "weights": lambda: 3 * (token * weight).sum(), "mean": lambda: 3 * token[mask].mean(),
            "where": lambda: 3 * torch.where(mask, token, 0).sum() / mask.sum(),
            "scaled": lambda: (3.0 * (token * mask)).sum() / 4,
            "two sums": lambda: (token * weight).sum() + 2 * (logp * weight).sum(),
        }[form]()
        loss.backward()
    (number, found, factor), = watch.end()
    assert number == loss.detach()
    if form == "two sums":
        assert found is None and factor is None
        return
    own = logp.detach().exp() * 2 + 0.1 * logp.detach()
    torch.testing.assert_close(found * factor, own * 3 * weight)
    if form != "scaled":
        torch.testing.assert_close(found, own)


def test_float64_stays_float64_under_the_watch():
    with Watch():
        values = torch.tensor([1 / 3], dtype=torch.float64)
        assert values.float().dtype == values.to(torch.float32).dtype == torch.float64
        assert values.to(torch.int64).dtype == torch.int64 and float(values[0]) == 1 / 3


def test_a_made_up_batch_uses_each_part_of_a_loss():
    for seed in range(3):
        batch = made_up(seed)
        assert (group_mean(batch.score, batch.group)[-4:] == batch.score[-4:]).all()    # a group of equal scores
        for logp in batch.logp:
            ratio = (logp - batch.old_logp).exp()[batch.mask]
            assert (ratio < 0.6).any() and (ratio > 1.4).any() and (logp <= 0).all()
        assert ((batch.logp[1] - batch.old_logp).exp() > 3).any()                       # the dual clip's place
        kl = torch.expm1(batch.ref_logp - batch.logp[1]) - (batch.ref_logp - batch.logp[1])
        assert kl.max() > 1 and not (kl > 10).any()
        assert len(batch.lengths.unique()) > 4
        assert (batch.rollout_logp == batch.rollout_logp.float().double()).all()


def test_what_float32_cannot_hold_is_no_difference():
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    places = ["a", "b"]
    assert str(line_of("KL", one, one, places, "verl")).endswith("equal")
    near = line_of("KL", one, one * (1 + 1e-8), places, "verl")
    assert "equal in float32 (largest difference 1.0e-08" in near.text and not near.differs
    far = line_of("KL", one, one + torch.tensor([0.0, 1e-6]), places, "verl")
    assert far.differs and "first b: script 2, verl 2.000001" in far.text
    assert line_of("KL", one, one * torch.nan, places, "verl").differs


def test_the_first_update_that_differs_is_shown():
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    mask = torch.ones(1, 2).bool()

    def numbers(*losses: float) -> Numbers:
        updates = [Update(torch.tensor([0]), i, mask, zeros, zeros, zeros, zeros, zeros, None, loss)
                   for i, loss in enumerate(losses)]
        return Numbers(torch.tensor([0]), torch.ones(1), updates=updates)

    lines = {line.name: line.text for line in compare(numbers(1.0, 2.0, 3.0), numbers(1.0, 2.5, 4.0), "TRL")}
    assert "update 2, mini-batch: script 2, TRL 2.5" in lines["loss"] and lines["mask"] == "equal"


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "name verl or trl"), (["verl", "nothing.py"], "name verl or trl"),
    (["openrlhf", "grpo.py"], "name verl or trl"),
])
def test_mistyped_commands(arguments, said):
    with pytest.raises(ValueError, match=said):
        same_as.main(arguments)


"""A script's flags as settings of verl and of TRL: what tools/from_verl.py and tools/from_trl.py do, the other way
round. Only what the numbers of a step depend on."""

from typing import Any

from common.flags.correction import CorrectionConfig, resolve_correction
from tools.from_verl import ACTOR, CORRECTION, NUMBERS
from tools.verl_keys import BASELINES, KL
from tools.verl_keys import LOSSES as VERL_LOSSES
from variants.settings import LOSSES

CLIPPED = ("ppo", "grpo", "dapo", "dr_grpo")  # losses of grpo_variants.py that are verl's `vanilla`
ELSEWHERE = {"model", "train_data", "val_data", "run_dir", "total_steps", "total_epochs", "seed", "eval_every",
             "eval_n", "eval_prompts", "eval_temperature", "run_zero_advantage", "prompts_per_step",
             "samples_per_prompt", "max_tokens_per_gpu"}
"""Flags that say nothing of a loss."""
UPDATES = {"minibatches_per_step", "epochs_per_step"}
BOTH = {"clip_low", "clip_high", "clip_dual", "norm_by_std", "kl_loss_coef", "kl_estimator", "entropy_coef",
        "aggregation", "loss", "loss_numbers", "advantage", "baseline", "kl_reward_coef", "kl_reward_estimator"}
FROM_SCRIPT = {"overlong_buffer", "overlong_factor", "reward_coef"}
"""Flags that change rewards before verl and TRL see them: the peer gets the script's rewards."""
NO_LOSS = {"max_gen_batches", "keep_surplus", "on_few_groups", "mask_truncated", "teacher"}
"""Flags that choose responses or models, and no formula: the peer gets the same ones."""


class Objective:
    """What a script's flags say of its loss; defaults where a script has no such flag."""

    def __init__(self, flags: dict[str, Any]):
        self.flags = flags
        self.loss = flags.get("loss") or "grpo"
        self.baseline = flags.get("baseline", "")
        has_variants = "loss_numbers" in flags
        settings = LOSSES.get(self.loss) if has_variants else None
        if settings is not None:
            given = {name: flags.get(name) for name in ("clip_low", "clip_high", "clip_dual", "aggregation")}
            settings = settings._replace(**{name: value for name, value in given.items() if value is not None})
            self.numbers = settings.numbers | flags["loss_numbers"]
        else:
            self.numbers = {}
        source = settings._asdict() if settings is not None else flags
        self.clip_low, self.clip_high, self.clip_dual = (source.get(f"clip_{side}") for side in ("low", "high", "dual"))
        self.aggregation = source.get("aggregation") or "token-mean"
        norm = flags.get("norm_by_std", True)
        self.norm_by_std = self.loss != "dr_grpo" if norm is None else bool(norm)
        self.advantage = flags.get("advantage", "group")
        self.kl_coef = flags.get("kl_loss_coef", 0.0)
        self.kl_estimator = flags.get("kl_estimator", "k3")
        self.entropy_coef = flags.get("entropy_coef", 0.0)
        self.max_length = flags["rollout"]["max_response_length"]
        self.num_updates = flags.get("minibatches_per_step", 1) * flags.get("epochs_per_step", 1)
        given = {name: tuple(value) if isinstance(value, list) else value
                 for name, value in flags.get("correction", {}).items()}
        name = "reinforce" if self.loss == "reinforce" else "clipped"
        self.correction = resolve_correction(CorrectionConfig(**given), name, groups_after_rejection=True)

    def unknown(self, known: set[str]) -> list[str]:
        """Flags of the script that the peer has no option for, with their values. A flag that is off says nothing."""
        found = []
        for name, value in self.flags.items():
            is_off = value in (None, False, 0, "", [], {})
            if isinstance(value, dict) or is_off or name in ELSEWHERE | UPDATES | NO_LOSS | FROM_SCRIPT | known:
                continue
            if name not in COMMON:
                found.append(f"--{name.replace('_', '-')} {value}")
        return found


def common_flags() -> set[str]:
    """The flags that every script that samples has."""
    from dataclasses import fields

    from common.flags import RunArgs

    return {field.name for field in fields(RunArgs)}


COMMON = common_flags()


# --------------------------------------------------------------------------- verl

def verl_settings(objective: Objective) -> dict[str, str]:
    """verl's keys and values. Raises ValueError for what it has no option for."""
    keys = {f"{ACTOR}.loss_agg_mode": objective.aggregation}
    set_estimator(objective, keys)
    loss = objective.loss
    if objective.baseline:
        mode = "vanilla" if loss == "ppo" else "gpg"
    elif loss in CLIPPED:
        mode = "vanilla"
    else:
        mode = {ours: verls for verls, ours in VERL_LOSSES.items()}.get(loss, "gpg" if loss == "reinforce" else "")
    if not mode:
        raise ValueError(f"verl has no loss {loss}")
    keys[f"{ACTOR}.policy_loss.loss_mode"] = mode
    if mode == "vanilla":
        keys[f"{ACTOR}.clip_ratio_c"] = f"{objective.clip_dual}"
    if mode not in ("gpg", "sapo", "kl_cov", "dro"):
        keys[f"{ACTOR}.clip_ratio_low"] = f"{objective.clip_low}"
        keys[f"{ACTOR}.clip_ratio_high"] = f"{objective.clip_high}"
    for name, (verls, _) in NUMBERS.get(loss, {}).items():
        in_loss = verls.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))
        keys[f"{ACTOR}.{'policy_loss.' if in_loss else ''}{verls}"] = f"{objective.numbers[name]}"
    if objective.aggregation == "seq-mean-token-sum-norm":
        keys[f"{ACTOR}.loss_scale_factor"] = f"{objective.max_length}"
    if objective.entropy_coef:
        keys[f"{ACTOR}.entropy_coeff"] = f"{objective.entropy_coef}"
    verls_kl = {ours: verls for verls, ours in KL.items()}
    if objective.kl_coef:
        plain = objective.kl_estimator.removesuffix("+")
        keys |= {f"{ACTOR}.use_kl_loss": "True", f"{ACTOR}.kl_loss_coef": f"{objective.kl_coef}",
                 f"{ACTOR}.kl_loss_type": verls_kl[plain] + "+" * objective.kl_estimator.endswith("+")}
    coef = objective.flags.get("kl_reward_coef", 0.0)
    if coef:
        keys |= {"algorithm.use_kl_in_reward": "True", "algorithm.kl_ctrl.kl_coef": f"{coef}",
                 "algorithm.kl_penalty": verls_kl[objective.flags["kl_reward_estimator"]]}
    set_correction(objective, keys, mode)
    return keys


def set_estimator(objective: Objective, keys: dict[str, str]) -> None:
    flags = objective.flags
    if "lam" in flags:
        raise ValueError("a critic's advantages are not compared: a recorded batch has no values")
    if objective.baseline:
        names = {ours: verls for verls, ours in reversed(BASELINES.items())}
        if objective.baseline not in names:
            raise ValueError(f"verl has no advantage estimator {objective.baseline}")
        keys["algorithm.adv_estimator"] = names[objective.baseline]
        keys["algorithm.gamma"] = f"{flags.get('gamma', 1.0)}"
        return
    keys["algorithm.adv_estimator"] = {"group": "grpo", "passk": "grpo_passk"}.get(objective.advantage, "")
    if not keys["algorithm.adv_estimator"]:
        raise ValueError(f"--advantage {objective.advantage} is not compared: its components are no part of a batch")
    keys["algorithm.norm_adv_by_std_in_grpo"] = f"{objective.norm_by_std}"


def set_correction(objective: Objective, keys: dict[str, str], mode: str) -> None:
    correction = objective.correction
    if correction.weights == "geometric" or correction.rejected_leave_group:
        raise ValueError("verl has neither --correction.weights geometric nor --correction.rejected-leave-group")
    if correction.bypass:
        keys |= {f"{CORRECTION}.bypass_mode": "True",
                 f"{CORRECTION}.loss_type": "reinforce" if mode == "gpg" else "ppo_clip"}
    if correction.weights != "none":
        bounds = f"{correction.upper}"
        if correction.outside == "zero":
            bounds = f"{correction.lower}_{correction.upper}"
        elif correction.lower:
            raise ValueError(f"verl has no floor of weights: --correction.lower {correction.lower:g}")
        keys |= {f"{CORRECTION}.rollout_is": correction.weights, f"{CORRECTION}.rollout_is_threshold": bounds}
    if correction.batch_normalise:
        keys[f"{CORRECTION}.rollout_is_batch_normalize"] = "True"
    names, thresholds = [], []
    for kind, over, below, above in zip(correction.reject, correction.reject_over, correction.reject_below,
                                        correction.reject_above):
        names.append(f"{'' if over == 'token' else 'seq_'}{over}_{kind}")
        exact = f"{2.718281828459045 ** below!r}_{2.718281828459045 ** above!r}"
        thresholds.append(exact if kind == "k1" else f"{above}")
    if names:
        keys |= {f"{CORRECTION}.rollout_rs": ",".join(names),
                 f"{CORRECTION}.rollout_rs_threshold": ",".join(thresholds)}


# --------------------------------------------------------------------------- TRL

TRL_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo",
              "seq-mean-token-sum": "luspo"}
"""Aggregation -> TRL's loss_type of it, for clipped losses."""
NO_DELTA = 1e4  # from which on a dual clip is none


def trl_settings(objective: Objective) -> dict[str, str]:
    """Options of GRPOConfig. Raises ValueError for what TRL has no option for."""
    flags, loss = objective.flags, objective.loss
    if objective.baseline or "lam" in flags:
        raise ValueError("TRL's GRPOTrainer is compared: it has no such baselines, and its RLOOTrainer clips the "
                         "response's ratio (docs/from_trl.md)")
    if objective.advantage != "group":
        raise ValueError(f"TRL has no advantage {objective.advantage}")
    if flags.get("kl_reward_coef"):
        raise ValueError("TRL's GRPOTrainer has no KL in the rewards: --kl-reward-coef")
    keys = {}
    if loss in (*CLIPPED, "gspo"):
        if objective.aggregation not in TRL_LOSSES:
            raise ValueError(f"TRL has no aggregation {objective.aggregation}")
        keys |= {"loss_type": TRL_LOSSES[objective.aggregation], "epsilon": f"{objective.clip_low}",
                 "epsilon_high": f"{objective.clip_high}"}
        keys["importance_sampling_level"] = "sequence" if loss == "gspo" else "token"
        if objective.clip_dual is not None and objective.clip_dual < NO_DELTA:
            keys["delta"] = f"{objective.clip_dual}"
    elif loss == "cispo" and objective.aggregation == "token-mean" and objective.clip_low >= 1:
        keys |= {"loss_type": "cispo", "epsilon_high": f"{1 + objective.clip_high}"}
    elif loss == "sapo" and objective.aggregation == "seq-mean-token-mean":
        keys |= {"loss_type": "sapo", "sapo_temperature_pos": f"{objective.numbers['tau_pos']}",
                 "sapo_temperature_neg": f"{objective.numbers['tau_neg']}"}
    else:
        raise ValueError(f"TRL has no loss {loss} with --aggregation {objective.aggregation} and these bounds")
    keys["scale_rewards"] = "group" if objective.norm_by_std else "none"
    if objective.kl_coef:
        if objective.kl_estimator not in ("k3", "k3+"):
            raise ValueError(f"TRL has the KL estimator k3 alone, not {objective.kl_estimator}")
        keys |= {"beta": f"{objective.kl_coef}", "use_bias_correction_kl": f"{objective.kl_estimator == 'k3+'}"}
    if objective.entropy_coef:
        keys["entropy_coef"] = f"{objective.entropy_coef}"
    set_trl_correction(objective, keys)
    return keys | {"max_completion_length": f"{objective.max_length}"}


def set_trl_correction(objective: Objective, keys: dict[str, str]) -> None:
    correction = objective.correction
    if correction.bypass or correction.reject or correction.batch_normalise or correction.weights == "geometric":
        raise ValueError("TRL has weights of tokens and of responses: none of --correction.bypass, "
                         "--correction.reject, --correction.batch-normalise and --correction.weights geometric")
    if correction.weights == "none":
        return
    what = "mask" if correction.outside == "zero" else "truncate"
    keys |= {"use_vllm": "True", "vllm_importance_sampling_mode": f"{correction.weights}_{what}",
             "vllm_importance_sampling_clip_max": f"{correction.upper}"}
    if correction.lower:
        keys["vllm_importance_sampling_clip_min"] = f"{correction.lower}"

"""Prints our command for a verl command: a shell script that starts main_ppo, main_dapo, fully_async_main or a trainer
of supervised fine-tuning, or a hydra YAML file.

    python -m tools.from_verl run_qwen3_8b.sh
    python -m tools.from_verl run_qwen3_8b.sh MODEL_PATH=Qwen/Qwen3-4B trainer.nnodes=2 --rows 7473

No program of the script is started. Below the command stands what was converted, what has no equivalent and why, and
every key that this tool does not know. docs/from_verl.md lists the differences that no flag can remove.
"""

import json
import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from common.flags.record import PLACES
from tools.flags import exit_with_error
from tools.terminal import quoted, visible
from tools.verl_keys import BASELINES, DEFAULTS, KL, LOSSES, NEEDLESS, SAME, SCRIPTS, SWITCHES, WITHOUT
from tools.verl_programs import set_async_launch, set_async_sizes, set_sft
from tools.verl_settings import Settings, read_settings

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
TEACHERS, DISTILLATION = "distillation.teacher_models", "distillation.distillation_loss"
OFF = ("", "0", "0.0", "-1", "none", "null", "false", "disabled", "[]", "{}")  # values that ask for nothing
# --loss-numbers: loss -> our name: verl's key below actor or actor.policy_loss, and its default
NUMBERS = {
    "sapo": {"tau_pos": ("tau_pos", 1.0), "tau_neg": ("tau_neg", 1.05)},
    "kl_cov": {"fraction": ("kl_cov_ratio", 2e-4), "cov_kl_coef": ("ppo_kl_coef", 0.1)},
    "clip_cov": {
        "fraction": ("clip_cov_ratio", 2e-4), "cov_low": ("clip_cov_lb", 1.0), "cov_high": ("clip_cov_ub", 5.0),
    },
    "dppo_tv": {"max_ratio": ("clip_ratio_c", 3.0)},
    "dppo_kl": {"max_ratio": ("clip_ratio_c", 3.0)},
    "dro": {"beta": ("dro_beta", 0.0)},
}

@dataclass
class Translation:
    """The command, and what is to be said about each key. Keys in `without` and `needless` stand with their value."""

    script: str
    launch: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    mapped: list[str] = field(default_factory=list)

    def add(self, flag: str, *values: object) -> None:
        """Give a flag, unless this script has no such flag; then it is named as missing."""
        if self.script in SCRIPTS.get(flag, (self.script,)):
            self.flags[flag] = [str(value) for value in values]
        else:
            given = " ".join([flag, *map(str, values)])
            self.without[given] = f"{self.script}.py has no such flag; {in_scripts(flag)}"

    def argv(self) -> list[str]:
        return [word for flag, values in self.flags.items() for word in (flag, *values)]

    def command(self) -> str:
        lines = [" ".join(["torchrun", *self.launch, f"{self.script}.py"])]
        lines += [" ".join([flag, *map(quoted, values)]) for flag, values in self.flags.items()]
        return " \\\n    ".join(lines)


def in_scripts(flag: str) -> str:
    """Which scripts have a flag, in words."""
    *others, last = [f"{script}.py" for script in SCRIPTS[flag]]
    return f"{', '.join(others)} and {last} have it" if others else f"{last} has it"


# --------------------------------------------------------------------------- translation

def translate(given: dict[str, str], program: str = "main_ppo", rows: int = 0) -> Translation:
    """Our flags for verl's keys. `rows`: rows of the training files, to turn a share of the steps into steps."""
    verl = Settings(given)
    if program == "sft_trainer":
        return translate_sft(verl)
    ours = Translation(choose_script(verl, program))
    undiscounted = verl.get("algorithm.adv_estimator") in ("remax", "optimal_token_baseline")
    for key, flag in SAME.items():
        if ours.script not in SCRIPTS.get(flag, (ours.script,)) or (flag == "--gamma" and undiscounted):
            if key in verl.given:
                ours.needless[f"{key}={verl.get(key)}"] = f"this estimator does not read it; {flag} of ppo.py does"
        elif value := verl.get(key, DEFAULTS.get(key, "")):
            ours.add(flag, *(verl.items(key) if "[" in value else [value]))
    for key, flag in SWITCHES.items():
        if verl.is_on(key):
            ours.add(flag)
    for part in (set_sizes, set_objective, set_kl, set_correction, set_data, set_rollout, set_model,
                 set_validation, set_reward, set_trainer):
        part(verl, ours)
    set_steps(verl, ours, rows)
    drop_idle_flags(ours)
    end(verl, ours)
    return ours


def translate_sft(verl: Settings) -> Translation:
    ours = Translation("sft")
    set_sft(verl, ours)
    set_launch(verl, ours)
    set_logs(verl, ours)
    drop_idle_flags(ours)
    end(verl, ours)
    return ours


def end(verl: Settings, ours: Translation) -> None:
    """Name what must be given, and say something of each key."""
    ours.notes += [f"{flag} must be given" for flag in ("--model", "--train-data") if flag not in ours.flags]
    sort_the_rest(verl, ours)


def drop_idle_flags(ours: Translation) -> None:
    """The scripts refuse flags that have no effect."""
    has_project = {"wandb", "trackio"} & {*ours.flags.get("--log.to", [])}
    if not has_project and ours.flags.pop("--log.wandb-project", None):
        ours.needless["trainer.project_name"] = "no tracker with projects is in trainer.logger"
    is_constant = ours.flags.get("--optim.schedule", ["constant"]) == ["constant"]
    if is_constant and ours.flags.pop("--optim.min-lr-frac", None):
        prefix = "" if ours.script == "sft" else f"{ACTOR}."
        ours.needless[f"{prefix}optim.min_lr_ratio"] = "the learning rate is constant"


def choose_script(verl: Settings, program: str) -> str:
    """The estimator's script. GRPO has three: the paper's formula is in grpo.py, DAPO's in dapo.py, the rest in
    grpo_variants.py. With a teacher it is distill.py."""
    if verl.is_on("distillation.enabled"):
        return "distill"
    estimator = verl.get("algorithm.adv_estimator", "gae")
    if program == "fully_async_main":
        if estimator not in ("grpo", "grpo_vectorized") or find_loss(verl) != "grpo":
            raise ValueError(f"fully_async_main with adv_estimator={estimator}, loss {find_loss(verl)}: async_grpo.py "
                             f"has samplers on GPUs of their own, and the loss and advantages of grpo.py; for others, "
                             f"copy it and exchange its two functions")
        return "async_grpo"
    if estimator in BASELINES:
        return "rloo"
    if estimator == "gae":
        return "ppo"
    is_dapo = program == "main_dapo" or verl.is_on("algorithm.filter_groups.enable")
    is_dapo |= verl.is_on(f"{OVERLONG}.enable") and find_loss(verl) == "grpo"  # another loss matters more
    if is_dapo and estimator in ("grpo", "grpo_vectorized"):
        return "dapo"
    is_plain = find_loss(verl) == "grpo" and find_aggregation(verl) == "token-mean" and not kl_reward_coef(verl)
    return "grpo" if is_plain and estimator not in ("grpo_passk", "gdpo") else "grpo_variants"


def find_loss(verl: Settings) -> str:
    """The loss as grpo_variants.py names it; that of GRPO for one that is unknown."""
    mode = verl.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    no_ratio = verl.get(f"{CORRECTION}.loss_type") == "reinforce" and verl.is_on(f"{CORRECTION}.bypass_mode")
    return "reinforce" if no_ratio or mode == "gpg" else LOSSES.get(mode, "grpo")


def find_aggregation(verl: Settings) -> str:
    return verl.get(f"{ACTOR}.loss_agg_mode", "token-mean")


def kl_reward_coef(verl: Settings) -> float:
    """0: no KL in the reward."""
    coef = verl.number("algorithm.kl_ctrl.kl_coef", 0.001)
    return coef if verl.is_on("algorithm.use_kl_in_reward") else 0


def set_sizes(verl: Settings, ours: Translation) -> None:
    """verl counts a mini-batch in prompts and a micro-batch in responses or tokens."""
    tokens = find_token_budget(verl, ours)
    if ours.script == "async_grpo":
        set_async_sizes(verl, ours)
        ours.add("--max-tokens-per-gpu", tokens)
        return
    prompts, samples = verl.count("data.train_batch_size", 1024), verl.count(f"{ROLLOUT}.n", 1)
    minibatch = verl.count(f"{ACTOR}.ppo_mini_batch_size", 256)
    num_minibatches = max(1, round(prompts / minibatch))
    while prompts * samples % num_minibatches:
        num_minibatches -= 1
    if prompts != minibatch * num_minibatches:
        ours.notes.append(f"--minibatches-per-step {num_minibatches}, all of one size: {prompts} prompts a step are no "
                          f"multiple of ppo_mini_batch_size={minibatch}")
    if samples < 2 and ours.script in ("grpo", "dapo", "grpo_variants"):
        ours.without[f"{ROLLOUT}.n={samples}"] = "a group of one has no baseline; verl takes the reward as advantage"
    ours.add("--prompts-per-step", prompts)
    ours.add("--samples-per-prompt", samples)
    ours.add("--minibatches-per-step", num_minibatches)
    ours.add("--max-tokens-per-gpu", tokens)


def find_token_budget(verl: Settings, ours: Translation) -> float:
    tokens = verl.number(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    responses = verl.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0)
    if responses and not verl.is_on(f"{ACTOR}.use_dynamic_bsz"):
        longest = verl.number("data.max_prompt_length", 512) + verl.number("data.max_response_length", 512)
        tokens = responses * longest
        ours.notes.append(f"--max-tokens-per-gpu {tokens}: micro-batches of {responses} responses, at most {longest} "
                          f"tokens each")
    return tokens


def set_distillation(verl: Settings, ours: Translation) -> None:
    """Teachers, divergence and rewards of distill.py; verl's own defaults too, where they differ from ours."""
    names = {key.removeprefix(f"{TEACHERS}.").partition(".")[0] for key in verl.given if key.startswith(TEACHERS)}
    if len(names) > 1:
        names -= {"teacher_model"}                                      # verl drops its default entry then
    paths = {name: verl.get(f"{TEACHERS}.{name}.model_path") for name in sorted(names)}
    sources = {name: verl.get(f"{TEACHERS}.{name}.key") for name in paths}
    missing = [name for name in paths if not paths[name] or (len(paths) > 1 and not sources[name])]
    if missing or not paths:
        ours.notes.append("--teacher MODEL must be given, or DATA_SOURCE=MODEL for each of several")
    else:
        ours.add("--teacher", *(f"{sources[name]}={path}" if len(paths) > 1 else path for name, path in paths.items()))
    if (key := verl.get("distillation.teacher_key", "data_source")) != "data_source":
        ours.without[f"distillation.teacher_key={key}"] = "rows have the teacher of their data_source"
    mode, words = verl.get(f"{DISTILLATION}.loss_mode", "k3"), verl.number(f"{DISTILLATION}.topk", 128)
    gradient = verl.is_on(f"{DISTILLATION}.use_policy_gradient", True)
    if mode.startswith("forward_kl"):
        ours.add("--divergence", "forward-kl")
        ours.add("--top-k", words)
        ours.notes.append("leave out --top-k for the divergence over the whole vocabulary: here it costs no more")
    elif mode in KL:
        ours.notes.append(f"--divergence reverse-kl is KL(policy || teacher) over the whole vocabulary, which "
                          f"loss_mode={mode} estimates from the sampled word" + ", as a reward" * gradient)
    else:
        ours.without[f"{DISTILLATION}.loss_mode={mode}"] = "no such divergence; the command has reverse-kl"
    coef = verl.number(f"{DISTILLATION}.distillation_loss_coef", 1)
    if verl.is_on(f"{DISTILLATION}.use_task_rewards", True):
        ours.add("--reward-coef", 1 / coef if coef else 1)
        ours.notes.append("--reward-coef: the rewards' part is a policy gradient without a clip; at "
                          "distillation_loss_coef other than 1 the learning rate has another meaning")


def set_objective(verl: Settings, ours: Translation) -> None:
    if ours.script == "distill":
        set_distillation(verl, ours)
        return
    estimator = verl.get("algorithm.adv_estimator", "gae")
    mode = verl.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    loss = set_loss(verl, ours)
    if ours.script == "rloo":
        ours.add("--baseline", BASELINES[estimator])
    if estimator == "grpo_passk":
        ours.add("--advantage", "passk")
    elif estimator == "gdpo":
        ours.add("--advantage", "gdpo")
        set_components(verl, ours)
        if not verl.is_on("algorithm.norm_adv_by_std_in_grpo", True):
            ours.without["algorithm.norm_adv_by_std_in_grpo=False"] = (
                "gdpo without standard deviations: rloo.py --baseline reinforce++-baseline, with the weighted sum as "
                "the score")
    elif estimator not in ("gae", "grpo", "grpo_vectorized", *BASELINES):
        ours.without[f"algorithm.adv_estimator={estimator}"] = "no such advantage; the command is that of GRPO"
    if mode not in (*LOSSES, "bypass_mode", "gpg"):
        ours.without[f"{ACTOR}.policy_loss.loss_mode={mode}"] = f"no such loss; the command has {loss}"
    divides = ours.script in SCRIPTS["--norm-by-std"] and estimator != "gdpo"
    if not verl.is_on("algorithm.norm_adv_by_std_in_grpo", True) and divides:
        if ours.script == "grpo_variants":                              # there the loss has a say
            ours.add("--norm-by-std", False)
        else:
            ours.add("--no-norm-by-std")
    set_clip(verl, ours, loss)
    if ours.script == "dapo":
        set_dynamic_sampling(verl, ours)
    elif verl.is_on("algorithm.filter_groups.enable"):
        ours.without["algorithm.filter_groups.enable=True"] = "dapo.py alone samples groups again"


def set_loss(verl: Settings, ours: Translation) -> str:
    """The loss that the command has: the clipped one, which needs no flag but in two scripts, where this script has
    not verl's."""
    loss = find_loss(verl)
    set_numbers(verl, ours, loss)
    if ours.script == "grpo_variants":
        ours.add("--loss", loss)
        return loss
    has = ("grpo", "reinforce") if ours.script == "rloo" else ("grpo",)
    if loss not in has:
        ours.without[f"--loss {loss}"] = (
            f"{ours.script}.py clips the ratio; grpo_variants.py has this loss, with GRPO's advantages")
        loss = "grpo"
    if ours.script == "rloo":
        ours.add("--loss", "ppo" if loss == "grpo" else loss)
    return loss


def set_components(verl: Settings, ours: Translation) -> None:
    """GDPO's components and their factors; verl has further keys that begin with gdpo."""
    found = {end: verl.items(key) for key in sorted(verl.given) for end in ("keys", "weights")
             if key.startswith("algorithm.gdpo") and key.endswith(end)}
    names = found.get("keys", [])
    factors = found.get("weights", []) or ["1"] * len(names)
    if names:
        ours.add("--reward-components", *(word for pair in zip(names, factors) for word in pair))
    else:
        ours.notes.append("--reward-components NAME FACTOR ... must be given: numbers that the reward function returns")


def set_numbers(verl: Settings, ours: Translation, loss: str) -> None:
    """Numbers that one loss has; verl's own defaults too where they differ."""
    words: list[object] = []
    for name, (verls, default) in NUMBERS.get(loss, {}).items():
        key = next((key for key in (f"{ACTOR}.policy_loss.{verls}", f"{ACTOR}.{verls}") if key in verl.given), "")
        words += [name, verl.number(key, default)]
    if loss == "dro" and not words[1] and ours.script == "grpo_variants":
        ours.notes.append("--loss-numbers beta NUMBER must be given, as policy_loss.dro_beta in verl")
    elif words:
        ours.add("--loss-numbers", *words)


def set_clip(verl: Settings, ours: Translation, loss: str) -> None:
    """Clip bounds and aggregation of the loss, verl's own defaults too: ours are those of each loss's paper."""
    low, high = (verl.number(f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    dual, aggregation = verl.number(f"{ACTOR}.clip_ratio_c", 3.0), find_aggregation(verl)
    if loss not in ("sapo", "kl_cov", "dro", "reinforce"):
        ours.add("--clip-low", min(low, 1))
        ours.add("--clip-high", high)
        if low > 1:
            ours.notes.append(f"--clip-low 1: there is no lower bound, as with clip_ratio_low={low}")
    if loss == "grpo":
        ours.add("--clip-dual", dual)
    if loss in ("gspo", "sapo", "gmpo"):
        ours.notes.append(f"{loss} has its paper's aggregation, in verl too, whatever loss_agg_mode={aggregation} says")
    elif ours.script in SCRIPTS["--aggregation"]:
        ours.add("--aggregation", aggregation)
    elif aggregation != "token-mean":
        ours.without[f"{ACTOR}.loss_agg_mode={aggregation}"] = (
            f"{ours.script}.py takes the mean over all tokens; {in_scripts('--aggregation')}")
    if verl.get(f"{ACTOR}.clip_ratio"):
        ours.notes.append("clip_ratio does nothing in verl: clip_ratio_low and clip_ratio_high are set by default")
    if factor := verl.get(f"{ACTOR}.loss_scale_factor"):
        ours.without[f"{ACTOR}.loss_scale_factor={factor}"] = (
            "seq-mean-token-sum-norm divides by --rollout.max-response-length; scale the learning rate instead")
    replay = f"{ACTOR}.router_replay.mode"
    if mode := {"R2": "old-logp", "R3": "rollout"}.get(verl.given.get(replay)):
        verl.read |= {replay, f"{ROLLOUT}.enable_rollout_routing_replay"}
        ours.add("--policy.router-replay", mode)
        if mode == "rollout":
            ours.notes.append("--policy.router-replay rollout needs --rollout.tp 1: of an engine's ranks vLLM tells "
                              "the experts to the first one alone")


def set_dynamic_sampling(verl: Settings, ours: Translation) -> None:
    rounds = verl.number("algorithm.filter_groups.max_num_gen_batches", 0)
    metric = verl.get("algorithm.filter_groups.metric", "reward")
    if not verl.is_on("algorithm.filter_groups.enable"):
        ours.add("--max-gen-batches", 1)
        ours.notes.append("--max-gen-batches 1: no groups are sampled again; those with equal rewards are left out of "
                          "the update here, in verl they stay in the denominator")
    elif rounds > 0:
        ours.add("--max-gen-batches", rounds)
    else:
        ours.notes.append("max_num_gen_batches=0 is without end in verl; the default of --max-gen-batches is 10")
    if metric not in ("acc", "score", "seq_reward", "reward"):
        ours.without[f"algorithm.filter_groups.metric={metric}"] = "groups are chosen by their scores"


def set_kl(verl: Settings, ours: Translation) -> None:
    coef, kind = verl.number(f"{ACTOR}.kl_loss_coef", 0.001), verl.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    if verl.is_on(f"{ACTOR}.use_kl_loss") and coef:
        ours.add("--kl-loss-coef", coef)
        if kind.rstrip("+") in KL:
            ours.add("--kl-estimator", KL[kind.rstrip("+")] + ("+" if kind.endswith("+") else ""))
        else:
            ours.without[f"{ACTOR}.kl_loss_type={kind}"] = "no such estimator"
    coef, kind = kl_reward_coef(verl), verl.get("algorithm.kl_penalty", "kl")
    controller = verl.get("algorithm.kl_ctrl.type", "fixed")
    target, horizon = (verl.number(f"algorithm.kl_ctrl.{name}", default)
                       for name, default in (("target_kl", 0.1), ("horizon", 10000)))
    if coef:
        ours.add("--kl-reward-coef", coef)
        if kind in KL:
            ours.add("--kl-reward-estimator", KL[kind])
        else:
            ours.without[f"algorithm.kl_penalty={kind}"] = "no such estimator"
        if controller == "adaptive":
            for flag, value in (("controller", controller), ("target", target), ("horizon", horizon)):
                ours.add(f"--kl-{flag}", value)


def set_correction(verl: Settings, ours: Translation) -> None:
    """algorithm.rollout_correction: thresholds of ratios become bounds of the estimate, their logarithm for k1."""
    bypass = verl.is_on(f"{CORRECTION}.bypass_mode")
    weights = verl.get(f"{CORRECTION}.rollout_is")
    bounds = verl.get(f"{CORRECTION}.rollout_is_threshold", "2.0").split("_")
    normalise = verl.is_on(f"{CORRECTION}.rollout_is_batch_normalize")
    if bypass:
        ours.add("--correction.bypass", "True")
    if weights and bypass and "reinforce" not in ours.flags.get("--loss", []):
        ours.notes.append(f"rollout_is={weights}: with bypass_mode the ratio of the loss is the weight, in verl too")
    elif weights:
        ours.add("--correction.weights", weights)
        ours.add("--correction.upper", bounds[-1])
        if len(bounds) == 2:
            ours.add("--correction.lower", bounds[0])
            ours.add("--correction.outside", "zero")
        if normalise:
            ours.add("--correction.batch-normalise")
    criteria, thresholds = verl.items(f"{CORRECTION}.rollout_rs"), verl.items(f"{CORRECTION}.rollout_rs_threshold")
    if len(thresholds) == 1:
        thresholds *= len(criteria)                                     # one for all of them
    if len(thresholds) != len(criteria):
        raise ValueError(f"{CORRECTION}.rollout_rs_threshold must be one threshold, or one for each of the "
                         f"{len(criteria)} criteria of rollout_rs; it has {len(thresholds)}")
    flags: dict[str, list[object]] = {"reject": [], "reject-over": [], "reject-below": [], "reject-above": []}
    for name, threshold in zip(criteria, thresholds):
        level, _, estimate = name.rpartition("_")
        if estimate not in KL:
            ours.without[f"{CORRECTION}.rollout_rs={name}"] = "a criterion of an earlier version"
            continue
        bounds = bounds_of(estimate, threshold)
        for flag, value in zip(flags, (estimate, level.removeprefix("seq_"), *bounds)):
            flags[flag].append(value)
    for flag, values in flags.items():
        if values:
            ours.add(f"--correction.{flag}", *values)


def bounds_of(estimate: str, threshold: str) -> list[object]:
    """The bounds of an estimate of the KL for verl's threshold, LOWER_UPPER or UPPER."""
    low, _, high = threshold.rpartition("_")
    try:
        lower, upper = float(low or 1), float(high)
    except ValueError:
        lower = upper = 0.0
    if not (lower > 0 and upper > 0):
        raise ValueError(f"{CORRECTION}.rollout_rs_threshold={visible(threshold)} must be a number above 0, or two as "
                         f"0.5_2.0")
    if estimate != "k1":
        return ["-inf", high]
    return [round(math.log(bound), 6) for bound in (lower if low else 1 / upper, upper)]


def set_data(verl: Settings, ours: Translation) -> None:
    for key, flag in (("data.train_files", "--train-data"), ("data.val_files", "--val-data")):
        if files := verl.items(key):
            ours.add(flag, *files)
    cut = verl.get("data.truncation", "error")
    long = {"error": "error", "left": "truncate-left"}
    if verl.is_on("data.filter_overlong_prompts"):
        ours.add("--data.on-long-prompt", "filter")
    elif cut in long:
        ours.add("--data.on-long-prompt", long[cut])
    else:
        ours.without[f"data.truncation={cut}"] = "a prompt loses its start, never its middle or its end"
    if (column := verl.get("data.image_key", "images")) != "images":
        ours.without[f"data.image_key={column}"] = "images are read from the column images"
    if not verl.is_on("data.shuffle", True):
        ours.without["data.shuffle=False"] = "prompts are shuffled anew in every epoch"
    prefix = "data.apply_chat_template_kwargs."
    template = {key.removeprefix(prefix): verl.value(key) for key in verl.given if key.startswith(prefix)}
    if template:
        ours.add("--data.chat-template-kwargs", json.dumps(template))


def set_rollout(verl: Settings, ours: Translation) -> None:
    name = verl.get(f"{ROLLOUT}.name", "vllm")
    if name == "hf":
        ours.add("--rollout.engine", "hf")
    elif name != "vllm":
        ours.without[f"{ROLLOUT}.name={name}"] = "vLLM is the only fast engine, and the command has it"
    for key, flag in (("top_k", "--rollout.top-k"), ("val_kwargs.top_k", "--rollout.val-top-k")):
        if (tokens := verl.number(f"{ROLLOUT}.{key}", -1)) > 0:
            ours.add(flag, tokens)
    if verl.is_on(f"{ROLLOUT}.multi_turn.enable"):
        set_episodes(verl, ours)
    is_cut = verl.number(f"{ROLLOUT}.top_p", 1) < 1 or "--rollout.top-k" in ours.flags
    if is_cut and not {"--correction.weights", "--correction.bypass"} & ours.flags.keys():
        ours.notes.append("top_p and top_k in training need the engine correction here, for instance "
                          "--correction.preset decoupled-token-is; verl trains with the biased gradient")
    extra = {name: verl.value(f"{ROLLOUT}.{name}") for name in ("max_num_batched_tokens", "enable_chunked_prefill")
             if verl.get(f"{ROLLOUT}.{name}")}
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    for key in verl.given:
        if key.startswith(prefix) and not any(fnmatchcase(key, pattern) for pattern in (*NEEDLESS, *WITHOUT)):
            name, _, inner = key.removeprefix(prefix).partition(".")
            value = verl.value(key)
            before = extra.get(name, {}) if inner else {}
            if not isinstance(before, dict):
                raise ValueError(f"{visible(prefix + name)} is given as a value, and {visible(inner)} of it")
            extra[name] = before | {inner: value} if inner else value
    if extra:
        ours.add("--rollout.extra", json.dumps(extra))


def set_episodes(verl: Settings, ours: Translation) -> None:
    """multi_turn: verl's tools and users of its GSM8K example are in envs/verl_tools.py; others are written there."""
    multi_turn = f"{ROLLOUT}.multi_turn"
    ours.add("--rollout.episode", "envs/verl_tools.py")
    ours.add("--rollout.tool-parser", verl.get(f"{multi_turn}.format", "hermes"))
    turns = verl.number(f"{multi_turn}.max_assistant_turns", 0)
    if turns:
        ours.add("--rollout.max-turns", turns)
    else:
        ours.notes.append("--rollout.max-turns must be given: without max_assistant_turns verl has no limit but the "
                          "length of a response")
    for name in ("tool_config_path", "interaction_config_path"):
        if path := verl.get(f"{multi_turn}.{name}"):
            ours.notes.append(f"the tools and users that {path} names must be in TOOLS and INTERACTIONS of "
                              f"envs/verl_tools.py, which has those of verl's GSM8K example: docs/environments.md")


def set_model(verl: Settings, ours: Translation) -> None:
    """How the trainer holds and divides its models."""
    model = "actor_rollout_ref.model"
    if verl.get(f"{model}.enable_gradient_checkpointing"):
        ours.add("--policy.gradient-checkpointing", verl.is_on(f"{model}.enable_gradient_checkpointing"))
    for key in (f"{ACTOR}.strategy", "actor_rollout_ref.ref.strategy", "critic.strategy"):
        if verl.get(key, "fsdp") not in ("fsdp", "fsdp2"):
            ours.without[f"{key}={verl.get(key)}"] = "FSDP2 is the only training backend"
    if (size := verl.number(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1)) > 1:
        ours.add("--policy.sequence-parallel", size)
    rank, alpha = verl.number(f"{model}.lora_rank", 0), verl.number(f"{model}.lora_alpha", 16)
    targets = verl.items(f"{model}.target_modules")
    if rank > 0:
        ours.add("--lora.rank", rank)
        ours.add("--lora.alpha", alpha)
        if targets and targets != ["all-linear"]:
            ours.add("--lora.targets", *targets)


def set_validation(verl: Settings, ours: Translation) -> None:
    """verl validates with one kind of sampling; here a greedy response comes first, and --eval-n sampled ones."""
    prefix = f"{ROLLOUT}.val_kwargs"
    count, temperature = verl.number(f"{prefix}.n", 1), verl.number(f"{prefix}.temperature", 0)
    if temperature > 0:
        ours.add("--eval-temperature", temperature)
    ours.add("--eval-n", count if temperature > 0 else 0)
    ours.add("--eval-prompts", max(verl.number("data.val_max_samples", -1), 0))
    ours.add("--eval-every", max(verl.number("trainer.test_freq", -1), 0))
    if not verl.is_on("trainer.val_before_train", True):
        ours.without["trainer.val_before_train=False"] = "with --val-data a run is validated before its first step"
    if verl.is_on("trainer.val_only"):
        ours.without["trainer.val_only=True"] = "a run trains"


def set_reward(verl: Settings, ours: Translation) -> None:
    path = verl.get("reward.custom_reward_function.path")
    name = verl.get("reward.custom_reward_function.name", "compute_score")
    if path:
        ours.add("--reward.function", f"{path}:{name}")
    prefix = "reward.custom_reward_function.reward_kwargs."
    kwargs = {key.removeprefix(prefix): verl.value(key) for key in verl.given if key.startswith(prefix)}
    if url := verl.get("reward.sandbox_fusion.url"):
        kwargs["sandbox_fusion_url"] = url
    if kwargs:
        ours.add("--reward.kwargs", json.dumps(kwargs))
    manager = verl.get("reward.reward_manager.name", "naive")
    if manager not in ("naive", "dapo", "prime", "batch"):
        ours.without[f"reward.reward_manager.name={manager}"] = "a reward is one number, the sum of --reward.function"
    length, factor = verl.number(f"{OVERLONG}.len", 0), verl.number(f"{OVERLONG}.penalty_factor", 1.0)
    if verl.is_on(f"{OVERLONG}.enable"):
        ours.add("--overlong-buffer", length)
        ours.add("--overlong-factor", factor)
    model = verl.get("reward.reward_model.model_path")
    if verl.is_on("reward.reward_model.enable") and model and path:
        ours.without[f"reward.reward_model.model_path={model}"] = (
            f"{path} asks it: a model that writes its judgement is served by vLLM, and --reward.function "
            f"rewards/judge.py asks it (docs/data.md)")
    elif verl.is_on("reward.reward_model.enable") and model:
        ours.add("--reward-model.path", model)
        ours.add("--reward-model.alone")
        ours.notes.append("--reward-model.path takes a sequence classifier with one label; of a model that writes its "
                          "judgement, rewards/judge.py is the counterpart")


def set_launch(verl: Settings, ours: Translation) -> None:
    gpus, nodes = verl.count("trainer.n_gpus_per_node", 8), verl.count("trainer.nnodes", 1)
    ours.launch = ["--standalone"]
    if nodes > 1:
        ours.launch = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500"]
        ours.notes.append(f"run the command on each of the {nodes} nodes, with the first one's name for HEAD_NODE; "
                          f"with Slurm, SCRIPT={ours.script}.py sbatch --nodes {nodes} slurm/many_nodes.sbatch and the "
                          f"same flags")
    ours.launch += ["--nproc-per-node", str(gpus)]


def set_logs(verl: Settings, ours: Translation) -> None:
    name = verl.get("trainer.experiment_name", "gsm8k")
    ours.add("--run-dir", verl.get("trainer.default_local_dir", f"runs/{name}"))
    loggers = verl.items("trainer.logger")
    if targets := [name for name in loggers if name in PLACES]:
        ours.add("--log.to", *targets)
    for name in loggers:
        if name not in (*PLACES, "console", "file"):
            ours.without[f"trainer.logger={name}"] = \
                "metrics go to the console, metrics.jsonl, wandb, TensorBoard and Trackio"


def set_trainer(verl: Settings, ours: Translation) -> None:
    if ours.script == "async_grpo":
        set_async_launch(verl, ours)
    else:
        set_launch(verl, ours)
    set_logs(verl, ours)
    ours.add("--save.every", max(verl.number("trainer.save_freq", -1), 0))
    mode, source = verl.get("trainer.resume_mode", "auto"), verl.get("trainer.resume_from_path")
    if mode == "disable":
        ours.add("--save.resume", "none")
    elif mode == "resume_path":
        ours.add("--save.resume", source)
        ours.notes.append(f"--save.resume takes a checkpoint of ours; of verl's {source} only exported weights can be "
                          f"used, as --model")


def set_steps(verl: Settings, ours: Translation, rows: int) -> None:
    """Steps, which verl may give as epochs; a learning rate's warm-up, which it may give as a share of them."""
    steps = verl.number("trainer.total_training_steps", 0)
    if ours.script == "async_grpo":
        steps = int(ours.flags.get("--total-steps", ["0"])[0])
    epochs, prompts = verl.number("trainer.total_epochs", 30), int(ours.flags["--prompts-per-step"][0])
    if steps:
        ours.add("--total-steps", steps)
    else:
        ours.add("--total-epochs", epochs)
        if verl.is_on("algorithm.filter_groups.enable"):
            ours.notes.append(f"--total-epochs {epochs} counts one rollout a step: with dynamic sampling it draws up "
                              f"to --max-gen-batches of them, and there are as many times the passes; verl ends after "
                              f"{epochs}. --total-steps sets the steps that it takes")
        steps = (rows or count_rows(ours.flags.get("--train-data", []))) * epochs // prompts
    for model, flag in ((ACTOR, "--optim.warmup-steps"), ("critic", "--critic-optim.warmup-steps")):
        share = verl.number(f"{model}.optim.lr_warmup_steps_ratio", 0)
        warmup = verl.number(f"{model}.optim.lr_warmup_steps", -1)
        if warmup < 0 < share and not steps:
            ours.notes.append(f"{flag} must be given: {share:g} of the steps, and the training files are not here to "
                              f"be counted; --rows N counts for them")
        warmup = int(share * steps) if warmup < 0 else warmup
        if warmup > 0:
            ours.add(flag, warmup)
        kind = "adamw-bf16" if verl.is_on(f"{model}.optim.override_optimizer_config.bf16_stochastic_round") else ""
        if verl.given.get(f"{model}.optim.optimizer") == "AdamW8bit":   # of torchao or bitsandbytes
            verl.read |= {f"{model}.optim.optimizer", f"{model}.optim.optimizer_impl"} & verl.given.keys()
            kind = "adamw-8bit"
        if verl.given.get(f"{model}.optim.optimizer", "").lower() == "muon":    # Megatron-Core's, or torch.optim's
            verl.read |= {f"{model}.optim.optimizer", f"{model}.optim.optimizer_impl"} & verl.given.keys()
            kind = "muon"
        if kind:
            ours.add(flag.replace("warmup-steps", "kind"), kind)


def count_rows(files: list[str]) -> int:
    """Rows of parquet files; 0 if one of them is not here."""
    paths = [Path(file).expanduser() for file in files]
    if not all(path.suffix == ".parquet" and path.is_file() for path in paths):
        return 0
    try:
        return sum(pq.read_metadata(path).num_rows for path in paths)
    except pa.ArrowInvalid as error:
        raise ValueError(f"the rows of {', '.join(files)} cannot be counted: {error}; --rows N counts for them"
                         ) from None


def sort_the_rest(verl: Settings, ours: Translation) -> None:
    """Every key that was given is mapped, needless, without equivalent, or unknown."""
    for key, value in verl.given.items():
        shown = f"{verl.names[key]}={value}"
        if key in verl.read:
            ours.mapped.append(key)
            continue
        needless = next((why for pattern, why in NEEDLESS.items() if fnmatchcase(key, pattern)), None)
        missing = next((why for pattern, why in WITHOUT.items() if fnmatchcase(key, pattern)), None)
        if needless is not None:
            ours.needless[shown] = needless
        elif missing is None:
            ours.unknown.append(shown)
        elif value.lower() in OFF or (value == "1" and "parallel" in key):
            ours.needless[shown] = "it is off"
        else:
            ours.without[shown] = missing


# --------------------------------------------------------------------------- the program

@dataclass
class Args:
    source: Annotated[str, tyro.conf.Positional]
    """A shell script that starts verl.trainer.main_ppo or DAPO's main_dapo, or a hydra YAML file."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """NAME=VALUE for a variable of the script, some.key=VALUE for a setting."""
    rows: int = 0
    """Rows of the training files, where they are not on this machine: turns a share of the steps into steps."""


def by_reason(found: dict[str, str]) -> list[str]:
    """One line for each reason, with its keys."""
    groups: dict[str, list[str]] = {}
    for key, why in found.items():
        groups.setdefault(why, []).append(key)
    return [f"{', '.join(keys)}: {why}" for why, keys in groups.items()]


def report(ours: Translation, not_understood: list[str]) -> str:
    parts = [ours.command()]
    for title, lines in (
        ("Converted", ours.notes),
        ("No equivalent", by_reason(ours.without)),
        ("Unknown to this tool, not used", ours.unknown),
        ("Needs no flag", by_reason(ours.needless)),
        ("Read without running it", not_understood),
    ):
        if lines:
            parts.append("\n".join([f"# {title}:", *(f"#   {visible(line)}" for line in lines)]))
    parts.append("# Differences that no flag removes: docs/from_verl.md")
    return "\n\n".join(parts)


def main(args: Args) -> None:
    source = Path(args.source)
    if not source.is_file():
        raise ValueError(f"{source} does not exist; give a shell script or a YAML file")
    if args.rows < 0:
        raise ValueError(f"--rows {args.rows} must not be negative")
    given, program, notes = read_settings(source, list(args.overrides))
    print(report(translate(given, program, args.rows), notes))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        exit_with_error(error)

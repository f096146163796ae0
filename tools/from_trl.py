"""Prints our command for each TRL command of a file: a Python script of TRL's (its docstring and its
`GRPOConfig(...)`), a shell script, or one command as a text.

    python -m tools.from_trl examples/scripts/dpo.py --gpus 8
    python -m tools.from_trl 'trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara'

Nothing of the file is run. Below each command stands what was converted, what has no equivalent and why, and every
option that this tool does not know. docs/from_trl.md lists the differences that no flag can remove.
"""

import argparse
import ast
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.flags.record import PLACES
from tools.terminal import quoted, visible
from tools.trl_options import (
    ARGUMENTS,
    BOOLS,
    DEFAULTS,
    KINDS,
    LEARNING_RATE,
    LORA,
    NEEDLESS,
    NO_SCRIPT,
    ONLY,
    PAIRS_OR_TEXT,
    SAME,
    SAMPLING,
    SWITCHES,
    WITHOUT,
)

START = re.compile(r"^\W*(?:\$ )?((?:\w+=\S+ +)*(?:accelerate launch|torchrun|python3?|uv run|trl)\b.*)$")
# arguments of a trainer that are not in its configuration: with a place of their own here, and those read elsewhere
TRAINER_NAMES = {"model": "model_name_or_path", "reward_funcs": "reward_funcs",
                 "teacher_model": "teacher_model_name_or_path"}
TRAINER_KNOWN = ("args", "train_dataset", "eval_dataset", "processing_class", "peft_config", "tokenizer",
                 "quantization_config")
TRAINER_POSITIONS = {"GRPOTrainer": ("model", "reward_funcs", "args"), "RLOOTrainer": ("model", "reward_funcs", "args"),
                     **dict.fromkeys(("DPOTrainer", "KTOTrainer"), ("model", "ref_model", "args")),
                     "SFTTrainer": ("model", "args")}
ON = ("true", "t", "yes", "y", "1")                                     # in any case, as transformers reads them
OFF = ("False", "false", "0", "no", "None", "none", "")
MAX_RESPONSE = "--rollout.max-response-length"
Options = dict[str, list[str]]


@dataclass
class Translation:
    """One command. Options in `without` and `needless` stand with their value."""

    kind: str
    options: Options
    gpus: int = 1
    script: str = ""
    flags: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def text(self, name: str, default: str = "") -> str:
        self.used.add(name)
        found = self.options.get(name)
        return default if found is None else " ".join(found)

    def number(self, name: str, default: float) -> float:
        text = self.text(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"--{name} {visible(text)} must be a number") from None

    def is_on(self, name: str, default: bool = False) -> bool:
        self.used.add(name)
        return default if name not in self.options else " ".join(self.options[name]).lower() in ("", *ON)

    def add(self, flag: str, *values: object) -> None:
        self.flags[flag] = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]

    def argv(self) -> list[str]:
        return [word for flag, values in self.flags.items() for word in (flag, *values)]

    def command(self) -> str:
        lines = [f"torchrun --standalone --nproc-per-node {self.gpus} {self.script}.py"]
        lines += [" ".join([flag, *map(quoted, values)]) for flag, values in self.flags.items()]
        return " \\\n    ".join(lines)


# --------------------------------------------------------------------------- reading

def words_of(command: str, own: str = "") -> tuple[str, Options] | None:
    """TRL's script in a command, and its options. None: no script of TRL's is started. `own`: another name that is one,
    of the file that the command stands in."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return None
    for place, word in enumerate(words):
        name = Path(word).stem if word.endswith(".py") else word.removeprefix("trl.scripts.")
        is_script = word.endswith(".py") or word.startswith("trl.scripts.") or (place and words[place - 1] == "trl")
        if is_script and (name in KINDS or name in NO_SCRIPT or name == own):
            return name, processes_of(words[:place]) | options_of(words[place + 1 :])
    return None


def processes_of(launcher: list[str]) -> Options:
    """{"num_processes": [N]}, all that accelerate or torchrun start; {} if the launcher does not say."""
    given = options_of(launcher)
    counts = [" ".join(given.get(name, [])) for name in ("num_processes", "nproc_per_node")]
    nodes = " ".join(given.get("nnodes", ["1"]))
    found = counts[0] if counts[0].isdecimal() else ""
    if counts[1].isdecimal() and nodes.isdecimal():
        found = str(int(counts[1]) * int(nodes))
    return {"num_processes": [found]} if found else {}


def options_of(words: list[str]) -> Options:
    """--name VALUE ..., --name=VALUE and switches."""
    found: Options = {}
    current: list[str] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, separator, value = word.lstrip("-").partition("=")
            current = found[name.replace("-", "_")] = [value] if separator else []
        elif word in ("|", "&&", ";", ">", "2>&1", "&"):
            break
        elif word not in ("$@", "\\"):
            current.append(word.rstrip(",") if len(word) > 1 else word)
    return found


def commands_of(text: str, own: str = "") -> list[tuple[str, Options]]:
    """Those of a text's lines that start one of TRL's scripts, or the one named `own`."""
    lines = re.sub(r"\\\s*\n", " ", text).splitlines()
    found = [words_of(match[1].rstrip("`"), own) for line in lines if (match := START.match(line))]
    return [one for one in found if one]


def settings_of(tree: ast.Module) -> tuple[str, Options, list[str]]:
    """(configuration, options, what is no plain value) from `GRPOConfig(...)`, `LoraConfig(...)` and `GRPOTrainer(...)`
    in the code; "" without a configuration."""
    kind, found, notes = "", {}, []
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in KINDS or name in NO_SCRIPT:
            kind = kind or name
            renamed = {key: key for key in given}
        elif name == "LoraConfig":
            found["use_peft"] = []
            # peft's own defaults, which are not those of TRL's command line
            found |= {LORA[key]: ["8"] for key in ("r", "lora_alpha") if key not in given}
            renamed = {key: LORA.get(key, f"LoraConfig.{key}") for key in given}
        elif name.endswith("Trainer"):
            given = dict(zip(TRAINER_POSITIONS.get(name, ("model",)), node.args)) | given
            renamed = {key: TRAINER_NAMES.get(key, f"{name}.{key}") for key in given if key not in TRAINER_KNOWN}
        else:
            continue
        if any(keyword.arg is None for keyword in node.keywords):
            notes.append(f"{name}(**...): what it holds is not read")
        for key, value in given.items():
            if key not in renamed:
                continue
            try:
                found[renamed[key]] = as_words(ast.literal_eval(value))
            except ValueError:
                listed = value.elts if isinstance(value, ast.List) else [value]
                if key == "reward_funcs" and (isinstance(value, ast.List) or ast.unparse(value) in functions):
                    found["reward_funcs"] = [ast.unparse(one) for one in listed]
                elif "." in renamed[key]:                               # of a trainer: that it is given is what counts
                    found[renamed[key]] = [ast.unparse(value)]
                elif key not in ("model", "args") and key not in NEEDLESS and renamed[key] not in NEEDLESS:
                    notes.append(f"{key}={ast.unparse(value)} is no plain value and not used")
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.endswith("Config")}
    named &= {*KINDS, *NO_SCRIPT}
    if not kind and len(named) == 1:                                    # TrlParser((ScriptArguments, GRPOConfig))
        kind = named.pop()
    return kind, found, notes


def data_of(tree: ast.Module) -> Options:
    """The name of the data set that the code loads, if it is one and a plain text."""
    loaded = [node.args for node in ast.walk(tree) if isinstance(node, ast.Call)
              and ast.unparse(node.func).rpartition(".")[2] == "load_dataset" and node.args]
    names = {args[0].value for args in loaded if isinstance(args[0], ast.Constant) and isinstance(args[0].value, str)}
    configs = {args[1].value for args in loaded if len(args) > 1 and isinstance(args[1], ast.Constant)}
    if len(names) != 1:
        return {}
    return {"dataset_name": [*names]} | ({"dataset_config": [str(*configs)]} if len(configs) == 1 else {})


def as_words(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def read(source: str) -> tuple[list[tuple[str, Options]], list[str]]:
    """The commands in a file, or in the text of one command."""
    path = Path(source)
    if not path.is_file():
        found = commands_of(source)
        if not found:
            raise ValueError(f"{visible(source)} is neither a file nor a command that starts one of TRL's scripts, "
                             f"such as 'trl sft --model_name_or_path MODEL --dataset_name DATA'")
        return found, []
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix != ".py":
        found, notes = commands_of(text), []
    else:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{source} is no Python: {error}") from None
        kind, settings, notes = settings_of(tree)
        settings = data_of(tree) | settings
        if settings and not kind and path.stem in KINDS:
            kind = path.stem
        if "vlm" in path.stem and KINDS.get(kind) in ("sft", "dpo"):
            kind = f"{KINDS[kind]}_vlm"
        given = commands_of(ast.get_docstring(tree) or "", path.stem)
        is_known = path.stem in KINDS or path.stem in NO_SCRIPT
        found = [(name if name != path.stem or is_known else kind, settings | options) for name, options in given
                 if name != path.stem or is_known or kind]
        if not found and kind:
            found = [(kind, settings)]
        elif not found and (path.stem in KINDS or path.stem in NO_SCRIPT):
            found = [(path.stem, {})]
    if not found:
        raise ValueError(f"{source} has no command that starts one of TRL's scripts, and no GRPOConfig(...) or another "
                         f"configuration of TRL's")
    return found, notes


# --------------------------------------------------------------------------- translation

def translate(name: str, options: Options, gpus: int = 0) -> Translation:
    """Our command for one of TRL's. `gpus` 0: as many as its launcher starts. ValueError where there is no script."""
    if name in NO_SCRIPT:
        raise ValueError(f"{name}: this tool translates none of its commands; {NO_SCRIPT[name]}")
    given = {option: values for option, values in options.items() if values != ["None"]}    # as if not given
    started = " ".join(given.pop("num_processes", []))                  # of the launcher, or of `trl sft`
    gpus = gpus or (int(started) if started.isdecimal() else 0) or 1
    new = Translation(KINDS[name], DEFAULTS.get(name, {}) | given, gpus)
    new.script = new.kind
    for option, flag in SAME.items():
        if option in new.options and new.kind in ONLY.get(flag, (new.kind,)):
            new.used.add(option)
            if flag in SWITCHES:
                new.flags |= {flag: []} if new.is_on(option) else {}
            elif flag in BOOLS:
                new.add(flag, new.is_on(option))
            else:
                new.add(flag, *(new.options[option] or ["True"]))
    new.add("--model", new.text("model_name_or_path") or "MODEL")
    read_data(new)
    updates = add_sizes(new)
    add_intervals(new)
    add_optimizer(new, updates)
    if name.endswith("vlm"):
        new.notes.append("images are in a column `images`, a list in each row, and <image> stands in the prompt: "
                         "docs/data.md")
    if new.kind in SAMPLING:
        add_objective(new)
    else:
        add_supervised(new)
    for option, flag in (("max_length", "--data.max-length"), ("max_completion_length", MAX_RESPONSE)):
        if options.get(option) == ["None"] and flag in new.flags:
            new.notes.append(f"{flag} {new.flags[flag][0]}: TRL's {option} is None, no limit. Here it must be a "
                             f"number, and what is longer is always cut or left out: give one that nothing exceeds")
    for option, values in given.items():
        said = " ".join([f"--{option}", *values])
        if option in new.used or (option in SAME and SAME[option] in new.flags):
            continue
        # an argument of a trainer stands with the trainer's name
        name, is_argument = option.rpartition(".")[2], "Trainer." in option
        said = " ".join([f"{option}={' '.join(values)}"]) if is_argument else said
        if is_argument and name in ARGUMENTS:
            new.without[said] = ARGUMENTS[name]
        elif option in NEEDLESS:
            new.needless[said] = NEEDLESS[option]
        elif option in WITHOUT:
            new.without[said] = WITHOUT[option]
        else:
            new.unknown.append(said)
    return new


def read_data(new: Translation) -> None:
    """--train-data and --val-data: files, which TRL's data sets become by one line each."""
    name = new.text("dataset_name") or "DATASET"
    config, folder = new.text("dataset_config"), f"data/{name.rpartition('/')[2]}"
    splits = {"train": new.text("dataset_train_split", "train")}
    if new.text("eval_strategy", "no") != "no":
        splits["val"] = new.text("dataset_test_split", "test")
    for ours, split in splits.items():
        new.add(f"--{ours}-data", f"{folder}/{split}.parquet")
        given, file = ", ".join(repr(word) for word in (name, config) if word), f"{folder}/{split}.parquet"
        code = f"import datasets; datasets.load_dataset({given}, split={split!r}).to_parquet({file!r})"
        # in double quotes it is easier to read than with '"'"' in it, and bash must find nothing to obey there
        new.before.append("python -c " + (quoted(code) if re.search(r'["$`\\!]', code) else f'"{code}"'))


def add_sizes(new: Translation) -> float:
    """Batches and steps. TRL's are of one GPU. Returns the optimizer steps of a step here."""
    per_device = new.number("per_device_train_batch_size", 8)
    accumulated = new.number("gradient_accumulation_steps", 1)
    updates = 1.0
    if new.kind in PAIRS_OR_TEXT:
        rows = int(per_device * accumulated * new.gpus)
        new.add("--rows-per-step", rows)
        new.notes.append(f"--rows-per-step {rows}: {per_device:g} rows x {accumulated:g} accumulated x {new.gpus} GPUs")
    else:
        updates = add_rollout_sizes(new, per_device, accumulated)
    steps = new.number("max_steps", -1)
    if steps > 0:
        new.add("--total-steps", max(1, round(steps / updates)))
        if updates > 1:
            new.notes.append(f"--total-steps: {steps:g} optimizer steps, {updates:g} a rollout")
    elif episodes := new.number("total_episodes", 0):
        new.add("--total-steps", max(1, round(episodes / int(new.flags["--prompts-per-step"][0]))))
    else:
        new.add("--total-epochs", new.number("num_train_epochs", 3))
    new.used.add("num_train_epochs")
    new.add("--seed", new.text("seed", "42"))
    return updates


def add_rollout_sizes(new: Translation, per_device: float, accumulated: float) -> float:
    """Prompts, groups and mini-batches of the scripts that sample. Returns the optimizer steps of a rollout."""
    if new.kind not in ("grpo", "rloo"):  # TRL counts prompts there
        minibatches = int(new.number("num_mini_batches", 1)) if new.kind == "ppo" else 1
        prompts = int(per_device * accumulated * new.gpus * minibatches)
        new.add("--prompts-per-step", prompts)
        new.add("--samples-per-prompt", 2 if new.kind == "online_dpo" else 1)
        new.notes.append(f"--prompts-per-step {prompts}: {per_device:g} prompts x {accumulated:g} accumulated x "
                         f"{new.gpus} GPUs")
        return 1.0
    group = int(new.number("num_generations", 8 if new.kind == "grpo" else 2))
    passes = new.number("steps_per_generation", accumulated)
    responses = new.number("generation_batch_size", per_device * new.gpus * passes)
    updates = responses / (per_device * new.gpus * accumulated)
    if responses % group or updates != int(updates):
        raise ValueError(f"{responses:g} responses a rollout (--per_device_train_batch_size {per_device:g} x "
                         f"{new.gpus} GPUs x --steps_per_generation {passes:g}) must be whole groups of "
                         f"--num_generations {group}, and a multiple of the {per_device * new.gpus * accumulated:g} of "
                         f"an optimizer step; --gpus says how many GPUs the command was for")
    epochs = int(new.number("num_iterations", 1))
    new.add("--prompts-per-step", int(responses // group))
    new.add("--samples-per-prompt", group)
    new.add("--minibatches-per-step", int(updates))
    if epochs > 1:
        new.add("--epochs-per-step", epochs)
    new.notes.append(f"--prompts-per-step {responses // group:g}: {per_device:g} responses x {new.gpus} GPUs x "
                     f"{passes:g} passes, in groups of {group}")
    return updates * epochs


def add_intervals(new: Translation) -> None:
    """Steps between validations and between checkpoints."""
    new.used.add("eval_steps")
    if "--val-data" in new.flags:
        every = new.number("eval_steps", 0) or new.number("logging_steps", 10)
        new.used.discard("logging_steps")
        new.add("--eval-every", interval(new, "--eval-every", every) or 10)
    else:
        new.add("--eval-every", 0)
    if "save_steps" in new.options:
        every = interval(new, "--save.every", new.number("save_steps", 500))
        if every is not None:
            new.add("--save.every", every)


def interval(new: Translation, flag: str, every: float) -> int | None:
    """Steps; TRL's number is a share of all of them if it is below 1. None: it is not known how many there are."""
    if not 0 < every < 1:
        return int(every)
    if "--total-steps" in new.flags:
        return max(1, round(every * int(new.flags["--total-steps"][0])))
    new.notes.append(f"{flag}: TRL's is {every:g} of the steps: give it as a number, the first lines of a run say how "
                     f"many steps there are")
    return None


def add_optimizer(new: Translation, updates: float) -> None:
    new.flags.setdefault("--optim.lr", [f"{LEARNING_RATE[new.kind]:g}"])
    schedule = new.text("lr_scheduler_type", "linear")
    schedules = {"constant_with_warmup": "constant"} | {name: name for name in ("linear", "cosine", "constant")}
    if schedule in schedules:
        new.add("--optim.schedule", schedules[schedule])
    else:
        new.without[f"--lr_scheduler_type {schedule}"] = "--optim.schedule is constant, linear or cosine"
    warmup = new.number("warmup_steps", 0) or new.number("warmup_ratio", 0)
    if 0 < warmup < 1:
        if "--total-steps" in new.flags:
            warmup = round(warmup * int(new.flags["--total-steps"][0]))
        else:
            new.notes.append(f"a warm-up of {warmup:g} of the steps: give --optim.warmup-steps as a number, the first "
                             f"lines of a run say how many steps there are")
            warmup = 0
    elif warmup > 0 and updates > 1:
        new.notes.append(f"--optim.warmup-steps: {warmup:g} optimizer steps, {updates:g} a rollout")
        warmup = max(1, round(warmup / updates))
    if warmup:
        new.add("--optim.warmup-steps", int(warmup))
    betas = new.number("adam_beta1", 0.9), new.number("adam_beta2", 0.999)
    if betas != (0.9, 0.999):
        new.add("--optim.betas", *betas)
    optimizer = new.text("optim", "adamw")
    kinds = {"muon": "muon"} | dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw-8bit")
    if optimizer in kinds:
        new.add("--optim.kind", kinds[optimizer])
    elif not optimizer.startswith("adamw"):
        new.without[f"--optim {optimizer}"] = "--optim.kind is adamw, adamw-bf16, adamw-8bit or muon"
    if new.is_on("use_peft"):
        new.add("--lora.rank", new.text("lora_r", "16"))
        new.add("--lora.alpha", new.text("lora_alpha", "32"))
        targets = new.options.get("lora_target_modules", [])
        new.used.add("lora_target_modules")
        if targets and targets != ["all-linear"]:
            new.add("--lora.targets", *targets)
        elif not targets:
            new.notes.append("--lora.targets: all linear layers here; peft's default depends on the model, often "
                             "q_proj and v_proj")
    logs = [place for place in new.options.get("report_to", []) if place in PLACES]
    if logs:
        new.add("--log.to", *logs)
    if "gradient_checkpointing" not in new.options:
        new.add("--policy.gradient-checkpointing", "True")


def add_supervised(new: Translation) -> None:
    """sft.py, dpo.py, kto.py, rm.py."""
    new.add("--data.max-length", new.text("max_length", "1024"))
    if new.kind != "rm":
        new.add("--data.on-long-row", "truncate")
    if new.kind == "rm" and "center_rewards_coefficient" not in new.options:
        new.add("--centre-coef", 0.0)
    if new.kind == "dpo":
        new.add("--beta", new.number("beta", 0.1))
        losses = new.options.get("loss_type", ["sigmoid"])
        new.used.add("loss_type")
        if losses == ["ipo"]:
            new.add("--loss", "ipo")
            new.notes.append("--loss ipo adds up the log-ratios of an answer's tokens, TRL takes their mean: between "
                             "answers of N tokens, --beta / N aims at the same margin")
        elif losses != ["sigmoid"]:
            new.without[f"--loss_type {' '.join(losses)}"] = "dpo.py has sigmoid (--loss dpo) and ipo"
    if new.kind == "kto":
        add_kto(new)
    if new.kind == "sft":
        new.notes.append("a column `completion`: --data.response-column completion. A column `text`: split it into "
                         "prompt and response, or messages")
        if not new.is_on("assistant_only_loss") and "completion_only_loss" not in new.options:
            new.notes.append("a column `messages`: TRL trains on all tokens unless assistant_only_loss is on; here "
                             "always on those of the assistant")
        if new.text("loss_type", "nll") not in ("nll", "chunked_nll"):
            new.without[f"--loss_type {new.text('loss_type')}"] = "sft.py has the log-likelihood"


def add_kto(new: Translation) -> None:
    new.add("--beta", new.number("beta", 0.1))
    if new.text("loss_type", "kto") != "kto":
        new.without[f"--loss_type {new.text('loss_type')}"] = "kto.py has the loss of KTO"
    if new.is_on("precompute_ref_log_probs"):
        new.without["--precompute_ref_log_probs"] = ("the reference scores prompts with the answers of other rows of "
                                                     "the step, so it stays")
    rows = int(new.flags["--rows-per-step"][0])
    new.notes.append(f"--rows-per-step: the KL is estimated over these {rows} rows, shuffled; TRL's is over "
                     f"those of one pass, which are neighbours in the file")
    new.notes.append("columns prompt, completion and label: rows with chosen and rejected, which TRL splits, are two "
                     "rows each")


def add_objective(new: Translation) -> None:
    """The scripts that sample: loss, KL, clip bounds, correction, rewards."""
    if new.kind in ("grpo", "rloo"):
        new.flags.setdefault(MAX_RESPONSE, ["512"])
    if "use_vllm" not in new.options or not new.is_on("use_vllm"):
        new.notes.append("vLLM samples here by default; TRL's default is --rollout.engine hf")
    if new.kind == "grpo":
        add_grpo(new)
    elif new.kind == "rloo":
        new.add("--baseline", "rloo")
        new.add("--loss", "ppo")
        new.notes.append("--loss ppo clips each token's ratio and takes the mean over tokens; TRL's RLOOTrainer clips "
                         "that of the whole response and adds up its tokens: gradients, before --optim.max-grad-norm, "
                         "are smaller here by the mean length of responses")
        add_clip(new)
        if beta := new.number("beta", 0.05):
            new.add("--kl-reward-coef", beta)
    elif new.kind == "online_dpo":
        new.add("--beta", new.number("beta", 0.1))
        loss = new.text("loss_type", "sigmoid")
        new.add("--loss", "ipo" if loss == "ipo" else "dpo")
    elif new.kind == "distill":
        beta = new.number("beta", 1.0)
        if beta in (0.0, 1.0):
            new.add("--divergence", "reverse-kl" if beta else "forward-kl")
        else:
            new.add("--divergence", "jsd")
            new.add("--beta", beta)
        if "lmbda" in new.options:
            share, step = new.number("lmbda", 0.5), int(new.flags["--prompts-per-step"][0])
            new.add("--prompts-per-step", max(1, round(share * step)))
            if rest := step - int(new.flags["--prompts-per-step"][0]):
                new.add("--answers-per-step", rest)
                new.notes.append("--answers-per-step: rows with the data's own answer, extra_info[\"answer\"]: "
                                 "data/from_table.py writes a column `answer` there")
    elif new.kind == "ppo":
        new.add("--minibatches-per-step", int(new.number("num_mini_batches", 1)))
        new.add("--epochs-per-step", int(new.number("num_ppo_epochs", 4)))
        new.add("--kl-reward-coef", new.number("kl_coef", 0.05))
        new.add("--gamma", new.number("gamma", 1.0))
        new.add("--lam", new.number("lam", 0.95))
        new.add("--value-clip", new.number("cliprange_value", 0.2))
        new.add("--clip-low", new.number("cliprange", 0.2))
        new.add("--clip-high", new.number("cliprange", 0.2))
        if "sft_model_path" in new.options:
            new.add("--model", new.text("sft_model_path"))
        if "--reward-model.path" in new.flags:
            new.add("--critic-model", *new.flags["--reward-model.path"])
    add_rewards(new)


def add_clip(new: Translation) -> None:
    low = new.number("epsilon", 0.2)
    new.add("--clip-low", low)
    new.add("--clip-high", new.number("epsilon_high", low))
    new.flags.setdefault("--clip-dual", ["10000"])


def add_grpo(new: Translation) -> None:
    loss = new.text("loss_type", "dapo")
    is_sequence = new.text("importance_sampling_level", "token") == "sequence"
    new.script = "grpo" if loss == "dapo" and not is_sequence else "grpo_variants"
    if loss not in ("dapo", "grpo", "dr_grpo", "cispo", "sapo"):
        raise ValueError(f"--loss_type {visible(loss)} has no equivalent; grpo_variants.py --help lists the losses")
    if is_sequence and loss in ("cispo", "sapo"):
        raise ValueError(f"--loss_type {loss} with --importance_sampling_level sequence has no equivalent: --loss gspo "
                         f"of grpo_variants.py clips as grpo does, --loss {loss} has the ratios of tokens")
    if is_sequence:
        new.add("--loss", "gspo")
        new.add("--aggregation", {"dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
                                  "grpo": "seq-mean-token-mean"}[loss])
    elif loss in ("dr_grpo", "cispo", "sapo"):
        new.add("--loss", loss)
    elif loss == "grpo":
        new.add("--aggregation", "seq-mean-token-mean")
    if loss == "cispo":
        largest = new.number("epsilon_high", new.number("epsilon", 0.2))
        if largest > 1:
            new.add("--clip-low", 1.0)
            new.add("--clip-high", largest - 1)
        else:
            new.without[f"--epsilon_high {largest:g}"] = ("as the largest ratio it would be below 1; the command has "
                                                          "the bounds of --loss cispo")
    elif loss == "sapo":
        new.add("--loss-numbers", "tau_pos", new.number("sapo_temperature_pos", 1.0), "tau_neg",
                new.number("sapo_temperature_neg", 1.05))
        new.used.update(("epsilon", "epsilon_high"))
    else:
        add_clip(new)
    if is_sequence or loss in ("cispo", "sapo"):
        new.flags.pop("--clip-dual", None)
    scale = new.text("scale_rewards", "group")
    if scale in ("none", *OFF):
        if new.script == "grpo_variants":                               # there the loss has a say
            new.add("--norm-by-std", "False")
        else:
            new.add("--no-norm-by-std")
    elif scale == "batch":
        new.without["--scale_rewards batch"] = "advantages are divided by their group's deviation, or not"
    elif loss == "dr_grpo":
        new.add("--norm-by-std", "True")
    if beta := new.number("beta", 0.0):
        new.add("--kl-loss-coef", beta)
        new.add("--kl-estimator", "k3+" if new.is_on("use_bias_correction_kl", True) else "k3")
    if new.is_on("use_vllm") and new.is_on("vllm_importance_sampling_correction", True):
        level, _, what = new.text("vllm_importance_sampling_mode", "sequence_mask").partition("_")
        new.add("--correction.weights", level)
        new.add("--correction.upper", new.number("vllm_importance_sampling_clip_max", 3.0))
        if what == "mask":
            new.add("--correction.outside", "zero")
    new.used.update(("use_bias_correction_kl", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
                     "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"))
    if new.is_on("mask_truncated_completions"):
        new.without["--mask_truncated_completions"] = "dapo.py has it: --mask-truncated"


def add_rewards(new: Translation) -> None:
    """TRL's reward functions run unchanged, through rewards/trl_functions.py."""
    own = {"think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"}
    names = new.options.get("reward_funcs", [])
    new.used.add("reward_funcs")
    new.add("--data.data-source", new.text("dataset_name", "trl").rpartition("/")[2])
    if not names and (new.kind == "distill" or "--reward-model.path" in new.flags):
        if new.kind == "distill":
            new.add("--reward.function", "rewards/format.py:length")
            new.notes.append("--reward.function: a reward must be there; with --reward-coef 0 it is only reported")
        else:
            new.flags["--reward-model.alone"] = []
        new.add("--data.ground-truth-column", "prompt")
        new.notes.append("--data.ground-truth-column prompt: no answer is needed, and any column does")
        return
    specs = [f"trl.rewards:{name}" if name in own else ":".join(name.rsplit(".", 1)) if "." in name
             else f"my_rewards.py:{name}" for name in names] or ["my_rewards.py:NAME"]
    kwargs: dict[str, Any] = {"functions": specs}
    if "reward_weights" in new.options:
        kwargs["weights"] = [float(weight) for weight in new.options["reward_weights"]]
        new.used.add("reward_weights")
    new.add("--reward.function", "rewards/trl_functions.py")
    new.add("--reward.kwargs", json.dumps(kwargs))
    new.add("--data.ground-truth-column", "solution")
    new.notes.append("--data.ground-truth-column: the column with the answer; data/from_table.py gives the function "
                     "all columns, and makes a prompt of a question and a system prompt")
    new.notes.append('--reward.kwargs: completions are lists of messages; where the column `prompt` is a text, TRL '
                     'gives texts: add "conversational": false')


# --------------------------------------------------------------------------- the report

def report(new: Translation, notes: list[str]) -> str:
    parts = ["\n".join(f"# {visible(line)}" for line in ["first, the data as files:", *new.before]), new.command()]
    if new.notes:
        parts.append("\n".join(["# Converted:", *(f"#   {visible(note)}" for note in new.notes)]))
    for title, found in (("No equivalent", new.without), ("Needs no flag", new.needless)):
        if found:
            parts.append("\n".join([f"# {title}:", *(f"#   {visible(key)}: {why}" for key, why in found.items())]))
    if new.unknown:
        parts.append("\n".join(["# Unknown to this tool:", *(f"#   {visible(one)}" for one in new.unknown)]))
    if notes:
        parts.append("\n".join(["# Read without running it:", *(f"#   {visible(note)}" for note in notes)]))
    return "\n\n".join([*parts, "# Differences that no flag removes: docs/from_trl.md"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a .py or .sh file, or a command in quotes")
    parser.add_argument("--gpus", type=int,
                        help="GPUs of the job; TRL's batch sizes are of one (default: as the launcher says, else 1)")
    args = parser.parse_args()
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus {args.gpus} must be at least 1")
    found, notes = read(args.source)
    print("\n\n\n".join(report(translate(name, options, args.gpus or 0), notes) for name, options in found))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")

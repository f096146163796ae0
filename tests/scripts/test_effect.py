"""Flags that do nothing under the others: each flag of each script either acts by itself, or its help says what it
needs, and without that it is refused, or named at the start."""

import dataclasses
import importlib
import sys
import typing
from dataclasses import dataclass, field

import pytest

from common.flags.effect import check_effect, conditions, help_texts, is_met
from common.flags.secrets import flags_of
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS

PLACES = [*(name.removesuffix(".py") for name in (*SCRIPTS, *OFFLINE, *ALONE)), "tools.play"]
REQUIRED = {"model": "m", "train_data": ("t",), "val_data": ("v",), "episode": "e.py"}
ACTS = """
model train-data val-data run-dir seed total-steps total-epochs run-zero-advantage samplers max-staleness
prompts-per-step samples-per-prompt rows-per-step answers-per-step minibatches-per-step epochs-per-step
max-tokens-per-gpu prompts-per-chunk compare episode files prompt rows samples
clip-low clip-high clip-dual norm-by-std kl-loss-coef kl-reward-coef entropy-coef aggregation max-gen-batches
on-few-groups overlong-buffer mask-truncated baseline gamma lam critic-model critic-warmup-steps value-clip
advantage advantage-per-step advantage-per-role reward-coef loss teacher context divergence
desirable-weight undesirable-weight data.completion-column data.label-column
served.cache served.auth-env served.concurrency served.timeout-s served.wait-s
top-k beta label-smoothing centre-coef answer-key refresh-reference-every eval-n eval-prompts
policy.compute-dtype policy.replicas policy.sequence-parallel policy.expert-parallel policy.router-float32
policy.trust-remote-code
lora.rank optim.kind optim.lr optim.schedule optim.warmup-steps optim.betas optim.weight-decay optim.max-grad-norm
optim.max-skipped-steps save.every save.keep save.async save.hf save.dtype save.resume save.allow-changes
save.timeout-s log.to log.rollouts-every
rollout.episode rollout.temperature rollout.max-response-length rollout.top-p rollout.top-k rollout.stop-token-ids
rollout.engine rollout.max-probe-diff
correction.preset correction.weights correction.batch-normalise correction.reject correction.reject-over
correction.reject-below correction.reject-above correction.rejected-leave-group correction.bypass
data.on-bad-row data.template data.max-prompt-length data.on-long-prompt data.prompt-column data.ground-truth-column
data.data-source data.extra-info-column data.max-length data.on-long-row data.messages-column data.response-column
data.chosen-column data.rejected-column data.margin-column
reward.num-workers reward.on-error reward.max-error-frac reward-model.path
"""
"""Flags that act under any others, or that a script's own check refuses, because more than other flags decides. A new
flag is one of these, or its help has a sentence for common/flags/effect.py."""


def flags(place: str) -> typing.Any:
    """The flags of a script at their defaults."""
    args_class = importlib.import_module(place).Args
    return args_class(**{one.name: REQUIRED[one.name] for one in dataclasses.fields(args_class)
                         if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING})


def owner_of(args: typing.Any, flag: str) -> tuple[typing.Any, str]:
    """The dataclass that has a flag, and the name of its field."""
    group, _, name = flag.removeprefix("--").replace("-", "_").rpartition(".")
    owner = vars(args)[group] if group else args
    return owner, name if name in vars(owner) else f"{name}_"


def is_on(args: typing.Any, flag: str) -> bool:
    owner, name = owner_of(args, flag)
    return bool(vars(owner)[name]) and typing.get_type_hints(type(owner))[name] is bool


def set_flag(args: typing.Any, flag: str, is_on: bool, wanted: typing.Sequence[str] = ()) -> None:
    """Give a flag a value that is on or off; `wanted`: the values that are on, or "above" and a number."""
    owner, name = owner_of(args, flag)
    kind, default = typing.get_type_hints(type(owner))[name], vars(owner)[name]
    is_several = typing.get_origin(kind) is tuple or isinstance(default, tuple)
    choices = [choice for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal
               for choice in typing.get_args(part)]
    if wanted[:1] == ["above"]:
        value = float(wanted[1]) + is_on
    elif choices:
        on = wanted or [choice for choice in choices if choice not in ("none", "disabled", default)]
        value = [*(on if is_on else set(choices) - {*on}), None][0]
        value = ((value,) if is_on else ()) if is_several else value
    elif is_several:
        value = (wanted[0] if wanted else "x",) if is_on else ()
    else:
        value = {"str": '{"x": 1}' if is_on else "", "bool": is_on}.get(getattr(kind, "__name__", ""), 7 * is_on)
    object.__setattr__(owner, name, value)


def needed(flag: str, condition: str) -> list[tuple[str, list[str]]]:
    """The flags of a condition, each with its values."""
    found = []
    for alternative in condition.replace(" or --", "|--").split("|"):
        name, *wanted = alternative.replace(",", "").split()
        found.append((name if name.startswith("--") else f"{flag.rpartition('.')[0]}.{name}",
                      [word for word in wanted if word != "or"]))
    return found


def fulfil(args: typing.Any, flag: str) -> bool:
    """Give a flag all that it needs and what that needs. Returns whether the script has all of it."""
    has_all = True
    for kind, condition in conditions(args).get(flag, []):
        if condition in ("a GPU", "a CPU", "training"):
            has_all &= condition != "training" or "train_data" in vars(args)
            continue
        present = [(name, wanted) for name, wanted in needed(flag, condition) if name in flags_of(args)]
        has_all &= bool(present) or kind == "Not with"
        for name, wanted in present:
            set_flag(args, name, kind != "Not with", wanted)
            has_all &= fulfil(args, name)
    return has_all


def withdraw(args: typing.Any, flag: str) -> bool:
    """Take away the first of what a flag needs, or give what it does not go with. Returns whether it does nothing
    then."""
    for kind, condition in conditions(args)[flag]:
        if condition == "training" and "train_data" in vars(args):
            continue
        present = [] if condition in ("a GPU", "a CPU", "training") else needed(flag, condition)
        present = [(name, wanted) for name, wanted in present if name in flags_of(args)]
        for name, wanted in present:
            set_flag(args, name, kind == "Not with", wanted)
        return bool(present) or kind != "Not with"
    return False


@pytest.mark.parametrize("place", PLACES)
def test_each_flag_acts_or_says_what_it_needs(place):
    args = flags(place)
    given = conditions(args)
    silent = [flag for flag in flags_of(args) if flag.startswith("--") and flag not in given
              and flag.removeprefix("--").replace("critic-optim", "optim") not in ACTS.split()]
    assert silent == []


def what_is_said(args: typing.Any, device: str) -> tuple[list[str], bool]:
    """What is said of flags that do nothing, and whether they are refused."""
    try:
        return check_effect(args, device), False
    except ValueError as error:
        return [str(error)], True


@pytest.mark.parametrize("place", PLACES)
def test_a_flag_without_what_it_needs_is_refused_or_named_and_with_it_acts(place):
    num_refused = num_said = 0
    for flag, sentences in conditions(flags(place)).items():
        args = flags(place)
        set_flag(args, flag, not is_on(args, flag))
        if "episode" in vars(args):
            args.episode = ""
        device = "cpu" if ("Only for", "a GPU") in sentences else "cuda"
        if withdraw(args, flag):
            said, is_refused = what_is_said(args, device)
            assert len(said) == 1 and said[0].startswith(flag), (flag, said)
            assert (" does nothing " if is_refused else " is only for ") in said[0]
            num_refused, num_said = num_refused + is_refused, num_said + (not is_refused)
        if fulfil(args, flag):
            assert check_effect(args, "cuda" if device == "cpu" else "cpu") == [], flag
    assert num_refused > 1 and num_said


@dataclass
class Nested:
    a: int = 0
    """A number."""
    b: int = 0
    """Another one. Needs a above 1."""
    c: str = ""
    """Of names, such as x.y: needs no sentence. Only for a GPU."""
    d: tuple[str, ...] = ()
    """Not with --own. Needs --nested.c p.q or r, and this is no part of it."""
    e: int = 1
    """A number, 0: none. Above 0 needs --own."""


@dataclass
class Own:
    own: bool = False
    """A switch."""
    nested: Nested = field(default_factory=Nested)


def test_sentences_are_read_from_help():
    assert conditions(Own()) == {
        "--nested.b": [("Needs", "a above 1")], "--nested.c": [("Only for", "a GPU")],
        "--nested.d": [("Not with", "--own"), ("Needs", "--nested.c p.q or r,"), ("Needs", "this is no part of it")],
        "--nested.e": [("Above 0 needs", "--own")],
    }
    assert help_texts(Own) == {"own": "A switch."} and sys.modules[__name__]
    with pytest.raises(ValueError, match=r"^--nested.b 2 does nothing with --nested.a 1: set --nested.a above 1, or"):
        check_effect(Own(nested=Nested(a=1, b=2)))
    assert check_effect(Own(nested=Nested(a=2, b=2))) == [] == check_effect(Own(nested=Nested(c="x")), "cuda")
    assert check_effect(Own(nested=Nested(e=0))) == [] == check_effect(Own(True, nested=Nested(e=2)))
    with pytest.raises(ValueError, match=r"^--nested.e 2 does nothing with --own false: set --own, or leave"):
        check_effect(Own(nested=Nested(e=2)))
    assert check_effect(Own(nested=Nested(c="x"))) == []            # the device is not known yet
    assert check_effect(Own(nested=Nested(c="x")), "cpu") == [
        "--nested.c x is only for a GPU: the training is the same without it"]


@pytest.mark.parametrize(("value", "wanted", "met"), [
    (0, [], False), (0.5, [], True), ("none", [], False), (None, [], False), ([], [], False), (["x"], [], True),
    ("disabled", [], False), ("{}", [], False), ("vllm", ["vllm"], True), ("hf", ["vllm"], False),
    (1.0, ["above", "1"], False), (1.5, ["above", "1"], True), (["wandb"], ["wandb"], True),
    (["tensorboard"], ["wandb"], False)])
def test_what_is_on(value, wanted, met):
    assert is_met(value, wanted) is met


def test_no_flag_is_listed_that_no_script_has():
    known = {flag.removeprefix("--") for place in PLACES for flag in flags_of(flags(place))}
    assert set(ACTS.split()) - known == set()

"""Secrets that users put into flags are in no file that a run writes."""

import dataclasses
import json
from dataclasses import dataclass, field

import pytest
import torch

from common.flags.secrets import flags_of, redacted
from common.parallel.ranks import World
from common.tracking.logger import LogConfig, Tracker
from tests.conftest import ROOT
from tools.report import write_page

SECRETS = ("sk-SECRET123", "hunter2", "hf_abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnop0123", "ab.cd-ef",
           "pass:word")


@dataclass
class Reward:
    kwargs: str = json.dumps({"base_url": "https://pass:word@judge:80/v1", "api_key": "hunter2", "max_tokens": 17})


@dataclass
class Args:
    model: str = "folder/hf_models/task-specific-tokenizer"
    header: str = "Authorization: Bearer ab.cd-ef"
    command: tuple[str, ...] = ("judge", "--openai=sk-SECRET123", "hf_abcdefghijklmnopqrstuvwx")
    accessToken: str = "ghp_abcdefghijklmnop0123"
    max_tokens_per_gpu: int = 4096
    reward: Reward = field(default_factory=Reward)


def test_secrets_are_replaced_by_name_and_by_form_and_nothing_else_is():
    flags = redacted(dataclasses.asdict(Args()))
    assert flags == {
        "model": "folder/hf_models/task-specific-tokenizer",
        "header": "Authorization: Bearer ***",
        "command": ["judge", "--openai=***", "***"],
        "accessToken": "***",
        "max_tokens_per_gpu": 4096,
        "reward": {"kwargs": '{"base_url": "https://***@judge:80/v1", "api_key": "***", "max_tokens": 17}'},
    }
    unchanged = {"kwargs": '{"method":"flexible"}', "n": None, "token": "", "tokens": 3, "text": "a {broken json"}
    assert redacted(unchanged) == unchanged
    command = ["grpo.py", '--reward.kwargs={"api_key": "hunter2", "n": 1}', "--model=a/b", "--log.to", "--a==b"]
    assert redacted(command) == [command[0], '--reward.kwargs={"api_key": "***", "n": 1}', *command[2:]]


def test_no_secret_is_in_manifest_config_or_report(tmp_path):
    world = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
    manifest = json.dumps(flags_of(Args()))
    Tracker(LogConfig(), str(tmp_path), Args(), world, {}).log(1, {"critic/rewards/mean": 0.5}, "")
    config = (tmp_path / "config.json").read_text()
    assert json.loads(config)["max_tokens_per_gpu"] == 4096
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Args())))       # as older runs wrote it
    write_page([str(tmp_path)], tmp_path / "report.html", 1.0)
    page = (tmp_path / "report.html").read_text()
    for text in (manifest, config, page):
        assert "task-specific-tokenizer" in text
        assert [secret for secret in SECRETS if secret in text] == []


def with_texts(args):
    """The flags with a text in each that takes one."""
    new = {name: "a text" if isinstance(value, str) else with_texts(value) if dataclasses.is_dataclass(value) else value
           for name, value in vars(args).items()}
    changed = object.__new__(type(args))                    # no flag's own check looks at it
    vars(changed).update(new)
    return changed


@pytest.mark.parametrize("script", sorted(path.stem for path in ROOT.glob("*.py")))
def test_the_flags_of_all_scripts_have_no_name_that_would_be_hidden(script):
    """A flag that is no secret and has such a name would be written as ***, and a resume would not see it change."""
    Args = __import__(script).Args
    needed = {field.name: ("a",) for field in dataclasses.fields(Args) if field.default is dataclasses.MISSING
              and field.default_factory is dataclasses.MISSING}
    flags = dataclasses.asdict(with_texts(Args(**needed)))
    assert "a text" in flags.values() and redacted(flags) == json.loads(json.dumps(flags))

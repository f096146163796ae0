"""Flags as they are written down and compared. Secrets in them are replaced before they are written anywhere."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

HIDDEN = "***"
NAMES = {"key", "keys", "apikey", "token", "tokens", "secret", "secrets", "password", "passwords", "passwd"}
FORMS = re.compile(
    r"\bsk-[\w-]{6,}"                               # OpenAI, Anthropic and others
    r"|\bhf_[A-Za-z0-9]{16,}"                       # Hugging Face
    r"|\bgh[opsu]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b"                        # AWS
    r"|(?<=Bearer )[^\s\"',]+"
    r"|(?<=://)[^\s/@\"]+(?=@)"                     # user:password in an address
)


def flags_of(args: Any) -> dict[str, Any]:
    """Nested flag dataclasses -> {"--optim.lr": 1e-6, ..., "script": "grpo.py"}, plain JSON without secrets."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, dict):
            for key, entry in value.items():
                flat[_flag(f"{name}.{key}")] = entry
        else:
            flat[_flag(name)] = value
    as_json = json.loads(json.dumps(flat, default=str))
    return redacted(as_json) | {"script": Path(sys.argv[0]).name}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-").rstrip("-")            # async_ -> --async


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The entries that are not the same, in words."""
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed]


def redacted(value: Any, named_secret: bool = False) -> Any:
    """`value` (flags: nested dicts, lists, strings that are JSON) with every secret replaced by ***. A string is a
    secret if a word of its name says so (`api_key`, `accessToken`) or if its form does (`sk-...`, `Bearer ...`)."""
    if isinstance(value, dict):
        return {name: redacted(entry, named_secret or _names_a_secret(str(name))) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry, named_secret) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    if named_secret:
        return HIDDEN
    try:
        nested = json.loads(value)
    except ValueError:
        nested = None
    if isinstance(nested, dict | list):
        hidden = redacted(nested)
        return value if hidden == nested else json.dumps(hidden)
    flag, equals, given = value.partition("=")
    if flag.startswith("--"):
        return flag + equals + redacted(given)
    return FORMS.sub(HIDDEN, value)


def _names_a_secret(name: str) -> bool:
    # --answer-key names an entry of the data: as one word, it is no key
    words = re.findall(r"answer.key|[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return not NAMES.isdisjoint(word.lower() for word in words)

"""What transformers 4, and programs that read its files, need in an exported folder.

transformers 5 moves `rope_theta`, `rope_scaling` and their like into `rope_parameters`, and `torch_dtype` to `dtype`.
An older reader takes its defaults for what it does not find, without a word: another model. So the old keys stand
beside the new ones, as far as transformers 5 reads the same from both.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

Json = dict[str, Any]
CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT_TEMPLATE_FILE,
                   LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, "vocab.json", "merges.txt", "tokenizer.model", "tekken.json")


def with_old_keys(made: Json, source: Json, kind: type[PretrainedConfig]) -> Json:
    """The content of a config.json, `made` by transformers 5, with old keys beside the new ones: those that `source`,
    the config.json it was made from, has, and else those that follow from the new ones. `kind`: the config's class."""
    found = deepcopy(made)
    want = read(made, kind)
    for part, key, value in list(old_keys(found, source, read(source, kind))):
        part[key] = value
        if read(found, kind) != want:                           # a run has changed what it says
            del part[key]
    return found


def read(content: Json, kind: type[PretrainedConfig]) -> Json:
    """What transformers 5 takes from a config.json."""
    try:
        return without_type(kind.from_dict(with_floats(content)).to_dict())
    except (ValueError, TypeError, KeyError) as error:          # of the family's own checks
        return {"refused": str(error)}


def with_floats(value: Any) -> Any:
    """A copy with the floats that JSON lacks. transformers 5 writes them as {"__float__": "Infinity"}: the limit of
    Mamba-2's time steps, for example."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: with_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_floats(entry) for entry in value]
    return value


def without_type(value: Any) -> Any:
    """Without `type`, the old name of `rope_type`: transformers 5 keeps it, and takes the other."""
    if isinstance(value, dict):
        found = {}
        for key, entry in value.items():
            found[key] = without_type(entry)
        if "rope_type" in found:
            found.pop("type", None)
        return found
    return value


def old_keys(made: Json, source: Json, before: Json) -> Iterator[tuple[Json, str, Any]]:
    """(a config, perhaps that of a part of the model; an old key; its value). `before`: what transformers 5 reads from
    `source`."""
    found = rope_keys(made) | source
    if without_type(made.get("rope_parameters")) != before.get("rope_parameters"):
        found |= rope_keys(made)                                # beside them, old ones count for nothing
    if "dtype" in made:
        found["torch_dtype"] = made["dtype"]
    for key, value in found.items():
        if key not in made:
            yield made, key, value
    for key, part in made.items():
        if isinstance(part, dict) and "model_type" in part:
            yield from old_keys(part, part_of(source, key), part_of(before, key))


def part_of(content: Json, key: str) -> Json:
    part = content.get(key)
    if isinstance(part, dict):
        return part
    return {}


def rope_keys(config: Json) -> Json:
    """The old keys that say what `rope_parameters` says. Families with two kinds of layers have one for each."""
    rope = config.get("rope_parameters") or {}
    parts = {}                                                  # of each kind of layers
    for name, part in rope.items():
        if isinstance(part, dict):
            parts[name] = part
    main = dict(rope)
    if parts:
        main = dict(parts.get("full_attention", {}))
    if "rope_theta" not in main:
        return {}
    found = {"rope_theta": main.pop("rope_theta")}
    if "partial_rotary_factor" in main:
        found["partial_rotary_factor"] = main.pop("partial_rotary_factor")
    if "sliding_attention" in parts:
        found["rope_local_base_freq"] = parts["sliding_attention"]["rope_theta"]
    if config.get("original_max_position_embeddings"):          # phi3, which knows the oldest form alone
        main.pop("original_max_position_embeddings", None)
        main["type"] = main.pop("rope_type")
    found["rope_scaling"] = main
    if [*main.values()] == ["default"]:                         # its type is all that it says
        found["rope_scaling"] = None
    return found


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The tokenizer's files in the folder that it was loaded from, as they are; none if it was changed since, and then
    those that transformers 5 writes are right."""
    path = tokenizer.name_or_path
    if not path:
        return {}
    config = cached_file(path, CONFIG, _raise_exceptions_for_missing_entries=False)
    if not config:
        return {}
    if not is_same(tokenizer, type(tokenizer).from_pretrained(path)):
        return {}
    folder = Path(config).parent
    found = {}
    for name in sorted({*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()}):
        if (folder / name).is_file():
            found[name] = (folder / name).read_bytes()
    return found


def is_same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens, special tokens and chat template."""
    if one.get_vocab() != other.get_vocab():
        return False
    if one.special_tokens_map != other.special_tokens_map:
        return False
    return one.chat_template == other.chat_template


def left_out(flags: Json) -> str:
    """What of a run's chat template no file can hold, in words; empty if nothing. `flags`: from `flags_of`."""
    arguments = flags.get("--data.chat-template-kwargs", "{}")
    if arguments == "{}":
        return ""
    return (f"the exported chat template has no --data.chat-template-kwargs {arguments}: give them to what serves the "
            f"model, such as vLLM's --default-chat-template-kwargs")


def set_template(files: dict[str, bytes], template: str) -> None:
    """Makes `template` the only chat template of a folder, wherever a reader looks for one."""
    for name in [*files]:
        if name.startswith(f"{CHAT_TEMPLATE_DIR}/"):
            del files[name]
    files[CHAT_TEMPLATE_FILE] = template.encode()
    if LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE in files:
        files[LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE] = json.dumps({"chat_template": template}, indent=2).encode()
    config = json.loads(files[CONFIG])
    files[CONFIG] = json.dumps(config | {"chat_template": template}, indent=2, ensure_ascii=False).encode()

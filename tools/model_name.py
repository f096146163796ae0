"""What --model of evaluate.py names: a model, a checkpoint, a run or adapters. No weights are read here."""

from pathlib import Path

from common.checkpoint.files import complete_checkpoints
from common.source.folder import check_folder

ADAPTER = "adapter_config.json"


def resolve(model: str) -> str:
    """What --model names, without what may change: for a run folder, its newest checkpoint. Raises ValueError for a
    folder that is none of a model, a checkpoint, a run or adapters."""
    path = Path(model)
    is_adapter = (path / ADAPTER).is_file() and not (path / "config.json").is_file()
    if not path.is_dir() or is_adapter:
        return model
    if checkpoints := complete_checkpoints(path):
        return str(checkpoints[-1])
    if not (path / "config.json").is_file() or (path / "metrics.jsonl").is_file():
        hint = f": name {path / 'model'}" if (path / "model/config.json").is_file() else ""
        raise ValueError(f"--model {model} holds neither a model, a complete checkpoint nor adapters{hint}")
    check_folder(model, "--model")
    return model

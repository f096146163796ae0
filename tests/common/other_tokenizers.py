"""Tokenizers that cut texts otherwise than SmolLM2's: for teachers of another family."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import MODEL

TEXTS = ["Tom has 12 apples and gives 7 of them away. How many apples are left?", "the answer is 5, of course",
         "Ünïcödé für alle: naïve café, 東京 and 🙂 are text, too", "def f(x):\n    return x + 1\n"] * 4


def save_byte_level(folder: Path, size: int = 700) -> None:
    """SmolLM2's vocabulary and merges up to `size`, in the reverse order, with other names of its special tokens."""
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    added = [token["content"] for token in content["added_tokens"]]
    bpe = content["model"]
    kept = [token for token, number in sorted(bpe["vocab"].items(), key=lambda x: -x[1]) if number < size]
    bpe["vocab"] = {token: number for number, token in enumerate(kept)}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
    for token in content["added_tokens"]:
        token["id"] = bpe["vocab"][token["content"]]
    content["added_tokens"].sort(key=lambda token: token["id"])
    assert "<|im_end|>" in added
    text = json.dumps(content, ensure_ascii=False).replace("<|im_end|>", "<|stop|>").replace("<|im_start|>", "<|from|>")
    (folder / "tokenizer.json").write_text(text)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (folder / name).is_file():
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace("<|im_end|>", "<|stop|>").replace("<|im_start|>", "<|from|>"))


def save_sentencepiece(folder: Path) -> None:
    """A vocabulary of Llama 2's kind: spaces are letters, one is put before a text, and unknown bytes are tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=60)
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    (folder / "own.json").write_text(json.dumps(content))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "own.json"), bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template="{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% if m['role'] == 'assistant' %}</s>"
                      "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    ).save_pretrained(folder)


def make_model(folder: Path, hidden_size: int = 48) -> str:
    """A random Llama for the tokenizer in a folder, with padding in its vocabulary."""
    import torch

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )).save_pretrained(folder)
    return str(folder)

"""The runs that tests/record_runs.py records: flags, and the models and data that they need, made from nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast


@dataclass
class Run:
    """What is started. `again_after`: first with so many --total-steps, then again in the same folder with 3."""

    script: str
    flags: str = ""
    ranks: int = 1
    again_after: int = 0


COMMON = """
    --model model --train-data train.jsonl --val-data val.jsonl --run-dir run --prompts-per-step 4
    --samples-per-prompt 4 --data.max-prompt-length 100 --max-tokens-per-gpu 120 --optim.lr 0.003 --eval-every 2
    --eval-n 2 --save.every 1 --save.keep 9 --log.rollouts-every 1 --rollout.max-response-length 12
    --rollout.stop-token-ids 200 201 202 203 204 205 206 207 208 209 210 211 212 213 214 215 216 217 218 219
    --rollout.kv-cache-gb 0.1 --rollout.max-num-seqs 8 --reward.num-workers 1 --reward.timeout-s 600
    --reward.function reward.py:compute_score
"""
HF32 = "--rollout.engine hf --policy.compute-dtype float32"
HF16 = "--rollout.engine hf --policy.compute-dtype bfloat16"
VLLM32 = "--rollout.engine vllm --policy.compute-dtype float32"
VLLM16 = "--rollout.engine vllm --policy.compute-dtype bfloat16"
CRITIC = "--critic-optim.lr 0.003"
RUNS = {
    "grpo_hf": Run("grpo", HF32),
    "ppo_hf": Run("ppo", f"{HF16} {CRITIC}"),
    "dapo_hf": Run("dapo", HF16),
    "rloo_hf": Run("rloo", HF32),
    "grpo_hf_2_ranks": Run("grpo", HF16, ranks=2),
    "ppo_hf_2_ranks": Run("ppo", f"{HF32} {CRITIC}", ranks=2),
    "dapo_hf_2_ranks": Run("dapo", HF32, ranks=2),
    "rloo_hf_2_ranks": Run("rloo", HF16, ranks=2),
    "grpo_vllm": Run("grpo", VLLM16),
    "ppo_vllm": Run("ppo", f"{VLLM32} {CRITIC}"),
    "dapo_vllm": Run("dapo", VLLM32),
    "rloo_vllm": Run("rloo", VLLM16),
    "grpo_kl_epochs": Run("grpo", f"""{HF32} --kl-loss-coef 0.05 --minibatches-per-step 2 --epochs-per-step 2
        --entropy-coef 0.01 --correction.preset decoupled-token-is --optim.schedule cosine --optim.warmup-steps 1
        --optim.weight-decay 0.1 --save.hf end"""),
    "grpo_clip_cov_shared": Run("grpo_variants", f"""{HF32} --loss clip_cov --advantage passk --policy.share-prompt
        --clip-low 0.2 --clip-high 0.2 --minibatches-per-step 2 --policy.gradient-checkpointing True
        --reward.function reward.py:graded""", ranks=2),
    "grpo_rejection": Run("grpo_variants", f"""{HF16} --correction.preset decoupled-k3-rs-token-tis
        --correction.reject-above 2e-5 --correction.rejected-leave-group --correction.batch-normalise
        --norm-by-std False --aggregation seq-mean-token-mean"""),
    "grpo_top_p": Run("grpo_variants", f"""{HF16} --rollout.top-p 0.9
        --rollout.temperature 0.8 --correction.weights sequence --data.template plain --loss gspo --run-zero-advantage
        --offload.params --offload.optimizer"""),
    "grpo_two_rewards": Run("grpo_variants", f"""{HF32} --reward.function reward.py:compute_score reward.py:graded
        --reward.weights 0.5 0.5 --reward-model.path reward_model --reward-model.weight 0.5 --loss kl_cov
        --minibatches-per-step 2 --save.async""", ranks=2),
    "grpo_resumed": Run("grpo_variants", f"""{HF32} --kl-loss-coef 0.05 --minibatches-per-step 2
        --loss cispo""", again_after=2),
    "ppo_kl_adaptive": Run("ppo", f"""{HF32} {CRITIC} --kl-reward-coef 0.1 --kl-controller adaptive --kl-target 0.001
        --kl-horizon 50 --critic-warmup-steps 1 --gamma 0.99 --lam 0.95 --minibatches-per-step 2
        --policy.share-prompt"""),
    "ppo_critic_kl_loss": Run("ppo", f"""{HF32} {CRITIC} --critic-model reward_model --kl-loss-coef 0.1
        --kl-estimator k3+ --epochs-per-step 2 --entropy-coef 0.01 --value-clip 0.1 --correction.preset
        bypass-ppo-clip-k3-rs"""),
    "dapo_surplus": Run("dapo", f"""{HF32} --overlong-buffer 4 --mask-truncated --keep-surplus --max-gen-batches 3
        --samples-per-prompt 2 --minibatches-per-step 2"""),
    "dapo_surplus_resumed": Run("dapo", f"""{HF16} --keep-surplus --max-gen-batches 3 --samples-per-prompt 2
        --overlong-buffer 6 --entropy-coef 0.01""", again_after=2),
    "rloo_reinforce++": Run("rloo", f"{HF32} --baseline reinforce++ --kl-reward-coef 0.05 --gamma 0.99"),
    "rloo_reinforce++-baseline": Run("rloo", f"{HF32} --baseline reinforce++-baseline --epochs-per-step 2 --loss ppo"),
    "rloo_gpg": Run("rloo", f"{HF32} --baseline gpg --correction.preset bypass-pg-is"),
    "rloo_otb": Run("rloo", f"{HF32} --baseline otb --gamma 0.99"),
    "rloo_opo": Run("rloo", f"{HF16} --baseline opo --entropy-coef 0.01"),
    "rloo_remax_clip": Run("rloo", f"""{HF32} --baseline remax --loss ppo --minibatches-per-step 2
        --kl-reward-coef 0.05 --kl-reward-estimator k3""", ranks=2),
}
RUNS |= {
    f"loss_{name}": Run("grpo_variants", f"{HF32} --loss {name} --minibatches-per-step 2 {more}")
    for name, more in {
        "ppo": "", "grpo": "--kl-loss-coef 0.05", "dapo": "", "dr_grpo": "", "gspo": "--clip-low 0.01 --clip-high 0.01",
        "gmpo": "", "cispo": "", "sapo": "", "clip_cov": "--entropy-coef 0.01", "kl_cov": "", "dppo_tv": "",
        "dppo_kl": "", "dro": "--loss-numbers beta 0.1", "reinforce": "--kl-reward-coef 0.05",
    }.items()
}
REWARD = '''"""Rewards that random text gets too."""
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 2, "pred": solution_str[:1]}


def graded(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 7 / 6
'''
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def make_inputs(folder: Path) -> None:
    """Write data, rewards, a random Llama of 80,000 weights, and a reward model. Its tokenizer knows bytes only. The
    heads are as small as vLLM's attention on CPUs takes them."""
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    sizes = {
        "vocab_size": len(names), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.1,
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }
    for name, kind in {"model": LlamaForCausalLM, "reward_model": LlamaForSequenceClassification}.items():
        torch.manual_seed(len(name))
        more = {"num_labels": 1} if name == "reward_model" else {}
        kind(LlamaConfig(**sizes, **more)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, first, count in (("train", 0, 10), ("val", 100, 5)):
        rows = [{"prompt": f"What is {i} + {i * i}?", "data_source": "sums" if i % 2 else "squares",
                 "reward_model": {"ground_truth": str(i + i * i)}} for i in range(first, first + count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)

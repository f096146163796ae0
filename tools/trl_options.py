"""What TRL's options are here: the tables of from_trl.py. Names and defaults are those of TRL 1.16.0 and
transformers 5."""

# TRL's script, trainer or configuration -> ours
KINDS = {
    "grpo": "grpo", "grpo_vlm": "grpo", "gspo": "grpo", "gspo_vlm": "grpo", "rloo": "rloo", "rloo_vlm": "rloo",
    "sft": "sft", "dpo": "dpo", "reward": "rm", "reward_modeling": "rm", "distillation": "distill", "gkd": "distill",
    "online_dpo": "online_dpo", "ppo": "ppo", "ppo_tldr": "ppo",
    "GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "rm",
    "DistillationConfig": "distill", "GKDConfig": "distill", "OnlineDPOConfig": "online_dpo", "PPOConfig": "ppo",
}
NO_SCRIPT = {
    "kto", "orpo", "cpo", "bco", "xpo", "nash_md", "prm", "tpo", "sdft", "sdpo", "ssd", "gold", "mpo_vlm", "dpo_vlm",
    "sft_vlm", "async_grpo", "KTOConfig", "ORPOConfig", "CPOConfig", "BCOConfig", "XPOConfig", "NashMDConfig",
    "PRMConfig", "TPOConfig", "GOLDConfig",
}
SAMPLING = ("grpo", "rloo", "online_dpo", "ppo", "distill")  # kinds whose scripts sample from the policy
PAIRS_OR_TEXT = ("sft", "dpo", "rm")
LEARNING_RATE = {"grpo": 1e-6, "rloo": 1e-6, "sft": 2e-5, "dpo": 1e-6, "rm": 1e-4, "distill": 1e-6, "online_dpo": 5e-7,
                 "ppo": 3e-6}
# TRL's defaults that this tool does not write in its code, by script or configuration
GKD = {"learning_rate": ["2e-5"], "beta": ["0.5"], "lmbda": ["0.5"], "temperature": ["0.9"], "max_new_tokens": ["128"]}
ONLINE_DPO = {"temperature": ["0.9"], "max_new_tokens": ["64"]}
PPO = {"temperature": ["0.7"], "response_length": ["53"]}
DEFAULTS = {"gkd": GKD, "GKDConfig": GKD, "online_dpo": ONLINE_DPO, "OnlineDPOConfig": ONLINE_DPO, "ppo": PPO,
            "ppo_tldr": PPO, "PPOConfig": PPO}

# peft's LoraConfig -> the options of TRL's command line
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules",
        "lora_dropout": "lora_dropout", "modules_to_save": "lora_modules_to_save", "task_type": "lora_task_type",
        "target_parameters": "lora_target_parameters", "use_rslora": "use_rslora", "use_dora": "use_dora"}

# option -> flag, where the value is the same
SAME = {
    "model_name_or_path": "--model",
    "output_dir": "--run-dir",
    "learning_rate": "--optim.lr",
    "weight_decay": "--optim.weight-decay",
    "max_grad_norm": "--optim.max-grad-norm",
    "gradient_checkpointing": "--policy.gradient-checkpointing",
    "trust_remote_code": "--policy.trust-remote-code",
    "save_total_limit": "--save.keep",
    "temperature": "--rollout.temperature",
    "top_p": "--rollout.top-p",
    "top_k": "--rollout.top-k",
    "max_completion_length": "--rollout.max-response-length",
    "max_new_tokens": "--rollout.max-response-length",
    "response_length": "--rollout.max-response-length",
    "chat_template_kwargs": "--data.chat-template-kwargs",
    "vllm_gpu_memory_utilization": "--rollout.gpu-memory-utilization",
    "vllm_tensor_parallel_size": "--rollout.tp",
    "num_generations_eval": "--eval-n",
    "entropy_coef": "--entropy-coef",
    "delta": "--clip-dual",
    "label_smoothing": "--label-smoothing",
    "center_rewards_coefficient": "--centre-coef",
    "teacher_model_name_or_path": "--teacher",
    "reward_model_path": "--reward-model.path",
    "reward_model_name_or_path": "--reward-model.path",
}
ONLY = {  # flag -> the kinds that have it; others have all
    "--entropy-coef": ("grpo", "rloo", "online_dpo", "ppo"), "--clip-dual": ("grpo", "rloo", "online_dpo", "ppo"),
    "--label-smoothing": ("dpo", "rm"), "--centre-coef": ("rm",), "--teacher": ("distill",),
    **dict.fromkeys(("--rollout.temperature", "--rollout.top-p", "--rollout.top-k", "--rollout.tp", "--eval-n",
                     "--rollout.max-response-length", "--rollout.gpu-memory-utilization"), SAMPLING),
    "--reward-model.path": ("grpo", "rloo", "online_dpo", "ppo"),
}
SWITCHES = {"--policy.trust-remote-code"}  # flags without a value
BOOLS = {"--policy.gradient-checkpointing"}  # flags with True or False

NEEDLESS = {
    "dtype": "weights are trained in float32 and computed with in bfloat16: --policy.compute-dtype",
    "torch_dtype": "weights are trained in float32 and computed with in bfloat16: --policy.compute-dtype",
    "bf16": "the forward pass is in bfloat16 on GPUs: --policy.compute-dtype",
    "packing": "sequences are always packed, nothing is padded, and none sees another",
    "packing_strategy": "sequences are always packed",
    "padding_free": "sequences are always packed",
    "eval_packing": "sequences are always packed",
    "pad_to_multiple_of": "nothing is padded",
    "attn_implementation": "the attention for packed sequences is chosen at the start",
    "use_liger_kernel": "the logits of a batch never exist at once: common/kernels.py",
    "remove_unused_columns": "only the columns that are needed are read",
    "no_remove_unused_columns": "only the columns that are needed are read",
    "dataset_num_proc": "rows are tokenised once, as they are read",
    "dataset_streaming": "data may be larger than memory",
    "logging_steps": "every step is logged",
    "logging_first_step": "every step is logged",
    "logging_strategy": "every step is logged",
    "log_completions": "responses are in RUN_DIR/rollouts: --log.rollouts-every",
    "num_completions_to_print": "responses are in RUN_DIR/rollouts: --log.rollouts-every",
    "log_unique_prompts": "responses are in RUN_DIR/rollouts: --log.rollouts-every",
    "log_multimodal": "responses are in RUN_DIR/rollouts: --log.rollouts-every",
    "vllm_mode": "vLLM runs in the training process",
    "vllm_enable_sleep_mode": "the engine always sleeps during the update",
    "vllm_max_model_length": "it follows from --data.max-prompt-length and --rollout.max-response-length",
    "precompute_ref_log_probs": "the reference scores the data once, at the start",
    "precompute_ref_batch_size": "micro-batches are filled up to --max-tokens-per-gpu",
    "lora_task_type": "it follows from the script",
    "disable_dropout": "there is no dropout",
    "shuffle_dataset": "rows are always shuffled, by --seed",
    "ds3_gather_for_generation": "the engine gets the weights tensor by tensor",
    "torch_empty_cache_steps": "memory is planned before the run",
    "run_name": "it is the name of the run folder",
    "save_strategy": "--save.every decides",
    "overwrite_output_dir": "a run continues in its folder, or start another --run-dir",
    "do_train": "a script trains", "do_eval": "--val-data decides",
    "dataset_train_split": "it is in the file's name", "dataset_test_split": "it is in the file's name",
    "dataset_config": "it is in the line that writes the file",
    "project": "wandb's project is --log.wandb-project",
    "local_rollout_forward_batch_size": "micro-batches are filled up to --max-tokens-per-gpu",
    "per_device_eval_batch_size": "micro-batches are filled up to --max-tokens-per-gpu",
    "gradient_checkpointing_kwargs": "--policy.gradient-checkpointing is one switch",
    "model_init_kwargs": "--policy.* has what a model is loaded with",
    "report_to": "console and metrics.jsonl always; --log.to wandb tensorboard",
    "trackio_space_id": "metrics are in metrics.jsonl; --log.to wandb tensorboard",
    "use_vllm": "vLLM samples by default; --rollout.engine hf",
}
WITHOUT = {
    "push_to_hub": "nothing is uploaded: `hf upload NAME RUN_DIR/model`",
    "hub_model_id": "nothing is uploaded: `hf upload NAME RUN_DIR/model`",
    "eos_token": "the end token is that of the model's folder; --rollout.stop-token-ids adds others when sampling",
    "load_in_4bit": "no quantised training; --optim.kind adamw-8bit saves memory",
    "load_in_8bit": "no quantised training; --optim.kind adamw-8bit saves memory",
    "lora_dropout": "adapters have no dropout",
    "use_dora": "adapters are plain LoRA", "use_rslora": "adapters are plain LoRA; set --lora.alpha",
    "lora_modules_to_save": "adapters alone are trained",
    "min_p": "--rollout.top-p and --rollout.top-k truncate the distribution",
    "repetition_penalty": "the trainer would need the penalised distribution, too",
    "sync_ref_model": "the reference stays; online_dpo.py has --refresh-reference-every",
    "top_entropy_quantile": "docs/forks.md shows how to change the loss by a token's entropy",
    "use_adaptive_entropy": "--entropy-coef is fixed",
    "off_policy_mask_threshold": "the nearest is --correction.reject",
    "multi_objective_aggregation": "grpo_variants.py --advantage gdpo normalises each reward before the sum",
    "missing_eos_penalty": "dapo.py --mask-truncated leaves truncated responses out",
    "stop_token": "generation stops at the model's end tokens, --rollout.stop-token-ids or --rollout.stop",
    "seq_kd": "sample the teacher with evaluate.py and train on its responses with sft.py",
    "teacher_model_init_kwargs": "the teacher is loaded as the policy is",
    "teacher_model_revision": "give a folder of that revision",
    "model_revision": "give a folder of that revision",
    "vllm_server_base_url": "vLLM runs in the training process",
    "vllm_server_host": "vLLM runs in the training process",
    "vllm_server_port": "vLLM runs in the training process",
    "deepspeed": "FSDP2 shards over all ranks", "fsdp": "FSDP2 shards over all ranks",
    "assistant_only_loss": "messages: always on here. prompt and completion: there is one answer",
    "completion_only_loss": "always on here: prompts are not trained on",
    "ignore_bias_buffers": "FSDP2 has no such problem", "loss_weights": "one loss a run",
    "normalize_advantages": "rloo.py --baseline reinforce++-baseline whitens advantages over the batch",
    "reward_clip_range": "clip in the reward function",
    "activation_offloading": "--policy.gradient-checkpointing saves memory",
    "chat_template_path": "--data.chat-template-file names a file",
    "router_aux_loss_coef": "mixtures train without an auxiliary loss",
    "use_bias_correction_kl": "the nearest is --kl-estimator k3+",
    "whiten_rewards": "advantages are whitened, rewards are not",
}

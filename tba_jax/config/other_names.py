# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Setting names of TRL, verl and prime-rl, for errors about unknown keys."""

# Their name, without redundant sections -> (key here, difference).
NAMES: dict[str, tuple[str, str]] = {
    # TRL: GRPOConfig, TrainingArguments and ModelConfig.
    "per_device_train_batch_size": (
        "train.micro_batch_prompts",
        "in prompts, not completions",
    ),
    "gradient_accumulation_steps": (
        "train.micro_batch_prompts",
        "which accumulates to train.prompts_per_batch",
    ),
    "generation_batch_size": ("search.prompts_per_step", "in prompts"),
    "num_generations": (
        "search.samples_per_prompt",
        "of which a step trains on train.completions_per_prompt",
    ),
    "num_iterations": ("rounds.passes", "with rounds.mini_batches"),
    "max_prompt_length": ("sampling.max_prompt_tokens", ""),
    "max_completion_length": ("sampling.max_completion_tokens", ""),
    "temperature": ("sampling.temperature", ""),
    "top_p": ("sampling.top_p", ""),
    "top_k": ("sampling.top_k", ""),
    "min_p": ("sampling.min_p", ""),
    "beta": ("loss.beta", ""),
    "loss_type": ("loss.name", ""),
    "epsilon": ("loss.ratio_clip", ""),
    "epsilon_high": ("loss.clip_high", ""),
    "mask_truncated_completions": ("loss.missing_stop", "'mask'"),
    "scale_rewards": ("loss.advantage", "'std' or 'mean'"),
    "importance_sampling_level": (
        "loss.correction",
        "'gspo' for sequences, 'clip_token' for tokens",
    ),
    "learning_rate": ("optimizer.learning_rate", ""),
    "lr_scheduler_type": ("optimizer.schedule", ""),
    "warmup_steps": ("optimizer.warmup_steps", ""),
    "warmup_ratio": ("optimizer.warmup_steps", "in steps"),
    "weight_decay": ("optimizer.weight_decay", ""),
    "adam_beta1": ("optimizer.b1", ""),
    "adam_beta2": ("optimizer.b2", ""),
    "adam_epsilon": ("optimizer.epsilon", ""),
    "max_grad_norm": ("optimizer.grad_clip_norm", ""),
    "num_train_epochs": ("train.num_steps", "in steps"),
    "max_steps": ("train.num_steps", ""),
    "report_to": ("log.writers", "such as 'wandb' or 'tensorboard'"),
    "logging_steps": ("log.every_steps", ""),
    "log_completions": ("log.samples_every_steps", "in steps"),
    "eval_steps": ("evaluate.every_steps", ""),
    "save_steps": ("checkpoint.every_steps", ""),
    "save_total_limit": ("checkpoint.keep", ""),
    "model_name_or_path": ("init", ""),
    "train_dataset": ("task.train", ""),
    "eval_dataset": ("task.test", ""),
    "dataset_name": ("task.train", ""),
    "reward_funcs": ("task.rewards", ""),
    "use_vllm": ("search.sampler", "'jax' or 'vllm'"),
    "bf16": ("model.compute_dtype", ""),
    "gradient_checkpointing": ("train.remat", ""),
    "lora_r": ("lora.rank", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_target_modules": ("lora.targets", ""),
    "sync_ref_model": ("reference.mode", ""),
    "ref_model_sync_steps": ("reference.every_steps", ""),
    "ref_model_mixup_alpha": ("reference.ema_decay", "1 - alpha"),
    # verl: actor_rollout_ref, data, algorithm and trainer.
    "data.train_batch_size": (
        "search.prompts_per_step",
        "and train.prompts_per_batch",
    ),
    "ppo_mini_batch_size": ("train.prompts_per_batch", ""),
    "ppo_micro_batch_size_per_gpu": (
        "train.micro_batch_prompts",
        "in prompts, of all devices together",
    ),
    "ppo_epochs": ("rounds.passes", "with rounds.mini_batches"),
    "rollout.n": (
        "search.samples_per_prompt",
        "of which a step trains on train.completions_per_prompt",
    ),
    "max_response_length": ("sampling.max_completion_tokens", ""),
    "tensor_model_parallel_size": ("search.mesh.tensor", ""),
    "n_gpus_per_node": (
        "mesh.fsdp",
        "and search.num_searchers; --program=plan proposes both",
    ),
    "model.path": ("init", ""),
    "optim.lr": ("optimizer.learning_rate", ""),
    "grad_clip": ("optimizer.grad_clip_norm", ""),
    "kl_coef": ("loss.beta", ""),
    "kl_loss_coef": ("loss.beta", ""),
    "clip_ratio": ("loss.ratio_clip", ""),
    "clip_ratio_high": ("loss.clip_high", ""),
    "entropy_coeff": ("loss.entropy_weight", ""),
    "adv_estimator": ("loss.name", ""),
    "algorithm.lam": ("loss.gae_lambda", ""),
    "algorithm.gamma": ("loss.gae_gamma", ""),
    "train_files": ("task.train", ""),
    "val_files": ("task.test", ""),
    "custom_reward_function.path": ("task.rewards", "FILE.py:FUNCTION"),
    "total_epochs": ("train.num_steps", "in steps"),
    "total_training_steps": ("train.num_steps", ""),
    "test_freq": ("evaluate.every_steps", ""),
    "save_freq": ("checkpoint.every_steps", ""),
    "lora_rank": ("lora.rank", ""),
    # prime-rl.
    "max_async_level": ("search.lead_steps", ""),
    "rollouts_per_example": (
        "search.samples_per_prompt",
        "of which a step trains on train.completions_per_prompt",
    ),
    "batch_size": ("train.prompts_per_batch", "in prompts"),
    "micro_batch_size": ("train.micro_batch_prompts", "in prompts"),
    "seq_len": (
        "sampling.max_completion_tokens",
        "and sampling.max_prompt_tokens",
    ),
    "max_tokens": ("sampling.max_completion_tokens", ""),
    "model.name": ("init", ""),
    "ckpt.interval": ("checkpoint.every_steps", ""),
    "eval.interval": ("evaluate.every_steps", ""),
}


def answer(key: str) -> str:
  """Returns a hint at the setting here for another library's key, or "".

  Leading sections may be missing or differ, as in `train.num_generations`.
  """
  parts = key.split(".")
  for i in range(len(parts)):
    if reply := NAMES.get(".".join(parts[i:])):
      ours, note = reply
      return f"it is config.{ours} here" + (f" ({note})" if note else "")
  return ""

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What each setting may be when it is looked at alone. No JAX here."""

from collections.abc import Callable, Mapping
import json
import math
import re
from typing import Any

from tba_jax.config import relations
from tba_jax.system import processes

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
# The closed sets of names. Those of code that needs JAX are repeated here, and
# a test holds them to the code's own.
NAMES: Mapping[str, tuple[str, ...]] = {
    "export.dtype": ("", "float32", "bfloat16"),
    "generate.dtype": ("", "float32", "bfloat16"),
    "guards.action": ("off", "warn", "lower_learning_rate", "stop"),
    "loss.correction": (
        "",
        "none",
        "clip_token",
        "clip_sequence",
        "cispo",
        "truncate_token",
        "truncate_sequence",
        "mask_token",
        "decoupled",
    ),
    "loss.behavior_logprobs": ("sampler", "recomputed"),
    "loss.length_norm": ("", "none", "tokens", "max_tokens", "mean_tokens"),
    "loss.missing_stop": ("keep", "replace", "add"),
    "log.wandb_mode": ("offline", "online"),
    "loss.name": (
        "tb",
        "tb_learned_z",
        "subtb",
        "tba_prime",
        "reinforce",
        "rloo",
        "proximal_rloo",
        "grpo",
        "dr_grpo",
        "ppo",
        "copg",
        "gvpo",
        "online_dpo",
        "ipo",
        "slic",
        "best_of_n",
    ),
    "loss.scale": ("unit", "paper"),
    "model.compute_dtype": ("auto", "float32", "bfloat16"),
    "model.activation": ("silu", "gelu", "gelu_new", "relu"),
    "model.family": (
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
    ),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.rope_type": ("default", "linear", "llama3"),
    "optimizer.schedule": (
        "constant",
        "linear",
        "cosine",
        "warmup_stable_decay",
    ),
    "publish.carrier": ("auto", "store", "files", "orbax"),
    "publish.dtype": ("", "float32", "bfloat16"),
    "optimizer.state_dtype": ("float32", "bfloat16"),
    "reference.mode": ("fixed", "reset", "ema"),
    "replay_filter.duplicates": ("newest", "oldest"),
    "replay_filter.evict": ("oldest", "lowest_reward"),
    "replay_filter.similarity": ("none", "edit", "cosine"),
    "replay.selection": ("uniform", "reward"),
    "reward.role": ("searcher", "trainer"),
    "reward.where": ("process", "pool", "model"),
    "reward_model.schedule": ("constant", "linear", "cosine"),
    "sampling.in_flight": ("off", "keep_cache", "recompute_cache"),
    "sft.schedule": ("constant", "linear", "cosine"),
    "tokenizer.bos": ("auto", "always", "never"),
    "train.remat": ("none", "dots", "full"),
}

_Range = tuple[Callable[[Any], Any], str]


def _at_least(low: int) -> _Range:
  return (lambda v: v >= low), f"allowed {low} or more"


_ABOVE_0: _Range = (lambda v: 0 < v < math.inf), "allowed a number above 0"
_AT_LEAST_1: _Range = (lambda v: 1 <= v < math.inf), "allowed 1 or more"
_FROM_0: _Range = (lambda v: 0 <= v < math.inf), "allowed a number from 0 on"
_FROM_0_TO_1: _Range = (lambda v: 0 <= v <= 1), "allowed from 0 to 1"
_ABOVE_0_TO_1: _Range = (
    (lambda v: 0 < v <= 1),
    "allowed above 0 and up to 1",
)
_BELOW_1: _Range = (lambda v: 0 <= v < 1), "allowed from 0 to below 1"
_INSIDE_0_1: _Range = (lambda v: 0 < v < 1), "allowed above 0 and below 1"


def _is_rule(text: str) -> bool:
  axes = text.split(",") if text else []
  return set(axes) <= set(MESH_AXES) and len(set(axes)) == len(axes)


_RULE: _Range = (
    _is_rule,
    f"allowed '' or mesh axes of {', '.join(MESH_AXES)}, each once, separated"
    " by commas",
)


def _are_cores(text: str) -> bool:
  if text in ("", "all"):
    return True
  try:
    processes.parse_cores(text)
  except ValueError:
    return False
  return True


WRITER_NAMES = ("csv", "tensorboard", "wandb")
_WRITERS: _Range = (
    lambda v: not v or set(v.split(",")) <= set(WRITER_NAMES),
    f"allowed '' or some of {', '.join(WRITER_NAMES)}, separated by commas",
)

_NUMBERS: _Range = (
    lambda v: re.fullmatch(r"|\d+(,\d+)*", v),
    "allowed whole numbers separated by commas",
)

_CORES: _Range = _are_cores, "allowed '', 'all', or cores as 0  0,2  0-3"


def _are_texts(text: str) -> bool:
  try:
    texts = json.loads(text or "[]")
    # The replacement character stands for bytes that are no character yet.
    return isinstance(texts, list) and all(
        isinstance(item, str) and item and b"\xef\xbf\xbd" not in item.encode()
        for item in texts
    )
  except ValueError:  # Not JSON, or half a character.
    return False


_ADDRESS: _Range = (
    lambda v: re.fullmatch(r"|[^:\s]+:\d+(-\d+)?|\[[^\]]+\]:\d+(-\d+)?", v),
    "allowed '' (a unix socket), 'host:0' (a free port) or 'host:first-last'",
)
_COORDINATOR: _Range = (
    lambda v: re.fullmatch(r"|[^:\s]+:\d+|\[[^\]]+\]:\d+", v),
    "allowed '' (a free port of this machine) or 'host:port'",
)

# Keys that share a range; what a count of 0 means stands in
# tba_jax/config/settings.py.
_RANGES: tuple[tuple[_Range, str], ...] = (
    (
        (lambda v: 0 <= v < 2**32, "allowed from 0 to 2**32 - 1"),
        "seed",
    ),
    (
        _at_least(1),
        "model.num_layers model.width model.num_heads model.num_kv_heads"
        " model.mlp_width model.max_positions model.rope_original_positions"
        " mesh.data mesh.fsdp mesh.sequence mesh.tensor"
        " search.mesh.data search.mesh.fsdp search.mesh.tensor"
        " sft.num_steps sft.batch_size sft.evaluate_every_steps"
        " sft.checkpoint_every_steps sft.log_every_steps"
        " sampling.max_prompt_tokens sampling.max_completion_tokens"
        " sampling.num_rows sampling.chunk_steps sampling.prompt_buckets"
        " search.num_searchers"
        " search.prompts_per_round search.samples_per_prompt"
        " search.prompts_per_step search.credits train.num_steps"
        " train.prompts_per_batch train.completions_per_prompt"
        " train.micro_batch_prompts replay.capacity_per_prompt replay.capacity"
        " replay.recent_window_steps publish.every_steps"
        " evaluate.num_prompts evaluate.num_completions evaluate.final_prompts"
        " evaluate.batch_prompts evaluate.resamples"
        " checkpoint.every_steps checkpoint.keep"
        " log.every_steps log.profile_first_step log.profile_asked_steps"
        " generate.num_completions generate.batch_lines"
        " reference.every_steps reward.num_workers reward.batch_size"
        " reward_model.num_steps reward_model.batch_size"
        " reward_model.max_completion_tokens reward_model.evaluate_pairs"
        " reward_model.evaluate_every_steps"
        " reward_model.checkpoint_every_steps reward_model.log_every_steps"
        " rounds.passes"
        " sweep.workers trainer.num_processes trainer.save_deadline_s",
    ),
    (
        _at_least(0),
        # A period of 0 is "never".
        "lora.rank model.sliding_window evaluate.every_steps"
        " log.samples_every_steps sft.warmup_steps sampling.top_k"
        " search.lead_steps"
        " loss.beta_decay_steps loss.beta_stop_steps optimizer.warmup_steps"
        " rounds.mini_batches optimizer.stable_steps optimizer.decay_steps"
        " reward.memory_mb train.per_round_steps loss.proximal_every_steps"
        " replay.reward_temperature_decay_steps"
        " replay.warm_start_completions log.num_samples"
        " sft.micro_batch_size reward_model.micro_batch_size"
        " reward_model.warmup_steps"
        " log.profile_num_steps explore.min_tokens replay_filter.freeze_step"
        " tempering.tau_decay_steps tempering.gamma_decay_steps"
        " trainer.cpu_devices search.cpu_devices checkpoint.keep_every_steps"
        " checkpoint.keep_every_s",
    ),
    # A searcher may be reading the version before the newest.
    (_at_least(2), "publish.keep_versions"),
    (
        _ABOVE_0,
        "lora.alpha model.rope_theta model.norm_epsilon"
        " model.rope_low_freq_factor model.rope_high_freq_factor"
        " sft.learning_rate sampling.temperature search.lease_s"
        " search.pull_every_s search.starvation_s loss.beta loss.beta_final"
        " loss.ratio_cap loss.log_z_learning_rate loss.value_learning_rate"
        " optimizer.learning_rate"
        " optimizer.epsilon"
        " replay.reward_temperature replay.reward_temperature_final"
        " replay.max_segment_mb guards.max_kl"
        " evaluate.deadline_s reward.deadline_s reward.start_deadline_s"
        " reward_model.learning_rate evaluate.judge_deadline_s"
        " guards.max_logprob_gap store.deadline_s store.probe_timeout_s"
        " explore.min_temperature explore.max_temperature tempering.tau"
        " tempering.tau_final tempering.gamma tempering.gamma_final"
        " trainer.start_deadline_s trainer.heartbeat_s trainer.deadline_s",
    ),
    (
        _FROM_0,
        "sft.weight_decay sft.grad_clip_norm optimizer.learning_rate_final"
        " reward_model.weight_decay reward_model.grad_clip_norm"
        " optimizer.weight_decay optimizer.grad_clip_norm"
        " train.wall_clock_limit_s guards.min_entropy loss.value_clip"
        " loss.value_weight checkpoint.every_s",
    ),
    (
        _FROM_0_TO_1,
        "replay.recent_fraction loss.gae_gamma loss.gae_lambda"
        " explore.fraction replay_filter.similarity_limit",
    ),
    (
        (lambda v: math.isfinite(v), "allowed a number"),
        "reward.fallback loss.missing_stop_reward",
    ),
    ((lambda v: v in (0, 1), "allowed 0 or 1"), "rounds.lag_rounds"),
    (_AT_LEAST_1, "model.rope_factor"),
    (
        _ABOVE_0_TO_1,
        "model.rotary_fraction sampling.top_p guards.max_accuracy_drop"
        " loss.subtb_lambda",
    ),
    (
        _BELOW_1,
        "sampling.min_p sft.b1 sft.b2 reward_model.b1 reward_model.b2"
        " optimizer.b1 optimizer.b2 loss.ratio_clip"
        " reference.ema_decay",
    ),
    (_INSIDE_0_1, "guards.learning_rate_factor evaluate.confidence"),
    (
        (lambda v: v >= 2 and v % 2 == 0, "allowed an even number from 2 on"),
        "model.head_dim",
    ),
    (
        _RULE,
        "sharding.batch sharding.layers sharding.vocab sharding.width"
        " sharding.mlp sharding.heads sharding.kv_heads sharding.head_dim"
        " sharding.labels sharding.positions sharding.lora_rank"
        " sharding.length",
    ),
    (_WRITERS, "log.writers"),
    ((lambda v: bool(v), "allowed a name"), "log.wandb_project"),
    (
        (
            lambda v: re.fullmatch(r"|\d+(,\d+)*", v),
            "allowed '' or token ids separated by commas",
        ),
        "sampling.stop_token_ids",
    ),
    (
        (
            _are_texts,
            "allowed '' or a JSON list of texts, none of them empty",
        ),
        "sampling.stop_strings",
    ),
    (relations.TARGETS_RANGE, "lora.targets"),
    (_NUMBERS, "sweep.staleness_steps sweep.mini_batches sweep.seeds"),
    (_ADDRESS, "store.address"),
    (
        (
            lambda v: re.fullmatch(r"|.+:\d{1,5}", v),
            "allowed '' or HOST:PORT",
        ),
        "store.locator",
    ),
    (_COORDINATOR, "trainer.coordinator"),
    (_CORES, "cores.trainer cores.searcher cores.store"),
)

RANGES: Mapping[str, _Range] = {
    key: one_range for one_range, keys in _RANGES for key in keys.split()
}


def allowed(key: str, value: Any) -> str:
  """Returns what is allowed where `value` is not, else an empty text."""
  if key in NAMES:
    names = NAMES[key]
    return "" if value in names else f"allowed {', '.join(map(repr, names))}"
  if key not in RANGES:
    return ""
  is_allowed, text = RANGES[key]
  return "" if is_allowed(value) else text

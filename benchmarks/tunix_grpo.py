# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of tunix's GRPO on countdown, by an interpreter with tunix.

    python -m benchmarks.tunix_grpo FOLDER

`peer_grpo.run` starts it and documents its input and output. Sampler, reference
and trainer share one CPU device: a step samples and trains in turn.
"""

from collections.abc import Iterator, Mapping
import functools
import json
import os
import pathlib
import shutil
import sys
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks import peer_grpo

# Id of no token.
_NO_STOP_ID = -1


def main(folder: pathlib.Path) -> None:
  os.environ.update(HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
  # Not dependencies of this package, or dependent on the environment above.
  from flax import nnx
  import jax
  import jax.numpy as jnp
  import optax
  import transformers
  from tunix.models.llama3 import model as llama
  from tunix.models.llama3 import params as llama_params
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  c = json.loads((folder / "settings.json").read_text())
  shape = json.loads((pathlib.Path(c["model"]) / "config.json").read_text())
  # Version 0.1.7 ignores the config's value: the default would be 1e6.
  llama.apply_rope = functools.partial(
      llama.apply_rope, rope_theta=shape["rope_theta"]
  )
  mesh = jax.sharding.Mesh([jax.devices()[:1]], ("fsdp", "tp"))

  def load() -> llama.Llama3:
    config = llama.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=shape["rope_theta"],
        norm_eps=shape["rms_norm_eps"],
        weight_tying=shape["tie_word_embeddings"],
    )
    return llama_params.create_model_from_safe_tensors(
        c["model"], config, mesh, dtype=jnp.float32
    )

  tokenizer = transformers.AutoTokenizer.from_pretrained(c["model"])
  # Rewards see the text without special tokens, as in TRL.
  tokenizer.decode = functools.partial(
      tokenizer.decode, skip_special_tokens=True
  )
  prompt_tokens = max(len(tokenizer.encode(text)) for text in c["prompts"])
  rollout = base_rollout.RolloutConfig(
      max_tokens_to_generate=c["max_completion_tokens"],
      max_prompt_length=prompt_tokens,
      kv_cache_size=prompt_tokens + c["max_completion_tokens"],
      temperature=1.0,
      eos_tokens=[_NO_STOP_ID if c["full_length"] else tokenizer.eos_token_id],
  )
  optimizer = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adam(
          optax.linear_schedule(
              c["learning_rate"], c["learning_rate"] / 10, c["num_steps"]
          ),
          b2=0.99,
      ),
  )
  roles = rl_cluster.Role
  cluster = rl_cluster.RLCluster(
      actor=load(),
      reference=load() if c["beta"] else None,
      tokenizer=tokenizer,
      cluster_config=rl_cluster.ClusterConfig(
          role_to_mesh=dict.fromkeys(
              (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh
          ),
          rollout_config=rollout,
          training_config=rl_cluster.RLTrainingConfig(
              actor_optimizer=optimizer,
              # Effectively never: there is no data for evaluation.
              eval_every_n_steps=c["num_steps"],
              # The data ends before this step.
              max_steps=c["num_steps"] + 1,
          ),
      ),
  )

  # The step donates only the optimizer's state.
  def take_snapshot() -> dict[str, Any]:
    params = nnx.state(cluster.actor_trainer.model, nnx.Param)
    return nnx.to_pure_dict(params)

  clock = peer_grpo.Clock(c, take_snapshot)

  def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields batches; a step takes one when the previous step has ended."""
    key, size = jax.random.PRNGKey(c["seed"]), c["prompts_per_batch"]
    for step in range(c["num_steps"]):
      if step:
        clock.end_step()
      # By default, every step would sample with the same seed.
      rollout.seed = jax.random.fold_in(key, step)
      yield {"prompts": np.array(c["prompts"][step * size :][:size])}
    clock.end_step()

  learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      algo_config=grpo_learner.GRPOConfig(
          num_generations=c["completions_per_prompt"], beta=c["beta"]
      ),
      reward_fns=peer_grpo.rewards,
  )
  learner.train(batches())
  for step, params in clock.snapshots.items():
    save(folder / f"step{step}", params, start=pathlib.Path(c["model"]))
  clock.write(folder, ("flax", "google-tunix", "jax"))


def save(
    folder: pathlib.Path, params: Mapping[str, Any], *, start: pathlib.Path
) -> None:
  """Saves a snapshot as a Hugging Face folder; `start` has its other files."""
  shutil.copytree(
      start, folder, ignore=shutil.ignore_patterns("*.safetensors*")
  )
  safetensors.numpy.save_file(
      {
          f"{name}.weight": np.ascontiguousarray(value)
          for name, value in _hf_tensors(params).items()
      },
      folder / "model.safetensors",
      metadata={"format": "pt"},
  )


def _hf_tensors(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the params of tunix's Llama by Hugging Face name, as [out, in].

  Args:
    params: projections are [D, N, H] into and [N, H, D] out of N heads of size
      H, and [in, out] elsewhere; embeddings are [V, D].
  """
  width = params["final_norm"]["w"].shape[0]
  tensors = {
      "model.embed_tokens": params["embedder"]["input_embedding"],
      "model.norm": params["final_norm"]["w"],
  }
  if "lm_head" in params:
    tensors["lm_head"] = params["lm_head"]["w"].T
  for i, layer in params["layers"].items():
    prefix = f"model.layers.{i}"
    for name in ("input_layernorm", "post_attention_layernorm"):
      tensors[f"{prefix}.{name}"] = layer[name]["w"]
    for name in ("q_proj", "k_proj", "v_proj"):
      heads = layer["attn"][name]["w"]
      tensors[f"{prefix}.self_attn.{name}"] = heads.reshape(width, -1).T
    heads = layer["attn"]["o_proj"]["w"]
    tensors[f"{prefix}.self_attn.o_proj"] = heads.reshape(-1, width).T
    for name in ("gate_proj", "up_proj", "down_proj"):
      tensors[f"{prefix}.mlp.{name}"] = layer["mlp"][name]["kernel"].T
  return tensors


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))

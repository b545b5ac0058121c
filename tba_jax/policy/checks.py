# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Relations of adapters, meshes and the reference."""

import itertools
import operator

from tba_jax.learning import settings as learning
from tba_jax.models import checks as models
from tba_jax.models import config as config_lib
from tba_jax.models import head_layout
from tba_jax.models.families import family as family_lib
from tba_jax.policy import settings
from tba_jax.system import rules


def _sharded_sizes(c: rules.Values) -> rules.Problems:
  """Each sharded axis of the params must divide evenly, on both meshes."""
  name, shape = models.start(c)
  sizes = {
      "width": "fsdp",
      "mlp_width": "tensor",
      "num_experts": "tensor",
      "num_heads": "tensor",
      "num_kv_heads": "tensor",
  }
  if shape is not None:
    # Heads of a given model may be copied and padded.
    del sizes["num_heads"], sizes["num_kv_heads"]
    sizes |= dict.fromkeys(shape.mlp_widths, "tensor")
    if shape.layer_input_width:
      sizes["layer_inputs_width"] = "fsdp"
    for mesh in ("mesh", "search.mesh"):
      tensor = c[f"{mesh}.tensor"]
      if problem := head_layout.problem_of(shape, tensor):
        fit = [n for n in range(1, 2 * tensor) if _can_split(shape, n)]
        yield f"{mesh}.tensor", (
            f"must be a size that splits the heads of {name}, such as"
            f" {', '.join(map(str, fit))}, because {problem}"
        )
  for mesh, (field, axis) in itertools.product(
      ("mesh", "search.mesh"), sizes.items()
  ):
    shards = c[f"{mesh}.{axis}"]
    size = c[f"model.{field}"] if shape is None else getattr(shape, field)
    if not size % shards:
      continue
    if shape is None:
      yield f"model.{field}", (
          f"must be a multiple of config.{mesh}.{axis} = {shards}"
      )
    else:
      yield f"{mesh}.{axis}", (
          f"must be a size that divides {size}, the {field} of {name}"
      )


def _can_split(shape: config_lib.ModelConfig, size: int) -> bool:
  """Returns whether a tensor axis of a size fits heads, MLPs and experts."""
  widths = shape.num_experts, *shape.mlp_widths.values()
  fits = not any(width % size for width in widths)
  return fits and not head_layout.problem_of(shape, size)


def lora_targets(c: rules.Values) -> rules.Problems:
  """The model must have every matrix in `lora.targets`."""
  shape = models.start(c)[1]
  family = c["model.family"] if shape is None else shape.family
  facts = family_lib.FAMILIES[family]
  lacked = () if facts.is_gated else ("gate",)
  if shape is None or not shape.has_states:
    lacked += settings.DELTA
  else:
    fuses = facts.fuses_delta_inputs
    lacked += settings.SPLIT_INPUTS if fuses else settings.FUSED_INPUTS
  lacked += ("k", "v") if facts.has_latents else settings.LATENTS
  has_rank = shape is not None and shape.query_rank
  lacked += ("q",) if has_rank else settings.LATENT_QUERIES
  has_inputs = shape is not None and shape.layer_input_width
  lacked += () if has_inputs else settings.LAYER_INPUTS
  if not models.num_experts(c):
    lacked += settings.EXPERTS
  elif not (shape and (shape.shared_expert_width or any(shape.dense_layers))):
    lacked += settings.MLP
  known = [n for n in settings.LORA_TARGETS if n not in lacked]
  lacking = set(settings.lora_names(c["lora.targets"])) - set(known)
  if c["lora.rank"] and lacking:
    yield "lora.targets", (
        f"must be 'all' or some of {', '.join(known)}: blocks of {family} have"
        f" no {', '.join(sorted(lacking))}"
    )


def _sweep(c: rules.Values) -> rules.Problems:
  if c.program == "sweep" and c["lora.rank"]:
    yield "lora.rank", "must be 0 in a sweep"


# fmt: off
CHECKS = (
    # Frozen params alone may be narrow: small updates would round away.
    rules.require("lora.rank", operator.not_,
                  {"model.param_dtype": ("float32",)}),
    # The reference is the adapters' base, which never moves.
    rules.require("lora.rank", bool, {"reference.mode": ("fixed",)}),
    rules.require("reference.role", lambda v: v != "trainer",
                  {"reference.mode": ("fixed",)}),
    rules.require("reference.init", bool,
                  {"reference.mode": ("fixed",),
                   "reference.role": ("trainer", "searcher")}),
    # Without a reference there is no KL.
    rules.require("reference.role", lambda v: v == "none",
                  {"guards.max_kl":
                   (learning.SETTINGS["guards.max_kl"].default,)}),
    _sharded_sizes, lora_targets, _sweep,
)
# fmt: on

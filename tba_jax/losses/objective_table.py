# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of objectives, by `config.loss.name`; does not import JAX.

A loss is a pure function `(groups, c, beta) -> (loss, aux)` of `groups.Groups`,
`config.loss` and β, [] float32. The loss is [] float32; metrics read these
entries of `aux`, if present: `log_z_Bx1` and `residual_BxK` (nats),
`margin_Bx1` with `pair_Bx1`, and `value_clipped_BxKxT`.

To add an objective, add its function to a file in this folder and an entry to
`OBJECTIVES`, from which settings and config checks take names and facts.
Importance correction, length norm and metrics are common to all objectives
(`objective.py`). docs/reference/objectives.md shows how to add a loss.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import importlib
from typing import Any

from tba_jax.system import ramps

# Importance corrections, in `corrections.py`.
CORRECTIONS = (
    "none",
    "clip_token",
    "clip_sequence",
    "cispo",
    "truncate_token",
    "truncate_sequence",
    "mask_token",
    "mask_sequence",
    "gspo",
    "dppo_tv",
    "dppo_kl",
    "sapo",
    "decoupled",
    "topr",
    "bounded_token",
    "bounded_sequence",
    "vespo",
    "m2_mask",
)
# Advantages, in `policy_gradient.ADVANTAGES`.
ADVANTAGES = ("mean", "std", "maxrl", "pass_at_k")
# Divisors of a completion's log-prob, in `groups.length_weights`.
LENGTH_NORMS = ("none", "tokens", "max_tokens", "mean_tokens")
_OF_VALUES = ("value_init", "value_learning_rate")
# Corrections that need `loss.ratio_clip` above 0.
CLIPS = ("clip_token", "clip_sequence", "gspo", "cispo", "decoupled")
# Setting of `config.loss` -> corrections that read it.
READ_BY_CORRECTIONS = {
    "ratio_clip": CLIPS,
    "clip_high": CLIPS,
    "moment_cap": ("m2_mask",),
    "divergence_cap": ("dppo_tv", "dppo_kl"),
    "ratio_floor": ("mask_token", "mask_sequence"),
    "ratio_cap": (
        "truncate_token",
        "truncate_sequence",
        "mask_token",
        "mask_sequence",
        "decoupled",
    ),
}
_OF_TARGETS = ("gae_gamma", "gae_lambda", "whiten_advantages")


@dataclasses.dataclass(frozen=True)
class ObjectiveSpec:
  """A loss, its defaults and its requirements.

  function: MODULE:FUNCTION in this folder, or a user's FILE.py:FUNCTION.
  min_completions: smallest K that the loss can learn from.
  correction: default of `loss.correction`; a clip only if `loss.ratio_clip` is
    above 0, else "none".
  needs_ratio_clip: whether `loss.ratio_clip` must be above 0.
  needs_beta: whether the loss divides by β, or learns nothing at β = 0.
  anchor: policy that the target is relative to: "reference", or the default of
    `loss.anchor`; "" for a loss with neither a KL nor such a target.
  baseline: default of `loss.baseline`; "" if the loss does not read it.
  reads_behavior: whether the loss reads behavior log-probs regardless of the
    correction.
  length_norm: default of `loss.length_norm`; None if the loss reads no weights.
  learns_log_z: whether the loss learns a scalar, `groups.log_z_Bx1`.
  has_values: whether the loss learns a value model, `groups.values_BxKxT`.
  has_targets: whether the loss needs `groups.targets`.
  has_teacher: whether the loss needs `groups.divergences_BxKxT`; the step then
    computes the reference's logits itself.
  is_tempered: whether `config.tempering` applies to the target.
  settings: names in `config.loss` that only some objectives read.
  """

  function: str
  min_completions: int = 2
  correction: str = "clip_token"
  needs_ratio_clip: bool = False
  needs_beta: bool = False
  anchor: str = "reference"
  baseline: str = ""
  reads_behavior: bool = False
  length_norm: str | None = "none"
  learns_log_z: bool = False
  has_values: bool = False
  has_targets: bool = False
  has_teacher: bool = False
  is_tempered: bool = False
  settings: tuple[str, ...] = ()

  @functools.cached_property
  def loss(self) -> Callable[..., Any]:
    """The loss function; imports JAX and, for a custom loss, its file."""
    module, _, name = self.function.rpartition(":")
    if module.endswith(".py"):
      own = importlib.import_module("tba_jax.losses.custom_loss")
      return own.load(self.function)
    return getattr(importlib.import_module(f"tba_jax.losses.{module}"), name)

  @property
  def reads(self) -> tuple[str, ...]:
    """Names of all settings in `config.loss` that only some objectives read."""
    return (
        *self.settings,
        *("length_norm",) * (self.length_norm is not None),
        *("log_z_learning_rate",) * self.learns_log_z,
        *_OF_VALUES * self.has_values,
        *_OF_TARGETS * self.has_targets,
    )


# Settings of the residual family (`residual.py`).
_OF_FAMILY = ("scale", "anchor", "baseline", "baseline_shift")

OBJECTIVES = {
    "tb": ObjectiveSpec(
        "tb:tb_loss",
        needs_beta=True,
        baseline="group",
        is_tempered=True,
        settings=_OF_FAMILY,
    ),
    "tb_learned_z": ObjectiveSpec(
        "tb:tb_learned_z_loss",
        min_completions=1,
        needs_beta=True,
        learns_log_z=True,
        is_tempered=True,
        settings=("scale", "anchor"),
    ),
    "subtb": ObjectiveSpec(
        "tb:subtb_loss",
        min_completions=1,
        needs_beta=True,
        length_norm=None,
        has_values=True,
        settings=("scale", "subtb_lambda"),
    ),
    "oapl": ObjectiveSpec(
        "residual:oapl_loss",
        needs_beta=True,
        anchor="behavior",
        baseline="log_mean_exp",
        settings=_OF_FAMILY,
    ),
    "ema_tb": ObjectiveSpec(
        "residual:ema_tb_loss",
        needs_beta=True,
        anchor="ema",
        baseline="group",
        settings=("anchor", "baseline", "baseline_shift"),
    ),
    "a_star_po": ObjectiveSpec(
        "residual:a_star_po_loss",
        min_completions=1,
        needs_beta=True,
        baseline="file",
        settings=_OF_FAMILY,
    ),
    "flowrl": ObjectiveSpec(
        "residual:flowrl_loss",
        min_completions=1,
        correction="truncate_sequence",
        needs_beta=True,
        length_norm="tokens",
        has_values=True,
        settings=("scale", "anchor"),
    ),
    "tba_prime": ObjectiveSpec(
        "policy_gradient:tba_prime_loss", length_norm="tokens"
    ),
    "reinforce": ObjectiveSpec(
        "policy_gradient:reinforce_loss", reads_behavior=True
    ),
    "rloo": ObjectiveSpec("policy_gradient:rloo_loss", reads_behavior=True),
    "proximal_rloo": ObjectiveSpec(
        "policy_gradient:rloo_loss",
        correction="clip_sequence",
        needs_ratio_clip=True,
        reads_behavior=True,
    ),
    "grpo": ObjectiveSpec(
        "policy_gradient:grpo_loss",
        length_norm="tokens",
        settings=("advantage", "pass_k"),
    ),
    "dr_grpo": ObjectiveSpec(
        "policy_gradient:dr_grpo_loss",
        length_norm="max_tokens",
        settings=("advantage", "pass_k"),
    ),
    "ppo": ObjectiveSpec(
        "ppo:ppo_loss",
        min_completions=1,
        needs_ratio_clip=True,
        reads_behavior=True,
        length_norm="mean_tokens",
        has_values=True,
        has_targets=True,
        settings=("value_clip", "value_weight"),
    ),
    "gvpo": ObjectiveSpec(
        "tb:gvpo_loss", needs_beta=True, settings=("scale", "anchor")
    ),
    "ctb": ObjectiveSpec(
        "tb:ctb_loss",
        needs_beta=True,
        is_tempered=True,
        settings=("scale", "pair_contrast"),
    ),
    "online_dpo": ObjectiveSpec(
        "pairwise:online_dpo_loss", needs_beta=True, settings=("ties",)
    ),
    "ipo": ObjectiveSpec(
        "pairwise:ipo_loss", needs_beta=True, settings=("ties",)
    ),
    "slic": ObjectiveSpec(
        "pairwise:slic_loss", needs_beta=True, settings=("ties",)
    ),
    "best_of_n": ObjectiveSpec("pairwise:best_of_n_loss", anchor=""),
    "gkd": ObjectiveSpec(
        "distillation:gkd_loss",
        min_completions=1,
        correction="none",
        length_norm="tokens",
        has_teacher=True,
        settings=("gkd_beta",),
    ),
}


def names(fact: str) -> tuple[str, ...]:
  """Returns the objectives for which a field of `ObjectiveSpec` is true."""
  return tuple(n for n, row in OBJECTIVES.items() if getattr(row, fact))


def without_reference() -> tuple[str, ...]:
  """Returns the objectives that read no reference with their default anchor."""
  return tuple(n for n, row in OBJECTIVES.items() if row.anchor != "reference")


def readers() -> dict[str, tuple[str, ...]]:
  """Returns the objectives that read each setting of `config.loss`."""
  out: dict[str, tuple[str, ...]] = {}
  for name, row in OBJECTIVES.items():
    for key in row.reads:
      out[key] = (*out.get(key, ()), name)
  return out


def correction(c: Mapping[str, Any]) -> str:
  """Returns the importance correction of `config.loss`."""
  own = c["correction"] or find(c["name"]).correction
  if not c["correction"] and own in CLIPS and not c["ratio_clip"]:
    return "none"
  return own


def anchor(c: Mapping[str, Any]) -> str:
  """Returns the anchor of `config.loss`, "" without anchor and KL."""
  return c["anchor"] or find(c["name"]).anchor


def baseline(c: Mapping[str, Any]) -> str:
  """Returns the baseline of `config.loss`, "" if the loss reads none."""
  return c["baseline"] or find(c["name"]).baseline


def min_completions(c: Mapping[str, Any]) -> int:
  """Returns the smallest K that `config.loss` can learn from."""
  # With K = 1, these baselines equal the completion's own reward or return.
  of_group = baseline(c) in ("group", "mean", "log_mean_exp")
  return max(find(c["name"]).min_completions, 2 if of_group else 1)


def reads_reference(c: Mapping[str, Any]) -> bool:
  """Returns whether the loss of `config.loss` depends on the reference."""
  if anchor(c) != "reference":
    return False
  is_own = ".py:" in c["name"]
  beta = ramps.parse(c["beta"])
  has_kl = max(beta.start, beta.end) > 0
  row = find(c["name"])
  return bool(is_own or row.needs_beta or row.has_teacher or has_kl)


def has_reference(config: Mapping[str, Any]) -> bool:
  """Returns whether any role has a reference."""
  return config["reference"]["role"] != "none"


def holds_reference(config: Mapping[str, Any], role: str) -> bool:
  """Returns whether a role holds the reference and computes its log-probs.

  Args:
    role: "trainer" or "searcher".
  """
  return config["reference"]["role"] == role


def has_reference_pass(config: Mapping[str, Any]) -> bool:
  """Returns whether the trainer computes reference log-probs before a step."""
  in_step = find(config["loss"]["name"]).has_teacher
  return holds_reference(config, "trainer") and not in_step


def reads_behavior(c: Mapping[str, Any]) -> bool:
  """Returns whether the loss depends on the behavior log-probs.

  It is unknown whether a custom loss reads them itself.
  """
  return (
      find(c["name"]).reads_behavior
      or correction(c) != "none"
      or anchor(c) in ("behavior", "ema")
  )


def unread(c: Mapping[str, Any]) -> dict[str, str]:
  """Maps unread settings of anchor and baseline to what would read them."""
  rows = (
      ("ema_decay", anchor(c) == "ema", "anchor = ema"),
      ("baseline_file", baseline(c) == "file", "baseline = file"),
      ("baseline_temperature", baseline(c) in ("log_mean_exp", "file"),
       "baseline = log_mean_exp, file"),
  )  # fmt: skip
  return {key: reader for key, is_read, reader in rows if not is_read}


def needs_logprobs(c: Mapping[str, Any], optimizer: Mapping[str, Any]) -> bool:
  """Returns whether completions must come with behavior log-probs.

  Args:
    c: `config.loss`.
    optimizer: `config.optimizer`, whose learning rate may follow the ratios.
  """
  return reads_behavior(c) or optimizer["sample_share_power"] > 0


@functools.cache
def find(name: Any) -> ObjectiveSpec:
  """Returns the objective of `config.loss.name`; does not load its function.

  A name that is not a key of `OBJECTIVES` is a custom loss, FILE.py:FUNCTION.
  """
  return OBJECTIVES.get(name) or ObjectiveSpec(name)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss settings: those that a pass may change, and those that are fixed."""

from collections.abc import Mapping

import ml_collections

from tba_jax.config import load
from tba_jax.config import settings as settings_lib
from tba_jax.losses import objective_table
from tba_jax.serving import token_losses

# Settings of `config.loss` that a pass may change. The others are excluded:
# some have no effect here, and `name` may be a file to import.
PASS_SETTINGS = (
    "scale", "beta", "correction", "ratio_clip", "clip_high", "ratio_cap",
    "ratio_floor", "moment_cap", "divergence_cap", "advantage", "pass_k",
    "anchor", "ema_decay", "baseline", "baseline_shift", "baseline_temperature",
    "length_norm", "ties",
)  # fmt: skip
# Settings that a server ignores, and the only value allowed for each. Sampling
# settings come with each request.
_FIXED_SETTINGS = {
    "loss.reward_weight": 1.0, "loss.missing_stop": "keep",
    "loss.entropy_weight": 0.0, "loss.behavior_logprobs": "sampler",
    "sampling.top_k": 0, "sampling.top_p": 1.0,
    "sampling.min_p": 0.0, "sampling.stop_strings": "",
}  # fmt: skip


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a setting that a server would ignore."""
  for key, only in _FIXED_SETTINGS.items():
    section, _, name = key.partition(".")
    if config[section][name] != only:
      raise ValueError(
          f"config.{key}={config[section][name]!r}: a server does not apply it;"
          f" must be {only!r}"
      )
  _check_beta(f"config.loss.beta={config.loss.beta!r}", config.loss.beta)


def _check_beta(named: str, beta: float | str) -> None:
  """Raises ValueError for a schedule of beta."""
  if isinstance(beta, str):
    raise ValueError(f"{named}: a server does not apply it; must be a number")


def objective_config(
    config: ml_collections.ConfigDict,
    name: str,
    changes: Mapping[str, float | str],
) -> ml_collections.ConfigDict:
  """Returns the config with a group objective and its settings.

  Args:
    changes: settings of the objective that differ from `config.loss`.

  Raises:
    ValueError: a server does not support the objective or a setting.
  """
  row = objective_table.OBJECTIVES.get(name)
  # A pass has only the policy's params, and log-probs of one reference.
  needs_more = lambda row: row.has_values or row.learns_log_z or row.has_teacher
  if row is None or needs_more(row):
    allowed = [
        n for n, r in objective_table.OBJECTIVES.items() if not needs_more(r)
    ]
    raise ValueError(
        f"loss_fn = {name!r}: must be"
        f" {', '.join([*token_losses.LOSSES, *allowed])}"
    )
  config = _loss_config(config, name, changes)
  _check_beta(f"loss_fn_config.beta={config.loss.beta!r}", config.loss.beta)
  if row.needs_beta and config.loss.beta == 0:
    raise ValueError(
        f"loss_fn={name!r} needs beta above 0: give it in loss_fn_config, or"
        " as config.loss.beta"
    )
  return config


def _loss_config(
    config: ml_collections.ConfigDict,
    name: str,
    changes: Mapping[str, float | str],
) -> ml_collections.ConfigDict:
  """Returns the config with a pass's objective and settings of `loss`."""
  config = config.copy_and_resolve_references()
  lines = [f"loss.name={name}"]
  for key, value in changes.items():
    if key not in PASS_SETTINGS:
      raise ValueError(
          f"loss_fn_config.{key}: must be one of {', '.join(PASS_SETTINGS)}"
      )
    lines.append(f"loss.{key}={value}")
  try:
    config = load.apply_overrides(config, lines)
  except ValueError as error:
    raise ValueError(f"loss_fn_config: {error}") from error
  c, readers = config.loss, objective_table.readers()
  by_correction = objective_table.READ_BY_CORRECTIONS
  for key in changes:
    value, setting = c[key], settings_lib.SETTINGS[f"loss.{key}"]
    if not setting.allowed.test(value):
      raise ValueError(
          f"loss_fn_config.{key} = {value!r}: must be {setting.allowed.text}"
      )
    if value == setting.default:
      continue
    if name not in readers.get(key, (name,)):
      raise ValueError(
          f"loss_fn_config.{key}: loss_fn={name!r} does not read it; must come"
          f" with {', '.join(readers[key])}"
      )
    correction = objective_table.correction(c)
    if correction not in by_correction.get(key, (correction,)):
      raise ValueError(
          f"loss_fn_config.{key}: correction {correction!r} does not read it;"
          f" must come with {', '.join(by_correction[key])}"
      )
    if reader := objective_table.unread(c).get(key):
      raise ValueError(
          f"loss_fn_config.{key}: nothing reads it; must come with {reader}"
      )
  # Settings that only the objective of the server's config reads.
  for key in PASS_SETTINGS:
    if name not in readers.get(key, (name,)):
      c[key] = settings_lib.SETTINGS[f"loss.{key}"].default
  needs_clip = c.correction in objective_table.CLIPS or (
      not c.correction and objective_table.find(name).needs_ratio_clip
  )
  if needs_clip and not c.ratio_clip:
    why = f" and correction {c.correction!r}" if c.correction else ""
    raise ValueError(
        f"loss_fn={name!r}{why}: needs ratio_clip above 0, in loss_fn_config"
        " or as config.loss.ratio_clip"
    )
  if objective_table.baseline(c) == "file":
    raise ValueError(
        f"loss_fn={name!r} has the baseline 'file', which a server does not"
        " have: give another as loss_fn_config.baseline"
    )
  return config

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Variants of a config that change several settings together. No JAX here."""

import ml_collections


def set_rounds(
    c: ml_collections.ConfigDict,
    *,
    mini_batches: int,
    passes: int = 1,
    lag_rounds: int = 1,
) -> None:
  """Changes a config to rounds, with all settings that must fit them.

  The number of optimizer steps is cut to whole rounds.
  """
  steps = mini_batches * passes
  c.rounds.mini_batches = mini_batches
  c.rounds.passes = passes
  c.rounds.lag_rounds = lag_rounds
  c.train.num_steps = max(c.train.num_steps // steps, 1) * steps
  c.publish.every_steps = steps
  c.search.samples_per_prompt = c.train.completions_per_prompt
  c.search.prompts_per_round = min(
      c.search.prompts_per_round, mini_batches * c.train.prompts_per_batch
  )
  c.replay.recent_fraction = 1.0
  c.replay.dedupe = False
  c.replay.warm_start_completions = 0


def parse_arg(
    arg: str, **spec: bool | int | float | str
) -> ml_collections.ConfigDict:
  """Returns the typed variants of a config's argument string.

  `parse_arg("quick,seed=3", quick=False, seed=0)` gives quick=True, seed=3.

  Args:
    arg: comma-separated `name` (a flag set to True) or `name=value`; may be
      empty or None.
    **spec: the allowed names with their defaults, whose types are applied.

  Raises:
    ValueError: a name that is not in `spec`, or a value of another type.
  """
  out = dict(spec)
  for item in (arg or "").split(","):
    if not item:
      continue
    name, has_value, text = item.partition("=")
    if name not in spec:
      raise ValueError(
          f"config argument {name!r} is not known; allowed: {sorted(spec)}"
      )
    kind = type(spec[name])
    if kind is bool:
      allowed = {"": True, "true": True, "1": True, "false": False, "0": False}
      if text.lower() not in allowed:
        raise ValueError(
            f"config argument {name}={text!r}: allowed true, false"
        )
      out[name] = allowed[text.lower()]
    else:
      if not has_value:
        raise ValueError(f"config argument {name!r} needs a value: {name}=…")
      try:
        out[name] = kind(text)
      except ValueError as error:
        raise ValueError(
            f"config argument {name}={text!r}: allowed a {kind.__name__}"
        ) from error
  return ml_collections.ConfigDict(out)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Config files of runs; the argument string that each of them takes."""

import ml_collections


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

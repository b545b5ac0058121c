# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that may change over steps: a number, or START:END:STEPS."""

import dataclasses
import re

FORM = "START:END:STEPS or START:END:STEPS:STOP"


@dataclasses.dataclass(frozen=True)
class Ramp:
  """A value that is linear from `start` to `end`.

  start: value at step 0.
  end: value after `steps`.
  steps: number of steps that the change takes; 0 = constant.
  stop: step, counted from 1, at which the value jumps to `end`, at most
    `steps`; 0 = no jump.
  """

  start: float
  end: float
  steps: int = 0
  stop: int = 0


def parse(value: float | str) -> Ramp:
  """Returns the ramp of a setting's value; a number is constant.

  Raises ValueError for a text that is not a ramp.
  """
  if not isinstance(value, str):
    return Ramp(value, value)
  match = re.fullmatch(r"([^:]+):([^:]+):(\d{1,9})(?::(\d{1,9}))?", value)
  if match is None:
    raise ValueError(f"{value!r}: must be {FORM}")
  ramp = Ramp(float(match[1]), float(match[2]), int(match[3]))
  stop = int(match[4] or ramp.steps)
  if not 1 <= stop <= ramp.steps:
    raise ValueError(f"{value!r}: must be 1 <= STOP <= STEPS")
  return dataclasses.replace(ramp, stop=int(match[4] or 0))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the open settings of a config, and prints the choices."""

from collections.abc import Sequence
import copy
import os

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import load
from tba_jax.programs import defaults
from tba_jax.run import run_directory
from tba_jax.system import accelerators

# Programs that show the choices because people start them.
_SHOW = ("train", "plan")
# Programs that read settings on each host, where choices must agree, or that
# concern other machines.
_ON_HOSTS = ("trainer", "searcher", "compile")
# Programs that read none of these settings.
_WITHOUT = ("store", "status", "report", "export", "serve", "verify", "rerun")


def settle(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    program: str,
    operands: Sequence[str] = (),
) -> ml_collections.ConfigDict:
  """Returns a config with its open settings chosen, before validation.

  A run that has begun keeps the values in its config.json.

  Args:
    config: result of `load_config`.
    workdir: the run's directory.
    operands: arguments of the program; the first may name a plan's device.

  Raises:
    ValueError: the run does not fit the machine.
  """
  if program in _WITHOUT:
    return config
  config = copy.deepcopy(config)
  machine = None
  if program in _ON_HOSTS:
    machine = defaults.cluster_machine()
  elif program == "plan":
    machine = _planned(operands)
  choices = defaults.choose(config, machine, _saved(workdir))
  if program in _SHOW:
    for line in defaults.lines(config, choices, machine):
      print(line, flush=True)
  return config


def _planned(operands: Sequence[str]) -> defaults.Machine | None:
  """Returns the machine that a plan is for; None is this one."""
  name = next((o.lower() for o in operands if not o.startswith("--")), "")
  if name in hardware.HARDWARE:
    return defaults.hardware_machine(name)
  kind = name.partition(":")[0]
  if gib := accelerators.DEVICE_GIB.get(kind):
    return defaults.Machine(hardware.Hardware(kind, gib, 1), f"one {kind}")
  return None


def _saved(workdir: str | None) -> dict | None:
  """Returns the settings of a run that has begun, by key."""
  if not (workdir and os.path.exists(os.path.join(workdir, "config.json"))):
    return None
  try:
    return load.flatten(run_directory.load_config(workdir))
  except (ValueError, OSError):
    return None  # The program reports the error itself.

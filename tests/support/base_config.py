# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Valid config for tests of config checks."""

from tba_jax.config import settings


def make(**changes):
  """Returns a valid config with `section__key=value` changes."""
  config = settings.get_config()
  config.evaluate.num_prompts = config.evaluate.final_prompts = 8
  for name, value in changes.items():
    with config.ignore_type():
      config.update_from_flattened_dict({name.replace("__", "."): value})
  return config

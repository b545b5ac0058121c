# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint fits a run with any setting that may change on resume."""

from absl.testing import parameterized
import jax
import pytest

from tba_jax import collect
from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.learning import buffers
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tests.support import base_config
from tests.support import tiny_model
from tests.transport.groups import fake_groups

# Sections whose settings a checkpoint, or the buffer in it, may depend on.
_SECTIONS = (
    "loss optimizer train tempering sampling explore replay search publish"
    " reference reward lora rounds".split()
)


def _other_values(key):
  """Yields allowed values other than the default."""
  setting = settings.SETTINGS[key]
  default, allowed = setting.default, setting.allowed
  if isinstance(default, bool):
    yield not default
    return
  if allowed.names:
    yield from (name for name in allowed.names if name != default)
    return
  if isinstance(default, str):
    return
  kind = float if default is None else type(default)
  for value in (kind(2 * (default or 0)), kind(3), kind(0.5)):
    if value != default and allowed.test(value):
      yield value
      return


def _shapes(config):
  """Returns what a checkpoint has: shapes of its state, and columns."""
  model = tiny_model.make_model()
  state = train_step.abstract_state(
      config, model, sharding.make_mesh(config.mesh)
  )
  leaves = {
      jax.tree_util.keystr(path): (leaf.shape, leaf.dtype)
      for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  }
  columns = collect.optional_columns(config, model.config)
  return leaves, columns


@pytest.mark.slow
class ResumeTest(parameterized.TestCase):

  @parameterized.parameters(
      {},
      {"loss__name": "tb_learned_z", "loss__proximal_every_steps": 4},
      {"reference__mode": "ema", "optimizer__grad_clip_norm": 0.0},
  )
  def test_checkpoint_fits_whatever_may_change(self, **changes):
    base = base_config.make(**changes)
    old, expected, tried = load.flatten(base), _shapes(base), 0
    for key in settings.SETTINGS:
      if key.partition(".")[0] not in _SECTIONS:
        continue
      for value in _other_values(key):
        config = base_config.make(**changes)
        with config.ignore_type():
          config.update_from_flattened_dict({key: value})
        new, fixed = load.flatten(config), settings.fixed(key)
        if new == old or fixed is not None and fixed.holds(old, new):
          continue
        with self.subTest(key=key, value=value):
          self.assertEqual(_shapes(config), expected)
          tried += 1
    self.assertGreater(tried, 50)

  def test_buffer_keeps_completions_beyond_smaller_capacity(self):
    config = fake_groups.buffer_config()
    buffer = buffers.make_buffer(config)
    for prompt in range(4):
      buffer.insert(fake_groups.make_group(prompt, [[1], [2]]), 0)
    config.replay.capacity = 4
    smaller = buffers.make_buffer(config)
    smaller.set_state(buffer.get_state())
    self.assertLen(smaller, 8)
    smaller.insert(fake_groups.make_group(9, [[1], [2]]), 1)
    self.assertLen(smaller, 4)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A new column needs only a line in `types`, a producer and a consumer."""

import dataclasses
import inspect
import io
import json
import pathlib
import types as builtin_types
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import collect
from tba_jax import types
from tba_jax.learning import batches
from tba_jax.learning import host_state
from tba_jax.learning import packing
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.replay import decisions
from tba_jax.tools import step_file
from tba_jax.transport import wire
from tba_jax.transport.groups import journal
from tba_jax.transport.groups import messages
from tests.replay import invariants
from tests.support import base_config
from tests.support import fakes
from tests.support import tiny_model
from tests.transport.groups import fake_groups

# The line in `types`.
_LINE = """
  surprise: Any = column(
      "float32[ST]", "made up", mask="sampled", when="surprised"
  )
"""
_SECRET = bytes(32)
_LIMITS = dict(vocab_size=99, max_prompt_tokens=5, max_completion_tokens=4)


def make_groups(has_it):
  """Producer: completions of 1, 2 and 3 tokens, one not the policy's."""
  groups = [
      fake_groups.make_group(
          i, [[10 + i], [20 + i, 3], [30 + i, 4, 5]], inserted=[(2, 1)]
      )
      for i in (0, 1)
  ]
  if not has_it:
    return groups
  return [
      # Fills places outside the mask, which must not be read.
      dataclasses.replace(
          g, surprise=(g.completion_tokens / 8).astype(np.float32)
      )
      for g in groups
  ]


@jax.jit
def read(batch):
  """Consumer."""
  return (batch.surprise * batch.completion_mask).sum()


class AddedColumnTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    anchor = '"""Columns that an optimizer step reads."""\n'
    source = inspect.getsource(types)
    self.assertEqual(source.count(anchor), 1)
    changed = builtin_types.ModuleType(types.__name__)
    exec(source.replace(anchor, anchor + _LINE), vars(changed))
    self.enter_context(mock.patch.dict(vars(types), vars(changed)))
    self.enter_context(
        mock.patch.dict(
            collect.CONDITIONS, surprised=lambda config: config.seed == 7
        )
    )

  def columns(self, has_it):
    self.config = base_config.make(
        seed=7 if has_it else 8,
        train__prompts_per_batch=2,
        train__completions_per_prompt=3,
        train__micro_batch_prompts=2,
        sampling__max_prompt_tokens=fake_groups.PROMPT_TOKENS,
        sampling__max_completion_tokens=fake_groups.COMPLETION_TOKENS,
    )
    return collect.optional_columns(self.config)

  def through_journal(self, groups):
    """Returns groups after the wire and the trainer's journal."""
    header, arrays = messages.pack_groups(groups)
    folder = self.create_tempdir().full_path
    written = journal.Journal(
        folder, max_segment_bytes=10**6, on_event=lambda *_: None
    )
    written.append([wire.encode(header, arrays, _SECRET)])
    written.close()
    ((_, payload),) = journal.read_records(pathlib.Path(folder), 0)
    return messages.unpack_groups(*wire.decode_unverified(payload))

  def resumed(self, buffer, columns):
    """Returns a buffer restored from a checkpoint of another."""
    file = io.BytesIO()
    host_state.write(file, host_state.pack(buffer.get_state()))
    file.seek(0)
    again = fake_groups.make_buffer(columns=columns)
    again.set_state(host_state.read(file))
    invariants.check_buffer(again)
    return again

  def through_step_file(self, draw, batch):
    """Returns the batch of a step file."""
    model = tiny_model.make_model()
    made = mock.Mock(model=model, tokenizer=fakes.FakeTokenizer())
    work = mock.Mock(
        state={"w": jnp.zeros(2)}, base_params={}, teacher_params=None
    )
    path = pathlib.Path(self.create_tempdir().full_path) / "step.npz"
    step_file.write(path, self.config, made, work, draw, batch, {"loss": 1.0})
    saved = step_file.read_saved(path)
    self.assertEqual("surprise" in saved["draw"], draw.surprise is not None)
    return types.batch_of(saved["batch"])

  def to_draw(self, has_it):
    columns = self.columns(has_it)
    groups = self.through_journal(make_groups(has_it))
    buffer = fake_groups.make_buffer(columns=columns)
    for group in groups:
      reason = messages.reject_reason(group, columns=columns, **_LIMITS)
      self.assertIsNone(reason)
      buffer.insert(group, 0)
    self.buffer = self.resumed(buffer, columns)
    return self.buffer.sample(2, 3, 0)

  def to_batch(self, draw):
    batch = batches.of_draw(draw)
    rows = packing.pack(
        packing.make(self.config),
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
    )
    return dataclasses.replace(batch, rows=rows)

  def test_survives_from_searcher_to_step(self):
    for group, back in zip(
        make_groups(True), self.through_journal(make_groups(True))
    ):
      np.testing.assert_array_equal(group.surprise, back.surprise, strict=True)
    draw = self.to_draw(True)
    expected = np.where(draw.sampled_mask, draw.completion_tokens / 8, 0)
    self.assertEqual((expected > 0).sum(), 2 * 5)
    batch = self.to_batch(draw)
    for actual in (
        draw.surprise,
        batch.surprise,
        self.through_step_file(draw, batch).surprise,
    ):
      np.testing.assert_array_equal(
          actual, expected.astype(np.float32), strict=True
      )
    self.assertIn("surprise", decisions.sums_of(draw))
    self.assertEqual(float(read(batch)), expected.sum())

  def test_has_shapes_of_processes_and_micro_batches(self):
    batch = self.to_batch(self.to_draw(True))
    arrays = json.loads(json.dumps({
        name: [x.shape, x.dtype.name]
        for name, x in types.named_leaves(batch).items()
    }))  # fmt: skip
    arrays = {n: jax.ShapeDtypeStruct(*x) for n, x in arrays.items()}
    followed = types.batch_of(arrays)
    mesh = sharding.make_mesh(self.config.mesh)
    abstract = packing.abstract_batch(
        self.config, mesh, packing.size_of(batch.rows), self.columns(True)
    )
    self.assertEqual(
        jax.tree.map(lambda x: (x.shape, x.dtype), abstract),
        jax.tree.map(lambda x: (x.shape, x.dtype), followed),
    )
    cut = train_step.cut_micro_batches(
        jax.tree.map(jnp.asarray, dataclasses.replace(batch, rows=None)),
        self.config.train,
        mesh,
    )
    np.testing.assert_array_equal(cut.surprise[0], batch.surprise)

  def test_groups_have_it_only_under_its_condition(self):
    for has_it in (True, False):
      columns = self.columns(has_it)
      for group in make_groups(not has_it):
        reason = messages.reject_reason(group, columns=columns, **_LIMITS)
        self.assertEqual(reason, "surprised")
    group, _ = make_groups(True)
    group.surprise[0, 0] = np.nan
    columns = self.columns(True)
    reason = messages.reject_reason(group, columns=columns, **_LIMITS)
    self.assertEqual(reason, "surprise")
    with self.assertRaisesRegex(ValueError, "surprise"):
      fake_groups.make_buffer(columns=columns).insert(make_groups(False)[0], 0)

  def test_wrong_ones_are_refused_by_name(self):
    header, arrays = messages.pack_groups(make_groups(True))
    right = arrays["surprise"]
    for wrong in (
        right.astype(np.float64),
        right[:, :-1],
        right[..., :-1],
        right[..., None],
        np.zeros((2, 3, 10**6), np.float32),
    ):
      with self.assertRaisesRegex(ValueError, "surprise"):
        messages.unpack_groups(header, {**arrays, "surprise": wrong})
    with self.assertRaisesRegex(ValueError, "unknown column 'surprises'"):
      messages.unpack_groups(header, {**arrays, "surprises": right})
    with self.assertRaisesRegex(ValueError, "no column 'surprise'"):
      messages.pack_groups([make_groups(True)[0], make_groups(False)[1]])

  def test_costs_nothing_if_absent(self):
    _, arrays = messages.pack_groups(make_groups(False))
    draw = self.to_draw(False)
    batch = self.to_batch(draw)
    for names in (
        arrays,
        vars(self.buffer.table),
        self.buffer.get_state()["rows"],
        decisions.sums_of(draw),
        types.named_leaves(batch),
    ):
      self.assertNotIn("surprise", names)
    self.assertIsNone(draw.surprise)
    self.assertIsNone(self.through_step_file(draw, batch).surprise)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or absent, the newest that can be read, clear errors."""

import dataclasses
import json
import os
import pathlib
import shutil

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.training import checkpoint
from tba_jax.training import sharding
from tba_jax.training import train_step
from tests.support import tiny_model

HOST_STATE = {"cursor": 7, "buffer": {"tokens": np.arange(6), "seed": 2**130}}


def make_state(value, size=40):
  return {
      "params": {"kernel": jnp.full((size, 5), float(value))},
      "empty": {},
      "step": jnp.int32(value),
  }


class CheckpointTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.events = []

  def open(self, keep=2, **kept_for_good):
    saver = checkpoint.Checkpointer(
        str(self.directory),
        keep=keep,
        **kept_for_good,
        on_event=lambda kind, message: self.events.append((kind, message)),
    )
    self.addCleanup(saver.close)
    return saver

  def save_steps(self, *steps, keep=2, **kept_for_good):
    saver = self.open(keep, **kept_for_good)
    for step in steps:
      saver.save(step, make_state(step), {**HOST_STATE, "step": step})
    saver.wait()
    return saver

  def check_restores(self, saver, step):
    state, host = saver.restore(make_state(0))
    chex.assert_trees_all_equal(state, make_state(step))
    self.assertEqual(host["step"], step)

  def test_restores_what_was_saved_in_another_process_life(self):
    self.save_steps(3).close()
    with self.assertNoLogs("absl", "WARNING"):
      state, host = self.open().restore(make_state(0))
    chex.assert_trees_all_equal(state, make_state(3))
    self.assertEqual(host["cursor"], 7)
    self.assertEqual(host["buffer"]["seed"], 2**130)
    np.testing.assert_array_equal(host["buffer"]["tokens"], np.arange(6))

  def test_keeps_the_newest_ones(self):
    saver = self.save_steps(1, 2, 10)
    self.assertEqual(saver.latest_step(), 10)
    steps = [p.name for p in self.directory.iterdir() if p.name.isdigit()]
    self.assertCountEqual(steps, ["2", "10"])
    self.check_restores(saver, 10)
    state, _ = saver.restore(make_state(0), step=2)
    self.assertEqual(state["step"], 2)

  def test_keeps_some_of_the_older_ones_for_good(self):
    saver = self.save_steps(2, 4, 5, 6, 7, 8, 9, keep_every_steps=4)
    self.assertEqual(saver.complete_steps(), [4, 8, 9])
    # The journal behind step 4 is not kept: nothing goes on from there.
    self.assertEqual(saver.newest_steps(), [8, 9])
    saver.close()
    saver = self.save_steps(10, 11, keep_every_steps=4)
    self.assertEqual(saver.complete_steps(), [4, 8, 10, 11])

  def test_keeps_one_of_a_stretch_of_time_for_good(self):
    saver = self.save_steps(1, 2, 3, 4, keep=1, keep_every_s=3600)
    self.assertEqual(saver.complete_steps(), [1, 4])

  def test_what_happens_after_save_does_not_reach_the_checkpoint(self):
    # Large, so that the write is under way while the buffers are reused.
    step_fn = jax.jit(
        lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0
    )
    example = make_state(0, size=400_000)
    state = step_fn(make_state(1, size=400_000))
    saver, host = self.open(), {"counts": np.zeros(1000)}
    saver.save(1, state, host)
    for _ in range(5):
      state = step_fn(state)
      host["counts"] += 1
    saver.wait()
    restored, restored_host = saver.restore(example)
    chex.assert_trees_all_equal(restored, make_state(2, size=400_000))
    np.testing.assert_array_equal(restored_host["counts"], np.zeros(1000))

  def test_empty_directory(self):
    saver = self.open()
    self.assertIsNone(saver.latest_step())
    with self.assertRaisesRegex(FileNotFoundError, str(self.directory)):
      saver.restore(make_state(0))

  def test_a_step_that_is_not_there(self):
    saver = self.save_steps(1)
    with self.assertRaisesRegex(FileNotFoundError, "no checkpoint 5"):
      saver.restore(make_state(0), step=5)

  def test_steps_only_grow(self):
    saver = self.save_steps(4)
    for step in (4, 3):
      with self.assertRaisesRegex(ValueError, f"step {step} is not above 4"):
        saver.save(step, make_state(step), {})

  def test_any_truncated_file_gives_the_checkpoint_before(self):
    self.save_steps(1, 2).close()
    whole = self.create_tempdir().full_path
    shutil.copytree(self.directory, whole, dirs_exist_ok=True)
    newest = self.directory / "2"
    files = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    files = [p.relative_to(self.directory) for p in files]
    passed_over = 0
    for file in files:
      shutil.rmtree(self.directory)
      shutil.copytree(whole, self.directory)
      path = self.directory / file
      os.truncate(path, path.stat().st_size // 2)
      self.events.clear()
      with self.subTest(str(file)):
        saver = checkpoint.Checkpointer(
            str(self.directory),
            keep=2,
            on_event=lambda kind, message: self.events.append((kind, message)),
        )
        state, host = saver.restore(make_state(0))
        # Some files say nothing that a restore needs: then it is whole.
        step = int(state["step"])
        chex.assert_trees_all_equal(state, make_state(step))
        self.assertEqual(host["step"], step)
        if step == 1:
          passed_over += 1
          ((kind, message),) = self.events
          self.assertEqual(kind, "checkpoint_damaged")
          self.assertIn("checkpoint 2 in", message)
          # Its step can be taken again.
          saver.save(2, make_state(2), {}, wait=True)
          self.assertEqual(saver.latest_step(), 2)
        saver.close()
    # Data, index and metadata of the arrays, the host state, the format.
    self.assertGreaterEqual(passed_over, 4)

  def test_a_missing_part_gives_the_checkpoint_before(self):
    self.save_steps(1, 2).close()
    shutil.rmtree(self.directory / "2" / "host")
    self.check_restores(self.open(), 1)
    self.assertTrue((self.directory / "damaged-2").exists())

  def test_a_wrong_structure_is_an_error_and_moves_nothing(self):
    saver = self.save_steps(1, 2)
    with self.assertRaisesRegex(ValueError, "(?s)step 2: .*step 1: "):
      saver.restore({"params": jnp.zeros(3)})
    with self.assertRaisesRegex(ValueError, "can be read"):
      saver.restore(make_state(0, size=41))
    self.check_restores(saver, 2)
    self.assertEmpty(self.events)

  def test_a_field_without_arrays_may_lack(self):
    self.save_steps(1).close()
    new = {**make_state(0), "ref_params": {}}
    state, host = self.open().restore(new)
    chex.assert_trees_all_equal(state, {**make_state(1), "ref_params": {}})
    self.assertEqual(host["step"], 1)
    self.assertEmpty(self.events)

  def test_a_train_state_of_an_earlier_layout(self):
    config, model = tiny_model.make_config(), tiny_model.BIGRAM
    mesh = sharding.make_mesh(config.mesh)
    state = train_step.init_state(
        config, model, tiny_model.init_params(model), mesh
    )
    known = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in ("ref_params", "sampling_params")
    }
    earlier = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Earlier", known)
    )
    saver = self.open()
    saver.save(1, earlier(**known), {}, wait=True)
    found, _ = saver.restore(train_step.abstract_state(config, model, mesh))
    chex.assert_trees_all_equal(found, state)
    config.reference.mode = "ema"
    with self.assertRaisesRegex(checkpoint.LackingError, "no ref_params: an"):
      saver.restore(train_step.abstract_state(config, model, mesh))

  def test_a_field_with_arrays_that_lacks_is_one_clear_error(self):
    saver = self.save_steps(1, 2)
    new = {**make_state(0), "ref_params": {"kernel": jnp.zeros(3)}}
    with self.assertRaisesRegex(
        checkpoint.LackingError,
        f"^checkpoint 2 in {self.directory} has no ref_params: .*--program=exp",
    ):
      saver.restore(new)
    self.check_restores(saver, 2)
    self.assertEmpty(self.events)

  def test_a_newer_format_is_refused_by_name(self):
    self.save_steps(1, 2).close()
    path = self.directory / "2" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    metadata["custom_metadata"]["format"] = checkpoint.FORMAT + 1
    path.write_text(json.dumps(metadata))
    with self.assertRaisesRegex(
        checkpoint.NewerFormatError, f"format {checkpoint.FORMAT + 1}"
    ):
      self.open().restore(make_state(0))
    self.assertEmpty(self.events)

  def test_a_directory_that_cannot_be_used(self):
    file = self.create_tempfile("file").full_path
    with self.assertRaisesRegex(OSError, "checkpoint directory .*/file/below"):
      checkpoint.Checkpointer(file + "/below", keep=2)

  def test_a_failed_write_is_one_clear_error_and_the_next_may_succeed(self):
    saver = self.save_steps(1)
    with absltest.mock.patch.object(
        checkpoint,
        "write_host_state",
        side_effect=OSError(28, "No space left on device"),
    ):
      saver.save(2, make_state(2), {})
      with self.assertRaisesRegex(
          OSError, f"checkpoint 2 .*{self.directory}.*No space left"
      ):
        saver.wait()
    self.assertEqual(saver.latest_step(), 1)
    self.check_restores(saver, 1)
    saver.save(3, make_state(3), {"step": 3}, wait=True)
    self.check_restores(saver, 3)

  def test_refuses_what_it_cannot_store_at_once(self):
    saver = self.open()
    with self.assertRaisesRegex(TypeError, "host_state"):
      saver.save(1, make_state(1), {"set": {1, 2}})
    with self.assertRaisesRegex(ValueError, "checkpoint.keep=0"):
      self.open(keep=0)


if __name__ == "__main__":
  absltest.main()

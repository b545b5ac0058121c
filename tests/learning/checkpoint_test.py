# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: atomic, damage is detected, older ones are the fallback."""

import io
import os
import pathlib
import shutil

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.learning import checkpoint
from tba_jax.learning import host_state
from tba_jax.system import processes

HOST_STATE = {"cursor": 7, "buffer": {"tokens": np.arange(6), "seed": 2**130}}


def make_state(value, size=40):
  return {
      "params": {"kernel": jnp.full((size, 5), float(value))},
      "empty": {},
      "step": jnp.int32(value),
  }


class CheckpointTest(parameterized.TestCase):

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

  def test_restores_after_reopening(self):
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

  def test_keeps_multiples_permanently(self):
    saver = self.save_steps(2, 4, 5, 6, 7, 8, 9, keep_every_steps=4)
    self.assertEqual(saver.complete_steps(), [4, 8, 9])
    # The journal behind step 4 is not kept: no run resumes there.
    self.assertEqual(saver.newest_steps(), [8, 9])
    saver.close()
    saver = self.save_steps(10, 11, keep_every_steps=4)
    self.assertEqual(saver.complete_steps(), [4, 8, 10, 11])

  def test_keeps_one_per_period_permanently(self):
    saver = self.save_steps(1, 2, 3, 4, keep=1, keep_every_s=3600)
    self.assertEqual(saver.complete_steps(), [1, 4])

  def test_later_changes_do_not_reach_the_checkpoint(self):
    # Large, so that the buffers are reused during the write.
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

  def test_refuses_to_restore_from_an_empty_directory(self):
    saver = self.open()
    self.assertIsNone(saver.latest_step())
    with self.assertRaisesRegex(FileNotFoundError, str(self.directory)):
      saver.restore(make_state(0))

  def test_names_a_missing_step(self):
    saver = self.save_steps(1)
    with self.assertRaisesRegex(FileNotFoundError, "no checkpoint 5"):
      saver.restore(make_state(0), step=5)

  def test_steps_must_increase(self):
    saver = self.save_steps(4)
    for step in (4, 3):
      with self.assertRaisesRegex(ValueError, f"step {step} is not above 4"):
        saver.save(step, make_state(step), {})

  def test_truncated_files_fall_back_to_the_previous_checkpoint(self):
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
        # A restore does not need every file.
        step = int(state["step"])
        chex.assert_trees_all_equal(state, make_state(step))
        self.assertEqual(host["step"], step)
        if step == 1:
          passed_over += 1
          ((kind, message),) = self.events
          self.assertEqual(kind, "checkpoint_damaged")
          self.assertIn("checkpoint 2 in", message)
          # The step can be saved again.
          saver.save(2, make_state(2), {}, wait=True)
          self.assertEqual(saver.latest_step(), 2)
        saver.close()
    # Data, index and metadata of the arrays, the host state, the format.
    self.assertGreaterEqual(passed_over, 4)

  def test_a_missing_part_falls_back_to_the_previous_checkpoint(self):
    self.save_steps(1, 2).close()
    shutil.rmtree(self.directory / "2" / "host")
    self.check_restores(self.open(), 1)
    self.assertTrue((self.directory / "damaged-2").exists())

  def test_reader_removes_and_renames_nothing(self):
    self.save_steps(1, 2).close()
    shutil.rmtree(self.directory / "2" / "host")
    (self.directory / "3.orbax-checkpoint-tmp").mkdir()
    before = sorted(path.name for path in self.directory.iterdir())
    self.check_restores(self.open(read_only=True), 1)
    after = sorted(path.name for path in self.directory.iterdir())
    self.assertEqual(after, before)
    self.assertEmpty(self.events)

  def test_a_wrong_structure_is_an_error_and_moves_nothing(self):
    saver = self.save_steps(1, 2)
    with self.assertRaisesRegex(ValueError, "(?s)step 2: .*step 1: "):
      saver.restore({"params": jnp.zeros(3)})
    with self.assertRaisesRegex(ValueError, "can be read"):
      saver.restore(make_state(0, size=41))
    self.check_restores(saver, 2)
    self.assertEmpty(self.events)

  def test_another_format_is_refused_by_name(self):
    self.save_steps(1).close()
    with absltest.mock.patch.object(host_state, "FORMAT", 99):
      with self.assertRaisesRegex(checkpoint.FormatError, "reads 99"):
        self.open().restore(make_state(0))
    self.assertEmpty(self.events)

  @parameterized.parameters(
      (np.arange(6, dtype=np.float32),),
      (np.array([True, False]),),
      (np.array(3, np.int8),),
      (np.zeros((0, 3), np.float16),),
      (np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(jnp.bfloat16),),
  )
  def test_checksums_are_the_same_on_host_and_device(self, array):
    host = checkpoint.leaf_checksums({"a": jnp.asarray(array)})
    with absltest.mock.patch.object(checkpoint, "HOST_SUM_SIZE", -1):
      device = checkpoint.leaf_checksums({"a": jnp.asarray(array)})
    self.assertEqual(host, device)

  def test_flipped_bits_and_reordering_change_the_checksum(self):
    array = np.arange(5, dtype=np.float32) / 3
    total = lambda x: checkpoint.leaf_checksums(jnp.asarray(x))
    self.assertEqual(total(array), total(array.copy()))
    self.assertNotEqual(total(array), total(array[::-1]))
    for bit in range(8 * array.nbytes):
      changed = array.copy()
      changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
      self.assertNotEqual(total(array), total(changed))

  def test_a_flipped_bit_falls_back_to_the_previous_checkpoint(self):
    # Noise does not compress, so no decompressor notices the change.
    noise = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    make = lambda step: {"noise": jnp.asarray(noise + np.uint32(step))}
    saver = self.open()
    for step in (1, 2):
      saver.save(step, make(step), {"step": step})
    saver.close()
    path = max(
        (self.directory / "2" / "state").rglob("*"),
        key=lambda path: path.stat().st_size * path.is_file(),
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    saver = self.open()
    with self.assertRaisesRegex(ValueError, "1 of 1 leaves .*noise"):
      saver.restore(make(0), step=2)
    state, host = saver.restore(make(0))
    chex.assert_trees_all_equal(state, make(1))
    self.assertEqual(host["step"], 1)
    self.assertEqual([kind for kind, _ in self.events], ["checkpoint_damaged"])

  def test_a_skipped_checkpoint_is_logged_by_default(self):
    self.save_steps(1, 2).close()
    shutil.rmtree(self.directory / "2" / "host")
    saver = checkpoint.Checkpointer(str(self.directory), keep=2)
    self.addCleanup(saver.close)
    with self.assertLogs("absl", "WARNING") as logged:
      saver.restore(make_state(0))
    self.assertIn("checkpoint 2 in", logged.output[0])

  def test_the_host_state_is_synced_before_the_commit(self):
    synced = []
    fsync = os.fsync

    def note(descriptor):
      synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
      fsync(descriptor)

    with absltest.mock.patch.object(os, "fsync", note):
      self.save_steps(1)
    names = [pathlib.Path(path).name for path in synced]
    self.assertIn("process-00000.npz", names)
    self.assertLess(names.index("process-00000.npz"), len(names) - 1)

  def test_memory_of_each_save_is_given_back(self):
    with absltest.mock.patch.object(processes, "trim_memory") as trim:
      self.save_steps(1, 2)
    self.assertEqual(trim.call_count, 2)

  def test_names_an_unusable_directory(self):
    file = self.create_tempfile("file").full_path
    with self.assertRaisesRegex(OSError, "checkpoint directory .*/file/below"):
      checkpoint.Checkpointer(file + "/below", keep=2)

  def test_a_failed_write_names_its_cause_and_the_next_may_succeed(self):
    saver = self.save_steps(1)
    with absltest.mock.patch.object(
        host_state,
        "write",
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

  def test_an_unsupported_type_is_refused_at_once(self):
    saver = self.open()
    with self.assertRaises(TypeError):
      saver.save(1, make_state(1), {"set": {1, 2}})


def round_trip(value):
  file = io.BytesIO()
  host_state.write(file, host_state.pack(value))
  file.seek(0)
  return host_state.read(file)


class HostStateTest(parameterized.TestCase):

  @parameterized.parameters(
      (0.1,),
      (-0.0,),
      (5e-324,),
      (float("inf"),),
      (2**200 + 1,),
      (-3,),
      (True,),
      (None,),
      ("ends in a zero byte\0 and Ω",),
      ([[], {}, [1, 2.5, [None]]],),
      ({"a": {"b": [1, "x"]}, "": 1},),
  )
  def test_comes_back_as_it_was(self, value):
    out = round_trip({"value": value})["value"]
    self.assertEqual(out, value)
    self.assertEqual(repr(out), repr(value))  # types, signs of zero

  @parameterized.parameters(
      (np.array([0.1, np.nan, -0.0, np.inf], np.float32),),
      (np.array([2**63 - 1, -(2**63)], np.int64),),
      (np.zeros((0, 3), np.uint8),),
      (np.array([[True], [False]]),),
      (np.array(["ab", "c"]),),
      (np.array(1.5, np.float16),),
      (np.asfortranarray(np.arange(6).reshape(2, 3)),),
  )
  def test_arrays_keep_bits_shape_and_dtype(self, array):
    out = round_trip([array])[0]
    self.assertIsInstance(out, np.ndarray)
    self.assertEqual((out.dtype, out.shape), (array.dtype, array.shape))
    self.assertEqual(out.tobytes(), array.tobytes())

  def test_numpy_scalars_stay_scalars(self):
    out = round_trip([np.float32(0.1), np.int64(7)])
    self.assertEqual([type(x) for x in out], [np.float32, np.int64])
    self.assertEqual(out, [np.float32(0.1), 7])

  def test_a_generator_continues_its_sequence(self):
    rng = np.random.default_rng(3)
    rng.normal(size=5)
    state = round_trip(rng.bit_generator.state)
    other = np.random.default_rng(0)
    other.bit_generator.state = state
    np.testing.assert_array_equal(rng.normal(size=9), other.normal(size=9))

  def test_packing_copies_all_but_arrays(self):
    array, numbers = np.zeros(3), [1, 2]
    packed = host_state.pack({"array": array, "numbers": numbers})
    numbers.append(3)
    file = io.BytesIO()
    host_state.write(file, packed)
    file.seek(0)
    self.assertEqual(host_state.read(file)["numbers"], [1, 2])
    # A buffer of millions of completions is held once.
    (packed_array,) = packed.arrays.values()
    self.assertIs(packed_array, array)

  @parameterized.parameters(
      ({"a": [{1, 2}]},), ({"a": object()},), ([np.array([None])],)
  )
  def test_other_types_are_refused(self, value):
    with self.assertRaisesRegex(TypeError, "host state"):
      host_state.pack(value)

  def test_truncation_is_detected(self):
    file = io.BytesIO()
    host_state.write(file, host_state.pack({"a": np.arange(50), "n": 1}))
    data = file.getvalue()
    for length in range(0, len(data), 17):
      with self.assertRaises(ValueError, msg=length):
        host_state.read(io.BytesIO(data[:length]))

  def test_a_changed_byte_is_detected(self):
    file = io.BytesIO()
    host_state.write(file, host_state.pack(np.arange(500, dtype=np.int64)))
    data = bytearray(file.getvalue())
    data[data.index(np.int64(250).tobytes())] ^= 1
    with self.assertRaises(ValueError):
      host_state.read(io.BytesIO(bytes(data)))

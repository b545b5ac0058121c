# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Host state comes back bit for bit, or not at all."""

import io

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.training import checkpoint


def round_trip(value):
  file = io.BytesIO()
  checkpoint.write_host_state(file, checkpoint.pack_host_state(value))
  file.seek(0)
  return checkpoint.read_host_state(file)


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

  def test_a_generator_goes_on_where_it_was(self):
    rng = np.random.default_rng(3)
    rng.normal(size=5)
    state = round_trip(rng.bit_generator.state)
    other = np.random.default_rng(0)
    other.bit_generator.state = state
    np.testing.assert_array_equal(rng.normal(size=9), other.normal(size=9))

  def test_later_changes_do_not_reach_what_was_packed(self):
    array, numbers = np.zeros(3), [1, 2]
    packed = checkpoint.pack_host_state({"array": array, "numbers": numbers})
    array[:] = 9
    numbers.append(3)
    file = io.BytesIO()
    checkpoint.write_host_state(file, packed)
    file.seek(0)
    out = checkpoint.read_host_state(file)
    np.testing.assert_array_equal(out["array"], np.zeros(3))
    self.assertEqual(out["numbers"], [1, 2])

  @parameterized.parameters(
      ({"a": [{1, 2}]},), ({"a": object()},), ([np.array([None])],)
  )
  def test_other_types_are_refused(self, value):
    with self.assertRaisesRegex(TypeError, "host state"):
      checkpoint.pack_host_state(value)

  def test_every_cut_is_seen(self):
    file = io.BytesIO()
    checkpoint.write_host_state(
        file, checkpoint.pack_host_state({"a": np.arange(50), "n": 1})
    )
    data = file.getvalue()
    for length in range(0, len(data), 17):
      with self.assertRaises(ValueError, msg=length):
        checkpoint.read_host_state(io.BytesIO(data[:length]))

  def test_a_changed_byte_of_the_content_is_seen(self):
    file = io.BytesIO()
    checkpoint.write_host_state(
        file, checkpoint.pack_host_state(np.arange(500, dtype=np.int64))
    )
    data = bytearray(file.getvalue())
    data[data.index(np.int64(250).tobytes())] ^= 1
    with self.assertRaises(ValueError):
      checkpoint.read_host_state(io.BytesIO(bytes(data)))


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of sharding.py on one device; multi_device/ has those on eight.

Rules and errors need only the shape of a mesh, so these use an abstract one.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec
import numpy as np

from tba_jax.config import settings
from tba_jax.models import sequence
from tba_jax.policy import sharding

_RULES = settings.get_config().sharding


def _mesh(data=2, fsdp=2, tensor=2) -> AbstractMesh:
  sizes = {"data": data, "fsdp": fsdp, "sequence": 1, "tensor": tensor}
  return sharding.abstract_mesh(sizes, "cpu")


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.float32)


class MakeMeshTest(parameterized.TestCase):

  def test_makes_a_mesh_of_one_device(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    self.assertEqual(mesh.axis_names, ("data", "fsdp", "sequence", "tensor"))
    self.assertEqual(mesh.size, 1)

  def test_refuses_too_few_devices_or_devices_that_are_left_over(self):
    with self.assertRaisesRegex(ValueError, "4096 devices"):
      sharding.make_mesh(dict(data=64, fsdp=64, sequence=1, tensor=1))
    with self.assertRaisesRegex(ValueError, "needs 1 devices, 2"):
      sharding.make_mesh(settings.get_config().mesh, jax.devices()[:1] * 2)


def _chips(rows: int, columns: int, slices: int = 1) -> list[mock.Mock]:
  """Returns TPU chips as JAX lists them: two by two, those of a host."""
  chips = []
  for slice_index in range(slices):
    for host in range(rows * columns // 4):
      row, column = divmod(host, columns // 2)
      for i in range(4):
        chips.append(
            mock.Mock(
                id=len(chips),
                platform="tpu",
                device_kind="TPU v4",
                process_index=len(chips) // 4,
                coords=(2 * column + i % 2, 2 * row + i // 2, 0),
                core_on_chip=0,
                slice_index=slice_index,
            )
        )
  return chips


class ArrangeTest(parameterized.TestCase):

  def test_neighbors_of_the_last_axis_are_neighbors_of_the_slice(self):
    placed = sharding.arrange(_chips(4, 4), (1, 4, 1, 4))
    self.assertEqual(placed.shape, (1, 4, 1, 4))
    for i in range(4):
      for axis in (placed[0, i, 0], placed[0, :, 0, i]):
        # One row or column of the grid each.
        spread = [len({chip.coords[j] for chip in axis}) for j in (0, 1)]
        self.assertCountEqual(spread, [1, 4])

  @parameterized.parameters(
      ((2, 4, 1, 2), (0,)),
      ((1, 4, 1, 4), (1,)),
      ((6, 1, 1, 2), (0,), (2, 2), 3),
      ((2, 4, 1, 1), (0, 1), (2, 1), 4),
  )
  def test_slices_lie_along_data_then_fsdp(
      self, shape, axes, grid=(4, 2), slices=2
  ):
    if grid == (2, 1):
      chips = [c for c in _chips(2, 2, slices) if c.coords[0] == 0]
    else:
      chips = _chips(*grid, slices)
    placed = sharding.arrange(chips, shape)
    of_slice = np.vectorize(lambda chip: chip.slice_index)(placed)
    for axis in range(4):
      varies = (of_slice != of_slice.take([0], axis)).any()
      self.assertEqual(varies, axis in axes, axis)

  def test_make_mesh_arranges_devices(self):
    devices = jax.devices()[:1]
    arranged = mock.patch.object(sharding, "arrange", wraps=sharding.arrange)
    with arranged as arrange:
      sharding.make_mesh(settings.get_config().mesh, devices)
    arrange.assert_called_once_with(devices, (1, 1, 1, 1), True)

  def test_part_of_a_slice_keeps_its_order(self):
    chips = _chips(4, 4)[:2]
    placed = sharding.arrange(chips, (1, 2, 1, 1), all_of_them=False)
    self.assertEqual(list(placed.flat), chips)


class ParamShardingsTest(parameterized.TestCase):

  @parameterized.parameters(
      (("vocab", "width"), PartitionSpec("tensor", "fsdp")),
      (("layers", "mlp", "width"), PartitionSpec(None, "tensor", "fsdp")),
      (
          ("layers", "heads", "head_dim", "width"),
          PartitionSpec(None, "tensor", None, "fsdp"),
      ),
      (("batch", "width"), PartitionSpec(("data", "fsdp"), None)),
  )
  def test_follows_the_rules(self, axes, spec):
    shardings = sharding.param_shardings(_mesh(), _RULES, {"a": {"b": axes}})
    self.assertEqual(shardings["a"]["b"].spec, spec)

  def test_names_the_axes_of_tokens(self):
    self.assertEqual(
        sharding.token_axes(_RULES),
        (("data", "fsdp"), ("sequence",), ("tensor",), ("tensor",)),
    )
    rules = {**_RULES, "batch": "sequence", "length": "sequence"}
    rules["experts"] = "sequence,tensor"
    self.assertEqual(
        sharding.token_axes(rules), (("sequence",), (), *(("tensor",),) * 2)
    )
    with self.assertRaisesRegex(ValueError, "no rule for 'length'"):
      sharding.token_axes({"batch": ""})

  def test_the_first_axis_gets_the_mesh_axis(self):
    shardings = sharding.param_shardings(_mesh(), _RULES, ("heads", "mlp"))
    self.assertEqual(shardings.spec, PartitionSpec("tensor", None))

  def test_refuses_an_axis_without_a_rule(self):
    with self.assertRaisesRegex(ValueError, "no rule for 'chapters'"):
      sharding.param_shardings(_mesh(), _RULES, {"a": ("chapters",)})

  def test_lists_all_indivisible_axes(self):
    axes = {
        "good": ("vocab", "width"),
        "norm": {"scale": ("width",)},
        "up": {"kernel": ("mlp", "width")},
    }
    shardings = sharding.param_shardings(_mesh(), _RULES, axes)
    params = {
        "good": _shape(8, 8),
        "norm": {"scale": _shape(7)},
        "up": {"kernel": _shape(5, 8)},
    }
    with self.assertRaises(ValueError) as caught:
      sharding.check_divisible(params, shardings)
    message = str(caught.exception)
    self.assertIn("norm/scale: axis 0 of (7,)", message)
    self.assertIn("mesh axis fsdp of size 2", message)
    self.assertIn("up/kernel: axis 0 of (5, 8)", message)
    self.assertIn("mesh axis tensor of size 2", message)
    self.assertNotIn("good", message)

  def test_a_size_must_divide_by_the_product_of_its_mesh_axes(self):
    shardings = sharding.param_shardings(_mesh(), _RULES, {"x": ("batch",)})
    sharding.check_divisible({"x": _shape(4)}, shardings)
    with self.assertRaisesRegex(ValueError, "data,fsdp of size 4"):
      sharding.check_divisible({"x": _shape(6)}, shardings)


class BatchTest(parameterized.TestCase):

  def test_only_prompts_are_split(self):
    spec = sharding.batch_sharding(_mesh(), _RULES).spec
    self.assertEqual(spec, PartitionSpec(("data", "fsdp")))

  def test_shard_batch_returns_the_same_numbers(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    batch = {"x": np.arange(12).reshape(3, 4)}
    sharded = sharding.shard_batch(batch, mesh, _RULES)
    np.testing.assert_array_equal(sharded["x"], batch["x"])
    self.assertTrue(sharding.replicated(mesh).is_fully_replicated)
    spread = sharding.make_spread(mesh, _RULES)(batch)
    np.testing.assert_array_equal(spread["x"], batch["x"])
    self.assertEqual(spread["x"].dtype, sharded["x"].dtype)

  def test_prompts_that_do_not_divide_are_replicated_and_their_rows_split(self):
    split, whole = PartitionSpec(("data", "fsdp")), PartitionSpec()
    places = sharding.batch_shardings(6, _mesh(), _RULES)
    self.assertEqual(places.rewards.spec, whole)
    self.assertEqual((places.rows.indices.spec, places.rows.slots.spec),
                     (split, whole))  # fmt: skip
    self.assertEqual(sharding.batch_shardings(8, _mesh(), _RULES).spec, split)
    for size, spec in ((6, whole), (8, split)):
      leaf = np.zeros((size, 2))
      self.assertEqual(sharding.place_of(leaf, _mesh(), _RULES).spec, spec)


class SplitRowsTest(absltest.TestCase):

  def test_a_pass_on_one_device_knows_it_and_so_may_have_a_kernel(self):
    found = []

    def score(params, tokens_BxL):
      found.append(sequence.current_split().mesh)
      return tokens_BxL + params

    run = sharding.split_rows(score, None, _RULES)
    np.testing.assert_array_equal(run(1, np.zeros((3, 2))), np.ones((3, 2)))
    self.assertEqual(found[0].devices.tolist(), [[[[jax.devices()[0]]]]])


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of sharding.py on one device; multi_device/ has those on eight.

Rules and errors need only the shape of a mesh, so these use an abstract one.
"""

from typing import Any
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec
import numpy as np

from tba_jax.config import settings
from tba_jax.mesh import sharding
from tba_jax.models.net import sequence


def _mesh(data=2, fsdp=2, sequence=1, tensor=2) -> AbstractMesh:
  sizes = dict(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)
  return sharding.abstract_mesh(sizes, "cpu")


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.float32)


class MakeMeshTest(parameterized.TestCase):

  def test_makes_a_mesh_of_one_device(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    self.assertEqual(mesh.axis_names, ("data", "fsdp", "sequence", "tensor"))
    self.assertEqual(mesh.size, 1)

  def test_refuses_missing_or_extra_devices(self):
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


def _model(axes: Any, shapes: Any) -> mock.Mock:
  return mock.Mock(
      spec=["init", "logical_axes"], logical_axes=axes, init=lambda key: shapes
  )


class ParamShardingsTest(parameterized.TestCase):

  @parameterized.parameters(
      (("vocab", "width"), PartitionSpec("tensor", ("fsdp", "sequence"))),
      (
          ("layers", "mlp", "width"),
          PartitionSpec(None, "tensor", ("fsdp", "sequence")),
      ),
      (
          ("layers", "heads", "head_dim", "width"),
          PartitionSpec(None, "tensor", None, ("fsdp", "sequence")),
      ),
      # The first axis gets the mesh axis.
      (("heads", "mlp"), PartitionSpec("tensor", None)),
  )
  def test_follows_the_rules(self, axes, spec):
    model = _model({"a": {"b": axes}}, {"a": {"b": _shape(*(8,) * len(axes))}})
    shardings = sharding.param_shardings(_mesh(sequence=2), model)
    self.assertEqual(shardings["a"]["b"].spec, spec)

  def test_the_vocabulary_and_parts_of_a_sequence_need_not_divide(self):
    model = _model(("vocab", "width"), _shape(17, 6))
    shardings = sharding.param_shardings(_mesh(sequence=2), model)
    self.assertEqual(shardings.spec, PartitionSpec(None, "fsdp"))

  def test_lists_all_indivisible_axes(self):
    axes = {
        "good": ("vocab", "width"),
        "norm": {"scale": ("width",)},
        "up": {"kernel": ("mlp", "width")},
    }
    params = {
        "good": _shape(8, 8),
        "norm": {"scale": _shape(7)},
        "up": {"kernel": _shape(5, 8)},
    }
    model = _model(axes, params)
    with self.assertRaises(ValueError) as caught:
      sharding.param_shardings(_mesh(), model, key="search.mesh")
    message = str(caught.exception)
    self.assertIn("params do not fit config.search.mesh", message)
    self.assertIn("norm/scale: axis 0 of (7,)", message)
    self.assertIn("mesh axis fsdp of size 2", message)
    self.assertIn("up/kernel: axis 0 of (5, 8)", message)
    self.assertIn("mesh axis tensor of size 2", message)
    self.assertNotIn("good", message)
    # A frozen model was not chosen with the mesh.
    places = sharding.frozen_shardings(_mesh(), model)
    self.assertEqual(places["norm"]["scale"].spec, PartitionSpec(None))
    self.assertEqual(
        places["up"]["kernel"].spec, PartitionSpec(None, ("fsdp", "sequence"))
    )


class BatchTest(parameterized.TestCase):

  def test_only_prompts_are_split(self):
    spec = sharding.batch_sharding(_mesh()).spec
    self.assertEqual(spec, PartitionSpec(("data", "fsdp")))

  def test_shard_batch_returns_the_same_numbers(self):
    mesh = sharding.make_mesh(settings.get_config().mesh)
    batch = {"x": np.arange(12).reshape(3, 4)}
    sharded = sharding.shard_batch(batch, mesh)
    np.testing.assert_array_equal(sharded["x"], batch["x"])
    self.assertTrue(sharding.replicated(mesh).is_fully_replicated)
    spread = sharding.make_spread(mesh)(batch)
    np.testing.assert_array_equal(spread["x"], batch["x"])
    self.assertEqual(spread["x"].dtype, sharded["x"].dtype)

  def test_indivisible_prompts_are_replicated_but_rows_split(self):
    split, whole = PartitionSpec(("data", "fsdp")), PartitionSpec()
    places = sharding.batch_shardings(6, _mesh())
    self.assertEqual(places.rewards.spec, whole)
    self.assertEqual(places.rows.token_indices.spec, split)
    self.assertEqual(places.rows.place_indices.spec, whole)
    self.assertEqual(sharding.batch_shardings(8, _mesh()).spec, split)
    for size, spec in ((6, whole), (8, split)):
      leaf = np.zeros((size, 2))
      self.assertEqual(sharding.place_of(leaf, _mesh()).spec, spec)


class SplitRowsTest(absltest.TestCase):

  def test_a_pass_on_one_device_knows_it_and_so_may_have_a_kernel(self):
    found = []

    def score(params, tokens_BxL):
      found.append(sequence.current_split().mesh)
      return tokens_BxL + params

    run = sharding.split_rows(score, None)
    np.testing.assert_array_equal(run(1, np.zeros((3, 2))), np.ones((3, 2)))
    self.assertEqual(found[0].devices.tolist(), [[[[jax.devices()[0]]]]])


class CutRowsTest(parameterized.TestCase):

  @parameterized.parameters(
      # data, fsdp, sequence, tensor; devices; data, fsdp, tensor of them.
      ((8, 1, 1, 1), 4, (4, 1, 1)),
      ((1, 16, 1, 1), 4, (1, 4, 1)),
      ((1, 4, 1, 4), 4, (1, 1, 4)),
      ((2, 4, 1, 2), 4, (1, 2, 2)),
      # Axes that divide by six do not divide by four.
      ((1, 6, 1, 1), 4, (2, 2, 1)),
      ((1, 1, 4, 1), 2, (2, 1, 1)),
      ((1, 8, 1, 1), 1, (1, 1, 1)),
  )
  def test_cut_rows(self, sizes, num_devices, expected):
    axes = ("data", "fsdp", "sequence", "tensor")
    found = sharding.cut_rows(dict(zip(axes, sizes)), num_devices)
    self.assertEqual(tuple(found), axes)
    self.assertEqual(found.pop("sequence"), 1)
    self.assertEqual(tuple(found.values()), expected)

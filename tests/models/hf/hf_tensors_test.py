# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/hf_slices.py: a slice of a leaf as a slice of a tensor."""

import itertools

from absl.testing import parameterized
import numpy as np

from tba_jax.models.hf import hf_names
from tba_jax.models.hf import hf_tensors

_D, _H, _DH, _F = 4, 6, 2, 5


def _row(split, part=None, order=None):
  split = tuple(s if isinstance(s, tuple) else (s,) for s in split)
  if order is None:
    order = tuple(range(sum(map(len, split)) - (part is not None)))
  return hf_names.TensorRow("w", ("w",), (), split, part, order)


# Kinds of rows: whole, transposed, split heads, fused in two ways.
_ROWS = {
    "plain": _row((_F, _D)),
    "transposed": _row((_D, _F), order=(1, 0)),
    "heads": _row(((_H, _DH), _D)),
    "heads_last": _row((_D, (_H, _DH))),
    "heads_transposed": _row(((_H, _DH), _D), order=(2, 0, 1)),
    # GPT-NeoX: query, key and value of a head lie together.
    "fused_heads": _row(((_H, 3, _DH), _D), (1, 1)),
    # GPT-2: all queries, then all keys; inputs come first.
    "fused": _row((_D, (3, _H, _DH)), (1, 2), (1, 2, 0)),
    "fused_bias": _row(((3, _H, _DH),), (0, 1)),
}


def _tensor(row):
  shape = row.hf_shape
  return np.arange(np.prod(shape)).reshape(shape)


def _leaf(row):
  """The leaf as its row says, written another way."""
  whole = _tensor(row).reshape(row.split_shape)
  if row.part is not None:
    whole = np.take(whole, row.part[1], axis=row.part[0])
  return whole.transpose(row.order)


class CutTest(parameterized.TestCase):

  @parameterized.named_parameters(_ROWS.items())
  def test_any_slice_equals_leaf_slice(self, row):
    tensor, leaf = _tensor(row), _leaf(row)
    self.assertEqual(leaf.shape, row.shape)
    axes = [
        [(a, b) for a in range(n) for b in range(a + 1, n + 1)]
        for n in row.shape
    ]
    for ranges in itertools.product(*axes):
      cut = hf_tensors.cut_slices(row, ranges)
      found = cut.take(tensor[cut.tensor])
      expected = leaf[tuple(slice(*r) for r in ranges)]
      np.testing.assert_array_equal(found, expected)

  @parameterized.parameters(
      ("plain", ((1, 3), (0, 2)), (2, 2)),
      ("transposed", ((1, 3), (0, 4)), (4, 2)),
      # Two of six heads.
      ("heads", ((2, 4), (0, 2), (0, 4)), (4, 4)),
      # Their queries and values are read too, the other heads' are not.
      ("fused_heads", ((2, 4), (0, 2), (0, 4)), (12, 4)),
      ("fused_heads", ((2, 3), (0, 2), (0, 4)), (2, 4)),
      ("fused", ((2, 4), (0, 2), (0, 4)), (4, 4)),
      ("fused_bias", ((0, 3), (0, 2)), (6,)),
  )
  def test_no_more_is_read_than_needed(self, name, ranges, shape):
    row = _ROWS[name]
    cut = hf_tensors.cut_slices(row, ranges)
    self.assertEqual(_tensor(row)[cut.tensor].shape, shape)

  @parameterized.named_parameters(_ROWS.items())
  def test_put_is_the_inverse(self, row):
    tensor = np.full(row.split_shape, -1)
    hf_tensors.put_slices(row, tensor, _leaf(row))
    found = tensor.reshape(row.hf_shape)
    ours = found >= 0
    self.assertEqual(ours.sum(), np.prod(row.shape))
    np.testing.assert_array_equal(found[ours], _tensor(row)[ours])

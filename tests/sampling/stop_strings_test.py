# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts at stop strings, against looking at every prefix."""

from absl.testing import parameterized
import numpy as np

from tba_jax.sampling import requests

_PIECES = ["a", "ab", "b", "\n", "é", "ba\n", " a"]


def _pieces(ids) -> str:
  """Writes the first token without its leading space, as sentencepiece does."""
  return "".join(_PIECES[i] for i in ids).removeprefix(" ")


def _bytes(ids) -> str:
  """A token a byte; a run of bytes that is no text is so many marks."""
  data = bytes(ids)
  try:
    return data.decode()
  except UnicodeDecodeError:
    return "\N{REPLACEMENT CHARACTER}" * len(data)


def _first_cut(strings, decode, ids) -> int | None:
  for length in range(1, len(ids) + 1):
    if any(string in decode(ids[:length]) for string in strings):
      return length
  return None


def _in_chunks(watch, ids, rng) -> int | None:
  """Shows a completion to the watch as it grows, by random chunks."""
  length = 0
  while length < len(ids):
    length = min(len(ids), length + int(rng.integers(1, 6)))
    cut = watch.cut((0, 0), np.asarray(ids[:length]))
    if cut is not None:
      return cut
  return None


class StopStringsTest(parameterized.TestCase):

  def test_cuts_across_tokens(self):
    watch = requests.StopStringWatch(["b\nb"], _pieces)
    # "a" "ab" "\n" "b" "a": it begins inside a token and ends with another.
    self.assertEqual(watch.cut((0, 0), np.array([0, 1, 3, 2, 0])), 4)
    # The same, seen in two parts.
    self.assertIsNone(watch.cut((0, 1), np.array([0, 1, 3])))
    self.assertEqual(watch.cut((0, 1), np.array([0, 1, 3, 2, 0])), 4)
    # A third completion of the same row has a text of its own.
    self.assertIsNone(watch.cut((0, 2), np.array([2, 0])))

  @parameterized.parameters(
      (_pieces, ["bab", "a\na"], len(_PIECES)),
      (_pieces, ["é é", "\nb", "aaaa"], len(_PIECES)),
      (_bytes, ["é", "bb"], None),
  )
  def test_chunks_change_nothing(self, decode, strings, num_ids):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
      if num_ids is None:  # Bytes of "é", whole and in part, and letters.
        ids = rng.choice([0xC3, 0xA9, 0xC3, 0xA9, 0x61, 0x62], 12).tolist()
      else:
        ids = rng.integers(0, num_ids, 12).tolist()
      watch = requests.StopStringWatch(strings, decode)
      expected = _first_cut(strings, decode, ids)
      found += expected is not None
      self.assertEqual(_in_chunks(watch, ids, rng), expected)
    self.assertBetween(found, 30, 270)

  def test_cuts_each_row(self):
    watch = requests.StopStringWatch(["a\n"], _pieces)
    tokens_RxT = np.array([[0, 3, 0], [0, 0, 3], [0, 3, 3], [2, 0, 3]])
    cut_R = watch.cuts(
        # Row 3 is not in use. Row 1 has two tokens so far, and the stop token
        # of row 2 is no text of it.
        {0: (0, 0), 1: (0, 1), 2: (1, 0)},
        tokens_RxT,
        np.array([3, 2, 2, 3]),
        np.array([False, False, True, False]),
    )
    np.testing.assert_array_equal(cut_R, [2, -1, -1, -1])

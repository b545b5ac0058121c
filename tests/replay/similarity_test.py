# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Edit distances, against the textbook recurrence."""

from absl.testing import parameterized
import numpy as np

from tba_jax.replay import similarity


def _distance(a, b):
  """Returns the distance by the textbook recurrence."""
  before = list(range(len(b) + 1))
  for i, x in enumerate(a, 1):
    now = [i]
    for j, y in enumerate(b, 1):
      now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (x != y)))
    before = now
  return before[-1]


def _padded(completions, width):
  out = np.zeros((len(completions), width), np.int32)
  for row, completion in zip(out, completions, strict=True):
    row[: len(completion)] = completion
  return out


def _random(rng, count, width, vocab):
  sizes = rng.integers(1, width + 1, count)
  return [rng.integers(1, vocab, size) for size in sizes]


class EditDistanceTest(parameterized.TestCase):

  def test_matches_known_distances(self):
    word = lambda text: np.array([ord(letter) for letter in text])
    stored = ["sitting", "kitten", "", "kittens", "mitten"]
    tokens = _padded([word(text) for text in stored], 8)
    result = similarity.edit_distances(
        word("kitten"), tokens, np.array([len(text) for text in stored])
    )
    self.assertEqual(result.tolist(), [3, 0, 6, 1, 1])

  @parameterized.parameters(0.1, 0.25, 0.5)
  def test_is_similar_below_share_of_both_lengths(self, limit):
    rng = np.random.default_rng(0)
    others = _random(rng, 200, 9, 5)
    for one in _random(rng, 20, 9, 5):
      expected = [
          _distance(one, other) < limit * (len(one) + len(other))
          for other in others
      ]
      actual = similarity.similar_by_edits(one, others, limit)
      np.testing.assert_array_equal(actual, expected)

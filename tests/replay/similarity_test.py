# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Edit distances and cosines, against plain ones."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import rows
from tba_jax.replay import similarity


def _distance(a, b):
  """The recurrence, as it is written in books."""
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

  def test_known_distances(self):
    word = lambda text: np.array([ord(letter) for letter in text])
    stored = ["sitting", "kitten", "", "kittens", "mitten"]
    tokens = _padded([word(text) for text in stored], 8)
    found = similarity.edit_distances(
        word("kitten"), tokens, np.array([len(text) for text in stored])
    )
    self.assertEqual(found.tolist(), [3, 0, 6, 1, 1])

  @parameterized.parameters(0.1, 0.25, 0.5)
  def test_who_is_alike(self, limit):
    rng = np.random.default_rng(0)
    stored = _random(rng, 200, 9, 5)
    table = rows.RowTable(9, 300)
    lengths = np.array([len(s) for s in stored])
    zeros = np.zeros(len(stored))
    places = table.append(
        prompt_id=0,
        group=0,
        arrival=0,
        lengths=lengths,
        stopped=zeros,
        versions=zeros,
        epoch=0,
        rewards=zeros,
        tokens=_padded(stored, 9),
        behavior_logprobs=np.zeros((len(stored), 9)),
    )
    edit = similarity.EditDistance(table, limit)
    for one in _random(rng, 20, 9, 5):
      expected = [
          _distance(one, s) < limit * (len(one) + len(s)) for s in stored
      ]
      found = edit.alike(one, None, places)
      np.testing.assert_array_equal(found, expected)
      pairs = [edit.alike_new((one, s), (None, None)) for s in stored[:20]]
      self.assertEqual(pairs, expected[:20])

  def test_the_stop_token_does_not_count(self):
    table = rows.RowTable(3, 10)
    places = table.append(
        prompt_id=0,
        group=0,
        arrival=0,
        lengths=np.array([2, 2]),
        stopped=np.array([1, 0]),
        versions=np.zeros(2),
        epoch=0,
        rewards=np.zeros(2),
        tokens=np.array([[5, 9, 0], [5, 9, 0]]),
        behavior_logprobs=np.zeros((2, 3)),
    )
    edit = similarity.EditDistance(table, 0.25)
    found = edit.alike(np.array([5]), None, places)
    self.assertEqual(found.tolist(), [True, False])


class CosineTest(absltest.TestCase):

  def test_rows_keep_their_features(self):
    angles = {1: 0.0, 2: 0.3, 3: 2.0}
    embed = lambda completions: np.array(
        [[np.cos(angles[c[0]]), np.sin(angles[c[0]])] for c in completions],
        np.float32,
    )
    cosine = similarity.Cosine(embed, 0.9)
    one = np.array([1])
    feature = cosine.features([one])[0]
    self.assertEqual(cosine.alike(one, feature, np.zeros(0, int)).size, 0)
    others = cosine.features([np.array([2]), np.array([3])])
    cosine.store(np.array([4, 0]), others)
    found = cosine.alike(one, feature, np.array([0, 4]))
    self.assertEqual(found.tolist(), [False, True])
    pair = (one, np.array([3]))
    self.assertFalse(cosine.alike_new(pair, (feature, others[1])))
    self.assertTrue(cosine.alike_new(pair, (feature, others[0])))


if __name__ == "__main__":
  absltest.main()

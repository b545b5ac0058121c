# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs: read, relabelled and continued, and in batches."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.models import tokenizer
from tba_jax.programs import reward_model
from tba_jax.tasks import preference
from tba_jax.tasks import rows as rows_lib

Pair = reward_model.Pair
TOKENIZER = tokenizer.word_level(list("abcdef:"), ".")


def _pairs(count: int) -> list[Pair]:
  letters = "abcdef"
  return [
      Pair(f"p:{i}", f"{letters[i % 6]}:", letters[: 1 + i % 3], letters[3:])
      for i in range(count)
  ]


class ReadTest(parameterized.TestCase):

  def read(self, rows, fits=lambda pair: ""):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "pairs.jsonl").write_text(
        "".join(
            (r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows
        )
    )
    self.report = rows_lib.DataReport()
    return reward_model.load_pairs(
        str(folder / "pairs.jsonl"),
        "config.reward_model.train",
        "train",
        None,
        self.report,
        fits=fits,
        stop_text="<eos>",
    )

  def test_rows_with_prompt_or_query(self):
    found = self.read(
        [
            {"prompt": "a:", "chosen": "b<eos>", "rejected": "c"},
            {"query": "b:", "chosen": "c", "rejected": "d<eos>"},
        ]
    )
    self.assertEqual(
        [(p.prompt, p.chosen, p.rejected) for p in found],
        [("a:", "b", "c"), ("b:", "c", "d")],
    )
    self.assertEqual(self.report.used, {"train": 2})

  def test_what_is_wrong_is_counted_with_its_place(self):
    right = {"prompt": "a:", "chosen": "b", "rejected": "c"}
    found = self.read(
        [
            right,
            "[1]",
            {**right, "prompt": ""},
            {**right, "chosen": None},
            {**right, "rejected": "<eos>"},
            {**right, "chosen": "c<eos>"},
            {**right, "chosen": "bbb"},
        ],
        fits=lambda p: "answer_too_long" if len(p.chosen) > 2 else "",
    )
    self.assertLen(found, 1)
    places = {
        reason: self.report.places("train", reason)
        for reason in rows_lib.REASONS
        if self.report.count("train", reason)
    }
    at = lambda *lines: [f"pairs.jsonl:{line}" for line in lines]
    self.assertEqual(
        places,
        {
            "malformed": at(2),
            "no_prompt": at(3),
            "no_answer": at(4, 5),
            "equal": at(6),
            "answer_too_long": at(7),
        },
    )

  def test_no_pair_and_no_source(self):
    with self.assertRaisesRegex(ValueError, "reward_model.train=.*no pair"):
      self.read(["{}"])
    task = preference.Preference(**preference.Preference.FIELDS)
    with self.assertRaisesRegex(ValueError, "'preference' makes no pairs"):
      reward_model.load_pairs(
          "task", "k", "train", task, None, fits=None, stop_text=""
      )


class RelabelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "p.jsonl"
    self.asked = []

  def score(self, texts):
    self.asked += texts
    # "def" beats what is shorter, and not "abc", which has its length.
    return np.array([float(len(text)) for _, text in texts])

  def relabel(self, pairs, **more):
    return reward_model.relabel_pairs(pairs, self.score, self.path, **more)

  def test_the_higher_score_is_chosen_and_a_tie_stays(self):
    pairs = _pairs(3)
    found = self.relabel(pairs)
    self.assertEqual([p.chosen for p in found], ["def", "def", "abc"])
    self.assertEqual([p.rejected for p in found], ["a", "ab", "def"])
    self.assertEqual([p.agrees for p in found], [False, False, True])
    lines = [json.loads(line) for line in self.path.read_text().splitlines()]
    self.assertEqual(
        [line["scores"] for line in lines], [[1, 3], [2, 3], [3, 3]]
    )

  def test_it_goes_on_where_it_was(self):
    pairs = _pairs(600)
    stops = iter([False, True])
    found = self.relabel(pairs, should_stop=lambda: next(stops))
    self.assertIsNone(found)
    done = len(self.path.read_text().splitlines())
    self.assertGreater(done, 0)
    # A killed writer's torn line is labelled again.
    with self.path.open("a") as f:
      f.write('{"prompt": "a')
    self.asked.clear()
    found = self.relabel(pairs)
    self.assertLen(self.asked, 2 * (600 - done))
    self.assertEqual(found, self.relabel(pairs))
    self.assertLen(found, 600)

  def test_a_file_of_other_pairs_is_refused(self):
    self.relabel(_pairs(3))
    with self.assertRaisesRegex(ValueError, "has other pairs.*p:1"):
      self.relabel(_pairs(3)[1:])


class ExamplesTest(absltest.TestCase):

  def examples(self, count=5, **changes):
    settings = dict(
        seed=0, batch_size=2, max_prompt_tokens=3, max_completion_tokens=4
    )
    return reward_model.PairExamples(
        _pairs(count), TOKENIZER, **{**settings, **changes}
    )

  def texts(self, batch, *index):
    """Returns prompt, chosen and rejected of a row."""
    mask = batch.prompt_mask[index].astype(bool)
    self.assertTrue((np.diff(batch.prompt_mask[index]) >= 0).all())
    out = [TOKENIZER.decode(batch.prompt_tokens[index][mask])]
    for k in range(2):
      length = int(batch.completion_mask[index][k].sum())
      out.append(
          TOKENIZER.decode_completion(
              batch.completion_tokens[index][k], length, stopped=True
          )
      )
    return tuple(out)

  def test_an_epoch_has_every_pair_once(self):
    chunk = self.examples().chunk(0, 5, size=6)
    seen = [self.texts(chunk, s, b) for s in range(5) for b in range(2)]
    expected = sorted((p.prompt, p.chosen, p.rejected) for p in _pairs(5))
    self.assertEqual(sorted(seen[:5]), expected)
    self.assertEqual(sorted(seen[5:]), expected)
    self.assertNotEqual(seen[:5], seen[5:])
    self.assertEqual(chunk.completion_mask[5].sum(), 0)

  def test_a_step_is_the_same_wherever_its_chunk_begins(self):
    whole = self.examples().chunk(0, 5, size=5)
    part = self.examples().chunk(2, 4, size=2)
    np.testing.assert_array_equal(
        whole.completion_tokens[2:4], part.completion_tokens
    )
    other = self.examples(seed=1).chunk(2, 4, size=2)
    self.assertFalse((other.prompt_tokens == part.prompt_tokens).all())


if __name__ == "__main__":
  absltest.main()

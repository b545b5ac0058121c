# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used are counted and placed; splits do not overlap."""

from absl.testing import absltest

from tba_jax.tasks import rows


def _make(fields):
  prompt, answer = fields.get("prompt"), fields.get("answer")
  if not prompt:
    return "no_prompt"
  return (prompt, answer) if answer else "no_answer"


def _examples(*prompts):
  return [rows.Example(f"x:{p}", p, "1", {}) for p in prompts]


class CheckTest(absltest.TestCase):

  def test_what_is_wrong_is_left_out_with_its_place(self):
    report = rows.Report()
    found = rows.examples(
        report,
        "train",
        [
            rows.Row("f:1", {"prompt": "a", "answer": "1"}),
            rows.Row("f:2", None),
            rows.Row("f:3", {"prompt": "", "answer": "1"}),
            rows.Row("f:4", {"prompt": "b", "answer": ""}),
            rows.Row("f:5", {"prompt": "a", "answer": "2"}),
            rows.Row("f:6", {"prompt": "c", "answer": "3"}),
        ],
        _make,
    )
    self.assertEqual([e.place for e in found], ["f:1", "f:6"])
    self.assertEqual(found[1].answer, "3")
    self.assertEqual(
        report.lines(),
        [
            "train: 2 prompts of 6 rows",
            "train: 1 row left out, each is no JSON object, or has half a"
            " character: f:2",
            "train: 1 row left out, each has no prompt: f:3",
            "train: 1 row left out, each has no answer: f:4",
            "train: 1 row left out, each repeats the prompt of another row:"
            " f:5",
        ],
    )
    self.assertEqual(
        report.to_json()["left_out"]["train"]["no_prompt"], ["f:3"]
    )

  def test_many_places_are_cut(self):
    report = rows.Report()
    rows.examples(
        report,
        "train",
        [rows.Row(f"f:{i}", None) for i in range(7)],
        _make,
    )
    self.assertEqual(report.count("train", "malformed"), 7)
    self.assertIn("f:0, f:1, f:2, f:3, f:4, …", report.lines()[1])

  def test_an_empty_split(self):
    report = rows.Report()
    splits = {"train": _examples("a")}
    splits["held_out"] = rows.examples(
        report, "held_out", [rows.Row("t:1", None)], _make
    )
    with self.assertRaisesRegex(
        ValueError, "'held_out' has no prompt.*no JSON object.*: t:1"
    ):
      rows.check_splits(splits, test="held_out", report=report)

  def test_a_split_that_overlaps_the_test_split(self):
    splits = {"held_out": _examples("b", "What  is\nit?"), "train": []}
    for other in ("train", "validation"):
      splits = {
          "held_out": _examples("b", "What  is\nit?"),
          other: _examples("a", "what is it?"),
      }
      with self.assertRaisesRegex(
          ValueError, f"1 prompts of the split '{other}'.*x:what is it"
      ):
        rows.check_splits(splits, test="held_out", report=rows.Report())
    splits = {"held_out": _examples("b"), "train": _examples("a")}
    rows.check_splits(splits, test="held_out", report=rows.Report())


if __name__ == "__main__":
  absltest.main()

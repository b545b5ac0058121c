# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The best params stay, whatever came after and whoever asks again."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest

from tba_jax.system import jsonl
from tba_jax.training import evaluations


def _result(value: float) -> dict:
  return {"pass_at_1": value, "split": "validation", "samples": ["x"]}


class BestModelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "best"
    patch = mock.patch.object(evaluations.hf, "save", self.save)
    patch.start()
    self.addCleanup(patch.stop)

  def make(self) -> evaluations.BestModel:
    return evaluations.BestModel(self.folder.parent, mock.MagicMock())

  def save(self, folder, shape, params: str, tokenizer) -> None:
    folder.mkdir()
    (folder / "params").write_text(params)

  def kept(self) -> str:
    return (self.folder / "model" / "params").read_text()

  def test_only_better_params_are_kept(self):
    best = self.make()
    self.assertTrue(best.offer(10, "a", _result(0.5)))
    self.assertFalse(best.offer(20, "b", _result(0.5)))
    self.assertFalse(best.offer(30, "c", _result(0.25)))
    self.assertEqual(self.kept(), "a")
    self.assertTrue(best.offer(40, "d", _result(0.75)))
    self.assertEqual(self.kept(), "d")
    self.assertEqual(
        jsonl.read_json(self.folder / "best.json"),
        {"step": 40, "pass_at_1": 0.75, "split": "validation"},
    )

  def test_another_process_goes_on(self):
    self.make().offer(1, "a", _result(0.5))
    again = self.make()
    self.assertFalse(again.offer(2, "b", _result(0.4)))
    self.assertTrue(again.offer(3, "c", _result(0.6)))
    self.assertEqual(self.kept(), "c")

  def test_what_a_kill_left_is_no_obstacle(self):
    (self.folder.parent / "best.partial" / "model").mkdir(parents=True)
    best = self.make()
    self.assertTrue(best.offer(1, "a", _result(0.0)))
    self.assertEqual(self.kept(), "a")
    self.assertEqual(os.listdir(self.folder.parent), ["best"])

  def test_killed_before_the_better_one_is_there_the_old_one_stays(self):
    best = self.make()
    best.offer(1, "a", _result(0.5))
    rename, partial = pathlib.Path.rename, self.folder.parent / "best.partial"

    def die(path, target):
      if path == partial:
        raise KeyboardInterrupt
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", die):
      with self.assertRaises(KeyboardInterrupt):
        best.offer(2, "b", _result(0.75))
    again = self.make()
    self.assertEqual(self.kept(), "a")
    self.assertFalse(again.offer(3, "c", _result(0.25)))
    self.assertTrue(again.offer(4, "d", _result(0.6)))
    self.assertEqual(self.kept(), "d")
    self.assertEqual(os.listdir(self.folder.parent), ["best"])


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that a stage's folder was made with."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections

from tba_jax.config import stages
from tba_jax.config import variants
from tba_jax.models.hf import hf
from tests.models import hf_case

arithmetic = variants.import_config("configs/arithmetic.py")


def make_config():
  return arithmetic.get_config("smoke")


class SettingsTest(absltest.TestCase):

  def test_other_settings_are_refused_by_name(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = make_config()
    stages.check(config, folder)
    stages.check(config, folder)
    for section, key, value in (
        ("sft", "num_steps", 41),
        ("task", "max_number", 8),
        ("model", "num_layers", 2),
        ("sft", "b2", 0.8),
    ):
      changed = make_config()
      changed[section][key] = value
      with self.assertRaisesRegex(
          ValueError, rf"config\.{section}\.{key} = {value}, was .*remove"
      ):
        stages.check(changed, folder)
    changed = make_config()
    changed.seed = 5
    with self.assertRaisesRegex(ValueError, r"config\.seed = 5, was 0"):
      stages.check(changed, folder)

  def test_model_independent_settings_may_change(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = make_config()
    stages.check(config, folder)
    config.sft.evaluate_every_steps = 7
    config.sft.checkpoint_every_steps = 7
    config.loss.beta = 0.5
    config.optimizer.epsilon = 1e-5
    config.train.num_steps = 9
    stages.check(config, folder)

  def test_field_left_out_equals_its_default(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = make_config()
    config.task.operations = "+-*"
    stages.check(config, folder)
    with config.unlocked():
      del config.task["operations"]
    stages.check(config, folder)

  def test_damaged_settings_are_reported(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "settings.json").write_text("{")
    with self.assertRaisesRegex(ValueError, "damaged; remove"):
      stages.check(make_config(), folder)


class LaterStagesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.config = make_config()

  def write(self, *rows):
    path = self.folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    self.config.reward_model.train = str(path)
    self.config.reward_model.held_out = str(path)

  def test_accepts_pairs_to_learn_from(self):
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    self.write({"prompt": ""}, pair)
    stages.check_pairs(self.config)
    self.config.reward_model.relabel = "task"
    with self.assertRaisesRegex(ValueError, "reward_model.relabel='task'"):
      stages.check_pairs(self.config)

  def test_gives_reason_pairs_cannot_be_read(self):
    data = self.folder / "chats"
    data.mkdir()
    turn = lambda role, text: {"role": role, "content": text}
    for split in ("train", "test"):
      chat = [turn("user", split), turn("assistant", "a")]
      (data / f"{split}.jsonl").write_text(json.dumps({"messages": chat}))
    chats = dict(name="chat", data=str(data))
    self.config.task = ml_collections.ConfigDict(chats)
    ask, tool = turn("user", "b"), turn("tool", "c")
    self.write({"chosen": [ask, tool], "rejected": [ask, tool]})
    with self.assertRaisesRegex(ValueError, "message 2 has role 'tool'"):
      stages.check_pairs(self.config)

  def test_refuses_missing_pairs(self):
    with self.assertRaisesRegex(
        ValueError, "config.reward_model.train='task': the task 'arithmetic' m"
    ):
      stages.check_pairs(self.config)
    self.write({"prompt": "1+2=", "chosen": "3"})
    with self.assertRaisesRegex(
        ValueError, r"reward_model.train='.*no pair.*\['chosen', 'prompt'\]"
    ):
      stages.check_pairs(self.config)
    self.config.reward_model.train = "/nowhere/pairs.jsonl"
    with self.assertRaisesRegex(ValueError, "train='/nowhere/pairs.jsonl'"):
      stages.check_pairs(self.config)

  def test_names_damaged_model_of_stage(self):
    model = self.folder / "sft" / "model"
    shape = hf_case.make_config()
    hf.save(model, shape, hf_case.make_params(shape))
    stages.check_model(self.folder / "sft")
    (model / hf.WEIGHTS).write_bytes(b"")
    with self.assertRaisesRegex(
        ValueError, f"{model}: .*cut off.*remove {self.folder}/sft to train it"
    ):
      stages.check_model(self.folder / "sft")

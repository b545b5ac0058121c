# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""SFT: it learns, continues bit for bit, and refuses other settings."""

import pathlib
import threading
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np

from tba_jax.config import stages
from tba_jax.config import variants
from tba_jax.models import hf
from tba_jax.models import tokenizer
from tba_jax.monitor import metrics
from tba_jax.programs import sft as sft_lib
from tba_jax.system import jsonl
from tba_jax.tasks import build
from tba_jax.training import policy as policy_lib

arithmetic = variants.import_config("configs/arithmetic.py")


def make_config(**sft):
  """Returns the smoke config of arithmetic with changed SFT settings."""
  config = arithmetic.get_config("smoke")
  config.sft.update(sft)
  return config


def run(config, workdir, **kwargs):
  return sft_lib.run(config, str(workdir), stop=threading.Event(), **kwargs)


def weights(workdir):
  return (pathlib.Path(workdir) / "sft/model" / hf.WEIGHTS).read_bytes()


def stop_at(stop_step):
  """Returns an event and a progress function that sets it at a step."""
  stop = threading.Event()

  def progress(step, num_steps, values):
    del num_steps, values
    if step >= stop_step:
      stop.set()

  return stop, progress


class RunTest(absltest.TestCase):

  def test_makes_a_model_that_has_learned(self):
    workdir = self.create_tempdir().full_path
    config = make_config(
        num_steps=300, learning_rate=1e-2, evaluate_every_steps=150,
        log_every_steps=50, checkpoint_every_steps=400,
    )  # fmt: skip
    seen = []
    result = run(
        config,
        workdir,
        on_progress=lambda step, total, values: seen.append((step, total)),
    )
    self.assertFalse(result["interrupted"])
    self.assertFalse(result["skipped"])
    self.assertEqual(result["step"], 300)
    self.assertEqual(seen, [(50 * i, 300) for i in range(1, 7)])
    records = jsonl.read_jsonl(f"{workdir}/sft/metrics.jsonl")
    self.assertEqual(
        [r["step"] for r in records], [50 * i for i in range(1, 7)]
    )
    first, last = records[0], records[-1]
    self.assertLess(last["train/loss"], 0.5 * first["train/loss"])
    self.assertGreater(last["train/token_accuracy"], 0.6)
    evaluated = [r["step"] for r in records if "eval/pass_at_1" in r]
    self.assertEqual(evaluated, [150, 300])
    self.assertEqual(result["evaluation"]["pass_at_1"], last["eval/pass_at_1"])
    # What the next role loads is what was trained.
    config.init = "sft"
    policy = policy_lib.make_policy(config, workdir)
    params = policy_lib.initial_params(policy, config.seed)
    right = 0
    for index in range(20):
      prompt = policy.tokenizer.encode(policy.task.prompt("train", index))
      logits = policy.model.logits(
          params, np.array([prompt]), np.ones((1, len(prompt)))
      )
      text = policy.tokenizer.decode([int(logits[0, -1].argmax())])
      answer = policy.task.reference_completion("train", index, None)
      right += answer.startswith(text)
    self.assertGreater(right, 10)

  def test_continues_bit_for_bit(self):
    config = make_config(
        num_steps=40, evaluate_every_steps=100, log_every_steps=10,
        checkpoint_every_steps=100,
    )  # fmt: skip
    whole = self.create_tempdir().full_path
    run(config, whole)
    parts = self.create_tempdir().full_path
    # Stopped twice, at other places than the chunks of the whole run.
    for stop_step, log_every in ((13, 13), (21, 7)):
      stop, progress = stop_at(stop_step)
      config.sft.log_every_steps = log_every
      result = sft_lib.run(config, parts, stop=stop, on_progress=progress)
      self.assertTrue(result["interrupted"])
      self.assertEqual(result["step"], stop_step)
      self.assertFalse(pathlib.Path(parts, "sft/model").exists())
    result = run(config, parts)
    self.assertFalse(result["interrupted"])
    self.assertEqual(weights(parts), weights(whole))
    records = metrics.last_per_step(
        jsonl.read_jsonl(f"{parts}/sft/metrics.jsonl")
    )
    self.assertEqual([r["step"] for r in records], [13, 14, 21, 28, 35, 40])

  def test_another_seed_gives_another_model(self):
    config = make_config(num_steps=3, warmup_steps=0)
    first = self.create_tempdir().full_path
    second = self.create_tempdir().full_path
    run(config, first)
    config.seed = 1
    run(config, second)
    self.assertNotEqual(weights(first), weights(second))

  def test_a_model_that_is_there_is_kept(self):
    workdir = self.create_tempdir().full_path
    config = make_config(num_steps=2, warmup_steps=0)
    run(config, workdir)
    before = weights(workdir)
    # How it is watched may change.
    config.sft.log_every_steps = 1
    result = run(config, workdir)
    self.assertTrue(result["skipped"])
    self.assertEqual(result["model"], f"{workdir}/sft/model")
    self.assertEqual(weights(workdir), before)

  def test_stop_before_the_first_step(self):
    stop = threading.Event()
    stop.set()
    workdir = self.create_tempdir().full_path
    result = sft_lib.run(make_config(), workdir, stop=stop)
    self.assertTrue(result["interrupted"])
    self.assertEqual(result["step"], 0)
    self.assertEqual(result["evaluation"], {})

  def test_stop_during_the_evaluation(self):
    # Asked before the first chunk, then by the evaluator.
    stop = mock.create_autospec(threading.Event, instance=True)
    stop.is_set.side_effect = [False, True, True, True]
    workdir = self.create_tempdir().full_path
    config = make_config(num_steps=40, evaluate_every_steps=10)
    result = sft_lib.run(config, workdir, stop=stop)
    self.assertTrue(result["interrupted"])
    self.assertEqual(result["step"], 10)
    self.assertEqual(result["evaluation"], {})
    # The steps before it are not lost.
    self.assertTrue(pathlib.Path(workdir, "sft/checkpoints/10").is_dir())

  def test_a_loss_that_is_not_finite_stops_with_its_steps(self):
    workdir = self.create_tempdir().full_path
    config = make_config(
        num_steps=40, learning_rate=1e30, grad_clip_norm=0.0, warmup_steps=0,
        evaluate_every_steps=100,
    )  # fmt: skip
    with self.assertRaisesRegex(FloatingPointError, r"sft steps \[.*finite"):
      run(config, workdir)
    self.assertFalse(pathlib.Path(workdir, "sft/model").exists())


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
        ("optimizer", "epsilon", 1e-6),
    ):
      changed = make_config()
      changed[section][key] = value
      with self.assertRaisesRegex(
          ValueError,
          rf"config\.{section}\.{key} = {value}, was .*removed"
          if section != "optimizer"
          else r"config\.optimizer\.epsilon = 1e-06",
      ):
        stages.check(changed, folder)
    changed = make_config()
    changed.seed = 5
    with self.assertRaisesRegex(ValueError, r"config\.seed = 5, was 0"):
      stages.check(changed, folder)

  def test_what_the_model_does_not_depend_on_may_change(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = make_config()
    stages.check(config, folder)
    config.sft.evaluate_every_steps = 7
    config.sft.checkpoint_every_steps = 7
    config.loss.beta = 0.5
    config.train.num_steps = 9
    stages.check(config, folder)

  def test_a_field_left_out_equals_its_default(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = make_config()
    config.task.operations = "+-*"
    stages.check(config, folder)
    with config.unlocked():
      del config.task["operations"]
    stages.check(config, folder)

  def test_run_refuses_before_it_trains(self):
    workdir = self.create_tempdir().full_path
    config = make_config(num_steps=2, warmup_steps=0)
    run(config, workdir)
    config.sft.num_steps = 4
    with self.assertRaisesRegex(ValueError, r"sft\.num_steps = 4, was 2"):
      run(config, workdir)

  def test_damaged_settings_are_told(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "settings.json").write_text("{")
    with self.assertRaisesRegex(ValueError, "damaged; remove"):
      stages.check(make_config(), folder)


class ExamplesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.task = build.make_task(make_config().task)
    self.tokenizer = tokenizer.word_level(
        self.task.tokenizer_words(), self.task.tokenizer_pattern
    )

  def examples(self, **changes):
    settings = dict(
        seed=0, batch_size=8, max_prompt_tokens=5, max_completion_tokens=4
    )
    return sft_lib.Examples(
        self.task, self.tokenizer, **{**settings, **changes}
    )

  def test_rows_are_prompts_with_right_completions(self):
    chunk = self.examples().chunk(0, 3, size=5)
    index_of = {
        self.task.prompt("train", i): i
        for i in range(self.task.num_prompts("train"))
    }
    for step in range(3):
      for b in range(8):
        mask = chunk.prompt_mask[step, b].astype(bool)
        # Left-padded.
        self.assertTrue((np.diff(chunk.prompt_mask[step, b]) >= 0).all())
        prompt = self.tokenizer.decode(chunk.prompt_tokens[step, b][mask])
        length = int(chunk.completion_mask[step, b, 0].sum())
        completion = self.tokenizer.decode_completion(
            chunk.completion_tokens[step, b, 0], length, stopped=True
        )
        self.assertEqual(
            self.task.reward("train", index_of[prompt], completion), 1.0
        )
        padding = chunk.completion_mask[step, b, 0, length:]
        self.assertEqual(padding.sum(), 0)
    self.assertEqual(chunk.completion_mask[3:].sum(), 0)
    for leaf in jax.tree.leaves(chunk):
      self.assertEqual(leaf.shape[:2], (5, 8))

  def test_a_step_is_the_same_wherever_its_chunk_begins(self):
    whole = self.examples().chunk(0, 5, size=5)
    part = self.examples().chunk(2, 4, size=2)
    for name in ("prompt_tokens", "completion_tokens", "completion_mask"):
      np.testing.assert_array_equal(
          getattr(whole, name)[2:4], getattr(part, name)
      )
    other = self.examples(seed=1).chunk(2, 4, size=2)
    self.assertFalse((other.prompt_tokens == part.prompt_tokens).all())

  def test_a_text_that_does_not_fit_is_refused(self):
    for name in ("max_prompt_tokens", "max_completion_tokens"):
      with self.assertRaisesRegex(
          ValueError, rf"config\.sampling\.{name} = 2: allowed \d or more"
      ):
        self.examples(**{name: 2}).chunk(0, 5, size=5)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""SFT: learning, continuing bit for bit, epochs without replacement."""

import pathlib
import threading
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.config import variants
from tba_jax.models import tokenizer
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import sft as sft_lib
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.tasks import task_table

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

  @pytest.mark.slow
  def test_lowers_loss_of_trained_model(self):
    workdir = self.create_tempdir().full_path
    config = make_config(
        num_steps=600, learning_rate=1e-2, evaluate_every_steps=300,
        log_every_steps=20, checkpoint_every_steps=700,
    )  # fmt: skip
    seen = []
    result = run(
        config,
        workdir,
        on_progress=lambda step, total, values: seen.append((step, total)),
    )
    self.assertFalse(result["interrupted"])
    self.assertFalse(result["skipped"])
    self.assertEqual(result["step"], 600)
    steps = [20 * i for i in range(1, 31)]
    self.assertEqual(seen, [(step, 600) for step in steps])
    records = jsonl.read_jsonl(f"{workdir}/sft/metrics.jsonl")
    self.assertEqual([r["step"] for r in records], steps)
    # The first steps alone: rounding, which differs between versions of jax,
    # decides by how much the loss falls after them.
    first, last = records[0], records[-1]
    self.assertLess(last["train/loss"], 0.5 * first["train/loss"])
    self.assertGreater(last["train/token_accuracy"], 0.6)
    evaluated = [r["step"] for r in records if "eval/pass_at_1" in r]
    self.assertEqual(evaluated, [300, 600])
    self.assertEqual(result["evaluation"]["pass_at_1"], last["eval/pass_at_1"])
    # The next role loads what was trained.
    right = {}
    for config.init in ("scratch", "sft"):
      policy = policy_lib.make_policy(config, workdir)
      params = policy_lib.initial_params(policy, config.seed)
      logits_fn, right[config.init] = jax.jit(policy.model.logits), 0
      for index in range(100):
        prompt = policy.tokenizer.encode(policy.task.prompt("train", index))
        logits = logits_fn(
            params, np.array([prompt]), np.ones((1, len(prompt)))
        )
        text = policy.tokenizer.decode([int(np.argmax(logits[0, -1]))])
        answer = policy.task.reference_completion("train", index, None)
        right[config.init] += answer.startswith(text)
    self.assertGreater(right["sft"], 40 + right["scratch"], right)

  @pytest.mark.slow
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
    config.sft.evaluate_every_steps = 0
    result = run(config, parts)
    self.assertFalse(result["interrupted"])
    self.assertEqual(result["evaluation"], {})
    self.assertEqual(weights(parts), weights(whole))
    records = metrics.last_per_step(
        jsonl.read_jsonl(f"{parts}/sft/metrics.jsonl")
    )
    self.assertEqual([r["step"] for r in records], [13, 14, 21, 28, 35, 40])

  @pytest.mark.slow
  def test_keeps_existing_model_and_refuses_other_settings(self):
    workdir = self.create_tempdir().full_path
    config = make_config(num_steps=2, warmup_steps=0)
    run(config, workdir)
    before = weights(workdir)
    # A period of logging changes nothing of the model.
    config.sft.log_every_steps = 1
    result = run(config, workdir)
    self.assertTrue(result["skipped"])
    self.assertEqual(result["model"], f"{workdir}/sft/model")
    self.assertEqual(weights(workdir), before)
    config.sft.num_steps = 4
    with self.assertRaisesRegex(ValueError, r"sft\.num_steps = 4, was 2"):
      run(config, workdir)

  def test_stop_before_first_step(self):
    stop = threading.Event()
    stop.set()
    workdir = self.create_tempdir().full_path
    result = sft_lib.run(make_config(), workdir, stop=stop)
    self.assertTrue(result["interrupted"])
    self.assertEqual(result["step"], 0)
    self.assertEqual(result["evaluation"], {})

  def test_stop_during_evaluation(self):
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

  def test_nonfinite_loss_raises_with_its_steps(self):
    workdir = self.create_tempdir().full_path
    config = make_config(
        num_steps=40, learning_rate=1e30, grad_clip_norm=0.0, warmup_steps=0,
        evaluate_every_steps=100,
    )  # fmt: skip
    with self.assertRaisesRegex(
        FloatingPointError, r"sft: .* steps \[.*finite"
    ):
      run(config, workdir)
    self.assertFalse(pathlib.Path(workdir, "sft/model").exists())


class ExamplesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.config = make_config()
    self.task = task_table.make_task(self.config.task)
    self.tokenizer = tokenizer.word_level(
        self.task.tokenizer_words(), self.task.tokenizer_pattern
    )

  def test_epoch_has_each_prompt_once_with_right_completion(self):
    num_prompts = self.task.num_prompts("train")
    self.config.sft.batch_size = -(-num_prompts // 20)
    examples = sft_lib.make_examples(self.config, self.task, self.tokenizer)
    flat = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:num_prompts],
        examples.chunk(0, 20),
    )
    indices = {self.task.prompt("train", i): i for i in range(num_prompts)}
    seen = set()
    for b in range(num_prompts):
      mask = flat.prompt_mask[b].astype(bool)
      prompt = self.tokenizer.decode(flat.prompt_tokens[b][mask])
      length = int(flat.completion_mask[b, 0].sum())
      completion = self.tokenizer.decode_completion(
          flat.completion_tokens[b, 0], length, stopped=True
      )
      reward = self.task.reward("train", indices[prompt], completion)
      self.assertEqual(reward, 1.0)
      seen.add(prompt)
    self.assertLen(seen, num_prompts)

  def test_training_on_messages_takes_only_assistants_turns(self):
    words = tokenizer.word_level([*"abcdu"], ".")
    words.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    turn = lambda role, text: {"role": role, "content": text}
    task = mock.create_autospec(type(self.task), instance=True)
    task.num_prompts.return_value = 1
    task.prompt.return_value = [
        turn("user", "b"), turn("assistant", "c"), turn("user", "d"),
    ]  # fmt: skip
    task.reference_completion.return_value = "cc"
    config = self.config
    config.sft.batch_size = 1
    config.sampling.max_prompt_tokens = (
        config.sampling.max_completion_tokens
    ) = 9
    chunk = sft_lib.make_examples(config, task, words).chunk(0, 1)
    prompt = chunk.prompt_tokens[0, 0][chunk.prompt_mask[0, 0] > 0]
    self.assertEqual(words.decode(prompt), "uba")
    tokens = chunk.completion_tokens[0, 0, 0]
    self.assertEqual(words.decode(tokens[:8]), "c<eos>udacc<eos>")
    mask = [1, 1, 0, 0, 0, 1, 1, 1, 0]
    self.assertEqual(chunk.completion_mask[0, 0, 0].tolist(), mask)

  def test_refuses_overlong_text(self):
    for name in ("max_prompt_tokens", "max_completion_tokens"):
      config = make_config()
      config.sampling[name] = 1
      with self.assertRaisesRegex(
          ValueError, rf"config\.sampling\.{name} = 1: must be \d or more"
      ):
        sft_lib.make_examples(config, self.task, self.tokenizer).chunk(0, 5)

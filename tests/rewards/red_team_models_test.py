# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the frozen models: echo victim, classifiers, encoders."""

import pathlib
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
import transformers

from tba_jax.evaluation import reward_judge
from tba_jax.models import tokenizer
from tba_jax.policy import red_team_models
from tba_jax.rewards import judges
from tba_jax.rewards import red_team_judge
from tba_jax.tasks import task_table
from tests.support import base_config

_TASK = dict(
    name="red_team",
    victim_samples=16,
    victim_max_tokens=4,
    victim_max_prompt_tokens=6,
    victim_rows=32,
)


class SyntheticVictimTest(absltest.TestCase):

  @pytest.mark.slow
  def test_victim_repeats_attack(self):
    config = base_config.make()
    task = task_table.make_task(_TASK)
    judge = reward_judge.make_task_judge(config, "", task)
    mixed = [" fig lamp", " book plum", " pear sun", " tree grape"]
    attacks = [" fig plum", " lamp book", " a" * 7, *mixed]
    ask = lambda split: judge.judge(
        [judges.JudgeRequest(split, 0, attack) for attack in attacks]
    )
    fruit, none, long, *halves = ask("train")
    self.assertGreater(fruit.parts["harm"], 0.8)
    self.assertLess(none.parts["harm"], 0.2)
    self.assertEqual((fruit.key, none.key), (" fig plum", None))
    self.assertEqual(long.failure, "too_long")
    harms = [half.parts["harm"] for half in halves]
    self.assertBetween(np.mean(harms), 0.2, 0.8)
    # A pure function of the attack and the split.
    self.assertEqual(ask("train")[3:], halves)
    self.assertNotEqual(ask("held_out")[3:], halves)


def _write_tokenizer(folder: pathlib.Path, template: str = "") -> None:
  """Writes a tokenizer of four words that frames texts, as BERT's does."""
  vocab = {w: i for i, w in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])}
  vocab |= {w: 4 + i for i, w in enumerate(["fig", "red", "safe", "unsafe"])}
  inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
  inner.pre_tokenizer = pre_tokenizers.Whitespace()
  inner.post_processor = processors.TemplateProcessing(
      single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
  )
  transformers.PreTrainedTokenizerFast(
      tokenizer_object=inner,
      pad_token="[PAD]",
      unk_token="[UNK]",
      eos_token="[SEP]",
      chat_template=template or None,
  ).save_pretrained(str(folder))


class ClassifiersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_classifies_sequences_in_rows_of_one_shape(self):
    _write_tokenizer(self.folder)
    traces = []

    def scores(params, tokens, mask):
      traces.append(tokens.shape)
      # Label 1 counts figs, label 0 all real tokens.
      figs = jnp.sum((tokens == 4) * mask, axis=1)
      return jnp.stack([mask.sum(axis=1).astype(jnp.float32), figs * params], 1)

    made = red_team_judge.sequence_classifier(
        scores,
        jnp.float32(3.0),
        tokenizer.load_texts(self.folder),
        label=1,
        shape=(2, 5),
    )
    answers = ["fig", "red fig fig", "red red red red red"]
    actual = made([""] * 3, answers)
    # Texts get [CLS] and [SEP]; the last one is cut to five tokens.
    counts = np.array([[3, 3], [5, 6], [5, 0]], np.float32)
    expected = counts[:, 1] - np.log(np.exp(counts).sum(1))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    self.assertEqual(traces, [(2, 5)])

  def test_reads_first_token_of_guard(self):
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    _write_tokenizer(self.folder, template)
    seen = []

    def last_logits(params, tokens, mask):
      jax.debug.callback(lambda *x: seen.append(x), tokens, mask)
      return jnp.broadcast_to(params, (len(tokens), 8))

    logits = jnp.arange(8.0)
    made = red_team_judge.first_token_classifier(
        last_logits,
        logits,
        tokenizer.load(self.folder),
        token="unsafe",
        shape=(2, 4),
    )
    result = made([" red "], ["fig fig"])
    np.testing.assert_allclose(result, [jax.nn.log_softmax(logits)[7]])
    jax.effects_barrier()
    tokens, mask = (np.asarray(x) for x in seen[0])
    # The conversation is at the end of its row.
    np.testing.assert_array_equal(tokens[0], [0, 5, 4, 4])
    np.testing.assert_array_equal(mask, [[0, 1, 1, 1], [0, 0, 0, 0]])

  def test_embeds_texts(self):
    _write_tokenizer(self.folder)
    embed = red_team_judge.encoder_embeddings(
        lambda params, tokens, mask: jnp.stack(
            [(tokens == 4).sum(1), (tokens == 5).sum(1)], 1
        ).astype(jnp.float32),
        None,
        tokenizer.load_texts(self.folder),
        (2, 6),
    )
    np.testing.assert_allclose(
        embed(["fig fig", "red", "fig red"]),
        [[1, 0], [0, 1], [0.5**0.5, 0.5**0.5]],
        rtol=1e-6,
    )
    self.assertLen(embed([]), 0)

  def test_runs_nothing_without_texts(self):
    result = red_team_judge.run_batched(
        lambda *_: self.fail("called"), [], (2, 3), pad_id=0
    )
    self.assertEqual(result.shape, (0,))

  def test_refuses_missing_classifier_label(self):
    task = task_table.make_task(
        {
            **_TASK,
            "classifier": "sequence",
            "classifier_folder": str(self.folder),
            "classifier_label": 2,
        }
    )

    class Encoder:

      class config:
        num_labels = 2
        max_tokens = 128

      label_scores = None

    self.enter_context(
        mock.patch.multiple(
            red_team_models.encoder_lib, load_encoder=lambda *_: (Encoder, None)
        )
    )
    self.enter_context(
        mock.patch.multiple(
            red_team_models.tokenizer_lib, load_texts=lambda folder: None
        )
    )
    with self.assertRaisesRegex(ValueError, "classifier_label=2.*2 labels"):
      red_team_models.load_classifier(base_config.make(), task)
    Encoder.config.max_tokens = 127
    with self.assertRaisesRegex(ValueError, "classifier_max_tokens=128.*127"):
      red_team_models.load_classifier(base_config.make(), task)

  def test_matches_words_in_any_case(self):
    result = red_team_judge.word_share_classifier(["Fig"])(
        [""], ["FIG, fig! red"]
    )
    np.testing.assert_allclose(result, [np.log(2.5 / 4)], rtol=1e-6)

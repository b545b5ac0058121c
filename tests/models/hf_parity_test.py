# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Our families against `transformers`' own; skipped without torch."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import transformers

from tba_jax import tokenizer as tokenizer_lib
from tba_jax.models import build
from tba_jax.models import heads
from tba_jax.models import hf

try:
  import torch

  from tests.models import torch_models
except ImportError:
  torch = None

CASES = () if torch is None else tuple(torch_models.CASES)
SCALAR_CASES = () if torch is None else ("llama", "llama3")
TOLERANCE = 2e-4
NUM_TOKENS = 64


def setUpModule():
  if torch is None:
    raise absltest.SkipTest("torch is not installed: parity is not checked")


def _greedy(model, params, tokens, mask):
  """Returns the argmax tokens [B, T] of prefill and cached decode steps."""
  B, P = tokens.shape
  logits, prompt_cache = jax.jit(model.prefill)(params, tokens, mask)
  cache = model.init_cache(B, (P, NUM_TOKENS))
  cache = model.fill_cache(cache, prompt_cache, jnp.arange(B))
  lengths = jnp.asarray(mask.sum(-1))
  decode_params = model.decode_params(params)

  def step(carry, t):
    logits, cache, cache_mask = carry
    new = jnp.argmax(logits, -1).astype(jnp.int32)
    cache_mask = cache_mask.at[:, P + t].set(True)
    logits, cache = model.decode_step(
        decode_params, new, lengths + t, cache, cache_mask, P + t
    )
    return (logits, cache, cache_mask), new

  cache_mask = jnp.zeros((B, P + NUM_TOKENS), bool).at[:, :P].set(mask > 0)
  steps = jnp.arange(NUM_TOKENS)
  run = jax.jit(lambda carry: jax.lax.scan(step, carry, steps))
  return np.asarray(run((logits, cache, cache_mask))[1]).T


class ParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.parameters(*CASES)
  def test_logits_and_greedy_completions(self, case):
    theirs = torch_models.make(case)
    theirs.save_pretrained(self.folder)
    tokens, mask = torch_models.batch()
    expected = torch_models.logits(theirs, tokens, mask)

    config, params = hf.load(self.folder)
    model = build.make_model(config)
    logits = jax.jit(model.logits)(params, tokens, mask)
    difference = np.abs(np.asarray(logits) - expected)[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    # Logits are spread enough for the tolerance to mean something.
    self.assertGreater(expected.std(), 0.5)

    completions, margin = torch_models.greedy(theirs, tokens, mask, NUM_TOKENS)
    self.assertGreater(margin.min(), 1e-3)
    np.testing.assert_array_equal(
        _greedy(model, params, tokens, mask), completions
    )

  @parameterized.parameters(*CASES)
  def test_a_saved_folder_loads_in_transformers(self, case):
    model = torch_models.make(case)
    model.save_pretrained(self.folder / "theirs")
    config, params = hf.load(self.folder / "theirs")
    words = [f"w{i}" for i in range(torch_models.VOCAB - 3)]
    tokenizer = tokenizer_lib.word_level(words, r"w\d+")
    hf.save(self.folder / "ours", config, params, tokenizer)

    again = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder / "ours"
    )
    self.assertEqual(again.config.model_type, model.config.model_type)
    self.assertEqual(again.generation_config.eos_token_id, 1)
    expected = model.state_dict()
    found = again.state_dict()
    self.assertEqual(set(found), set(expected))
    for name, tensor in expected.items():
      self.assertTrue(torch.equal(found[name], tensor), name)
    tokens, mask = torch_models.batch()
    np.testing.assert_array_equal(
        torch_models.logits(again, tokens, mask),
        torch_models.logits(model, tokens, mask),
    )

  @parameterized.product(case=SCALAR_CASES, num_labels=(1, 2))
  def test_scalar_heads(self, case, num_labels):
    theirs = torch_models.make(case, num_labels)
    theirs.save_pretrained(self.folder / "theirs")
    tokens, mask = torch_models.batch()
    expected = torch_models.values(theirs, tokens, mask)
    expected_scores = torch_models.logits(theirs, tokens, mask)

    config, params = hf.load(self.folder / "theirs")
    model = heads.make_model(config, label=num_labels - 1)
    values = jax.jit(model.values)(params, tokens, mask)
    difference = np.abs(values - expected[..., -1])[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    scores = jax.jit(model.label_scores)(params, tokens, mask)
    np.testing.assert_allclose(scores, expected_scores, atol=TOLERANCE, rtol=0)
    self.assertGreater(expected[..., -1].std(), 0.3)

    hf.save(self.folder / "ours", config, params)
    auto = transformers.AutoModelForSequenceClassification
    again = auto.from_pretrained(self.folder / "ours")
    self.assertEqual(type(again), type(theirs))
    np.testing.assert_array_equal(
        torch_models.logits(again, tokens, mask), expected_scores
    )

  def test_a_saved_tokenizer_loads_in_transformers(self):
    words = [f"w{i}" for i in range(torch_models.VOCAB - 3)]
    tokenizer = tokenizer_lib.word_level(words, r"w\d+")
    tokenizer.save(self.folder)
    theirs = transformers.AutoTokenizer.from_pretrained(self.folder)
    text = "w3w14w15"
    self.assertEqual(theirs(text).input_ids, tokenizer.encode(text))
    self.assertEqual(theirs.decode(tokenizer.encode(text)), text)
    self.assertEqual(theirs.eos_token_id, tokenizer.eos_id)
    self.assertEqual(theirs.pad_token_id, tokenizer.pad_id)


if __name__ == "__main__":
  absltest.main()

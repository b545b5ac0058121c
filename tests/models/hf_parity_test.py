# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Our Llama against `transformers`' own; skipped without torch."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import transformers

from tba_jax import tokenizer as tokenizer_lib
from tba_jax.models import build
from tba_jax.models import hf

try:
  import torch
except ImportError:
  torch = None

B, L, V = 4, 24, 96
_LENGTHS = np.array([24, 7, 13, 1])
TOLERANCE = 2e-4


def setUpModule():
  if torch is None:
    raise absltest.SkipTest("torch is not installed: parity is not checked")


def _torch_model(**settings):
  """Returns a random model whose norms are not 1, so that each is seen."""
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(
      transformers.LlamaConfig(
          vocab_size=V,
          hidden_size=64,
          intermediate_size=160,
          num_hidden_layers=3,
          num_attention_heads=4,
          max_position_embeddings=64,
          initializer_range=0.2,
          pad_token_id=0,
          bos_token_id=None,
          eos_token_id=1,
          **settings,
      )
  ).eval()
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for param in model.parameters():
      if param.ndim == 1:
        param.add_(0.3 * torch.randn(param.shape, generator=generator))
  return model


def _torch_logits(model, tokens, mask):
  with torch.no_grad():
    positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
    return model(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
    ).logits.numpy()


def _batch():
  tokens = np.random.default_rng(0).integers(2, V, (B, L))
  mask = (np.arange(L)[None] >= L - _LENGTHS[:, None]).astype(np.int64)
  return tokens, mask


class ParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.named_parameters(
      ("grouped", dict(num_key_value_heads=2)),
      ("tied", dict(num_key_value_heads=1, tie_word_embeddings=True)),
      ("wide_heads", dict(num_key_value_heads=4, head_dim=32)),
      (
          "theta",
          dict(
              rope_parameters={"rope_type": "default", "rope_theta": 500.0},
              rms_norm_eps=1e-3,
          ),
      ),
  )
  def test_logits_with_left_padding(self, settings):
    model = _torch_model(**settings)
    model.save_pretrained(self.folder)
    tokens, mask = _batch()
    expected = _torch_logits(model, tokens, mask)

    config, params = hf.load(self.folder)
    logits = jax.jit(build.make_model(config).logits)(params, tokens, mask)
    difference = np.abs(np.asarray(logits) - expected)[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    # Logits are spread enough for the tolerance to mean something.
    self.assertGreater(expected.std(), 0.5)

  @parameterized.parameters(False, True)
  def test_a_saved_folder_loads_in_transformers(self, tie_word_embeddings):
    model = _torch_model(
        num_key_value_heads=2, tie_word_embeddings=tie_word_embeddings
    )
    model.save_pretrained(self.folder / "theirs")
    words = [f"w{i}" for i in range(V - 3)]
    tokenizer = tokenizer_lib.word_level(words, r"w\d+")
    config, params = hf.load(self.folder / "theirs")
    hf.save(self.folder / "ours", config, params, tokenizer)

    again = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder / "ours"
    )
    self.assertEqual(again.config.model_type, "llama")
    self.assertEqual(again.generation_config.eos_token_id, 1)
    expected = model.state_dict()
    found = again.state_dict()
    self.assertEqual(set(found), set(expected))
    for name, tensor in expected.items():
      self.assertTrue(torch.equal(found[name], tensor), name)
    tokens, mask = _batch()
    np.testing.assert_array_equal(
        _torch_logits(again, tokens, mask), _torch_logits(model, tokens, mask)
    )

    theirs = transformers.AutoTokenizer.from_pretrained(self.folder / "ours")
    text = "w3w14w15"
    self.assertEqual(theirs(text).input_ids, tokenizer.encode(text))
    self.assertEqual(theirs.decode(tokenizer.encode(text)), text)
    self.assertEqual(theirs.eos_token_id, tokenizer.eos_id)
    self.assertEqual(theirs.pad_token_id, tokenizer.pad_id)


if __name__ == "__main__":
  absltest.main()

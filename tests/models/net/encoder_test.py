# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa against `transformers`, and what their loader refuses."""

import json
import pathlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import transformers

from tba_jax.models.net import encoder

try:
  import torch

  torch.set_num_threads(1)
except ImportError:
  torch = None

TOLERANCE = 2e-4
VOCAB, LENGTH = 50, 12
_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=24,
)
# Name -> class of transformers', its settings.
CASES = {
    "bert": ("Bert", {}),
    "minilm": (
        "Bert",
        dict(hidden_act="gelu_new", type_vocab_size=3, layer_norm_eps=1e-5),
    ),
    "roberta": ("Roberta", dict(type_vocab_size=1)),
}


def _model(case, kind, num_labels=3):
  """Returns a model of transformers' with random weights, none plain."""
  family, settings = CASES[case]
  config = getattr(transformers, f"{family}Config")(
      **{**_SHAPE, **settings}, num_labels=num_labels
  )
  torch.manual_seed(0)
  model = getattr(transformers, f"{family}{kind}")(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      # Norms are not 1, biases not 0, and logits are spread.
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model


def _texts(pad_id):
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, VOCAB, (4, LENGTH))
  mask = (np.arange(LENGTH) < np.array([12, 5, 9, 1])[:, None]).astype(np.int32)
  return np.where(mask, tokens, pad_id), mask


def _states(model, tokens, mask):
  with torch.no_grad():
    return model(
        torch.tensor(tokens), attention_mask=torch.tensor(mask)
    )[0].numpy()  # fmt: skip


class ParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if torch is None:
      self.skipTest("torch is not installed")
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.parameters(*CASES)
  def test_states_and_their_mean(self, case):
    theirs = _model(case, "Model")
    theirs.save_pretrained(self.folder)
    ours, params = encoder.load_encoder(self.folder)
    tokens, mask = _texts(ours.config.pad_id)
    expected = _states(theirs, tokens, mask)
    real = mask.astype(bool)
    states = np.asarray(jax.jit(ours.states)(params, tokens, mask))
    self.assertLess(np.abs(states - expected)[real].max(), TOLERANCE)
    self.assertGreater(expected[real].std(), 0.5)
    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    found = ours.mean_pooled(params, tokens, mask)
    np.testing.assert_allclose(found, mean, atol=TOLERANCE, rtol=0)
    self.assertEqual(ours.config.num_labels, 0)

  @parameterized.parameters(*CASES)
  def test_label_scores_equal_those_of_transformers(self, case):
    theirs = _model(case, "ForSequenceClassification")
    theirs.save_pretrained(self.folder)
    ours, params = encoder.load_encoder(self.folder)
    self.assertEqual(ours.config.num_labels, 3)
    tokens, mask = _texts(ours.config.pad_id)
    expected = _states(theirs, tokens, mask)  # The first output: logits.
    found = jax.jit(ours.label_scores)(params, tokens, mask)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    self.assertGreater(expected.std(), 0.1)

  def test_unused_head_is_skipped(self):
    theirs = _model("roberta", "ForMaskedLM")
    theirs.save_pretrained(self.folder)
    ours, params = encoder.load_encoder(self.folder)
    tokens, mask = _texts(ours.config.pad_id)
    expected = _states(theirs.roberta, tokens, mask)
    found = np.asarray(ours.states(params, tokens, mask))
    difference = np.abs(found - expected)[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)


def _write(folder, drop=(), **changes):
  """Writes a small BERT made here, without torch; returns the folder."""
  settings = dict(
      model_type="bert",
      vocab_size=9,
      hidden_size=4,
      num_hidden_layers=2,
      num_attention_heads=2,
      intermediate_size=6,
      max_position_embeddings=8,
  )
  settings.update(changes)
  (folder / "config.json").write_text(json.dumps(settings))
  shape = encoder.encoder_config_from_hf({**settings, "model_type": "bert"})
  rng = np.random.default_rng(0)
  tensors = {}
  for row in encoder.hf_rows(shape, ""):
    for layer in range(2 if row.path[0] == "blocks" else 1):
      name = row.hf_name.format(layer=layer)
      tensors[name] = rng.normal(size=row.hf_shape).astype(np.float32)
  for name in drop:
    del tensors[name]
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  return tensors


class LoadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_padding_changes_nothing(self):
    _write(self.folder)
    made, params = encoder.load_encoder(self.folder)
    tokens = jnp.array([[1, 2, 3, 0, 0]])
    mask = jnp.array([[1, 1, 1, 0, 0]])
    whole = made.mean_pooled(params, tokens[:, :3], mask[:, :3])
    for filler in (0, 7):
      padded = jnp.where(mask > 0, tokens, filler)
      np.testing.assert_allclose(
          made.mean_pooled(params, padded, mask), whole, rtol=1e-5, atol=1e-6
      )

  def test_params_have_the_shape_of_fresh_ones(self):
    _write(self.folder)
    made, params = encoder.load_encoder(self.folder)
    fresh = jax.eval_shape(made.init, jax.random.PRNGKey(0))
    self.assertEqual(
        jax.tree.map(lambda x: x.shape, params),
        jax.tree.map(lambda x: x.shape, fresh),
    )

  @parameterized.parameters(
      (dict(position_embedding_type="relative_key"), "position_embedding_type"),
      (dict(is_decoder=True), "is_decoder=True"),
      (dict(hidden_act="swish2"), "hidden_act='swish2'"),
      (dict(rotary=1), "rotary=1 is an unknown setting"),
      (dict(num_attention_heads=3), "a multiple of num_attention_heads"),
      (dict(model_type="gpt2"), "model_type='gpt2'.*bert.*roberta"),
  )
  def test_unsupported_settings_are_refused(self, changes, message):
    settings = dict(
        model_type="bert",
        vocab_size=9,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=6,
    )
    with self.assertRaisesRegex(ValueError, message):
      encoder.encoder_config_from_hf({**settings, **changes})

  def test_wrong_tensors_are_refused(self):
    name = "encoder.layer.1.output.dense.bias"
    tensors = _write(self.folder, drop=[name])
    tensors["embeddings.LayerNorm.weight"] = np.ones(5, np.float32)
    tensors["extra"] = np.ones(2, np.float32)
    safetensors.numpy.save_file(tensors, self.folder / "model.safetensors")
    with self.assertRaises(ValueError) as caught:
      encoder.load_encoder(self.folder)
    for part in (
        f"missing tensor {name} [4]",
        "embeddings.LayerNorm.weight has shape [5], expected [4]",
        "unused tensor extra [2]",
    ):
      self.assertIn(part, str(caught.exception))

  def test_nonfinite_entries_are_refused(self):
    tensors = _write(self.folder)
    tensors["embeddings.LayerNorm.bias"][2] = np.nan
    safetensors.numpy.save_file(tensors, self.folder / "model.safetensors")
    with self.assertRaisesRegex(ValueError, "LayerNorm.bias has NaN"):
      encoder.load_encoder(self.folder)

  def test_too_long_text_is_refused(self):
    shape = encoder.EncoderConfig(
        "roberta", 9, 1, 4, 2, 6, 8, 1, 1e-5, "gelu", 1
    )
    made = encoder.Encoder(shape)
    params = jax.eval_shape(made.init, jax.random.PRNGKey(0))
    tokens = jnp.zeros((1, 7), jnp.int32)
    with self.assertRaisesRegex(ValueError, "7 tokens.*positions for 6"):
      jax.eval_shape(made.states, params, tokens, tokens)

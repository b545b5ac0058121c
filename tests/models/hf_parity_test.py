# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Our families against `transformers`' own; skipped without torch."""

import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.net import heads
from tba_jax.models.net import layers
from tba_jax.models.net import transformer
from tba_jax.sampling import decode
from tests.models import cases
from tests.support import sampler_case

try:
  import torch

  from tests.models import torch_models
except ImportError:
  torch = None

CASES = tuple(cases.CASES)
TOLERANCE = cases.TOLERANCE


def setUpModule():
  if torch is None:
    raise absltest.SkipTest(
        "torch is not installed: stored_logits_test holds parity"
    )


def _sampler(model, temperature: float) -> decode.JaxSampler:
  return sampler_case.make(
      model,
      temperature=temperature,
      max_prompt_tokens=cases.NUM_PROMPT_TOKENS,
      max_completion_tokens=cases.NUM_TOKENS,
      num_rows=len(cases.LENGTHS),
      chunk_steps=cases.NUM_TOKENS,
      stop_ids=(),
  )


def _requests(tokens, mask) -> list[decode.Request]:
  return [
      decode.Request(prompt[real.astype(bool)], i, 0, num_completions=1)
      for i, (prompt, real) in enumerate(zip(tokens, mask))
  ]


class ParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.named_parameters(*zip(CASES, CASES))
  @pytest.mark.slow
  def test_logits_and_greedy_completions_equal_theirs(self, case):
    theirs = torch_models.make(case)
    theirs.save_pretrained(self.folder)
    tokens, mask = cases.batch()
    stored = cases.stored(case)
    completions = stored["tokens"]
    full = cases.extend(tokens, mask, completions)
    expected = torch_models.logits(theirs, *full)
    # Logits are spread enough for the tolerance to mean something.
    self.assertGreater(expected.std(), 0.5)
    # What is stored is theirs: logits, and the likeliest token after each
    # prefix, near no tie.
    real = full[1].astype(bool)
    difference = np.abs(expected[:, cases.COLUMNS] - stored["logits"])
    self.assertLess(difference[real[:, cases.COLUMNS]].max(), TOLERANCE)
    before = expected[:, cases.NUM_PROMPT_TOKENS - 1 : -1]
    np.testing.assert_array_equal(before.argmax(-1), completions)
    top = np.sort(before, -1)
    self.assertGreater((top[..., -1] - top[..., -2]).min(), 1e-3)

    config, params = hf.load(self.folder)
    model = transformer.make_model(config)
    logits = np.asarray(jax.jit(model.logits)(params, *full))
    self.assertLess(np.abs(logits - expected)[real].max(), TOLERANCE)

    before = logits[:, cases.NUM_PROMPT_TOKENS - 1 : -1]
    np.testing.assert_array_equal(before.argmax(-1), completions)
    if case not in family_lib.FAMILIES:
      return  # What differs from the family's own case is no matter of caches.
    sampler = _sampler(model, 0.0)
    found = sampler.sample(params, _requests(tokens, mask), version=0)
    found = np.concatenate([f.tokens for f in found])
    np.testing.assert_array_equal(found, completions)

  @parameterized.parameters(
      # gpt-oss, Kimi K2, Qwen2.5, and a partly rotated head.
      (dict(factor=32.0, truncate=False), 64, 4096, 150000.0),
      (dict(factor=32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0), 64,
       4096, 50000.0),
      (dict(factor=4.0), 128, 32768, 1e6),
      (dict(factor=2.0, partial_rotary_factor=0.25), 48, 2048, 1e4),
      # All pairs rotate more often than beta_slow; none does.
      (dict(factor=8.0), 16, 4096, 100.0),
      (dict(factor=1.0, beta_fast=2.0, mscale=0.5), 6, 3, 20.0),
  )  # fmt: skip
  def test_yarn_equals_theirs(self, settings, head_dim, original, theta):
    theirs = transformers.GPTNeoXConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=theta,
            original_max_position_embeddings=original,
            **{"partial_rotary_factor": 1.0, **settings},
        ),
    )
    rope_fn = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, scale = rope_fn(theirs)
    config = hf_config.from_hf(theirs.to_dict() | {"dtype": "float32"})
    np.testing.assert_allclose(
        layers.rotary_frequencies(config), frequencies.numpy(), rtol=1e-6
    )
    self.assertAlmostEqual(layers.rotary_scale(config), scale, places=12)

  @parameterized.parameters(
      "gemma3_text", "gemma4_text", "gemma4_text_experts", "ministral3",
      "ministral3_plain", "qwen3_5_text", "qwen3_5_moe_text",
  )  # fmt: skip
  def test_language_model_of_a_multimodal_one_equals_theirs(self, case):
    theirs = torch_models.multimodal(case)
    theirs.save_pretrained(self.folder)
    tokens, mask = cases.batch()
    expected = torch_models.logits(theirs, tokens, mask)
    config, params = hf.load(self.folder)
    model = transformer.make_model(config)
    logits = np.asarray(jax.jit(model.logits)(params, tokens, mask))
    difference = np.abs(logits - expected)[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    self.assertGreater(expected.std(), 0.5)

  def test_experts_in_mxfp4_equal_theirs_and_are_saved_without(self):
    cases.write_mxfp4(self.folder / "published")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens, mask = cases.batch()
    theirs = load(self.folder / "published", dtype=torch.float32).eval()
    expected = torch_models.logits(theirs, tokens, mask)

    config, params = hf.load(self.folder / "published")
    model = transformer.make_model(config)
    logits = np.asarray(jax.jit(model.logits)(params, tokens, mask))
    difference = np.abs(logits - expected)[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    self.assertGreater(expected.std(), 0.5)

    hf.save(self.folder / "ours", config, params)
    again = load(self.folder / "ours").eval()
    self.assertFalse(hasattr(again.config, "quantization_config"))
    np.testing.assert_array_equal(
        torch_models.logits(again, tokens, mask), expected
    )

  @parameterized.parameters(
      "gemma3_text",
      "gemma3_text_bias",
      "gemma4_text",
      "gemma4_text_odd",
      "gemma4_text_experts",
      "qwen3_moe",
      "gpt_oss",
      "gpt_oss_odd",
      "deepseek_v3",
      "deepseek_v3_odd",
      "glm4_moe",
      "smollm3",
      "olmo3",
      "ministral3",
      "qwen3_5_text",
      "qwen3_5_text_tied",
      "qwen3_5_moe_text",
      "qwen3_next",
      "qwen3_next_tied",
  )
  @pytest.mark.slow
  def test_gradients_equal_theirs(self, case):
    theirs = torch_models.make(case)
    theirs.save_pretrained(self.folder / "theirs")
    tokens, mask = cases.batch()
    expected = torch_models.gradients(theirs, tokens, mask)

    config, params = hf.load(self.folder / "theirs")
    model = transformer.make_model(config, remat="dots")

    def loss(params):
      logprobs = jax.nn.log_softmax(model.logits(params, tokens, mask)[:, :-1])
      chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
      return -jnp.sum(chosen * mask[:, :-1])

    gradients = jax.jit(jax.grad(loss))(params)
    hf.save(self.folder / "ours", config, gradients)
    path = self.folder / "ours" / "model.safetensors"
    found = safetensors.numpy.load_file(path)
    fixed = re.compile(r".*(correction_bias|layer_scalar)")
    for name in list(filter(fixed.fullmatch, found)):
      self.assertFalse(found.pop(name).any(), name)
    self.assertEqual(set(found), set(expected))
    for name, gradient in expected.items():
      largest = np.abs(gradient).max()
      if ".experts." in name and not largest:  # No token uses the expert.
        self.assertFalse(found[name].any(), name)
        continue
      self.assertGreater(largest, 1e-3, name)
      np.testing.assert_allclose(
          found[name] / largest, gradient / largest, atol=1e-4, err_msg=name
      )

  @parameterized.parameters("gpt_neox", "gpt2")
  @pytest.mark.slow
  def test_log_probs_of_samples(self, case):
    cases.write(self.folder, case)
    config, params = hf.load(self.folder)
    tokens, mask = cases.batch()
    sampler = _sampler(transformer.make_model(config), 1.0)
    found = sampler.sample(params, _requests(tokens, mask), version=0)
    completions = np.concatenate([f.tokens for f in found])
    full = cases.extend(tokens, mask, completions)
    logits = torch_models.logits(torch_models.make(case), *full)
    logprobs = torch.log_softmax(torch.tensor(logits), -1).numpy()
    before = logprobs[:, cases.NUM_PROMPT_TOKENS - 1 : -1]
    expected = np.take_along_axis(before, completions[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        np.concatenate([f.logprobs for f in found]), expected, atol=1e-4, rtol=0
    )
    self.assertGreater(expected.std(), 0.5)

  @parameterized.named_parameters(*zip(CASES, CASES))
  @pytest.mark.slow
  def test_a_saved_folder_loads_in_transformers(self, case):
    model = torch_models.make(case)
    model.save_pretrained(self.folder / "theirs")
    config, params = hf.load(self.folder / "theirs")
    words = [f"w{i}" for i in range(cases.VOCAB - 3)]
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
    tokens, mask = cases.batch()
    np.testing.assert_array_equal(
        torch_models.logits(again, tokens, mask),
        torch_models.logits(model, tokens, mask),
    )

  @parameterized.parameters(
      *(("llama", 2), ("llama3", 1), ("qwen2", 1), ("gpt_neox", 1)),
      *(("gpt2", 2), ("gemma3_text", 1), ("qwen3_moe", 1), ("gpt_oss", 1)),
      *(("smollm3", 1), ("olmo3", 1), ("ministral3", 1), ("qwen3_5_text", 1)),
      *(("qwen3_next", 1),),
      ("deepseek_v3", 1),
  )
  @pytest.mark.slow
  def test_scalar_heads_equal_those_of_transformers(self, case, num_labels):
    theirs = torch_models.make(case, num_labels)
    theirs.save_pretrained(self.folder / "theirs")
    tokens, mask = cases.batch()
    expected = torch_models.values(theirs, tokens, mask)
    expected_scores = torch_models.logits(theirs, tokens, mask)

    config, params = hf.load(self.folder / "theirs")
    model = heads.ScalarModel(config)
    both = lambda *args: (model.values(*args), model.label_scores(*args))
    values, scores = jax.jit(both)(params, tokens, mask)
    difference = np.abs(values - expected[..., 0])[mask.astype(bool)]
    self.assertLess(difference.max(), TOLERANCE)
    np.testing.assert_allclose(scores, expected_scores, atol=TOLERANCE, rtol=0)
    self.assertGreater(expected[..., 0].std(), 0.3)

    hf.save(self.folder / "ours", config, params)
    auto = transformers.AutoModelForSequenceClassification
    again = auto.from_pretrained(self.folder / "ours")
    self.assertEqual(type(again), type(theirs))
    np.testing.assert_array_equal(
        torch_models.logits(again, tokens, mask), expected_scores
    )

  def test_a_saved_tokenizer_loads_in_transformers(self):
    words = [f"w{i}" for i in range(cases.VOCAB - 3)]
    tokenizer = tokenizer_lib.word_level(words, r"w\d+")
    tokenizer.save(self.folder)
    theirs = transformers.AutoTokenizer.from_pretrained(self.folder)
    text = "w3w14w15"
    self.assertEqual(theirs(text).input_ids, tokenizer.encode(text))
    self.assertEqual(theirs.decode(tokenizer.encode(text)), text)
    self.assertEqual(theirs.eos_token_id, tokenizer.eos_id)
    self.assertEqual(theirs.pad_token_id, tokenizer.pad_id)

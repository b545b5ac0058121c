# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF files as `transformers` reads them; skipped without torch."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import gguf
import numpy as np
import pytest
import transformers

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_tensors
from tests.models import gguf_case

try:
  import torch  # pylint: disable=unused-import
  from transformers import modeling_gguf_pytorch_utils as theirs_lib
except ImportError:
  torch = None

_TEXTS = ("hello  world\n12345 naïve 日本 🎉", "<|x|>hello<|y|>", " a", "")
# Every type that the package dequantizes; NVFP4 has a scale in another tensor.
_TYPES = sorted({k.name for k in gguf.quants._type_traits} - {"NVFP4"})


def setUpModule():
  if torch is None:
    raise absltest.SkipTest("torch is not installed")


class GgufParityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / "tiny.gguf"
    self.enter_context(
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"))
    )

  @parameterized.parameters(
      *(("llama", kind, True) for kind in ("F32", "F16", *_TYPES)),
      *(("qwen2", "Q4_1", True), ("qwen2", "Q6_K", False)),
      *(("qwen3", "Q8_0", True), ("qwen3", "Q4_K", False)),
      *(("gemma3", "Q5_0", True), ("gemma3", "Q6_K", False)),
  )
  @pytest.mark.slow
  def test_weights_and_config(self, architecture, kind, is_tied):
    # transformers does not read the size of Qwen3's heads, 128 as a default.
    size = 128 if architecture == "qwen3" else 64
    gguf_case.write(
        self.path, architecture, kind, head_dim=size, is_tied=is_tied
    )
    read = theirs_lib.load_gguf_checkpoint(str(self.path))["config"]
    config = transformers.CONFIG_MAPPING[read["model_type"]](**read)
    with torch.device("meta"):
      model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = theirs_lib.load_gguf_checkpoint(
        str(self.path), return_tensors=True, model_to_load=model
    )["tensors"]
    files = hf_files.open_files(hf_hub.find(self.path))
    self.assertEqual(set(files.shapes), set(theirs))
    for name, tensor in theirs.items():
      ours = files.read(name, (slice(None),) * tensor.ndim)
      np.testing.assert_array_equal(ours, tensor.float().numpy(), name)
    rope = config.rope_parameters
    if architecture == "gemma3":
      local, rope = rope["sliding_attention"], rope["full_attention"]
    ours = hf_config.read(self.path)
    if architecture == "gemma3":
      self.assertEqual(
          (ours.sliding_window, ours.local_rope_theta),
          (config.sliding_window, local["rope_theta"]),
      )
    hf_tensors.check_model(hf_hub.find(self.path), ours)
    self.assertEqual(
        (ours.width, ours.mlp_width, ours.num_layers, ours.num_heads,
         ours.num_kv_heads, ours.head_dim, ours.vocab_size, ours.norm_epsilon,
         ours.rope_theta, ours.max_positions, ours.tie_embeddings),
        (config.hidden_size, config.intermediate_size, config.num_hidden_layers,
         config.num_attention_heads, config.num_key_value_heads,
         getattr(config, "head_dim", size), config.vocab_size,
         config.rms_norm_eps, rope["rope_theta"],
         config.max_position_embeddings, config.tie_word_embeddings),
    )  # fmt: skip

  @parameterized.parameters(
      {},
      {"tokenizer.ggml.add_bos_token": True},
      {"tokenizer.ggml.pre": "gpt-2"},
  )
  def test_tokenizer(self, **keys):
    gguf_case.write(self.path, keys=keys)
    theirs = transformers.AutoTokenizer.from_pretrained(
        self.folder, gguf_file=self.path.name
    )
    ours = tokenizer_lib.load(self.path)
    for text in _TEXTS:
      plain = theirs.encode(text, add_special_tokens=False)
      self.assertEqual(ours.encode(text), plain)
      if text:
        self.assertEqual(ours.encode_prompt(text), theirs.encode(text))
    messages = [{"role": "user", "content": "hello world"}]
    self.assertEqual(
        ours.encode_chat(messages),
        theirs.apply_chat_template(messages, return_dict=False),
    )
    self.assertEqual((ours.eos_id, ours.bos_id), (0, 1))

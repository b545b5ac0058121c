# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF files as folders: config, tokenizer, tensors, and what is refused."""

import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import gguf
import numpy as np

from tba_jax.config import validate
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import gguf_folder
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.policy import lora
from tests.models import gguf_case
from tests.support import base_config


class GgufTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / "tiny.gguf"
    self.enter_context(
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"))
    )

  @parameterized.product(
      architecture=("llama", "qwen2", "qwen3", "gemma3"),
      is_tied=(True, False),
  )
  def test_config_and_params(self, architecture, is_tied):
    gguf_case.write(self.path, architecture, is_tied=is_tied)
    config, params = hf.load(self.path)
    family = gguf_folder.ARCHITECTURES[architecture]
    self.assertEqual(
        (config.family, config.width, config.mlp_width, config.num_layers),
        (family, gguf_case.WIDTH, gguf_case.MLP, gguf_case.LAYERS),
    )
    self.assertEqual((config.num_heads, config.num_kv_heads), (4, 2))
    self.assertEqual((config.rope_theta, config.max_positions), (5000.0, 64))
    self.assertEqual(
        (config.eos_id, config.bos_id, config.pad_id), (0, 1, None)
    )
    self.assertEqual((config.stop_ids, config.tie_embeddings), ((), is_tied))
    self.assertEqual("head" in params, not is_tied)

  def test_norms_of_gemma_are_stored_with_1_added(self):
    gguf_case.write(self.path, "gemma3", "Q8_0")
    _, params = hf.load(self.path)
    theirs = {t.name: t.data for t in gguf.GGUFReader(self.path).tensors}
    block = params["blocks"]
    for ours, name in (
        (block["attention_norm"], "attn_norm"),
        (block["attention_out_norm"], "post_attention_norm"),
        (block["mlp_norm"], "ffn_norm"),
        (block["mlp_out_norm"], "post_ffw_norm"),
        (block["attention"]["q_norm"], "attn_q_norm"),
        (block["attention"]["k_norm"], "attn_k_norm"),
    ):
      np.testing.assert_array_equal(
          ours["scale"][1], theirs[f"blk.1.{name}.weight"] - np.float32(1), name
      )
    np.testing.assert_array_equal(
        params["final_norm"]["scale"],
        theirs["output_norm.weight"] - np.float32(1),
    )

  def test_windows_and_scales_of_gemma(self):
    linear = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    gguf_case.write(self.path, "gemma3", keys=linear)
    config = hf_config.read(self.path)
    self.assertEqual((config.sliding_window, config.windows), (16, (16, 16)))
    self.assertEqual((config.rope_type, config.rope_factor), ("linear", 8.0))
    self.assertEqual(
        (config.rope_theta, config.local_rope_theta), (5000.0, 10000.0)
    )
    self.assertEqual((config.activation, config.score_dim), ("gelu_new", 64))
    # Gemma 3 27B has 62 layers: 168 = 5376 / 32 differs from its head of 128.
    gguf_case.write(
        self.path,
        "gemma3",
        head_dim=32,
        keys={"gemma3.block_count": 62},
    )
    config = hf_config.read(self.path)
    self.assertEqual((config.head_dim, config.score_dim), (32, 64))
    self.assertEqual(config.windows, ((16,) * 5 + (0,)) * 10 + (16, 16))
    window = "gemma3.attention.sliding_window"
    gguf_case.write(self.path, "gemma3", without=window)
    with self.assertRaisesRegex(ValueError, "sliding_window=None is not supp"):
      hf_config.read(self.path)

  @parameterized.parameters("F32", "Q4_K")
  def test_each_expert_has_its_part_of_a_stack(self, quantization):
    gguf_case.write(self.path, "qwen3moe", quantization, is_tied=False)
    config, params = hf.load(self.path)
    self.assertEqual(
        (config.family, config.num_experts, config.experts_per_token),
        ("qwen3_moe", 3, 2),
    )
    self.assertEqual((config.mlp_width, config.norm_router), (512, True))
    reader = gguf.GGUFReader(self.path)
    theirs = {
        t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors
    }
    mlp = params["blocks"]["mlp"]
    for ours, name in (("router", "gate_inp"), ("gate", "gate_exps"),
                       ("up", "up_exps"), ("down", "down_exps")):  # fmt: skip
      for layer in range(gguf_case.LAYERS):
        np.testing.assert_array_equal(
            mlp[ours][layer], theirs[f"blk.{layer}.ffn_{name}.weight"]
        )

  def test_other_expert_weightings_are_refused(self):
    for key, value in (("norm", False), ("scale", 2.5)):
      name = f"qwen3moe.expert_weights_{key}"
      gguf_case.write(self.path, "qwen3moe", keys={name: value})
      with self.assertRaisesRegex(ValueError, f"{name}={value} is not"):
        hf_hub.find(self.path)

  def test_rows_of_query_and_key_in_hugging_faces_order(self):
    """llama.cpp: `w.reshape(heads, 2, size / 2, width).swapaxes(1, 2)`."""
    gguf_case.write(self.path)
    reader = gguf.GGUFReader(self.path)
    theirs = {tensor.name: tensor.data for tensor in reader.tensors}
    files = hf_files.open_files(hf_hub.find(self.path))
    whole = (slice(None), slice(None))
    for part, name, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
      ours = files.read(f"model.layers.1.self_attn.{part}_proj.weight", whole)
      permuted = ours.reshape(heads, 2, 32, 256).swapaxes(1, 2)
      theirs_part = theirs[f"blk.1.{name}.weight"]
      np.testing.assert_array_equal(permuted.reshape(-1, 256), theirs_part)
      self.assertTrue((ours != theirs_part).any())

  @parameterized.parameters("F16", "BF16", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
  def test_slices_are_parts_of_the_whole(self, quantization):
    gguf_case.write(self.path, quantization=quantization)
    files = hf_files.open_files(hf_hub.find(self.path))
    for part, index in (
        ("self_attn.q_proj", (slice(3, 71), slice(5, 200))),
        ("self_attn.k_proj", (slice(100, 101), slice(None))),
        ("mlp.down_proj", (slice(40, 41), slice(500, 512))),
        ("mlp.down_proj", (slice(40, 40), slice(0, 9))),
        ("input_layernorm", (slice(7, 9),)),
    ):
      name = f"model.layers.0.{part}.weight"
      whole = files.read(name, (slice(None),) * len(index))
      self.assertEqual(whole.shape, files.shapes[name])
      self.assertTrue(np.isfinite(whole).all())
      np.testing.assert_array_equal(files.read(name, index), whole[index])

  def test_is_made_once_and_again_for_another_file(self):
    gguf_case.write(self.path)
    folder = hf_hub.find(self.path)
    with mock.patch.object(gguf, "GGUFReader") as reader:
      self.assertEqual(hf_hub.find(str(self.path)), folder)
    reader.assert_not_called()
    before = lora.base_name(self.path, 0)
    gguf_case.write(self.path, quantization="Q8_0")
    self.assertNotEqual(hf_hub.find(self.path), folder)
    self.assertNotEqual(lora.base_name(self.path, 0), before)

  def test_a_saved_copy_is_the_same_model(self):
    keys = {"tokenizer.ggml.eot_token_id": 4}
    gguf_case.write(self.path, "qwen3", "Q8_0", keys=keys)
    config, params = hf.load(self.path)
    self.assertEqual((config.eos_id, config.stop_ids), (0, (0, 4)))
    tokenizer = tokenizer_lib.load(self.path)
    hf.save(self.folder / "copy", config, params, tokenizer)
    again, copied = hf.load(self.folder / "copy")
    self.assertEqual(again, config)
    np.testing.assert_array_equal(
        copied["blocks"]["attention"]["q"]["kernel"],
        params["blocks"]["attention"]["q"]["kernel"],
    )
    copy = tokenizer_lib.load(self.folder / "copy")
    messages = [{"role": "user", "content": "hello world"}]
    ids = tokenizer.encode_chat(messages)
    self.assertEqual((ids[0], ids[-1]), (3, 4))
    self.assertEqual(copy.encode_chat(messages), ids)
    self.assertEqual(tokenizer.decode(ids), "<|x|>hello world<|y|>")

  @parameterized.parameters((8.0, 8.0), (32.0, 32.0), (8.0, 16.0))
  def test_factors_of_llama_3(self, factor, largest):
    """Numbers of Hugging Face's formula, at 64 entries and base 500,000."""
    lengths = 2 * np.pi * 500000.0 ** (np.arange(32) / 32)
    smooth = (8192 / lengths - 1) / 3
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(lengths < 8192 / 4, 1.0, factors)
    factors = np.where(lengths > 8192, factor, factors)
    factors[-1] = largest
    gguf_case.write(
        self.path,
        keys={"llama.rope.freq_base": 500000.0},
        tensors={"rope_freqs.weight": factors.astype(np.float32)},
    )
    if largest != factor:
      with self.assertRaisesRegex(ValueError, "rope_freqs.weight: must be"):
        hf_hub.find(self.path)
      return
    config = hf_config.read(self.path)
    self.assertEqual((config.rope_type, config.rope_factor), ("llama3", factor))
    self.assertEqual(config.rope_original_positions, 8192)
    _ = hf.load(self.path)

  @parameterized.parameters(
      ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
      ({"llama.expert_count": 8}, "llama.expert_count=8"),
      ({"llama.attention.sliding_window": 9}, "llama.attention.sliding_window"),
      ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5"),
      ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count"),
      ({"split.count": 2}, "llama-gguf-split"),
      ({"tokenizer.ggml.model": "rwkv"}, "ggml.model='rwkv' is not supported"),
  )
  def test_keys_with_effect_on_logits_are_refused(self, keys, message):
    gguf_case.write(self.path, keys=keys)
    with self.assertRaisesRegex(ValueError, f"tiny.gguf: .*{message}"):
      hf_hub.find(self.path)
    self.assertEmpty(list((self.folder / "cache/tba_jax/models").iterdir()))

  def test_settings_without_effect_and_positions_divided_by_a_factor(self):
    gguf_case.write(
        self.path,
        keys={
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 2.0,
            "llama.expert_count": 0,
            "general.quantized_by": "someone",
        },
        without="llama.vocab_size",
    )
    config = hf_config.read(self.path)
    self.assertEqual((config.rope_type, config.rope_factor), ("linear", 2.0))
    self.assertLen(gguf_case.words()[0], config.vocab_size)

  @parameterized.parameters("blk.1.ffn_up", "token_embd")
  def test_a_missing_tensor_is_named(self, name):
    gguf_case.write(self.path, without=name)
    with self.assertRaisesRegex(ValueError, "missing tensor model"):
      hf.load(self.path)

  def test_unreadable_files_are_refused(self):
    self.path.write_text("no model")
    with self.assertRaisesRegex(ValueError, "tiny.gguf: no GGUF file, damaged"):
      hf_hub.find(self.path)
    gguf_case.write(self.path)
    data = self.path.read_bytes()
    for size in (9, 3000, len(data) - 5000):
      self.path.write_bytes(data[:size])
      with self.assertRaisesRegex(ValueError, "damaged or cut off"):
        hf_hub.find(self.path)
    gguf_case.write(self.path, without="tokenizer.ggml.tokens")
    with self.assertRaisesRegex(ValueError, "has no tokenizer"):
      hf_hub.find(self.path)
    gguf_case.write(self.path, "gemma2")
    with self.assertRaisesRegex(ValueError, "'gemma2' is not supported; supp"):
      hf_hub.find(self.path)

  def test_a_run_may_start_from_it(self):
    gguf_case.write(self.path, quantization="Q4_0")
    config = base_config.make(init=str(self.path))
    for program in ("train", "plan", "evaluate", "export"):
      validate.validate(config, program=program)
    start = base_config.make(init="sft", sft__init=str(self.path))
    validate.validate(start, program="sft")
    config.init = str(self.folder / "none.gguf")
    with self.assertRaisesRegex(ValueError, "config.init.*a GGUF file"):
      validate.validate(config, program="plan")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapter folders: the merged model, what is refused, and `peft`'s own."""

import dataclasses
import json
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
import transformers

from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_hub
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tests.models import gguf_case
from tests.support import hub_cache
from tests.support import tiny_model

try:
  import peft
  import torch

  from tests.models import torch_models
except ImportError:
  peft = torch = None

_TOKENS = np.arange(2, 14)[None]
_FAMILIES = (
    dict(family="llama"),
    dict(family="qwen3"),
    dict(family="qwen2", tie_embeddings=True),
)


def _logits(model, params):
  return model.logits(params, _TOKENS, np.ones_like(_TOKENS))


class AdapterTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    cache = {"XDG_CACHE_HOME": str(self.folder / "cache")}
    self.enter_context(mock.patch.dict(os.environ, cache))

  def make(self, targets="all", **family):
    """Returns model, base and adapters, with both in folders."""
    model = tiny_model.make_model(**family)
    params = tiny_model.init_params(model)
    tokenizer = tokenizer_lib.word_level([*"abcdefghijklm"], ".")
    hf.save(self.folder / "base", model.config, params, tokenizer)
    settings = dict(rank=2, alpha=6.0, targets=targets)
    functions = lora.make(settings, model)
    moved = jax.tree.map(
        lambda x: 0.1 * np.sin(np.arange(x.size)).reshape(x.shape),
        jax.eval_shape(functions.init, jax.random.PRNGKey(0)),
    )
    (self.folder / "adapter").mkdir(exist_ok=True)
    adapter_folder.write(
        self.folder / "adapter",
        lora.peft_tensors(model.config, moved),
        base=str(self.folder / "base"),
        rank=2,
        alpha=6.0,
    )
    return model, params, functions.merge(params, moved)

  def change(self, **settings):
    path = self.folder / "adapter" / adapter_folder.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

  @parameterized.parameters(
      *_FAMILIES,
      dict(family="llama", targets="q,down"),
      dict(tiny_model.BOTH, targets="q,down"),
  )
  def test_loads_as_the_base_with_the_adapter_merged(self, **changes):
    if "targets" in changes:
      names = lora.make(dict(rank=1, alpha=1.0, targets="all"),
                        tiny_model.make_model()).logical_axes  # fmt: skip
      changes["targets"] = ",".join(sorted(names["blocks"]["mlp"]))
    model, _, merged = self.make(**changes)
    shape, params = hf.load(self.folder / "adapter")
    self.assertEqual(shape.family, model.config.family)
    chex.assert_trees_all_close(params, merged, rtol=1e-6, atol=1e-7)
    tokenizer = tokenizer_lib.load(self.folder / "adapter")
    self.assertEqual(tokenizer.encode("ab"), [3, 4])
    # A second time nothing is written.
    found = hf_hub.find(self.folder / "adapter")
    before = (found / hf.WEIGHTS).stat().st_mtime_ns
    self.assertEqual(hf_hub.find(self.folder / "adapter"), found)
    self.assertEqual((found / hf.WEIGHTS).stat().st_mtime_ns, before)

  def rewrite(self, **tensors):
    """Changes tensors of the adapter, which the file's reader maps."""
    path = self.folder / "adapter" / adapter_folder.WEIGHTS
    read = safetensors.numpy.load(path.read_bytes())
    path.write_bytes(safetensors.numpy.save(read | tensors))

  @parameterized.parameters(np.nan, np.inf)
  def test_refuses_nonfinite_entries(self, entry):
    self.make()
    name = adapter_folder.tensor_name(
        "model.layers.1.self_attn.q_proj.weight", "B"
    )
    path = self.folder / "adapter" / adapter_folder.WEIGHTS
    wrong = safetensors.numpy.load(path.read_bytes())[name].copy()
    wrong[0, 0] = entry
    self.rewrite(**{name: wrong})
    with self.assertRaisesRegex(
        ValueError,
        f"adapter: adapter_model.safetensors: tensor {name}: has NaN",
    ):
      hf.load(self.folder / "adapter")

  def test_refuses_an_adapter_without_factors(self):
    self.make()
    path = self.folder / "adapter" / adapter_folder.WEIGHTS
    safetensors.numpy.save_file({}, path)
    with self.assertRaisesRegex(
        ValueError,
        "adapter: adapter_model.safetensors: has no lora_A and lora_B",
    ):
      hf.load(self.folder / "adapter")

  @parameterized.parameters(
      (
          {"r": 4},
          r"factors of .* have rank 2: must be one of \[4\], as in adapter",
      ),
      ({"lora_alpha": float("nan")}, "lora_alpha=nan: must be a number"),
      ({"use_newlora": True}, "use_newlora=True: must be False"),
  )
  def test_refuses_unsupported_settings(self, settings, message):
    self.make()
    self.change(**settings)
    with self.assertRaisesRegex(ValueError, message):
      hf.load(self.folder / "adapter")

  def test_ranks_may_differ_by_pattern(self):
    _, _, merged = self.make()
    self.change(r=4, rank_pattern={".*": 2})
    _, params = hf.load(self.folder / "adapter")
    chex.assert_trees_all_close(params, merged, rtol=1e-6, atol=1e-7)

  def test_tied_head_has_no_separate_adapter(self):
    model, params, _ = self.make(tie_embeddings=True)
    files = {p: safetensors.numpy.load_file(self.folder / p / name)
             for p, name in (("base", hf.WEIGHTS),
                             ("adapter", adapter_folder.WEIGHTS))}  # fmt: skip
    head = np.asarray(params["embed"]["embedding"])
    files["base"]["lm_head.weight"] = head
    for factor, shape in (("A", (2, head.shape[1])), ("B", (len(head), 2))):
      name = adapter_folder.tensor_name("lm_head.weight", factor)
      files["adapter"][name] = np.ones(shape, np.float32)
    safetensors.numpy.save_file(
        files["base"], self.folder / "base" / hf.WEIGHTS
    )
    safetensors.numpy.save_file(
        files["adapter"], self.folder / "adapter" / adapter_folder.WEIGHTS
    )
    with self.assertRaisesRegex(ValueError, "lm_head.*tie_word_embeddings"):
      hf.load(self.folder / "adapter")

  @parameterized.parameters(("llama", "Q4_1", True), ("qwen2", "F32", False))
  def test_loads_over_a_gguf_file(self, family, kind, is_beside):
    base = self.folder / "tiny.gguf"
    gguf_case.write(base, family, kind)
    shape, params = hf.load(base)
    functions = lora.make(
        dict(rank=2, alpha=6.0, targets="all"), transformer.make_model(shape)
    )
    moved = jax.tree.map(
        lambda x: 0.1 * np.sin(np.arange(x.size)).reshape(x.shape),
        jax.eval_shape(functions.init, jax.random.PRNGKey(0)),
    )
    (self.folder / "adapter").mkdir()
    adapter_folder.write(
        self.folder / "adapter",
        lora.peft_tensors(shape, moved),
        base="../tiny.gguf" if is_beside else str(base),
        rank=2,
        alpha=6.0,
    )
    again, found = hf.load(self.folder / "adapter")
    self.assertEqual(again, shape)
    chex.assert_trees_all_close(
        found, functions.merge(params, moved), rtol=1e-6, atol=1e-6
    )
    tokens = lambda path: tokenizer_lib.load(path).encode("hello world")
    self.assertEqual(tokens(self.folder / "adapter"), tokens(base))

  def test_a_plan_needs_no_weights(self):
    self.make()
    (self.folder / "base" / hf.WEIGHTS).unlink()
    found = hf_hub.find(self.folder / "adapter", weights=False)
    self.assertTrue((found / "config.json").is_file())
    with self.assertRaisesRegex(ValueError, "adapter: has neither model"):
      hf_hub.find(self.folder / "adapter")

  def test_hub_base_has_named_revision(self):
    _, _, merged = self.make()
    cache = hub_cache.make(self)
    hub_cache.add(cache, "org/base", self.folder / "base", revision="1.0")
    adapter = self.folder / "adapter"
    tensors = safetensors.numpy.load_file(adapter / adapter_folder.WEIGHTS)
    adapter_folder.write(
        adapter, tensors, base="org/base@1.0", rank=2, alpha=6.0
    )
    settings = json.loads((adapter / adapter_folder.CONFIG).read_text())
    # As `peft` names it.
    self.assertEqual(settings["base_model_name_or_path"], "org/base")
    self.assertEqual(settings["revision"], "1.0")
    # The cache has no other.
    found = hf.load(adapter)[1]
    chex.assert_trees_all_close(found, merged, rtol=1e-6, atol=1e-7)
    # A folder has none.
    self.change(base_model_name_or_path=str(self.folder / "base"))
    hf_hub.find(adapter)

  def test_scales_by_the_root_of_the_rank(self):
    _, params, merged = self.make()
    self.change(use_rslora=True)
    found = hf.load(self.folder / "adapter")[1]
    expected = jax.tree.map(
        lambda p, m: p + (m - p) * np.sqrt(2), params, merged
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)

  def test_a_small_adapter_of_a_bfloat16_base_is_not_rounded_away(self):
    model, params, merged = self.make()
    shape = dataclasses.replace(model.config, param_dtype="bfloat16")
    tokenizer = tokenizer_lib.load(self.folder / "base")
    hf.save(self.folder / "base", shape, params, tokenizer)
    self.change(lora_alpha=6e-4)
    load = lambda name: hf.load(self.folder / name, dtype="float32")[1]
    expected = jax.tree.map(
        lambda own, p, m: own + 1e-4 * (m - p), load("base"), params, merged
    )
    chex.assert_trees_all_close(load("adapter"), expected, rtol=1e-6, atol=1e-8)
    own = hf_config.read(self.folder / "adapter")
    self.assertEqual(own.param_dtype, "bfloat16")

  def test_accepts_head_copy_saved_by_peft(self):
    self.make()
    base = safetensors.numpy.load_file(self.folder / "base" / hf.WEIGHTS)
    path = self.folder / "adapter" / adapter_folder.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    head = base["lm_head.weight"]
    tensors["base_model.model.lm_head.base_layer.weight"] = head
    for factor, shape in (("A", (2, head.shape[1])), ("B", (len(head), 2))):
      name = adapter_folder.tensor_name("lm_head.weight", factor)
      tensors[name] = np.full(shape, 0.1, np.float32)
    safetensors.numpy.save_file(tensors, path)
    merged = hf_hub.find(self.folder / "adapter") / hf.WEIGHTS
    found = safetensors.numpy.load_file(merged)["lm_head.weight"]
    # By alpha / rank = 3.
    np.testing.assert_allclose(found, head + 0.06, rtol=1e-5, atol=1e-6)

  @parameterized.parameters(
      (dict(use_dora=True), "adapter_config.json: use_dora=True: must be Fal"),
      (dict(peft_type="IA3"), "peft_type='IA3': must be 'LORA'"),
      (dict(bias="all"), "bias='all'"),
      (dict(modules_to_save=["lm_head"]), "modules_to_save="),
      (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
      (dict(lora_alpha=None), "lora_alpha=None: must be a number"),
      (dict(base_model_name_or_path=None), "base_model_name_or_path=None"),
      (dict(base_model_name_or_path="./no"), "'no': no model is there"),
      (dict(fan_in_fan_out=True), "must be A .rank, in. and B"),
  )
  def test_refuses_what_it_does_not_compute(self, settings, message):
    self.make()
    self.change(**settings)
    with self.assertRaisesRegex(ValueError, f"adapter: .*{message}"):
      hf_hub.find(self.folder / "adapter")

  @parameterized.parameters(
      ("base_model.model.lm_head.modules.weight", "must be lora_A and lora_B"),
      ("base_model.model.model.no.lora_A.weight", "the base has no model.no"),
      ("base_model.model.lm_head.lora_A.weight", "factors of lm_head.weight"),
      (
          "base_model.model.lm_head.base_layer.weight",
          "differs from the base's lm_head.weight",
      ),
      (
          "base_model.model.model.embed_tokens.lora_embedding_A",
          "adapters of embeddings are not supported",
      ),
  )
  def test_refuses_other_tensors(self, name, message):
    self.make()
    path = self.folder / "adapter" / adapter_folder.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    tensors[name] = np.ones((2, 2), np.float32)
    safetensors.numpy.save_file(tensors, path)
    with self.assertRaisesRegex(ValueError, message):
      hf_hub.find(self.folder / "adapter")

  def test_names_targets_without_matrix_in_folder(self):
    for family in ("gpt2", "gpt_neox"):
      with self.assertRaisesRegex(ValueError, f"config.lora.targets.*{family}"):
        self.make(family=family, num_kv_heads=4)

  @parameterized.parameters(
      *_FAMILIES, dict(tiny_model.BOTH, targets="q,gate,up,down")
  )
  @absltest.skipIf(peft is None, "peft or torch is not installed")
  def test_peft_loads_what_is_written(self, **family):
    model, _, merged = self.make(**family)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder / "base"
    )
    loaded = peft.PeftModel.from_pretrained(base, self.folder / "adapter")
    with torch.no_grad():
      found = loaded(torch.tensor(_TOKENS)).logits.log_softmax(-1).numpy()
    expected = jax.nn.log_softmax(_logits(model, merged))
    np.testing.assert_allclose(found, expected, atol=1e-4)

  @parameterized.parameters(
      ("all", "all-linear", tiny_model.STATES),
      # For experts peft has another format.
      (
          "q,o,in_qkvz,in_ba,out",
          ["q_proj", "in_proj_qkvz", "in_proj_ba", "shared_expert_gate"],
          tiny_model.SPARSE,
      ),
  )
  @absltest.skipIf(peft is None, "peft or torch is not installed")
  @pytest.mark.slow
  def test_delta_nets_have_the_adapters_of_peft(self, ours, theirs, family):
    model, _, merged = self.make(ours, **family)
    load = transformers.AutoModelForCausalLM.from_pretrained
    logprobs = lambda theirs: (
        theirs(torch.tensor(_TOKENS)).logits.log_softmax(-1).detach().numpy()
    )
    loaded = peft.PeftModel.from_pretrained(
        load(self.folder / "base"), self.folder / "adapter"
    )
    own = lambda params: jax.nn.log_softmax(_logits(model, params))
    np.testing.assert_allclose(logprobs(loaded), own(merged), atol=1e-4)
    params = hf.load(self.folder / "adapter")[1]
    chex.assert_trees_all_close(params, merged, rtol=1e-6, atol=1e-7)
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=3, init_lora_weights=False, target_modules=theirs,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    loaded = peft.get_peft_model(load(self.folder / "base"), settings)
    loaded.save_pretrained(self.folder / "theirs")
    names = safetensors.numpy.load_file(
        self.folder / "theirs" / adapter_folder.WEIGHTS
    )
    self.assertTrue(any("linear_attn.in_proj" in name for name in names))
    params = hf.load(self.folder / "theirs")[1]
    np.testing.assert_allclose(logprobs(loaded), own(params), atol=1e-4)
    self.assertGreater(np.abs(own(params) - own(merged)).max(), 0.01)

  @parameterized.product(
      family=("llama", "gpt2", "gpt_neox"), use_rslora=(False, True)
  )
  @absltest.skipIf(peft is None, "peft or torch is not installed")
  @pytest.mark.slow
  def test_loads_what_peft_writes(self, family, use_rslora):
    heads = {} if family == "llama" else dict(num_kv_heads=4)
    model = tiny_model.make_model(family=family, **heads)
    params = tiny_model.init_params(model)
    hf.save(self.folder / "base", model.config, params)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder / "base"
    )
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=use_rslora,
        init_lora_weights=False,
        target_modules="all-linear",
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    loaded = peft.get_peft_model(base, settings)
    loaded.save_pretrained(self.folder / "adapter")
    with torch.no_grad():
      found = loaded(torch.tensor(_TOKENS)).logits.log_softmax(-1).numpy()
    _, params = hf.load(self.folder / "adapter")
    expected = jax.nn.log_softmax(_logits(model, params))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    plain = hf.load(self.folder / "base")[1]
    self.assertGreater(np.abs(_logits(model, plain) - found).max(), 0.01)

  @parameterized.parameters(False, True)
  @absltest.skipIf(peft is None, "peft or torch is not installed")
  @pytest.mark.slow
  def test_loads_what_peft_writes_of_a_multimodal_base(self, is_part):
    base = torch_models.multimodal("gemma3_text")
    base.save_pretrained(self.folder / "base")
    if is_part:
      base = torch_models.make("gemma3_text")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=3,
        init_lora_weights=False,
        # With those of a vision tower.
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    loaded = peft.get_peft_model(base, settings)
    loaded.peft_config["default"].base_model_name_or_path = str(
        self.folder / "base"
    )
    loaded.save_pretrained(self.folder / "adapter")
    found = torch_models.logits(loaded, _TOKENS, np.ones_like(_TOKENS))
    shape, params = hf.load(self.folder / "adapter")
    expected = _logits(transformer.make_model(shape), params)
    np.testing.assert_allclose(found, expected, atol=1e-4)

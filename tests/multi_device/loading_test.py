# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder on eight devices: what is read of it, and what is sampled from it.

Runs in a process of its own, for its XLA flag.
"""

import contextlib
import io
import json
import math
import pathlib
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np

from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import model_source
from tba_jax.mesh import sharding
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_files
from tba_jax.models.net import transformer
from tba_jax.programs import generate as programs_generate
from tba_jax.sampling import decode
from tests.models import cases
from tests.support import cpu_devices
from tests.support import tiny_model

configs_generate = variants.import_config("configs/generate.py")

cpu_devices.make(8)

jax.config.update("jax_numpy_rank_promotion", "raise")


def setUpModule():
  cpu_devices.skip_without(8)


def _make_folder(path: pathlib.Path):
  words = [str(n) for n in range(10)] + ["+", "=", "-"]
  tokenizer = tokenizer_lib.word_level(words, r"\d|.")
  model = tiny_model.make_model(vocab_size=tokenizer.vocab_size, num_kv_heads=4)
  # Large logits, so that rounding does not change the samples.
  params = jax.tree.map(lambda x: 3 * x, tiny_model.init_params(model))
  hf.save(path, model.config, params, tokenizer, max_file_bytes=4000)
  return model, params


class LoadingTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.folder = self.directory / "model"
    self.model, self.params = _make_folder(self.folder)

  @parameterized.parameters((1, 2, 4), (2, 2, 2), (8, 1, 1))
  def test_each_entry_is_read_once(self, data, fsdp, tensor):
    mesh = sharding.make_mesh(
        dict(data=data, fsdp=fsdp, sequence=1, tensor=tensor)
    )
    shardings = sharding.param_shardings(mesh, self.model)
    read, whole = [], hf_files.WeightFiles.read

    def count(files, name, index):
      read.append(whole(files, name, index))
      return read[-1]

    with mock.patch.object(hf_files.WeightFiles, "read", count):
      _, params = hf.load(self.folder, shardings=shardings)
    chex.assert_trees_all_equal(params, self.params)
    jax.tree.map(
        lambda x, s: self.assertEqual(x.sharding, s), params, shardings
    )
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(self.params)]
    self.assertEqual(sum(x.size for x in read), sum(sizes))
    if tensor > 1:  # Nothing was read whole that the devices share out.
      self.assertLess(max(x.size for x in read), max(sizes) // 2)

  def test_experts_in_mxfp4_are_read_in_parts(self):
    """Each device has a quarter of a block along the width."""
    folder = self.directory / "mxfp4"
    cases.write_mxfp4(folder)
    config, expected = hf.load(folder)
    mesh = sharding.make_mesh(dict(data=1, fsdp=4, sequence=1, tensor=2))
    shardings = sharding.param_shardings(mesh, transformer.make_model(config))
    _, params = hf.load(folder, shardings=shardings)
    chex.assert_trees_all_equal(params, expected)
    sizes = {
        name: params["blocks"]["mlp"][name].addressable_shards[0].data.shape
        for name in ("gate", "down", "down_bias")
    }
    self.assertEqual(
        sizes,
        {"gate": (3, 4, 64, 8), "down": (3, 4, 8, 64), "down_bias": (3, 4, 8)},
    )

  @parameterized.parameters(0.0, 1.0)
  def test_generate_gives_tokens_of_one_device(self, temperature):
    source = self.directory / "in.jsonl"
    prompts = [f"{n}+{n + 1}=" for n in range(6)] + ["1", "12-3"]
    source.write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in prompts)
    )
    actual = {}
    for name, mesh in (
        ("one", dict(data=1, tensor=1)),
        ("eight", dict(data=2, tensor=4)),
        ("data", dict(data=8, tensor=1)),
    ):
      config = configs_generate.get_config("smoke")
      config.mesh.update(mesh)
      config.generate.model = str(self.folder)
      config.generate.input = str(source)
      config.generate.output = str(self.directory / f"{name}.jsonl")
      config.generate.num_completions = 3
      config.generate.batch_lines = 8
      config.sampling.temperature = temperature
      config.sampling.max_prompt_tokens = 6
      config.sampling.max_completion_tokens = 12
      validate.validate(config, program="generate")
      with contextlib.redirect_stderr(io.StringIO()) as stderr:
        self.assertEqual(
            programs_generate.run_generate(config, None, []),
            0,
            stderr.getvalue(),
        )
      text = pathlib.Path(config.generate.output).read_text()
      actual[name] = [
          (completion["token_ids"], completion["logprobs"])
          for line in text.splitlines()
          for completion in json.loads(line)["completions"]
      ]
      loaded = model_source.of_config(config).params
      devices = jax.tree.leaves(loaded)[0].sharding.device_set
      self.assertLen(devices, math.prod(mesh.values()))
    self.assertLen(actual["one"], 3 * len(prompts))
    for name in ("eight", "data"):
      for (tokens, logprobs), (expected, expected_logprobs) in zip(
          actual[name], actual["one"], strict=True
      ):
        self.assertEqual(tokens, expected)
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)

  def test_score_gives_logprobs_of_one_device(self):
    source = self.directory / "in.jsonl"
    source.write_text(
        "".join(
            json.dumps({"prompt": f"{n}+1=", "completion": f"{n}-{n}"}) + "\n"
            for n in range(10)
        )
    )
    result = {}
    for name, mesh in (
        ("one", dict(data=1, fsdp=1, tensor=1)),
        ("rows", dict(data=2, fsdp=2, tensor=2)),
    ):
      config = configs_generate.get_config("smoke")
      config.mesh.update(mesh)
      config.generate.model = str(self.folder)
      config.generate.input = str(source)
      config.generate.output = str(self.directory / f"{name}.jsonl")
      config.generate.batch_lines = 8
      config.sampling.max_prompt_tokens = 6
      config.sampling.max_completion_tokens = 12
      with contextlib.redirect_stderr(io.StringIO()) as stderr:
        self.assertEqual(
            programs_generate.run_score(config, None, []), 0, stderr.getvalue()
        )
      text = pathlib.Path(config.generate.output).read_text()
      result[name] = [json.loads(line) for line in text.splitlines()]
    self.assertLen(result["one"], 10)
    for one, rows in zip(result["one"], result["rows"], strict=True):
      self.assertEqual(one["token_ids"], rows["token_ids"])
      np.testing.assert_allclose(one["logprobs"], rows["logprobs"], atol=1e-4)

  @parameterized.parameters((16, 2, 2, 4), (6, 4, 2, 6))
  def test_rows_are_split_over_batch_axes(self, rows, data, fsdp, each):
    mesh = sharding.make_mesh(
        dict(data=data, fsdp=fsdp, sequence=1, tensor=8 // data // fsdp)
    )
    shardings = sharding.param_shardings(mesh, self.model)
    make = lambda: decode.JaxSampler(
        self.model,
        decode.Settings(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_prompt_tokens=4,
            max_completion_tokens=6,
            num_rows=rows,
            chunk_steps=2,
            stop_ids=(1,),
            pad_id=0,
            seed=0,
        ),
    )
    asked = [
        decode.Request(np.arange(2, 6, dtype=np.int32), i, 0, num_completions=4)
        for i in range(7)
    ]
    placed = jax.device_put(self.params, shardings)
    sampler = make()
    actual = sampler.sample(placed, asked, version=0)
    expected = make().sample(self.params, asked, version=0)
    for one, other in zip(actual, expected, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    programs = sampler.programs(sampler.put(placed))
    for leaf in jax.tree.leaves(programs.empty_state()):
      self.assertEqual(leaf.sharding.shard_shape(leaf.shape)[0], each)

  def test_indivisible_axis_is_named(self):
    mesh = sharding.make_mesh(dict(data=1, fsdp=1, sequence=1, tensor=8))
    with self.assertRaisesRegex(ValueError, "kernel: .*mesh axis tensor of"):
      model_source.load(
          *("generate.model", str(self.folder)),
          bos="auto",
          dtype=None,
          mesh=mesh,
      )

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exports of served models, whose folders compute what the server does."""

import json
import pathlib

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import adapter_folder
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tests.support import serving_case
from tests.support import tiny_model

_IDS = [3, 9, 4, 7, 5, 6, 8]
_DATA = [serving_case.datum(_IDS)]


class ExportsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def start(self, **family):
    """Starts a server of a model in a folder."""
    net = tiny_model.make_model(**family)
    self.base = tiny_model.init_params(net)
    tokenizer = tokenizer_lib.word_level([*"abcdefghijklm"], ".")
    hf.save(self.workdir / "base", net.config, self.base, tokenizer)
    self.server = serving_case.HttpServer(
        str(self.workdir), init=str(self.workdir / "base")
    )
    self.addCleanup(self.server.close)
    _, self.session = self.ask("create_session", {})

  def ask(self, path, body):
    return self.server.ask(f"api/v1/{path}", body)

  def create(self, number, base=None, **lora):
    """Returns the body of requests to a new model."""
    _, made = self.ask(
        "create_model",
        {
            **self.session,
            "model_seq_id": number,
            "base_model": str(base or self.workdir / "base"),
            "lora_config": {"rank": 2, "seed": 3, **lora},
        },
    )
    return {"model_id": made["model_id"]}

  def export(self, model):
    """Returns the folder of a model's export."""
    result = self.server.result(
        self.ask("save_weights_external", {**model, "path": "out"})
    )
    return self.server.engine.weights.place(result["path"])[1]

  def read(self, folder):
    """Returns a folder's params and its log-probs of `_IDS`."""
    config, params = hf.load(folder)
    ids = np.array([_IDS])
    net = transformer.make_model(config, remat="none")
    logits = net.logits(params, ids, np.ones_like(ids))
    result = logprobs_lib.token_logprobs(
        logits[:, :-1], ids[:, 1:], temperature=1.0
    )
    return params, np.asarray(result[0])

  def train(self, model):
    """Takes a step; returns what a forward pass then tells."""
    asked = {"data": _DATA, "loss_fn": "cross_entropy"}
    for path, body in (
        ("forward_backward", {"forward_backward_input": asked}),
        ("optim_step", {"adam_params": {"learning_rate": 0.1}}),
    ):
      self.server.result(self.ask(path, {**model, **body}))
    return self.server.result(
        self.ask("forward", {**model, "forward_input": asked})
    )

  def check(self, folder, told):
    """Returns the params of a whole model that tells the same log-probs."""
    self.assertFalse((folder / adapter_folder.CONFIG).exists())
    params, result = self.read(folder)
    np.testing.assert_allclose(
        result, told["loss_fn_outputs"][0]["logprobs"]["data"], atol=1e-4
    )
    return params

  @pytest.mark.slow
  def test_merges_adapters_without_peft_format(self):
    # GPT-2's matrices are joint and transposed.
    self.start(family="gpt2", num_kv_heads=4)
    model = self.create(0)
    told = self.train(model)
    self.check(self.export(model), told)

  @pytest.mark.slow
  def test_adapters_on_adapted_base_are_merged(self):
    self.start()
    folder = self.export(self.create(0))
    self.assertTrue(adapter_folder.is_adapter(folder))
    self.server.close()
    self.server = serving_case.HttpServer(
        str(self.workdir / "next"), init=str(folder)
    )
    self.addCleanup(self.server.close)
    _, self.session = self.ask("create_session", {})
    model = self.create(0, base=folder)
    told = self.train(model)
    self.check(self.export(model), told)

  @pytest.mark.slow
  def test_adapters_of_experts_are_merged_and_others_are_not(self):
    self.start(family="qwen3_moe", num_experts=4, experts_per_token=2)
    model = self.create(0, train_attn=False)
    told = self.train(model)
    folder = self.export(model)
    params = self.check(folder, told)
    moved = {
        path[1].key
        for (path, new), old in zip(
            jax.tree_util.tree_leaves_with_path(params["blocks"]),
            jax.tree.leaves(self.base["blocks"]),
            strict=True,
        )
        if (np.asarray(new) != np.asarray(old)).any()
    }
    self.assertEqual(moved, {"gate", "up", "down"})

    # Those of attention alone are a folder for peft.
    folder = self.export(self.create(1, train_mlp=False))
    settings = json.loads((folder / adapter_folder.CONFIG).read_text())
    self.assertCountEqual(
        settings["target_modules"], ["q_proj", "k_proj", "v_proj", "o_proj"]
    )

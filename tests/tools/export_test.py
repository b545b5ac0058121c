# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The export program, and where a model may come from."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import tempfile
import threading
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import checkpoint
from tba_jax.learning import model_source
from tba_jax.learning import train_step
from tba_jax.mesh import sharding
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.programs import sft
from tba_jax.run import run_directory
from tba_jax.tools import export
from tests.support import hub_cache
from tests.support import tiny_model

arithmetic = variants.import_config("configs/arithmetic.py")


def make_run(workdir: str, config=None):
  """Makes a run with checkpoints 3 and 5; returns its config and params."""
  if config is None:
    config = arithmetic.get_config("smoke")
    config.init = "scratch"
  run_directory.create(workdir, config)
  policy = policy_lib.make_policy(config, workdir)
  mesh = sharding.make_mesh(config.mesh)
  checkpointer = checkpoint.Checkpointer(f"{workdir}/checkpoints", keep=2)
  made = {}
  for step in (3, 5):
    made[step] = tiny_model.init_params(policy.model, seed=step)
    state = train_step.init_state(
        config, policy.model, jax.tree.map(jnp.copy, made[step]), mesh
    )
    state = train_step.TrainState(**{**vars(state), "step": state.step + step})
    checkpointer.save(step, state, {"any": 1})
  checkpointer.close()
  return config, made


class ExportTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.workdir = str(cls.directory / "run")
    cls.config, cls.params = make_run(cls.workdir)

  def run_quietly(self, operands, **changes):
    config = self.config.copy_and_resolve_references()
    for name, value in changes.items():
      config.export[name] = value
    with contextlib.redirect_stderr(io.StringIO()) as self.stderr:
      with contextlib.redirect_stdout(io.StringIO()):
        return export.run_export(config, self.workdir, operands)

  def assert_same(self, found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)

  @parameterized.parameters((["3"], 3), (["5"], 5), ([], 5))
  def test_round_trip_is_bit_exact(self, step, expected):
    folder = str(self.directory / f"model-{len(step)}-{expected}")
    self.assertEqual(self.run_quietly([*step, folder]), 0, self.stderr)
    shape, params = hf.load(folder)
    self.assertEqual(shape.param_dtype, "float32")
    self.assert_same(params, self.params[expected])
    again = model_source.load("any", folder, bos="auto", dtype=None)
    self.assert_same(again.params, self.params[expected])
    self.assertEqual(again.tokenizer.encode("1+2"), [4, 13, 5])

  def test_writes_to_workdir_without_folder(self):
    self.assertEqual(self.run_quietly([]), 0)
    folder = pathlib.Path(self.workdir) / "export"
    generation = json.loads((folder / "generation_config.json").read_text())
    self.assertEqual(generation["eos_token_id"], 1)
    # A second time: the model that was there is replaced.
    self.assertEqual(self.run_quietly(["3"]), 0)
    self.assert_same(hf.load(folder)[1], self.params[3])

  def test_task_data_may_be_missing(self):
    folder = str(self.directory / "start")
    self.assertEqual(self.run_quietly([folder]), 0)
    config = self.config.copy_and_resolve_references()
    with config.unlocked():
      config.init = folder
      config.task = {
          "name": "custom",
          "train": "gone.jsonl",
          "test": "gone.jsonl",
      }
    validate.validate(load.apply_overrides(config, ()), program="export")
    self.config, before = config, self.config
    self.assertEqual(self.run_quietly(["3", folder]), 0, self.stderr)
    self.config = before
    self.assert_same(hf.load(folder)[1], self.params[3])

  def test_flipped_bit_in_checkpoint_is_refused(self):
    workdir = str(self.directory / "damaged")
    shutil.copytree(self.workdir, workdir)
    files = pathlib.Path(workdir, "checkpoints", "5").rglob("*")
    path = max(
        (f for f in files if f.is_file()), key=lambda f: f.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    self.workdir, before = workdir, self.workdir
    self.assertEqual(self.run_quietly(["5", str(self.directory / "no")]), 2)
    self.workdir = before
    self.assertIn("step 5", self.stderr.getvalue())
    self.assertFalse((self.directory / "no").exists())

  def test_writes_bfloat16(self):
    folder = str(self.directory / "half")
    self.assertEqual(self.run_quietly([folder], dtype="bfloat16"), 0)
    shape, params = hf.load(folder)
    self.assertEqual(shape.param_dtype, "bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), self.params[5])
    self.assert_same(params, half)

  def test_wrong_operands_are_named(self):
    (self.directory / "full").mkdir()
    (self.directory / "full" / "precious").touch()
    for operands, message in (
        (["4", "x"], "no checkpoint 4"),
        (["3", "5"], "operands 3 5"),
        (["a", "b"], "operands a b"),
        ([str(self.directory / "full")], "precious"),
    ):
      self.assertEqual(self.run_quietly(operands), 2)
      self.assertIn(message, self.stderr.getvalue())
    os.close(run_directory.lock(self.workdir))

  def test_adapters_of_multimodal_base_are_refused(self):
    folder = self.directory / "multimodal"
    folder.mkdir()
    settings = {"model_type": "gemma3", "text_config": {}}
    (folder / "config.json").write_text(json.dumps(settings))
    made = mock.Mock(folder=folder), {}, "step 5"
    with mock.patch.object(
        model_source, "adapters_of_checkpoint", return_value=made
    ):
      result = self.run_quietly([str(self.directory / "no")], adapter=True)
    self.assertEqual(result, 2)
    self.assertIn("multimodal", self.stderr.getvalue())

  def test_refuses_running_run(self):
    lock = run_directory.lock(self.workdir)
    self.addCleanup(os.close, lock)
    self.assertEqual(self.run_quietly([str(self.directory / "no")]), 2)
    self.assertIn("already runs there", self.stderr.getvalue())

  @parameterized.parameters(("", 5), ("/checkpoints/3", 3))
  def test_run_is_source(self, suffix, step):
    source = model_source.load(
        "any", self.workdir + suffix, bos="auto", dtype=None
    )
    self.assert_same(source.params, self.params[step])
    self.assertEqual(source.name, f"{self.workdir}/checkpoints/{step}")

  @pytest.mark.slow
  def test_exports_model_of_hub_s_cache(self):
    folder = self.directory / "published"
    self.assertEqual(self.run_quietly([str(folder)]), 0)
    snapshot = hub_cache.add(hub_cache.make(self), "org/tiny", folder)
    source = model_source.load("any", "org/tiny", bos="auto", dtype=None)
    self.assert_same(source.params, self.params[5])
    # Its name has the commit, so that an output is not continued with another.
    self.assertEqual(source.name, str(snapshot))
    # A run that starts from it trains and is exported.
    config = self.config.copy_and_resolve_references()
    config.sft.init = "org/tiny"
    config.sft.num_steps, config.sft.warmup_steps = 1, 0
    workdir = str(self.directory / "of_hub")
    validate.validate(config, program="sft")
    sft.run(config, workdir, stop=threading.Event())
    config.init = "org/tiny"
    validate.validate(config)
    policy = policy_lib.make_policy(config, workdir)
    self.assert_same(
        policy_lib.initial_params(policy, config.seed), self.params[5]
    )
    make_run(workdir, config)
    self.assertEqual(export.run_export(config, workdir, []), 0)

  def test_refuses_paths_without_source(self):
    for path, message in (
        (f"{self.workdir}/none", "generate.model=.*none'.*no such folder"),
        (f"{self.workdir}/checkpoints/4", "no such folder"),
        (str(self.directory), "config.json: there is no such file"),
    ):
      with self.assertRaisesRegex((ValueError, OSError), message):
        model_source.load("generate.model", path, bos="auto", dtype=None)

  def test_refuses_tokenizer_larger_than_model(self):
    folder = self.directory / "narrow"
    source = model_source.load("any", self.workdir, bos="auto", dtype=None)
    model = tiny_model.make_model(vocab_size=7)
    hf.save(
        folder, model.config, tiny_model.init_params(model), source.tokenizer
    )
    size = source.tokenizer.vocab_size
    with self.assertRaisesRegex(
        ValueError,
        rf"config.generate.model=.*narrow'.* 7 entries, the tokenizer {size}",
    ):
      model_source.load("generate.model", str(folder), bos="auto", dtype=None)

  def test_ends_of_text_survive_round_trip(self):
    folder = str(self.directory / "ends")
    self.assertEqual(self.run_quietly([folder]), 0)
    path = pathlib.Path(folder) / "generation_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "eos_token_id": [1, 6], "top_k": 5}))
    source = model_source.load("any", folder, bos="auto", dtype=None)
    self.assertEqual(source.tokenizer.stop_ids, {1, 6})
    hf.save(folder, source.model.config, source.params, source.tokenizer)
    self.assertEqual(json.loads(path.read_text())["eos_token_id"], [1, 6])
    path.write_text("{")
    with self.assertRaisesRegex(ValueError, "generation_config.json"):
      model_source.load("any", folder, bos="auto", dtype=None)

  def test_transformers_loads_it(self):
    try:
      import torch
      import transformers
    except ImportError:
      self.skipTest("torch is not installed")
    folder = str(self.directory / "parity")
    self.assertEqual(self.run_quietly([folder]), 0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        "1+2=", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
      expected = theirs(tokens).logits.numpy()
    source = model_source.load("any", folder, bos="auto", dtype=None)
    actual = source.model.logits(
        source.params, jnp.asarray(tokens.numpy()), jnp.ones(tokens.shape)
    )
    np.testing.assert_allclose(actual, expected, atol=2e-4)

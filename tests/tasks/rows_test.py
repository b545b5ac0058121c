# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of rows: each kind of source, rows left out, errors."""

import contextlib
import gzip
import io
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections
import pyarrow
from pyarrow import parquet

from tba_jax.config import settings
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import build
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task
from tests.support import fakes
from tests.support import hub_cache


def _table(*prompts: str) -> pyarrow.Table:
  return pyarrow.table({"prompt": list(prompts), "n": range(len(prompts))})


class ReadRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def read(self, source: str):
    found = rows.read_rows("config.task.train", str(self.folder / source))
    return [(row.place, row.fields) for row in found]

  def save(self, folder: pathlib.Path, *shards: pyarrow.Table) -> None:
    """Writes what `save_to_disk` of `datasets` writes, as far as it is read."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}.arrow" for i in range(len(shards))]
    for name, shard in zip(names, shards):
      with pyarrow.ipc.new_stream(str(folder / name), shard.schema) as writer:
        writer.write_table(shard)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))

  def test_jsonl(self):
    (self.folder / "train.jsonl").write_bytes(
        b'{"prompt": "x"}\n\nnot json\n[1]\n\xff\n{"prompt": "\\ud83d"}\n'
        b'{"prompt": "\\ud83d\\ude00"}'
    )
    expected = [("train.jsonl:1", {"prompt": "x"})]
    expected += [(f"train.jsonl:{line}", None) for line in (3, 4, 5, 6)]
    expected += [("train.jsonl:7", {"prompt": "\U0001f600"})]
    self.assertEqual(self.read("train.jsonl"), expected)
    self.assertEqual(self.read("[train]"), expected)
    self.assertEqual(self.read(""), expected)
    packed = self.folder / "test.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "y"}\n'))
    row = ("test.jsonl.gz:1", {"prompt": "y"})
    self.assertEqual(self.read("test.jsonl.gz"), [row])
    self.assertEqual(self.read("[test]"), [row])
    whole = packed.read_bytes()
    flipped = bytes(255 - byte for byte in whole[10:-8])
    for damaged in (whole[:-9], whole[:10] + flipped + whole[-8:]):
      packed.write_bytes(damaged)
      with self.assertRaisesRegex(ValueError, "test.jsonl.gz cannot be read"):
        self.read("[test]")

  def test_a_saved_data_set(self):
    self.save(self.folder / "one", _table("a", "b"), _table("c"))
    self.assertEqual(
        self.read("one"),
        [
            ("data-00000.arrow:1", {"prompt": "a", "n": 0}),
            ("data-00000.arrow:2", {"prompt": "b", "n": 1}),
            ("data-00001.arrow:1", {"prompt": "c", "n": 0}),
        ],
    )
    with self.assertRaisesRegex(ValueError, "has no splits"):
      self.read("one[train]")

  def test_a_damaged_data_set_is_named(self):
    folder = self.folder / "one"
    self.save(folder, _table("a"))
    (folder / "data-00000.arrow").write_bytes(b"")
    with self.assertRaisesRegex(ValueError, "train=.*data-00000.arrow cannot"):
      self.read("one")
    (folder / "state.json").write_text("{}")
    with self.assertRaisesRegex(ValueError, "one cannot.*_data_files"):
      self.read("one")

  def test_a_saved_data_set_with_splits(self):
    self.save(self.folder / "d" / "train", _table("a"))
    self.save(self.folder / "d" / "test", _table("b"))
    (self.folder / "d" / "dataset_dict.json").write_text(
        '{"splits": ["train", "test"]}'
    )
    self.assertEqual(
        self.read("d[test]"),
        [("test/data-00000.arrow:1", {"prompt": "b", "n": 0})],
    )
    with self.assertRaisesRegex(ValueError, r"one of \['train', 'test'\]"):
      self.read("d")

  @parameterized.parameters(
      "{}.parquet",
      "data/{}-00000-of-00001.parquet",
      "data/{}-00000-of-00001-a1b2c3d4e5f60718.parquet",
      "default/{}/0000.parquet",
      "default/partial-{}/0000.parquet",
  )
  def test_parquet_as_the_hub_names_it(self, name):
    for split, prompt in (("train", "a"), ("test", "b")):
      path = self.folder / name.format(split)
      path.parent.mkdir(parents=True, exist_ok=True)
      parquet.write_table(_table(prompt), path)
      row = {"prompt": prompt, "n": 0}
      place = f"{name.format(split)}:1"
      self.assertEqual(self.read(f"[{split}]"), [(place, row)])
      # The file itself.
      self.assertEqual(self.read(name.format(split)), [(f"{path.name}:1", row)])
    with self.assertRaisesRegex(
        ValueError, f"train=.*has no split 'dev'; .* has {name.format('test')}"
    ):
      self.read("[dev]")

  def test_the_only_file_is_the_training_split(self):
    (self.folder / "data").mkdir()
    (self.folder / "data" / "math-17k.jsonl").write_text("{}\n")
    places = [place for place, _ in self.read("[train]")]
    self.assertEqual(places, ["data/math-17k.jsonl:1"])
    with self.assertRaisesRegex(ValueError, "no split 'test'; .*math-17k"):
      self.read("[test]")
    only = self.folder / "data" / "gsm8k_train.jsonl"
    (self.folder / "data" / "math-17k.jsonl").rename(only)
    self.assertLen(self.read("[train]"), 1)
    only.rename(self.folder / "data" / "math_test.jsonl")
    with self.assertRaisesRegex(ValueError, "no split 'train'"):
      self.read("[train]")
    (self.folder / "data" / ".hidden").touch()
    with self.assertRaisesRegex(ValueError, "no such file .* has math_test"):
      self.read("data/math.jsonl")
    with self.assertRaisesRegex(ValueError, "no such file or folder; allowed"):
      rows.find("config.task.train", "")

  @parameterized.parameters(
      (("a/train.jsonl", "train.jsonl", "b/train.parquet"), "train.jsonl:1"),
      (("d/train.parquet", "d/train-1.jsonl"), "d/train.parquet:1"),
      (("d/train-1.jsonl", "d/train-0.jsonl"), "d/train-0.jsonl:1"),
      (("retrain.jsonl", "trainer.jsonl", "x/train_0.jsonl"),
       "x/train_0.jsonl:1"),
  )  # fmt: skip
  def test_a_split_that_is_there_twice_is_read_once(self, names, first):
    for name in names:
      path = self.folder / "m" / name
      path.parent.mkdir(parents=True, exist_ok=True)
      if name.endswith("parquet"):
        parquet.write_table(_table("a"), path)
      else:
        path.write_text('{"prompt": "a", "n": 0}\n')
    found = [place for place, _ in self.read("m[train]")]
    self.assertEqual(found[0], first)
    self.assertLen(found, 2 if "d/train-0.jsonl" in names else 1)

  @parameterized.parameters(
      (("train.jsonl", "train-1.jsonl", "train_2024.jsonl"), ["train.jsonl"]),
      (("train.jsonl", "train-0.parquet"), ["train.jsonl"]),
      (("train-1.jsonl", "train-bad.jsonl"), ["train-1.jsonl"]),
      (("train-10.jsonl", "train-2.jsonl", "train-1.jsonl"),
       ["train-1.jsonl", "train-2.jsonl", "train-10.jsonl"]),
  )  # fmt: skip
  def test_neighbours_are_not_joined_and_shards_have_an_order(
      self, names, read
  ):
    for name in names:
      (self.folder / name).write_text("{}\n")
    places = [place for place, _ in self.read("[train]")]
    self.assertEqual(places, [f"{name}:1" for name in read])

  def test_a_data_set_of_the_hub(self):
    cache = hub_cache.make(self)
    for part in ("main", "other"):
      path = self.folder / "set" / part / "train-00000-of-00001.parquet"
      path.parent.mkdir(parents=True)
      parquet.write_table(_table(part), path)
    hub_cache.add(cache, "org/set", self.folder / "set", kind="dataset")
    read = lambda source: [
        r.fields["prompt"] for r in rows.read_rows("k", source)
    ]
    self.assertEqual(read("org/set"), ["main", "other"])
    self.assertEqual(read("org/set@main/other[train]"), ["other"])
    with self.assertRaisesRegex(ValueError, "k='org/set.dev.': has no split"):
      read("org/set[dev]")
    with self.assertRaisesRegex(
        ValueError, "k='org/none':.*hf download org/none --repo-type dataset "
    ):
      read("org/none")
    for path in ("org/train.jsonl", "data/none", "a/b/train.parquet"):
      with self.assertRaisesRegex(ValueError, "no such file or folder"):
        read(path)

  def test_nothing_there(self):
    (self.folder / "empty").mkdir()
    (self.folder / "a.jsonl").write_text("{}")
    for source in ("nope.jsonl", "empty", "a.jsonl[train]"):
      with self.assertRaisesRegex(
          ValueError, f"config.task.train=.*{source[:5]}"
      ):
        self.read(source)


class _Letters(rows_task.RowsTask):
  name = "letters"

  def _make(self, fields):
    prompt, answer = fields.get("prompt"), fields.get("answer")
    if not prompt:
      return "no_prompt"
    return (prompt, answer) if answer else "no_answer"

  def _shortened(self, example, fits):
    short = example.fields.get("short")
    return short if short and fits(short) else None

  def judge(self, split, index, completion):
    return base.Judgement(float(index), completion, {"index": index})


def _rows(split: str, prompts: str) -> list[rows.Row]:
  return [
      rows.Row(f"{split}:{i}", {"prompt": p, "answer": f"answer {i}"})
      for i, p in enumerate(prompts.split())
  ]


def _letters(*, kwargs=None, **splits) -> _Letters:
  made = {
      split: _rows(split, found) if isinstance(found, str) else found
      for split, found in splits.items()
  }
  return _Letters(made, **kwargs or {})


class RowsTaskTest(parameterized.TestCase):

  def test_what_is_wrong_is_left_out_with_its_place(self):
    fields = [
        {"prompt": "a", "answer": "1"},
        None,
        {"prompt": "", "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "a", "answer": "2"},
        {"prompt": "c", "answer": "3"},
    ] + [None] * 6
    task = _letters(
        train=[rows.Row(f"f:{n}", f) for n, f in enumerate(fields, 1)],
        held_out="z",
    )
    self.assertEqual([task.example("train", i).place for i in range(2)],
                     ["f:1", "f:6"])  # fmt: skip
    self.assertEqual(task.report.read, {"train": 12, "held_out": 1})
    self.assertEqual(task.report.used, {"train": 2, "held_out": 1})
    found = task.report.to_json()["left_out"]["train"]
    self.assertEqual(found["no_prompt"], ["f:3"])
    self.assertEqual(found["no_answer"], ["f:4"])
    self.assertEqual(found["duplicate"], ["f:5"])
    # A line names the first five places.
    (line,) = [line for line in task.report.lines() if "JSON" in line]
    self.assertIn("train: 7 rows left out", line)
    self.assertIn("f:2, f:7, f:8, f:9, f:10, …", line)

  @parameterized.parameters(
      (b"", "has no rows"),
      (b"\x00\xff\x93PK\n\x01", "not a JSON object.*train.jsonl:1"),
      (b'{"question": "a"}\n', r"has no prompt.*fields \['question'\]"),
  )
  def test_a_file_without_a_usable_row_is_the_culprit(self, content, why):
    path = pathlib.Path(self.create_tempdir().full_path) / "train.jsonl"
    path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, f"task.train='{path}'.*{why}"):
      _letters(
          train=rows.Source("config.task.train", str(path)),
          held_out="a",
          kwargs={"validation_prompts": 20},
      )

  def test_splits_that_share_prompts(self):
    test = [rows.Row("t:1", {"prompt": "What  is\nit?", "answer": "1"})]
    mine = [rows.Row("x:1", {"prompt": "what is it?", "answer": "1"})]
    for splits in (
        dict(train=mine, held_out=test),
        dict(train="a", held_out=test, validation=mine),
    ):
      with self.assertRaisesRegex(ValueError, "1 prompts.*: x:1 = t:1"):
        _letters(**splits)
    task = _letters(
        train=mine + _rows("train", "a"),
        held_out=test,
        kwargs={"overlap": "leave_out"},
    )
    self.assertEqual(task.num_prompts("train"), 1)
    self.assertEqual(task.report.places("train", "in_test"), ["x:1"])

  def test_validation_prompts_are_training_prompts(self):
    whole = {p for p in "abcdefghi"}
    make = lambda seed: _letters(
        train=" ".join(sorted(whole)),
        held_out="z",
        kwargs={"validation_prompts": 3, "split_seed": seed},
    )
    prompts = lambda task, split: [
        task.prompt(split, i) for i in range(task.num_prompts(split))
    ]
    task = make(1)
    self.assertEqual(task.splits, ("train", "held_out", "validation"))
    self.assertEqual(
        task.report.used, {"train": 6, "held_out": 1, "validation": 3}
    )
    parts = [set(prompts(task, split)) for split in ("train", "validation")]
    self.assertEqual(parts[0] | parts[1], whole)
    self.assertEqual(
        prompts(task, "validation"), prompts(make(1), "validation")
    )
    self.assertNotEqual(
        prompts(task, "validation"), prompts(make(2), "validation")
    )
    with self.assertRaisesRegex(ValueError, "validation_prompts=1.*up to 0"):
      _letters(train="a", held_out="b", kwargs={"validation_prompts": 1})

  def test_long_prompts_are_dropped_and_indices_have_no_gaps(self):
    task = _letters(train="aaa b cc dddd e", held_out="x yyyy")
    task.drop_long(fakes.Characters(), 2)
    prompts = [task.prompt("train", i) for i in range(3)]
    self.assertEqual(prompts, ["b", "cc", "e"])
    self.assertEqual(
        [task.source_index("train", i) for i in range(3)], [1, 2, 4]
    )
    self.assertEqual(task.reference_completion("train", 0, None), "answer 1")
    self.assertEqual(task.num_prompts("validation"), 0)
    self.assertEqual(
        task.report.places("train", "too_long"), ["train:0", "train:3"]
    )
    self.assertEqual(task.report.used, {"train": 3, "held_out": 1})
    with self.assertRaisesRegex(ValueError, "max_prompt_tokens=0.*'train'"):
      task.drop_long(fakes.Characters(), 0)

  def test_a_task_may_shorten_a_prompt(self):
    row = rows.Row("s:1", {"prompt": "aaa", "answer": "1", "short": "a"})
    task = _letters(train=[row], held_out="x")
    task.drop_long(fakes.Characters(), 1)
    self.assertEqual(task.prompt("train", 0), "a")
    self.assertEqual(task.report.count("train", "too_long"), 0)

  def test_long_answers_of_training_prompts_are_dropped(self):
    row = lambda prompt, answer: rows.Row(
        prompt, {"prompt": prompt, "answer": answer}
    )
    task = _letters(
        train=[row("a", "12"), row("b", "1")], held_out=[row("c", "123")]
    )
    task.drop_long(fakes.Characters(), 1, max_answer_tokens=1)
    self.assertEqual(task.prompt("train", 0), "b")
    self.assertEqual(task.num_prompts("held_out"), 1)
    self.assertEqual(task.report.places("train", "answer_too_long"), ["a"])

  def test_unseen_words_are_a_warning(self):
    task = _letters(train="one two", held_out="answer")
    task.warn_of_unseen_words()
    self.assertEqual(task.report.warnings, [])
    task = _letters(train="one two", held_out="answer three four")
    task.warn_of_unseen_words()
    (line,) = task.report.lines()[2:]
    self.assertIn("2 of 3 held-out rows", line)
    self.assertIn("'four', 'three'", line)


class ReportTest(absltest.TestCase):

  def test_the_report_of_a_run(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    events = []
    for task in (
        _letters(train="a b", held_out="c"),
        build.make_task(ml_collections.ConfigDict({"name": "arithmetic"})),
    ):
      rows.write_report(task, folder, lambda *event: events.append(event))
    lines = ["train: 2 prompts of 2 rows", "held_out: 1 prompts of 1 rows"]
    self.assertEqual(events, [("data", line) for line in lines])
    saved = jsonl.read_json(folder / rows.REPORT_FILE)
    self.assertEqual(saved["used"], {"train": 2, "held_out": 1})

  def test_the_terminal_shows_what_is_too_long_and_what_is_unseen(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    write = lambda name, *words: (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps({"prompt": w, "answer": w}) + "\n" for w in words)
    )
    write("train", "ab", "abcdef")
    write("test", "ba", "xy")
    config = settings.get_config()
    config.task = ml_collections.ConfigDict(
        dict(name="own", train=f"{folder}[train]", test=f"{folder}[test]")
    )
    config.sampling.max_prompt_tokens = 4
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      build.print_data(config)
    self.assertIn("data: train: 1 prompts of 2 rows\n", out.getvalue())
    self.assertIn("max_prompt_tokens: train.jsonl:2\n", out.getvalue())
    self.assertIn("warning: 1 of 2 held-out rows", out.getvalue())
    config.task = ml_collections.ConfigDict({"name": "arithmetic"})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      build.print_data(config)
    self.assertEqual(out.getvalue(), "")


if __name__ == "__main__":
  absltest.main()

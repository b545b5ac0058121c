# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of rows: each kind of source, rows left out, errors."""

import contextlib
import dataclasses
import datetime
import decimal
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
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.policy import prompt_preview
from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task
from tba_jax.tasks import task_table
from tests.support import fakes
from tests.support import two_turns


class ReadRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def read(self, source: str):
    result = rows.read_rows("config.task.train", str(self.folder / source))
    return [(row.place, row.fields) for row in result]

  def test_reads_jsonl(self):
    (self.folder / "train.jsonl").write_bytes(
        b'{"prompt": "x"}\n\nnot json\n[1]\n\xff\n{"prompt": "\\ud83d"}\n'
        b'{"prompt": "\\ud83d\\ude00"}'
    )
    expected = [("train.jsonl:1", {"prompt": "x"})]
    expected += [(f"train.jsonl:{line}", None) for line in (3, 4, 5, 6)]
    expected += [("train.jsonl:7", {"prompt": "\U0001f600"})]
    self.assertEqual(self.read("train.jsonl"), expected)
    self.assertEqual(self.read("[train]"), expected)
    self.assertEqual(self.read(""), expected)  # The folder.
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

  @parameterized.parameters(
      ("[:2]", [1, 2]),
      ("[3:]", [4, 5]),
      ("[1:3]", [2, 3]),
      ("[-2:]", [4, 5]),
      ("[1:-1]", [2, 3, 4]),
      ("[4:99]", [5]),
      ("[9:]", []),
  )
  def test_reads_part_of_rows(self, part, numbers):
    rows = "".join(f'{{"prompt": "{i}"}}\n' for i in range(5))
    (self.folder / "train.jsonl").write_text(rows)
    expected = [(f"train.jsonl:{n}", {"prompt": str(n - 1)}) for n in numbers]
    self.assertEqual(self.read(f"train.jsonl{part}"), expected)
    self.assertEqual(self.read(f"[train]{part}"), expected)
    self.assertEqual(self.read(part), expected)  # The folder.

  @parameterized.parameters("[a:b]", "[1:2:3]", "[:2][train]", "[0.5:]")
  def test_refuses_other_parts(self, part):
    (self.folder / "train.jsonl").write_text('{"prompt": "x"}\n')
    with self.assertRaisesRegex(ValueError, "config.task.train=.*START:STOP"):
      self.read(f"train.jsonl{part}")

  def test_reads_parquet(self):
    file = self.folder / "train.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), file)
    expected = [("train.parquet:1", {"prompt": "a"})]
    expected += [("train.parquet:2", {"prompt": "b"})]
    self.assertEqual(self.read("train.parquet"), expected)
    file.write_bytes(file.read_bytes()[:-20])
    with self.assertRaisesRegex(ValueError, "train=.*train.parquet cannot be"):
      self.read("train.parquet")

  def test_values_of_parquet_become_texts_and_numbers(self):
    columns = {
        "text": ("2+2=é".encode(), "2+2=é"),
        "picture": (b"\xff\xfe", b"\xff\xfe"),
        "texts": ([b"a", b"b"], ["a", "b"]),
        "whole": (decimal.Decimal("6.00"), 6),
        "half": (decimal.Decimal("4.50"), 4.5),
        "long": (
            decimal.Decimal("12345678901234567890.12"),
            "12345678901234567890.12",
        ),
        "large": (2**53 + 1, 2**53 + 1),
        "day": (datetime.date(2024, 1, 2), "2024-01-02"),
        "time": (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02T03:04:00"),
        "right": (True, True),
        "none": (None, None),
        "object": ({"a": [b"b"]}, {"a": ["b"]}),
    }
    table = pyarrow.table({name: [v] for name, (v, _) in columns.items()})
    parquet.write_table(table, self.folder / "train.parquet")
    ((_, fields),) = self.read("train.parquet")
    self.assertEqual(fields, {name: v for name, (_, v) in columns.items()})
    for name, (_, value) in columns.items():
      self.assertIs(type(fields[name]), type(value))

  def test_all_kinds_of_files_read_same(self):
    fields = {
        "prompt": "a",
        "day": "2024-01-02",
        "large": 2**53 + 1,
        "mixed": "x",
        "chat": [{"role": "user", "content": "b"}],
    }
    more = {"prompt": "c", "large": 2**64 - 1, "mixed": 1}
    lines = [json.dumps(f) for f in (fields, more)]
    (self.folder / "a.jsonl").write_text("\n".join(lines))
    (self.folder / "b.json").write_text(f"[{','.join(lines)}]")
    (self.folder / "c.json").write_text("\n".join(lines))
    (self.folder / "d.json.gz").write_bytes(
        gzip.compress(f"\ufeff\n[{','.join(lines)}]".encode())
    )
    for name in ("a.jsonl", "b.json", "c.json", "d.json.gz"):
      rows_read = [row for _, row in self.read(name)]
      self.assertEqual(rows_read, [fields, more])
    parquet.write_table(
        pyarrow.Table.from_pylist([{**fields, "mixed": "x"}]),
        self.folder / "e.parquet",
    )
    self.assertEqual(self.read("e.parquet"), [("e.parquet:1", fields)])

  def test_reads_folder_of_tfds(self):
    # Takes seconds to import.
    import tensorflow_datasets as tfds

    texts = [{"prompt": "é"}, {"prompt": "b"}]

    class Prompts(tfds.core.GeneratorBasedBuilder):
      name, VERSION = "prompts", tfds.core.Version("1.0.0")
      pkg_dir_path = self.folder

      def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {"prompt": tfds.features.Text()}
            ),
            disable_shuffling=True,
        )

      def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": enumerate(texts)}

      def _generate_examples(self):
        raise NotImplementedError

    Prompts(
        data_dir=self.folder, file_format="array_record"
    ).download_and_prepare()
    self.assertEqual(
        self.read("prompts/1.0.0[train]"),
        [(f"prompts[train]:{n}", text) for n, text in enumerate(texts, 1)],
    )
    with self.assertRaisesRegex(ValueError, r"one of \['train'\]"):
      self.read("prompts/1.0.0[dev]")

  def test_reads_file_of_working_directory(self):
    (self.folder / "a.csv").write_text("prompt\nx\n")
    with contextlib.chdir(self.folder):
      (row,) = rows.read_rows("config.task.train", "a.csv")
    self.assertEqual(row.fields, {"prompt": "x"})

  def test_refuses_utf_16(self):
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    (self.folder / "a.jsonl").write_text(text, encoding="utf-16")
    with self.assertRaisesRegex(ValueError, "a.jsonl.*must be UTF-8"):
      self.read("a.jsonl")

  @parameterized.parameters(
      ("a", "a"),
      (12.0, "12"),
      (-0.0, "0"),
      (1.5, "1.5"),
      (2**53 + 1, "9007199254740993"),
      # int() would make other digits of it.
      (12345678901234567890.0, "12345678901234567000"),
      (True, "True"),
      (None, None),
      (float("nan"), None),
  )
  def test_texts_of_values(self, value, text):
    self.assertEqual(rows.as_text("x", value), text)

  @parameterized.parameters(
      ([1], "'x' is a list: must be a text or number"),
      ({"a": 1}, "'x' is an object: .* field of the object, such as x.a"),
      (b"\xff", "'x' is bytes, not UTF-8 text"),
  )
  def test_refuses_non_text(self, value, message):
    with self.assertRaisesRegex(rows.UnusableError, message):
      rows.as_text("x", value)

  def test_names_source_without_files(self):
    (self.folder / "empty").mkdir()
    (self.folder / "a.jsonl").write_text("{}")
    for source in ("nope.jsonl", "empty", "a.jsonl[train]"):
      with self.assertRaisesRegex(
          ValueError, f"config.task.train=.*{source[:5]}"
      ):
        self.read(source)


_ASK, _SAY = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
)


class MessagesTest(parameterized.TestCase):

  @parameterized.parameters(
      ([_ASK, _SAY],),
      (json.dumps([_ASK, _SAY]),),
      ([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],),
      ([{**_ASK, "content": [{"type": "text", "text": "2+2?"}]}, _SAY],),
      ([{**_ASK, "content": ["2+", {"text": "2?"}]}, _SAY],),
      ([_ASK, {**_SAY, "tool_calls": [], "name": None}],),
  )
  def test_reads_usual_forms(self, value):
    self.assertEqual(rows.messages_of("chat", value), [_ASK, _SAY])

  def test_developer_speaks_as_system(self):
    value = [{"role": "developer", "content": "Be short."}, _ASK]
    expected = [{"role": "system", "content": "Be short."}, _ASK]
    self.assertEqual(rows.messages_of("chat", value), expected)

  def test_keeps_other_keys(self):
    value = [{**_ASK, "name": "Ann"}]
    self.assertEqual(rows.messages_of("chat", value), value)

  @parameterized.parameters(
      "text", "[1, 2]", '[{"a": 1}]', "[{", 5, None, ([],)
  )
  def test_non_conversation_is_none(self, value):
    self.assertIsNone(rows.messages_of("chat", value))

  @parameterized.parameters(
      ({"role": "tool", "content": "4"}, "has role 'tool': must be one of"),
      ({"from": "observation", "value": "4"}, "has from 'observation'"),
      ({**_SAY, "tool_calls": [{"function": {}}]}, "calls a tool"),
      ({**_SAY, "function_call": {"name": "f"}}, "calls a tool"),
      ({**_SAY, "content": None}, "has a content of None: must be text"),
      (
          {**_ASK, "content": [{"type": "image_url", "image_url": {}}]},
          "has a content of 'image_url': must be text",
      ),
      ({"content": "4"}, "has from None"),
  )
  def test_refuses_by_message_and_field(self, message, why):
    with self.assertRaisesRegex(
        rows.UnusableError, f"field 'chat', message 2 {why}"
    ):
      rows.messages_of("chat", [_ASK, message])


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
      split: _rows(split, result) if isinstance(result, str) else result
      for split, result in splits.items()
  }
  return _Letters(made, **kwargs or {})


class RowsTaskTest(parameterized.TestCase):

  def test_wrong_rows_are_left_out_with_their_place(self):
    fields = [
        {"prompt": "a", "answer": "1"},
        None,
        {"prompt": "", "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "a", "answer": "1"},
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
    result = task.report.to_json()["left_out"]["train"]
    self.assertEqual(result["no_prompt"], ["f:3"])
    self.assertEqual(result["no_answer"], ["f:4"])
    self.assertEqual(result["duplicate"], ["f:5"])
    # A line names the first five places.
    (line,) = [line for line in task.report.lines() if "JSON" in line]
    self.assertIn("train: 7 rows left out", line)
    self.assertIn("f:2, f:7, f:8, f:9, f:10, …", line)

  @parameterized.parameters(
      (b"", "has no rows"),
      (b"\x00\xff\x93PK\n\x01", "not a JSON object.*train.jsonl:1"),
      (b'{"question": "a"}\n', r"has no prompt.*fields \['question'\]"),
  )
  def test_file_without_usable_row_is_culprit(self, content, why):
    path = pathlib.Path(self.create_tempdir().full_path) / "train.jsonl"
    path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, f"task.train='{path}'.*{why}"):
      _letters(
          train=rows.RowSource("config.task.train", str(path)),
          held_out="a",
          kwargs={"validation_prompts": 20},
      )

  def test_reports_prompts_in_both_splits(self):
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
    make = lambda overlap: _letters(
        train=mine + _rows("train", "a"),
        held_out="z",
        validation=test,
        kwargs={"overlap": overlap},
    )
    with self.assertRaisesRegex(ValueError, "in the validation.*x:1 = t:1"):
      make("error")
    places = make("leave_out").report.places("train", "in_validation")
    self.assertEqual(places, ["x:1"])

  def test_rows_of_one_prompt_are_kept(self):
    fields = [{"prompt": "a", "answer": "1", "test": i // 2} for i in range(6)]
    made = [rows.Row(f"f:{n}", f) for n, f in enumerate(fields, 1)]
    task = _letters(train=made, held_out="z")
    self.assertEqual(task.num_prompts("train"), 3)
    self.assertEqual(
        task.report.places("train", "duplicate"), ["f:2", "f:4", "f:6"]
    )
    fields = [task.example("train", i).fields["test"] for i in range(3)]
    self.assertEqual(fields, [0, 1, 2])

  def test_no_prompt_is_in_training_and_validation(self):
    train = _rows("t", "a A b b c c d d e")
    kwargs = {"validation_prompts": 2}
    task = _letters(train=train, held_out="z", kwargs=kwargs)
    folded = lambda split: {
        task.prompt(split, i).casefold() for i in range(task.num_prompts(split))
    }
    self.assertEqual(task.num_prompts("validation"), 2)
    self.assertEmpty(folded("validation") & folded("train"))
    self.assertLen(folded("validation") | folded("train"), 5)
    used, left_out = task.report.used, task.report.count
    self.assertEqual(used["train"] + 2 + left_out("train", "in_validation"), 9)

  def test_rows_of_one_prompt_may_be_different_problems(self):
    made = _rows("t", "a a a a a")
    with self.assertRaisesRegex(ValueError, "'keep' if rows of one prompt"):
      _letters(train=made, held_out="a")
    kwargs = {"overlap": "keep", "validation_prompts": 2}
    task = _letters(train=made, held_out="a", kwargs=kwargs)
    self.assertEqual(task.num_prompts("train"), 3)
    self.assertEqual(task.num_prompts("validation"), 2)

  def test_unreadable_row_has_reason(self):

    class Task(_Letters):

      def _make(self, fields):
        return rows.as_text("prompt", fields["prompt"]), "1"

    good, bad = ([rows.Row("f:1", {"prompt": p})] for p in ("a", ["b"]))
    why = "f:1: field 'prompt' is a list"
    with self.assertRaisesRegex(ValueError, f"no row can be used; {why}"):
      Task({"train": bad, "held_out": good})
    task = Task({"train": [*bad, rows.Row("f:2", {"prompt": "c"})],
                 "held_out": good})  # fmt: skip
    self.assertEqual(task.report.places("train", "no_text"), ["f:1"])
    self.assertIn(why, task.report.lines()[-1])

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
    with self.assertRaisesRegex(ValueError, "validation_prompts=1.*at most 0"):
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

  def test_task_may_shorten_prompt(self):
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

  def test_counts_rerendered_answers(self):

    class Templated(fakes.Characters):

      def encode_answered(self, prompt, answer):
        result = super().encode_answered(prompt, answer)
        changed = dataclasses.replace(result, num_untrained=2)
        return {"a": None, "b": changed}.get(prompt, result)

    task = _letters(train="a b c", held_out="d")
    task.drop_long(Templated(), 1)
    self.assertEqual(task.num_prompts("train"), 3)
    task.drop_long(Templated(), 1, max_answer_tokens=9)
    self.assertEqual(task.num_prompts("train"), 2)
    self.assertEqual(task.report.places("train", "rerendered"), ["train:0"])
    self.assertStartsWith(task.report.warnings[-1], "warning: 2 of the assist")

  def test_unseen_words_are_warning(self):
    task = _letters(train="one two", held_out="answer")
    task.warn_of_unseen_words()
    self.assertEqual(task.report.warnings, [])
    task = _letters(train="one two", held_out="answer three four")
    task.warn_of_unseen_words()
    (line,) = task.report.lines()[2:]
    self.assertIn("2 of 3 held-out rows", line)
    self.assertIn("'four', 'three'", line)


class ReportTest(absltest.TestCase):

  def test_reports_of_run(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    events = []
    for task in (
        _letters(train="a b", held_out="c"),
        task_table.make_task(ml_collections.ConfigDict({"name": "arithmetic"})),
    ):
      rows.write_report(
          task,
          lambda name, value: jsonl.atomic_write_json(folder / name, value),
          lambda *event: events.append(event),
      )
    lines = ["train: 2 prompts of 2 rows", "held_out: 1 prompts of 1 rows"]
    self.assertEqual(events, [("data", line) for line in lines])
    saved = jsonl.read_json(folder / rows.REPORT_FILE)
    self.assertEqual(saved["used"], {"train": 2, "held_out": 1})

  def test_terminal_shows_overlong_and_unseen_counts(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    write = lambda name, *words: (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps({"prompt": w, "answer": w}) + "\n" for w in words)
    )
    write("train", "ab", "abcdef")
    write("test", "ba", "xy")
    config = settings.get_config()
    config.task = ml_collections.ConfigDict(
        dict(name="custom", train=f"{folder}[train]", test=f"{folder}[test]")
    )
    config.sampling.max_prompt_tokens = 4
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      prompt_preview.print_data(config)
    self.assertIn("data: train: 1 prompts of 2 rows\n", out.getvalue())
    self.assertIn("max_prompt_tokens: train.jsonl:2\n", out.getvalue())
    self.assertIn("warning: 1 of 2 held-out rows", out.getvalue())
    # A pretrained tokenizer shows the first prompt as the model reads it.
    tokenizer = tokenizer_lib.word_level(["a", "b", "[", "]"], ".")
    tokenizer.chat_template = "[{{ messages[0]['content'] }}]"
    tokenizer.save(folder)
    config.tokenizer.source = str(folder)
    for chat, text, ids in ((False, "ab", "3 4"), (True, "[ab]", "5 3 4 6")):
      config.tokenizer.chat = chat
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        prompt_preview.print_data(config, shows_prompt=True, shows_ids=True)
      self.assertIn(f"tokens:\n{text}\nprompt: its ids: {ids}\n",
                    out.getvalue())  # fmt: skip
    # An environment says its prompts itself.
    environment = {
        "name": "environment",
        "source": f"{two_turns.__file__}:TwoTurns",
    }
    for source, fields in (
        ("task", {"name": "arithmetic"}), (str(folder), environment),
    ):  # fmt: skip
      config.tokenizer.source = source
      config.task = ml_collections.ConfigDict(fields)
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        prompt_preview.print_data(config, shows_prompt=True)
      self.assertEqual(out.getvalue(), "")

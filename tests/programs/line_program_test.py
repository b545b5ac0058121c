# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of lines: what is wrong in them, and going on after an end."""

import contextlib
import io
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.programs import generate


class ReadTest(parameterized.TestCase):

  @parameterized.parameters(
      (b'{"a": 1', "not JSON: .*column 8"),
      (b'{"a": "\xff"}', "not UTF-8 from byte 8 on"),
      (b"[1, 2]", "not a JSON object"),
      (b"[" * 100_000, "not JSON"),
      (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
  )
  def test_a_bad_line_does_not_hide_the_others(self, bad, problem):
    path = pathlib.Path(self.create_tempfile().full_path)
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\n' + bad + b'\n{"n": 4}')
    lines = list(generate.read_lines(path))
    self.assertEqual([line.number for line in lines], [1, 3, 4])
    self.assertEqual([lines[0].record, lines[2].record], [{"n": 1}, {"n": 4}])
    self.assertIsNone(lines[1].record)
    self.assertRegex(lines[1].problem, problem)


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.source = self.folder / "in.jsonl"
    self.target = self.folder / "made" / "out.jsonl"
    self.write([json.dumps({"n": n}) for n in range(7)])
    self.batches = []
    self.end_after = None

  def write(self, lines):
    self.source.write_text("\n".join(lines) + "\n")

  def run_all(self, **settings):
    def prepare(line):
      if line.record["n"] < 0:
        raise ValueError("below 0")
      return line.record["n"]

    def answer(numbers):
      if self.end_after is not None and len(self.batches) == self.end_after:
        raise KeyboardInterrupt
      self.batches.append(numbers)
      return [{"square": n * n} for n in numbers]

    self.stderr = io.StringIO()
    with contextlib.redirect_stderr(self.stderr):
      return generate.run_lines(
          str(self.source),
          str(self.target),
          settings or {"model": "m"},
          prepare=prepare,
          answer=answer,
          batch_lines=2,
      )

  def found(self):
    return self.target.read_bytes()

  def test_answers_stand_in_order_with_their_lines(self):
    self.write(['{"n": 2}', "", '{"n": -1}', "no", '{"n": 5}'])
    counts = self.run_all()
    self.assertEqual(counts, generate.Counts(before=0, done=2, bad=2))
    self.assertEqual(
        [json.loads(line) for line in self.found().splitlines()],
        [{"line": 1, "square": 4}, {"line": 5, "square": 25}],
    )
    printed = self.stderr.getvalue()
    self.assertIn(f"{self.source}:3: below 0\n", printed)
    self.assertIn(f"{self.source}:4: not JSON", printed)

  def test_goes_on_after_any_byte(self):
    self.run_all()
    whole = self.found()
    for size in (1, 18, len(whole) // 2, len(whole) - 1, len(whole)):
      self.target.write_bytes(whole[:size])
      self.batches.clear()
      counts = self.run_all()
      self.assertEqual(self.found(), whole)
      done = whole[:size].count(b"\n")
      self.assertEqual((counts.before, counts.done), (done, 7 - done))
      self.assertEqual(sum(self.batches, []), list(range(done, 7)))

  def test_each_batch_is_on_disk_before_the_next(self):
    self.end_after = 2
    with self.assertRaises(KeyboardInterrupt):
      self.run_all()
    self.assertEqual(self.found().count(b"\n"), 4)

  def test_other_settings_do_not_go_on(self):
    self.run_all(model="m", temperature=1.0)
    before = self.found()
    with self.assertRaisesRegex(ValueError, "temperature = 1.0, now it is 0.5"):
      self.run_all(model="m", temperature=0.5)
    self.source.write_text('{"n": 1}\n')
    with self.assertRaisesRegex(ValueError, "begun with input_sha256"):
      self.run_all(model="m", temperature=1.0)
    self.assertEqual(self.found(), before)

  def test_the_file_of_another_program_is_kept(self):
    self.target.parent.mkdir()
    self.target.write_text("precious\n")
    with self.assertRaisesRegex(ValueError, "out.jsonl: it is there already"):
      self.run_all()
    self.assertEqual(self.found(), b"precious\n")

  def test_a_line_that_was_not_written_here_is_named(self):
    self.run_all()
    with self.target.open("ab") as file:
      file.write(b"{}\n")
    with self.assertRaisesRegex(ValueError, "out.jsonl:8: not a line"):
      self.run_all()

  def test_one_process_writes(self):
    self.run_all()
    with contextlib.closing(
        generate.Output(
            self.target,
            {
                "model": "m",
                "input_sha256": generate.digest_lines(self.source)[0],
            },
        )
    ):
      with self.assertRaisesRegex(ValueError, "another process is writing"):
        self.run_all()

  def test_exit_status(self):
    def fail(error):
      raise error

    for work, status, message in (
        (lambda: generate.Counts(0, 3, 0), 0, "3 lines done, 0 could"),
        (lambda: generate.Counts(2, 3, 1), 1, "2 were done before, 1"),
        (lambda: fail(ValueError("wrong x")), 2, "error: wrong x"),
        (lambda: fail(FileNotFoundError("no y")), 2, "error: no y"),
        (lambda: fail(KeyboardInterrupt()), 75, "the same command goes on"),
    ):
      stderr = io.StringIO()
      with contextlib.redirect_stderr(stderr):
        self.assertEqual(generate.finish_lines(work), status)
      self.assertIn(message, stderr.getvalue())


if __name__ == "__main__":
  absltest.main()

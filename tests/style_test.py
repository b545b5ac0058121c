# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The house rules that a program can check and the linter does not."""

import ast
import pathlib
import statistics

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parent.parent
_HEADER = [
    "# Copyright 2026 The tba_jax Authors.",
    "# SPDX-License-Identifier: Apache-2.0",
]
_SETTINGS = "configs/common.py"
_LISTS = (
    "configs/common.py:get_config",
    "configs/common_rewards.py:get_config",
)
_MAX_SETTINGS = 600
_MAX_FILE = 350
_MAX_FUNCTION = 60
# Loops that read downwards in acts; each may have 120 lines.
_LOOPS = {
    "tba_jax/offline_training.py:train",
    "tba_jax/searcher.py:run",
    "tba_jax/supervise.py:run",
    "tba_jax/trainer.py:run",
}
_MAX_LOOP = 120
_MIN_TEST_LINES_PER_LINE = 0.6


def _files(*folders: str) -> list[pathlib.Path]:
  return [p for f in folders for p in sorted((_ROOT / f).rglob("*.py"))]


def _count(path: pathlib.Path) -> int:
  return len(path.read_text().splitlines())


def _label(path: pathlib.Path) -> str:
  return str(path.relative_to(_ROOT))


def _length(function: ast.FunctionDef) -> int:
  """Lines of a function without its docstring."""
  length = function.end_lineno - function.lineno + 1
  first = function.body[0]
  if ast.get_docstring(function) is not None:
    length -= first.end_lineno - first.lineno + 1
  return length


class StyleTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.code = _files("tba_jax", "configs")
    self.tests = _files("tests")

  def test_header(self):
    shell = [p for p in _ROOT.glob("*/*.sh")] + [_ROOT / ".ci" / "run"]
    for path in [*self.code, *self.tests, _ROOT / "setup.py", *shell]:
      lines = path.read_text().splitlines()
      # Below `#!` or the linter's line of a shell script.
      start = 0 if path.suffix == ".py" else 1
      self.assertEqual(lines[start : start + 2], _HEADER, _label(path))

  def test_files_are_short(self):
    for path in [*self.code, *self.tests]:
      # One file lists every setting, so that a reader finds it there.
      most = _MAX_SETTINGS if _label(path) == _SETTINGS else _MAX_FILE
      self.assertLessEqual(_count(path), most, _label(path))
    lengths = [_count(p) for p in self.code if p.name != "__init__.py"]
    self.assertLessEqual(statistics.median(lengths), 200)

  def test_functions_are_short(self):
    for path in self.code:
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
          label = f"{_label(path)}:{node.name}"
          limit = _MAX_LOOP if label in _LOOPS else _MAX_FUNCTION
          if label in _LISTS:
            continue  # Settings, one after the other.
          self.assertLessEqual(_length(node), limit, label)

  def test_no_assert_and_no_bare_except(self):
    for path in self.code:
      for node in ast.walk(ast.parse(path.read_text())):
        where = f"{_label(path)}:{getattr(node, 'lineno', 0)}"
        self.assertNotIsInstance(node, ast.Assert, where)
        if isinstance(node, ast.ExceptHandler):
          self.assertIsNotNone(node.type, where)

  def test_public_functions_are_annotated(self):
    for path in self.code:
      tree = ast.parse(path.read_text())
      classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
      for owner in [tree, *classes]:
        for node in owner.body:
          if not isinstance(node, ast.FunctionDef) or node.name[0] == "_":
            continue
          arguments = node.args
          named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
          missing = [
              a.arg
              for a in named
              if a.annotation is None and a.arg not in ("self", "cls")
          ]
          label = f"{_label(path)}:{node.name}"
          self.assertEqual(missing, [], label)
          self.assertIsNotNone(node.returns, f"{label} returns")

  def test_no_catch_all_files(self):
    names = {path.stem for path in self.code}
    self.assertEqual(names & {"utils", "util", "helpers", "misc"}, set())

  def test_enough_tests(self):
    code = sum(_count(path) for path in self.code)
    tests = sum(_count(path) for path in self.tests)
    self.assertGreaterEqual(tests / code, _MIN_TEST_LINES_PER_LINE)


if __name__ == "__main__":
  absltest.main()

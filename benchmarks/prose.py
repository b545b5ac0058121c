# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of stilted words, redundant docstring fields, and words of docs.

    python -m benchmarks prose

Only files tracked by git count; `tests/prose_test.py` has the limits. Rewrite a
sentence with a counted word; a synonym does not make it clearer.
"""

import ast
from collections.abc import Iterator, Sequence
import io
import pathlib
import re
import subprocess
import tokenize
from typing import Any

import ml_collections

_ROOT = pathlib.Path(__file__).parents[1]
# Patterns that native writers of the field rarely use, by name.
STILTED = {
    "beside": r"\bbeside\b",
    "tell": r"\b(tell|tells|told)\b",
    "say": r"\b(say|says|said)\b",
    "that of": r"\b(that|those) of\b",
    "bear": r"\bbears?\b",
    "where there is": r"\b(where|if) there (is|are)\b(?! (one|none|no|any)\b)",
    "too": r", too\b",
    "anew": r"\banew\b",
}
# Anything between spaces with a letter or digit: no rules of tables.
_WORD = re.compile(r"\S*\w\S*")
# Page made by `tba_jax.config.reference`.
_GENERATED = "settings.md"
_RELATIVE = re.compile(r"_(that|which|who|whose|where)_")
# Docstring field or row of a settings table; excludes annotations such as
# "hardware: hardware.Hardware".
_FIELD = re.compile(
    r"^\s+(\w+)(?: \([^)]*\))?: (?:the |a |an )?(\w[\w ]*+)(?!\.\w)"
)


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of the checkout."""
  del config, operands
  return figures()


def figures() -> dict[str, Any]:
  """Returns counts over the package, the configs, the tests and the docs."""
  tracked = subprocess.check_output(["git", "ls-files"], cwd=_ROOT, text=True)
  paths = [_ROOT / line for line in tracked.splitlines()]
  pages = [p for p in paths if _is_in(p, "docs", ".md")]
  readme = _ROOT / "README.md"
  package = [p for p in paths if _is_in(p, "tba_jax", ".py")]
  code = package + [p for p in paths if _is_in(p, "configs", ".py")]
  tests = [p for p in paths if _is_in(p, "tests", ".py")]
  in_code = "\n".join(prose for path in code for prose in _prose(path))
  in_docs = "\n".join(path.read_text() for path in (readme, *pages))
  return {
      "stilted_in_code": _count(in_code),
      "stilted_in_docs": _count(in_docs),
      "fields_that_repeat_their_name": sum(
          len(repeated_fields(path.read_text())) for path in package
      ),
      "tests_with_relative_clauses": sum(
          bool(_RELATIVE.search(name))
          for path in tests
          for name in re.findall(r"def (test_\w+)", path.read_text())
      ),
      "errors_with_allowed": len(
          re.findall(r"[:;] allowed (?!values|names|ports)", in_code)
      ),
      "words_of_readme": len(readme.read_text().split()),
      "words_of_docs": sum(
          len(_WORD.findall(path.read_text()))
          for path in pages
          if path.name != _GENERATED
      ),
  }


def _is_in(path: pathlib.Path, folder: str, suffix: str) -> bool:
  return path.suffix == suffix and path.relative_to(_ROOT).parts[0] == folder


def _count(text: str) -> dict[str, int]:
  return {
      name: len(re.findall(pattern, text, re.IGNORECASE))
      for name, pattern in STILTED.items()
  }


def _prose(path: pathlib.Path) -> Iterator[str]:
  """Yields the comments and strings of a Python file."""
  source = path.read_text()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      yield token.string
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      yield node.value


def repeated_fields(source: str) -> list[str]:
  """Returns the fields whose description begins with their own name."""
  fields = []
  for line in source.splitlines():
    if match := _FIELD.match(line):
      name, meaning = match.groups()
      words = name.strip("_").split("_")
      # Without the suffix of a shape.
      words = [word for word in words if word.islower()]
      if words and meaning.split()[: len(words)] == words:
        fields.append(line.strip())
  return fields

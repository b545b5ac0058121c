# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: changes single expressions and counts caught changes.

    .venv/bin/python -m pip install pytest-cov
    bash tests/run.sh --cov=tba_jax --cov-context=test --cov-report=
    python -m tests.support.mutants COVERAGE SEED COUNT RESULTS

COVERAGE is the data file of `coverage` with a context per test (`coverage
combine` joins the results of several processes). SEED draws COUNT expressions
among those executed by tests. Each is changed, tried by the tests of its line
until one fails, and restored. RESULTS gets a JSON line for each: "caught",
"survived", or "late" if no test failed in time. Edits files, so use a separate
checkout.
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).parents[2]
_DEADLINE_S = 180.0
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A change of a file.

  start, end: byte offsets of the replaced text.
  """

  path: pathlib.Path
  line: int
  kind: str
  start: int
  end: int
  text: str


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
  """Yields (kind, new text) of each change of one node."""
  match node:
    case ast.Compare(ops=[op]) if type(op) in _COMPARED:
      new = ast.Compare(node.left, [_COMPARED[type(op)]()], node.comparators)
      yield "comparison", f"({ast.unparse(new)})"
    case ast.BinOp(op=op) if type(op) in _COMPUTED:
      new = ast.BinOp(node.left, _COMPUTED[type(op)](), node.right)
      yield "operator", f"({ast.unparse(new)})"
    case ast.UnaryOp(op=ast.Not() | ast.USub()):
      yield "sign", f"({ast.unparse(node.operand)})"
    case ast.BoolOp():
      other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
      yield "boolean", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    case ast.Constant(value=int() as value) if not isinstance(value, bool):
      yield "off_by_one", str(value + 1)
    case ast.Expr(value=ast.Call()):
      yield "dropped_call", "pass"


def _mutants(path: pathlib.Path) -> Iterator[Mutant]:
  """Yields the mutants of a file's functions."""
  source = path.read_bytes()
  starts = [0]
  for line in source.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  tree = ast.parse(source)
  inside_text = {
      id(child)
      for node in ast.walk(tree)
      if isinstance(node, ast.JoinedStr)
      for child in ast.walk(node)
  }
  for function in ast.walk(tree):
    if not isinstance(function, ast.FunctionDef):
      continue
    for statement in function.body:
      for node in ast.walk(statement):
        # Python 3.11 has no positions within f-strings.
        if id(node) not in inside_text:
          for kind, text in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(path, node.lineno, kind, start, end, text)


def draw(coverage_file: str, seed: int, count: int) -> list[tuple]:
  """Returns random mutants, each with the ids of the tests of its line."""
  import coverage  # pylint: disable=import-outside-toplevel

  data = coverage.CoverageData(coverage_file)
  data.read()
  tests = {}
  for path in sorted((_ROOT / "tba_jax").rglob("*.py")):
    by_line = data.contexts_by_lineno(str(path))
    tests[path] = {
        line: sorted({c.split("|")[0] for c in contexts if "::" in c})
        for line, contexts in by_line.items()
    }
  result = {
      mutant: ids
      for path in tests
      for mutant in _mutants(path)
      if (ids := tests[path].get(mutant.line))
  }
  return random.Random(seed).sample(list(result.items()), count)


def outcome(mutant: Mutant, tests: Sequence[str]) -> str:
  """Tests a mutant, then restores the file."""
  source = mutant.path.read_bytes()
  changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
  ast.parse(changed)
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as ids:
    ids.write("\n".join(tests))
    ids.flush()
    try:
      mutant.path.write_bytes(changed)
      process = subprocess.run(
          [sys.executable, "-m", "pytest", "-x", "-q", f"@{ids.name}"],
          cwd=_ROOT,
          capture_output=True,
          timeout=_DEADLINE_S,
      )
    except subprocess.TimeoutExpired:
      return "late"
    finally:
      mutant.path.write_bytes(source)
  return "caught" if process.returncode else "survived"


def main(coverage_file: str, seed: str, count: str, results: str) -> None:
  """Tests the mutants of a seed; resumes an interrupted call."""
  path = pathlib.Path(results)
  done = path.read_text().splitlines() if path.exists() else []
  with path.open("a") as lines:
    drawn = draw(coverage_file, int(seed), int(count))
    for mutant, tests in drawn[len(done) :]:
      line = {
          "file": str(mutant.path.relative_to(_ROOT)),
          "line": mutant.line,
          "kind": mutant.kind,
          "text": mutant.text,
          "tests": len(tests),
          "outcome": outcome(mutant, tests),
      }
      lines.write(json.dumps(line) + "\n")
      lines.flush()
      print(line, flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports, sizes, names, and repeated facts of the code.

    python -m benchmarks structure

Reads the files tracked by git without importing them.
"""

import ast
import collections
from collections.abc import Collection, Mapping, Sequence
import functools
import pathlib
import re
import subprocess
from typing import Any

import ml_collections
import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]
# File names that every folder may have.
_MIRRORS = ("__init__.py", "settings.py", "checks.py")
_FACTS = ("turn_rewards", "routes", "sampled_mask", "ref_logprobs")
_SWITCHES = {
    "reference": r"reference\.role",
    "lockstep": r"lockstep",
    "vllm": r"(?i)vllm",
    "num_waiting": r"num_waiting",
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of the checkout."""
  del config, operands
  tracked = subprocess.check_output(["git", "ls-files"], cwd=_ROOT, text=True)
  paths = [_ROOT / line for line in tracked.splitlines()]
  package = {
      ".".join(p.relative_to(_ROOT).with_suffix("").parts): p
      for p in paths
      if p.suffix == ".py" and p.relative_to(_ROOT).parts[0] == "tba_jax"
  }
  texts = {name: path.read_text() for name, path in package.items()}
  trees = {name: ast.parse(text) for name, text in texts.items()}
  imports = {name: _imports(tree, package) for name, tree in trees.items()}
  lines = {name: len(text.splitlines()) for name, text in texts.items()}
  classes = [
      node
      for tree in trees.values()
      for node in ast.walk(tree)
      if isinstance(node, ast.ClassDef)
  ]
  names = collections.Counter(
      n.name for n in classes if not n.name.startswith("_")
  )
  files = collections.Counter(
      path.name for path in package.values() if path.name not in _MIRRORS
  )
  sizes = np.array([n for n in lines.values() if n > 3])
  largest_class = max(classes, key=lambda n: n.end_lineno - n.lineno)
  return {
      "files": len(package),
      "lines": sum(lines.values()),
      "lines_of_tests": _lines(paths, "tests"),
      "words_of_docs": sum(
          len(path.read_text().split())
          for path in paths
          if path.suffix == ".md" and path.relative_to(_ROOT).parts[0] == "docs"
      ),
      "json_files": sum(path.suffix == ".json" for path in paths),
      "loop_reaches": len(reach("tba_jax.loop", imports)),
      "settings_reach": len(reach("tba_jax.config.settings", imports)),
      "longest_chain": len(longest_chain(imports)),
      "largest_file": max(lines.items(), key=lambda pair: pair[1]),
      "p90_of_files": int(np.quantile(sizes, 0.9)),
      "largest_class": (
          largest_class.name,
          largest_class.end_lineno - largest_class.lineno + 1,
      ),
      "file_names_twice": sum(count > 1 for count in files.values()),
      "class_names_twice": sum(count > 1 for count in names.values()),
      "files_with": {
          name: sum(bool(re.search(pattern, text)) for text in texts.values())
          for name, pattern in (
              *((fact, rf"\b{fact}\b") for fact in _FACTS),
              *_SWITCHES.items(),
          )
      },
  }


def _lines(paths: Sequence[pathlib.Path], folder: str) -> int:
  return sum(
      len(path.read_text().splitlines())
      for path in paths
      if path.suffix == ".py" and path.relative_to(_ROOT).parts[0] == folder
  )


def _imports(
    tree: ast.Module, package: Mapping[str, pathlib.Path]
) -> frozenset[str]:
  """Returns the package's modules that a module imports, anywhere in it."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module:
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
  return frozenset(names & package.keys())


def reach(name: str, imports: Mapping[str, Collection[str]]) -> set[str]:
  """Returns a module and everything that it imports, directly or indirectly."""
  reached, pending = set(), [name]
  while pending:
    module = pending.pop()
    if module not in reached:
      reached.add(module)
      pending += imports[module]
  return reached


def longest_chain(imports: Mapping[str, Collection[str]]) -> list[str]:
  """Returns the longest chain of imports, which must have no cycle."""

  @functools.cache
  def chain(name: str) -> list[str]:
    return [name, *max(map(chain, imports[name]), key=len, default=())]

  return max(map(chain, imports), key=len)

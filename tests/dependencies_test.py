# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imported packages and the requirements of setup.py agree."""

import ast
from collections.abc import Iterable, Iterator
from importlib import metadata
import json
import operator
import pathlib
import re
import sys

from absl.testing import absltest
import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_SETUP = (_ROOT / "setup.py").read_text()
# Modules whose package has a different name.
_PACKAGES = {
    "_pytest": "pytest",
    "absl": "absl-py",
    "google": "protobuf",
    "griffe": "griffelib",
    "orbax": "orbax-checkpoint",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
_OWN = {
    "benchmarks", "colabs", "configs", "examples", "studies", "tba_jax",
    "tests",
}  # fmt: skip
# Imports of scripts that run in other environments.
_ELSEWHERE = {
    "benchmarks/peer_speed.py": {"torch", "transformers", "vllm"},
    "benchmarks/served.py": {"tinker"},
    "benchmarks/skyrl_grpo.py": {"tinker"},
    "benchmarks/skyrl_server.py": {"skyrl", "uvicorn"},
    "benchmarks/trl_gkd.py": {"datasets", "trl"},
    "benchmarks/trl_grpo.py": {"datasets", "trl"},
    "benchmarks/trl_run.py": {"torch"},
    "benchmarks/tunix_grpo.py": {"tunix"},
    "examples/repairs.py": {"minisweagent", "pyyaml"},
    "examples/verifiers_sums.py": {"httpx", "verifiers"},
    "tba_jax/environments/packages.py": {"gem"},
    "tests/peers/gem_test.py": {"gem"},
    "tests/peers/gymnasium_text.py": {"gymnasium"},
    "tests/peers/opponents.py": {"textarena"},
    "tests/peers/textarena_test.py": {"textarena"},
    "tests/peers/tokenizers_test.py": {"sentencepiece", "tiktoken"},
    "tests/peers/verifiers_test.py": {"verifiers-sums"},
    "tests/support/mutants.py": {"coverage"},
}
# Modules that unpickle, and functions that unpickle by default.
_PICKLES = {
    "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing",
    "pickle", "pickle5", "shelve",
}  # fmt: skip
_PICKLE_CALLS = {
    "deserialize_and_load", "read_pickle", "unsafe_load", "yaml.load",
    "torch.load", "numpy.load", "np.load",
}  # fmt: skip
# Reads functions of the user's program from a private, locked file.
_LENT = "tba_jax/system/callables.py"
_SAFE = {"allow_pickle": False, "weights_only": True}
# Loaded on demand by code that reports what is missing.
_ON_DEMAND = {
    "tba_jax/chat_api/anthropic_messages.py": {"anthropic", "pydantic"},
    "tba_jax/chat_api/chat_requests.py": {"pydantic"},
    "tba_jax/chat_api/dialects.py": {"pydantic"},
    "tba_jax/chat_api/openai_responses.py": {"openai"},
    "tba_jax/chat_api/strict_json.py": {"pydantic"},
    "tba_jax/serving/agent_handlers.py": {"starlette"},
    "tba_jax/serving/schemas.py": {"pydantic"},
    "tba_jax/serving/app.py": {"starlette"},
    "tba_jax/serving/connections.py": {"uvicorn"},
    "tba_jax/serving/endpoint.py": {"uvicorn"},
    "tba_jax/serving/handlers.py": {"starlette"},
    "tba_jax/serving/replay_handlers.py": {"starlette"},
    "tba_jax/serving/tinker_handlers.py": {"starlette"},
}
_EXTRA_OF_PLACE = {
    "tba_jax": (
        "data", "ifbench", "math", "plots", "reasoning_gym", "serve",
        "tensorboard", "trackio", "wandb",
    ),
    "configs": (),
    "examples": (),
    "launch": (),
    "benchmarks": ("plots",),
    "studies": ("plots",),
    "colabs": ("plots", "test"),
    "docs": ("docs", "plots", "test"),
    "tests": ("ifbench", "parity", "reasoning_gym", "test"),
}  # fmt: skip


def _assigned(name: str):
  for node in ast.parse(_SETUP).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == name:
      return ast.literal_eval(node.value)


def _names(requirements: Iterable[str]) -> set[str]:
  """Returns package names of requirements: etils of "etils[epath]>=1.12"."""
  names = (re.match(r"[\w-]+", r)[0] for r in requirements)
  return {name.lower().replace("_", "-") for name in names}


def _imported(tree: ast.AST) -> Iterator[str]:
  """Yields the modules that code imports, in statements or by name."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
      yield node.module
    elif (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "import_module"
        and isinstance(node.args[0], ast.Constant)
    ):
      yield node.args[0].value


def _packages(modules: Iterable[str]) -> set[str]:
  """Returns the package names of third-party modules."""
  roots = {module.partition(".")[0] for module in modules}
  roots -= _OWN | sys.stdlib_module_names
  return {_PACKAGES.get(r, r.replace("_", "-").lower()) for r in roots}


def _sources(place: str) -> Iterator[tuple[str, ast.Module]]:
  """Yields a folder's Python files, and notebooks' cells without magics."""
  for path in sorted((_ROOT / place).rglob("*.py")):
    yield path.relative_to(_ROOT).as_posix(), ast.parse(path.read_text())
  for path in sorted((_ROOT / place).glob("*.ipynb")):
    cells = json.loads(path.read_text())["cells"]
    lines = (
        line.rstrip("\n")
        for cell in cells
        if cell["cell_type"] == "code"
        for line in cell["source"]
        if not line.startswith(("%", "!"))
    )
    yield path.relative_to(_ROOT).as_posix(), ast.parse("\n".join(lines))


def _unpickling(tree: ast.AST) -> Iterator[str]:
  """Yields the imports and calls of code that could load a pickle."""
  for module in _imported(tree):
    if module.partition(".")[0] in _PICKLES:
      yield module
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      called = ast.unparse(node.func)
      is_safe = any(
          isinstance(word.value, ast.Constant)
          and _SAFE.get(word.arg) is word.value.value
          for word in node.keywords
      )
      names = {called, called.rpartition(".")[2]}
      if names & _PICKLE_CALLS and not is_safe:
        yield called


class DependenciesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.core = _names(_assigned("REQUIREMENTS"))
    self.extras = {k: _names(v) for k, v in _assigned("EXTRAS").items()}

  @pytest.mark.slow
  def test_imported_packages_are_declared(self):
    for place, extras in _EXTRA_OF_PLACE.items():
      allowed = self.core.union(*(self.extras[extra] for extra in extras))
      for name, tree in _sources(place):
        found = _packages(_imported(tree)) - _ELSEWHERE.get(name, set())
        self.assertEqual(found - allowed, set(), name)

  def test_package_loads_without_extras(self):
    for name, tree in _sources("tba_jax"):
      top = ast.Module([n for n in tree.body if not _is_code(n)], [])
      found = _packages(_imported(top)) - _ON_DEMAND.get(name, set())
      self.assertEqual(found - self.core, set(), name)

  @pytest.mark.slow
  def test_declared_packages_are_imported_or_justified(self):
    places = ("tba_jax", "configs", "examples")
    found = {
        package
        for place in places
        for _, tree in _sources(place)
        for package in _packages(_imported(tree))
    }
    lines = _SETUP.partition("REQUIREMENTS = [")[2].partition("\n]")[0]
    above = ""
    for line in lines.strip().splitlines():
      text = line.strip()
      if text.startswith('"') and not above.startswith("#"):
        self.assertIn(*_names([text.strip('"')]), found)
      above = text

  def test_each_extra_is_used(self):
    used = {extra for extras in _EXTRA_OF_PLACE.values() for extra in extras}
    # Plugins without imports.
    plugins = {"cuda", "cuda13", "tpu", "gcs"}
    self.assertEqual(set(self.extras) - used, plugins)

  @pytest.mark.slow
  def test_only_lent_callables_are_pickled(self):
    for text, found in (
        ("import pickle", ["pickle"]),
        ("from multiprocessing import pool", ["multiprocessing"]),
        ("importlib.import_module('dill.source')", ["dill.source"]),
        ("np.load(f)", ["np.load"]),
        ("np.load(f, allow_pickle=True)", ["np.load"]),
        ("np.load(f, allow_pickle=False)", []),
        ("pd.read_pickle(f)", ["pd.read_pickle"]),
        ("json.load(f)", []),
    ):
      self.assertEqual(list(_unpickling(ast.parse(text))), found, text)
    for place in _EXTRA_OF_PLACE:
      for name, tree in _sources(place):
        lent = {"cloudpickle"} if name == _LENT else set()
        self.assertEqual({*_unpickling(tree)} - lent, set(), name)

  def test_no_dependency_is_under_the_gpl(self):
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    names = _names(line for line in lines if not line.startswith("#"))
    names.remove("docutils")  # Only its editor mode is under the GPL.
    for package in metadata.distributions():
      if _names([package.name]) <= names:
        declared = package.metadata
        terms = [
            declared.get("License-Expression") or "",
            (declared.get("License") or "").partition("\n")[0],
            *(declared.get_all("Classifier") or ()),
        ]
        self.assertNotRegex("; ".join(terms), r"\bA?GPL", package.name)

  def test_constraints_lie_in_ranges(self):
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    pins = [re.match(r"([\w.-]+)==([\d.]+)", line) for line in lines]
    requirements = [*_assigned("REQUIREMENTS")]
    for extra in _assigned("EXTRAS").values():
      requirements += extra
    for requirement in requirements:
      (name,) = _names([requirement])
      for pin in filter(None, pins):
        if _names([pin[1]]) == {name}:
          self.assertTrue(_is_in(pin[2], requirement), (pin[0], requirement))
    self.assertTrue(_is_in("1.10", "x[y]>=1.9,<2,!=1.11"))
    for version in ("1.8", "2", "1.11"):
      self.assertFalse(_is_in(version, "x[y]>=1.9,<2,!=1.11"))

  def test_readers_install_with_constraints(self):
    pages = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    lines = [
        line
        for page in pages
        for line in re.findall(r"pip install [^`\n]*-e ", page.read_text())
    ]
    self.assertGreater(len(lines), 2)
    for line in lines:
      self.assertIn(" -c constraints.txt ", line)

  def test_constraints_have_exact_stable_versions(self):
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    # These OpenTelemetry packages have no stable version.
    stable = r"(opentelemetry.*==0|[\w.-]+==[0-9.]+(\.post[0-9]+)?(;.*)?$)"
    for line in lines:
      self.assertRegex(line, stable)
    # Packages without tests are missing.
    others = {"trackio"}
    wanted = self.core.union(*self.extras.values()) - others
    self.assertEqual(wanted - _names(lines), set())


def _is_in(version: str, requirement: str) -> bool:
  """Returns whether a version is in a range, as "a>=1,<2,!=1.5"."""
  compare = {">=": operator.ge, "<": operator.lt, "!=": operator.ne,
             "==": operator.eq}  # fmt: skip
  key = lambda text: [int(n) for n in text.split(".")]
  bounds = re.findall(r"(>=|<|!=|==)([\d.]+)", requirement)
  return all(compare[sign](key(version), key(end)) for sign, end in bounds)


def _is_code(node: ast.stmt) -> bool:
  return isinstance(node, ast.FunctionDef | ast.ClassDef)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The diff of adding an objective, a model family, a carrier and a task.

Each is one new file and an entry in one table. The copy of the package with all
four trains, and exports a model that it reads again.
"""

import difflib
import os
import pathlib
import shutil
import subprocess
import sys

from absl.testing import absltest
import pytest

_ROOT = pathlib.Path(__file__).parents[2]

_OBJECTIVE = '''
import jax.numpy as jnp


def half_loss(groups, c, beta):
  """Half of TB's loss."""
  left_BxK = groups.rewards_BxK - beta * groups.rho_BxK
  centered_BxK = left_BxK - left_BxK.mean(axis=1, keepdims=True)
  return jnp.mean(jnp.square(centered_BxK)) / (4 * beta), {}
'''

_FAMILY = """
import functools

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Both",
    keys={**family.GATED, **family.max_positions(512)},
    tensors=functools.partial(family.gated, qkv_bias=True, head_norms=True),
    qkv_bias=True,
    has_head_norms=True,
)
"""

_CARRIER = '''
import pathlib

from tba_jax.transport.params import carrier
from tba_jax.transport.params import version


class Plain(carrier.Carrier):
  """One file a version, in the run directory; keeps all."""

  name = "plain"

  def __init__(self, folder):
    self._folder = pathlib.Path(folder)

  @classmethod
  def make(cls, place):
    return cls(place.workdir)

  def write(self, tag, leaves):
    data = b"".join(carrier.flat_bytes(leaf).data for leaf in leaves.values())
    path = self._folder / f"{tag}.plain"
    path.write_bytes(data)
    return {"path": str(path), "hash": carrier.digest(data)}, None

  def read(self, transport, tag, carried, specs):
    data = pathlib.Path(carried["path"]).read_bytes()
    carrier.check_digest(tag, data, carried["hash"])
    leaves, start = {}, 0
    for name, spec in specs.items():
      leaves[name] = carrier.as_leaf(data, spec, start)
      start += version.leaf_bytes(*spec)
    return leaves
'''

_TASK = '''
from typing import ClassVar

from tba_jax.tasks import arithmetic


class Sums(arithmetic.Arithmetic):
  """Sums alone."""

  name: ClassVar[str] = "sums"
  FIELDS: ClassVar = {**arithmetic.Arithmetic.FIELDS, "operations": "+"}
'''

# New file, its text, the table, and what is put before which of its lines.
_ADDED = (
    ("losses/half.py", _OBJECTIVE, "losses/objective_table.py", {
        '    "rloo": ObjectiveSpec(': '    "half": ObjectiveSpec('
        '"half:half_loss", needs_beta=True),',
    }),
    ("models/families/both.py", _FAMILY, "models/families/family.py", {
        '    "gpt2",': '    "both",',
    }),
    ("transport/params/plain.py", _CARRIER, "transport/params/carriers.py", {
        '    "store": CarrierEntry(': '    "plain": CarrierEntry('
        '"plain:Plain", "one host"),',
    }),
    ("tasks/sums.py", _TASK, "tasks/task_table.py", {
        '    "tldr": ': '    "sums": "tba_jax.tasks.sums:Sums",',
    }),
)  # fmt: skip
_OVERRIDES = (
    "init=scratch",
    "loss.name=half",
    "model.family=both",
    "publish.carrier=plain",
    "task.name=sums",
    "sampling.max_prompt_tokens=6",
    "train.num_steps=3",
    "evaluate.num_prompts=4",
    "evaluate.final_prompts=4",
)


class OneOfEachTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.package = self.folder / "tba_jax"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "tba_jax", self.package, ignore=ignored)
    for name, text, table, entries in _ADDED:
      (self.package / name).write_text(text)
      lines = []
      for line in (self.package / table).read_text().splitlines():
        before = [n for key, n in entries.items() if line.startswith(key)]
        lines += [*before[:1], line]
      (self.package / table).write_text("\n".join(lines) + "\n")

  def main(self, program, *arguments):
    process = subprocess.run(
        [
            *(sys.executable, "-m", "tba_jax.main", f"--program={program}"),
            f"--workdir={self.folder}/run",
            *arguments,
        ],
        cwd=self.folder,
        env={**os.environ, "PYTHONPATH": str(self.folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    self.assertEqual(process.returncode, 0, process.stdout + process.stderr)

  @pytest.mark.timeout(500)
  def test_each_is_one_file_and_entry_and_runs(self):
    changed = {}
    for path in self.package.rglob("*.py"):
      name = str(path.relative_to(self.package))
      old = _ROOT / "tba_jax" / name
      if not old.exists():
        changed[name] = "new"
      elif old.read_text() != path.read_text():
        sides = (p.read_text().splitlines() for p in (old, path))
        changed[name] = [
            line for line in difflib.ndiff(*sides) if line[0] in "+-"
        ]
    self.assertCountEqual(
        changed, [name for row in _ADDED for name in (row[0], row[2])]
    )
    for new, _, table, _ in _ADDED:
      self.assertEqual(changed[new], "new")
      # An import, where the table has no strings, and the entry.
      self.assertBetween(len(changed[table]), 1, 2, changed[table])
      self.assertTrue(all(line[0] == "+" for line in changed[table]))

    self.main(
        "train",
        f"--config={_ROOT}/configs/arithmetic.py:smoke",
        *(f"--config.{item}" for item in _OVERRIDES),
    )
    self.assertNotEmpty(list((self.folder / "run").glob("*.plain")))
    self.main("export", "3", "model")
    code = (
        "from tba_jax.models.hf import hf; config, _ = hf.load('model');"
        "print(config.family)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=self.folder,
        env={**os.environ, "PYTHONPATH": str(self.folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    self.assertEqual(process.stdout, "both\n", process.stderr)

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Callables that a program lends to other processes."""

import functools
import os
import pathlib
import subprocess
import sys
import textwrap
import threading

from absl.testing import parameterized

from tba_jax.system import callables
from tba_jax.system import processes
from tba_jax.system import user_code

_LOAD = """
import sys
from tba_jax.system import user_code
print(user_code.load_function("reward", sys.argv[1])(3))
"""


class Adder:

  def __init__(self, number):
    self.number = number

  def __call__(self, x):
    return x + self.number


def add(x, y):
  return x + y


def _here(script, *arguments, **options):
  return subprocess.run(
      [sys.executable, "-c", script, *arguments],
      capture_output=True, text=True, check=False,
      env=processes.package_environment(), **options,
  )  # fmt: skip


class CallablesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.loan = callables.Loan(self.folder)
    self.addCleanup(self.loan.close)

  @parameterized.named_parameters(
      ("closure", lambda y: lambda x: x + y, "lambda"),
      ("partial", lambda y: functools.partial(add, y), "add"),
      ("object", Adder, "Adder"),
  )
  def test_another_process_loads_it(self, make, name):
    text = self.loan.add("reward", make(4))
    self.assertEqual(text, f"{self.folder}/{name}.callable:{name}")
    self.assertTrue(callables.is_lent(text))
    self.assertEqual(os.stat(text.rpartition(":")[0]).st_mode & 0o777, 0o600)
    done = _here(_LOAD, text)
    self.assertEqual(done.stdout, "7\n", done.stderr)

  def test_sibling_modules_of_script_are_importable_elsewhere(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "helper.py").write_text("def triple(x): return 3 * x\n")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(f"""
        import pathlib, subprocess, sys
        import helper
        from tba_jax.system import callables
        loan = callables.Loan(pathlib.Path({str(self.folder)!r}))
        for f in (helper.triple, lambda x: helper.triple(x)):
          text = loan.add("reward", f)
          subprocess.run([sys.executable, "-c", {_LOAD!r}, text], cwd="/")
    """))
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False,
        env=processes.package_environment(),
    )  # fmt: skip
    self.assertEqual(process.stdout, "9\n9\n", process.stderr)

  def test_error_of_closure_has_its_file_and_line(self):
    text = self.loan.add("reward", lambda x: 1 / (x - 3))
    done = _here(_LOAD, text)
    self.assertRegex(done.stderr, 'File ".*/callables_test.py", line [0-9]+')
    self.assertIn("ZeroDivisionError", done.stderr)

  def test_unpicklable_closure_names_variable(self):
    client = threading.Lock()

    def polite(completion):
      return client.locked() + len(completion)

    with self.assertRaisesRegex(
        ValueError,
        "reward=polite: cannot be sent to worker processes: its 'client', a"
        " lock: TypeError: cannot pickle",
    ):
      self.loan.add("reward", polite)
    self.assertEmpty(list(self.folder.iterdir()))

  def test_refuses_callable_after_program_ends(self):
    text = self.loan.add("reward", add)
    path = pathlib.Path(text.rpartition(":")[0])
    copy = self.folder / "copy.callable"
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    # The file of a killed program stays, and nobody locks it.
    for wrong in (f"{copy}:add", text):
      with self.assertRaisesRegex(
          ValueError,
          "reward=.*add is a function of a Python program, .*continue from"
          " Python, with add as the same argument",
      ):
        user_code.load_function("reward", wrong)
      self.loan.close()
    self.assertFalse(path.exists())

  def test_refuses_file_readable_by_other_users(self):
    text = self.loan.add("reward", add)
    os.chmod(text.rpartition(":")[0], 0o644)
    with self.assertRaisesRegex(ValueError, "a file of this user alone"):
      user_code.load_function("reward", text)

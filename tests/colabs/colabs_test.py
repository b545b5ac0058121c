# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom and draw what they show."""

import contextlib
from importlib import machinery
import importlib.util
import io
import json
import pathlib
import shutil
import subprocess
import tempfile
from unittest import mock
import zipfile

from absl.testing import parameterized
import nbclient
import nbformat
import pytest

from colabs import execute

_ROOT = pathlib.Path(__file__).parents[2]


def read(name):
  return nbformat.read(execute.HERE / name, as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
  """Returns the places of the cells with a picture, and how many each has."""
  result = {}
  for i, cell in enumerate(notebook.cells):
    kinds = [set(o.get("data", ())) for o in cell.get("outputs", ())]
    if any("image/png" in k for k in kinds):
      result[i] = sum("image/png" in k for k in kinds)
  return result


class RunTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Notebooks share a folder, so that the second reads what the first has
    # trained.
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory(prefix="colab_"))
    )

  @pytest.mark.timeout(900)
  def test_each_runs_to_its_end_and_draws(self):
    for name in execute.NOTEBOOKS:
      with self.subTest(name):
        notebook = execute.execute(
            execute.HERE / name, self.folder, {"VARIANT": "smoke"}
        )
        self.assertEqual(pictures(notebook), pictures(read(name)))
        execute.check(nbformat.writes(notebook))
    for run in ("countdown", "sort_digits"):
      self.assertTrue((self.folder / "runs" / run / "report.html").exists())


class StoredTest(parameterized.TestCase):

  def test_all_are_run(self):
    files = [path.name for path in execute.HERE.glob("*.ipynb")]
    self.assertCountEqual(files, execute.NOTEBOOKS)

  @parameterized.parameters(*execute.NOTEBOOKS)
  def test_they_carry_outputs(self, name):
    notebook = read(name)
    nbformat.validate(notebook)
    execute.check((execute.HERE / name).read_text("utf-8"))
    self.assertGreaterEqual(len(pictures(notebook)), 1)
    self.assertEqual(
        [cell.execution_count for cell in code(notebook)],
        list(range(1, len(code(notebook)) + 1)),
    )
    for cell in code(notebook):
      for output in cell.outputs:
        self.assertNotEqual(output.output_type, "error")
        self.assertNotEqual(output.get("name"), "stderr", output)

  @parameterized.parameters(*execute.NOTEBOOKS)
  def test_notebooks_start_unedited_and_leave_devices_to_training(self, name):
    notebook = read(name)
    self.assertEqual(code(notebook)[0].source, execute.INSTALL)
    text = "".join(cell.source for cell in notebook.cells)
    self.assertNotIn("OWNER", text)
    self.assertNotIn("environ", text)

  @parameterized.parameters(*execute.NOTEBOOKS)
  def test_open_in_colab_given_repository(self, name):
    notebook = read(name)
    execute.prepare(notebook, name)
    self.assertEqual(notebook, read(name))
    title = notebook.cells[0].source
    for repository in ("https://github.com/me/tba", ""):
      with mock.patch.object(execute, "REPOSITORY", repository):
        execute.prepare(notebook, name)
        self.assertEqual(
            notebook.cells[0].source,
            "[Open in Colab](https://colab.research.google.com/github/me/tba/"
            f"blob/main/colabs/{name})\n\n{title}"
            if repository
            else title,
        )


class InstallTest(parameterized.TestCase):

  def install(self, folder, repository="", gpus=False, spec=None):
    """Runs the cell in a folder; returns its commands and where it ends."""

    cell = execute.INSTALL.replace('REPOSITORY = ""',
                                   f"REPOSITORY = {repository!r}")  # fmt: skip
    def run(command, check):
      commands.append(command[-1])
      if command[0] == "git":
        self.make_checkout(folder / "tba_jax")

    commands = []
    with (
        contextlib.chdir(folder),
        mock.patch.object(
            importlib.util,
            "find_spec",
            lambda name: spec if name == "tba_jax" else None,
        ),
        mock.patch.object(shutil, "which", lambda name: "x" * gpus),
        mock.patch.object(subprocess, "run", run),
    ):
      exec(cell, {})  # pylint: disable=exec-used
      return commands, pathlib.Path.cwd()

  def make_folder(self):
    return pathlib.Path(self.create_tempdir().full_path).resolve()

  def make_checkout(self, path):
    for name in ("tba_jax", "colabs"):
      (path / name).mkdir(parents=True)
    (path / "setup.py").touch()
    (path / "tba_jax" / "main.py").touch()
    return path

  def test_installs_checkout_containing_notebook(self):
    checkout = self.make_checkout(self.make_folder() / "mine")
    # Python takes a checkout's own folder for a package.
    spec = machinery.ModuleSpec("tba_jax", None)
    for folder in (checkout, checkout / "colabs"):
      with self.subTest(folder.name):
        self.assertEqual(
            self.install(folder, spec=spec), ([".[plots]"], checkout)
        )

  def test_reports_installed_package_and_keeps_it(self):
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        mock.patch.object(subprocess, "run") as run,
    ):
      exec(execute.INSTALL, {})  # pylint: disable=exec-used
    run.assert_not_called()
    self.assertRegex(out.getvalue(), r"^tba_jax [\d.]+ is installed\n$")

  def test_installs_dependencies_of_importable_checkout(self):
    checkout = self.make_checkout(self.make_folder())
    spec = machinery.ModuleSpec("tba_jax", None, origin="tba_jax/__init__.py")
    commands, _ = self.install(checkout, spec=spec)
    self.assertEqual(commands, [".[plots]"])

  def test_installs_unpacked_or_zipped_checkout_next_to_notebook(self):
    folder = self.make_folder()
    checkout = self.make_checkout(folder / "tba_jax-main")
    self.assertEqual(
        self.install(folder, gpus=True), ([".[plots,cuda]"], checkout)
    )
    with zipfile.ZipFile(folder / "tba_jax-main.zip", "w") as archive:
      for name in ("setup.py", "tba_jax/main.py"):
        archive.writestr(f"tba_jax-main/{name}", "")
    shutil.rmtree(checkout)
    self.assertEqual(self.install(folder), ([".[plots]"], checkout))

  def test_installs_clone_of_named_repository(self):
    folder = self.make_folder()
    self.assertEqual(
        self.install(folder, repository="https://host/tba_jax"),
        (["tba_jax", ".[plots]"], folder / "tba_jax"),
    )

  def test_asks_for_upload_without_checkout(self):
    folder = self.make_folder()
    (folder / "setup.py").touch()  # Another project's.
    with self.assertRaisesRegex(FileNotFoundError, "upload"):
      self.install(folder)


class ExecuteTest(parameterized.TestCase):

  def write(self, *sources):
    """Writes a notebook of code cells, of which the first has parameters."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    path = pathlib.Path(self.create_tempdir().full_path) / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path

  def test_outputs_are_of_no_machine_and_no_moment(self):
    path = self.write(
        "A = 1",
        "import os\n"
        "print('1 %\\r50 %\\r100 %')\n"
        "print('\\x1b[31mred\\x1b[0m', os.getcwd())\n"
        "print('next\\r\\n', end='', flush=True)\n"
        "print(A)",
        "os.path.join(os.getcwd(), 'x')",
    )
    folder = pathlib.Path(self.create_tempdir().full_path)
    notebook = execute.execute(path, folder, {"A": "b"})
    self.assertLen(notebook.cells, 3)
    self.assertEqual(notebook.cells[0].source, "A = 1")
    (stream,) = notebook.cells[1].outputs
    self.assertEqual(stream.text, "100 %\nred /content\nnext\nb\n")
    (result,) = notebook.cells[2].outputs
    self.assertEqual(result.data["text/plain"], "'/content/x'")
    self.assertEqual(
        [cell.execution_count for cell in notebook.cells], [1, 2, 3]
    )
    self.assertNotIn(str(folder), json.dumps(notebook))
    self.assertEqual(execute.execute(path, folder, {"A": "b"}), notebook)

  def test_reports_failing_cell(self):
    path = self.write("A = 1", "1 / 0")
    with self.assertRaisesRegex(
        nbclient.exceptions.CellExecutionError, "ZeroDivisionError"
    ):
      execute.execute(path, path.parent, {})

  def test_refuses_unknown_parameter(self):
    path = self.write("A = 1")
    with self.assertRaisesRegex(
        ValueError, r"--set \['B'\]: must be in \['A'\]"
    ):
      execute.execute(path, path.parent, {"B": "1"})

  def test_refuses_unstorable_output(self):
    with self.assertRaisesRegex(
        ValueError, "400001 bytes: must have at most 400000"
    ):
      execute.check("x" * (execute.MAX_BYTES + 1))
    with self.assertRaisesRegex(ValueError, "a folder of this machine"):
      execute.check(f"in {_ROOT}/tba_jax")

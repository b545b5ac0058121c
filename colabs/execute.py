# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of this folder and writes their outputs into them.

    python colabs/execute.py                       all, in place
    python colabs/execute.py losses.ipynb          one of them
    python colabs/execute.py --link                update cells, without a run
    python colabs/execute.py --set VARIANT=smoke --out /tmp/seen losses.ipynb

Notebooks run in turn in one initially empty folder, as in a Colab session, so
later ones can use earlier runs. The cell tagged `install` gets the text of
install.py, and the first cell a link to Colab if install.py names a GitHub
repository (`--link` does only this). `--set` overrides a name in the cell
tagged `parameters` without changing the notebook. Needs the extra `test`.
"""

import argparse
import ast
from collections.abc import Mapping, Sequence
import os
import pathlib
import re
import tempfile
from typing import Any

import nbclient
import nbformat

HERE = pathlib.Path(__file__).parent
# Notebooks in the order in which they run.
NOTEBOOKS = (
    "train_countdown.ipynb",
    "read_a_run.ipynb",
    "your_task.ipynb",
    "losses.ipynb",
    "serve.ipynb",
)
CELL_LIMIT_S = 1200
_START_LIMIT_S = 300
# Without the license's two lines.
INSTALL = (HERE / "install.py").read_text("utf-8").split("\n", 2)[2].strip()
# Repository address; only GitHub's have links to Colab.
REPOSITORY = re.search(r'^REPOSITORY = "(.*)"', INSTALL, re.M)[1]
_GITHUB = "https://github.com/"
_LINK = "[Open in Colab](https://colab.research.google.com/github/{})\n\n"
MAX_BYTES = 400_000
# Name of a notebook's folder in Colab.
_COLAB_FOLDER = "/content"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# tqdm warns about missing widgets, which pages could not show.
_QUIET = "ignore:IProgress not found"
_METADATA = {
    "colab": {"provenance": []},
    "kernelspec": {"display_name": "Python 3", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(
    path: pathlib.Path,
    folder: pathlib.Path,
    parameters: Mapping[str, Any],
) -> nbformat.NotebookNode:
  """Returns a notebook with its outputs.

  Args:
    path: path of the notebook.
    folder: folder to run it in.
    parameters: new values of names in the cell `parameters`.

  Raises:
    ValueError: a name is not in the cell.
    nbclient.exceptions.CellExecutionError: a cell failed.
  """
  notebook = nbformat.read(path, as_version=4)
  prepare(notebook, path.name)
  cells = notebook.cells
  (place,) = (
      i
      for i, cell in enumerate(cells)
      if "parameters" in cell.metadata.get("tags", [])
  )
  known = {
      target.id
      for node in ast.parse(cells[place].source).body
      if isinstance(node, ast.Assign)
      for target in node.targets
  }
  if not set(parameters) <= known:
    raise ValueError(
        f"--set {sorted(set(parameters) - known)}: must be in {sorted(known)},"
        f" the parameters of {path.name}"
    )
  lines = [f"{name} = {value!r}" for name, value in parameters.items()]
  injected = nbformat.v4.new_code_cell("\n".join(lines))
  cells.insert(place + 1, injected)
  nbclient.NotebookClient(
      notebook,
      timeout=CELL_LIMIT_S,
      kernel_name="python3",
      resources={"metadata": {"path": str(folder)}},
      startup_timeout=_START_LIMIT_S,
  ).execute(env={**os.environ, "PYTHONWARNINGS": _QUIET})
  cells.remove(injected)
  clean(notebook, folder)
  return notebook


def prepare(notebook: nbformat.NotebookNode, name: str) -> None:
  """Writes the cells common to all notebooks: link and installation.

  Args:
    notebook: changed in place.
    name: name of its file in this folder.
  """
  for cell in notebook.cells:
    if "install" in cell.metadata.get("tags", []):
      cell.source = INSTALL
  first = notebook.cells[0]
  if first.cell_type != "markdown":
    return
  first.source = re.sub(r"^\[Open in Colab\].*\n\n", "", first.source)
  if REPOSITORY.startswith(_GITHUB):
    repository = REPOSITORY.removeprefix(_GITHUB).removesuffix(".git")
    place = f"{repository}/blob/main/colabs/{name}"
    first.source = _LINK.format(place) + first.source


def clean(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> None:
  """Removes details of this machine and time from the outputs."""
  notebook.metadata = nbformat.from_dict(_METADATA)
  count = 0
  for cell in notebook.cells:
    cell.metadata.pop("execution", None)
    if cell.cell_type != "code":
      continue
    count += 1
    cell.execution_count = count
    outputs: list[nbformat.NotebookNode] = []
    for output in cell.outputs:
      last = outputs[-1] if outputs else {}
      if output.output_type == "stream" and last.get("name") == output.name:
        last.text += output.text
      else:
        outputs.append(output)
    for output in outputs:
      output.pop("metadata", None)
      if output.output_type == "stream":
        output.text = _settled(output.text).replace(str(folder), _COLAB_FOLDER)
        continue
      output.metadata = {}
      if "execution_count" in output:
        output.execution_count = count
      for kind, value in output.get("data", {}).items():
        if isinstance(value, str):
          output.data[kind] = value.replace(str(folder), _COLAB_FOLDER)
    cell.outputs = outputs


def _settled(text: str) -> str:
  """Returns the final text on a terminal that prints `text`, without colors."""
  lines = _ANSI.sub("", text).split("\n")
  return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def check(text: str) -> None:
  """Raises ValueError if a notebook's file is unsuitable for the repository.

  Args:
    text: content of the file; must be small and name no local folder.
  """
  if len(text.encode()) > MAX_BYTES:
    raise ValueError(
        f"{len(text.encode())} bytes: must have at most {MAX_BYTES}; print less"
    )
  for place in {str(HERE.parent.absolute()), str(pathlib.Path.home())}:
    if place + os.sep in text:
      raise ValueError(f"an output names {place}, a folder of this machine")


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("notebooks", nargs="*", default=NOTEBOOKS)
  parser.add_argument("--set", action="append", default=[], metavar="N=V")
  parser.add_argument("--link", action="store_true")
  parser.add_argument("--out", type=pathlib.Path, default=HERE)
  args = parser.parse_args(argv)
  parameters = dict(item.split("=", 1) for item in args.set)
  args.out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix="colab_") as folder:
    for name in args.notebooks:
      if args.link:
        notebook = nbformat.read(HERE / name, as_version=4)
        prepare(notebook, name)
      else:
        notebook = execute(HERE / name, pathlib.Path(folder), parameters)
      text = nbformat.writes(notebook) + "\n"
      # Write a rejected notebook as well: it shows why.
      (args.out / name).write_text(text, "utf-8")
      check(text)
      print(args.out / name, flush=True)


if __name__ == "__main__":
  main()

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of this folder and writes their outputs into them.

    python colabs/execute.py                       all, in place
    python colabs/execute.py losses.ipynb          one of them
    python colabs/execute.py --link                cells alone, without a run
    python colabs/execute.py --set VARIANT=smoke --out /tmp/seen losses.ipynb

They run one after the other in one empty folder, as in one Colab session, so
that what the first one trained is there for the last. The cell tagged `install`
gets the text of install.py, and where that names a repository of GitHub, the
first cell a link that opens the notebook in Colab (`--link` does this alone).
`--set` gives another value to a name of the cell tagged `parameters`; it is not
written into the notebook. Needs the packages of the extra `test`.
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
# Without the two lines of the licence.
INSTALL = (HERE / "install.py").read_text("utf-8").split("\n", 2)[2].strip()
# Address of the repository, of which GitHub's have links to Colab.
REPOSITORY = re.search(r'^REPOSITORY = "(.*)"', INSTALL, re.M)[1]
_GITHUB = "https://github.com/"
_LINK = "[Open in Colab](https://colab.research.google.com/github/{})\n\n"
MAX_BYTES = 400_000
# Colab's name for the folder that a notebook runs in.
_COLAB_FOLDER = "/content"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# tqdm misses the widgets, which no page would show.
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
    parameters: values that names of its cell `parameters` get.

  Raises:
    ValueError: the notebook has no such name.
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
  """Writes the cells that all notebooks have: the link, and the installation.

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
  """Takes out of the outputs what is of this machine or of this moment."""
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
  """Returns what a terminal shows of a text in the end, without colours."""
  lines = _ANSI.sub("", text).split("\n")
  return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def check(text: str) -> None:
  """Raises ValueError where a notebook's file should not be stored.

  Args:
    text: text of the file: not too large, without a folder of this machine.
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
      # A refused notebook is written too: it shows why.
      (args.out / name).write_text(text, "utf-8")
      check(text)
      print(args.out / name, flush=True)


if __name__ == "__main__":
  main()

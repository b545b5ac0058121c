# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table at the end of `tests/run.sh --peers`.

    table.py row FOLDER NAME PYTHON SECONDS REASON   after the tests of NAME
    table.py show FOLDER                             at the end

FOLDER/NAME.xml is pytest's report, without which REASON tells what went wrong.
"""

from collections.abc import Sequence
import json
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

_ROWS = "rows.jsonl"
_COUNTS = ("passed", "failed", "skipped")
_HEADS = ("", "packages", *_COUNTS, "s", "")
# A package whose version matters: one with a limit.
_LIMITED = re.compile(r"^(?:# alone: )?([A-Za-z0-9._-]+)[=<>~!]", re.MULTILINE)
_VERSIONS = """
from importlib import metadata
import sys
print(*(f"{n} {metadata.version(n)}" for n in sys.argv[1:]), sep=", ")
"""


def read(report: pathlib.Path) -> tuple[dict[str, int], list[str]]:
  """Returns the counts of a report of pytest, and what did not pass and why."""
  counts, told = dict.fromkeys(_COUNTS, 0), []
  for case in ElementTree.parse(report).iter("testcase"):
    what = "passed"
    for child in case:
      if child.tag in ("failure", "error"):
        what = "failed"
        told.append(f"failed: {case.get('name') or case.get('classname')}")
        break
      if child.tag == "skipped":
        what = "skipped"
        told.append(f"skipped: {child.get('message')}")
    counts[what] += 1
  return counts, told


def make_row(
    name: str, packages: str, report: pathlib.Path, seconds: str, reason: str
) -> list[str]:
  """Returns the cells of one check.

  Args:
    name: name of the check.
    packages: packages that it is with, and their versions.
    report: report of pytest; none where it did not end.
    seconds: seconds that it took.
    reason: cause of a failure that the report lacks; "" = none.
  """
  counts, told = dict.fromkeys(_COUNTS, 0), []
  if report.exists():
    counts, told = read(report)
  if reason and not counts["failed"]:
    counts["failed"] = 1
    told.insert(0, f"failed: {reason}")
  # Several tests are skipped for the same reason.
  texts = [" ".join(text.split()) for text in dict.fromkeys(told)]
  numbers = [str(counts[key]) for key in _COUNTS]
  return [name, packages, *numbers, seconds, "; ".join(texts)]


def layout(rows: Sequence[Sequence[str]]) -> str:
  """Returns rows as a table; numbers stand right."""
  rows = [_HEADS, *rows]
  widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADS) - 1)]
  lines = []
  for row in rows:
    cells = [
        text.ljust(width) if n < 2 else text.rjust(width)
        for n, (text, width) in enumerate(zip(row, widths))
    ]
    lines.append("  ".join([*cells, row[-1]]).rstrip())
  return "\n".join(lines)


def versions(python: str, name: str) -> str:
  """Returns the packages that tests/peers/NAME.txt limits, as installed."""
  folder = pathlib.Path(__file__).parent
  packages = _LIMITED.findall((folder / f"{name}.txt").read_text())
  told = subprocess.run(
      [python, "-c", _VERSIONS, *packages], capture_output=True, text=True
  )
  return told.stdout.strip() or ", ".join(packages)


def main(argv: Sequence[str]) -> None:
  what, folder = argv[0], pathlib.Path(argv[1])
  if what == "row":
    name, python, seconds, reason = argv[2:]
    row = make_row(
        name,
        versions(python, name),
        folder / f"{name}.xml",
        seconds,
        reason,
    )
    with (folder / _ROWS).open("a") as file:
      print(json.dumps(row), file=file)
  else:
    lines = (folder / _ROWS).read_text().splitlines()
    print(layout([json.loads(line) for line in lines]))


if __name__ == "__main__":
  main(sys.argv[1:])

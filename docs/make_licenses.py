# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes `docs/licenses.md` from what the packages in this environment declare.

    python docs/make_licenses.py

needs an environment with the packages of `constraints.txt` that the page lists:
those that are missing keep their lines.
"""

from collections.abc import Iterable
import importlib.metadata
import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = _ROOT / "docs/licenses.md"
_SEPARATOR = "|---|---|\n"
_CLASSIFIER = "License :: OSI Approved :: "


def constrained() -> list[str]:
  """Returns the normalized names of the packages in `constraints.txt`."""
  lines = (_ROOT / "constraints.txt").read_text().splitlines()
  names = (
      line.partition("==")[0] for line in lines if not line.startswith("#")
  )
  return sorted({_normalized(name) for name in names})


def listed(page: str) -> dict[str, str]:
  """Returns the licenses of a page by package."""
  rows = page.partition(_SEPARATOR)[2].strip().splitlines()
  return dict(row.strip("| ").split(" | ", 1) for row in rows)


def declared(package: importlib.metadata.Distribution) -> str:
  """Returns the license that a package declares, "" if it declares none."""
  fields = package.metadata
  if expression := fields.get("License-Expression"):
    return expression
  classifiers: Iterable[str] = fields.get_all("Classifier") or ()
  found = [
      c.removeprefix(_CLASSIFIER)
      for c in classifiers
      if c.startswith(_CLASSIFIER)
  ]
  if found:
    return ", ".join(found)
  text = (fields.get("License") or "").strip()
  return text.splitlines()[0] if text else ""


def _normalized(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
  page = _PAGE.read_text(encoding="utf-8")
  known = listed(page)
  for package in importlib.metadata.distributions():
    if name := declared(package):
      known[_normalized(package.name)] = name
  rows = [f"| {name} | {known.get(name, '')} |\n" for name in constrained()]
  head = page.partition(_SEPARATOR)[0]
  _PAGE.write_text(head + _SEPARATOR + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
  main()

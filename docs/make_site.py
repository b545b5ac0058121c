# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapts pages and docstrings to the documentation site (`mkdocs.yml`).

Pages of `docs/` link to files of the checkout outside `docs/`. The site has
copies of the linked files at the same place below its root, and its links lead
to the copies, so that the pages work on the site and in a repository.
"""

import inspect
import os
import pathlib
import re
from typing import Any

import griffe
from mkdocs.config import defaults
from mkdocs.structure import files as site_files

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
# A field of a class's docstring: "name: meaning".
_FIELD = re.compile(r"^\w+(?:, \w+)*: ")


def _targets(page: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files outside `docs/` that a page links to."""
  links = [match[2] for match in _LINK.finditer(page.read_text("utf-8"))]
  paths = [(page.parent / link).resolve() for link in links if ":" not in link]
  docs = _ROOT / "docs"
  return [p for p in paths if p.is_file() and docs not in p.parents]


def _name(path: pathlib.Path) -> str:
  """Returns the place of a file below the site's root."""
  parts = path.relative_to(_ROOT).parts
  return "/".join(parts[1:] if parts[0] == "docs" else parts)


def on_files(
    files: site_files.Files, config: defaults.MkDocsConfig
) -> site_files.Files:
  """Adds copies of all files outside `docs/` that pages link to."""
  waiting = [
      pathlib.Path(file.abs_src_path) for file in files.documentation_pages()
  ]
  copied = set()
  while waiting:
    for target in _targets(waiting.pop()):
      if target not in copied:
        copied.add(target)
        file = site_files.File.generated(
            config, _name(target), abs_src_path=str(target),
            inclusion=site_files.InclusionLevel.NOT_IN_NAV,
        )  # fmt: skip
        files.append(file)
        if target.suffix == ".md":
          waiting.append(target)
  return files


def on_page_markdown(
    markdown: str, *, page: Any, config: Any, files: Any
) -> str:
  """Returns a page whose links lead to places on the site."""
  del config, files
  source = pathlib.Path(page.file.abs_src_path).resolve()

  def moved(link: re.Match[str]) -> str:
    target = (source.parent / link[2]).resolve()
    if ":" in link[2] or not target.exists() or _ROOT not in target.parents:
      return link[0]
    folder = os.path.dirname(_name(source)) or "."
    place = os.path.relpath(_name(target), folder)
    return f"{link[1]}{place}{link[3] or ''})"

  return _LINK.sub(moved, markdown)


class Fields(griffe.Extension):
  """Shows the fields of a class's docstring as its attributes."""

  def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
    del kwargs
    if cls.docstring is None:
      return
    lines = inspect.cleandoc(cls.docstring.value).splitlines()
    fields = [n for n, line in enumerate(lines) if _FIELD.match(line)]
    if fields:
      first = fields[0]
      lines[first:] = ["Attributes:", *("  " + line for line in lines[first:])]
      cls.docstring.value = "\n".join(lines)

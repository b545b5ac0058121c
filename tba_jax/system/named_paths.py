# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Paths of files that settings name, alone or within a text."""

import os
import re

# FOLDER/SUBSET[SPLIT].
_SUBSET = re.compile(r"([^\s,:*\[\]'\"]+)/([\w.-]+|\*)(\[[\w.-]+\])?")
# A path within a list, command, FILE.py:FUNCTION or FOLDER[SPLIT].
PATH = re.compile(r"[^\s,:*\[\]'\"]+(?P<split>\[)?")


def absolute(text: str) -> str:
  """Returns a setting's text with the paths of existing files made absolute."""

  def replace(match: re.Match[str]) -> str:
    path, bracket = match[0].removesuffix("["), match["split"] or ""
    exists = os.path.exists if bracket else os.path.isfile
    path = os.path.expanduser(path)
    return os.path.abspath(path) + bracket if exists(path) else match[0]

  path = os.path.expanduser(text)
  if os.path.exists(path):
    return os.path.abspath(path)
  match = _SUBSET.fullmatch(path)
  # Without a README.md, ORG/NAME[SPLIT] may be on the hub rather than local.
  if match and os.path.isfile(f"{match[1]}/README.md"):
    return f"{os.path.abspath(match[1])}/{match[2]}{match[3] or ''}"
  return PATH.sub(replace, text)


def existing(text: str) -> list[str]:
  """Returns the existing files and folders that a setting names."""
  words = [
      text,
      *(m[0].removesuffix("[") for m in PATH.finditer(text)),
  ]
  paths = [os.path.abspath(os.path.expanduser(word)) for word in words if word]
  return [path for path in dict.fromkeys(paths) if os.path.exists(path)]

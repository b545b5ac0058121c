# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes text that a model wrote harmless to show, on a page or a terminal."""

import unicodedata

# Control characters have pictures of their own from here on: ESC is ␛.
_PICTURES = 0x2400
_DELETE_PICTURE = "␡"
_KEPT = "\n\t"


def _visible(char: str) -> str:
  code = ord(char)
  if code < 0x20:
    return chr(_PICTURES + code)
  if code == 0x7F:
    return _DELETE_PICTURE
  return f"⟦U+{code:04X}⟧"


def printable(text: str, limit: int = 0, *, one_line: bool = False) -> str:
  """Returns `text` with everything that acts instead of showing made visible.

  Control characters (so ANSI escapes), marks that turn the direction of
  writing, invisible format characters, lone surrogates and unassigned or
  private code points are written out. Line ends and tabs stay.

  Args:
    text: any string.
    limit: longest result in characters of `text`; what is cut is counted in
      the result. 0 = no limit.
    one_line: write line ends and tabs out too.
  """
  cut = max(0, len(text) - limit) if limit else 0
  kept = "" if one_line else _KEPT
  shown = text[: len(text) - cut]
  if not shown.isprintable() or not shown.isascii():
    shown = "".join(
        c
        if c in kept
        or unicodedata.category(c)[0] != "C"
        and c not in "\u2028\u2029"
        else _visible(c)
        for c in shown
    )
  return f"{shown} … ({cut:,} more characters)" if cut else shown

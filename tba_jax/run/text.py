# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats values of a run for a page or a terminal."""

import math
from typing import Any
import unicodedata

# Unicode's pictures of control characters start here: ESC is ␛.
_PICTURES = 0x2400


def is_number(value: Any) -> bool:
  """Returns whether a value is a finite int or float; a bool is not."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  return math.isfinite(value)


def times(count: int) -> str:
  """Returns "once", "twice" or the number of times."""
  return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _visible(char: str) -> str:
  code = ord(char)
  if code < 0x20:
    return chr(_PICTURES + code)
  return "␡" if code == 0x7F else f"⟦U+{code:04X}⟧"


def printable(value: Any, limit: int = 0, *, one_line: bool = False) -> str:
  """Returns text without anything that acts on a terminal or page.

  Spells out control characters (ANSI escapes), direction marks, invisible and
  unassigned characters and lone surrogates.

  Args:
    value: any value; a model may have written it.
    limit: characters to keep; the number cut is appended. 0 = no limit.
    one_line: whether to spell out line ends and tabs too.
  """
  string = str(value)
  cut = max(0, len(string) - limit) if limit else 0
  shown = string[: len(string) - cut]
  if not shown.isprintable() or not shown.isascii():
    allowed = "" if one_line else "\n\t"
    acts = lambda c: unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"
    shown = "".join(
        _visible(c) if acts(c) and c not in allowed else c for c in shown
    )
  return f"{shown} … ({cut:,} more characters)" if cut else shown


def number(value: Any, style: str = "number") -> str:
  """Formats a number ("–" for None); `style` may be "percent" or "count"."""
  if isinstance(value, bool):
    return "yes" if value else "no"
  if not is_number(value):
    return "–" if value is None else printable(value, 200)
  if style == "percent":
    return f"{100 * value:.1f} %"
  if style == "count" or isinstance(value, int):
    return f"{value:,.0f}"
  if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
    return f"{value:.3g}"
  if value and abs(value) < 0.1:  # Two decimals would show 0.004 as 0.00.
    return f"{value:.2g}"
  return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def duration(seconds: Any) -> str:
  """Formats seconds as `1:02 h`, `3:20 min`, `4.2 s` or `50 ms`."""
  if not is_number(seconds):
    return "–"
  if 0 < abs(seconds) < 1:
    return f"{1000 * seconds:.0f} ms"
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(int(seconds), 60)
  if minutes < 60:
    return f"{minutes}:{rest:02d} min"
  return f"{minutes // 60}:{minutes % 60:02d} h"

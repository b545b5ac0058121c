# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of titled rows, as printed by `plan` and `compile`."""

from collections.abc import Iterable
import math

import jax
import jax.numpy as jnp
import rich.box
import rich.console
import rich.table
import rich.text

from tba_jax import types
from tba_jax.system import processes

# Name and value of each row in a table; a value "NO…" marks a failure.
TableRows = list[tuple[str, str]]


def show(sections: Iterable[tuple[str, TableRows]]) -> int:
  """Prints a table of titled rows.

  Returns:
    0; 2 if a row is "NO …", or if making rows raised ValueError, which is
    printed.
  """
  table = rich.table.Table(box=rich.box.ROUNDED, show_header=False)
  table.add_column(style="dim")
  table.add_column(overflow="fold")
  status = processes.EXIT_OK
  try:
    for title, rows in sections:
      table.add_section()
      table.add_row(rich.text.Text(title, "bold cyan"), "")
      for name, value in rows:
        style = ""
        if value.startswith("NO"):
          style, status = "bold red", processes.EXIT_CONFIG
        table.add_row(f"  {name}", rich.text.Text(value, style))
  except ValueError as error:
    return processes.refuse(error)
  rich.console.Console().print(table)
  return status


def format_bytes(num_bytes: float) -> str:
  """Returns bytes in B, KB, MB or GB (powers of 1024)."""
  for unit in ("B", "KB", "MB"):
    if num_bytes < 1024:
      return f"{num_bytes:,.4g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:,.4g} GB"


def fits_rows(num_bytes: int, limit: int, where: str) -> TableRows:
  """Returns a row on whether bytes fit into a memory."""
  verdict = "NO" if num_bytes > limit else "yes"
  sizes = f"{format_bytes(num_bytes)} of {format_bytes(limit)} of {where}"
  return [("fits", f"{verdict}: {sizes} ({num_bytes / limit:.0%})")]


def sharding_rows(params: types.PyTree) -> TableRows:
  """Returns rows on how a mesh splits params (arrays or shapes)."""
  leaves = jax.tree.leaves(params)
  part = lambda x: x.sharding.shard_shape(x.shape)
  size = lambda x, shape: math.prod(shape) * jnp.dtype(x.dtype).itemsize
  whole = [x for x in leaves if part(x) == x.shape]
  return [
      (
          "params",
          f"{format_bytes(sum(size(x, x.shape) for x in leaves))},"
          f" {format_bytes(sum(size(x, part(x)) for x in leaves))} a device",
      ),
      (
          "replicated on every device",
          f"{len(whole)} of {len(leaves)} leaves,"
          f" {format_bytes(sum(size(x, x.shape) for x in whole))}",
      ),
  ]

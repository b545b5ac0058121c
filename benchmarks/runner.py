# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one program of a package and prints its result as one JSON line.

    python -m PACKAGE [--config=FILE] [--config.key=value …] NAME [OPERAND …]

The default config is `configs/countdown.py`. Each module defines
`run(config, operands) -> dict` and documents its measurement.
"""

from collections.abc import Mapping, Sequence
import importlib
import json
import pathlib

from benchmarks import results
from tba_jax.config import load
from tba_jax.system import processes

_CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "countdown.py"


def run(package: str, modules: Mapping[str, str], argv: Sequence[str]) -> int:
  """Runs the program named in `argv`; prints its JSON line.

  Args:
    package: name of the package, for messages.
    modules: program name -> name of its module.
    argv: command-line words after the package.

  Returns:
    Exit status.
  """
  argv, overrides = load.split_argv(argv)
  path = str(_CONFIG)
  if argv and argv[0].startswith("--config="):
    path = argv[0].removeprefix("--config=")
    argv = argv[1:]
  if not argv or argv[0] not in modules:
    return processes.refuse(
        f"python -m {package} {' '.join(argv)}: the first operand must be one"
        f" of {', '.join(modules)}"
    )
  name, *operands = argv
  try:
    with processes.importing():
      module = importlib.import_module(modules[name])
  except ModuleNotFoundError as error:
    if error.name != "matplotlib":
      raise
    return processes.refuse(
        f"python -m {package} {name} draws with matplotlib, which is not"
        " installed: pip install 'tba_jax[plots]'"
    )
  result = module.run(load.load_config(path, overrides), operands)
  line = {"ran": name, **result, "machine": results.machine()}
  print(json.dumps(line), flush=True)
  return processes.EXIT_OK

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tasks of examples/repairs.py, for an agent that writes the whole file."""

import pathlib
import runpy

from tests.support import agents

_FILE = pathlib.Path(__file__).parents[2] / "examples" / "repairs.py"
_MODULE = runpy.run_path(str(_FILE))
TASKS, Scripted, Npm = (_MODULE[name] for name in ("TASKS", "Scripted", "Npm"))


class Writer(_MODULE["Repairs"]):
  """Writes the policy's turn to the file."""

  def work(self, issue, container, url):
    container.put("task.py", agents.complete(url, issue).encode())


def make(case, name="Writer", **arguments):
  """Returns the environments of an agent, closed with the test case."""
  from tests.support import episodes

  return episodes.make(
      case,
      f"{__file__}:{name}",
      max_prompt_tokens=1000,
      deadline_s=60.0,
      readable=str(_FILE),
      env_vars="REPAIRS_KIND,REPAIRS_IMAGE",
      **arguments,
  )


def attempts(values):
  """Returns files that try to pass the test without the functions."""
  names = ", ".join(map(str, values.values()))
  return [
      # Ends the test's process, as if it had passed.
      "import os\nprint('[]')\nos._exit(0)\n",
      "import os, sys\nprint(sys.stdin.read())\nos._exit(0)\n",
      # Equal to everything, while it is in this process.
      "class Any:\n  __eq__ = lambda *_: True\n"
      "  __repr__ = lambda _: 'Any()'\nmean = lambda _: Any()\n",
      # Looks for the values in the example and in other processes.
      "import glob, os\n"
      "processes = [*glob.glob('/proc/[0-9]*/*')]\n"
      f"for path in [{str(_FILE)!r}, *processes]:\n"
      "  try:\n"
      "    with open(path, 'rb') as file:\n"
      "      text = file.read(10**6)\n"
      "  except (OSError, ValueError):\n"
      "    continue\n"
      "  if b'mean([1, ' + b'2])\": ' in text:\n"
      f"    print([{names}])\n"
      "    os._exit(0)\n",
      # Takes too long, deeply nested, too long.
      "while True: pass\n",
      "mean = lambda _: None\nprint('[' * 10**5)\nimport os; os._exit(0)\n",
      "print('0' * 10**7)\n",
  ]

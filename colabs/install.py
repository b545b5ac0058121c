# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs tba_jax for this machine's CPU, GPU or TPU, unless it is installed.

Uses the checkout that contains this notebook, one next to it, or an uploaded
.zip of one; otherwise, as in a new Colab runtime, clones REPOSITORY. Prints
each action.
"""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

REPOSITORY = ""  # URL that `git clone` takes; "" = a checkout on this machine.


def find_checkout():
  here = pathlib.Path.cwd()
  for folder in (here, *here.parents, *here.glob("tba_jax*")):
    if (folder / "setup.py").exists() and (folder / "tba_jax/main.py").exists():
      return folder
  return None


# In a checkout Python finds tba_jax even without its dependencies.
specs = [importlib.util.find_spec(name) for name in ("tba_jax", "jax")]
if all(spec and spec.origin for spec in specs):
  print("tba_jax", importlib.metadata.version("tba_jax"), "is installed")
else:
  for archive in glob.glob("tba_jax*.zip"):
    shutil.unpack_archive(archive)
  checkout = find_checkout()
  if checkout is None:
    if not REPOSITORY:
      raise FileNotFoundError(
          "no tba_jax here: upload a .zip of its checkout (Files, on the left),"
          " or set REPOSITORY above to a URL; then run this cell again"
      )
    print("cloning", REPOSITORY, flush=True)
    subprocess.run(["git", "clone", "-q", REPOSITORY, "tba_jax"], check=True)
    checkout = find_checkout()
  os.chdir(checkout)
  has_tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
  extra = ",tpu" if has_tpu else ",cuda" * bool(shutil.which("nvidia-smi"))
  print(f"installing {checkout}, which takes some minutes", flush=True)
  pip = [sys.executable, "-m", "pip", "install", "-q", "-e", f".[plots{extra}]"]
  subprocess.run(pip, check=True)

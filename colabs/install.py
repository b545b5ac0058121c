# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs tba_jax, unless it is, for this machine's CPU, GPU or TPU.

From a checkout beside this notebook, or a .zip of one, else from REPOSITORY.
"""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys

REPOSITORY = ""  # Where it is published: the URL that `git clone` takes.

# A folder named tba_jax is found too, as a package without an origin.
if getattr(importlib.util.find_spec("tba_jax"), "origin", None) is None:
  for archive in glob.glob("tba_jax*.zip"):
    shutil.unpack_archive(archive)
  found = glob.glob("tba_jax*/setup.py") + glob.glob("../setup.py")
  if not found:
    if not REPOSITORY:
      raise FileNotFoundError(
          "no tba_jax here: upload a .zip of its checkout (Files, on the left),"
          " or set REPOSITORY above to a URL; then run this cell again"
      )
    subprocess.run(["git", "clone", "-q", REPOSITORY, "tba_jax"], check=True)
    found = ["tba_jax/setup.py"]
  os.chdir(os.path.dirname(found[0]))
  has_tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
  extra = ",tpu" if has_tpu else ",cuda" * bool(shutil.which("nvidia-smi"))
  pip = [sys.executable, "-m", "pip", "install", "-q", "-e", f".[plots{extra}]"]
  subprocess.run(pip, check=True)

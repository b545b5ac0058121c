# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of containers that this machine can run, for tests."""

import contextlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from unittest import mock

from tests.support import harness

IMAGE = "localhost/tba_jax-test"
# Works with control groups of both versions, and with low limits.
_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


def root_file_system() -> bytes:
  """Returns a tar file of a root file system; skips without busybox."""
  busybox = shutil.which("busybox")
  if busybox is None:
    raise unittest.SkipTest("busybox-static is not installed")
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w") as tar:
    for name in ("bin", "etc", "home", "proc", "tmp", "usr"):
      folder = tarfile.TarInfo(name)
      folder.type, folder.mode = tarfile.DIRTYPE, 0o755
      tar.addfile(folder)
    tar.add(os.path.realpath(busybox), "bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True)
    for name in {*listed.stdout.split()} - {"busybox"}:
      link = tarfile.TarInfo(f"bin/{name}")
      link.type, link.linkname = tarfile.SYMTYPE, "busybox"
      tar.addfile(link)
  return out.getvalue()


def import_image(stack: contextlib.ExitStack) -> None:
  """Imports an image to podman; skips where podman does not work."""
  if shutil.which("podman") is None:
    raise unittest.SkipTest("podman is not installed")
  data = root_file_system()
  folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
  reasons = []
  for runtime in ("crun", "runc"):
    conf = folder / f"{runtime}.conf"
    conf.write_text(f'{_CONF}runtime = "{runtime}"\n')
    stack.enter_context(mock.patch.dict(os.environ, CONTAINERS_CONF=str(conf)))
    for words in (
        ("import", "-", IMAGE),
        ("run", "--rm", "--network=none", IMAGE, "true"),
    ):
      ran = subprocess.run(
          ["podman", *words],
          input=data if words[0] == "import" else b"",
          capture_output=True,
      )
    if ran.returncode == 0:
      stack.callback(
          subprocess.run, ["podman", "rmi", "-f", IMAGE], capture_output=True
      )
      return
    reasons.append(ran.stderr.decode()[-200:])
  raise unittest.SkipTest(f"podman does not work here: {reasons}")


@contextlib.contextmanager
def server(*words: str):
  """Yields the URL of `examples/container_server.py`, and its process."""
  process = subprocess.Popen(
      [sys.executable, "examples/container_server.py", *words],
      cwd=harness.ROOT,
      stdout=subprocess.PIPE,
      text=True,
      env=harness.environment(),
  )
  try:
    yield process.stdout.readline().strip(), process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()

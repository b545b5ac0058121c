# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the files of params lie. No JAX here.

A run's files are in a directory of their own, named by the run and open to its
user alone: in `publish.directory` or, where that is empty, in memory
(`/dev/shm`) and, where there is none, in the run directory. Of what Orbax
writes, `publish.directory` may be in an object store (`gs://`), which has
permissions of its own.
"""

import os
import pathlib
import shutil
import stat

_MEMORY = pathlib.Path("/dev/shm")
# What may be mapped: a file that is removed stays readable there while someone
# has it. On a file system of another machine the reader would be killed.
_LOCAL_TYPES = ("tmpfs", "ramfs", "ext4", "ext3", "ext2", "xfs", "btrfs",
                "zfs", "f2fs", "overlay")  # fmt: skip


def path_of(setting: str, workdir: pathlib.Path, run_id: str) -> pathlib.Path:
  """Returns the directory of a run's params; does not make it.

  Args:
    setting: `publish.directory`; one in an object store is no place for files.
    workdir: of the run.
    run_id: the run.
  """
  if setting and not is_remote(setting):
    return pathlib.Path(setting).expanduser().absolute() / f"params-{run_id}"
  if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
    return _MEMORY / f"tba_jax-{os.getuid()}" / f"params-{run_id}"
  return pathlib.Path(workdir).absolute() / "params"


def prepare(path: pathlib.Path) -> None:
  """Makes the directory with mode 0700 where it is not there, and checks it.

  Raises:
    ValueError: it or the one that it lies in is a link, or it is another
      user's, or others may enter it.
  """
  shared = path.parent
  shared.mkdir(mode=0o700, parents=True, exist_ok=True)
  path.mkdir(mode=0o700, exist_ok=True)
  own_parent = shared.name == f"tba_jax-{os.getuid()}"
  for folder in (shared, path) if own_parent else (path,):
    info = os.lstat(folder)
    if (
        not stat.S_ISDIR(info.st_mode)
        or info.st_uid != os.getuid()
        or info.st_mode & 0o077
    ):
      raise ValueError(
          f"config.publish.directory: {folder} must be a directory of this"
          f" user with mode 0700, it has {stat.S_IMODE(info.st_mode):04o}"
      )


def is_remote(setting: str) -> bool:
  """Tells whether `publish.directory` is in an object store."""
  return "://" in setting


def shards_of(setting: str, workdir: pathlib.Path, run_id: str) -> str:
  """Returns the place of a run's shards, as `path_of`; it may be remote."""
  if is_remote(setting):
    return f"{setting.rstrip('/')}/params-{run_id}/shards"
  return str(path_of(setting, workdir, run_id) / "shards")


def prepare_shards(place: str) -> None:
  """Makes the place of shards where it is one of a file system.

  Raises:
    ValueError: as `prepare`.
  """
  if not is_remote(place):
    path = pathlib.Path(place)
    prepare(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def remove(path: pathlib.Path) -> None:
  """Removes a run's params; who has mapped some keeps them."""
  shutil.rmtree(path, ignore_errors=True)


def is_local(path: pathlib.Path) -> bool:
  """Tells whether files there may be mapped and removed meanwhile."""
  try:
    mounts = pathlib.Path("/proc/self/mounts").read_text()
  except OSError:
    return False
  best, kind = "", ""
  target = os.path.realpath(path)
  for line in mounts.splitlines():
    _, point, name = line.split(" ")[:3]
    point = point.replace("\\040", " ")
    inside = target == point or target.startswith(point.rstrip("/") + "/")
    # Of two mounts on one point the later one is seen.
    if inside and len(point) >= len(best):
      best, kind = point, name
  return kind in _LOCAL_TYPES

# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The run directory: config, identity, epoch, locks and spool.

`config.json` is written before anything starts, and again when a run is resumed
with other settings; every role and every later program reads it.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import secrets
import subprocess
import sys
import time
from typing import Any

import ml_collections

from tba_jax.run import files
from tba_jax.run import run_files
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import addresses
from tba_jax.transport import wire
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import locator as locator_lib

FORMAT = 3
# `last_process` holds a lock for an instant; `lock` retries for this long.
_PROBE_S = 0.2
_NO_SECRET = b"without a secret".ljust(wire.SECRET_BYTES, b".")
# Files that processes read at their start.
_READ = ("config.json", "epoch.json", "eval.json")
# Files that processes append to or replace, by folder.
_WRITTEN = {
    "": "*.json *.jsonl *.csv report.html".split(),
    "sft": ["*.json*"],
    "reward_model": ["*.json*"],
    "logs": ["*"],
    "replay": ["*"],
    "leases": ["*"],
    "spans": ["*"],
}
_SPOOLED = ("generation", "host.lock", locator_lib.FILE_NAME)
_FOLDERS = ("logs", "replay", "leases", "checkpoints", "spans")
_PACKAGES = ("tba_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint",
             "transformers", "numpy")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunInfo:
  """Identity of a run, which its processes must share to communicate.

  workdir: the run directory, absolute.
  run_id: random identifier; messages of other runs are refused.
  spool: local 0700 directory of socket, locator, lock and secret.
  secret: key that authenticates every message.
  announced: "host:port" at which the store announces itself; "" = in `spool`.
  tls: files of mutual TLS if the run has a port; None = no TLS.
  memory: records of a run that leaves no files, whose directory has only models
    made earlier; None = the directory has the records.
  """

  workdir: pathlib.Path
  run_id: str
  spool: pathlib.Path
  secret: bytes
  announced: str = ""
  tls: certificates.Tls | None = None
  memory: files.Memory | None = None

  @property
  def files(self) -> files.Directory | files.Memory:
    """Where the run's records go."""
    return self.memory or files.Directory(self.workdir)

  @property
  def locator(self) -> pathlib.Path:
    return self.spool / locator_lib.FILE_NAME

  @property
  def root(self) -> str:
    """Directory of all keys in the store."""
    return locator_lib.root(self.run_id, self.secret)

  @property
  def finder(self) -> pathlib.Path | locator_lib.RemoteLocator:
    """Locates the store for a client; each client has its own."""
    if self.announced:
      return locator_lib.RemoteLocator(self.announced, self.secret)
    return self.locator


class NoRunError(ValueError):
  """The directory, secret, store or a setting keeps a role from starting."""


def check_folder(workdir: str, argument: str = "--workdir") -> None:
  """Raises ValueError, naming the argument, if it or a parent is a file."""
  path = pathlib.Path(workdir).absolute()
  place = next(p for p in (path, *path.parents) if p.exists())
  if not place.is_dir():
    what = "" if place == path else f"{place} "
    raise ValueError(
        f"{argument}={workdir}: {what}is a file; must be a folder, or a new"
        " path"
    )


def create(
    workdir: str, config: ml_collections.ConfigDict
) -> tuple[RunInfo, dict[str, Any] | None]:
  """Writes `config.json` unless it exists.

  Returns:
    The run, and the previously saved config as a plain dict, None if new.

  Raises:
    ValueError: the directory has another format than ours, or a file in it is
      damaged.
    OSError: the directory cannot be written; the message names it.
  """
  path = pathlib.Path(workdir).absolute()
  path.mkdir(parents=True, exist_ok=True)
  saved = _read(path)
  if saved is None:
    _write(path, config, run_id=secrets.token_hex(8), created=time.time())
  try:
    run = open_run(workdir, config)
  except NoRunError:
    if saved is None:
      (path / "config.json").unlink()  # A refused run leaves no file.
    raise
  check_written(run)
  return run, saved["config"] if saved else None


def in_memory(workdir: str, config: ml_collections.ConfigDict) -> RunInfo:
  """Returns a run that leaves no files; stages may use `workdir`."""
  run = RunInfo(
      workdir=pathlib.Path(workdir).absolute(),
      run_id=secrets.token_hex(8),
      spool=pathlib.Path(workdir),
      secret=_NO_SECRET,
      memory=files.Memory(),
  )
  record = _record(config, run_id=run.run_id, created=time.time())
  run.files.write("config.json", record)
  return run


def check_written(run: RunInfo) -> None:
  """Raises ValueError if a file that the run writes cannot be written."""
  paths = [
      path
      for folder, patterns in _WRITTEN.items()
      for pattern in patterns
      for path in sorted((run.workdir / folder).glob(pattern))
  ]
  for path in (*paths, *(run.spool / name for name in _SPOOLED)):
    if path.is_dir():
      raise ValueError(f"{path}: damaged: is a directory; remove it")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
      raise ValueError(f"{path}: must be a file that this user may change")


def update(workdir: str, config: ml_collections.ConfigDict) -> None:
  """Writes the config of a resumed run, keeping the run's identity."""
  path = pathlib.Path(workdir).absolute()
  saved = _read(path)
  _write(path, config, run_id=saved["run_id"], created=saved["created"])


def open_run(workdir: str, config: ml_collections.ConfigDict) -> RunInfo:
  """Returns the run in a directory.

  If it does not exist and `config.store.locator` is set, waits up to
  `config.store.deadline_s` for that store and joins its run.

  Raises:
    NoRunError: there is no run, it has another format, its spool is unsafe, or
      its secret is missing or not the store's.
  """
  try:
    return _open_run(workdir, config)
  except (ValueError, OSError) as error:
    raise NoRunError(str(error)) from error


def _open_run(workdir: str, config: ml_collections.ConfigDict) -> RunInfo:
  path = pathlib.Path(workdir).absolute()
  saved = _read(path)
  if saved is None and not config.store.locator:
    raise ValueError(
        f"--workdir={workdir}: no run is there (no config.json);"
        " --program=store makes one, and config.store.locator names a store"
        " to join"
    )
  spool = processes.spool_directory(config.store.spool_dir, str(path))
  secret = _secret(config, spool)
  if saved is None:
    announced = _ask(config, secret)
    path.mkdir(parents=True, exist_ok=True)
    _write(path, config, run_id=announced.run, created=time.time())
    saved = _read(path)
  return RunInfo(
      workdir=path,
      run_id=saved["run_id"],
      spool=spool,
      secret=secret,
      announced=config.store.locator,
      tls=_tls(config, path, spool, secret),
  )


def warn_unguarded(run: RunInfo, config: ml_collections.ConfigDict) -> None:
  """Warns on stderr if the store listens to other hosts without TLS."""
  address = config.store.address
  if run.tls is None and not addresses.is_one_host(address):
    print(certificates.unguarded(address), file=sys.stderr, flush=True)


def load_config(workdir: str) -> ml_collections.ConfigDict:
  """Returns the config that a run directory was made with.

  Raises ValueError without a run, or if its format is not ours.
  """
  saved = _read(pathlib.Path(workdir).absolute())
  if saved is None:
    raise ValueError(f"--workdir={workdir}: no run is there (no config.json)")
  return ml_collections.ConfigDict(saved["config"])


def run_id(workdir: str) -> str:
  """Returns the id of the run in a directory, or ""."""
  saved = _read(pathlib.Path(workdir).absolute())
  return saved["run_id"] if saved else ""


def next_epoch(run: RunInfo) -> int:
  """Counts a start of the trainer; returns the new epoch."""
  path = run.workdir / "epoch.json"
  saved = _read_epoch(path)
  jsonl.atomic_write_json(path, {**saved, "epoch": saved["epoch"] + 1})
  return saved["epoch"] + 1


def owner(run: RunInfo) -> str:
  """Returns the id of a trainer's directory, which copies of it share."""
  path = run.workdir / "epoch.json"
  saved = _read_epoch(path)
  if "owner" not in saved:
    saved["owner"] = secrets.token_hex(8)
    jsonl.atomic_write_json(path, saved)
  return saved["owner"]


def _read_epoch(path: pathlib.Path) -> dict[str, Any]:
  return jsonl.read_object(path, run_files.SCHEMAS[path.name]) or {"epoch": 0}


def lock(workdir: str, role: str = "") -> int:
  """Locks the run directory for this process; returns the open lock file.

  One process per `role` may hold it; "" is the supervisor.

  Raises:
    ValueError: another process holds the lock (the error names its pid), or the
      directory is no folder or cannot be written.
  """
  path = _lock_path(workdir, role)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    return processes.lock_file(path, wait_s=_PROBE_S)
  except OSError as error:
    raise ValueError(
        f"--workdir={workdir}: {error.strerror}: {error.filename}; must be a"
        " folder that this user may write"
    ) from error
  except processes.LockedError as holder:
    raise ValueError(
        f"--workdir={workdir}: process {holder} already runs there"
        + (f" as the {role}" if role else "")
    ) from None


def last_process(workdir: str, role: str = "") -> tuple[int, bool] | None:
  """Returns the pid that last locked the directory, and whether it still does.

  None if no process of this host is known to have locked it.
  """
  try:
    fd = os.open(_lock_path(workdir, role), os.O_RDONLY)
  except OSError:
    return None
  try:
    pid = int(os.read(fd, 64))
    # The kernel releases a lock when its process ends, however that happens.
    # Testing it holds it for an instant, which `lock` waits for.
    return pid, not processes.try_lock(fd, shared=True)
  except (OSError, ValueError):
    return None
  finally:
    os.close(fd)


def _lock_path(workdir: str, role: str) -> pathlib.Path:
  return pathlib.Path(workdir).absolute() / f".{role}{'.' * bool(role)}lock"


def _ask(
    config: ml_collections.ConfigDict, secret: bytes
) -> locator_lib.Locator:
  """Waits for a store to announce its run."""
  deadline = time.monotonic() + config.store.deadline_s
  while (
      announced := locator_lib.ask_announcer(config.store.locator, secret)
  ) is None:
    if time.monotonic() > deadline:
      raise ValueError(
          f"config.store.locator={config.store.locator}: no store answered"
          f" within {config.store.deadline_s:.0f} s"
      )
    time.sleep(0.25)
  return announced


def _gives_secret(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the secret comes from outside the spool."""
  return bool(os.environ.get(wire.SECRET_VARIABLE) or config.store.secret_file)


def _secret(config: ml_collections.ConfigDict, spool: pathlib.Path) -> bytes:
  """Returns the secret of the environment, of a file, or of the spool."""
  text, file = os.environ.get(wire.SECRET_VARIABLE), config.store.secret_file
  if text:
    try:
      secret = bytes.fromhex(text)
    except ValueError:
      secret = b""
    if len(secret) != wire.SECRET_BYTES:
      raise ValueError(
          f"{wire.SECRET_VARIABLE}: must be {2 * wire.SECRET_BYTES}"
          " hexadecimal digits"
      )
    return secret
  if file:
    path = pathlib.Path(file).expanduser()
    # A secret generated here would differ from the other hosts' secret.
    if not path.exists():
      raise ValueError(
          f"config.store.secret_file={file}: there is no such file; make it"
          f" with  (umask 077; head -c {wire.SECRET_BYTES} /dev/urandom >"
          f" {file})  and copy it to every host"
      )
    return wire.load_or_make_secret(path)
  away = config.store.address or config.store.locator
  if away and (config.store.insecure or config.store.tls_cert_file):
    # Hosts still need a common value; TLS protects the run, or nothing does.
    return _NO_SECRET
  return wire.load_or_make_secret(spool / "secret")


def _tls(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    spool: pathlib.Path,
    secret: bytes,
) -> certificates.Tls | None:
  """Returns TLS files, named in the settings or made from the secret."""
  store = config.store
  if store.tls_cert_file:
    files = (store.tls_cert_file, store.tls_key_file, store.tls_ca_file)
    return certificates.Tls(*(os.path.expanduser(file) for file in files))
  has_port = store.address or store.locator or config.trainer.num_processes > 1
  if has_port and not store.insecure and certificates.is_supported():
    if _gives_secret(config):
      # Hosts may share the workdir, and the spool in it, with others.
      spool = processes.temporary_directory(workdir / "tls")
    return certificates.make(spool, secret)
  return None


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns `config.json`, None if missing.

  Raises ValueError if a file of the run is damaged or has another format.
  """
  for name in _FOLDERS:
    if (path / name).exists() and not (path / name).is_dir():
      raise ValueError(f"{path / name}: damaged: is no directory")
  saved, *_ = (
      jsonl.read_object(path / name, run_files.SCHEMAS[name]) for name in _READ
  )
  if saved is not None:
    check_format(path / "config.json", saved)
  return saved


def check_format(path: pathlib.Path, saved: dict[str, Any]) -> None:
  """Raises ValueError if a run directory has another format than ours.

  Args:
    path: `config.json` of the run directory.
    saved: contents of `path`.
  """
  if saved["format"] != FORMAT:
    raise ValueError(
        f"{path} has format {saved['format']}, this version reads {FORMAT}: use"
        f" the version of tba_jax that made the run ({_maker(saved)}), or"
        " another --workdir for a new run"
    )


def _maker(saved: dict[str, Any]) -> str:
  """Returns the version of tba_jax that wrote a `config.json`."""
  versions, revision = saved.get("versions"), saved.get("git_revision")
  version = versions.get("tba_jax") if isinstance(versions, dict) else None
  return f"{version or 'unknown'}, git revision {revision or 'unknown'}"


def _write(
    path: pathlib.Path,
    config: ml_collections.ConfigDict,
    *,
    run_id: str,
    created: float,
) -> None:
  record = _record(config, run_id=run_id, created=created)
  jsonl.atomic_write_json(path / "config.json", record)


def _record(
    config: ml_collections.ConfigDict, *, run_id: str, created: float
) -> dict[str, Any]:
  """Returns the content of `config.json`."""
  return {
      "format": FORMAT,
      "run_id": run_id,
      "created": created,
      "config": config.to_dict(),
      "versions": _versions(),
      "git_revision": _git_revision(),
  }


def _versions() -> dict[str, str]:
  versions = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "not installed"
  return versions


def _git_revision() -> str:
  try:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return "unknown"

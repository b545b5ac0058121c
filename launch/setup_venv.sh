# shellcheck shell=bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by launch/local.sh and tests/run.sh: `setup_venv ROOT [EXTRA …]`
# installs tba_jax and the extras into ROOT/.venv if they are not there yet, and
# sets VENV_PYTHON.
#
# ROOT/.venv/.tba_jax_stamp records a finished install: a hash of its inputs,
# then one line per part ("base" and extras). It is removed before an install
# starts, and ROOT/.venv/.tba_jax_installing exists until the install ends, so
# that the run after an interrupted one reinstalls all packages.
#
# Packages are installed by uv, which takes about ten seconds where pip takes a
# minute or more, or by pip if uv is missing or fails.

die() {
  echo "error: $*" >&2
  exit 1
}

# Prints the interpreter to use: PYTHON if set, else the first of the usual
# names that is recent enough.
find_python() {
  local check='import sys; sys.exit(sys.version_info < (3, 11))' candidate
  if [[ -n "${PYTHON:-}" ]]; then
    "$PYTHON" -c "$check" 2>/dev/null \
      || die "PYTHON=$PYTHON does not run, or is older than Python 3.11"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13 python; do
    if "$candidate" -c "$check" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "tba_jax needs Python 3.11 or newer and found none;" \
    "install one, or name it: PYTHON=/path/to/python3.11 $0"
}

has_pip() {
  "$1/bin/python" -m pip --version >/dev/null 2>&1
}

# Creates ROOT/.venv unless it exists and is complete.
make_venv() {
  local venv="$1/.venv" python
  has_pip "$venv" && return
  # Created by a tool that leaves out pip, or interrupted before pip.
  "$venv/bin/python" -m ensurepip >/dev/null 2>&1 && has_pip "$venv" && return
  python="$(find_python)" || exit 1
  echo "Making $venv with $("$python" --version)" >&2
  if ! "$python" -m venv --clear "$venv" >&2; then
    rm -rf "$venv"
    die "'$python -m venv' failed; on Debian and Ubuntu it needs the package" \
      "python3-venv (apt-get install python3-venv). Or name another Python:" \
      "PYTHON=/path/to/python $0"
  fi
}

# Prints a working uv: the one on the PATH, or one from pip's index that is kept
# apart from the packages of VENV.
find_uv() {
  local venv="$1" own="$1/uv/bin/uv"
  if uv --version >/dev/null 2>&1; then
    echo uv
  elif "$own" --version >/dev/null 2>&1; then
    echo "$own"
  else
    rm -rf "$venv/uv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
      --no-deps --only-binary=:all: --retries 1 --timeout 15 \
      --target "$venv/uv" uv >/dev/null 2>&1 \
      && "$own" --version >/dev/null 2>&1 && echo "$own"
  fi
}

# Prints pip's settings, from files and the environment, as options of uv, one
# per line; fails if uv has no such option. With several indices, pip takes the
# best version, uv by default one from the first index that has any.
uv_options() {
  "$1/bin/python" - <<'END'
import ast
import os
import subprocess
import sys

OPTIONS = {
    "index-url": "--default-index", "extra-index-url": "--index",
    "find-links": "--find-links", "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
FLAGS = {"no-index": "--no-index", "pre": "--prerelease=allow"}
# Settings of how pip works and what it prints.
IGNORED = {
    "break-system-packages", "cache-dir", "config-file", "default-timeout",
    "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
    "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv",
    "retries", "root-user-action", "timeout", "verbose",
}
listed = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"],
    capture_output=True, text=True, check=True,
).stdout
settings = {}
for section in ("global", "install", ":env:"):
  for line in listed.splitlines():
    name, _, value = line.partition("=")
    if name.startswith(f"{section}.") and ast.literal_eval(value):
      settings[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
print("--index-strategy=unsafe-best-match")
for name, value in settings.items():
  if name in OPTIONS:
    for part in value.split():
      print(f"{OPTIONS[name]}={part}")
  elif name in FLAGS:
    if value.lower() in ("1", "true", "t", "yes", "y", "on"):
      print(FLAGS[name])
  elif name == "cert" and os.environ.get("SSL_CERT_FILE"):
    pass  # uv reads this variable.
  elif name not in IGNORED:
    sys.exit(f"pip's setting {name} has no option of uv")
END
}

# install_packages VENV ARG…: `pip install ARG…`, by uv if possible.
install_packages() {
  local venv="$1" uv found options=()
  shift
  if uv="$(find_uv "$venv")" && found="$(uv_options "$venv")"; then
    mapfile -t options <<<"$found"
    if "$uv" pip install --quiet --python "$venv/bin/python" \
      "${options[@]}" "$@" >&2
    then
      return
    fi
    echo "uv could not install this; trying pip" >&2
  fi
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    "${@/#--reinstall/--force-reinstall}" >&2
}

setup_venv() {
  local root="$1" venv="$1/.venv" stamp="$1/.venv/.tba_jax_stamp"
  local started="$1/.venv/.tba_jax_installing"
  local want extra target="$1" missing=() again=() old_lines
  shift
  # Two runs on a fresh checkout must not install at the same time. The lock is
  # on an existing file and is released with the file descriptor.
  exec 9<"$root/setup.py"
  if command -v flock >/dev/null; then
    flock -w 1800 9 || die "another install into $venv has not ended in 30 min"
  fi
  make_venv "$root"
  VENV_PYTHON="$venv/bin/python"
  want="$(
    { echo "$root"; "$VENV_PYTHON" -VV
      cat "$root/setup.py" "$root/pyproject.toml" "$root/constraints.txt"
    } | "$VENV_PYTHON" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
  )"
  old_lines="$(cat "$stamp" 2>/dev/null || true)"
  [[ "${old_lines%%$'\n'*}" == "$want" ]] || old_lines="$want"
  for extra in base "$@"; do
    grep -qxF -- "$extra" <<<"$old_lines" || missing+=("$extra")
  done
  if ((${#missing[@]})); then
    (($#)) && target="${root}[$(IFS=,; echo "$*")]"
    echo "Installing tba_jax (${missing[*]}) into $venv (once, minutes)" >&2
    rm -f "$stamp"
    [[ ! -e "$started" ]] || again=(--reinstall)
    touch "$started"
    install_packages "$venv" ${again[@]+"${again[@]}"} \
      --constraint "$root/constraints.txt" --editable "$target" \
      || { exec 9<&-; return 1; }
    printf '%s\n' "$old_lines" "${missing[@]}" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm -f "$started"
  fi
  exec 9<&-
}

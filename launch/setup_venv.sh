# shellcheck shell=bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by launch/local.sh and tests/run.sh: `setup_venv ROOT [EXTRA …]` makes
# ROOT/.venv with tba_jax and the extras in it, or returns at once where that
# is already so, and sets VENV_PYTHON.
#
# ROOT/.venv/.tba_jax_stamp tells what a finished install put there: a hash of
# what decides it, then one line for each part. It is removed before an install
# starts, so an interrupted one is repaired by the next run.

die() {
  echo "error: $*" >&2
  exit 1
}

# Prints the interpreter to use: PYTHON where it is set, else the first of the
# usual names that is new enough.
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

# Makes ROOT/.venv unless a whole one is there.
make_venv() {
  local venv="$1/.venv" python
  has_pip "$venv" && return
  # Made by a tool that leaves pip out, or cut off before pip came.
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

setup_venv() {
  local root="$1" venv="$1/.venv" stamp="$1/.venv/.tba_jax_stamp"
  local want extra target="$1" missing=() old_lines
  shift
  # Two runs on a fresh checkout must not install over each other. The lock is
  # on a file that is there anyway, and goes with the file descriptor.
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
    echo "Installing tba_jax (${missing[*]}) into $venv; once, some minutes" >&2
    rm -f "$stamp"
    "$VENV_PYTHON" -m pip install -qq --disable-pip-version-check \
      --constraint "$root/constraints.txt" --editable "$target" >&2 \
      || { exec 9<&-; return 1; }
    printf '%s\n' "$old_lines" "${missing[@]}" >"$stamp.new"
    mv "$stamp.new" "$stamp"
  fi
  exec 9<&-
}

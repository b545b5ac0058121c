#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs one role of a run on this host, and starts it again where it ended by an
# error, unless systemd or Kubernetes does. The launch scripts call it.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/role.sh [--wait_for=FILE] [--make_secret=FILE] [--once]
                      [--log=FILE] --program=P … [--index_from=VARIABLE]
                      [OPERAND …]

Runs `python -m tba_jax.main` with these arguments until it ends with status 0
(done), 2 (a setting is wrong), 3 (it would end in the same place again) or by a
signal of ours; after any other end it is started again.

--wait_for waits for a file first, WAIT_S seconds at most (900). --index_from
stands for the value of a variable of the environment, the number of this host.
--make_secret makes a run's secret, 32 random bytes in a file of mode 0600, where
there is none. --once leaves starting the role again to others, to Kubernetes say.
--log appends all output to a file.
PYTHON names the interpreter (default: .venv/bin/python of this checkout).
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
pause_s="${PAUSE_S:-5}"
file=""
once=0
args=()
for arg in "$@"; do
  case "$arg" in
    -h | --help) usage; exit 0 ;;
    --wait_for=*) file="${arg#*=}" ;;
    --once) once=1 ;;
    --make_secret=*)
      # Linked into place whole: two hosts never end up with two secrets.
      secret="${arg#*=}"
      if [[ ! -e "$secret" ]]; then
        mkdir -p "$(dirname "$secret")"
        (umask 077; head -c 32 /dev/urandom >"$secret.$$")
        ln "$secret.$$" "$secret" 2>/dev/null || true
        rm -f "$secret.$$"
      fi
      ;;
    --log=*) exec >>"${arg#*=}" 2>&1 ;;
    --index_from=*)
      variable="${arg#*=}"
      if [[ -z "${!variable:-}" ]]; then
        echo "error: $arg: there is no such variable here" >&2
        exit 2
      fi
      args+=("${!variable}")
      ;;
    *) args+=("$arg") ;;
  esac
done

if [[ -n "$file" ]]; then
  for ((second = 0; second < ${WAIT_S:-900}; second++)); do
    [[ -e "$file" ]] && break
    sleep 1
  done
  if [[ ! -e "$file" ]]; then
    echo "error: $file did not come in ${WAIT_S:-900} s; is the store up?" >&2
    exit 1
  fi
fi

child=0
stopped=0
# The role saves what it has, and leaves.
leave() {
  stopped=1
  if ((child)); then kill -TERM "$child" 2>/dev/null || true; fi
}
trap leave TERM INT

cd "$root"
while :; do
  status=0
  "$python" -m tba_jax.main ${args[@]+"${args[@]}"} &
  child=$!
  wait "$child" || status=$?
  # A signal ends `wait` before the role has ended.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=0
  if ((stopped || once)); then exit "$status"; fi
  case "$status" in
    0 | 2 | 3) exit "$status" ;;
  esac
  echo "role.sh: ended with status $status; again in $pause_s s" >&2
  sleep "$pause_s" &
  wait $! || true
  if ((stopped)); then exit "$status"; fi
done

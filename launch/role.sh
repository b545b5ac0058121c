#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs one role of a run on this host, and restarts it after an error, unless
# systemd or Kubernetes does. The launch scripts call it.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/role.sh [--wait_for=FILE] [--make_secret=FILE] [--once]
                      [--log=FILE] --program=P … [--index_from=VARIABLE]
                      [OPERAND …]

Runs `python -m tba_jax.main` with these arguments until it ends with status 0
(done), 2 (invalid setting), 3 (the error would recur) or after SIGTERM or
SIGINT to this script; restarts it otherwise.

--wait_for first waits for a file, at most WAIT_S seconds (default: 900).
--index_from passes the value of an environment variable, this host's index.
--make_secret creates the run's secret, 32 random bytes in a file with mode
0600, if it does not exist. --once does not restart the role, for example
because Kubernetes does. --log appends all output to a file.
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
      # Linked into place atomically, so that two hosts agree on one secret.
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
        echo "error: $arg: the environment variable is not set" >&2
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
    echo "error: no $file after ${WAIT_S:-900} s; is the store running?" >&2
    exit 1
  fi
fi

child=0
stopped=0
# Asks the role to save and exit.
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
  # A signal interrupts `wait` before the role has ended.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=0
  if ((stopped || once)); then exit "$status"; fi
  case "$status" in
    0 | 2 | 3) exit "$status" ;;
  esac
  echo "role.sh: ended with status $status; restarting in $pause_s s" >&2
  sleep "$pause_s" &
  wait $! || true
  if ((stopped)); then exit "$status"; fi
done

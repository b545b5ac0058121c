#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Keeps one role of a run going on this host: starts it, and starts it again
# where it ended by an error. The launch scripts call it on every host.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/role.sh [--wait_for=FILE] [--make_secret=FILE] [--once]
                      [--detach=LOG] --program=P … [--index_from=VARIABLE]
                      [OPERAND …]
       launch/role.sh --stop=LOG

Runs `python -m tba_jax.main` with these arguments until it ends with status 0
(done), 2 (a setting is wrong), 3 (it would end in the same place again) or by a
signal of ours; after any other end it is started again.

--wait_for waits for a file first, WAIT_S seconds at most (900). --index_from
stands for the value of a variable of the environment, the number of this host.
--make_secret makes a run's secret, 32 random bytes in a file of mode 0600, where
there is none. --once leaves starting the role again to others, to Kubernetes say.
--detach goes on without a terminal, writes to LOG, and does nothing where a
role with this LOG is up on this host; --stop ends it and waits until it has.
PYTHON names the interpreter (default: .venv/bin/python of this checkout).
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
pause_s="${PAUSE_S:-5}"
file=""
log=""
stop=0
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
    --detach=*) log="${arg#*=}" ;;
    --stop=*) log="${arg#*=}" stop=1 ;;
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

# A role of this host is known by the name of its log.
if [[ -n "$log" ]]; then
  name="$(basename "$log" .log)"
  pid_file="${TMPDIR:-/tmp}/tba_jax-role-$UID-$name.pid"
  pid="$(cat "$pid_file" 2>/dev/null || echo 0)"
  up=0
  if ((pid)) && kill -0 "$pid" 2>/dev/null; then up=1; fi
  if ((stop)); then
    ((up)) || exit 0
    kill -TERM "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 1; done
    exit 0
  fi
  if ((up)); then
    echo "$name is up on this host: process $pid"
    exit 0
  fi
  if [[ -n "$file" ]]; then args=("--wait_for=$file" "${args[@]}"); fi
  if ((once)); then args=(--once "${args[@]}"); fi
  setsid nohup "$0" "${args[@]}" >>"$log" 2>&1 </dev/null &
  echo $! >"$pid_file"
  exit 0
fi

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
    0 | 2 | 3)
      # tpu_vm.sh reads this: without it the host has restarted.
      echo "role.sh: ended for good with status $status" >&2
      exit "$status"
      ;;
  esac
  echo "role.sh: ended with status $status; again in $pause_s s" >&2
  sleep "$pause_s" &
  wait $! || true
  if ((stopped)); then exit "$status"; fi
done

#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Trains on this machine: creates .venv on first use, then runs the `train`
# program with configs/countdown.py.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/local.sh [WORKDIR] [--dry_run] [--config=FILE[:ARG,…]]
                       [--config.key=value …]

Trains the countdown task with asynchronous trajectory balance on this machine
and writes the run to WORKDIR (default: runs/countdown in the current folder).

  launch/local.sh                                 the full run, some minutes
  launch/local.sh runs/q --config=configs/countdown.py:quick
  launch/local.sh runs/s1 --config.seed=1

--dry_run only prints the plan of the config and the command.
PYTHON=/path/to/python names the interpreter (3.11 or newer) for a new .venv.
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/setup_venv.sh
source "$root/launch/setup_venv.sh"
# shellcheck source=launch/commands.sh
source "$root/launch/commands.sh"

if [[ "${1:-}" == --dry_run ]]; then dry_run=1; shift; fi
workdir="runs/countdown"
if (($#)) && [[ "$1" != -* ]]; then
  workdir="$1"
  shift
fi
config=("--config=$root/configs/countdown.py")
arguments=()
while (($#)); do
  arg="$1"
  shift
  case "$arg" in
    -h | --help) usage; exit 0 ;;
    --dry_run) dry_run=1 ;;
    --workdir=*) workdir="${arg#*=}" ;;
    --workdir)
      (($#)) || die "--workdir: a folder must follow"
      workdir="$1"
      shift
      ;;
    *)
      [[ "$arg" != --config && "$arg" != --config=* ]] || config=()
      arguments+=("$arg")
      ;;
  esac
done
arguments=(${config[@]+"${config[@]}"} ${arguments[@]+"${arguments[@]}"})

if ((dry_run)); then
  VENV_PYTHON="$root/.venv/bin/python"
  plan=("$VENV_PYTHON" -m tba_jax.main --program=plan "${arguments[@]}")
  show "${plan[@]}"
  if [[ -x "$VENV_PYTHON" ]]; then
    PYTHONSAFEPATH=1 "${plan[@]}" || die "the plan above says why this fails"
  else
    echo "# no $root/.venv yet: the first run makes it; no plan now" >&2
  fi
else
  setup_venv "$root" || die "the install failed; its messages are above"
fi
# Keep the caller's folder off the import path: it may contain a `configs`.
export PYTHONSAFEPATH=1
run exec "$VENV_PYTHON" -m tba_jax.main --program=train \
  "${arguments[@]}" --workdir="$workdir"

# shellcheck shell=bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by the scripts that launch on several hosts: functions that run
# commands, or only print them with --dry_run.

dry_run=0

die() {
  echo "error: $*" >&2
  exit 1
}

# need NAME…: fails unless each variable has a value.
need() {
  local name
  for name in "$@"; do
    [[ -n "${!name:-}" ]] \
      || die "$name is empty: set it at the top of $0, or in the environment"
  done
}

# show CMD…: prints a command, quoted for a shell.
show() {
  local word quote="'" escaped="'\\''"
  printf '+'
  for word in "$@"; do
    if [[ "$word" =~ ^[[:alnum:]_./:=,@%+-]+$ ]]; then
      printf ' %s' "$word"
    else
      printf " '%s'" "${word//$quote/$escaped}"
    fi
  done
  printf '\n'
}

# run CMD…: prints and runs a command; with --dry_run it only prints it.
run() {
  show "$@"
  ((dry_run)) || "$@"
}

# use_searcher_devices COUNT: makes each searcher split its rows over COUNT
# devices, all those of its host or job. Does nothing if SETTINGS set the mesh
# or CONFIG has a hardware argument.
use_searcher_devices() {
  [[ " ${SETTINGS[*]-}" == *" --config.search.mesh."* ]] && return
  [[ "$CONFIG" == *hardware=* ]] && return
  SETTINGS+=("--config.search.mesh.data=$(($1 > 1 ? $1 : 1))")
}

# print_plan ROOT OPERAND…: prints what the run needs and whether it fits. If
# this Python lacks the package, prints the command, what is missing and how to
# install it instead.
print_plan() {
  local root="$1" python="${PYTHON:-}" problem
  shift
  if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
  fi
  local plan=("$python" -m tba_jax.main --program=plan "--config=$CONFIG")
  plan+=(${SETTINGS[@]+"${SETTINGS[@]}"} "$@")
  show "${plan[@]}"
  if problem="$(
    cd "$root" && "$python" -c 'import tba_jax.tools.plan' 2>&1 >/dev/null
  )"; then
    (cd "$root" && "${plan[@]}") || die "the plan above says why this fails"
  else
    echo "# the plan is left out, with its checks: ${problem##*$'\n'}" >&2
    echo "# for the plan: cd $root && python3 -m venv .venv &&" \
      ".venv/bin/pip install -c constraints.txt -e ." >&2
  fi
}

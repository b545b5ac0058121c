# shellcheck shell=bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by the scripts that launch on several hosts: how they run commands,
# and how --dry_run prints them instead.

dry_run=0

die() {
  echo "error: $*" >&2
  exit 1
}

# need NAME…: each variable must have a value.
need() {
  local name
  for name in "$@"; do
    [[ -n "${!name:-}" ]] \
      || die "$name is empty: set it at the top of $0, or in the environment"
  done
}

# show CMD…: prints a command as a shell would take it.
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

# use_searcher_devices COUNT: has each searcher split its rows over so many
# devices, all of its host or job. Where SETTINGS say how, or CONFIG is for a
# hardware, they have it, and COUNT changes nothing.
use_searcher_devices() {
  [[ " ${SETTINGS[*]-}" == *" --config.search.mesh."* ]] && return
  [[ "$CONFIG" == *hardware=* ]] && return
  SETTINGS+=("--config.search.mesh.data=$(($1 > 1 ? $1 : 1))")
}

# print_plan ROOT OPERAND…: what the run needs, and whether it fits.
# Where this Python lacks the package, it prints the command, what is missing,
# and how to install it.
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

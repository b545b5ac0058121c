#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests: those that are not marked slow, shared out, file by file, over a
# pytest process for each core and one more, four at most. With --all the slow ones
# are among them, and files that set XLA_FLAGS (multi_device) or start processes
# (multi_process) run in a pytest process of their own, the longest first. With
# --peers, what works with other packages is tried with each in a venv of its own; a
# table tells how. All share a cache of compiled programs: see tests/conftest.py.
set -euo pipefail

usage() {
  cat <<'END'
usage: tests/run.sh [--all | --peers [NAME …]] [PYTEST_ARG …]

  tests/run.sh                    the fast tests, some minutes
  tests/run.sh --all              also those marked slow, multi_device,
                                  multi_process, browser, notebooks and the
                                  parity tests with torch
  tests/run.sh --peers            only what works with other packages, as clients,
                                  environments and a server: those of each NAME in
                                  tests/peers/NAME.txt, in .venv/peers (vLLM takes
                                  4 GB); ends with a table
  tests/run.sh tests/losses -k tb these tests only, in one process

PYTHON names the interpreter of a new .venv. TBA_JAX_TORCH_INDEX names a package
index with CPU builds of torch, for --all and --peers.
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh

# By name, the cheap ones first.
PEERS=(gymnasium textarena gem openai2 openai3 peft tokenizers inspect tinker \
  verifiers cookbook vllm)

all=0
peers=0
paths=0
args=()
names=()
for arg in "$@"; do
  # Names follow --peers at once: behind an option they are its own.
  if ((peers && ! ${#args[@]})) && [[ "$arg" != -* ]]; then
    [[ -f "tests/peers/$arg.txt" ]] \
      || die "--peers $arg: allowed ${PEERS[*]}"
    names+=("$arg")
    continue
  fi
  case "$arg" in
    -h | --help) usage; exit 0 ;;
    --all) all=1 ;;
    --peers) peers=1 ;;
    *)
      args+=("$arg")
      if [[ "$arg" != -* && -e "${arg%%::*}" ]]; then paths=1; fi
      ;;
  esac
done

setup_venv "$root" test || die "the install failed; its messages are above"
if ((all || peers)) && [[ -n "${TBA_JAX_TORCH_INDEX:-}" ]]; then
  export PIP_EXTRA_INDEX_URL="$TBA_JAX_TORCH_INDEX"
fi
if ((all)); then
  setup_venv "$root" test parity \
    || echo "torch could not be installed: the parity tests will skip" >&2
  setup_venv "$root" test wandb \
    || echo "wandb could not be installed: its test will skip" >&2
fi

export JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1
results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT
mkdir "$results/logs"
touch "$results/failed"

# run_group SECONDS NAME PATH…: one pytest process, ended at its time limit. If it
# dies, a file has the test that it was in (tests/support/deaths.py).
run_group() {
  local limit="$1" name="$2" status=0 why at
  shift 2
  echo "=== $name"
  at="$results/at_${name//\//_}"
  TBA_JAX_TEST_AT="$at" timeout --kill-after=30 "$limit" "$VENV_PYTHON" -m pytest \
    ${args[@]+"${args[@]}"} "$@" 2>&1 \
    | tee "$results/logs/${name//\//_}" || status=$?
  # 5 is "no test ran": right where the arguments deselect a whole group.
  if ((status == 5 && ${#args[@]})); then status=0; fi
  why="exit $status"
  if ((status == 124 || status == 137)); then
    why="ended at its limit of $limit s"
    echo "$name was $why" >&2
  fi
  if [[ -s "$at" ]]; then
    # A test may even have ended it with status 0.
    status=1 why+=", in $(<"$at")"
    echo "$name died: $why" >&2
  fi
  if ((status)); then echo "$name ($why)" >>"$results/failed"; fi
}

# run_each SECONDS FILE…: each test file, named twice or not, once in a pytest
# process of its own, three at a time; what one prints comes in one piece.
run_each() {
  local limit="$1" file started=" "
  shift
  for file in "$@"; do
    if [[ "$started" == *" $file "* ]]; then continue; fi
    started+="$file "
    while (($(jobs -rp | wc -l) >= 3)); do sleep 0.2; done
    {
      # What XLA prints before it ends a process of several devices is seen.
      capture="fd"
      if [[ "$file" == tests/multi_device/* ]]; then capture="sys"; fi
      out="$(TF_CPP_MIN_LOG_LEVEL=2 run_group "$limit" "${file%.py}" "$file" \
        --timeout=600 --capture="$capture" 2>&1)"
      printf '%s\n' "$out"
    } &
  done
  wait
}

is_apart() { grep -q '^# apart' "$1"; }

# words_of KEY FILE: prints what lines "# KEY: …" name.
words_of() { sed -n "s/^# $1: //p" "$2" | tr ' ' '\n'; }

# setup_peer NAME: makes .venv/peers/NAME, a venv over .venv with the packages of
# tests/peers/NAME.txt, whose pins may differ; sets PEER_PYTHON. With a line
# "# apart" there it has these packages alone. A line "# alone: …" names some that
# are installed without what they ask for, "# without: …" some that are taken away,
# "# npm: …" packages of npm.
setup_peer() {
  local venv="$root/.venv/peers/$1" packages="tests/peers/$1.txt"
  local want below alone unwanted node
  local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  PEER_PYTHON="$venv/bin/python"
  want="$("$VENV_PYTHON" -VV; grep -v '^# tests: ' "$packages")"
  [[ "$(cat "$venv/.tba_jax_stamp" 2>/dev/null)" != "$want" ]] || return 0
  echo "Installing $packages into $venv; once"
  "$VENV_PYTHON" -m venv --clear "$venv" || return 1
  below="$("$VENV_PYTHON" -c "$purelib")"
  if ! is_apart "$packages"; then
    echo "import site; site.addsitedir('$below')" \
      >"$("$PEER_PYTHON" -c "$purelib")/tba_jax.pth"
  fi
  "$PEER_PYTHON" -m pip install -qq --disable-pip-version-check \
    --requirement "$packages" || return 1
  mapfile -t alone < <(words_of alone "$packages")
  if ((${#alone[@]})); then
    "$PEER_PYTHON" -m pip install -qq --disable-pip-version-check --no-deps \
      "${alone[@]}" || return 1
  fi
  mapfile -t unwanted < <(words_of without "$packages")
  if ((${#unwanted[@]})); then
    "$PEER_PYTHON" -m pip uninstall -qq -y "${unwanted[@]}" || return 1
  fi
  mapfile -t node < <(words_of npm "$packages")
  if ((${#node[@]})); then
    npm install --silent --ignore-scripts --prefix "$venv" "${node[@]}" || return 1
  fi
  printf '%s\n' "$want" >"$venv/.tba_jax_stamp"
}

# run_peer NAME: the tests that a line "# tests: …" of tests/peers/NAME.txt names,
# or tests/peers/NAME_test.py, and a line of the table.
run_peer() {
  local name="$1" packages="tests/peers/$1.txt" python tests begun reason=""
  echo "--- $name"
  if setup_peer "$name" 2>"$results/told"; then
    mapfile -t tests < <(words_of tests "$packages")
    if ! ((${#tests[@]})); then tests=("tests/peers/${name}_test.py"); fi
    python="$PEER_PYTHON"
    if is_apart "$packages"; then python="$VENV_PYTHON"; fi
    begun=$SECONDS
    TBA_JAX_PEER_PYTHON="$PEER_PYTHON" VENV_PYTHON="$python" \
      run_group 1800 "peers/$name" "${tests[@]}" --timeout=900 \
      --junitxml="$results/$name.xml"
    reason="$(sed -n "s|^peers/$name (\(.*\))$|\1|p" "$results/failed")"
  else
    begun=$SECONDS
    cat "$results/told" >&2
    reason="not installed: $(grep '^ERROR' "$results/told" | tail -n 1)"
    echo "peers/$name" >>"$results/failed"
  fi
  "$VENV_PYTHON" tests/peers/table.py row "$results" "$name" \
    "$PEER_PYTHON" $((SECONDS - begun)) "$reason"
}

if ((peers)); then
  ((${#names[@]})) || names=("${PEERS[@]}")
  for name in "${names[@]}"; do run_peer "$name"; done
  "$VENV_PYTHON" tests/peers/table.py show "$results"
  [[ ! -s "$results/failed" ]] || exit 1
  exit 0
fi

if ((paths)); then
  run_group 3600 chosen
else
  # One more than cores, since some tests wait.
  workers=$(($(nproc 2>/dev/null || echo 2) + 1))
  group=one_process
  marks=""
  if ! ((all)); then
    group=fast
    marks=" -m 'not slow'"
  fi
  # In the environment, where arguments as --pdb or -n 0 come after it.
  addopts="-n $((workers < 4 ? workers : 4)) --dist loadfile"
  # Files in the order of tests/conftest.py.
  addopts+=" --no-loadscope-reorder --max-worker-restart=0$marks"
  PYTEST_ADDOPTS="$addopts ${PYTEST_ADDOPTS:-}" \
    run_group 3000 "$group" tests --ignore=tests/multi_device \
    --ignore=tests/multi_process --ignore=tests/browser --ignore=tests/colabs \
    --ignore=tests/peers
  if ((all)); then
    # What starts processes leaves cores idle while they wait for each other. The
    # longest come first, so that none is left alone at the end.
    run_each 1200 \
      tests/multi_process/{layouts,lockstep_objectives,lockstep}_test.py \
      tests/multi_device/{sequence,compile}_test.py \
      tests/multi_process/{real_run,cut_links,full_disk,bucket_run}_test.py \
      tests/colabs/colabs_test.py tests/multi_device/*_test.py \
      tests/{multi_process,browser}/*_test.py
  fi
fi

# One line for all: the sum of the groups' closing lines.
"$VENV_PYTHON" - "$results/logs" <<'END'
import collections
import pathlib
import re
import sys

total = collections.Counter()
for path in pathlib.Path(sys.argv[1]).iterdir():
  closing = path.read_text(errors="replace").strip().rpartition("\n")[2]
  for count, what in re.findall(r"(\d+) (passed|failed|error|skipped)", closing):
    total["failed" if what == "error" else what] += int(count)
print(", ".join(f"{total[k]} {k}" for k in ("passed", "failed", "skipped")))
END
if [[ -s "$results/failed" ]]; then
  sed 's/^/failed group: /' "$results/failed" >&2
  exit 1
fi

#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run on Google Kubernetes Engine: launch/gke.yaml with the values
# below. See docs/guides/scaling.md.
#
# Set up once per project, here for a trainer with 16 v5e chips and four
# searchers with one chip each. Each trainer slice has its own node pool, whose
# flags select the kind of capacity:
#
#   gcloud container clusters create tba --project=PROJECT --location=ZONE \
#     --addons=GcpFilestoreCsiDriver --machine-type=e2-standard-4 --num-nodes=1
#   gcloud container node-pools create trainer --cluster=tba --project=PROJECT \
#     --location=ZONE --machine-type=ct5lp-hightpu-4t --tpu-topology=4x4 --num-nodes=4
#   gcloud container node-pools create searchers --cluster=tba --project=PROJECT \
#     --location=ZONE --machine-type=ct5lp-hightpu-1t --spot --num-nodes=4
#   gcloud artifacts repositories create tba --project=PROJECT --location=REGION \
#     --repository-format=docker
#   gcloud auth configure-docker REGION-docker.pkg.dev
#   kubectl apply -f launch/claim.yaml
#
# and the JobSet controller: https://jobset.sigs.k8s.io/docs/installation/
set -euo pipefail

# ---- Variables: here, or in the environment ---------------------------------
export NAME="${NAME:-tba}"
export IMAGE="${IMAGE:-}"                 # built from launch/Dockerfile
export CLAIM="${CLAIM:-runs}"             # on shared storage, ReadWriteMany
export CONFIG="${CONFIG:-configs/gsm8k/tba.py:hardware=v5e-16}"
export WORKDIR="${WORKDIR:-/runs/$NAME}"  # below /runs, the mount of CLAIM
KIND="${KIND:-v5e}"                       # device kind, for the plan
export TRAINER_ACCELERATOR="${TRAINER_ACCELERATOR:-tpu-v5-lite-podslice}"
export TRAINER_TOPOLOGY="${TRAINER_TOPOLOGY:-4x4}"
export TRAINER_HOSTS="${TRAINER_HOSTS:-4}" # per slice
export TRAINER_CHIPS="${TRAINER_CHIPS:-4}" # per host
export TRAINER_SLICES="${TRAINER_SLICES:-1}"
export SEARCHER_ACCELERATOR="${SEARCHER_ACCELERATOR:-tpu-v5-lite-podslice}"
export SEARCHER_TOPOLOGY="${SEARCHER_TOPOLOGY:-1x1}"
export SEARCHER_CHIPS="${SEARCHER_CHIPS:-1}" # each, as in hardware=
export SEARCHERS="${SEARCHERS:-4}"        # on spot nodes
export NAMESPACE="${NAMESPACE:-default}"
export STORE_PORT="${STORE_PORT:-8469}"   # locator, which gives the address
export STORE_PORTS="${STORE_PORTS:-8470-8489}"
export TRAINER_PORT="${TRAINER_PORT:-8490}"
# More settings of the run, such as "--config.a=b --config.c=d".
read -r -a SETTINGS <<<"${SETTINGS:-}"
# -----------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: launch/gke.sh [--dry_run] [up | render | searchers N | down]

  up            starts the run (default); after `down` it resumes from the last
                checkpoint
  render        prints the manifest that `up` applies
  searchers N   changes the number of searchers to N
  down          ends the run after the trainer has saved; keeps its Secret,
                which is needed to read the run's journal

The run's secret is the Secret NAME-secret, which `up` creates if needed.
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/commands.sh
source "$root/launch/commands.sh"

words=()
for arg in "$@"; do
  case "$arg" in
    -h | --help) usage; exit 0 ;;
    --dry_run) dry_run=1 ;;
    -*) usage >&2; die "unknown flag $arg" ;;
    *) words+=("$arg") ;;
  esac
done
action="${words[0]:-up}"
if ((dry_run)); then IMAGE="${IMAGE:-IMAGE}"; fi
need NAME IMAGE CLAIM CONFIG WORKDIR NAMESPACE

SETTINGS+=("--config.trainer.num_processes=$((TRAINER_HOSTS * TRAINER_SLICES))")
SETTINGS+=("--config.search.num_searchers=$SEARCHERS")
use_searcher_devices "$SEARCHER_CHIPS"

# Substitutes the variables in gke.yaml; unset ones are an error.
render() {
  # One argument per line, for the store's list.
  # shellcheck disable=SC2016
  SETTINGS_ARGS="$(printf '            - %s\n' "${SETTINGS[@]}")" \
    python3 -c '
import os, re, sys
text = open(sys.argv[1]).read()
# $(…) and $((…)) are for the pod.
print(re.sub(r"\$\{(\w+)\}", lambda m: os.environ[m[1]], text), end="")
' "$root/launch/gke.yaml"
}

# Creates the run's secret, 32 random bytes, if it does not exist.
make_secret() {
  local name="$NAME-secret"
  local make=(kubectl create secret generic -n "$NAMESPACE" "$name")
  make+=(--from-file=secret=/dev/stdin)
  show kubectl get secret -n "$NAMESPACE" --ignore-not-found -o name "$name"
  show head -c 32 /dev/urandom "|" "${make[@]}"
  ((dry_run)) && return
  local made
  made="$(kubectl get secret -n "$NAMESPACE" --ignore-not-found -o name "$name")"
  [[ -n "$made" ]] || head -c 32 /dev/urandom | "${make[@]}"
}

case "$action" in
  up)
    print_plan "$root" --elsewhere "$KIND"
    make_secret
    show kubectl apply -n "$NAMESPACE" -f -
    render | sed 's/^/    /'
    ((dry_run)) || render | kubectl apply -n "$NAMESPACE" -f -
    echo "# watch: kubectl logs -n $NAMESPACE -f -l app=$NAME,role=trainer"
    ;;
  render) render ;;
  searchers)
    [[ "${words[1]:-}" =~ ^[1-9][0-9]*$ ]] || die "searchers: how many?"
    run kubectl patch -n "$NAMESPACE" job "$NAME-searcher" --type=merge \
      -p "{\"spec\":{\"completions\":${words[1]},\"parallelism\":${words[1]}}}"
    ;;
  down)
    run kubectl delete -n "$NAMESPACE" --ignore-not-found jobset "$NAME-trainer"
    run kubectl delete -n "$NAMESPACE" --ignore-not-found job "$NAME-searcher"
    run kubectl delete -n "$NAMESPACE" --ignore-not-found \
      "deployment/$NAME-store" "service/$NAME-store"
    ;;
  *) usage >&2; die "unknown action $action" ;;
esac

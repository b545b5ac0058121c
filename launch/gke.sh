#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# A run on Google Kubernetes Engine: launch/gke.yaml with the values below.
# See docs/guides/scaling.md.
#
# Once for a project, here for a trainer of 16 v5e chips and four searchers of one;
# each slice of the trainer has a node pool, whose flags choose the capacity:
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
export IMAGE="${IMAGE:-}"                 # made from launch/Dockerfile
export CLAIM="${CLAIM:-runs}"             # of shared storage, ReadWriteMany
export CONFIG="${CONFIG:-configs/gsm8k/tba.py:hardware=v5e-16}"
export WORKDIR="${WORKDIR:-/runs/$NAME}"  # below /runs, where CLAIM is mounted
KIND="${KIND:-v5e}"                       # of devices, for the plan
export TRAINER_ACCELERATOR="${TRAINER_ACCELERATOR:-tpu-v5-lite-podslice}"
export TRAINER_TOPOLOGY="${TRAINER_TOPOLOGY:-4x4}"
export TRAINER_HOSTS="${TRAINER_HOSTS:-4}" # of one slice
export TRAINER_CHIPS="${TRAINER_CHIPS:-4}" # of one host
export TRAINER_SLICES="${TRAINER_SLICES:-1}"
export SEARCHER_ACCELERATOR="${SEARCHER_ACCELERATOR:-tpu-v5-lite-podslice}"
export SEARCHER_TOPOLOGY="${SEARCHER_TOPOLOGY:-1x1}"
export SEARCHER_CHIPS="${SEARCHER_CHIPS:-1}" # of one, as hardware= has it
export SEARCHERS="${SEARCHERS:-4}"        # on spot nodes
export NAMESPACE="${NAMESPACE:-default}"
export STORE_PORT="${STORE_PORT:-8469}"   # where the store says where it is
export STORE_PORTS="${STORE_PORTS:-8470-8489}"
export TRAINER_PORT="${TRAINER_PORT:-8490}"
# More settings of the run, as "--config.a=b --config.c=d".
read -r -a SETTINGS <<<"${SETTINGS:-}"
# -----------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: launch/gke.sh [--dry_run] [up | render | searchers N | down]

  up            starts the run (the default); after `down` it resumes from the
                run's last checkpoint
  render        prints what `up` applies
  searchers N   makes the run have N searchers, more or fewer
  down          ends the run; the trainer saves first. Its Secret stays, since
                the run's journal is read with it

The run's secret is the Secret NAME-secret, made by `up` where there is none.
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

# Puts the variables into gke.yaml; one without a value is an error.
render() {
  # One argument a line, as the store's list wants them.
  # shellcheck disable=SC2016
  SETTINGS_ARGS="$(printf '            - %s\n' "${SETTINGS[@]}")" \
    python3 -c '
import os, re, sys
text = open(sys.argv[1]).read()
# $(…) and $((…)) are for the pod.
print(re.sub(r"\$\{(\w+)\}", lambda m: os.environ[m[1]], text), end="")
' "$root/launch/gke.yaml"
}

# The run's secret, 32 random bytes, where there is none yet.
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
    [[ "${words[1]:-}" =~ ^[1-9][0-9]*$ ]] || die "searchers: say how many"
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

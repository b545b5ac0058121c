#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# A run on Cloud TPU VMs: a trainer of one slice or several (multislice) with
# the store on its first host, and searchers of one host each. All are queued
# resources; one that is preempted is made again. docs/launch.md tells more.
set -euo pipefail

# ---- Variables: here, or in the environment ---------------------------------
NAME="${NAME:-tba}"
PROJECT="${PROJECT:-}"                    # of Google Cloud
ZONE="${ZONE:-}"                          # as us-central2-b
NFS="${NFS:-}"                            # a share all hosts mount, IP:/path
REPO="${REPO:-}"                          # git URL of this code
REVISION="${REVISION:-main}"              # branch, tag or commit of it
CONFIG="${CONFIG:-configs/gsm8k.py}"
KIND="${KIND:-v5e}"                       # of devices, for the plan
TRAINER_TYPE="${TRAINER_TYPE:-v5litepod-16}"
TRAINER_HOSTS="${TRAINER_HOSTS:-4}"       # of one slice
TRAINER_SLICES="${TRAINER_SLICES:-1}"
SEARCHER_TYPE="${SEARCHER_TYPE:-v5litepod-1}" # of one host
SEARCHER_CHIPS="${SEARCHER_CHIPS:-1}"     # of that host; a searcher uses all
SEARCHERS="${SEARCHERS:-4}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}" # image of the TPU VMs
TRAINER_SPOT="${TRAINER_SPOT:-0}"         # 1: cheaper, and may be preempted
SEARCHER_SPOT="${SEARCHER_SPOT:-1}"
STORE_PORT="${STORE_PORT:-8469}"          # where the store says where it is
STORE_PORTS="${STORE_PORTS:-8470-8489}"
TRAINER_PORT="${TRAINER_PORT:-8490}"
LOOK_EVERY_S="${LOOK_EVERY_S:-60}"
# More settings of the run, as "--config.a=b --config.c=d".
read -r -a SETTINGS <<<"${SETTINGS:-}"
# -----------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: launch/tpu_vm.sh [--dry_run] [up | searchers FIRST-LAST | down]

  up                 makes what is not there, starts the run, and looks after it
                     until the trainer is done (the default); the same again
                     goes on with a run that was left
  searchers 4-9      adds searchers 4 to 9, and looks after these
  down               ends the run, and deletes all of its machines
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
if ((dry_run)); then
  PROJECT="${PROJECT:-PROJECT}" ZONE="${ZONE:-ZONE}"
  NFS="${NFS:-IP:/path}" REPO="${REPO:-REPO}"
fi
need NAME PROJECT ZONE NFS REPO

SETTINGS+=("--config.trainer.num_processes=$((TRAINER_HOSTS * TRAINER_SLICES))")
SETTINGS+=("--config.search.num_searchers=$SEARCHERS")
use_searcher_devices "$SEARCHER_CHIPS"
where=(--project="$PROJECT" --zone="$ZONE")
workdir="/mnt/runs/$NAME"
code=tba_jax_code
metadata="http://metadata.google.internal/computeMetadata/v1/instance"
metadata+="/attributes/agent-worker-number"

queued() { # queued ACTION RESOURCE FLAG…
  run gcloud compute tpus queued-resources "$1" "$2" "${where[@]}" "${@:3}"
}

# state RESOURCE: ACTIVE, SUSPENDED, …, or NONE.
state() {
  gcloud compute tpus queued-resources describe "$1" "${where[@]}" \
    --format='value(state.state)' 2>/dev/null || echo NONE
}

trainer="$NAME-trainer"
searcher() { echo "$NAME-searcher-$1"; }

# The nodes of the trainer: a slice has its own name, several are numbered.
nodes() {
  local slice
  if ((TRAINER_SLICES == 1)); then echo "$trainer"; return; fi
  for ((slice = 0; slice < TRAINER_SLICES; slice++)); do
    echo "$trainer-$slice"
  done
}

create_trainer() {
  local flags=(--accelerator-type="$TRAINER_TYPE" --runtime-version="$RUNTIME")
  if ((TRAINER_SLICES == 1)); then
    flags+=(--node-id="$trainer")
  else
    flags+=(--node-prefix="$trainer" --node-count="$TRAINER_SLICES")
  fi
  if ((TRAINER_SPOT)); then flags+=(--spot); fi
  queued create "$trainer" "${flags[@]}"
}

create_searcher() {
  local name flags=(--accelerator-type="$SEARCHER_TYPE")
  name="$(searcher "$1")"
  flags+=(--runtime-version="$RUNTIME" --node-id="$name")
  if ((SEARCHER_SPOT)); then flags+=(--spot); fi
  queued create "$name" "${flags[@]}"
}

# ssh NODE WORKER COMMAND: runs a command on one worker of a node, or on "all".
ssh_to() {
  run gcloud compute tpus tpu-vm ssh "$1" "${where[@]}" --worker="$2" \
    --command="$3"
}

# The share, the code and its packages; nothing where they are there already.
# The images of TPU VMs have an older Python than is needed.
install() {
  ssh_to "$1" all "set -e
[ -x /sbin/mount.nfs ] || sudo apt-get install -qq nfs-common
mountpoint -q /mnt/runs || { sudo mkdir -p /mnt/runs
  sudo mount -t nfs -o hard $NFS /mnt/runs; }
# A fresh share belongs to root.
mkdir -p $workdir/logs 2>/dev/null \
  || sudo install -d -o \$(id -u) -g \$(id -g) $workdir $workdir/logs
[ -d $code ] || git clone -q $REPO $code
cd $code && git fetch -q origin
git checkout -q --detach origin/$REVISION 2>/dev/null \
  || git checkout -q --detach $REVISION
[ -d .venv ] || { python3 -m pip install -q --user uv
  python3 -m uv venv -q --seed --python 3.11 .venv; }
.venv/bin/pip install -q -c constraints.txt -e '.[tpu]'"
}

# set_index SLICE: shell of a worker that sets INDEX, its number in the trainer.
set_index() {
  echo "export INDEX=\$(($1 * $TRAINER_HOSTS \
+ \$(curl -sf -H Metadata-Flavor:Google $metadata)));"
}

# Starts a role on workers of a node, where it is not there already.
start_role() { # start_role NODE WORKER NAME ARGUMENTS
  ssh_to "$1" "$2" "cd $code && $4 --detach=$workdir/logs/$3.log"
}

# The run's directory is on the share, and in it the run's secret, a 0600 file:
# it is in no command line and no variable.
start_trainer() {
  local node slice=0 address
  local -a all=("--config=$CONFIG" "${SETTINGS[@]}")
  all+=("--config.store.secret_file=$workdir/secret" "--workdir=$workdir")
  for node in $(nodes); do install "$node"; done
  node="$(nodes | head -n 1)"
  address=ADDRESS
  show gcloud compute tpus tpu-vm describe "$node" "${where[@]}" \
    --format='value(networkEndpoints[0].ipAddress)'
  ((dry_run)) || address="$(gcloud compute tpus tpu-vm describe "$node" \
    "${where[@]}" --format='value(networkEndpoints[0].ipAddress)')"
  [[ -n "$address" ]] || die "$node has no address"
  start_role "$node" 0 store "launch/role.sh --program=store ${all[*]} \
--make_secret=$workdir/secret --config.store.address=$address:$STORE_PORTS \
--config.store.locator=$address:$STORE_PORT"
  for node in $(nodes); do
    start_role "$node" all "trainer-\$INDEX" \
      "$(set_index "$slice") launch/role.sh \
--wait_for=$workdir/config.json --program=trainer --workdir=$workdir \
--index_from=INDEX $address:$TRAINER_PORT"
    slice=$((slice + 1))
  done
}

start_searcher() {
  install "$(searcher "$1")"
  start_role "$(searcher "$1")" 0 "searcher-$1" "launch/role.sh \
--wait_for=$workdir/config.json --program=searcher --workdir=$workdir $1"
}

# look_after RESOURCE CREATE START [INDEX]: makes it where it is not there or was
# preempted, and starts its role once it has come. The role goes on from the
# run's last checkpoint, or as a new searcher.
declare -A running=()
look_after() {
  local resource="$1" create="$2" start="$3"
  shift 3
  if ((dry_run)); then
    "$create" "$@"
    "$start" "$@"
    return
  fi
  case "$(state "$resource")" in
    NONE)
      running[$resource]=0
      "$create" "$@"
      ;;
    ACTIVE)
      ((${running[$resource]:-0})) && return
      "$start" "$@"
      running[$resource]=1
      ;;
    SUSPENDED | FAILED)
      running[$resource]=0
      queued delete "$resource" --force --quiet
      "$create" "$@"
      ;;
    *) echo "# waiting for $resource: $(state "$resource")" ;;
  esac
}

is_done() {
  ssh_to "$(nodes | head -n 1)" 0 "! pgrep -f '[p]rogram=trainer'" >/dev/null 2>&1
}

# look FIRST LAST: what is there; again and again, until the trainer is done.
look() {
  local index
  while :; do
    if (($1 == 0)); then
      look_after "$trainer" create_trainer start_trainer
    fi
    for ((index = $1; index <= $2; index++)); do
      look_after "$(searcher "$index")" create_searcher start_searcher "$index"
    done
    if ((dry_run)); then return; fi
    sleep "$LOOK_EVERY_S"
    if (($1 == 0 && ${running[$trainer]:-0})) && is_done; then
      echo "# the trainer has ended; its last words: $workdir/logs/trainer-0.log"
      echo "# delete the machines with: $0 down"
      return
    fi
  done
}

case "$action" in
  up)
    print_plan "$root" "$KIND"
    look 0 $((SEARCHERS - 1))
    ;;
  searchers)
    [[ "${words[1]:-}" =~ ^([1-9][0-9]*)-([0-9]+)$ ]] \
      || die "searchers: say which, as 4-9"
    look "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    ;;
  down)
    slice=0
    for node in $(nodes); do
      ssh_to "$node" all "cd $code && $(set_index "$slice") launch/role.sh \
--stop=$workdir/logs/trainer-\$INDEX.log" || true
      slice=$((slice + 1))
    done
    queued delete "$trainer" --force --quiet || true
    for ((index = 0; index < SEARCHERS; index++)); do
      queued delete "$(searcher "$index")" --force --quiet || true
    done
    ;;
  *) usage >&2; die "unknown action $action" ;;
esac

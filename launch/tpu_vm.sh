#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run on Cloud TPU VMs: a trainer on one slice or several (multislice)
# with the store on its first host, and searchers with one host each. All are
# queued resources, recreated after preemption. See docs/guides/scaling.md.
set -euo pipefail

# ---- Variables: here, or in the environment ---------------------------------
NAME="${NAME:-tba}"
PROJECT="${PROJECT:-}"                    # Google Cloud project
ZONE="${ZONE:-}"                          # such as us-west4-a
NFS="${NFS:-}"                            # share that all hosts mount, IP:/path
REPO="${REPO:-}"                          # git URL of this code
REVISION="${REVISION:-main}"              # branch, tag or commit
EXTRA="${EXTRA:-tpu}"                     # pip extras: tpu,math for math.py
CONFIG="${CONFIG:-configs/gsm8k/tba.py:hardware=v5e-16}"
TRAINER_TYPE="${TRAINER_TYPE:-v5litepod-16}"
TRAINER_SLICES="${TRAINER_SLICES:-1}"
SEARCHER_TYPE="${SEARCHER_TYPE:-v5litepod-1}" # with a single host
SEARCHERS="${SEARCHERS:-4}"
RUNTIME="${RUNTIME:-}"                    # TPU VM image; "" = the type's
# gcloud flags for the kind of capacity: "" (on demand), --spot, --reserved,
# --reservation=NAME, --provisioning-model=flex-start --max-run-duration=24h
TRAINER_FLAGS="${TRAINER_FLAGS-}"
SEARCHER_FLAGS="${SEARCHER_FLAGS---spot}"
SSH_FLAGS="${SSH_FLAGS-}"                 # --internal-ip, --tunnel-through-iap
STORE_PORT="${STORE_PORT:-8469}"          # locator, which gives the address
STORE_PORTS="${STORE_PORTS:-8470-8489}"
TRAINER_PORT="${TRAINER_PORT:-8490}"
LOOK_EVERY_S="${LOOK_EVERY_S:-60}"
# More settings of the run, such as "--config.a=b --config.c=d".
read -r -a SETTINGS <<<"${SETTINGS:-}"
# -----------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: launch/tpu_vm.sh [--dry_run] [up | searchers FIRST-LAST | down]
                        [-- FLAG …]

  up                 creates what is missing, starts the run and watches it
                     until the trainer is done (default); resumes an
                     interrupted run
  searchers 4-9      adds searchers 4 to 9 and watches them
  down               ends the run and deletes the machines of the trainer and of
                     searchers 0 to SEARCHERS - 1

FLAGs are passed to gcloud when it creates a machine, such as --
--network=NETWORK --subnetwork=SUBNETWORK --internal-ips
--service-account=ADDRESS.
END
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/commands.sh
source "$root/launch/commands.sh"

words=()
flags=()
while (($#)); do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --dry_run) dry_run=1 ;;
    --) flags=("${@:2}"); break ;;
    -*) usage >&2; die "unknown flag $1" ;;
    *) words+=("$1") ;;
  esac
  shift
done
action="${words[0]:-up}"
if ((dry_run)); then
  PROJECT="${PROJECT:-PROJECT}" ZONE="${ZONE:-ZONE}"
  NFS="${NFS:-IP:/path}" REPO="${REPO:-REPO}"
fi
need NAME PROJECT ZONE NFS REPO

# slice_of TYPE: sets kind, chips, hosts and image of a slice of this type.
slice_of() {
  local machine=4
  [[ "$1" =~ ^(v4|v5litepod|v5p|v6e)-([1-9][0-9]*)$ ]] \
    || die "type $1: must be one of v4-N, v5litepod-N, v5p-N, v6e-N"
  chips="${BASH_REMATCH[2]}"
  case "$1" in
    v4-*) kind=v4 image=tpu-ubuntu2204-base ;;
    v5litepod-*) kind=v5e image=v2-alpha-tpuv5-lite machine=8 ;;
    v5p-*) kind=v5p image=v2-alpha-tpuv5 ;;
    v6e-*) kind=v6e image=v2-alpha-tpuv6e machine=8 ;;
  esac
  # These names count cores, of which a chip has two.
  case "$1" in v4-* | v5p-*) chips=$((chips / 2)) ;; esac
  # Only single-host slices have more than four chips per host.
  hosts=$((chips > machine ? chips / 4 : 1))
}

for name in KIND TRAINER_HOSTS SEARCHER_CHIPS; do
  [[ -z "${!name:-}" ]] \
    || die "$name is no longer read: set TRAINER_TYPE and SEARCHER_TYPE instead"
done
slice_of "$SEARCHER_TYPE"
searcher_kind="$kind"
((hosts == 1)) || die "SEARCHER_TYPE=$SEARCHER_TYPE: must have a single host"
use_searcher_devices "$chips"
slice_of "$TRAINER_TYPE"
TRAINER_HOSTS="$hosts"
kinds=("$kind")
[[ "$searcher_kind" == "$kind" ]] || kinds+=("$searcher_kind")

where=(--project="$PROJECT" --zone="$ZONE")
workdir="/mnt/runs/$NAME"
SETTINGS+=("--config.trainer.num_processes=$((TRAINER_HOSTS * TRAINER_SLICES))")
SETTINGS+=("--config.search.num_searchers=$SEARCHERS")
code=tba_jax_code
metadata="http://metadata.google.internal/computeMetadata/v1/instance"
metadata+="/attributes/agent-worker-number"
read -r -a ssh_flags <<<"$SSH_FLAGS"
read -r -a trainer_flags <<<"$TRAINER_FLAGS"
read -r -a searcher_flags <<<"$SEARCHER_FLAGS"

# create RESOURCE TYPE FLAG…: requests machines.
create() {
  local kind chips hosts image
  slice_of "$2"
  local command=(gcloud compute tpus queued-resources create)
  # Only the alpha command has these flags.
  case " $* " in
    *" --reservation="* | *" --provisioning-model="* | *" --max-run-duration="*)
      command=(gcloud alpha compute tpus queued-resources create) ;;
  esac
  run "${command[@]}" "$1" "${where[@]}" --accelerator-type="$2" \
    --runtime-version="${RUNTIME:-$image}" "${@:3}"
}

delete() {
  run gcloud compute tpus queued-resources delete "$1" "${where[@]}" \
    --force --quiet
}

# state RESOURCE: ACTIVE, SUSPENDED, …, NONE, or UNKNOWN if gcloud fails.
state() {
  local told
  if told="$(gcloud compute tpus queued-resources describe "$1" "${where[@]}" \
    --format='value(state.state)' 2>&1)"; then
    echo "${told##*$'\n'}"
  elif [[ "$told" == *NOT_FOUND* ]]; then
    echo NONE
  else
    echo UNKNOWN
  fi
}

trainer="$NAME-trainer"
searcher() { echo "$NAME-searcher-$1"; }

create_trainer() {
  local nodes=(--node-id="$trainer")
  if ((TRAINER_SLICES > 1)); then
    nodes=(--node-prefix="$trainer" --node-count="$TRAINER_SLICES")
  fi
  create "$trainer" "$TRAINER_TYPE" "${nodes[@]}" \
    ${trainer_flags[@]+"${trainer_flags[@]}"} ${flags[@]+"${flags[@]}"}
}

create_searcher() {
  local name
  name="$(searcher "$1")"
  create "$name" "$SEARCHER_TYPE" --node-id="$name" \
    ${searcher_flags[@]+"${searcher_flags[@]}"} ${flags[@]+"${flags[@]}"}
}

# ssh_to RESOURCE NODE WORKER COMMAND: runs a command on one worker of a slice,
# or on "all" at once.
ssh_to() {
  run gcloud compute tpus queued-resources ssh "$1" "${where[@]}" \
    ${ssh_flags[@]+"${ssh_flags[@]}"} --node="$2" --worker="$3" --command="$4"
}

# install RESOURCE: mounts the share and installs the code and its packages,
# unless already done. TPU VM images have a Python that is too old.
install() {
  ssh_to "$1" all all "set -e
[ -x /sbin/mount.nfs ] || sudo apt-get install -qq nfs-common
command -v bwrap >/dev/null || sudo apt-get install -qq bubblewrap \
  || echo 'no bubblewrap: rewards are not confined' >&2
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
  python3 -m uv venv -q --seed --python 3.12 .venv; }
.venv/bin/pip install -q -c constraints.txt -e '.[data,$EXTRA]'"
}

# set_index SLICE: prints shell code that sets INDEX, the worker's index in the
# trainer.
set_index() {
  echo "export INDEX=\$(($1 * $TRAINER_HOSTS \
+ \$(curl -sf -H Metadata-Flavor:Google $metadata)));"
}

# start_role RESOURCE NODE WORKER SETUP NAME ARGUMENTS: starts a role on workers
# of a slice unless it is running. systemd restarts it after an error, except
# after status 2 (invalid setting) or 3 (the error would recur). On a stop
# request it saves and ends its children itself. The unit, like the mounted
# share, is gone after a reboot.
start_role() {
  local unit="$NAME-$5.service"
  ssh_to "$1" "$2" "$3" "$4 systemctl is-active -q $unit || {
sudo tee /run/systemd/system/$unit >/dev/null <<END
[Unit]
Description=tba_jax, run $NAME: $5
StartLimitIntervalSec=0

[Service]
Type=exec
User=\$(id -un)
WorkingDirectory=\$HOME/$code
EnvironmentFile=-/etc/environment
ExecStart=\$HOME/$code/launch/role.sh --once --log=$workdir/logs/$5.log \
${6//%/%%}
Restart=on-failure
RestartPreventExitStatus=2 3
RestartSec=5
KillMode=mixed
TimeoutStopSec=900
OOMPolicy=continue
LimitMEMLOCK=infinity
END
sudo systemctl daemon-reload && sudo systemctl restart $unit; }"
}

# The run's directory is on the share. The run's secret is only in a file there
# with mode 0600, never on a command line or in a variable.
start_trainer() {
  local slice address=ADDRESS first="$trainer"
  local -a all=("--config=$CONFIG" "${SETTINGS[@]}")
  all+=("--config.store.secret_file=$workdir/secret" "--workdir=$workdir")
  install "$trainer"
  if ((TRAINER_SLICES > 1)); then first="$trainer-0"; fi
  show gcloud compute tpus tpu-vm describe "$first" "${where[@]}" \
    --format='value(networkEndpoints[0].ipAddress)'
  ((dry_run)) || address="$(gcloud compute tpus tpu-vm describe "$first" \
    "${where[@]}" --format='value(networkEndpoints[0].ipAddress)')"
  [[ -n "$address" ]] || die "$first has no address"
  start_role "$trainer" 0 0 "" store "--program=store ${all[*]} \
--make_secret=$workdir/secret --config.store.address=$address:$STORE_PORTS \
--config.store.locator=$address:$STORE_PORT"
  for ((slice = 0; slice < TRAINER_SLICES; slice++)); do
    start_role "$trainer" "$slice" all "$(set_index "$slice")" \
      "trainer-\$INDEX" "--wait_for=$workdir/config.json --program=trainer \
--workdir=$workdir \$INDEX $address:$TRAINER_PORT"
  done
}

start_searcher() {
  install "$(searcher "$1")"
  start_role "$(searcher "$1")" 0 0 "" "searcher-$1" \
    "--wait_for=$workdir/config.json --program=searcher --workdir=$workdir $1"
}

# role_state RESOURCE ROLE: "done" if the role has ended for good, "gone" if one
# of its hosts does not have it, as after a reboot, else "up". Hosts that cannot
# be reached count as up and are asked again.
role_state() {
  local kind="${2%%-*}" slices=1 slice index role text states="" state=up
  if [[ "$kind" == trainer ]]; then slices="$TRAINER_SLICES"; fi
  for ((slice = 0; slice < slices; slice++)); do
    index="$(set_index "$slice")"
    if [[ "$kind" == searcher ]]; then index="INDEX=${2##*-};"; fi
    states+="$(ssh_to "$1" "$slice" all "$index echo $kind-\$INDEX \
\$(systemctl show -p LoadState -p SubState $NAME-$kind-\$INDEX.service)")"$'\n'
  done
  while read -r role text; do
    case "$role $text" in
      "$kind"-*LoadState=not-found*) [[ "$state" == "done" ]] || state=gone ;;
      "$2 "*SubState=dead* | "$2 "*SubState=failed*) state="done" ;;
    esac
  done <<<"$states"
  echo "$state"
}

# look_after RESOURCE ROLE: creates the resource if it is missing or was
# preempted, and starts its role once it is active, or again after a reboot. The
# role resumes from the run's last checkpoint, or as a new searcher. Machines
# are installed in parallel.
declare -A running=() starting=()
look_after() {
  local resource="$1" role="$2" kind="${2%%-*}" index="${2##*-}"
  if ((dry_run)); then
    "create_$kind" "$index"
    "start_$kind" "$index"
    return
  fi
  case "$(state "$resource")" in
    NONE)
      running[$resource]=0
      "create_$kind" "$index" || echo "# $resource: tried again"
      ;;
    ACTIVE)
      if ((${running[$resource]:-0})); then
        case "$(role_state "$resource" "$role")" in
          done) running[$resource]=2 ;;
          gone) running[$resource]=0 ;;
        esac
      fi
      ((${running[$resource]:-0})) && return
      "start_$kind" "$index" &
      starting[$resource]=$!
      ;;
    SUSPENDED | FAILED)
      running[$resource]=0
      delete "$resource" && "create_$kind" "$index" ||
        echo "# $resource: tried again"
      ;;
    *) echo "# waiting for $resource: $(state "$resource")" ;;
  esac
}

# look FIRST LAST: looks after the resources periodically, until the trainer is
# done.
look() {
  local index resource
  while :; do
    if (($1 == 0)); then look_after "$trainer" trainer-0; fi
    for ((index = $1; index <= $2; index++)); do
      look_after "$(searcher "$index")" "searcher-$index"
    done
    if ((dry_run)); then return; fi
    for resource in "${!starting[@]}"; do
      if wait "${starting[$resource]}"; then
        running[$resource]=1
      else
        echo "# $resource did not start; it is tried again" >&2
      fi
    done
    starting=()
    if (($1 == 0 && ${running[$trainer]:-0} == 2)); then
      echo "# the trainer has ended; see $workdir/logs/trainer-0.log"
      echo "# delete the machines with: $0 down"
      return
    fi
    sleep "$LOOK_EVERY_S"
  done
}

case "$action" in
  up)
    print_plan "$root" --elsewhere "${kinds[@]}"
    look 0 $((SEARCHERS - 1))
    ;;
  searchers)
    [[ "${words[1]:-}" =~ ^([1-9][0-9]*)-([0-9]+)$ ]] \
      || die "searchers: say which, as 4-9"
    look "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    ;;
  down)
    for ((slice = 0; slice < TRAINER_SLICES; slice++)); do
      ssh_to "$trainer" "$slice" all "$(set_index "$slice") \
sudo systemctl stop $NAME-trainer-\$INDEX.service" || true
    done
    delete "$trainer" || true
    for ((index = 0; index < SEARCHERS; index++)); do
      delete "$(searcher "$index")" || true
    done
    ;;
  *) usage >&2; die "unknown action $action" ;;
esac

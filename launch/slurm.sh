#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run on a Slurm cluster: a job for trainer and store, and an array job
# of searchers, which are requeued individually. See docs/guides/scaling.md.
set -euo pipefail

# ---- Variables: here, or in the environment ---------------------------------
NAME="${NAME:-tba}"
CONFIG="${CONFIG:-configs/countdown.py}"
# On a file system that all nodes mount, like this checkout and its .venv.
WORKDIR="${WORKDIR:-runs/$NAME}"
[[ "$WORKDIR" == /* ]] || WORKDIR="$PWD/$WORKDIR"
KIND="${KIND:-h100}"                      # device kind, for the plan
TRAINER_NODES="${TRAINER_NODES:-1}"       # with one trainer process each
TRAINER_GPUS="${TRAINER_GPUS:-1}"         # per node
SEARCHERS="${SEARCHERS:-2}"
SEARCHER_GPUS="${SEARCHER_GPUS:-1}"       # per searcher, as in hardware=
CPUS="${CPUS:-8}"                         # per process
TIME="${TIME:-04:00:00}"
PARTITION="${PARTITION:-}"                # "" = the cluster's default
ACCOUNT="${ACCOUNT:-}"                    # "" = yours
SFT="${SFT:-1}"                           # 0 if config.init is not "sft"
# Address of the trainer's first node; "" = the first address it reports.
STORE_HOST="${STORE_HOST:-}"
STORE_PORT="${STORE_PORT:-8469}"          # locator, which gives the address
STORE_PORTS="${STORE_PORTS:-8470-8489}"
TRAINER_PORT="${TRAINER_PORT:-8490}"
# More settings of the run, such as "--config.a=b --config.c=d".
read -r -a SETTINGS <<<"${SETTINGS:-}"
# -----------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: launch/slurm.sh [--dry_run] [up | searchers FIRST-LAST | down]

  up                 submits all jobs (default); after `down` it resumes from
                     the last checkpoint
  searchers 2-9      adds searchers 2 to 9 to a running run
  down               ends the run's jobs after the trainer has saved
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
need NAME CONFIG WORKDIR

common=(--time="$TIME" --cpus-per-task="$CPUS" --parsable --open-mode=append)
if [[ -n "$PARTITION" ]]; then common+=(--partition="$PARTITION"); fi
if [[ -n "$ACCOUNT" ]]; then common+=(--account="$ACCOUNT"); fi
role=("$root/launch/role.sh")
run_args=("--workdir=$WORKDIR")
wait_for=("--wait_for=$WORKDIR/config.json")
SETTINGS+=("--config.trainer.num_processes=$TRAINER_NODES")
SETTINGS+=("--config.search.num_searchers=$SEARCHERS")
use_searcher_devices "$SEARCHER_GPUS"
settings=("--config=$CONFIG" "${SETTINGS[@]}")
secret="$WORKDIR/secret"

# gpus COUNT: prints sbatch's flag for COUNT GPUs per node.
gpus() { if (($1)); then echo "--gpus-per-node=$1"; fi; }

# quote WORD…: prints the words as one line of shell code.
quote() { printf '%q ' "$@"; }

# submit FLAG… <SCRIPT: prints and submits a job; with --dry_run only prints it.
job_id=""
submit() {
  local script
  script="$(cat)"
  show sbatch "$@"
  printf '%s\n' "$script" | sed 's/^/    /'
  if ((dry_run)); then job_id="ID"; return; fi
  job_id="$(printf '%s\n' "$script" | sbatch "$@")"
  job_id="${job_id%%;*}"
  echo "job $job_id"
}

submit_sft() {
  # shellcheck disable=SC2046
  submit "${common[@]}" --job-name="$NAME-sft" --nodes=1 --ntasks=1 \
    $(gpus "$TRAINER_GPUS") --output="$WORKDIR/logs/sft.log" <<END
#!/usr/bin/env bash
set -euo pipefail
srun --cpus-per-task="$CPUS" \\
  $(quote "${role[@]}" --program=sft "${settings[@]}" "${run_args[@]}")
END
}

# The store runs on the first node of the trainer, at an address that the other
# nodes can reach. The run's secret is only in a file with mode 0600, never on a
# command line or in a variable.
submit_trainer() {
  local after=()
  if [[ -n "$job_id" ]]; then
    after=(--dependency="afterok:$job_id" --kill-on-invalid-dep=yes)
  fi
  # shellcheck disable=SC2046
  submit "${common[@]}" ${after[@]+"${after[@]}"} --job-name="$NAME-trainer" \
    --nodes="$TRAINER_NODES" --ntasks-per-node=1 --requeue --signal=TERM@120 \
    $(gpus "$TRAINER_GPUS") --output="$WORKDIR/logs/trainer-job.log" <<END
#!/usr/bin/env bash
set -euo pipefail
# This script runs on the first node. The store is no step of the job: what
# signals the steps ends the trainer alone, and searchers hear its goodbye.
host=$(quote "$STORE_HOST")
host="\${host:-\$(hostname -I | cut -d ' ' -f 1)}"
$(quote "${role[@]}" "--make_secret=$secret" --program=store) \\
  $(quote "${settings[@]}" "--config.store.secret_file=$secret") \\
  --config.store.address="\$host:$STORE_PORTS" \\
  --config.store.locator="\$host:$STORE_PORT" \\
  $(quote "${run_args[@]}") &
store=\$!
srun --cpus-per-task="$CPUS" --ntasks="$TRAINER_NODES" --kill-on-bad-exit=0 \\
  $(quote "${role[@]}" "${wait_for[@]}" --program=trainer "${run_args[@]}") \\
  --index_from=SLURM_PROCID "\$host:$TRAINER_PORT" &
status=0
wait -n || status=\$?
if ! kill -0 "\$store" 2>/dev/null; then
  echo "error: the store has ended with status \$status" >&2
  scancel --signal=TERM "\$SLURM_JOB_ID" && wait || true
  exit "\$((status || 1))"
fi
# The searchers hear from the store that the trainer is done.
sleep 30
kill -TERM "\$store" && wait "\$store" || true
exit "\$status"
END
}

# submit_searchers FIRST-LAST
submit_searchers() {
  local after=()
  if [[ -n "$job_id" ]]; then after=(--dependency="after:$job_id"); fi
  # shellcheck disable=SC2046
  submit "${common[@]}" ${after[@]+"${after[@]}"} \
    --job-name="$NAME-searcher" --array="$1" --requeue \
    --nodes=1 --ntasks=1 --signal=TERM@60 $(gpus "$SEARCHER_GPUS") \
    --output="$WORKDIR/logs/searcher-%a.log" <<END
#!/usr/bin/env bash
set -euo pipefail
srun --cpus-per-task="$CPUS" \\
  $(quote "${role[@]}" "${wait_for[@]}" --program=searcher "${run_args[@]}") \\
  --index_from=SLURM_ARRAY_TASK_ID
END
}

case "$action" in
  up)
    print_plan "$root" "$KIND"
    run mkdir -p -m 700 "$WORKDIR" "$WORKDIR/logs"
    if ((SFT)); then submit_sft; fi
    submit_trainer
    submit_searchers "0-$((SEARCHERS - 1))"
    echo "# watch: python -m tba_jax.main --program=status --workdir=$WORKDIR"
    ;;
  searchers)
    ((${#words[@]} == 2)) || die "searchers: say which, as 2-9"
    submit_searchers "${words[1]}"
    ;;
  down)
    # SIGTERM does not reach pending jobs.
    run scancel --name="$NAME-sft"
    run scancel --state=PENDING --name="$NAME-trainer"
    run scancel --signal=TERM --name="$NAME-trainer"
    run scancel --name="$NAME-searcher"
    ;;
  *) usage >&2; die "unknown action $action" ;;
esac

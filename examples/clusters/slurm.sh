#!/bin/bash
# What: train on SLURM; before its time limit, and when it is preempted, the job saves, and continues in the queue.
# Command: sbatch slurm.sh CONFIG RUN STEPS                                              one process per GPU
#          sbatch --ntasks-per-node=1 --cpus-per-task=32 slurm.sh CONFIG RUN STEPS       one process per node, as meshes need it
#     RUN is the run folder, on a file system that all nodes share, and STEPS the steps of the whole run. Every key of the config can be
#     set by further arguments: --set optimizer.learning_rate=0.001
# Needs: checkpoints (checkpoint.every is not null).
#SBATCH --job-name=jpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300               # five minutes before the time limit srun's tasks get SIGTERM, and save
#SBATCH --requeue
#SBATCH --open-mode=append

config=${1:?CONFIG is missing} run=${2:?RUN is missing} steps=${3:?STEPS is missing}
failures=$run.failures                  # failures since the run was last saved at SIGTERM
shift 3
mkdir -p "$(dirname "$run")"

JPIPE_SECRET=$(openssl rand -hex 32) || exit 2
export JPIPE_SECRET                     # srun passes it to the tasks
if [ "${SLURM_NTASKS_PER_NODE:-}" = 1 ] && [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]; then
    JAX_LOCAL_DEVICE_IDS=$(seq -s , 0 $((SLURM_GPUS_ON_NODE - 1)))
    export JAX_LOCAL_DEVICE_IDS         # all GPUs of the node: without it a task takes GPU 0 alone
fi

trap : TERM                             # at SIGTERM this script waits for srun, instead of ending
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    jpipe train "$config" --set run.dir="$run" --set train.steps="$steps" "$@"
code=$?

count=$([ -f "$failures" ] && head -c 4 "$failures")
case $count in
    "" | *[!0-9]* | ????*) count=0 ;;                      # not a number: bash would run a command inside it, as in a[$(command)]
esac
case $code in
    0)
        if [ -d "$run/checkpoints/$steps" ]; then          # finished
            rm -f "$failures"
            exit 0
        fi
        count=0 ;;                                         # saved at SIGTERM: continue
    2 | 130) exit "$code" ;;                               # change something, or Ctrl-C
    *) count=$((10#$count + 1)) ;;
esac
written=$(mktemp "$failures.XXXXXX") && echo "$count" > "$written" && mv -f "$written" "$failures"  # a link there is not followed
if [ "$count" -ge 3 ]; then exit "$code"; fi               # three failures in a row, such as a divergence
scontrol requeue "$SLURM_JOB_ID"                           # the job resumes from the newest checkpoint in $run

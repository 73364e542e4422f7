#!/bin/bash
# What: train on SLURM with the nodes that are left when some fail. Set the run folder, its steps and the numbers of nodes below.
# Command: sbatch elastic.sh
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=04:00:00
#SBATCH --no-kill                       # when a node fails, the job keeps the rest
#SBATCH --open-mode=append

run=/shared/gpt steps=20000 planned=4 minimum=2
JPIPE_SECRET=$(openssl rand -hex 32) || exit 2
export JPIPE_SECRET

newest() { ls "$run/checkpoints" 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -n 1; }

failures=0
while [ ! -d "$run/checkpoints/$steps" ]; do
    before=$(newest)
    nodes=$(sinfo --noheader --Node --responding --nodes="$SLURM_JOB_NODELIST" --states=alloc,mixed --format=%N | sort -u)
    count=$(echo "$nodes" | grep -c .)
    if [ "$count" -lt "$minimum" ]; then echo "$count of $planned nodes are left"; exit 1; fi
    srun --nodes="$count" --ntasks="$count" --nodelist="$(echo "$nodes" | paste -sd,)" --kill-on-bad-exit=1 \
        jpipe train config.yaml --elastic "$planned" --set run.dir="$run" --set train.steps="$steps"
    code=$?
    case $code in 2 | 130) exit "$code" ;; esac
    if [ "$(newest)" != "$before" ]; then failures=0; else failures=$((failures + 1)); fi
    if [ "$failures" -ge 3 ]; then exit "$code"; fi         # three in a row without a new checkpoint
    sleep "${PAUSE:-30}"                                    # SLURM needs a moment to notice that a node is down
done

#!/bin/sh
# What: run `jpipe train`, and say by the exit code whether the run is finished, for launchers that start a failed job again.
# Command: train-to-end RUN STEPS CONFIG [OPTION ...]
#     RUN      the run folder, on storage that all processes share
#     STEPS    the steps of the whole run; the two become run.dir and train.steps of the config
# Exit codes: 0 finished; 75 saved before its last step (a preemption): start it again; otherwise that of jpipe train (2: do not).
set -u
if [ "$#" -lt 3 ]; then
    echo "usage: train-to-end RUN STEPS CONFIG [OPTION ...]" >&2
    exit 2
fi
run=$1 steps=$2
shift 2

# This shell is process 1 of a container, which gets the signal alone. It passes it on, and waits until the run is saved.
child="" signal=""
# shellcheck disable=SC2329 # by traps
pass_on() {
    signal=$1
    [ -z "$child" ] || kill -s "$signal" "$child" 2>/dev/null
}
trap "pass_on TERM" TERM
trap "pass_on INT" INT
jpipe train "$@" --set run.dir="$run" --set train.steps="$steps" &
child=$!
[ -z "$signal" ] || kill -s "$signal" "$child" 2>/dev/null
while :; do
    wait "$child" # a signal ends this wait early
    code=$?
    kill -s 0 "$child" 2>/dev/null || break
done

if [ "$code" -eq 0 ] && [ ! -d "$run/checkpoints/$steps" ]; then
    exit 75
fi
exit "$code"

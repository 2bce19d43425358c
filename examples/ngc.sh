#!/usr/bin/env bash
# NGC, Base Command: an array job has one container per node, and this script runs in each of them.
#
#   plain     ngc base-command job run --name catdog --image nvcr.io/ORG/rackrun:1 \
#                 --array-type PYTORCH --replicas 2 --instance dgxa100.80g.8.norm --ace ACE \
#                 --total-runtime 24h --result /results --datasetid ID:/data \
#                 --commandline "bash /opt/rackrun/examples/ngc.sh catdog"
#   bcprun    the same, with --commandline "bash /opt/rackrun/examples/ngc.sh bcprun catdog"
#
# Node rank, number of nodes, GPUs and the first node's name come from NGC_ARRAY_INDEX,
# NGC_ARRAY_SIZE, NGC_GPUS_PER_NODE and NGC_MASTER_ADDR. For the first minutes, that name may not
# resolve; the other nodes wait for it.

set -euo pipefail
data=${DATA:-/data/shards}          # shard folder made by python -m rackrun.convert
runs=${RUNS:-/results/runs}         # NGC keeps this folder after the job
name=${NAME:-ngc}                   # name of the run
if [ "${1:-}" = bcprun ]; then # bcprun starts this script once on each node of the job
    shift
    exec bcprun --nnodes "$NGC_ARRAY_SIZE" --npernode 1 \
        --env DATA="$data" --env RUNS="$runs" --env NAME="$name" \
        --cmd "$(printf '%q ' bash "$0" "$@")"
fi
task=("${@:-catdog}")               # the task and its options

# --name and --auto-resume: a restarted job with the same name and results folder resumes.
run() {
    python -m rackrun node --runs "$runs" --name "$name" --auto-resume \
        "${task[@]}" --data "$data"
}

# 75: a node was lost or a rank hung. All nodes exit with that code, so all retry together.
for _ in 1 2 3; do
    code=0
    run || code=$?
    [ "$code" = 75 ] || break
done
exit "$code"

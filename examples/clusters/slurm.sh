#!/bin/bash
# A run on Slurm: the first node is the head and has no worker, every other node has one.
#
#   sbatch --nodes 9 slurm.sh
#
# The folder of the run must be on a file system that all nodes see. The same command resumes, also
# after a time limit: Slurm's SIGTERM, five minutes before, lets running rollouts end.
#SBATCH --job-name=hermes-rl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS=$address:6379 RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN

step() { # step NODE RAY-ARGUMENT...: start Ray on a node, beside other steps
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --overlap -w "$node" ray start "$@" --block --disable-usage-stats &
}

step "$head" --head --node-ip-address "$address" --port 6379 --num-cpus 0
until ray status >/dev/null 2>&1; do sleep 2; done
for node in "${nodes[@]:1}"; do
    step "$node" --address "$RAY_ADDRESS"
done
sleep 20

workers=$((${#nodes[@]} - 1))
hermes-rl run tasks.jsonl --out runs/first --model gpt-5-mini --workers "$workers" --concurrency $((64 * workers)) &
run=$!
trap 'kill -TERM $run' TERM
code=0
wait $run || code=$?
while kill -0 $run 2>/dev/null; do # the first wait ends with the signal
    code=0
    wait $run || code=$?
done
exit "$code"

#!/bin/bash
# A pipeline on Slurm, a torchrun node on each machine, in an environment where Thinwire is installed:
#     sbatch --nodes 4 docker/slurm.sh quickstart
#     sbatch --nodes 2 --export ALL,STAGES_PER_NODE=2 docker/slurm.sh my.yaml --training.steps 1000
#SBATCH --job-name thinwire
#SBATCH --ntasks-per-node 1
#SBATCH --output thinwire-%j.log
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "a recipe is needed, as in: sbatch --nodes 4 $0 quickstart" >&2
    exit 2
fi

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=${MASTER_PORT:-29500}
export STAGES_PER_NODE=${STAGES_PER_NODE:-1}

# SLURM_NODEID differs from machine to machine, so each task writes its own line. Where the fast network is not the one
# that a host's name stands for, export GLOO_SOCKET_IFNAME; `thinwire doctor` names the interfaces.
srun --kill-on-bad-exit=1 --label bash -c 'exec torchrun \
    --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$STAGES_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m thinwire.launch.train "$@"' torchrun "$@"

#!/bin/bash
# sbatch slurm.sh: starts one torchrun on each node, which starts the ranks of this node.
#SBATCH --job-name=gradwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
# With GPUs, write one # less here, and set RANKS_PER_NODE to as many:
##SBATCH --gpus-per-node=2
#SBATCH --time=01:00:00
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-2}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks_per_node))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit --cpus-per-task from sbatch
# To use another network than that of the first node's name:
# export GLOO_SOCKET_IFNAME=ib0

# The rendezvous is on the first node, at a port that depends on the job, so that two jobs on one node use different ports.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks_per_node" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" \
    "${SCRIPT:-ddp.py}"

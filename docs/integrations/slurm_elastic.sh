#!/bin/bash
# sbatch slurm_elastic.sh: training with hvd.elastic that continues when a node is lost. Needs ssh between the nodes of a job.
#SBATCH --job-name=gradwire
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --no-kill  # otherwise the job ends when a node fails
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-2}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks_per_node))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks_per_node/" | paste -sd ,)

# Training continues while at least half of the nodes are left. The first node, on which this command runs, must not be lost.
gradwire run -np $((SLURM_NNODES * ranks_per_node)) --min-np $(((SLURM_NNODES + 1) / 2 * ranks_per_node)) -H "$hosts" \
    "${SCRIPT:-train.py}"

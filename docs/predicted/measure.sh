#!/bin/sh
# Measure predictions on simulated hosts and in shared memory, write a JSON for each into the folder $1, and draw the picture of
# docs/guides/tuning.md. Needs root, and pip install '.[bench]'. Further arguments go to the benchmark: own_cores had -t 5.
set -e
folder=$1
shift
predicted() { # hosts, ranks of a host, rate, largest size
    python -m gradwire.bench hosts --hosts "$1" --ranks $(($1 * $2)) --rate "$3" -- \
        predicted -e "$4" -J "$folder/${1}x${2}_$3.json" $more
}
more=$*
for hosts in 2 3 4 5 6 7 8; do
    predicted "$hosts" 1 100mbit 1M
    predicted "$hosts" 1 1gbit 16M
done
for hosts in 2 4; do predicted "$hosts" 1 10gbit 64M; done
predicted 2 4 1gbit 16M
for ranks in 2 4; do
    torchrun --nproc-per-node "$ranks" -m gradwire.bench predicted -J "$folder/shm$ranks.json" $more
done
python -m gradwire.bench predicted --plot docs/images/predicted.png docs/predicted/own_cores/*.json
python docs/figures.py

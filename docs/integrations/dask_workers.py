"""Trains on the workers of a Dask cluster, one rank each.

python dask_workers.py [ADDRESS OF THE SCHEDULER]
"""

import os
import sys

import torch
from dask.distributed import Client, LocalCluster
from torch import nn


def train(rank, size, address, port):
    """Train on one worker, and return what compression has saved."""
    import gradwire as hvd

    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": address, "MASTER_PORT": f"{port}"}
    hvd.init()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), compression="int8"
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(20):
        inputs = torch.randn(16, 64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()
    hvd.shutdown()
    return str(optimizer.stats)


def free_port():
    """Return a port that is free on this worker."""
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    client = Client(sys.argv[1] if sys.argv[1:] else LocalCluster(n_workers=2, threads_per_worker=1))
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    host = workers[0].split("//")[1].rsplit(":", 1)[0]
    port = client.submit(free_port, workers=workers[:1]).result()
    ranks = [client.submit(train, rank, len(workers), host, port, workers=[each]) for rank, each in enumerate(workers)]
    print(client.gather(ranks)[0])

"""Trains on the workers of Ray Train, whose groups have the backend "gradwire".

python ray_train.py [NUMBER OF WORKERS]
"""

import sys

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def register():
    """Let torch know the backend. Ray calls this in every worker, before it makes the group."""
    import gradwire  # noqa: F401


def train():
    """Train on one worker."""
    from gradwire import ddp_comm_hook

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))  # wraps it in DDP
    hook = ddp_comm_hook("int8")
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # every worker has its own data
    for _ in range(20):
        inputs = torch.randn(16, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}; {hook.stats}", flush=True)
    hook.close()


if __name__ == "__main__":
    ray.init(runtime_env={"worker_process_setup_hook": register})
    workers = ScalingConfig(num_workers=int(sys.argv[1]) if sys.argv[1:] else 2)
    TorchTrainer(train, torch_config=TorchConfig(backend="gradwire"), scaling_config=workers).fit()

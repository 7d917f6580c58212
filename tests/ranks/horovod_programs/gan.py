"""Let a generator and a discriminator train each other, each with an optimizer of its own."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together")
args = parser.parse_args()

hvd.init()
torch.manual_seed(5)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
optimizers = {}
for name, part in model.items():
    optimizers[name] = hvd.DistributedOptimizer(
        torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)), named_parameters=part.named_parameters()
    )
    hvd.broadcast_parameters(part.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizers[name], root_rank=0)

share = args.batch_size // hvd.size()
mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
draw = torch.Generator().manual_seed(17)
ones, zeros = torch.ones(share, 1), torch.zeros(share, 1)
for _step in range(args.steps):
    real = (torch.randn(args.batch_size, 2, generator=draw) * 0.3 + 1.0)[mine]
    fake = generator(torch.randn(args.batch_size, 8, generator=draw)[mine])

    optimizers["discriminator"].zero_grad()
    loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
    loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    loss.backward()
    optimizers["discriminator"].step()

    optimizers["generator"].zero_grad()
    F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
    optimizers["generator"].step()

"""Train a small residual network as large batches are trained: a warm-up of the learning rate, checkpoints, resumption."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pt")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stop-after", type=int, default=None, help="end after this epoch, as if interrupted")
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=1)
args = parser.parse_args()

STEPS = 2  # an epoch


class Block(nn.Module):
    """Add two convolutions to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


hvd.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(), momentum=0.9, weight_decay=5e-5
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
)

# Rank 0 looks for the last checkpoint, and tells the others.
resume_from_epoch = 0
for candidate in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=candidate)):
        resume_from_epoch = candidate
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def adjust_learning_rate(epoch: int, batch: int) -> None:
    """Reach size times the rate of one rank within the warm-up, and divide it by ten in the last epoch."""
    if epoch < args.warmup_epochs:
        progress = epoch + (batch + 1) / STEPS
        factor = (progress * (hvd.size() - 1) / args.warmup_epochs + 1) / hvd.size()
    else:
        factor = 1.0 if epoch < args.epochs - 1 else 0.1
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


for epoch in range(resume_from_epoch, args.epochs):
    model.train()
    generator = torch.Generator().manual_seed(1000 * epoch + hvd.rank())
    for batch in range(STEPS):
        adjust_learning_rate(epoch, batch)
        images = torch.randn(args.batch_size * args.batches_per_allreduce, 3, 12, 12, generator=generator)
        labels = torch.randint(0, 10, (len(images),), generator=generator)
        optimizer.zero_grad()
        for start in range(0, len(images), args.batch_size):
            output = model(images[start : start + args.batch_size])
            loss = F.cross_entropy(output, labels[start : start + args.batch_size])
            loss.div_(args.batches_per_allreduce)
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
    if epoch + 1 == args.stop_after:
        break
hvd.barrier()

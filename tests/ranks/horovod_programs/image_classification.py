"""Classify images: a data sampler, a scaled learning rate, half-precision gradients and accumulation over several batches."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together, in each backward pass")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)

labels = torch.arange(384) % 10
images = torch.rand(384, 1, 8, 8) + labels.view(-1, 1, 1, 1) / 10
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=args.batch_size // hvd.size(), sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for number, (data, target) in enumerate(loader, 1):
        loss = F.cross_entropy(model(data), target) / args.batches_per_allreduce
        loss.backward()
        if number % args.batches_per_allreduce == 0:
            optimizer.step()
            optimizer.zero_grad()

model.eval()
with torch.no_grad():
    right = sum((model(data).argmax(1) == target).float().sum() for data, target in loader)
accuracy = hvd.allreduce(right / len(sampler), name="avg_accuracy").item()
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")

"""Measure images a second on made-up data, by the optimizer and reduction that are asked for."""

import argparse
import timeit

import torch
import torch.nn.functional as F
from torch import nn

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together")
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(7)
model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 100))
lr_scaler = hvd.size() if not args.use_adasum else 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

share = args.batch_size // hvd.size()
mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
data = torch.randn(args.batch_size, 3, 32, 32)[mine]
target = torch.randint(0, 100, (args.batch_size,))[mine]


def benchmark_step() -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(share * args.num_batches_per_iter / seconds)
mean_rate = sum(rates) / len(rates)
total = hvd.allreduce(torch.tensor(mean_rate), op=hvd.Sum, name="images a second").item()
if hvd.rank() == 0:
    print(f"{total:.1f} images a second on {hvd.size()} ranks")

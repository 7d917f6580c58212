"""Learn which word follows which, with sparse gradients of the embedding: by rows, or made dense."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--sparse-as-dense", action="store_true")
parser.add_argument("--words", type=int, default=200)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together")
args = parser.parse_args()

hvd.init()
torch.manual_seed(3)
embedding = nn.Embedding(args.words, 16, sparse=True)
model = nn.Sequential(embedding, nn.Linear(16, args.words))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), sparse_as_dense=args.sparse_as_dense
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

share = args.batch_size // hvd.size()
words = torch.Generator().manual_seed(11)
for _step in range(args.steps):
    text = torch.randint(0, args.words, (args.batch_size, 2), generator=words)
    mine = text[hvd.rank() * share : (hvd.rank() + 1) * share]
    optimizer.zero_grad()
    F.cross_entropy(model(mine[:, 0]), mine[:, 1]).backward()
    optimizer.step()

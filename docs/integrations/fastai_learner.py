"""Trains a fastai Learner with DistributedOptimizer, on CPUs and on GPUs.

torchrun --nproc-per-node 2 fastai_learner.py
"""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner, OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

import gradwire as hvd


def compressed(parameters, **options):
    """Make the optimizer of the learner. Its parameters come in groups, one of each part of the model."""
    return OptimWrapper(opt=hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), compression="int8"))


hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
inputs = torch.randn(640, 64)[hvd.rank() :: hvd.size()]  # every rank has its own data
data = DataLoaders(
    *(DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), bs=16, shuffle=each) for each in (True, False))
)
learner = Learner(data, model, loss_func=nn.MSELoss(), opt_func=compressed)
learner.fit(1, lr=1e-3)
optimizer = learner.opt.opt
if hvd.rank() == 0:
    print(optimizer.stats)
hvd.shutdown()

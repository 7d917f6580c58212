"""Trains as Horovod's guide to elastic training does: epochs and batches in a state, which is committed every few batches."""

import torch
import torch.nn.functional as F

import gradwire as hvd

LR, EPOCHS, BATCHES_PER_EPOCH, BATCHES_PER_COMMIT = 0.02, 2, 6, 2

hvd.init()
torch.manual_seed(3)
inputs, targets = torch.randn(48, 8), torch.randint(4, (48,))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = LR * hvd.size()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
        for state.batch in range(state.batch, BATCHES_PER_EPOCH):  # noqa: B020
            first = state.batch * 8
            share = slice(first + hvd.rank(), first + 8, hvd.size())
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[share]), targets[share]).backward()
            optimizer.step()
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
        state.batch = 0


state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

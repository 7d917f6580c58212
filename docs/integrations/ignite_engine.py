"""Trains with PyTorch-Ignite, whose Horovod backend runs on gradwire.

torchrun --nproc-per-node 2 ignite_engine.py
"""

import gradwire

gradwire.alias_horovod()  # before ignite is imported, which looks for Horovod then

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import nn

idist.initialize("horovod")
torch.manual_seed(idist.get_rank())
model = idist.auto_model(
    nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
)  # takes the weights of rank 0
optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3), compression="int8")


def train_step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Take a step with the gradients of all ranks."""
    inputs, labels = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(train_step)


@trainer.on(Events.COMPLETED)
def report(engine: Engine) -> None:
    """Print the mean loss of all ranks, and what compression has saved."""
    loss = idist.all_reduce(engine.state.output) / idist.get_world_size()
    if idist.get_rank() == 0:
        print(f"loss {loss:.3f}; {optimizer.stats}")


trainer.run([(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(20)], max_epochs=1)
idist.finalize()

"""A model in training that commits its state after each step, as with `hvd.elastic` under torchrun."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.elastic.memory import NamedMemory, find_agent
from gradwire.trainer.examples.loop import Trainee, our_trainee


@dataclass
class CommittingTrainee(Trainee):
    """Trains, and commits each step to its host's memory. Raises RuntimeError without an agent such as torchrun's."""

    state: hvd.elastic.TorchState = field(init=False)

    def __post_init__(self) -> None:
        agent = find_agent()
        if agent is None:
            raise RuntimeError(f"rank {hvd.rank()}: commits are kept for torchrun, which has not started this process")
        agent.watch()
        self.state = hvd.elastic.TorchState(self.module, self.optimizer)
        self.state.begin(NamedMemory(agent, 1))

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """Train, and commit. Return the loss."""
        loss = super().step(inputs, targets, lr)
        self.state.commit()
        return loss


def committing_trainee(module: nn.Module) -> CommittingTrainee:
    """Return our trainee, with a commit after each step."""
    ours = our_trainee(module)
    return CommittingTrainee(ours.module, ours.forward, ours.optimizer, ours.wait_s, ours.record)

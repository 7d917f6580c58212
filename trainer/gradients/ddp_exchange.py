"""How the communication hook of DDP averages a bucket: what it compresses together, and what of that is outstanding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives import Communicator, Work
from collectives.compression.codec import Codec
from collectives.compression.powersgd import PowerSGD


class Exchange:
    """Averaging one bucket: its groups by their codec, the other gradients as they are; without groups, the buffer as a whole."""

    def __init__(
        self,
        communicator: Communicator,
        buffer: Tensor,
        gradients: Mapping[int, Tensor],
        groups: list[Group],
        cast: Codec | None,
        step: int,
    ) -> None:
        self.buffer = buffer
        self._communicator = communicator
        self._gradients = gradients
        self._groups = groups
        self._cast = cast
        self._step = step
        self._works: list[Work | None] = []

    def begin(self) -> None:
        """Start what can run in the background. All ranks begin their exchanges in the same order."""
        if not self._groups:
            self._works = [
                self._communicator.allreduce(self.buffer, "average", codec=self._cast, step=self._step, async_op=True)
            ]
            return
        grouped = {number for group in self._groups for number in group.numbers}
        others = [gradient for number, gradient in self._gradients.items() if number not in grouped]
        for group in self._groups:
            group.take(self._gradients)
            self._works.append(group.average(self._step))
        if others:
            self._works.append(self._communicator.grouped_allreduce(others, "average", async_op=True))

    def finish(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        for group in self._groups:
            group.give_back(self._gradients)


class Group(ABC):
    """Gradients that are compressed together: a float32 buffer with a view for each."""

    def __init__(
        self, communicator: Communicator, numbers: Sequence[int], shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.numbers = numbers
        self._communicator = communicator
        self._shapes = shapes
        numel = sum(map(math.prod, shapes))
        # On the CPU, memory that the communicator reduces with the least copying.
        self._flat = communicator.empty(numel) if device.type == "cpu" else torch.empty(numel, device=device)
        self._views = self._cut(self._flat)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        return [part.view(list(shape)) for part, shape in zip(parts, self._shapes, strict=True)]

    def take(self, gradients: Mapping[int, Tensor]) -> None:
        for number, view in zip(self.numbers, self._views, strict=True):
            view.copy_(gradients[number])

    def give_back(self, gradients: Mapping[int, Tensor]) -> None:
        for number, view in zip(self.numbers, self._views, strict=True):
            gradients[number].copy_(view)

    @abstractmethod
    def average(self, step: int) -> Work | None:
        """Begin to average what was taken; what is returned, if anything, is to be waited for."""

    @abstractmethod
    def outstanding(self) -> list[Tensor]:
        """By parameter, what this rank would have to add to its gradients for nothing to be lost, were this the end."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class CodedGroup(Group):
    """With a Codec."""

    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        feedback: bool,
        numbers: Sequence[int],
        shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        super().__init__(communicator, numbers, shapes, device)
        self._codec = codec
        self._feedback = communicator.new_feedback(codec, self._flat.numel(), device) if feedback else None

    def average(self, step: int) -> Work | None:
        return self._communicator.allreduce(
            self._flat,
            "average",
            codec=self._codec,
            feedback=self._feedback,
            step=step,
            seed=self.numbers[0],
            async_op=True,
        )

    def outstanding(self) -> list[Tensor]:
        if self._feedback is None:
            return [view.zero_() for view in self._views]
        return self._cut(self._feedback.owed(self._communicator.size))

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._feedback is None else self._feedback.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self._feedback is not None:
            self._feedback.load_state_dict(state)


class LowRankGroup(Group):
    """With PowerSGD. average() returns when it is done."""

    def __init__(
        self,
        communicator: Communicator,
        codec: PowerSGD,
        numbers: Sequence[int],
        shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        super().__init__(communicator, numbers, shapes, device)
        self._state = codec.new_state(shapes, device)

    def average(self, step: int) -> None:
        for sums in self._state.exchange(self._views):
            work = self._communicator.allreduce(sums, "average", async_op=True)
            assert work is not None
            work.wait()

    def outstanding(self) -> list[Tensor]:
        found = []
        for index, view in enumerate(self._views):
            kept = self._state.kept(index)
            found.append(torch.zeros_like(view) if kept is None else kept[0].clone().view(view.shape))
        return found

    def state_dict(self) -> dict[str, Tensor]:
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state.load_state_dict(state)

"""Error feedback: what encodings lost of one buffer is added to it the next time."""

from __future__ import annotations

import torch

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.partition import Partition
from gradwire.collectives.plan.spans import Span


class Feedback:
    """What one rank keeps between the compressed allreduces of one buffer (Seide et al. 2014; the owner's: Tang et al. 2019).

    worker: float32, (numel,): what this rank's encodings of its own numbers lost; zero where it encodes nothing, because another
    rank of its host does. owner: float32: what its encodings of the sum of its shard lost, in the units of the result. shard:
    where that is in the buffer. state: by chunk and shard, what the codec remembers. step: of the next call, if that does not
    say; one more than that of the last. seed: tells this buffer from others, if calls do not say.

    As the sum of the workers' residuals over all ranks and the owners' side by side are all that was lost, the results of any
    number of steps, with these, are the sum of what was given; but for the rounding of sums of codes, where codes are summed as
    they are (fp16, bf16), which no residual keeps. Made by Communicator.new_feedback; belongs to an operation while
    that runs.
    """

    def __init__(self, codec: Codec, partition: Partition, device: torch.device, seed: int = 0) -> None:
        self.step, self.seed = 0, seed
        self.codec = codec
        self.partition = partition
        self.worker = torch.zeros(partition.numel, dtype=torch.float32, device=device)
        self.device = self.worker.device
        self.owner = torch.zeros(partition.shard.length, dtype=torch.float32, device=device)
        self.state: list[list[State | None]] = [
            [codec.new_state(span.length, device) if span.length else None for span in chunk]
            for chunk in partition.chunks
        ]

    @property
    def shard(self) -> Span:
        return self.partition.shard

    def owed(self, inputs: int) -> torch.Tensor:
        """What this rank has of all that was lost: float32, (numel,), in the units of what it gives, of which the result is a
        sum (inputs = 1) or, of so many, the mean.
        """
        owed = self.worker.clone()
        owed[self.shard.start : self.shard.stop].add_(self.owner, alpha=inputs)
        return owed

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what load_state_dict takes: this rank's tensors, and the step."""
        return {**self.tensors(), "step": torch.tensor(self.step)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors, themselves, by name."""
        named = {"worker": self.worker, "owner": self.owner}
        for c, chunk in enumerate(self.state):
            for s, state in enumerate(chunk):
                named |= {f"state.{c}.{s}.{name}": tensor for name, tensor in (state or {}).items()}
        return named

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy saved tensors into these, and take the step. Raises ValueError for those of another buffer, codec, or world."""
        mine = self.state_dict()
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        if given != wanted:
            differing = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
            raise ValueError(
                f"{self.codec!r}: the saved residuals do not fit this buffer, codec and number of ranks: "
                f"{', '.join(differing[:4])} have shapes {[given.get(name) for name in differing[:4]]}, not "
                f"{[wanted.get(name) for name in differing[:4]]}"
            )
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        self.step = int(state["step"])

"""Error feedback: the error of encoding a buffer is added to the buffer before its next encoding."""

from __future__ import annotations

import torch

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.partition import Partition
from gradwire.collectives.schedules.spans import Span


class Feedback:
    """The errors that one rank keeps between the compressed allreduces of one buffer (errors of a rank's own numbers: Seide
    et al. 2014; errors of sums: Tang et al. 2019).

    worker: float32, (numel,): the error of this rank's encodings of its own numbers; zero for numbers that another rank of
    its host encodes. owner: float32, (shard.length,): the error of this rank's encodings of sums, in the units of the
    result: divided by the number of ranks for an average. shard: the part of the buffer whose sums this rank encodes.
    state: the codec's state for each piece of the buffer that is encoded as a whole. step: the step of the next call, one more
    than that of the last call; a `step` argument of the call replaces it. seed: the seed of a call that has no `seed`
    argument; the seeds of different buffers must differ.

    No error is lost: for the op 'sum', the results of all calls so far, plus the `worker` residuals of all ranks, plus the
    `owner` residuals, are the sum of all inputs. There are two exceptions: if codes are added undecoded (fp16, bf16), no
    residual keeps the rounding of these sums; dgc adds momentum. Communicator.new_feedback makes this object. Do not use the
    object while an operation uses it.
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
        self._joined: set[torch.cuda.Stream] = set()
        self._made = torch.cuda.current_stream(self.device).record_event() if self.worker.is_cuda else None

    @property
    def shard(self) -> Span:
        return self.partition.shard

    def join(self) -> None:
        """On a GPU, let the current stream continue after what made the tensors, and keep their memory until it has used them."""
        if not self.worker.is_cuda:
            return
        stream = torch.cuda.current_stream(self.device)
        if stream not in self._joined:
            if self._made is not None:
                stream.wait_event(self._made)
            for tensor in self.tensors().values():
                tensor.record_stream(stream)
            self._joined.add(stream)

    def unsent_error(self, inputs: int) -> torch.Tensor:
        """Return this rank's part of all errors: float32, (numel,), in the units of its input. inputs: for an average, the
        number of ranks whose inputs are averaged; 1 for a sum.
        """
        error = self.worker.clone()
        error[self.shard.start : self.shard.stop].add_(self.owner, alpha=inputs)
        return error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors and the step, for load_state_dict."""
        return {**self.tensors(), "step": torch.tensor(self.step, dtype=torch.int64, device="cpu")}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by name, not copies of them."""
        named = {"worker": self.worker, "owner": self.owner}
        for c, chunk in enumerate(self.state):
            for s, state in enumerate(chunk):
                named |= {f"state.{c}.{s}.{name}": tensor for name, tensor in (state or {}).items()}
        return named

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy saved tensors and the step into this object. Raises ValueError if they are of another buffer, codec or world."""
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

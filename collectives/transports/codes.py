"""The codes that a CodedProgram moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from gradwire.collectives.compression.codec import Codec, mixed, rounding_seed
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import Partition
from gradwire.collectives.kernels import cpu_arithmetic
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Instruction, Kind
from gradwire.collectives.transports.base import Coding
from gradwire.collectives.transports.loop import Scratch


class Codes:
    """Codes of float32 numbers on one device, other ones in each run of the program. The program replaces the numbers with their
    sum over the ranks, divided by `divisor`.

    codec: the codec in its form for the step. via_host: whether codes on CUDA are copied through pinned memory. Attribute
    compiles: whether coding() returns the work for a compiled loop, which needs the CPU and a codec with C functions.
    """

    def __init__(
        self,
        program: CodedProgram,
        codec: Codec,
        partition: Partition,
        device: torch.device,
        scratch: Scratch,
        sums: Scratch,
        *,
        divisor: int,
        via_host: bool,
    ) -> None:
        self.program = program
        self._codec, self._partition, self._divisor = codec, partition, divisor
        self._device, self._scratch, self._sums = device, scratch, sums
        self._is_staged = via_host and device.type == "cuda"
        self.wire_bytes: Callable[[int], int] = cache(codec.wire_bytes)  # of the code of so many numbers
        self._owner_start = partition.shard.start
        self._functions = codec.c_functions() if device.type == "cpu" else None
        self.compiles = self._functions is not None
        if self._functions is not None:
            (encode, encoding), (decode, decoding) = self._functions
            self._group = torch.tensor(partition.group, dtype=torch.int64, device="cpu")
            divide = cpu_arithmetic(torch.float32).address
            self._settings = encode, encoding.ctypes.data, decode, decoding.ctypes.data, divide, divisor
            self._members = self._group.data_ptr(), len(self._group)

    def begin(self, flat: torch.Tensor, feedback: Feedback | None, step: int, seed: int) -> None:
        """Begin a run that sums the numbers `flat`."""
        self._flat, self._feedback, self._step, self._seed = flat, feedback, step, seed
        self._codes = self._messages = self._scratch.take(self.program.scratch, self._device)
        if self._is_staged:
            self._messages = self._scratch.take(self.program.scratch, self._device, pinned=True)
        # The sums of all blocks use one buffer, one after the other, so that it stays in the caches.
        self._sum = self._sums.take(4 * self._partition.longest, self._device).view(torch.float32)
        self._has_sum = False

    def end(self) -> None:
        """End a run, so that this object keeps no tensor of it alive."""
        del self._flat, self._feedback, self._codes, self._messages, self._sum

    def coding(self) -> Coding:
        """See CodedWork."""
        feedback = self._feedback
        return Coding(
            *self._settings,
            self._flat.data_ptr(),
            self._sum.data_ptr(),
            self._codes.data_ptr(),
            0 if feedback is None else feedback.worker.data_ptr(),
            0 if feedback is None else feedback.owner.data_ptr(),
            self._owner_start,
            mixed(self._seed, self._step),
            *self._members,
        )

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        message = self._at(self._messages, length, scratch)
        if self._messages is not self._codes:
            message.copy_(self._at(self._codes, length, scratch))
        return message

    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        return self._at(self._messages, length, scratch)

    def work(self, instruction: Instruction) -> None:
        """Encode, decode, or divide."""
        kind, peer, offset, length, scratch, number, segment, block = instruction
        in_sum = self._has_sum if kind == Kind.ENCODE else number == 1
        numbers = self._sum[:length] if in_sum else self._flat[offset : offset + length]
        self._has_sum = in_sum and kind == Kind.COMPLETE
        if kind == Kind.COMPLETE:
            if self._divisor != 1:
                numbers.div_(self._divisor)
            return
        code = self._at(self._codes, length, scratch)
        if kind != Kind.ENCODE:
            if self._messages is not self._codes and peer != self._partition.rank:
                code.copy_(self._at(self._messages, length, scratch))
            self._codec.decode(code, numbers, add=kind == Kind.ADD)
            return
        residual = state = None
        if self._feedback is not None and number == 0:
            residual = self._feedback.worker[offset : offset + length]
            state = self._feedback.state[segment][block]
        elif self._feedback is not None:
            start = offset - self._owner_start
            residual = self._feedback.owner[start : start + length]
        # Ranks that hold the same sum must encode it to the same code, so they use the seed of the block's owner.
        rank = self._partition.rank if number == 0 else self._partition.group[block % len(self._partition.group)]
        seed = rounding_seed(self._step, rank, segment, block, number, self._seed)
        self._codec.encode(numbers, code, residual=residual, seed=seed, state=state)

    def _at(self, memory: torch.Tensor, length: int, scratch: int) -> torch.Tensor:
        return memory[scratch : scratch + self.wire_bytes(length)]

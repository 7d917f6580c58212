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
from gradwire.collectives.transports.loop import Payload, Scratch


class Codes:
    """How numbers on one device become the codes of a program, which replaces the numbers with their sum over the ranks,
    divided by `divisor`.

    codec: the codec in its form for the step. scratch, sums: memory for one run at a time; None: each run has memory of its own.
    Attribute compiles: whether a compiled loop can do the work, which needs the CPU and a codec with C functions.
    """

    def __init__(
        self,
        program: CodedProgram,
        codec: Codec,
        partition: Partition,
        device: torch.device,
        scratch: Scratch | None,
        sums: Scratch | None,
        *,
        divisor: int,
    ) -> None:
        self.program, self.codec, self.partition, self.divisor = program, codec, partition, divisor
        self.wire_bytes: Callable[[int], int] = cache(codec.wire_bytes)
        self._device, self._scratch, self._sums = device, scratch, sums
        functions = codec.c_functions() if device.type == "cpu" else None
        self.compiles = functions is not None
        if functions is not None:
            (encode, encoding), (decode, decoding) = functions
            self._functions = functions  # whose settings must live as long as their addresses
            self._group = torch.tensor(partition.group, dtype=torch.int64, device="cpu")
            divide = cpu_arithmetic(torch.float32).address
            self.settings = encode, encoding.ctypes.data, decode, decoding.ctypes.data, divide, divisor
            self.members = self._group.data_ptr(), len(self._group)

    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of one run: bytes for codes, and float32 numbers for the sum of a block. The sums of all blocks use
        it one after the other, so that it stays in the caches."""
        code_bytes, longest = self.program.scratch, self.partition.longest
        if self._scratch is None or self._sums is None:
            codes = torch.empty(code_bytes, dtype=torch.uint8, device=self._device)
            return codes, torch.empty(longest, dtype=torch.float32, device=self._device)
        codes = self._scratch.take(code_bytes, self._device)
        return codes, self._sums.take(4 * longest, self._device).view(torch.float32)


class CodedNumbers(Payload):
    """The numbers of one run. See Codes; flat: 1-D, replaced with the sum; it may be bfloat16 or float16 if the program adds
    elsewhere. feedback, step, seed: see Communicator.allreduce. Attribute memory: what the run uses beside them."""

    def __init__(self, codes: Codes, flat: torch.Tensor, feedback: Feedback | None, step: int, seed: int) -> None:
        self.wire_bytes = codes.wire_bytes
        self._plan = codes
        self._flat, self._feedback, self._step, self._seed = flat, feedback, step, seed
        self._codes, self._sum = self.memory = codes.memory()
        self._owner_start = codes.partition.shard.start
        self._has_sum = False
        self._encoded: set[int] = set()

    def encode_first(self) -> list[Instruction]:
        """Encode this rank's own numbers, before the program runs. Return the sends of their codes."""
        program = self._plan.program
        for instruction in program:
            if instruction.kind == Kind.ENCODE and instruction.number == 0:
                self.work(instruction)
                self._encoded.add(instruction.scratch)
        return [each for each in program if each.kind == Kind.SEND and each.scratch in self._encoded]

    def coding(self) -> Coding:
        """See base.CodedNumbers."""
        feedback, plan = self._feedback, self._plan
        return Coding(
            *plan.settings,
            self._flat.data_ptr(),
            self._sum.data_ptr(),
            self._codes.data_ptr(),
            0 if feedback is None else feedback.worker.data_ptr(),
            0 if feedback is None else feedback.owner.data_ptr(),
            self._owner_start,
            mixed(self._seed, self._step),
            *plan.members,
        )

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        return self._at(length, scratch)

    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        return self._at(length, scratch)

    def work(self, instruction: Instruction) -> None:
        """Encode, decode, or divide."""
        kind, _, offset, length, scratch, number, segment, block = instruction
        in_sum = self._has_sum if kind == Kind.ENCODE else number == 1
        there = self._flat[offset : offset + length]
        numbers = self._sum[:length] if in_sum else there
        self._has_sum = in_sum and kind == Kind.COMPLETE and self._plan.program.encodes_sums
        if kind == Kind.COMPLETE:
            if self._plan.divisor != 1:
                numbers.div_(self._plan.divisor)
            if in_sum and not self._has_sum:
                there.copy_(numbers)
        elif kind != Kind.ENCODE:
            self._plan.codec.decode(self._at(length, scratch), numbers, add=kind == Kind.ADD)
        elif scratch not in self._encoded:
            self._encode(numbers, self._at(length, scratch), offset, number, segment, block)

    def _encode(
        self, numbers: torch.Tensor, code: torch.Tensor, offset: int, number: int, segment: int, block: int
    ) -> None:
        residual = state = None
        partition, feedback = self._plan.partition, self._feedback
        if feedback is not None and number == 0:
            residual = feedback.worker[offset : offset + numbers.numel()]
            state = feedback.state[segment][block]
        elif feedback is not None:
            start = offset - self._owner_start
            residual = feedback.owner[start : start + numbers.numel()]
        # Ranks that hold the same sum must encode it to the same code, so they use the seed of the block's owner.
        rank = partition.rank if number == 0 else partition.group[block % len(partition.group)]
        seed = rounding_seed(self._step, rank, segment, block, number, self._seed)
        self._plan.codec.encode(numbers, code, residual=residual, seed=seed, state=state)

    def _at(self, length: int, scratch: int) -> torch.Tensor:
        return self._codes[scratch : scratch + self.wire_bytes(length)]

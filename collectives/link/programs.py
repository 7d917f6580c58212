"""Programs that run in one compiled call each, over TCP and through shared memory to the ranks of the same host."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch

from gradwire.collectives.kernels import cpu_arithmetic, cpu_programs
from gradwire.collectives.link.base import WholeRun
from gradwire.collectives.link.rows import Table
from gradwire.collectives.plan.program import Program


class Programs:
    """Runs programs. far: the connections to other hosts. near: the memory that this rank shares with ranks of its host, and
    these ranks; without it, all messages go over `far`."""

    def __init__(self, far: Table, near: Table | None = None, neighbours: tuple[int, ...] = ()) -> None:
        self._kernels = cpu_programs()
        self._far = far
        self._near = near
        self._links = [far] if near is None else [far, near]
        self._places = np.full(far.size, -1, dtype=np.int64)
        if near is not None:
            self._places[list(neighbours)] = [near.place(neighbour) for neighbour in neighbours]
        self._numbers = np.zeros(self._kernels.MESSAGES, dtype=np.int64)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun:
        """See Transport. Compiles the arithmetic of the dtype, or loads it from the disk."""
        kernels, near = self._kernels, self._near
        words = {
            kernels.FAR: self._far.context_address,
            kernels.NEAR: 0 if near is None else near.context_address,
            kernels.PLACES: self._places.ctypes.data,
            kernels.NUMBERS: self._numbers.ctypes.data,
            kernels.ITEMSIZE: dtype.itemsize,
            kernels.ARITHMETIC: cpu_arithmetic(dtype).address if program.scratch else 0,
            kernels.OP: kernels.OPS[op],
        }
        request = np.zeros(kernels.FIELDS, dtype=np.int64)
        request[list(words)] = list(words.values())
        scratch_bytes = program.scratch * dtype.itemsize

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            with ExitStack() as entered:
                for link in self._links:
                    entered.enter_context(link.entered())
                    link.tidy()
                if self._scratch.numel() < scratch_bytes:
                    self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
                buffers = (source.data_ptr(), destination.data_ptr(), self._scratch.data_ptr())
                for table in program.tables():
                    instructions, count = table.buffer_info()
                    arguments = (instructions, count // kernels.INSTRUCTION_FIELDS, tag, *buffers)
                    self._run(request, arguments, deadline)

        return run

    def _run(self, request: np.ndarray, arguments: tuple[int, ...], deadline: float) -> None:
        kernels = self._kernels
        lost: set[int] = set()
        while (status := kernels.follow(request.ctypes.data, *arguments)) != kernels.FINISHED:
            link = self._links[int(request[kernels.AT_NEAR])]
            if status == kernels.FULL:
                link.grow()
            else:
                lost = link.check(status, deadline, lost)

"""Programs that run in one compiled call each, over TCP and through shared memory to the ranks of the same host."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable

import numpy as np
import torch

from gradwire.collectives.kernels import cpu_arithmetic, cpu_programs
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.transports.base import CodedWork, CodesRun, Coding, WholeRun
from gradwire.collectives.transports.requests import Table


class Programs:
    """Runs programs. far: the connections to other hosts. near: the memory that this rank shares with the ranks `neighbours` of
    its host; without it, all messages go over `far`. Attribute links: these Transports."""

    def __init__(self, far: Table, near: Table | None = None, neighbours: tuple[int, ...] = ()) -> None:
        self._kernels = cpu_programs()
        self._far = far
        self._near = near
        self.links = [far] if near is None else [far, near]
        self._near_running = threading.Lock() if near is None else near.running
        self._places = np.full(far.size, -1, dtype=np.int64)
        if near is not None:
            self._places[list(neighbours)] = [near.place(neighbour) for neighbour in neighbours]
        self._numbers = np.zeros(self._kernels.MESSAGES, dtype=np.int64)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = 0 if near is None else near.context_address
        self._addresses = far.context_address, memory, self._places.ctypes.data, self._numbers.ctypes.data

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun:
        """See Transport. Compiles the arithmetic of the dtype, or loads it from the disk."""
        arithmetic = cpu_arithmetic(dtype).address if program.scratch else 0
        request = self._request(dtype.itemsize, arithmetic, self._kernels.OPS[op], 0)
        address = request.ctypes.data
        scratch_bytes = program.scratch * dtype.itemsize

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            if self._scratch.numel() < scratch_bytes:
                self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device="cpu")
            buffers = (source.data_ptr(), destination.data_ptr(), self._scratch.data_ptr())
            self._run(request, address, program.tables(), (tag, *buffers), deadline, dtype.itemsize)

        return run

    def follow_codes(self, program: CodedProgram, work: CodedWork) -> CodesRun | None:
        """See Transport."""
        if not work.compiles:
            return None
        words = np.zeros(self._kernels.CODING_FIELDS, dtype=np.int64)
        # Offsets in scratch memory and lengths of messages count bytes.
        request = self._request(1, 0, 0, words.ctypes.data)
        address, fields = request.ctypes.data, len(Coding._fields)
        kept = program.tables_for(work.wire_bytes)

        def run(tag: int, deadline: float) -> None:
            coding = work.coding()
            words[:fields] = coding
            tables = kept if isinstance(kept, list) else program.tables_for(work.wire_bytes)
            self._run(request, address, tables, (tag, 0, 0, coding.codes), deadline)

        return run

    def _request(self, *words: int) -> np.ndarray:
        """Return a request for kernels.follow. words: its fields from ITEMSIZE to CODING."""
        unset = (0,) * (self._kernels.REQUEST_FIELDS - len(self._addresses) - len(words))
        return np.array((*self._addresses, *words, *unset), dtype=np.int64)

    def _run(
        self,
        request: np.ndarray,
        address: int,
        tables: Iterable[array[int]],
        arguments: tuple[int, ...],
        deadline: float,
        itemsize: int = 1,
    ) -> None:
        """Run the tables of a program. address: of the request. arguments: the last ones of kernels.follow. itemsize: the
        bytes of an element of a message."""
        kernels, trace = self._kernels, self._far.trace
        traced: list[list[int]] = []
        ends: list[int] = []
        began_ns = time.perf_counter_ns()
        lost: set[int] = set()
        with self._far.running, self._near_running:
            for link in self.links:
                link.begin()
            request[kernels.NEXT] = request[kernels.TRACE] = 0
            for table in tables:
                instructions, words = table.buffer_info()
                count = words // kernels.INSTRUCTION_FIELDS
                if trace is not None:
                    times = np.zeros(count, dtype=np.int64)
                    request[kernels.TRACE] = times.ctypes.data
                while (status := kernels.follow(address, instructions, count, *arguments)) != kernels.FINISHED:
                    link = self.links[int(request[kernels.AT_NEAR])]
                    if status == kernels.FULL:
                        link.grow()
                    elif status == kernels.TOO_MANY:
                        raise RuntimeError(
                            f"more than {kernels.MESSAGES} messages of one operation are in flight: use an algorithm with fewer"
                        )
                    elif status == kernels.MALFORMED:
                        raise ValueError("a code holds indices that are too large: it was encoded from more numbers")
                    else:
                        lost = link.check(status, deadline, set() if request[kernels.HAS_MOVED] else lost)
                if trace is not None:
                    traced += np.frombuffer(table, dtype=np.int64).reshape(count, -1).tolist()
                    ends += times.tolist()
        if trace is not None:
            trace(traced, itemsize.__mul__, began_ns, ends)

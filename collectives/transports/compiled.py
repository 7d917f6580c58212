"""The compiled loop, which runs a Program in one call, over TCP and through shared memory to the ranks of the same host."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from gradwire.collectives.kernels import cpu_arithmetic, cpu_programs
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.transports.base import CodedNumbers, CodedWork, Coding, Operation, Run, Trace, Transport
from gradwire.collectives.transports.requests import Table


class CompiledLoop:
    """Prepares programs of CPU tensors. far: the connections to other hosts. near: the memory that this rank shares with the
    ranks `neighbours` of its host; without it, all messages go over `far`. Attribute links: these Transports."""

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

    def prepare(self, operation: Operation, transport: Transport) -> Run | None:
        """Return what runs an operation, see Transport.prepare; None if this loop cannot run it. transport: has the trace in
        which runs are recorded."""
        if operation.device_type != "cpu" or operation.program is None:
            return None
        if operation.codes is None:
            return self._numbers_run(operation.program, operation.dtype, operation.op, transport)
        assert isinstance(operation.program, CodedProgram)
        return self._codes_run(operation.program, operation.codes, transport) if operation.codes.compiles else None

    def _numbers_run(self, program: Program, dtype: torch.dtype, op: str, transport: Transport) -> Run:
        """Compile the arithmetic of the dtype, or load it from the disk. Either all ranks compile a program that reduces, or none
        does: the sign of a minimum of zeros and the bits of a NaN depend on the loop."""
        arithmetic = cpu_arithmetic(dtype).address if program.scratch else 0
        request = self._request(dtype.itemsize, arithmetic, self._kernels.OPS[op], 0)
        address = request.ctypes.data
        scratch_bytes = program.scratch * dtype.itemsize

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            if self._scratch.numel() < scratch_bytes:
                self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device="cpu")
            arguments = (tag, source.data_ptr(), destination.data_ptr(), self._scratch.data_ptr())
            if transport.trace is None:
                self._run(request, address, program.tables(), arguments, deadline)
            else:
                self._record(transport.trace, request, address, program.tables(), arguments, deadline, dtype.itemsize)

        return run

    def _codes_run(self, program: CodedProgram, codes: CodedWork, transport: Transport) -> Run:
        words = np.zeros(self._kernels.CODING_FIELDS, dtype=np.int64)
        # Offsets in scratch memory and lengths of messages count bytes.
        request = self._request(1, 0, 0, words.ctypes.data)
        address, fields = request.ctypes.data, len(Coding._fields)
        kept = program.tables_for(codes.wire_bytes)

        def run(numbers: CodedNumbers, _: CodedNumbers, tag: int, deadline: float) -> None:
            """Raises ValueError, too, if a code is invalid."""
            coding = numbers.coding()
            words[:fields] = coding
            tables = kept if isinstance(kept, list) else program.tables_for(codes.wire_bytes)
            arguments = (tag, 0, 0, coding.codes)
            if transport.trace is None:
                self._run(request, address, tables, arguments, deadline)
            else:
                self._record(transport.trace, request, address, tables, arguments, deadline, 1)

        return run

    def _request(self, *words: int) -> np.ndarray:
        """Return a request for kernels.execute_program. words: its fields from ITEMSIZE to CODING."""
        unset = (0,) * (self._kernels.REQUEST_FIELDS - len(self._addresses) - len(words))
        return np.array((*self._addresses, *words, *unset), dtype=np.int64)

    def _record(
        self,
        trace: Trace,
        request: np.ndarray,
        address: int,
        tables: Iterable[array[int]],
        arguments: tuple[int, ...],
        deadline: float,
        itemsize: int,
    ) -> None:
        """Run the tables of a program as _run() does, and record the times of its instructions. itemsize: the bytes of an element
        of a message."""
        traced: list[list[int]] = []
        ends: list[int] = []

        def recorded() -> Iterator[array[int]]:
            for table in tables:
                rows = np.frombuffer(table, dtype=np.int64).reshape(-1, self._kernels.INSTRUCTION_FIELDS)
                times = np.zeros(len(rows), dtype=np.int64)
                request[self._kernels.TRACE] = times.ctypes.data
                yield table
                traced.extend(rows.tolist())
                ends.extend(times.tolist())

        began_ns = time.perf_counter_ns()
        try:
            self._run(request, address, recorded(), arguments, deadline)
        finally:
            request[self._kernels.TRACE] = 0
        trace(traced, itemsize.__mul__, began_ns, ends)

    def _run(
        self,
        request: np.ndarray,
        address: int,
        tables: Iterable[array[int]],
        arguments: tuple[int, ...],
        deadline: float,
    ) -> None:
        """Run the tables of a program. Messages are in flight from one table to the next, so all tables need the same call of
        link.begin(), which may give messages new numbers. address: of the request. arguments: the last ones of the kernel."""
        kernels = self._kernels
        lost: set[int] = set()
        with self._far.running, self._near_running:
            for link in self.links:
                link.begin()
            request[kernels.NEXT] = 0
            for table in tables:
                instructions, words = table.buffer_info()
                count = words // kernels.INSTRUCTION_FIELDS
                while (status := kernels.execute_program(address, instructions, count, *arguments)) != kernels.FINISHED:
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

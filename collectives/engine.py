"""What stands behind the verbs: operations in order, their schedules, deadlines and failures."""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from collectives.algorithms import PLANNERS
from collectives.diagnostics.postmortem import Board, Report, verdict
from collectives.errors import CollectiveError, CollectiveTimeout, LinkError, Mismatch
from collectives.execute import Program, Scratch, execute, lay_out
from collectives.native import Call
from collectives.reduction import COMBINE
from collectives.schedule import Place, Schedule
from collectives.selection import SHARED, Table, choose, tables_in_force
from collectives.shared import SharedMemory
from collectives.spans import Layout, consecutive, segments_of_blocks, segments_of_buffer
from collectives.topology import Topology
from collectives.transport.process_group import ProcessGroupTransport
from collectives.transport.routing import RoutingTransport
from collectives.work import Work, WorkQueue

__all__ = ["NATIVE", "SHARED", "Engine", "Turn"]

NATIVE = "native"
_CACHED_PROGRAMS = 256
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One operation's turn: its number, what was called (the same on all ranks), its deadline (time.monotonic())."""

    sequence: int
    call: str
    deadline: float

    @property
    def tag(self) -> int:
        """Marks this operation's messages. Ranks that call different things use different tags, so their messages never
        meet: nobody takes a message of another shape for his own. Segment i of a buffer adds i, within 31 bits."""
        return zlib.crc32(f"{self.sequence} {self.call}".encode()) % 2**30


class Engine:
    """Runs the operations of one Communicator. timeout_s and segment_bytes as there."""

    def __init__(
        self,
        transport: ProcessGroupTransport | RoutingTransport,
        store: Store,
        topology: Topology,
        shared: SharedMemory | None,
        *,
        timeout_s: float,
        segment_bytes: int,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.topology = topology
        self._timeout_s = timeout_s
        self._segment_bytes = segment_bytes
        self._transport = transport
        self._shared = shared
        self._board = Board(store, self.rank, self.size)
        self.tables: dict[str, Table] = tables_in_force(
            {collective: self.algorithms(collective) for collective in PLANNERS}, topology, os.environ
        )
        self._queue = WorkQueue("gradwire")
        self._sequence = 0
        self._scratch = Scratch()
        self._schedules: dict[tuple[str, str, int], Schedule] = {}
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._calls: dict[tuple[torch.dtype, int, Hashable], tuple[str, str]] = {}
        self._agreed: set[str] = set()
        self._failure: CollectiveError | None = None
        self._closed = False

    def algorithms(self, collective: str) -> tuple[str, ...]:
        shared = (SHARED,) if self._shared is not None and collective in ("allreduce", "barrier") else ()
        return (*PLANNERS[collective], *shared, NATIVE)

    def choose(self, collective: str, algorithm: str, nbytes: int) -> str:
        """Resolve 'auto'. Raises ValueError for a name that the collective does not have."""
        if algorithm == "auto":
            return choose(self.tables[collective], nbytes)
        if algorithm not in self.algorithms(collective):
            allowed = ", ".join(("auto", *self.algorithms(collective)))
            raise ValueError(f"rank {self.rank}: {collective} has no algorithm {algorithm!r}; allowed are {allowed}")
        return algorithm

    def schedule(self, collective: str, algorithm: str, root: int = 0) -> Schedule:
        """This rank's schedule, planned once."""
        key = (collective, algorithm, root)
        if key not in self._schedules:
            place = Place(self.rank, self.size, root, self.topology.hosts)
            self._schedules[key] = PLANNERS[collective][algorithm](place)
        return self._schedules[key]

    # Operations

    def submit(self, call: str, body: Callable[[Turn], None], *, async_op: bool) -> Work | None:
        """Run `body` when its turn comes; with async_op return its handle at once. Turns are numbered in order of issue."""
        if self._failure is not None:
            raise CollectiveError(
                f"the Communicator is broken since an earlier failure ({self._failure}); make a new one",
                rank=self.rank,
                operation=call,
            ) from self._failure
        if self._closed:
            raise CollectiveError("the Communicator is closed", rank=self.rank, operation=call)
        sequence = self._sequence
        self._sequence += 1
        if not async_op and self._queue.enter():
            try:
                self._take_turn(sequence, call, body)
            finally:
                self._queue.leave()
            return None
        work = Work(self.rank, call, lambda: self._take_turn(sequence, call, body))
        self._queue.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def remember(self, tensor: torch.Tensor, key: Hashable, call: str, op: str) -> None:
        """Let repeat() take the next calls with a tensor of this dtype and length. key: all else that a caller gives."""
        if tensor.dtype is not torch.bool:
            if len(self._calls) == _CACHED_PROGRAMS:
                self._calls.clear()
            self._calls[tensor.dtype, tensor.numel(), key] = (call, op)

    def repeat(self, tensor: torch.Tensor, key: Hashable) -> bool:
        """Allreduce in shared memory without the preparations, where an equal call has been remembered, and nothing stands
        in the way; False, with nothing done, where not. What it saves is most of the time of a small message."""
        if type(tensor) is not torch.Tensor or not self._calls:
            return False
        known = self._calls.get((tensor.dtype, tensor.numel(), key))
        if known is None or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        if self._failure is not None or self._closed or not self._queue.enter():
            return False
        call, op = known
        sequence = self._sequence
        self._sequence += 1
        try:
            self._take_turn(sequence, call, lambda turn: self.in_shared_memory(turn, tensor, op))
        finally:
            self._queue.leave()
        return True

    def _take_turn(self, sequence: int, call: str, body: Callable[[Turn], None]) -> None:
        if self._failure is not None:
            raise CollectiveError(
                f"not run, the Communicator broke before ({self._failure})", rank=self.rank, operation=call
            ) from self._failure
        turn = Turn(sequence, call, time.monotonic() + self._timeout_s)
        try:
            body(turn)
        except LinkError as error:
            self._failure = self._explain(error, turn)
            raise self._failure from error
        except Mismatch:
            raise  # found before anything was sent, by all ranks alike
        except BaseException as error:
            self._failure = CollectiveError(f"interrupted by {error!r}", rank=self.rank, operation=call)
            self._transport.abort()
            raise

    def _explain(self, error: LinkError, turn: Turn) -> CollectiveError:
        report = Report.of(error, turn.sequence, turn.call, self._transport.lost_peers())
        reports = self._board.exchange(report, after_writing=self._transport.abort)
        return verdict(reports, self.rank, self._timeout_s, str(error))

    # What bodies are made of

    def over_buffer(
        self, turn: Turn, collective: str, algorithm: str, buffer: torch.Tensor, op: str = "sum", root: int = 0
    ) -> None:
        """Run a schedule in place on a buffer that the algorithm may cut as it likes."""
        schedule = self.schedule(collective, algorithm, root)
        segment = max(1, self._segment_bytes // buffer.element_size())
        program = self._program(
            (collective, algorithm, root, buffer.numel(), segment),
            lambda: lay_out(schedule, segments_of_buffer(buffer.numel(), schedule.blocks, segment)),
        )
        self._execute(turn, program, buffer, buffer, op)

    def over_blocks(
        self, turn: Turn, collective: str, algorithm: str, buffer: torch.Tensor, layout: Layout, op: str = "sum"
    ) -> None:
        """Run a schedule in place on a buffer of which block r, at layout[r], belongs to rank r."""
        schedule = self.schedule(collective, algorithm)
        segment = max(1, self._segment_bytes // buffer.element_size())
        program = self._program(
            (collective, algorithm, layout, segment), lambda: lay_out(schedule, segments_of_blocks(layout, segment))
        )
        self._execute(turn, program, buffer, buffer, op)

    def between(
        self,
        turn: Turn,
        collective: str,
        algorithm: str,
        source: torch.Tensor,
        source_layout: Layout,
        destination: torch.Tensor,
        layout: Layout,
        root: int = 0,
    ) -> None:
        """Run a schedule that moves blocks of one buffer into another, reducing nothing."""
        program = lay_out(self.schedule(collective, algorithm, root), [layout], [source_layout])
        self._execute(turn, program, source, destination, "sum")

    def table(self, turn: Turn, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, equally long on all ranks."""
        everything = torch.zeros(self.size, len(row), dtype=torch.int64)
        everything[self.rank] = torch.tensor(row, dtype=torch.int64)
        layout = consecutive([len(row)] * self.size)
        self.over_blocks(turn, "allgather", "rsag", everything.view(-1), layout)
        rows: list[list[int]] = everything.tolist()
        return rows

    def native(self, turn: Turn, call: Call, *, is_cuda: bool) -> None:
        """Run one of the backend's own collectives. It does not survive ranks that disagree, so a call that is new to this
        rank is first agreed upon by a barrier under the turn's tag."""
        if turn.call not in self._agreed and not is_cuda:
            self.over_buffer(turn, "barrier", "recursive_doubling", torch.zeros(1, dtype=torch.uint8), "max")
            self._agreed.add(turn.call)
        self._transport.native(call, "cuda" if is_cuda else "cpu", turn.deadline)

    def prepare(self, dtypes: Iterable[torch.dtype]) -> None:
        """See to it that the kernels for these dtypes are compiled, before anyone's clock runs."""
        assert self._shared is not None
        if self._failure is not None or self._closed:
            return  # submit() tells
        for dtype in dtypes:
            self._shared.prepare(torch.uint8 if dtype is torch.bool else dtype)

    def in_shared_memory(self, turn: Turn, flat: torch.Tensor, op: str) -> None:
        """Reduce a contiguous tensor in place; an average is divided too."""
        assert self._shared is not None
        self._shared.allreduce(flat, op, turn.tag, turn.deadline)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In shared memory where there is any."""
        made = self._shared.empty(shape, dtype) if self._shared is not None else None
        return torch.empty(shape, dtype=dtype) if made is None else made

    def _program(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = make()
            if len(self._programs) > _CACHED_PROGRAMS:
                self._programs.popitem(last=False)
        return program

    def _execute(self, turn: Turn, program: Program, source: torch.Tensor, destination: torch.Tensor, op: str) -> None:
        execute(
            program,
            source,
            destination,
            COMBINE[op],
            self._transport,
            tag=turn.tag,
            deadline=turn.deadline,
            scratch=self._scratch,
        )

    # The end

    def close(self) -> None:
        """Finish what is queued, meet the other ranks, give the group back; a few seconds at most, whatever happened.

        Meeting keeps a fast rank from closing connections on which a slow one still receives. A rank that does not come
        within the few seconds, or a failure, ends the connections instead.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _CLOSE_S
        drained = self._failure is None and self._queue.close(_CLOSE_S)
        if drained and self._failure is None:
            turn = Turn(self._sequence, "close", deadline)
            self._transport.leave()
            try:
                self.over_buffer(turn, "barrier", "recursive_doubling", torch.zeros(1, dtype=torch.uint8), "max")
            except LinkError as error:
                self._failure = CollectiveTimeout(_CLOSE_S, (), rank=self.rank, operation=f"close ({error})")
        else:
            self._failure = self._failure or CollectiveError("closed while running", rank=self.rank, operation="close")
            self._transport.abort()
            self._queue.close(_CLOSE_S)
        if self._shared is not None:
            self._shared.close()
        self._transport.close()

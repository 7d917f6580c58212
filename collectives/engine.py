"""What stands behind the verbs: operations in order, their buffers, schedules, deadlines and failures."""

from __future__ import annotations

import atexit
import math
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from collectives.algorithms import PLANNERS
from collectives.diagnostics.postmortem import Board, Report, verdict
from collectives.errors import CollectiveError, CollectiveTimeout, LinkError, Mismatch
from collectives.execute import Program, Scratch, execute, lay_out
from collectives.native import Call
from collectives.reduction import COMBINE, carried
from collectives.schedule import Place, Schedule
from collectives.selection import SHARED, Table, choose
from collectives.shared import SharedMemory
from collectives.spans import Layout, consecutive, segments_of_blocks, segments_of_buffer
from collectives.staging import Buffer
from collectives.topology import Topology
from collectives.transport.process_group import ProcessGroupTransport
from collectives.transport.routing import RoutingTransport
from collectives.work import Work, WorkQueue

NATIVE = "native"

#: The collectives that need no messages where all ranks share memory.
_IN_SHARED_MEMORY = ("allreduce", "barrier")

_CACHED_PROGRAMS = 256

#: How long close() waits for what is queued, and then for the other ranks.
_DRAIN_S = 5.0
_MEET_S = 2.0


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


def legal_algorithms(*, shared: bool) -> dict[str, tuple[str, ...]]:
    """The names that `algorithm=` takes for each collective, besides 'auto'. shared: where all ranks share memory."""
    return {
        collective: (*planners, *([SHARED] if shared and collective in _IN_SHARED_MEMORY else []), NATIVE)
        for collective, planners in PLANNERS.items()
    }


class Engine:
    """Runs the operations of one Communicator. timeout_s and segment_bytes as there.

    Attributes: rank, size, topology; device_types, the kinds of device whose tensors the group carries; control_device, the
    one where what the framework itself sends (tokens, tables, pickled objects) lies; tables, what 'auto' runs.
    """

    def __init__(
        self,
        transport: ProcessGroupTransport | RoutingTransport,
        store: Store,
        topology: Topology,
        shared: SharedMemory | None,
        *,
        algorithms: Mapping[str, tuple[str, ...]],
        tables: dict[str, Table],
        timeout_s: float,
        segment_bytes: int,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.topology = topology
        self.device_types = ("cpu", "cuda") if "cpu" in transport.backends else ("cuda",)
        self.control_device = self.device_types[0]
        self._via_host = "cuda" not in transport.backends
        self._timeout_s = timeout_s
        self._segment_bytes = segment_bytes
        self._transport = transport
        self._shared = shared
        self._algorithms = algorithms
        self._board = Board(store, self.rank, self.size)
        self.tables = tables
        self._queue = WorkQueue("gradwire")
        self._sequence = 0
        self._scratch = Scratch()
        self._schedules: dict[tuple[str, str, int], Schedule] = {}
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._calls: dict[tuple[torch.dtype, torch.Size, Hashable], tuple[str, str]] = {}
        self._failure: CollectiveError | None = None
        self._closed = False
        self._leaving = False
        self._at_exit = partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """The names that a collective has. Raises ValueError for an unknown collective."""
        if collective not in self._algorithms:
            raise ValueError(f"no collective is called {collective!r}; known are {', '.join(self._algorithms)}")
        return self._algorithms[collective]

    def choose(self, collective: str, algorithm: str, nbytes: int) -> str:
        """Resolve 'auto'. Raises ValueError for an unknown collective or a name that it does not have."""
        names = self.algorithms(collective)
        if algorithm == "auto":
            return choose(self.tables[collective], nbytes)
        if algorithm not in names:
            allowed = ", ".join(("auto", *names))
            raise ValueError(f"rank {self.rank}: {collective} has no algorithm {algorithm!r}; allowed are {allowed}")
        return algorithm

    def choose_for_parts(self, collective: str, algorithm: str, lengths: Sequence[int], element_size: int) -> str:
        """choose, for a message made of a part per rank. The backend's own needs equal parts; 'auto' then takes rsag instead."""
        chosen = self.choose(collective, algorithm, sum(lengths) * element_size)
        if chosen == NATIVE and len(set(lengths)) > 1:
            if algorithm != "auto":
                raise ValueError(
                    f"rank {self.rank}: {collective} of unequal parts {list(lengths)} has no algorithm 'native'"
                )
            return "rsag"
        return chosen

    def wire_bytes(self, collective: str, nbytes: int, algorithm: str) -> int | None:
        """As Communicator.wire_bytes."""
        name = self.choose(collective, algorithm, nbytes)
        if name in (NATIVE, SHARED):
            return None
        plans = [PLANNERS[collective][name](Place(r, self.size, 0, self.topology.hosts)) for r in range(self.size)]
        return max(math.ceil(nbytes * plan.sent_blocks() / plan.blocks) for plan in plans)

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
        """Let repeat() take the next calls with a tensor of this dtype and shape. key: all else that a caller gives."""
        if tensor.dtype is not torch.bool:
            if len(self._calls) == _CACHED_PROGRAMS:
                self._calls.clear()
            self._calls[tensor.dtype, tensor.shape, key] = (call, op)

    def repeat(self, tensor: torch.Tensor, key: Hashable) -> bool:
        """Allreduce in shared memory without the preparations, where an equal call has been remembered, and nothing stands
        in the way; False, with nothing done, where not. What it saves is most of the time of a small message."""
        if not self._calls or type(tensor) is not torch.Tensor:
            return False
        known = self._calls.get((tensor.dtype, tensor.shape, key))
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
            raise self._failure from None
        except Mismatch:
            raise  # found before any of the data was sent, by all ranks alike
        except BaseException as error:
            self._failure = CollectiveError(f"interrupted by {error!r}", rank=self.rank, operation=call)
            self._transport.abort()
            raise

    def _explain(self, error: LinkError, turn: Turn) -> CollectiveError:
        if self._leaving:
            return CollectiveError("this process is exiting", rank=self.rank, operation=turn.call)
        peers = set(range(self.size)) - {self.rank}
        report = Report.of(error, turn.sequence, turn.call, peers, self._transport.lost_peers())
        reports = self._board.exchange(report, after_writing=self._transport.abort)
        return verdict(reports, self.rank, self._timeout_s, str(error))

    # What bodies are made of

    def buffer(self, *tensors: torch.Tensor, fill: bool = True) -> Buffer:
        """The tensors, of one dtype and device, as one buffer that the transport reaches."""
        return Buffer(tensors, via_host=tensors[0].is_cuda and self._via_host, fill=fill)

    def over_buffer(
        self, turn: Turn, collective: str, algorithm: str, buffer: torch.Tensor, op: str = "sum", root: int = 0
    ) -> None:
        """Run a schedule in place on a buffer that the algorithm may cut as it likes."""
        buffer, op = carried(buffer, op)
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
        buffer, op = carried(buffer, op)
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

    def meet(self, turn: Turn, algorithm: str = "recursive_doubling") -> None:
        """Return when every rank has come here."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.control_device)
        self.over_buffer(turn, "barrier", algorithm, token, "max")

    def table(self, turn: Turn, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, equally long on all ranks."""
        everything = torch.zeros(self.size, len(row), dtype=torch.int64, device=self.control_device)
        everything[self.rank] = torch.tensor(row, dtype=torch.int64)
        layout = consecutive([len(row)] * self.size)
        self.over_blocks(turn, "allgather", "rsag", everything.view(-1), layout)
        rows: list[list[int]] = everything.tolist()
        return rows

    def native(self, turn: Turn, call: Call, *, is_cuda: bool) -> None:
        """Run one of the backend's own collectives. gloo's do not survive ranks that disagree (a longer message than
        expected ends the process), so ranks first meet under the turn's tag."""
        if not is_cuda:
            self.meet(turn)
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
        moved, op = carried(flat, op)
        self._shared.allreduce(moved, op, turn.tag, turn.deadline)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In shared memory where there is any."""
        made = self._shared.empty(shape, dtype) if self._shared is not None else None
        return torch.empty(shape, dtype=dtype) if made is None else made

    def _program(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        if key not in self._programs:
            self._programs[key] = make()
            if len(self._programs) > _CACHED_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

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
        atexit.unregister(self._at_exit)
        drained = self._failure is None and self._queue.close(_DRAIN_S)
        if drained and self._failure is None:
            turn = Turn(self._sequence, "close", time.monotonic() + _MEET_S)
            self._transport.leave()
            try:
                self.meet(turn)
            except LinkError as error:
                self._failure = CollectiveTimeout(_MEET_S, (), rank=self.rank, operation=f"close ({error})")
        else:
            self._failure = self._failure or CollectiveError("closed while running", rank=self.rank, operation="close")
            self._transport.abort()
            self._queue.close(_DRAIN_S)
        if self._shared is not None:
            self._shared.close()
        self._transport.close()

    def _leave(self) -> None:
        """The interpreter exits with the Communicator open: let go of what runs, without a report, as a dead process would.

        A thread that is still inside the backend when the interpreter is gone would end the process with an abort.
        """
        self._leaving = True
        if self._queue.busy():
            self._transport.abort()
            self._queue.close(_DRAIN_S)


def _leave(engine: weakref.ref[Engine]) -> None:
    """What atexit calls; it must not keep an engine alive that nobody uses any more."""
    alive = engine()
    if alive is not None:
        alive._leave()

"""The engine that runs the verbs: it moves the buffers of their operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import Partition, effective
from gradwire.collectives.compression.rehearsal import rehearse
from gradwire.collectives.control.watch import Watch
from gradwire.collectives.diagnostics.timeline import Lane
from gradwire.collectives.engine.buffers import Buffer, kept, plain
from gradwire.collectives.engine.closing import ClosableOperations
from gradwire.collectives.engine.executor import Codes, Numbers, Payload, Scratch, execute
from gradwire.collectives.engine.operations import Turn, digest
from gradwire.collectives.engine.plans import Plans
from gradwire.collectives.engine.point_to_point import Messages
from gradwire.collectives.engine.traced import not_now, recorded
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import COMBINE, carried, finish
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.spans import Layout, consecutive
from gradwire.collectives.transports.base import CodesRun, Request, Transport, Whole

_REMEMBERED_CALLS = 256

_NOT_RECORDED = nullcontext()

#: The verbs that are half of another verb, and have its algorithms.
_WHOLE_OF = {"reduce_shares": "allreduce", "gather_shares": "allreduce"}

#: The verbs that need no arithmetic.
_MOVES = frozenset({"allgather", "broadcast", "gather", "scatter", "alltoall", "gather_shares"})


class PlannedCodes(NamedTuple):
    """A planned exchange of codes. payload: None for a rank without a part of the buffer. run: runs the payload in one call of
    the link, if it can."""

    algorithm: str
    partition: Partition
    payload: Codes | None
    run: CodesRun | None


class Engine:
    """Moves the buffers of one Communicator. timeout_s, stall_warning_s: see Communicator.

    Attributes: rank, size; plans, the programs that it runs; operations, which runs them in turn; messages, between two ranks;
    shares_memory, routes and empty, see Transport; device_types, of the tensors that the engine can move;
    control_device, of the framework's own data (tokens, tables, pickled objects); watch, which exchanges news between ranks
    beside operations; lane, in which operations are recorded, or None.
    """

    def __init__(
        self, transport: Transport, watch: Watch, plans: Plans, timeout_s: float, stall_warning_s: float | None
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.plans = plans
        self.shares_memory = transport.shares_memory
        self.routes = transport.routes
        self.empty = transport.empty
        self.device_types = ("cpu", "cuda") if "cpu" in transport.device_types else ("cuda",)
        self.control_device = self.device_types[0]
        self._posts_together = transport.posts_together
        self._via_host = "cuda" not in transport.device_types
        self.operations = ClosableOperations(transport, watch, timeout_s, stall_warning_s)
        self.messages = Messages(transport, self.operations)
        self.watch = watch
        self.run_now: Callable[..., bool] = self.operations.run_now
        self.lane: Lane | None = None
        self._transport = transport
        self._scratch = Scratch()
        self._summed = Scratch()  # in use together with _scratch: codes that are added undecoded, or sums of codes
        self._ready: set[tuple[Codec, str, bool]] = set()
        self._reducible: set[torch.dtype] = set()
        self._calls: dict[tuple[torch.dtype, torch.Size, Hashable], Any] = {}

    def submit(
        self,
        call: str,
        body: Callable[[Turn], None],
        *,
        async_op: bool,
        signature: str | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Call Operations.submit outside of inference mode, so that tensors that a body keeps can be used in any mode."""
        if self.lane is not None:
            body = recorded(self.lane, call, body)
        submit = self.operations.submit
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return submit(call, body, async_op=async_op, signature=signature, timeout_s=timeout_s)
        return submit(call, body, async_op=async_op, signature=signature, timeout_s=timeout_s)

    def record(self, lane: Lane | None, *, with_parts: bool) -> None:
        """Record later operations in a lane, and with_parts also the parts of programs; None stops the recording. While
        recording, run_now always returns False, since it records nothing."""
        self.lane = lane
        self.run_now = self.operations.run_now if lane is None else not_now
        self._transport.record(lane.program if lane is not None and with_parts else None)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Return a context manager that records a part of an operation, if operations are recorded."""
        return _NOT_RECORDED if self.lane is None else self.lane.during(name, **details)

    def _note(self, algorithm: str, nbytes: int, like: torch.Tensor) -> None:
        """Record the algorithm, bytes and device of the running operation. like: a tensor of the operation."""
        if self.lane is not None:
            self.lane.note(algorithm, nbytes, "cpu" if self._via_host else like.device.type)

    def note_codec(self, codec: Codec, nbytes: int) -> None:
        """Record the codec of the running operation, and the bytes of its message before encoding."""
        if self.lane is not None:
            self.lane.note_codec(codec.name, nbytes)

    def whole(
        self,
        verb: str,
        algorithm: str,
        like: torch.Tensor,
        numel: int,
        op: str = "sum",
        root: int = 0,
        *,
        lengths: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Whole | None:
        """Let the link prepare a verb that it runs by itself or in one call, before any deadline starts. Return None for a verb
        that the executor runs.

        like: a tensor of the call's dtype and device. numel: elements of the source. lengths: elements to and from each rank,
        as in Request.
        """
        like, op = carried(like, op)
        device_type = "cpu" if self._via_host else like.device.type
        if algorithm not in PLANNERS[_WHOLE_OF.get(verb, verb)]:
            outgoing, incoming = map(tuple, lengths)
            request = Request(verb, algorithm, like.dtype, device_type, numel, op, root, outgoing, incoming)
            whole = self._transport.collective(request)._replace(algorithm=algorithm)
            if whole.needs_meeting:
                self.prepare_to_reduce(torch.uint8)
            return whole
        if device_type != "cpu":
            return None
        if verb != "allreduce":
            if verb not in _MOVES:
                self.prepare_to_reduce(like.dtype)
            return None
        program = self.plans.of_buffer(verb, algorithm, root, numel, like.element_size(), grouped=False)
        follow = self._transport.follow(program, like.dtype, "sum" if op == "average" else op)
        if follow is None:
            return None
        size = self.size

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            follow(source, destination, tag, deadline)
            if op == "average":
                finish(plain(destination), op, size)

        return Whole(run, needs_meeting=False, algorithm=algorithm)

    def place(self, tensor: torch.Tensor) -> str:
        """Return ' on cuda', which belongs to the text of a call, for a tensor that the transport moves between GPUs; else ''."""
        return "" if self._via_host or tensor.is_cpu else " on cuda"

    def receives_from_any(self, tensor: torch.Tensor) -> bool:
        """Return whether a receive into such a tensor may name no sender."""
        return self._transport.receives_from_any and (tensor.is_cpu or self._via_host)

    def knows_tags(self, tensor: torch.Tensor) -> bool:
        """Return whether the transport matches messages of such a tensor by their tags."""
        return self._via_host or not self._grouped(tensor)

    def takes_as_is(self, tensor: torch.Tensor, whole: Whole) -> bool:
        """Return whether whole.run may be called with a tensor directly, without a barrier or a copy."""
        return tensor.is_cpu and not whole.needs_meeting and tensor.dtype is not torch.bool and _is_plain(tensor)

    def remember(self, tensor: torch.Tensor, key: Hashable, planned: object) -> None:
        """Let remembered() return what is planned for later calls with a CPU tensor of this dtype and shape. key: the other
        arguments."""
        if tensor.is_cpu and self.operations.usable:
            if len(self._calls) == _REMEMBERED_CALLS:
                self._calls.clear()
            self._calls[tensor.dtype, tensor.shape, key] = planned

    def remember_whole(self, tensor: torch.Tensor, key: Hashable, call: str, whole: Whole) -> None:
        """Let repeat() and repeat_later() run later calls of a verb that the link has prepared."""
        if not whole.needs_meeting and tensor.dtype is not torch.bool:
            self.remember(tensor, key, (call, digest(call), whole.run))

    def repeat(self, tensor: torch.Tensor, key: Hashable) -> bool:
        """Run a remembered allreduce of the link without the preparations, which take most of the time of a small message.
        Return False, with nothing done, if no equal call is remembered or Operations.run_now returns False."""
        if (known := self.remembered(tensor, key)) is None:
            return False
        call, call_digest, run = known
        return self.run_now(call, call_digest, run, tensor, tensor)

    def repeat_later(self, tensor: torch.Tensor, key: Hashable) -> Work | None:
        """Queue a remembered allreduce, as repeat() runs it. Return None, with nothing done, if no equal call is remembered, or
        while operations are recorded."""
        if self.lane is not None or (known := self.remembered(tensor, key)) is None:
            return None
        call, _, run = known
        own = kept(tensor)
        return self.submit(call, lambda turn: run(own, own, turn.tag, turn.deadline), async_op=True)

    def remembered(self, tensor: torch.Tensor, key: Hashable) -> Any:
        """Return what remember() was given for such a call; None if nothing, or if the tensor needs a copy."""
        if not self._calls or type(tensor) is not torch.Tensor:
            return None
        try:
            known = self._calls.get((tensor.dtype, tensor.shape, key))
            return known if known is not None and tensor.is_cpu and _is_plain(tensor) else None
        except RuntimeError:  # nested or sparse: no shape or address; see staging.refusal
            return None

    # The parts of an operation's body

    def buffer(self, *tensors: torch.Tensor, fill: bool = True) -> Buffer:
        """Return the tensors, of one dtype and device, as one buffer that the transport can use."""
        return Buffer(tensors, via_host=tensors[0].is_cuda and self._via_host, fill=fill)

    def over_buffer(
        self,
        turn: Turn,
        collective: str,
        algorithm: str,
        buffer: torch.Tensor,
        op: str = "sum",
        root: int = 0,
        *,
        layout: Layout | None = None,
        whole: Whole | None = None,
        is_own: bool = False,
    ) -> None:
        """Run a schedule, or `whole`, in place on a buffer. layout: the places of the blocks, of which block r belongs to rank
        r; None if the algorithm may divide the buffer freely. is_own: whether the buffer is the framework's own, which a
        timeline does not record."""
        if whole is not None:
            self.run_whole(turn, whole, buffer, buffer)
            return
        if not is_own:
            self._note(algorithm, buffer.nbytes, buffer)
        buffer, op = carried(buffer, op)
        where = buffer.numel() if layout is None else layout
        grouped = self._grouped(buffer)
        program = self.plans.of_buffer(collective, algorithm, root, where, buffer.element_size(), grouped=grouped)
        self.over_program(turn, program, buffer, buffer, op)

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
        """Run a schedule that moves blocks of one buffer into another, without a reduction."""
        self._note(algorithm, max(source.nbytes, destination.nbytes), destination)
        kind = collective, algorithm, root
        program = self.plans.of_move(*kind, source_layout, layout, grouped=self._grouped(destination))
        self.over_program(turn, program, source, destination)

    def plan_codes(
        self, codec: Codec, present: Codec, numel: int, algorithm: str, device: torch.device, divisor: int
    ) -> PlannedCodes:
        """Plan an exchange of codes for over_codes(), which may run it any number of times. If the algorithm has rounds inside
        hosts and ranks share hosts, only messages between hosts are coded. present: the codec in its form for the step. divisor:
        of the sum."""
        partition = self.plans.partition(codec, numel, algorithm, device.type)
        if not partition.group:
            return PlannedCodes(algorithm, partition, None, None)
        used = effective(present, partition)
        code_bytes, grouped = used.wire_bytes(partition.longest), device.type in self._posts_together
        program = self.plans.of_codes(codec, numel, algorithm, code_bytes, device.type, grouped=grouped)
        memory = self._scratch, self._summed
        payload = Codes(program, used, partition, device, *memory, divisor=divisor, via_host=self._via_host)
        return PlannedCodes(algorithm, partition, payload, self._transport.follow_codes(program, payload))

    def over_codes(
        self, turn: Turn, planned: PlannedCodes, flat: torch.Tensor, feedback: Feedback | None, step: int, seed: int
    ) -> None:
        """Sum a float32 buffer in place by exchanging codes."""
        algorithm, partition, payload, run = planned
        if self.lane is not None:
            self._note(algorithm, flat.nbytes, flat)
        if partition.inside_hosts:
            self._inside(turn, flat, partition.parts, 0)
        if payload is not None:
            payload.begin(flat, feedback, step, seed)
            try:
                if run is None:
                    self._step_through(turn, payload.program, payload)
                else:
                    run(turn.tag, turn.deadline)
            finally:
                payload.end()
        if partition.inside_hosts:
            self._inside(turn, flat, partition.parts, 1)

    def wire(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for codes that are added undecoded; valid until the next call."""
        return self._summed.take(nbytes, device)

    def _inside(self, turn: Turn, flat: torch.Tensor, parts: Layout, which: int) -> None:
        """Run the first (0) or last (1) round of the hierarchical algorithm, inside the hosts. parts: its blocks."""
        buffer = self.buffer(flat)
        program = self.plans.inside_hosts(which, parts, flat.element_size(), grouped=self._grouped(buffer.flat))
        self.over_program(turn, program, buffer.flat, buffer.flat)
        buffer.store()

    def meet(self, turn: Turn, algorithm: str = "recursive_doubling") -> None:
        """Wait until every rank has called this: a barrier."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.control_device)
        self.over_buffer(turn, "barrier", algorithm, token, "max", is_own=True)

    def table(self, turn: Turn, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row of integers, by rank. Rows have the same length on all ranks."""
        everything = torch.zeros(self.size, len(row), dtype=torch.int64, device=self.control_device)
        everything[self.rank] = torch.tensor(row, dtype=torch.int64, device="cpu")
        layout = consecutive([len(row)] * self.size)
        self.over_buffer(turn, "allgather", "rsag", everything.view(-1), layout=layout, is_own=True)
        rows: list[list[int]] = everything.tolist()
        return rows

    def choose_by(self, chooser: Callable[[str, int], str], place: Place) -> None:
        """See Plans.choose_by(). The choice also concerns calls that repeat() remembers."""
        self.plans.choose_by(chooser, place)
        self._calls.clear()

    def run_whole(self, turn: Turn, whole: Whole, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Run a verb that the link has prepared."""
        if whole.needs_meeting:
            with self.span("meet"):
                self.meet(turn)
        self._note(whole.algorithm, max(source.nbytes, destination.nbytes), destination)
        with self.span("exchange"):
            whole.run(carried(source, "sum")[0], carried(destination, "sum")[0], turn.tag, turn.deadline)

    def prepare_to_reduce(self, dtype: torch.dtype) -> None:
        """Let the link compile the reduction of a dtype before any deadline starts, by preparing a program that reduces. The
        program does not run."""
        if dtype in self._reducible:
            return
        program = self.plans.of_buffer("allreduce", "ring", 0, self.size, dtype.itemsize, grouped=False)
        self._transport.follow(program, dtype, "max")
        self._reducible.add(dtype)

    def prepare_codec(self, codec: Codec, device: torch.device, *, with_feedback: bool) -> None:
        """Compile a codec's kernels before any deadline starts."""
        key = (codec, device.type, with_feedback)
        if key in self._ready or not self.operations.usable:
            return
        rehearse(codec, device, with_feedback=with_feedback)
        self.prepare_to_reduce(torch.float32)
        if len(self._ready) == _REMEMBERED_CALLS:
            self._ready.clear()
        self._ready.add(key)

    def _grouped(self, buffer: torch.Tensor) -> bool:
        """Return whether both ends of a message must be posted together."""
        return buffer.device.type in self._posts_together

    def over_program(
        self, turn: Turn, program: Program, source: torch.Tensor, destination: torch.Tensor, op: str = "sum"
    ) -> None:
        """Run a program that reads `source` and writes or reduces into `destination`, usually the same buffer."""
        sums = "sum" if op == "average" else op  # the caller divides
        if destination.is_cpu and (run := self._transport.follow(program, destination.dtype, sums)) is not None:
            run(source, destination, turn.tag, turn.deadline)
            return
        numbers = Numbers(program, source, destination, COMBINE[op], self.rank, self._scratch)
        self._step_through(turn, program, numbers)

    def _step_through(self, turn: Turn, program: Program, payload: Payload) -> None:
        execute(program, payload, self._transport, tag=turn.tag, deadline=turn.deadline)

    def join(self) -> None:
        """Wait until the connections that operations.part() is closing are closed, and close the transport."""
        self.operations.join()
        self._transport.close()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the numbers of a tensor lie in its memory contiguously and unnegated."""
    return tensor.is_contiguous() and not tensor.is_neg() and bool(tensor.data_ptr())

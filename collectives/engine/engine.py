"""The engine of a Communicator: it prepares the calls of verbs, keeps them, and runs them in turn."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradwire.collectives.compression.codec import Codec, rehearse
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import Partition, effective
from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics.journal import OperationTally
from gradwire.collectives.diagnostics.mismatch import HASH_BYTES
from gradwire.collectives.diagnostics.timeline import Lane, now_ns
from gradwire.collectives.engine.buffers import Buffer, kept
from gradwire.collectives.engine.closing import Closing
from gradwire.collectives.engine.failure_monitor import weakly
from gradwire.collectives.engine.gpu_calls import GpuCalls
from gradwire.collectives.engine.host_copies import HostCopies
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.point_to_point import Messages
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.schedule_cache import ScheduleCache
from gradwire.collectives.engine.streams import DeviceOperation, devices_of, wait_on_host
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import carried, finish
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.spans import Layout, Span, consecutive
from gradwire.collectives.torch_internals import plain, uncompiled
from gradwire.collectives.transports.base import GroupRun, Operation, Run, Transport
from gradwire.collectives.transports.codes import CodedNumbers, Codes
from gradwire.collectives.transports.crossing import Crossed
from gradwire.collectives.transports.loop import Payload, Scratch

_KEPT_CALLS = 256

#: The halves of an allreduce: the verbs whose programs they run.
_PLANNED_AS = {"reduce_shares": "reduce_scatter", "gather_shares": "allgather"}

#: (tag, deadline) -> None: runs what is left of an operation that has begun.
Rest = Callable[[int, float], None]

#: (numbers, feedback, step, seed): begins to sum numbers in place by exchanging codes. What precedes the first message is done,
#: or enqueued on the current stream, if the codes of a GPU cross the host's memory; the rest by what is returned.
CodesRun = Callable[[torch.Tensor, Feedback | None, int, int], Rest]


class Engine:
    """Prepares and runs the calls of one Communicator. timeout_s, stall_warning_s: see Communicator.

    Attributes: rank, size; schedules, and the programs made from them; operations, which runs calls in turn; messages, between
    two ranks; can, what the transport can do; routes and empty, see Transport; device_types, of tensors that the engine can move;
    control_device, of the framework's own data (tokens, tables, pickled objects); channel, which exchanges news between ranks
    beside operations.
    """

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        schedules: ScheduleCache,
        timeout_s: float,
        stall_warning_s: float | None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.schedules = schedules
        self.can = transport.capabilities
        self.routes = transport.routes
        self.empty = transport.empty
        self.device_types = ("cpu", "cuda") if "cpu" in self.can.device_types else ("cuda",)
        self.control_device = self.device_types[0]
        self.via_host = "cuda" not in self.can.device_types
        self.operations = Operations(transport, channel, timeout_s, stall_warning_s, weakly(self._comparing))
        self.messages = Messages(transport, self.operations)
        self.closing = Closing(self.operations, self.messages, transport, channel)
        self.channel = channel
        self._lane: Lane | None = None
        self._tally: OperationTally | None = None
        self._records = False
        self._transport = transport
        self._gpu_calls = GpuCalls(self.operations, self.rank, via_host=self.via_host)
        self._scratch = Scratch()
        self._summed = Scratch()  # in use together with _scratch: codes that are added undecoded, or sums of codes
        self._rehearsed: set[tuple[Codec, torch.device, torch.dtype, bool]] = set()
        self._calls: OrderedDict[Hashable, PreparedCall] = OrderedDict()  # the last ones that were prepared

    # Running calls. A compiled function may call a verb. The compiler must not trace them: they use the addresses of tensors.

    @uncompiled
    def call(
        self,
        prepare: Callable[..., PreparedCall],
        source: Any,
        destination: Any,
        *given: Hashable,
        async_op: bool = False,
        timeout_s: float | None = None,
        awaited: bool = False,
    ) -> Work:
        """Run a call of a verb. prepare(self, source, destination, *given) checks and prepares it; the result is kept for later
        calls with tensors of the same dtypes, shapes and devices.

        source, destination: what the call's run gets: a tensor, the same one if it runs in place; a list of tensors; or a tuple
        of options of this call, which prepare() ignores. async_op, timeout_s, awaited: see run()."""
        key: Hashable = None
        if destination is source and type(source) is torch.Tensor and source.is_cpu:
            # Inline, since each small message passes it: what likes() finds.
            try:
                dtype = source.dtype
                has_bit = source.is_neg() or (dtype.is_complex and source.is_conj())
                if source.is_contiguous() and not has_bit and source.data_ptr():
                    key = prepare, given, dtype, source.shape
            except RuntimeError:
                pass
        elif (likes := self.likes(source)) is not None:
            others = likes if destination is source else self.likes(destination)
            key = None if others is None else (prepare, given, likes, others)
        try:
            call = None if key is None else self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed, which prepare() refuses
            key = call = None
        if call is None:
            # What is kept must be usable in any mode, and must not keep this object alive.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                call = self.prepared(prepare, source, destination, *given)
            if key is not None and self.operations.usable:
                self._calls[key] = call
                if len(self._calls) > _KEPT_CALLS:
                    self._calls.popitem(last=False)
        if async_op:
            is_in_place = destination is source
            source = _kept(source)
            destination = source if is_in_place else _kept(destination)
        is_special = async_op or timeout_s is not None or self._records or torch.is_inference_mode_enabled()
        if is_special or call.devices:
            direct = key is not None
            return self.run(
                call, source, destination, direct=direct, async_op=async_op, timeout_s=timeout_s, awaited=awaited
            )
        run = call.run if key is None or call.direct is None else call.direct
        return self.operations.run(call, run, source, destination)

    @uncompiled
    def prepared(
        self, prepare: Callable[..., PreparedCall], source: Any, destination: Any, *given: Any
    ) -> PreparedCall:
        """Return a call of a verb, checked and prepared; see call()."""
        call = prepare(weakref.proxy(self), source, destination, *given)
        devices = devices_of(source, destination)
        return replace(call, devices=devices) if devices else call

    def likes(self, given: Any) -> Hashable:
        """Return the dtype, shape and device of a tensor that a call can use as it is, or those of each tensor in a list; None if
        a tensor must be checked or copied."""
        if type(given) is torch.Tensor:
            try:
                is_plain = given.is_contiguous() and not (given.is_neg() or given.is_conj()) and given.data_ptr()
                if is_plain and (given.is_cpu or given.is_cuda):
                    return given.dtype, given.shape, given.device
            except RuntimeError:
                pass  # nested or sparse, or a wrapper of torch.func: no shape or address; see buffers.refusal
            return None
        if isinstance(given, list):
            every = tuple(map(self.likes, given))
            return None if None in every else every
        return () if isinstance(given, tuple) else None

    @uncompiled
    def run(
        self,
        call: PreparedCall,
        source: Any,
        destination: Any,
        *,
        direct: bool = False,
        async_op: bool = False,
        timeout_s: float | None = None,
        awaited: bool = False,
    ) -> Work:
        """Run a call in its turn. direct: whether the tensors can be used as they are, see likes(). async_op: do not wait for
        it; the source and the destination must then keep their memory, see buffers.kept. timeout_s: of this call; None:
        operations.timeout_s. awaited: see WorkQueue.submit()."""
        if torch.is_inference_mode_enabled():  # tensors that the call makes and keeps must be usable in any mode
            with torch.inference_mode(False):
                return self.run(
                    call, source, destination, direct=direct, async_op=async_op, timeout_s=timeout_s, awaited=awaited
                )
        run = call.run if not direct or call.direct is None else call.direct
        if async_op and run is call.run:
            run = partial(self._alive, run)
        if call.devices:
            recorded = partial(self._recorded, call, now_ns())
            return self._gpu_calls.run(
                call, run, source, destination, async_op=async_op, timeout_s=timeout_s, recorded=recorded
            )
        run = self._recorded(call, now_ns(), run) if self._records else run
        return self.operations.run(
            call, run, source, destination, async_op=async_op, timeout_s=timeout_s, awaited=awaited
        )

    def _alive(self, run: Callable[[Any, Any, int, float], None], *given: Any) -> None:
        """Run a queued call; its caller may have dropped the Communicator, to which what is prepared refers weakly."""
        run(*given)

    def record(self, lane: Lane | None, tally: OperationTally | None) -> None:
        """Record later calls, and in the lane also the parts of programs and codes. None: record nothing there."""
        self._lane, self._tally = lane, tally
        self._records = lane is not None or tally is not None
        self._transport.trace = None if lane is None else lane.program

    def recording(self, text: str, notes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context manager that records a call, if calls are recorded. text, notes: see PreparedCall."""
        return self._recording(text, notes) if self._records else nullcontext()

    @contextmanager
    def _recording(self, text: str, notes: Mapping[str, Any], **of_lane: Any) -> Iterator[None]:
        verb, begin_ns = text.partition("(")[0], now_ns()
        try:
            yield
        finally:
            if self._lane is not None:
                self._lane.span(verb, begin_ns, call=text, **of_lane, **notes)
            if self._tally is not None:
                self._tally.add(verb, now_ns() - begin_ns, notes)

    def _recorded(self, call: PreparedCall, issued_ns: int, run: Callable[..., None]) -> Callable[..., None]:
        """Return a call's run with a record of it, if calls are recorded."""
        return partial(self._record_run, run, call, issued_ns) if self._records else run

    def _record_run(self, run: Callable[..., None], call: PreparedCall, issued_ns: int, *given: Any) -> None:
        """Run a call's run with what it is given, and record the call and how long it was queued."""
        with self._recording(call.text, call.notes, queued_us=(now_ns() - issued_ns) / 1e3):
            run(*given)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Return a context manager that records a part of a call, if its parts are recorded."""
        return nullcontext() if self._lane is None else self._lane.during(name, **details)

    def choose_by(self, chooser: Callable[[str, int], str], place: Place) -> None:
        """See ScheduleCache.choose_by(). The choice also concerns calls that are prepared."""
        self.schedules.choose_by(chooser, place)
        self._calls.clear()

    # Preparing exchanges. Not collective; what must be compiled is compiled here, before any deadline starts.

    def prepare(
        self,
        verb: str,
        algorithm: str,
        like: torch.Tensor,
        numel: int,
        op: str = "sum",
        root: int = 0,
        *,
        layout: Layout | None = None,
        source_layout: Layout | None = None,
        lengths: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Run:
        """Return what runs a verb by an algorithm, on a source and a destination as in Operation; reduce_scatter may overwrite
        its source. An average is divided.

        like: a tensor of the dtype and device. numel: elements of the source. layout: the places of the ranks' blocks in the
        destination (of reduce_scatter in the source); None if the algorithm may divide the buffer freely. source_layout: their
        places in the source, for verbs that move blocks from one buffer to another. lengths: the elements to and from each
        rank, see Operation."""
        is_bool = like.dtype is torch.bool
        like, op = carried(like, op)
        device_type = "cpu" if self.via_host else like.device.type
        planned_as = _PLANNED_AS.get(verb, verb)
        if algorithm not in PLANNERS["allreduce" if planned_as is not verb else verb]:
            outgoing, incoming = map(tuple, lengths)
            own = Operation(verb, algorithm, like.dtype, device_type, numel, op, root, outgoing, incoming)
            run = self._transport.prepare(own)
            return _as_bytes(run) if is_bool else run
        grouped, element_size = like.device.type in self.can.posts_together, like.element_size()
        if source_layout is not None:
            assert layout is not None
            program = self.schedules.of_move(verb, algorithm, root, source_layout, layout, grouped=grouped)
        else:
            where = numel if layout is None else layout
            program = self.schedules.of_buffer(planned_as, algorithm, root, where, element_size, grouped=grouped)
        run = self.follow(verb, algorithm, program, like, numel, op, root)
        if is_bool:
            run = _as_bytes(run)
        if source_layout is not None and layout is not None:
            return _moving(run, source_layout[self.rank], layout[self.rank])
        if verb == "allgather" and layout is not None:
            return _gathering(run, layout[self.rank])
        if verb == "reduce_scatter" and layout is not None:
            return _scattering(run, layout[self.rank], op, self.size)
        if op == "average" and (verb == "allreduce" or (verb == "reduce" and self.rank == root)):
            return _averaging(run, self.size)
        return run

    def prepare_group(self, algorithm: str, like: torch.Tensor, numel: int, op: str) -> GroupRun | None:
        """Return what runs an allreduce on several tensors as one group; None if the transport runs it only on all their numbers
        in one buffer. like: see prepare(). numel: the elements of all tensors."""
        if algorithm in PLANNERS["allreduce"] or self.via_host:
            return None
        is_bool = like.dtype is torch.bool
        like, op = carried(like, op)
        own = Operation("allreduce", algorithm, like.dtype, like.device.type, numel, op)
        run = self._transport.prepare_group(own)
        if run is None or not is_bool:
            return run
        return lambda tensors, tag, deadline: run([tensor.view(torch.uint8) for tensor in tensors], tag, deadline)

    def follow(
        self,
        verb: str,
        algorithm: str,
        program: Program,
        like: torch.Tensor,
        numel: int,
        op: str = "sum",
        root: int = 0,
        *,
        device_type: str | None = None,
    ) -> Run:
        """Return what runs a program on buffers of like's dtype. device_type: of the buffers; None: the one on which the
        transport gets like."""
        if device_type is None:
            device_type = "cpu" if self.via_host else like.device.type
        sums = "sum" if op == "average" else op
        operation = Operation(verb, algorithm, like.dtype, device_type, numel, sums, root, program=program)
        return self._transport.prepare(operation)

    def prepare_codes(
        self, codec: Codec, present: Codec, numel: int, algorithm: str, device: torch.device, divisor: int
    ) -> CodesRun:
        """Return what sums numbers on a device by exchanging codes. If the algorithm has rounds inside hosts and ranks share
        hosts, only messages between hosts are coded. present: the codec in its form for the step. divisor: of the sum."""
        partition = self.schedules.partition(codec, numel, algorithm, device.type)
        first, last = self._inside(partition, device, 0), self._inside(partition, device, 1)
        crosses = device.type not in self.can.device_types
        codes: Codes | None = None
        if partition.group:
            used = effective(present, partition)
            program = self._program_of_codes(codec, used, partition, numel, algorithm, device)
            memory = (None, None) if crosses else (self._scratch, self._summed)
            codes = Codes(program, used, partition, device, *memory, divisor=divisor)
            run = self._transport.prepare(
                Operation("allreduce", algorithm, torch.uint8, device.type, numel, program=program, codes=codes)
            )

        def begin(flat: torch.Tensor, feedback: Feedback | None, step: int, seed: int) -> Rest:
            numbers: Payload | None = None
            if crosses and codes is not None and first is None:
                numbers = self._crossing_early(CodedNumbers(codes, flat, feedback, step, seed))

            def rest(tag: int, deadline: float) -> None:
                nonlocal numbers
                if feedback is not None:
                    feedback.join()
                if first is not None:
                    first(flat, flat, tag, deadline)
                if codes is not None:  # else this rank has no part of the buffer
                    if numbers is None:
                        own = CodedNumbers(codes, flat, feedback, step, seed)
                        numbers = self._transport.crossed(own) if crosses else own
                    run(numbers, numbers, tag, deadline)
                if last is not None:
                    last(flat, flat, tag, deadline)

            return rest

        return begin

    def _crossing_early(self, numbers: CodedNumbers) -> Payload:
        """Encode numbers on a GPU, and begin to copy the codes to the host, before the turn of their exchange."""
        crossed = Crossed(numbers, self._transport.copy_streams)
        for send in numbers.encode_first():
            crossed.stage(send.offset, send.length, send.scratch, self._gpu_calls.streams.early_copies)
        for memory in numbers.memory:
            self.keep_for_rest(memory)
        return crossed

    def keep_for_rest(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that precedes the first message of a call until the rest has used it."""
        if tensor.is_cuda:
            tensor.record_stream(self._gpu_calls.streams.communication(tensor.device))

    def _program_of_codes(
        self, codec: Codec, used: Codec, partition: Partition, numel: int, algorithm: str, device: torch.device
    ) -> CodedProgram:
        code_bytes, grouped = used.wire_bytes(partition.longest), device.type in self.can.posts_together
        return self.schedules.of_codes(codec, numel, algorithm, code_bytes, device.type, grouped=grouped)

    def keeps_halves(self, codec: Codec, present: Codec, numel: int, algorithm: str, device: torch.device) -> bool:
        """Return whether prepare_codes() takes bfloat16 and float16 as they are: on a GPU, if nothing is added to the numbers
        themselves."""
        partition = self.schedules.partition(codec, numel, algorithm, device.type)
        if device.type == "cpu" or partition.inside_hosts or not partition.group:
            return False
        used = effective(present, partition)
        return not self._program_of_codes(codec, used, partition, numel, algorithm, device).adds_in_place

    def _inside(self, partition: Partition, device: torch.device, which: int) -> Run | None:
        """Return what runs the first (0) or last (1) round of the hierarchical algorithm, inside the hosts; None if codes travel
        between all ranks."""
        if not partition.inside_hosts:
            return None
        like = torch.empty(0, dtype=torch.float32, device=device)
        grouped = not self.via_host and device.type in self.can.posts_together
        program = self.schedules.inside_hosts(which, partition.parts, like.element_size(), grouped=grouped)
        return self.follow("allreduce", "hierarchical", program, like, partition.numel, device_type=device.type)

    def place(self, tensor: torch.Tensor) -> str:
        """Return ' on cuda', which belongs to the text of a call, for a tensor that the transport moves between GPUs; else ''."""
        return "" if self.via_host or tensor.is_cpu else " on cuda"

    def notes(self, algorithm: str, nbytes: int, like: torch.Tensor, **more: Any) -> dict[str, Any]:
        """Return what a timeline shows of a call. like: one of its tensors."""
        return {"device": "cpu" if self.via_host else like.device.type, "bytes": nbytes, "algorithm": algorithm, **more}

    def rehearse(self, codec: Codec, device: torch.device, dtype: torch.dtype, *, with_feedback: bool) -> None:
        """Compile a codec's kernels for tensors of a dtype before any deadline starts."""
        key = (codec, device, dtype, with_feedback)
        if key not in self._rehearsed and self.operations.usable:
            rehearse(codec, device, with_feedback=with_feedback, dtype=dtype)
            if len(self._rehearsed) >= _KEPT_CALLS:
                self._rehearsed.clear()
            self._rehearsed.add(key)

    # The parts of a call's run

    def buffer(self, *tensors: torch.Tensor, fill: bool = True) -> Buffer:
        """Return the tensors, of one dtype and device, as one buffer that the transport can use."""
        return Buffer(tensors, fill=fill)

    def memory_for_codes(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for codes that are added undecoded; valid until the next call, or for good if several calls can be under
        way."""
        if device.type in self.can.device_types:
            return self._summed.take(nbytes, device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def on_gpu(
        self, text: str, tensor: torch.Tensor, *, is_written: bool
    ) -> tuple[DeviceOperation | None, HostCopies | None]:
        """Return what orders a message of a CUDA tensor, and if the transport cannot move it, its copies on the host; None for a
        CPU tensor. is_written: whether the message fills the tensor."""
        if not tensor.is_cuda:
            return None, None
        operation = self._gpu_calls.operation(text, [tensor], (tensor.device,))
        if not self.via_host:
            return operation, None
        return operation, HostCopies(self._gpu_calls.streams.early_copies, [] if is_written else [tensor], tensor)

    def on_host(self, tensor: torch.Tensor) -> HostCopies | None:
        """Begin to copy a tensor to the host, if the transport cannot move it."""
        if tensor.device.type in self.can.device_types:
            return None
        copies = HostCopies(self._gpu_calls.streams.early_copies, tensor, tensor)
        copies.copy_out()
        return copies

    def meet(self, tag: int, deadline: float) -> None:
        """Wait until every rank has called this: a barrier."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.control_device)
        self.prepare("barrier", "recursive_doubling", token, 1, "max")(token, token, tag, deadline)
        if token.is_cuda:
            wait_on_host(deadline, lambda: self.operations.monitor.is_broken)

    def table(self, row: Sequence[int], tag: int, deadline: float) -> list[list[int]]:
        """Return every rank's row of integers, by rank. Rows have the same length on all ranks."""
        everything = torch.zeros(self.size, len(row), dtype=torch.int64, device=self.control_device)
        mine = torch.tensor(row, dtype=torch.int64, device="cpu").to(self.control_device)
        layout = consecutive([len(row)] * self.size)
        gather = self.prepare("allgather", "rsag", mine, len(row), layout=layout)
        gather(mine, everything.view(-1), tag, deadline)
        if everything.is_cuda:
            wait_on_host(deadline, lambda: self.operations.monitor.is_broken)
        rows: list[list[int]] = everything.tolist()
        return rows

    def _comparing(self) -> Run | None:
        """Return what takes the maximum of HASH_BYTES bytes over all ranks, by which they compare a new call; None if the
        transport could take messages of another call for its messages."""
        like = torch.empty(0, dtype=torch.uint8, device=self.control_device)
        if not self.knows_tags(like):
            return None
        chosen = self.schedules.choose("allreduce", "auto", HASH_BYTES, on_gpu=False)
        has_tags = chosen == "shared" or chosen in PLANNERS["allreduce"]  # a link's own algorithm may have none
        return self.prepare("allreduce", chosen if has_tags else "rsag", like, HASH_BYTES, "max")

    # What a verb may ask of a tensor

    def receives_from_any(self, tensor: torch.Tensor) -> bool:
        """Return whether a receive into such a tensor may name no sender."""
        return self.can.receives_from_any and (tensor.is_cpu or self.via_host)

    def knows_tags(self, tensor: torch.Tensor) -> bool:
        """Return whether the transport matches messages of such a tensor by their tags."""
        return self.via_host or tensor.device.type not in self.can.posts_together


def _kept(given: Any) -> Any:
    """Return what an asynchronous call is given, with views of the present memory of its tensors."""
    if isinstance(given, list):
        return list(map(kept, given))
    return kept(given) if isinstance(given, torch.Tensor) else given


# How a program's run becomes that of a verb


def _averaging(run: Run, size: int) -> Run:
    def averaged(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        run(source, destination, tag, deadline)
        finish(plain(destination), "average", size)

    return averaged


def _gathering(run: Run, mine: Span) -> Run:
    def gathered(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        place = destination[mine.start : mine.stop]
        if source.data_ptr() != place.data_ptr():
            place.copy_(source)
        run(destination, destination, tag, deadline)

    return gathered


def _scattering(run: Run, mine: Span, op: str, size: int) -> Run:
    def scattered(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        run(source, source, tag, deadline)
        destination.copy_(source[mine.start : mine.stop])
        finish(destination, op, size)

    return scattered


def _moving(run: Run, own: Span, place: Span) -> Run:
    def moved(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        if source.numel() and destination.numel():  # else this rank is not the root
            destination[place.start : place.stop].copy_(source[own.start : own.stop])
        run(source, destination, tag, deadline)

    return moved


def _as_bytes(run: Run) -> Run:
    """Return the run for bool tensors, which travel as uint8."""

    def carried_run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        run(source.view(torch.uint8), destination.view(torch.uint8), tag, deadline)

    return carried_run

"""What stands behind the verbs: how the body of an operation moves its buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from collectives.compression.codec import Codec
from collectives.compression.feedback import Feedback
from collectives.compression.pairs import TWO_SHOT, riding, schedule_of_codes
from collectives.compression.partition import Partition, effective, partition_of
from collectives.link.base import Request, Transport, Whole, WholeRun
from collectives.link.watch import Watch
from collectives.plan.algorithms import PLANNERS, hierarchical
from collectives.plan.coded import CodedProgram
from collectives.plan.program import LOOKAHEAD, Program
from collectives.plan.schedule import Place, Schedule
from collectives.plan.selection import SHARED, Table, choose
from collectives.plan.spans import Layout, consecutive, segments_of_blocks, segments_of_buffer
from collectives.plan.topology import Topology
from collectives.reduction import COMBINE, carried
from collectives.run.executor import execute
from collectives.run.operations import Operations, Turn, digest
from collectives.run.payload import Codes, Numbers, Scratch
from collectives.run.staging import Buffer
from collectives.run.work import Work

_CACHED_PROGRAMS = 256


def legal_algorithms(offered: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the names that `algorithm=` takes for each collective, besides 'auto'. offered: what a transport does by itself.

    Raises ValueError where it offers what no collective is called, or under a name that means something else already.
    """
    for collective, names in offered.items():
        taken = ("auto", *PLANNERS[collective]) if collective in PLANNERS else names
        if doubled := [name for name in names if name in taken]:
            raise ValueError(f"a link cannot offer {collective} algorithms called {', '.join(doubled)}")
    return {collective: (*planners, *offered.get(collective, ())) for collective, planners in PLANNERS.items()}


class Engine:
    """Runs the operations of one Communicator. timeout_s and segment_bytes as there.

    Attributes: rank, size, topology; shares_memory, with the other ranks of the host; device_types, the kinds of device whose
    tensors the group carries; control_device, the one where what the framework itself sends (tokens, tables, pickled objects)
    lies; tables, what 'auto' runs.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        topology: Topology,
        *,
        algorithms: Mapping[str, tuple[str, ...]],
        tables: dict[str, Table],
        timeout_s: float,
        segment_bytes: int,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.topology = topology
        self.shares_memory = transport.shares_memory
        self.device_types = ("cpu", "cuda") if "cpu" in transport.device_types else ("cuda",)
        self.control_device = self.device_types[0]
        self._via_host = "cuda" not in transport.device_types
        self._operations = Operations(transport, watch, timeout_s)
        self._segment_bytes = segment_bytes
        self._transport = transport
        self._algorithms = algorithms
        self.tables = tables
        self._scratch = Scratch()
        self._summed = Scratch()
        self._partitions: dict[tuple[Codec, int, str], Partition] = {}
        self._ready: set[tuple[Codec, str, bool]] = set()
        self._schedules: dict[tuple[str, str, int], Schedule] = {}
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._calls: dict[tuple[torch.dtype, torch.Size, Hashable], tuple[str, int, WholeRun]] = {}

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

    def choose_for_codec(self, codec: Codec, algorithm: str, nbytes: int, *, with_feedback: bool) -> str:
        """choose, for an allreduce of codes of nbytes. Raises ValueError, which lists what the codec may ride."""
        names = riding(codec, self.algorithms("allreduce"), with_feedback=with_feedback)
        if algorithm == "auto":
            return self.choose("allreduce", algorithm, nbytes) if codec.summable else names[0]
        if algorithm not in names:
            corrected = " with error feedback" if with_feedback else ""
            raise ValueError(
                f"rank {self.rank}: codec {codec.name!r}{corrected} cannot ride the algorithm {algorithm!r}; allowed are "
                f"{', '.join(('auto', *names))}"
            )
        return algorithm

    def choose_for_parts(self, collective: str, algorithm: str, lengths: Sequence[int], element_size: int) -> str:
        """choose, for a message made of a part per rank. What a link does by itself needs equal parts; 'auto' then takes rsag
        instead."""
        chosen = self.choose(collective, algorithm, sum(lengths) * element_size)
        if chosen not in PLANNERS[collective] and len(set(lengths)) > 1:
            if algorithm != "auto":
                raise ValueError(
                    f"rank {self.rank}: {collective} of unequal parts {list(lengths)} has no algorithm {chosen!r}"
                )
            return "rsag"
        return chosen

    def wire_bytes(self, collective: str, nbytes: int, algorithm: str, codec: Codec | None) -> int | None:
        """As Communicator.wire_bytes."""
        if codec is None:
            name = self.choose(collective, algorithm, nbytes)
        else:
            numel, nbytes = nbytes // 4, codec.wire_bytes(nbytes // 4)
            name = self.choose_for_codec(codec, algorithm, nbytes, with_feedback=False)
            if name == TWO_SHOT or not codec.summable:
                partition = self.partition(codec, numel, name)
                used = effective(codec, partition)
                if not partition.group:
                    return 0
                return self._program_of_codes(codec, used, partition, name, grouped=False).sent_bytes()
        if name not in PLANNERS[collective]:
            return None
        schedule = self.schedule(collective, name)
        segments = segments_of_buffer(nbytes, schedule.blocks, self._segment_bytes)
        return Program(schedule, segments).sent()[1]

    def schedule(self, collective: str, algorithm: str, root: int = 0) -> Schedule:
        """This rank's schedule, planned once."""
        key = (collective, algorithm, root)
        if key not in self._schedules:
            place = Place(self.rank, self.size, root, self.topology.hosts)
            self._schedules[key] = PLANNERS[collective][algorithm](place)
        return self._schedules[key]

    def submit(self, call: str, body: Callable[[Turn], None], *, async_op: bool) -> Work | None:
        """See Operations. Bodies run outside of inference mode, so that the memory they keep serves later calls in any mode."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._operations.submit(call, body, async_op=async_op)
        return self._operations.submit(call, body, async_op=async_op)

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
        """Let the link make ready what it does by itself, before anyone's clock runs; None for what follows a schedule.

        like: of the dtype and device of the call. numel: of the source. lengths: of a Request, to and from each rank.
        """
        if algorithm in PLANNERS[verb]:
            return None
        like, op = carried(like, op)
        device_type = "cpu" if self._via_host else like.device.type
        outgoing, incoming = map(tuple, lengths)
        return self._transport.collective(
            Request(verb, algorithm, like.dtype, device_type, numel, op, root, outgoing, incoming)
        )

    def remember(self, tensor: torch.Tensor, key: Hashable, call: str, whole: Whole) -> None:
        """Let repeat() take the next calls with a tensor of this dtype and shape. key: all else that a caller gives."""
        if tensor.is_cpu and not whole.needs_meeting and self._operations.usable and tensor.dtype is not torch.bool:
            if len(self._calls) == _CACHED_PROGRAMS:
                self._calls.clear()
            self._calls[tensor.dtype, tensor.shape, key] = (call, digest(call), whole.run)

    def repeat(self, tensor: torch.Tensor, key: Hashable) -> bool:
        """Let the link allreduce by itself without the preparations, where an equal call has been remembered, and nothing
        stands in the way; False, with nothing done, where not. What it saves is most of the time of a small message."""
        if not self._calls or type(tensor) is not torch.Tensor:
            return False
        try:
            known = self._calls.get((tensor.dtype, tensor.shape, key))
            if (
                known is None
                or not tensor.is_cpu
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or not tensor.data_ptr()
            ):
                return False
        except RuntimeError:  # nested or sparse: no shape or address; see staging.refusal
            return False
        call, call_digest, run = known
        return self._operations.run_now(call, call_digest, run, tensor, tensor)

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
            (collective, algorithm, root, buffer.numel(), segment, buffer.is_cuda),
            lambda: _laid_out(schedule, segments_of_buffer(buffer.numel(), schedule.blocks, segment), buffer),
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
            (collective, algorithm, layout, segment, buffer.is_cuda),
            lambda: _laid_out(schedule, segments_of_blocks(layout, segment), buffer),
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
        program = _laid_out(self.schedule(collective, algorithm, root), [layout], destination, [source_layout])
        self._execute(turn, program, source, destination, "sum")

    def over_codes(
        self,
        turn: Turn,
        flat: torch.Tensor,
        codec: Codec,
        algorithm: str,
        *,
        feedback: Feedback | None,
        average: bool,
        step: int,
        seed: int,
    ) -> None:
        """Reduce a float32 buffer in place by codes; between hosts only, where the algorithm says so and ranks share hosts."""
        partition = self.partition(codec, flat.numel(), algorithm)
        if partition.inside_hosts:
            self._inside(turn, flat, partition.parts, 0)
        if partition.group:
            used = effective(codec.at(step), partition)
            grouped = flat.is_cuda and not self._via_host
            program = self._program_of_codes(codec, used, partition, algorithm, grouped=grouped)
            payload = Codes(
                program,
                flat,
                used,
                partition,
                self._scratch,
                feedback=feedback,
                divisor=self.size if average else 1,
                step=step,
                seed=seed,
                via_host=self._via_host,
            )
            execute(program, payload, self._transport, tag=turn.tag, deadline=turn.deadline)
        if partition.inside_hosts:
            self._inside(turn, flat, partition.parts, 1)

    def wire(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for codes that are summed as they are, until the next call."""
        return self._summed.take(nbytes, device)

    def partition(self, codec: Codec, numel: int, algorithm: str = TWO_SHOT) -> Partition:
        """Who encodes what of a buffer."""
        key = (codec, numel, algorithm)
        if key not in self._partitions:
            if len(self._partitions) >= _CACHED_PROGRAMS:
                self._partitions.clear()
            planner, by_hosts = schedule_of_codes(algorithm)
            hosts = self.topology.hosts if by_hosts else (tuple(range(self.size)),)
            self._partitions[key] = partition_of(codec, numel, self.rank, hosts, self._segment_bytes, planner)
        return self._partitions[key]

    def _program_of_codes(
        self, codec: Codec, used: Codec, partition: Partition, algorithm: str, *, grouped: bool
    ) -> CodedProgram:
        """codec: for which the partition was made. used: in its place, in the step. grouped: whether a round's messages must be
        posted together."""

        def planned() -> CodedProgram:
            group = partition.group
            planner, _ = schedule_of_codes(algorithm)
            schedule = planner(Place(group.index(self.rank), len(group)))
            return CodedProgram(schedule, partition.chunks, used.wire_bytes, group, lookahead=0 if grouped else 1)

        program = self._program(("codes", codec, used, algorithm, partition.numel, grouped), planned)
        assert isinstance(program, CodedProgram)
        return program

    def _inside(self, turn: Turn, flat: torch.Tensor, parts: Layout, which: int) -> None:
        """The first (0) or last (1) round of hierarchical, inside the hosts, of blocks that are `parts`."""
        segment = max(1, self._segment_bytes // flat.element_size())
        buffer = self.buffer(flat)

        def planned() -> Program:
            steps = hierarchical.inside(Place(self.rank, self.size, 0, self.topology.hosts))[which]
            schedule = Schedule(self.rank, self.size, len(parts), (steps,))
            return _laid_out(schedule, segments_of_blocks(parts, segment), buffer.flat)

        program = self._program(("inside", which, parts, segment, buffer.flat.is_cuda), planned)
        self._execute(turn, program, buffer.flat, buffer.flat, "sum")
        buffer.store()

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

    def run_whole(self, turn: Turn, whole: Whole, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Let the link do what it has made ready."""
        if whole.needs_meeting:
            self.meet(turn)
        whole.run(carried(source, "sum")[0], carried(destination, "sum")[0], turn.tag, turn.deadline)

    def prepare(self, dtypes: Iterable[torch.dtype]) -> None:
        """See to it that the link can allreduce these dtypes in shared memory, before anyone's clock runs."""
        for dtype in dtypes:
            self.whole("allreduce", SHARED, torch.empty(0, dtype=dtype), 0)

    def prepare_codec(self, codec: Codec, device: torch.device, *, with_feedback: bool) -> None:
        """The same for a codec's kernels. Raises ValueError for a codec that cannot do without error feedback."""
        key = (codec, device.type, with_feedback)
        if key in self._ready or not self._operations.usable:
            return
        numbers = torch.zeros(1, device=device)
        wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
        residual = numbers.clone() if with_feedback else None
        codec.encode(numbers, wire, residual=residual, state=codec.new_state(1, device) if with_feedback else None)
        codec.encode(numbers, wire, residual=residual)
        codec.decode(wire, numbers)
        codec.decode(wire, numbers, add=True)
        self._ready.add(key)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Transport."""
        return self._transport.empty(shape, dtype)

    def _program(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        if key not in self._programs:
            self._programs[key] = make()
            if len(self._programs) > _CACHED_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _execute(self, turn: Turn, program: Program, source: torch.Tensor, destination: torch.Tensor, op: str) -> None:
        numbers = Numbers(program, source, destination, COMBINE[op], self.rank, self._scratch)
        execute(program, numbers, self._transport, tag=turn.tag, deadline=turn.deadline)

    def announce_close(self) -> bool:
        """Tell the other ranks that this one issues no more operations; False, with nothing done, the second time."""
        return self._operations.announce_close()

    def drain(self, deadline: float) -> None:
        """Finish what is queued, but not beyond the deadline (time.monotonic())."""
        self._operations.drain(deadline)

    def part(self, deadline: float) -> None:
        """Wait for the other ranks, but not beyond the deadline (time.monotonic()), and give everything back."""
        self._operations.part(deadline)
        self._transport.close()


def _laid_out(
    schedule: Schedule, segments: Sequence[Layout], buffer: torch.Tensor, sources: Sequence[Layout] | None = None
) -> Program:
    """Return a Program for messages to a buffer. NCCL, which carries those of CUDA, wants both ends of each posted together."""
    return Program(schedule, segments, sources, lookahead=0 if buffer.is_cuda else LOOKAHEAD)

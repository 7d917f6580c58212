"""The Communicator, which moves tensors between the ranks of a group. Its verbs are in `gradwire.collectives.verbs`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gradwire.collectives.arguments import check_seconds
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.control.attempt import Attempt
from gradwire.collectives.control.membership import Membership, coming_together, device_types_of
from gradwire.collectives.diagnostics.journal import OperationTally
from gradwire.collectives.diagnostics.timeline import Lane, Timeline
from gradwire.collectives.engine import closing
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.join import Absence
from gradwire.collectives.engine.schedule_cache import ScheduleCache, legal_algorithms
from gradwire.collectives.environment import CHECKSUM, LINK, TUNING, checksum_wanted, report_folder
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.selection import (
    Table,
    default_segment_bytes,
    default_table,
    overrides,
    variables,
)
from gradwire.collectives.schedules.topology import host_id
from gradwire.collectives.transports.registry import AUTO, check_link, connect
from gradwire.collectives.verbs import Verbs

if TYPE_CHECKING:
    from gradwire.collectives.tuning import Chooser, Costs, TuningFile

#: Before the topics of post(), so that none is one of gradwire's own.
_TOPIC = "of the program: "


class Communicator(Verbs):
    """Runs collective operations among the ranks of a torch.distributed group, and sends messages between two of them.

    Making a Communicator is a collective call. So is each *verb*, a method that runs a collective operation, such as allreduce:
    all ranks of the group call the same verbs in the same order. Most verbs follow torch.distributed: they write their result
    into a tensor and return a Work, which is done unless async_op=True was given. The verbs for objects and records return
    their result.
    docs/guides/collectives.md is the guide.

    group: a ProcessGroup over gloo (CUDA tensors are copied through pinned memory) or NCCL; None for the world. gradwire itself
    also passes a Membership, which describes the ranks without a ProcessGroup.
    timeout_s: the deadline of each operation, in seconds from its start, and of making the Communicator.
    segment_bytes: an algorithm cuts a buffer into blocks, usually one per rank, and sends each block in pieces of at most
    segment_bytes. None: a default that depends on the link and on which ranks share hosts. With a codec, CUDA tensors are sent
    in pieces of up to 4 MB of encoded bytes.
    link: the link that moves the bytes: 'auto', 'tcp', 'process_group' or a name given to register_link. None: the value of the
    environment variable COLLECTIVES_LINK; if that is not set, 'auto'.
    stall_warning_s: after a wait of this many seconds, and each time the wait has doubled, the logger "gradwire" names the
    awaited ranks, and the file and line that each of them executes. None turns this off.
    stall_shutdown_s: a shorter deadline than timeout_s, for operations only; None: timeout_s.

    segment_bytes, link and the environment variables COLLECTIVES_<VERB> and COLLECTIVES_TUNING must be equal on all ranks;
    otherwise all raise ValueError. timeout_s, stall_warning_s and stall_shutdown_s may differ.

    With the link 'auto', CPU tensors travel through shared memory between ranks of one host, and over TCP between hosts. If
    memory cannot be shared, they travel over TCP. Shared memory and TCP need kernels that gradwire compiles with Numba, on
    Linux only. Without these kernels, CPU tensors travel through the backend of the group.

    Arguments of the verbs:

    - Tensors may be non-contiguous or empty, and an output may share memory with an input. A sparse tensor, or one without its
      own memory (a DTensor, a FakeTensor, a nested tensor), raises TypeError.
    - Dtypes are float16, bfloat16, float32, float64, int8, uint8, int16, int32, int64 and bool. broadcast, allgather, gather,
      scatter, alltoall, send and recv also move complex, float8, float4, uint16, uint32 and uint64 tensors.
    - src and dst are ranks of the group, from 0 to size - 1, not ranks of the world.
    - op is 'sum', 'average', 'min', 'max' or 'product', or torch's ReduceOp.SUM, AVG, MIN, MAX or PRODUCT. Sums and products of
      integers wrap around; averages of integers truncate toward zero. On bool, sum and max are "or", product and min are
      "and", and average raises TypeError.
    - algorithm is 'auto' or one of algorithms(verb). An algorithm gives bitwise identical results on all ranks, and in every
      run with the same ranks on each host.
    - async_op=True: do not use the tensors until wait() of the returned Work has returned. The operation works on the memory
      that they had at the call. Afterwards, the storage of a CPU tensor cannot be resized, as after Tensor.numpy().
      Operations run in the order of the calls.

    Threads of a rank may share a Communicator only if all of them make the same calls with equal arguments: otherwise ranks
    could run the calls in different orders, which raises Mismatch.

    Every verb raises ValueError or TypeError for a wrong argument, before anything is sent. If an operation cannot finish, the
    verb raises PeerLost, CollectiveTimeout or Mismatch; with async_op=True, wait() raises this error. It breaks the
    Communicator: each further call raises an error of the same kind. Two errors do not break it: a Mismatch that was found before
    any data moved, and the CollectiveTimeout of a timeout that was passed to wait().
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Membership | None = None,
        *,
        timeout_s: float = 300.0,
        segment_bytes: int | None = None,
        link: str | None = None,
        stall_warning_s: float | None = 60.0,
        stall_shutdown_s: float | None = None,
    ) -> None:
        if not isinstance(group, Membership) and not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup | Membership):
            raise ValueError(f"group is {group!r}: a ProcessGroup that this process belongs to is needed")
        link = link or os.environ.get(LINK) or AUTO
        tuning = os.environ.get(TUNING) or "0"
        meeting = group if isinstance(group, Membership) else Attempt.of(group)
        try:
            rank = group.rank if isinstance(group, Membership) else group.rank()
            check_seconds(rank, "timeout_s", timeout_s)
            for name, seconds in (("stall_warning_s", stall_warning_s), ("stall_shutdown_s", stall_shutdown_s)):
                if seconds is not None:
                    check_seconds(rank, name, seconds)
            if segment_bytes is not None and not isinstance(segment_bytes, int):
                raise TypeError(f"rank {rank}: segment_bytes={segment_bytes!r}: a whole number is needed")
            if segment_bytes is not None and segment_bytes <= 0:
                raise ValueError(f"rank {rank}: segment_bytes={segment_bytes} must be positive")
            check_link(link, os.environ)
            tuning_file = None if tuning in ("0", "1") else _tuning_file(tuning)
            host = host_id()
            device_types = () if isinstance(group, Membership) else device_types_of(group)
        except Exception as error:
            meeting.withdraw(error)  # else the other ranks would wait for this one
            raise
        met = meeting if isinstance(meeting, Membership) else meeting.meet(device_types, host, timeout_s)
        membership = met.opened()
        #: The rank of each member in torch.distributed's default group, by its rank here; empty if they are not in that group.
        self.global_ranks = membership.global_ranks
        try:
            with coming_together(membership.rank, timeout_s, membership.channel):
                settings = [f"segment_bytes={segment_bytes}"]
                if "cuda" in membership.device_types:
                    settings.append(f"tensors on {' and '.join(membership.device_types)}")
                settings += [f"{name}={os.environ[name]!r}" for name in variables(PLANNERS, os.environ).values()]
                if checksum_wanted(os.environ):
                    settings.append(f"{CHECKSUM}=1")
                if tuning != "0":
                    settings.append(f"{TUNING}={tuning if tuning_file is None else tuning_file.content}")
                connection = connect(membership, link, ", ".join(settings), timeout_s)
        except BaseException:
            membership.channel.leave_unconnected()  # otherwise connected ranks would count this rank as lost
            raise
        try:
            transport, self.topology = connection.transport, connection.topology
            can = transport.capabilities
            quick = can.quick
            if segment_bytes is None:
                segment_bytes = default_segment_bytes(self.topology, quick=quick)
            algorithms = legal_algorithms(can.algorithms)
            tables = overrides(algorithms, os.environ)  # an invalid variable raises ValueError
            by_hand = frozenset(tables)
            for collective in algorithms:
                tables.setdefault(collective, default_table(collective, self.topology, can.preferred, quick=quick))
            schedules = ScheduleCache(
                self.topology,
                algorithms,
                tables,
                segment_bytes,
                eager=can.eager,
                preferred_on_gpu=can.preferred_on_gpu,
                share_alignment_bytes=can.share_alignment_bytes,
            )
            patience_s = timeout_s if stall_shutdown_s is None else min(timeout_s, stall_shutdown_s)
            self._engine = Engine(transport, connection.channel, schedules, patience_s, stall_warning_s)
            self._lanes = ""
            self.timeline: Timeline | None = None
            """The Timeline in which operations are recorded now; None if they are not recorded."""
            self._tally: OperationTally | None = None
            if folder := report_folder(os.environ):
                self._tally = OperationTally(folder, self.global_rank, self.topology.size, self.routes)
                weakref.finalize(self, self._tally.write)
                self.record(None)
        except BaseException:  # else the others would count on this rank
            connection.close()
            raise
        schedules.by_hand = by_hand
        #: The machine of each rank.
        self.machines = membership.machines()
        self.costs: Costs | None = None
        """The measured costs of the links, the same on all ranks; None without a measurement."""
        self.measured: Chooser | None = None
        """Return what selects algorithms by the measured costs for 'auto', as a Chooser; None without a measurement."""
        try:
            if tuning_file is not None:
                tuning_file.apply(self, self._engine)
            elif tuning == "1" and quick and len(self.topology.hosts) > 1:
                self.tune()
        except BaseException as error:
            close_all([self], error)
            raise

    @property
    def control_device(self) -> str:
        """Return the device for tensors that hold control data, such as lengths or pickled objects: the CPU, or the GPU if
        the group carries no CPU tensors."""
        return self._engine.control_device

    @property
    def routes(self) -> tuple[str, ...]:
        """Return lines of text that say by which connection this rank reaches the other ranks."""
        return self._engine.routes

    @property
    def timeout_s(self) -> float:
        """Seconds that each operation may take from its start; a new value applies to operations that start later."""
        return self._engine.operations.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        check_seconds(self._engine.rank, "timeout_s", seconds)
        self._engine.operations.timeout_s = seconds

    @property
    def segment_bytes(self) -> int:
        """Return the constructor's argument segment_bytes, or the default that replaced None."""
        return self._engine.schedules.segment_bytes

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the names that `algorithm=` takes for a verb, besides 'auto'. Raises ValueError for an unknown verb."""
        return self._engine.schedules.algorithms(collective)

    @property
    def tables(self) -> dict[str, Table]:
        """Return, by verb, the table from which 'auto' takes the algorithm for a message size: gradwire's own table, or that of
        an environment variable such as COLLECTIVES_ALLREDUCE. After tune(), gradwire's own table is only the default: 'auto'
        runs another algorithm if the measurement predicts that it takes at least 5 % less time than the table's."""
        return dict(self._engine.schedules.tables)

    def chosen(self, collective: str, nbytes: int, compression: str | Codec | None = None, device: str = "cpu") -> str:
        """Return the algorithm that 'auto' runs for a message of nbytes. nbytes counts all parts: the whole output of allgather
        and gather, and the whole input of reduce_scatter and scatter. With a codec, return the algorithm for an allreduce of
        float32 numbers whose size before encoding is nbytes. device: the device type of the tensors.
        """
        made = make_codec(compression) if compression is not None else None
        if made is None or made.name == "none":
            return self._engine.schedules.choose(collective, "auto", nbytes, on_gpu=device == "cuda")
        code_bytes = made.wire_bytes(nbytes // 4)
        return self._engine.schedules.choose_for_codec(
            made, "auto", code_bytes, with_feedback=made.needs_feedback, on_gpu=device == "cuda"
        )

    def wire_bytes(
        self, collective: str, nbytes: int, algorithm: str = "auto", compression: str | Codec | None = None
    ) -> int | None:
        """Return how many bytes this rank sends for a message of nbytes, according to the schedule. nbytes has the same
        meaning as for chosen(). For a verb with a root, rank 0 is taken as the root.

        With a codec, the message is float32 numbers whose size before encoding is nbytes. Only codes count, without the
        uncompressed numbers that the ranks of a host send each other if there are several hosts. Return None if the
        link runs the algorithm by itself, as it does 'native' and 'shared'.
        """
        made = make_codec(compression) if compression is not None else None
        return self._engine.schedules.wire_bytes(collective, nbytes, algorithm, made)

    def tune(self) -> Costs:
        """Measure the links of these ranks, and let 'auto' select by the measurement from now on. A collective call, which
        takes half a second or more, and longer if ranks share cores. With COLLECTIVES_TUNING=1, making a Communicator
        over several hosts calls it, if gradwire's TCP link connects the hosts.

        The measurement includes the time of allreduces by each algorithm at a small size, and at larger sizes by the algorithms
        whose predicted times are near that of the fastest. These times correct the predictions, so 'auto' selects by them. Later
        calls do not change the selection: all calls of a size run the same algorithm until the next tune(), and runs with the
        same file of measurements give the same bits.
        """
        from gradwire.collectives.tuning import tune

        return tune(self, self._engine)

    def measure_codecs(self, codecs: Iterable[str | Codec], device: str = "cpu") -> Costs:
        """Measure how quickly these ranks encode and decode on a type of device, so that predict() can use the measurement.
        Also measure the links, unless that was done before. A collective call, which takes about a second. It does not change
        the selection of 'auto'.

        Raises ValueError if the group carries no CPU tensors, because links are measured with CPU tensors."""
        from gradwire.collectives.tuning import measure_codecs

        return measure_codecs(self, self._engine, codecs, device)

    def predict(self, numel: int, itemsize: int = 4, compression: str | Codec | None = None) -> float:
        """Return the predicted seconds of an allreduce with algorithm='auto' of numel numbers of itemsize bytes; with a
        codec, of float32 numbers. The result is the same on all ranks. Raises KeyError for a codec or an algorithm that was
        not measured; see measure_codecs()."""
        from gradwire.collectives.tuning import predict

        return predict(self.costs, self._engine, numel, itemsize, compression)

    @property
    def absence(self) -> Absence:
        """The Absence of this rank, by which gradwire.join() contributes zeros to the operations of the other ranks."""
        return Absence(self, self._engine)

    def post(self, topic: str, record: Any) -> None:
        """Send a record to all ranks, and return at once, before it has arrived. The record replaces this rank's earlier record
        of the same topic; posted() returns the latest ones. For what a record may contain, see allgather_record(). This is not
        an operation: no other rank needs to take part.
        """
        self._engine.channel.post(f"{_TOPIC}{topic}", record)

    def posted(self, topic: str) -> dict[int, Any]:
        """Return the latest record of a topic from each rank, this one included, by rank. Returns at once."""
        return dict(self._engine.channel.posts.get(f"{_TOPIC}{topic}", {}))

    def record(self, timeline: Timeline | None, name: str = "") -> None:
        """Record this rank's operations in a Timeline from now on, in lanes (rows) whose names begin with `name`. With None as
        the timeline, stop recording.
        """
        self._lanes = name
        self.timeline = timeline
        self._engine.record(self.lane("operations"), self._tally)

    def lane(self, of: str) -> Lane | None:
        """Return the lane of the timeline that shows one kind of work with this Communicator; None if nothing is recorded.

        of: the kind of work, which is the end of the lane's name.
        """
        timeline = self.timeline
        return None if timeline is None else timeline.lane(f"{self._lanes}: {of}")

    @property
    def global_rank(self) -> int:
        """Return this process's rank in torch.distributed's default group, or its rank here if it is not in that group."""
        return self.global_ranks[self._engine.rank] if self.global_ranks else self._engine.rank

    def close(self) -> None:
        """Finish all operations, and close the connections. A collective call: it waits for the other ranks for a few seconds
        at most, for operations that GPUs have not finished until their deadlines, and not after a failure. Further calls do
        nothing.
        """
        close_all([self])

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all([self], error)


def _tuning_file(name: str) -> TuningFile:
    from gradwire.collectives.tuning import TuningFile

    return TuningFile(name)


def close_all(communicators: Iterable[Communicator], error: BaseException | None = None) -> None:
    """Close several Communicators in little more time than one: all of them report it before any waits. error: the exception by
    which this rank leaves, which the others' errors then name."""
    closing.close_all([communicator._engine.closing for communicator in communicators], error)


def abandon_all(communicators: Iterable[Communicator], error: BaseException) -> None:
    """End several Communicators at once, without waiting for other ranks: operations under way fail on all ranks. error: the
    reason, which the others' errors then name. Takes a fraction of a second, whatever the others do."""
    closing.abandon_all([communicator._engine.closing for communicator in communicators], error)

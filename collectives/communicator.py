"""Communicator: what a user makes to move tensors between the ranks of a group. Its verbs are in `gradwire.collectives.verbs`."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from gradwire.collectives.absence import Absence
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.raw import Raw
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.diagnostics.journal import OperationTally
from gradwire.collectives.diagnostics.timeline import Lane, Timeline
from gradwire.collectives.environment import LINK, TUNING, report_folder
from gradwire.collectives.link.membership import Membership, membership_of
from gradwire.collectives.link.registry import AUTO, check_link, connect
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.cost import Costs
from gradwire.collectives.plan.selection import (
    Measured,
    Table,
    default_segment_bytes,
    default_table,
    overrides,
    variables,
)
from gradwire.collectives.plan.topology import Topology, host_id
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import DRAIN_S, MEET_S
from gradwire.collectives.run.plans import Plans, legal_algorithms
from gradwire.collectives.run.probe import Probe
from gradwire.collectives.shared_tensors import SharedTensors

_log = logging.getLogger("gradwire")


class Communicator(SharedTensors):
    """Collective operations among the ranks of a torch.distributed group, on a duplicate of that group.

    group: a ProcessGroup over gloo (CPU tensors; CUDA tensors travel through pinned memory) or NCCL (CUDA tensors); None is the
    world; or a Membership, of which no other Communicator is made. timeout_s: seconds that each operation may take from its
    start. segment_bytes: how large a piece of one rank's share is sent at once when a buffer is long; larger pieces cost less
    overhead, smaller ones overlap better; None chooses by topology. link: the name of what moves the bytes: 'auto', 'tcp',
    'process_group' or one that register_link was given; None is what COLLECTIVES_LINK says, else 'auto'. segment_bytes, link
    and the tables of COLLECTIVES_<VERB> must be the same on all ranks, or all get a ValueError that says what differs;
    the times need not be.

    stall_warning_s: after how long a wait the logger "gradwire" names, on every rank that waits, the ranks that are missing and
    the file and line where they are instead, and again each time the wait has become twice as long; None never does.
    stall_shutdown_s: a deadline for waits of operations alone, where timeout_s, which counts for making the Communicator too, is
    longer.

    By the link 'auto', CPU tensors travel through shared memory between ranks of one host, and over TCP between hosts; all else
    goes through the group's backend. Where memory cannot be shared (the log says why), or with COLLECTIVES_SHARED_MEMORY=0 on any
    rank, they travel over TCP, and where that is not possible either, through the group's backend.

    Making one is a collective call, and so is every verb: all ranks of the group call the same verbs in the same order. Threads
    of a rank may share one where it does not matter whose call comes first, because their calls are equal: otherwise ranks could
    take them in different orders, which is a Mismatch.
    Ranks in arguments (src, dst) count within the group. The verbs follow torch.distributed: results in place, None
    returned, or with async_op=True a Work; then the tensors belong to the operation until its wait() returns. It works on
    the memory that they had at the call, and a CPU tensor's storage can no longer be resized, as after Tensor.numpy().
    Operations run in the order issued. Tensors may be strided, empty or of inference mode, and an output may share
    memory with an input; a tensor without memory of its own (a DTensor, a FakeTensor, a nested one) is a TypeError.
    Dtypes are float16, bfloat16, float32, float64, int8, uint8, int16, int32, int64 and bool. `op` is 'sum', 'average',
    'min', 'max' or 'product', or torch's ReduceOp of that name; sums and products of integers wrap around, averages of
    them truncate toward zero; on bool, sum and max are "or", product and min are "and", average is a TypeError.
    `algorithm` is 'auto' or one of algorithms(verb), also with a segment, such as 'ring/1M'. The result of one algorithm in one
    world is the same on all ranks to the bit, every time.

    Raises, from every verb: ValueError, TypeError for a wrong argument, at the call, before anything is sent. From the verb or,
    when asynchronous, from wait: PeerLost, CollectiveTimeout or Mismatch when the operation cannot finish. The Communicator is
    broken from then on and says so at each further call, with an error of the same kind; but for a Mismatch that was found
    before any data moved, as it is where a call is new to all ranks, or where the splits of alltoall differ: then it goes on.
    Over NCCL alone a lost peer shows as CollectiveTimeout.
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
        rank = group.rank if isinstance(group, Membership) else group.rank()
        if segment_bytes is not None and not isinstance(segment_bytes, int):
            raise TypeError(f"segment_bytes={segment_bytes!r}: a whole number is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or (segment_bytes is not None and segment_bytes <= 0):
            raise ValueError(
                f"rank {rank}: timeout_s={timeout_s} and segment_bytes={segment_bytes} must be positive and finite"
            )
        for name, seconds in (("stall_warning_s", stall_warning_s), ("stall_shutdown_s", stall_shutdown_s)):
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"rank {rank}: {name}={seconds}: it must be positive and finite, or None for never")
        link = link or os.environ.get(LINK) or AUTO
        check_link(link, os.environ)  # what is wrong is found before anyone connects
        tuning = os.environ.get(TUNING) or "0"
        tuned = None if tuning in ("0", "1") else Path(tuning).read_text()
        membership = group if isinstance(group, Membership) else membership_of(group, host_id(), timeout_s)
        #: Which ranks of torch.distributed's default group these are, by their rank here; empty where they are none.
        self.global_ranks = membership.global_ranks
        self.topology = Topology(membership.rank, membership.hosts)
        settings = [f"segment_bytes={segment_bytes}"]
        settings += [f"{name}={os.environ[name]!r}" for name in variables(PLANNERS, os.environ).values()]
        if tuning != "0":
            settings.append(f"{TUNING}={tuning if tuned is None else hashlib.sha256(tuned.encode()).hexdigest()[:12]}")
        try:
            connection = connect(membership, link, ", ".join(settings), timeout_s)
        finally:
            if membership is not group:
                membership.close()
        try:
            transport = connection.transport
            quick = transport.quick
            may_cut = segment_bytes is None
            if segment_bytes is None:
                segment_bytes = default_segment_bytes(self.topology, quick=quick)
            algorithms = legal_algorithms(transport.algorithms)
            tables = overrides(algorithms, os.environ)  # a wrong one is a ValueError on all ranks alike
            by_hand = frozenset(tables)
            for collective in algorithms:
                tables.setdefault(
                    collective, default_table(collective, self.topology, transport.preferred, quick=quick)
                )
            plans = Plans(
                self.topology,
                algorithms,
                tables,
                segment_bytes,
                eager=transport.eager,
                share_alignment_bytes=transport.share_alignment_bytes,
            )
            patience_s = timeout_s if stall_shutdown_s is None else min(timeout_s, stall_shutdown_s)
            self._engine = Engine(transport, connection.watch, plans, patience_s, stall_warning_s)
            self._lanes = ""
            self.timeline: Timeline | None = None
            """Where operations are recorded at present."""
            self._tally: OperationTally | None = None
            if folder := report_folder(os.environ):
                self._tally = OperationTally(folder, self.global_rank, self.topology.size, self.routes)
                weakref.finalize(self, self._tally.write)
                self.record(None)
        except BaseException:  # or the others would believe that this rank takes part
            connection.close()
            raise
        plans.by_hand = by_hand
        self._machines = connection.machines
        self._may_cut = may_cut
        self._costs: Costs | None = None
        try:
            if tuned is not None:
                self._choose_by(self._read(tuned, tuning))
            elif tuning == "1" and transport.quick and len(self.topology.hosts) > 1:
                self.tune()
        except BaseException as error:
            close_all([self], error)
            raise

    def tune(self) -> Costs:
        """Measure what moving bytes costs among these ranks, in well under a second, and let 'auto' choose by it from now on. A
        collective call. With COLLECTIVES_TUNING=1 it is made at once where there are several hosts."""
        costs = self._probe().run()
        self._choose_by(costs)
        if self.topology.rank == 0:
            for line in costs.slow():
                _log.warning("gradwire: %s", line)
        return costs

    def measure_codecs(self, codecs: Iterable[str | Codec], device: str = "cpu") -> Costs:
        """Measure how quickly these ranks encode and decode on devices of a type, in well under a second, and their links unless
        that was done, for predict(). A collective call. What 'auto' chooses stays as it is.

        Raises ValueError where the group carries no CPU tensors, with which links are measured."""
        if self.control_device != "cpu":
            raise ValueError(
                f"rank {self.topology.rank}: links are measured with CPU tensors, which this group does not carry"
            )
        wanted = dict.fromkeys([*map(make_codec, codecs), Raw()])
        self._costs = self._probe().run(self._costs, list(wanted), device)
        return self._costs

    def predict(self, numel: int, itemsize: int = 4, codec: str | Codec | None = None) -> float:
        """Return how many seconds an allreduce by 'auto' takes, of so many numbers of itemsize bytes, or of float32 by a codec:
        by what was measured, the same on all ranks. Raises KeyError for what was not; see measure_codecs()."""
        if self._costs is None:
            raise KeyError("links were not measured")
        made = make_codec(codec) if codec is not None else None
        return self._engine.plans.predict(self._costs, numel, itemsize, made)

    def _probe(self) -> Probe:
        return Probe(self._engine, self.topology, self._machines)

    @property
    def measured(self) -> Measured | None:
        """What 'auto' chooses by where links were measured; None where they were not."""
        return self._engine.plans.measured

    @property
    def costs(self) -> Costs | None:
        """What moving bytes costs among these ranks, the same on all of them; None where nothing was measured."""
        return self._costs

    def _read(self, text: str, source: str) -> Costs:
        """Return the costs of a tuning file, of these ranks among those that it was made for."""
        costs = Costs.from_json(text, source)
        members = self.global_ranks
        if costs.size != self.size and members and max(members) < costs.size:
            costs = costs.among(members)
        return costs.checked(
            source, self.topology.hosts, [self._machines[host[0]].description for host in self.topology.hosts]
        )

    def _choose_by(self, costs: Costs) -> None:
        self._costs = costs
        plans = self._engine.plans
        speaks = self.topology.rank == 0
        algorithms = {verb: plans.algorithms(verb) for verb in plans.tables}
        plans.measured = Measured(
            costs, algorithms, plans.segment_bytes, plans.usual, may_cut=self._may_cut, speaks=speaks
        )

    @property
    def control_device(self) -> str:
        """Where small tensors of one's own are best: on the CPU, or where the group carries none of those, on the GPU."""
        return self._engine.control_device

    @property
    def routes(self) -> tuple[str, ...]:
        """What joins this rank with which others, in lines for people."""
        return self._engine.routes

    @property
    def timeout_s(self) -> float:
        """Seconds that each operation may take from its start; what is set counts for those that start later."""
        return self._engine.operations.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._engine.operations.timeout_s = seconds

    @property
    def segment_bytes(self) -> int:
        """How large a piece of one rank's share is sent at once when a buffer is long."""
        return self._engine.plans.segment_bytes

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the names that `algorithm=` takes for a verb, besides 'auto'. Raises ValueError for an unknown verb."""
        return self._engine.plans.algorithms(collective)

    @property
    def tables(self) -> dict[str, Table]:
        """What 'auto' runs by message size, for every verb: built in, or from COLLECTIVES_<VERB>."""
        return dict(self._engine.plans.tables)

    def chosen(self, collective: str, nbytes: int, codec: str | Codec | None = None) -> str:
        """Return what 'auto' runs for a message of nbytes (allgather, reduce_scatter: of all ranks together); with a codec, for
        an allreduce of nbytes of float32."""
        made = make_codec(codec) if codec is not None else None
        if made is None or made.name == "none":
            return self._engine.plans.choose(collective, "auto", nbytes)
        code_bytes = made.wire_bytes(nbytes // 4)
        return self._engine.plans.choose_for_codec(made, "auto", code_bytes, with_feedback=made.needs_feedback)

    def wire_bytes(
        self, collective: str, nbytes: int, algorithm: str = "auto", codec: str | Codec | None = None
    ) -> int | None:
        """Return how many bytes this rank sends for a message of nbytes in all, rooted collectives being rooted at rank 0.

        With a codec, the message is nbytes of float32, and what the ranks of a host send each other before codes are made does
        not count. None for the backend's own algorithm, and where nothing is sent because memory is shared. It is read off the
        plan.
        """
        made = make_codec(codec) if codec is not None else None
        return self._engine.plans.wire_bytes(collective, nbytes, algorithm, made)

    @property
    def absence(self) -> Absence:
        """This rank's way to take part with zeros in what the others call. See there."""
        return Absence(self, self._engine)

    def post(self, topic: str, record: Any) -> None:
        """Send all ranks a record, as of allgather_record, of which the latest of each topic counts. Returns at once, before the
        record has arrived, and is no operation: no other rank needs to take part."""
        self._engine.watch.post(topic, record)

    def posted(self, topic: str) -> dict[int, Any]:
        """Return the latest record that came from each rank, this one among them, by rank. Returns at once."""
        return dict(self._engine.watch.posts.get(topic, {}))

    def record(self, timeline: Timeline | None, name: str = "") -> None:
        """Record operations in a timeline from now on, in lanes that begin with this name; with None no more. On this rank
        only."""
        self._lanes = name
        self.timeline = timeline
        lane = self.lane("operations")
        if self._tally is not None:
            lane = Lane(deque(maxlen=0), 0) if lane is None else lane
            lane.listener = self._tally.add
        self._engine.record(lane)

    def lane(self, of: str) -> Lane | None:
        """Return the lane for what somebody does with this Communicator; None where nothing is recorded."""
        timeline = self.timeline
        return None if timeline is None else timeline.lane(f"{self._lanes}: {of}")

    @property
    def global_rank(self) -> int:
        """This process's rank in torch.distributed's default group; where these ranks are none of that, its rank here."""
        return self.global_ranks[self._engine.rank] if self.global_ranks else self._engine.rank

    def close(self) -> None:
        """Finish what was issued and give the group back. A collective call that waits at most some seconds for the others;
        after a failure it returns at once. Calling it again does nothing."""
        close_all([self])

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all([self], error)


def close_all(communicators: Iterable[Communicator], error: BaseException | None = None) -> None:
    """Close several Communicators as close() does one, in little more time than one takes: all say so before any waits. error:
    the exception by which this rank leaves, which the others' errors then name."""
    engines = [communicator._engine for communicator in communicators]
    engines = [engine for engine in engines if engine.operations.announce_close(error)]
    drain_by = time.monotonic() + DRAIN_S
    try:
        for engine in engines:
            engine.operations.drain(drain_by, engine.messages.drain)
    finally:
        part_by = time.monotonic() + MEET_S
        for engine in engines:
            engine.operations.part(part_by)
        for engine in engines:
            engine.join()

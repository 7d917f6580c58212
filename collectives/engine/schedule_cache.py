"""Chooses the algorithm of each call of one rank, and keeps the schedules and programs that were made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

from gradwire.collectives.compression.algorithms_for import algorithms_for, ride, shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.partition import Partition, effective, partition_of
from gradwire.collectives.schedules.algorithms import IN_HALVES, PLANNERS, RESERVED, ROOTED, hierarchical
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import LOOKAHEAD, Program
from gradwire.collectives.schedules.schedule import Place, Schedule
from gradwire.collectives.schedules.selection import Table, choose
from gradwire.collectives.schedules.spans import (
    Layout,
    Span,
    consecutive,
    segments_of_blocks,
    segments_of_buffer,
    split,
    split_aligned,
)
from gradwire.collectives.schedules.topology import Topology

_Planned = TypeVar("_Planned")
_Given = ParamSpec("_Given")

#: How many programs and partitions are kept, the most recently used ones.
_KEPT = 256


@dataclass(frozen=True)
class Shares:
    """The parts of a buffer that the ranks own between the halves of an allreduce.

    algorithm: of both halves; None if the allreduce that 'auto' runs has no halves. spans: the spans of each rank's part, by
    rank.
    """

    algorithm: str | None
    spans: tuple[Layout, ...]


def legal_algorithms(offered: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the names that `algorithm=` accepts for each collective, besides 'auto'. offered: the algorithms that a transport
    runs by itself.

    Raises ValueError if the transport offers an algorithm of an unknown collective, or one whose name is taken.
    """
    for collective, names in offered.items():
        taken = (*RESERVED, *PLANNERS[collective]) if collective in PLANNERS else names
        if doubled := [name for name in names if name in taken]:
            raise ValueError(f"a link cannot offer {collective} algorithms called {', '.join(doubled)}")
    return {collective: (*planners, *offered.get(collective, ())) for collective, planners in PLANNERS.items()}


def _once(
    plan: Callable[Concatenate[ScheduleCache, _Given], _Planned],
) -> Callable[Concatenate[ScheduleCache, _Given], _Planned]:
    """Cache the results of a method of ScheduleCache for its last _KEPT arguments."""
    name = plan.__name__

    @wraps(plan)
    def planned(cache: ScheduleCache, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Planned:
        key = (name, args, *kwargs.items())
        with cache._lock:
            kept = cache._planned
            if key not in kept:
                kept[key] = plan(cache, *args, **kwargs)
                if len(kept) > _KEPT:
                    kept.popitem(last=False)
            kept.move_to_end(key)
            found: _Planned = kept[key]  # type: ignore[assignment]  # as the name in the key says
            return found

    return planned


class ScheduleCache:
    """Chooses the algorithms of one Communicator, and makes and keeps its schedules and programs, for any tensors.

    topology: of the Communicator's ranks. algorithms: the algorithm names of each collective. tables: by verb, the table from
    which 'auto' chooses. After choose_by(), 'auto' chooses by a function instead, except for the verbs in by_hand.
    preferred_on_gpu: see Transport.
    segment_bytes: see Communicator. eager, share_alignment_bytes: see Transport. grouped, in all methods: whether both ends of
    a message must be posted together.
    """

    def __init__(
        self,
        topology: Topology,
        algorithms: Mapping[str, tuple[str, ...]],
        tables: dict[str, Table],
        segment_bytes: int,
        *,
        eager: bool = False,
        preferred_on_gpu: Mapping[str, str] = MappingProxyType({}),
        share_alignment_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._eager = eager
        self._preferred_on_gpu = preferred_on_gpu
        self._share_alignment_bytes = share_alignment_bytes
        self.topology = topology
        self.tables = tables
        self._chooser: Callable[[str, int], str] | None = None  # before choose_by()
        self.by_hand: frozenset[str] = frozenset()
        self._place = Place(topology.rank, topology.size, 0, topology.hosts)
        self._algorithms = algorithms
        self.segment_bytes = segment_bytes
        self._planned: OrderedDict[tuple[object, ...], object] = OrderedDict()
        self._lock = threading.RLock()  # reentrant: a program requires a schedule

    def choose_by(self, chooser: Callable[[str, int], str], place: Place) -> None:
        """Let 'auto' choose by a function of the collective and the bytes from now on, the same on all ranks. place: this rank's
        Place, which says which ranks are on slow links."""
        with self._lock:
            self._chooser = chooser
            self._place = place
            self._planned.clear()  # schedules may depend on which links are slow

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the names of a collective's algorithms. Raises ValueError for an unknown collective."""
        if collective not in self._algorithms:
            raise ValueError(f"no collective is called {collective!r}; known are {', '.join(self._algorithms)}")
        return self._algorithms[collective]

    def choose(self, collective: str, algorithm: str, nbytes: int, *, on_gpu: bool) -> str:
        """Return the algorithm, with 'auto' resolved. on_gpu: whether the tensors are CUDA tensors. Raises ValueError for an
        unknown collective or algorithm."""
        names = self.algorithms(collective)
        chosen = self._auto(collective, nbytes, on_gpu=on_gpu) if algorithm == "auto" else algorithm
        if chosen not in names:
            allowed = ", ".join(("auto", *names))
            raise ValueError(
                f"rank {self._place.rank}: {collective} has no algorithm {algorithm!r}; allowed are {allowed}"
            )
        if chosen in PLANNERS[collective]:
            self._schedule(collective, chosen)  # so that the planner raises its errors before anything is sent
        return chosen

    def usual(self, collective: str, nbytes: int) -> str:
        """Return the algorithm that the table alone chooses."""
        return choose(self.tables[collective], nbytes)

    def _auto(self, collective: str, nbytes: int, *, on_gpu: bool) -> str:
        if on_gpu and collective in self._preferred_on_gpu and collective not in self.by_hand:
            return self._preferred_on_gpu[collective]
        if self._chooser is None or collective in self.by_hand:
            return self.usual(collective, nbytes)
        with self._lock:
            return self._chooser(collective, nbytes)

    def choose_for_codec(self, codec: Codec, algorithm: str, nbytes: int, *, with_feedback: bool, on_gpu: bool) -> str:
        """Return the algorithm for an allreduce of codes of nbytes. Raises ValueError, which lists the allowed algorithms, if
        the codec does not support `algorithm`."""
        names = algorithms_for(codec, self.algorithms("allreduce"), with_feedback=with_feedback)
        if algorithm == "auto" and not codec.summable:
            return names[0]
        if algorithm not in ("auto", *names):
            corrected = " with error feedback" if with_feedback else ""
            raise ValueError(
                f"rank {self._place.rank}: codec {codec.name!r}{corrected} does not support the algorithm {algorithm!r}; allowed "
                f"are {', '.join(('auto', *names))}"
            )
        return algorithm if algorithm == names[0] else self.choose("allreduce", algorithm, nbytes, on_gpu=on_gpu)

    def choose_for_parts(
        self, collective: str, algorithm: str, lengths: Sequence[int], element_size: int, *, on_gpu: bool
    ) -> str:
        """Return the algorithm for a message of one part per rank. A link's own algorithm needs equal parts, except the one that
        it prefers for CUDA tensors; for unequal ones 'auto' uses rsag."""
        chosen = self.choose(collective, algorithm, sum(lengths) * element_size, on_gpu=on_gpu)
        takes_any = on_gpu and chosen == self._preferred_on_gpu.get(collective)
        if chosen not in PLANNERS[collective] and len(set(lengths)) > 1 and not takes_any:
            if algorithm != "auto":
                raise ValueError(
                    f"rank {self._place.rank}: {collective} of unequal parts {list(lengths)} has no algorithm {chosen!r}"
                )
            return "rsag"
        return chosen

    def wire_bytes(self, collective: str, nbytes: int, algorithm: str, codec: Codec | None) -> int | None:
        """See Communicator.wire_bytes."""
        if codec is None:
            name = self.choose(collective, algorithm, nbytes, on_gpu=False)
        else:
            numel, nbytes = nbytes // 4, codec.wire_bytes(nbytes // 4)
            name = self.choose_for_codec(codec, algorithm, nbytes, with_feedback=False, on_gpu=False)
            if name == shot_of(codec) or not codec.summable:
                partition = self.partition(codec, numel, name)
                used = effective(codec, partition)
                if not partition.group:
                    return 0
                program = self.of_codes(codec, numel, name, used.wire_bytes(partition.longest), grouped=False)
                return program.sent_bytes(used.wire_bytes)
        if name not in PLANNERS[collective]:
            return None
        element_size = 4 if nbytes % 4 == 0 else 1
        plain = self.of_buffer(collective, name, 0, nbytes // element_size, element_size, grouped=False)
        return plain.sent_bytes(lambda length: length * element_size)

    @_once
    def of_buffer(
        self, collective: str, algorithm: str, root: int, where: int | Layout, element_size: int, *, grouped: bool
    ) -> Program:
        """Return the program for one buffer. where: the number of elements, if the algorithm may divide the buffer freely; else
        the layout in which block r belongs to rank r."""
        schedule = self._schedule(collective, algorithm, root)
        segment = self._segment(element_size)
        if isinstance(where, int):
            segments = segments_of_buffer(where, schedule.blocks, segment)
        else:
            segments = segments_of_blocks(where, segment)
        return self._program(collective, schedule, segments, grouped=grouped)

    def shares(self, numel: int, element_size: int, *, on_gpu: bool = False) -> Shares:
        """Return the parts of a buffer that the ranks own between the halves of the allreduce that 'auto' would run. on_gpu:
        whether it is a CUDA tensor.

        If a planner plans that allreduce, the parts are the blocks of its segments, since the order of the additions depends on
        the block. If the link runs that allreduce, the parts are near-equal and aligned as the link requires. If the link
        runs that allreduce because it is one of a CUDA tensor, the parts are equal except the last one, which may be longer. If
        that allreduce has no halves, the parts are near-equal.
        """
        size = self._place.size
        algorithm = self.choose("allreduce", "auto", numel * element_size, on_gpu=on_gpu)
        if on_gpu and algorithm == self._preferred_on_gpu.get("allreduce"):
            lengths = [numel // size] * (size - 1)
            return Shares(algorithm, tuple((span,) for span in consecutive([*lengths, numel - sum(lengths)])))
        if algorithm in self._share_alignment_bytes:
            alignment = max(1, self._share_alignment_bytes[algorithm] // element_size)
            aligned = split_aligned(Span(0, numel), size, alignment)
            return Shares(algorithm, tuple((span,) for span in aligned))
        if algorithm not in IN_HALVES:
            return Shares(None, tuple((span,) for span in split(Span(0, numel), size)))
        segments = segments_of_buffer(numel, size, self._segment(element_size))
        return Shares(algorithm, tuple(tuple(segment[rank] for segment in segments) for rank in range(size)))

    @_once
    def of_move(
        self, collective: str, algorithm: str, root: int, sources: Layout, layout: Layout, *, grouped: bool
    ) -> Program:
        """Return a program that moves blocks from their places in one buffer (sources) to those in another (layout)."""
        schedule = self._schedule(collective, algorithm, root)
        return self._program(collective, schedule, [layout], [sources], grouped=grouped)

    @_once
    def inside_hosts(self, which: int, parts: Layout, element_size: int, *, grouped: bool) -> Program:
        """Return the program for the first (0) or last (1) round of the hierarchical algorithm. parts: the layout of its
        blocks."""
        steps = hierarchical.inside(self._place)[which]
        schedule = Schedule(self._place.rank, self._place.size, len(parts), (steps,))
        segments = segments_of_blocks(parts, self._segment(element_size))
        return self._program("allreduce", schedule, segments, grouped=grouped)

    def partition(self, codec: Codec, numel: int, algorithm: str | None = None, device_type: str = "cpu") -> Partition:
        """Return the Partition of a buffer: which rank encodes which part. algorithm: None means shot_of(codec)."""
        return self._partition(codec, numel, algorithm or shot_of(codec), device_type)

    @_once
    def _partition(self, codec: Codec, numel: int, chosen: str, device_type: str) -> Partition:
        hosts = self.topology.hosts if ride(chosen).by_hosts else (tuple(range(self._place.size)),)
        planner = partial(self._schedule_of_codes, chosen)
        return partition_of(codec, numel, self._place.rank, hosts, self.segment_bytes, planner, device_type)

    @_once
    def of_codes(
        self, codec: Codec, numel: int, algorithm: str, code_bytes: int, device_type: str = "cpu", *, grouped: bool
    ) -> CodedProgram:
        """Return the program for an allreduce of codes. code_bytes: of the code of the partition's longest chunk in the
        step."""
        partition = self.partition(codec, numel, algorithm, device_type)
        group = partition.group
        schedule = self._schedule_of_codes(algorithm, Place(group.index(self._place.rank), len(group)))
        on_gpu = device_type != "cpu"
        return CodedProgram(
            schedule,
            partition.chunks,
            code_bytes,
            group,
            encodes_sums=ride(algorithm).encodes_sums,
            lookahead=0 if grouped else 1,
            sums_apart=on_gpu,
            codes_apart=on_gpu and not grouped,
        )

    def _schedule_of_codes(self, algorithm: str, place: Place) -> Schedule:
        """Return a rank's schedule in the group that exchanges codes: one rank of each host, or all ranks."""
        rides = ride(algorithm)
        hosts = tuple((rank,) for rank in range(place.size)) if rides.by_hosts else self.topology.hosts
        return rides.planner(replace(place, hosts=hosts))

    def _program(
        self,
        collective: str,
        schedule: Schedule,
        segments: Sequence[Layout],
        sources: Sequence[Layout] | None = None,
        *,
        grouped: bool,
    ) -> Program:
        lookahead = 0 if grouped else LOOKAHEAD
        answered = self._eager and not grouped and collective in ROOTED
        return Program(schedule, segments, sources, lookahead, answered=answered)

    def _segment(self, element_size: int) -> int:
        """Return the maximum number of elements in a segment."""
        return max(1, self.segment_bytes // element_size)

    @_once
    def _schedule(self, collective: str, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's schedule."""
        return PLANNERS[collective][algorithm](replace(self._place, root=root))

"""Draw what a soak does: operations of every kind, the same on all ranks, from a seed and an index alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import torch

from gradwire.collectives.compression.algorithms_for import shot_of
from tests.ranks.exact import DTYPES, FLOATING, OPS, ops
from tests.ranks.test_compressed import COMPRESSING

SESSION_OPERATIONS = 40  # of one Communicator
SEGMENTS_BYTES = (None, None, 200, 4096, 64 << 10)
USUAL_SEGMENT_BYTES = 256 << 10  # near whose borders sizes are drawn where a Communicator chooses for itself
LARGEST_BYTES = 4 << 20
MOST_SEGMENTS = 30  # of a rank's share: a session of nothing but tiny messages would take minutes
CODEC_NUMELS = 30_000
PENDING = 6  # asynchronous operations that wait at a time
LAYOUTS = ("contiguous", "contiguous", "every second", "shifted", "columns", "shared")
SCALES = ((1.0, 1.0), (1.0, 1.0), (0.5, 1.0), (1.0, 2.0), (0.5, 4.0))
OBJECT_VERBS = ("allgather_object", "broadcast_object", "gather_object", "scatter_object")


@dataclass(frozen=True)
class Operation:
    """A call of a Communicator's verb, as all ranks make it.

    verb: its name, or 'compressed' for allreduce(compression=). numel: elements of a rank's tensor, or of each part where a verb
    takes one per rank; parts: of each rank's, where they differ. counts: rows from rank i to rank j, of alltoall with splits.
    together: the tensors of grouped_allreduce. values: 'exact' numbers, or 'any': not all of them finite. steps: with error
    feedback from one to the next, where there are several. repeats: how often the same tensor is reduced.
    inside: whether a function that is called after another operation issues it. waits: earlier operations of the session, by
    position, that are waited for once this one has been issued.
    """

    verb: str
    algorithm: str = "auto"
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    numel: int = 0
    root: int = 0
    layout: str = "contiguous"
    parts: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    together: tuple[tuple[torch.dtype, int], ...] = ()
    scales: tuple[float, float] = (1.0, 1.0)
    values: str = "exact"
    codec: str = ""
    steps: int = 1
    repeats: int = 1
    asynchronous: bool = False
    inside: bool = False
    waits: tuple[int, ...] = ()

    def __str__(self) -> str:
        unusual = [f for f in fields(self) if f.name != "verb" and getattr(self, f.name) != f.default]
        return f"{self.verb}({', '.join(f'{f.name}={getattr(self, f.name)}' for f in unusual)})"


@dataclass(frozen=True)
class Session:
    """A Communicator and what is done with it. members: ranks of the world that take part. host_of: a letter for the host
    of each of them; '' for where they are."""

    seed: int
    transport: str
    index: int
    members: tuple[int, ...]
    host_of: str
    segment_bytes: int | None

    @property
    def size(self) -> int:
        return len(self.members)

    def random(self, what: str) -> Random:
        """A generator for one purpose, the same on all ranks."""
        return Random(f"{self.seed}/{self.transport}/{self.index}/{what}")


def draw_session(seed: int, transport: str, index: int, size: int, *, pretend_hosts: bool) -> Session:
    """pretend_hosts: whether ranks may be told that they are on other hosts than they are."""
    random = Random(f"{seed}/{transport}/{index}/session")
    members = tuple(range(size))
    if size > 1 and random.random() < 0.15:
        members = tuple(sorted(random.sample(members, random.randint(1, size - 1))))
    host_of = ""
    if pretend_hosts and random.random() < 0.3:
        host_of = "".join(random.choice("ab") for _ in members)
    return Session(seed, transport, index, members, host_of, random.choice(SEGMENTS_BYTES))


def draw_operations(session: Session, count: int, algorithms: Mapping[str, tuple[str, ...]]) -> list[Operation]:
    """algorithms: the names that a Communicator has for each collective. Fewer operations are the first of more."""
    random = session.random("operations")
    drawn: list[Operation] = []
    pending: list[int] = []
    for position in range(SESSION_OPERATIONS):
        verb = random.choices(list(_DRAW), [weight for weight, _ in _DRAW.values()])[0]
        operation = _DRAW[verb][1](_Draw(random, session, algorithms))
        asynchronous = operation.verb not in OBJECT_VERBS and random.random() < 0.5
        if asynchronous:
            pending.append(position)
        waits: list[int] = []
        if pending and (len(pending) == PENDING or random.random() < 0.25):
            waits = random.sample(pending, random.randint(1, len(pending)))
            pending = [waiting for waiting in pending if waiting not in waits]
        inside = random.random() < 0.15
        drawn.append(replace(operation, asynchronous=asynchronous, inside=inside, waits=tuple(waits)))
    return drawn[:count]


class _Draw:
    """The choices of which the fields of an operation are made."""

    def __init__(self, random: Random, session: Session, algorithms: Mapping[str, tuple[str, ...]]) -> None:
        self.random, self.size, self.algorithms = random, session.size, algorithms
        self.segment_bytes = session.segment_bytes or USUAL_SEGMENT_BYTES

    def numel(self, dtype: torch.dtype, tensors: int = 1) -> int:
        """Of each of so many tensors that travel together: mostly few, mostly near where something changes."""
        segment = max(1, self.segment_bytes // dtype.itemsize)
        most_bytes = min(LARGEST_BYTES, MOST_SEGMENTS * self.size * self.segment_bytes)
        most = most_bytes // dtype.itemsize // tensors
        kind = self.random.random()
        if kind < 0.3:
            numel = self.random.choice((0, 1, self.size - 1, self.size, self.size + 1))
        elif kind < 0.45:
            numel = segment * self.random.choice((1, 2, self.size, 2 * self.size)) + self.random.choice((-1, 0, 1))
        elif kind < 0.8:
            numel = self.random.randrange(5000)
        elif kind < 0.97:
            numel = self.random.randrange(100_000)
        else:
            numel = self.random.randrange(LARGEST_BYTES // dtype.itemsize)
        return min(numel, most)

    def operation(
        self, verb: str, dtypes: Sequence[torch.dtype] = DTYPES, *, tensors: int = 1, reduces: bool = False
    ) -> Operation:
        """Draw what every verb has. tensors: of the drawn length that a rank holds; reduces: whether the verb has an op."""
        dtype = self.random.choice(dtypes)
        return Operation(
            verb,
            algorithm=self.random.choice(("auto", *self.algorithms[verb])),
            dtype=dtype,
            op=self.random.choice(ops(dtype)) if reduces else "sum",
            numel=self.numel(dtype, tensors),
            root=self.random.randrange(self.size),
            layout=self.random.choice(LAYOUTS),
        )


def _allreduce(draw: _Draw) -> Operation:
    if draw.random.random() < 0.2:
        op = draw.random.choice(("sum", "average", "min", "max"))
        return replace(draw.operation("allreduce", FLOATING), op=op, values="any")
    drawn = draw.operation("allreduce", reduces=True)
    scalable = drawn.dtype in FLOATING and drawn.op != "product"
    scales = draw.random.choice(SCALES) if scalable else (1.0, 1.0)
    return replace(drawn, scales=scales, repeats=draw.random.choice((1, 1, 1, 3)))


def _grouped_allreduce(draw: _Draw) -> Operation:
    dtypes = draw.random.choices(DTYPES, k=draw.random.randint(1, 6))
    together = tuple((dtype, draw.numel(dtype, len(dtypes))) for dtype in dtypes)
    op = draw.random.choice([op for op in OPS if all(op in ops(dtype) for dtype in dtypes)])
    drawn = draw.operation("allreduce", [torch.float32])
    return replace(drawn, verb="grouped_allreduce", op=op, numel=0, together=together)


def _compressed(draw: _Draw) -> Operation:
    codec = draw.random.choice(list(COMPRESSING))
    shot, summable = shot_of(COMPRESSING[codec]), COMPRESSING[codec].summable
    algorithm = draw.random.choice(["auto", shot, *(draw.algorithms["allreduce"] if summable else ())])
    steps = draw.random.choice((1, 1, 3)) if algorithm == shot else 1
    numel = min(draw.numel(torch.float32), CODEC_NUMELS)
    op = draw.random.choice(("sum", "average"))
    return Operation("compressed", algorithm=algorithm, codec=codec, op=op, numel=numel, steps=steps)


def _in_parts(draw: _Draw, verb: str, *, reduces: bool = False) -> Operation:
    """One tensor of equal parts, a list of equal ones, or a list of which all may differ; not with the backend's own."""
    drawn, kind = draw.operation(verb, tensors=draw.size, reduces=reduces), draw.random.random()
    parts: tuple[int, ...] = ()
    if kind < 0.2:
        parts = (drawn.numel,) * draw.size
    elif kind < 0.5 and drawn.algorithm != "native":
        parts = tuple(draw.numel(drawn.dtype, draw.size) for _ in range(draw.size))
    return replace(drawn, parts=parts)


def _alltoall(draw: _Draw) -> Operation:
    drawn = draw.operation("alltoall", tensors=draw.size)
    if draw.random.random() < 0.5:
        return drawn
    most = draw.random.choice((1, 3, 50, 2000))
    counts = tuple(tuple(draw.random.randint(0, most) for _ in range(draw.size)) for _ in range(draw.size))
    return replace(drawn, numel=draw.random.randint(1, 3), counts=counts)


#: How often each is drawn, relative to the others, and how.
_DRAW: dict[str, tuple[int, Callable[[_Draw], Operation]]] = {
    "allreduce": (8, _allreduce),
    "grouped_allreduce": (3, _grouped_allreduce),
    "compressed": (3, _compressed),
    "reduce_scatter": (3, lambda draw: _in_parts(draw, "reduce_scatter", reduces=True)),
    "reduce": (2, lambda draw: draw.operation("reduce", reduces=True)),
    "allgather": (3, lambda draw: _in_parts(draw, "allgather")),
    "broadcast": (2, lambda draw: draw.operation("broadcast")),
    "gather": (2, lambda draw: draw.operation("gather", tensors=draw.size)),
    "scatter": (2, lambda draw: draw.operation("scatter", tensors=draw.size)),
    "alltoall": (3, _alltoall),
    "barrier": (1, lambda draw: draw.operation("barrier")),
    "object": (1, lambda draw: Operation(draw.random.choice(OBJECT_VERBS), root=draw.random.randrange(draw.size))),
}

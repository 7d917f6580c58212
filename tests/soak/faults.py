"""Draw what befalls a rank: how it fails, and when; from a seed and an index alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from collectives.plan.algorithms import PLANNERS
from tests.soak.operations import SESSION_OPERATIONS, Operation, Session

KILLED, STOPPED, RAISES, EXITS, CLOSES, DISAGREES = KINDS = (
    "killed",
    "stopped",
    "raises",
    "exits",
    "closes its Communicators",
    "calls something else",
)
ENDS = (KILLED, RAISES, EXITS)  # the faults after which the process is gone
EXIT_CODES = {KILLED: -9, RAISES: 1, EXITS: 3}
BEFORE, BETWEEN, MIDDLE, IDLE = PHASES = ("before the first", "between two", "in the middle", "while idle")

TIMEOUT_S = 3.0  # of an operation that may run into it
FAR_S = 20.0  # of one that must not
IDLE_S = 0.3
BURST, LONGEST_IN_BURST_S = 6, 0.05
LARGE_NUMELS = (1 << 16, 1 << 18, 1 << 20)
LATEST_POSITION = SESSION_OPERATIONS // 4  # so that most of the session is still to come


@dataclass(frozen=True)
class Fault:
    """A world of `size` ranks, in which rank `victim` fails as `kind` says.

    position: of the operation of the session before which it does. phase: what goes on then: large asynchronous operations, or
    nothing for a while. after_s: the time for which that has gone on. communicators: of every rank; the first is used.
    in_a_block: whether the victim closes them on its way out. survivors_close: whether the others close theirs after the
    error. store_of_rank_0: whether the store of torch.distributed ends with rank 0, as between hosts it does.
    """

    seed: int
    transport: str
    index: int
    size: int
    hosts: int
    host_of: str
    victim: int
    kind: str
    phase: str
    position: int
    after_s: float
    large: Operation
    segment_bytes: int | None
    communicators: int
    in_a_block: bool
    survivors_close: bool
    store_of_rank_0: bool

    @property
    def session(self) -> Session:
        """The operations before and after it."""
        members = tuple(range(self.size))
        return Session(self.seed, f"{self.transport}/fault", self.index, members, self.host_of, self.segment_bytes)

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S if self.kind in (STOPPED, DISAGREES) else FAR_S

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank != self.victim)

    @property
    def reporting(self) -> tuple[int, ...]:
        """The ranks that live on to say what they saw."""
        return tuple(range(self.size)) if self.kind in (CLOSES, DISAGREES) else self.survivors

    def __str__(self) -> str:
        where = f"{self.phase} (operation {self.position}, after {1000 * self.after_s:.0f} ms)"
        details = [f"segment_bytes={self.segment_bytes}", f"Communicators: {self.communicators}"]
        details += [f"hosts {self.host_of}"] if self.host_of else []
        details += [f"large: {self.large}"] if self.phase == MIDDLE else []
        details += ["closing on its way out"] if self.in_a_block and self.kind in (RAISES, EXITS) else []
        details += ["survivors close"] if self.survivors_close else []
        details += ["rank 0 holds the store"] if self.store_of_rank_0 else []
        return f"rank {self.victim} of {self.size} {self.kind} {where}; {', '.join(details)}"


def draw_fault(seed: int, transport: str, index: int, *, on_hosts: bool) -> Fault:
    """on_hosts: whether the ranks live on simulated hosts; then their store is rank 0's, which all can reach."""
    random = Random(f"{seed}/{transport}/fault/{index}")
    size = random.randint(2, 4)
    phase = random.choice(PHASES)
    named = not on_hosts and random.random() < 0.3
    return Fault(
        seed=seed,
        transport=transport,
        index=index,
        size=size,
        hosts=random.randint(2, size),
        host_of="".join(random.choice("ab") for _ in range(size)) if named else "",
        victim=random.randrange(size),
        kind=random.choice(KINDS),
        phase=phase,
        position=0 if phase == BEFORE else random.randint(1, LATEST_POSITION),
        after_s=random.random() * {MIDDLE: LONGEST_IN_BURST_S, IDLE: IDLE_S}.get(phase, 0.0),
        large=Operation(
            "allreduce",
            random.choice(("auto", "auto", "native", *PLANNERS["allreduce"])),
            numel=random.choice(LARGE_NUMELS),
            asynchronous=True,
        ),
        segment_bytes=random.choice((None, None, 64 << 10)),
        communicators=random.randint(1, 3),
        in_a_block=random.random() < 0.5,
        survivors_close=random.random() < 0.5,
        store_of_rank_0=on_hosts or random.random() < 0.5,
    )

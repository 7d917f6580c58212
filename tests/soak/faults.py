"""Draw what befalls a rank: how it fails, and when; from a seed and an index alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from gradwire.bench.hosts import ranks_per_host
from gradwire.collectives.schedules.algorithms import PLANNERS
from tests.soak.network import CUTS, CUTS_ONE_WAY
from tests.soak.operations import SESSION_OPERATIONS, Operation, Session

KILLED, STOPPED, RAISES, EXITS, CLOSES, DISAGREES = KINDS = (
    "killed",
    "stopped",
    "raises",
    "exits",
    "closes its Communicators",
    "calls something else",
)
CUT, CUT_ONE_WAY, FLAPS, STRANGERS = NETWORK_KINDS = (
    "is cut off",
    "is cut off one way",
    "is cut off for a while",
    "has strangers at all ports",
)  # of the victim's host; they need hosts with a network between them
SILENT = (CUT, CUT_ONE_WAY)
HARMLESS = (FLAPS, STRANGERS)  # what a world must live through
WAYS = {CUT: tuple(CUTS), CUT_ONE_WAY: tuple(CUTS_ONE_WAY), FLAPS: tuple(CUTS)}
ENDS = (KILLED, RAISES, EXITS)  # the faults after which the process is gone
EXIT_CODES = {KILLED: -9, RAISES: 1, EXITS: 3}
BEFORE, BETWEEN, MIDDLE, IDLE = PHASES = ("before the first", "between two", "in the middle", "while idle")

TIMEOUT_S = 3.0  # of an operation that may run into it
FAR_S = 20.0  # of one that must not
SILENCE_S = 15.0  # after which a host that answers nothing is taken for gone
OUTAGES_S = (1.5, 2.5)
IDLE_S = 0.3
BURST, LONGEST_IN_BURST_S = 6, 0.05
LARGE_NUMELS = (1 << 16, 1 << 18, 1 << 20)
LATEST_POSITION = SESSION_OPERATIONS // 4  # so that most of the session is still to come


@dataclass(frozen=True)
class FaultOfOne:
    """A world of `size` ranks, in which rank `victim` fails as `kind` says; the index-th that is drawn for a transport."""

    seed: int
    transport: str
    index: int
    size: int
    victim: int
    kind: str

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.everyone if rank != self.victim)

    @property
    def reporting(self) -> tuple[int, ...]:
        """The ranks that live on to say what they saw."""
        return self.survivors

    @property
    def exit_code(self) -> int:
        """With which the victim leaves."""
        return EXIT_CODES.get(self.kind, 0)

    @property
    def is_outlived(self) -> bool:
        """Whether the others are to go on."""
        return self.kind in HARMLESS


@dataclass(frozen=True)
class Fault(FaultOfOne):
    """A fault of ranks that exchange.

    position: of the operation of the session before which it does. phase: what goes on then: large asynchronous operations, or
    nothing for a while. after_s: the time for which that has gone on. communicators: of every rank; the first is used.
    in_a_block: whether the victim closes them on its way out. survivors_close: whether the others close theirs after the
    error. store_of_rank_0: whether the store of torch.distributed ends with rank 0, as between hosts it does. on_hosts: whether
    the ranks live on as many simulated hosts. patient: whether operations wait longer than a silent host is taken for alive.
    way: in which the victim's host is cut off; outages, outage_s: how often, and for how long, where the link comes back.
    """

    hosts: int
    host_of: str
    phase: str
    position: int
    after_s: float
    large: Operation
    segment_bytes: int | None
    communicators: int
    in_a_block: bool
    survivors_close: bool
    store_of_rank_0: bool
    on_hosts: bool
    patient: bool
    way: str
    outages: int
    outage_s: float

    @property
    def session(self) -> Session:
        """The operations before and after it."""
        return Session(
            self.seed, f"{self.transport}/fault", self.index, self.everyone, self.host_of, self.segment_bytes
        )

    @property
    def timeout_s(self) -> float:
        hasty = self.kind in (STOPPED, DISAGREES) or (self.kind in SILENT and not self.patient)
        return TIMEOUT_S if hasty else FAR_S

    @property
    def silence_s(self) -> float:
        """For how long a rank that fails so may be taken for alive, beyond the deadline of an operation."""
        return SILENCE_S if self.kind in SILENT and self.patient else 0.0

    @property
    def reporting(self) -> tuple[int, ...]:
        return self.everyone if self.kind in (CLOSES, DISAGREES, *NETWORK_KINDS) else self.survivors

    @property
    def hosts_of_ranks(self) -> list[int]:
        """The simulated host of each rank."""
        spread = ranks_per_host(self.size, self.hosts)
        return [host for host, ranks in enumerate(spread) for _ in range(ranks)]

    def culprits(self, rank: int) -> set[int]:
        """Whom a rank may name: the victim, or all that are on the other side of a cut."""
        if self.kind not in SILENT:
            return {self.victim}
        hosts = self.hosts_of_ranks
        cut = hosts[self.victim]
        return {other for other in self.everyone if (hosts[other] == cut) != (hosts[rank] == cut)}

    def __str__(self) -> str:
        where = f"{self.phase} (operation {self.position}, after {1000 * self.after_s:.0f} ms)"
        details = {
            f"segment_bytes={self.segment_bytes}, Communicators: {self.communicators}": True,
            f"hosts {self.host_of}": self.host_of,
            f"large: {self.large}": self.phase == MIDDLE,
            "closing on its way out": self.in_a_block and self.kind in (RAISES, EXITS),
            "survivors close": self.survivors_close,
            "rank 0 holds the store": self.store_of_rank_0,
            f"hosts of ranks: {self.hosts_of_ranks}": self.on_hosts,
            self.way: self.way,
            f"timeout {self.timeout_s:g} s": self.kind in SILENT,
            f"{self.outages} times {self.outage_s:.1f} s": self.kind == FLAPS,
        }
        said = ", ".join(detail for detail, is_so in details.items() if is_so)
        return f"rank {self.victim} of {self.size} {self.kind} {where}; {said}"


def draw_fault(seed: int, transport: str, index: int, *, on_hosts: bool) -> Fault:
    """on_hosts: whether the ranks live on simulated hosts; then their store is rank 0's, which all can reach, and there is a
    network that can fail."""
    random = Random(f"{seed}/{transport}/fault/{index}")
    size = random.randint(2, 4)
    phase = random.choice(PHASES)
    kind = random.choice((*KINDS, *NETWORK_KINDS) if on_hosts else KINDS)
    named = not on_hosts and random.random() < 0.3
    return Fault(
        seed=seed,
        transport=transport,
        index=index,
        size=size,
        hosts=random.randint(2, size),
        host_of="".join(random.choice("ab") for _ in range(size)) if named else "",
        victim=random.randrange(size),
        kind=kind,
        phase=phase,
        position=0 if phase == BEFORE else random.randint(1, LATEST_POSITION),
        after_s=random.random() * {MIDDLE: LONGEST_IN_BURST_S, IDLE: IDLE_S}.get(phase, 0.0),
        large=Operation(
            "allreduce",
            random.choice(("auto", "auto", "native", *PLANNERS["allreduce"])),
            numel=random.choice(LARGE_NUMELS),
            asynchronous=True,
            inside=random.random() < 0.25,
        ),
        segment_bytes=random.choice((None, None, 64 << 10)),
        communicators=random.randint(1, 3),
        in_a_block=random.random() < 0.5,
        survivors_close=random.random() < 0.5,
        store_of_rank_0=on_hosts or random.random() < 0.5,
        on_hosts=on_hosts,
        patient=random.random() < 0.3,
        way=random.choice(WAYS.get(kind, ("",))),
        outages=random.randint(1, 2),
        outage_s=random.uniform(*OUTAGES_S),
    )

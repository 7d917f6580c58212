"""What parameter servers tell of the contributions of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.trainer.servers.aggregator import Counts


@dataclass(frozen=True)
class ServerReport:
    """Says what became of all contributions, counted at every server: a rank's step is one contribution to each.

    servers: how many there are. updates: all that they have made. staleness: how many contributions came how many versions
    late; those of 0 were in time. contributions: how many came from each rank. late: those that were. dropped: those of
    them that were not used. lead: how many steps a rank that went on was ahead of the slowest, at most. lost: the ranks
    that are left out.
    """

    servers: int
    updates: int
    staleness: dict[int, int]
    contributions: dict[int, int]
    late: int
    dropped: int
    lead: int
    lost: tuple[int, ...]

    def __str__(self) -> str:
        ages = ", ".join(f"{count} of age {age}" for age, count in self.staleness.items())
        ranks = ", ".join(f"{count} from rank {rank}" for rank, count in self.contributions.items())
        left_out = f"; without {', '.join(f'rank {rank}' for rank in self.lost)}" if self.lost else ""
        return (
            f"{self.updates} updates at {self.servers} servers, of contributions {ranks}; {ages}; {self.late} late, "
            f"{self.dropped} dropped{left_out}"
        )

    @staticmethod
    def of(counts: Sequence[Counts]) -> ServerReport:
        """Return the report of what each server has counted."""
        total = Counts.total(counts)
        return ServerReport(
            servers=len(counts),
            updates=total.updates,
            staleness=total.staleness,
            contributions=total.contributions,
            late=total.late,
            dropped=total.dropped,
            lead=total.lead,
            lost=total.lost,
        )

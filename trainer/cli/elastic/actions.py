"""What the policy of an elastic job can decide, and the launcher does."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.trainer.world.epochs import Epoch


@dataclass(frozen=True)
class Start:
    """Start a worker on a host, in a slot that no other running one has."""

    worker: int
    node: int
    slot: int


@dataclass(frozen=True)
class Kill:
    """Kill a worker, which counts as lost from now on."""

    worker: int


@dataclass(frozen=True)
class Stop:
    """Let a worker end that is not needed any more."""

    worker: int


@dataclass(frozen=True)
class Release:
    """Let the agent of a host end that has no worker any more, and gets none."""

    node: int


@dataclass(frozen=True)
class Begin:
    """Begin an epoch. news: what has changed, in words."""

    epoch: Epoch
    news: tuple[str, ...]


@dataclass(frozen=True)
class Update:
    """Ask the ranks of an epoch to leave it after their next commit."""

    epoch: int


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class End:
    """End the job. failed: the workers that have failed since the last epoch began. reason: why that is the end; empty where all
    is well, and where the failures say so themselves."""

    failed: tuple[int, ...]
    reason: str


Action = Start | Kill | Stop | Release | Begin | Update | Say | End

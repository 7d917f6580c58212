"""The actions that the ranks of a job decide on, and that the launcher carries out."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.trainer.world.epochs import Epoch


@dataclass(frozen=True)
class Reach:
    """Start the agent of a host, unless it runs already."""

    node: int


@dataclass(frozen=True)
class Start:
    """Start a worker on a host, in a slot without a running worker."""

    worker: int
    node: int
    slot: int


@dataclass(frozen=True)
class Kill:
    """Kill a worker that the policy counts as lost."""

    worker: int


@dataclass(frozen=True)
class Stop:
    """Ask a worker to end because the job no longer needs it."""

    worker: int


@dataclass(frozen=True)
class Release:
    """Let the agent of a host end: the host has no workers and gets none."""

    node: int


@dataclass(frozen=True)
class Begin:
    """Begin an epoch. news: the changes since the last epoch, in words."""

    epoch: Epoch
    news: tuple[str, ...]


@dataclass(frozen=True)
class Update:
    """Ask the ranks of an epoch to leave it after their next commit."""

    epoch: int


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    text: str


@dataclass(frozen=True)
class End:
    """End the job. failed: the workers that have failed since the last epoch began. reason: why the job ends; empty if all
    ranks have finished, or if the failures are the reason."""

    failed: tuple[int, ...]
    reason: str


Action = Reach | Start | Kill | Stop | Release | Begin | Update | Say | End

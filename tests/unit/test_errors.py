"""The errors of a Communicator that is broken: of the kind of what broke it. Every error survives pickling and copying."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

import gradwire  # noqa: F401  # which defines every error
from gradwire.collectives.control.build import OtherBuild
from gradwire.collectives.control.client import TurnedAway
from gradwire.collectives.control.paths import LargePacketsLost
from gradwire.collectives.control.texts import ANOTHER_KEY, StrangeText
from gradwire.collectives.engine.failure_monitor import OverdueError
from gradwire.collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    ForgedMessage,
    LinkError,
    Mismatch,
    PeerJoined,
    PeerLost,
    ReplicasDiffer,
)
from gradwire.trainer.servers.messages import QuorumLost

ERRORS = (
    CollectiveError("interrupted", rank=0, operation="first"),
    PeerLost([2, 1], rank=0, operation="first", has_left=True),
    CollectiveTimeout(3.0, [1], rank=0, operation="first"),
    Mismatch({0: "first", 1: "other"}, rank=0, operation="first"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_fails_because_of_an_error_is_caught_as_that_error(error: CollectiveError) -> None:
    later = error.again("the Communicator is broken", "second")
    assert type(later) is type(error)
    assert vars(later) == {**vars(error), "operation": "second"}
    assert str(later) == "rank 0: second: the Communicator is broken"
    assert "first" in str(error)
    with pytest.raises(type(error)):
        raise later from error


def kinds(of: type[BaseException]) -> Iterator[type[BaseException]]:
    """gradwire's own classes that derive from an exception."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("gradwire."):
            yield kind
        yield from kinds(kind)


def of_link(kind: type[LinkError]) -> LinkError:
    return kind(3, timed_out=True, detail="no answer", awaited=[4], ended=True, found=(1, 8))


#: An error of every class whose constructor needs more than a message.
MADE: dict[type[BaseException], Callable[[], BaseException]] = {
    **{type(error): lambda error=error: error for error in ERRORS},  # type: ignore[misc]
    PeerLost: lambda: PeerLost([2, 1], rank=0, operation="first", has_left=True, reasons={1: "raised KeyError"}),
    PeerJoined: lambda: PeerJoined([2, 1], rank=0, operation="first"),
    ReplicasDiffer: lambda: ReplicasDiffer("weight", [1, 1, None], 2, rank=0, operation="step 3"),
    OtherBuild: lambda: OtherBuild(0, "0.3.0", 1, "0.2.0"),
    OverdueError: OverdueError,
    QuorumLost: lambda: QuorumLost([1], 2, rank=0, operation="step()"),
    LinkError: lambda: of_link(LinkError),
    ForgedMessage: lambda: ForgedMessage(1, 0),
    LargePacketsLost: lambda: of_link(LargePacketsLost),
    StrangeText: lambda: StrangeText("another program", "", ANOTHER_KEY),
    TurnedAway: lambda: TurnedAway(1, "no such rank", again=True),
}


@pytest.mark.parametrize("kind", sorted(set(kinds(BaseException)), key=lambda kind: kind.__name__))
def test_an_error_is_the_same_after_pickling_and_copying(kind: type[BaseException]) -> None:
    error = MADE.get(kind, lambda: kind("of this kind"))()
    error.__dict__["added"] = "later"
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(same) is kind
        assert same.args == error.args
        assert str(same) == str(error)
        assert vars(same) == vars(error)

"""The errors of a Communicator that is broken: of the kind of what broke it."""

import pytest

from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost

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

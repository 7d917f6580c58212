"""How a RoutingTransport ends its parts."""

from collections.abc import Sequence

import pytest

from gradwire.collectives.transports.base import Message, Posted, Transport
from gradwire.collectives.transports.routing import RoutingTransport


class Part(Transport):
    """Notes which methods were called, and raises an error in each."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2
        self.called: list[str] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        raise AssertionError

    def abort(self) -> None:
        self._call("abort")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.called.append(name)
        raise OSError(name)


@pytest.mark.parametrize("method", ["abort", "close"])
def test_every_part_ends_also_if_another_one_raises(method: str) -> None:
    group, far = Part(), Part()
    far.routes = ("rank 1: somehow",)
    with pytest.raises(OSError, match=method):
        getattr(RoutingTransport(group, far, None, ()), method)()
    assert [group.called, far.called] == [[method], [method]]

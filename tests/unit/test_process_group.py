"""How messages are handed to a backend, shown by one that only notes what it is asked for."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import torch_internals
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.errors import LinkError
from gradwire.collectives.transports.nccl import NcclConnections
from gradwire.collectives.transports.process_group import ProcessGroupTransport, process_group
from tests.harness import wait_until


class _Work:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Nccl:
    """One whose `fails`-th message is refused."""

    def __init__(self, fails: int = -1) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def eager_connect_single_device(self, device: str) -> None:
        self.calls.append(f"connect {device}")

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> _Work:
        self.calls.append("end")
        return _Work()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._message(f"send {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._message(f"receive {peer}")

    def _message(self, said: str) -> None:
        if len(self.calls) - 2 == self._fails:
            raise RuntimeError("refused")
        self.calls.append(said)


class _OnCuda:
    is_cuda, device = True, "cuda:0"

    def view(self, dtype: torch.dtype) -> "_OnCuda":
        return self


MESSAGES: list[Any] = [(1, _OnCuda()), (2, _OnCuda())]


def over_nccl(nccl: _Nccl, monkeypatch: pytest.MonkeyPatch) -> ProcessGroupTransport:
    monkeypatch.setattr("gradwire.collectives.torch_internals.nccl_backend", lambda *_: nccl)
    return ProcessGroupTransport(Membership(0, 2, ((0, 1),), dist.HashStore(), ("cuda",), b""), 1.0)


def test_a_round_is_one_group_of_calls_with_a_handle_for_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for sends, receives in ((MESSAGES, MESSAGES[:1]), (MESSAGES, []), ([], MESSAGES)):
        nccl = _Nccl()
        sent, received = over_nccl(nccl, monkeypatch).post(sends, receives, 0)
        assert (*nccl.calls[:2], nccl.calls[-1]) == ("connect cuda:0", "start", "end")
        assert (len(sent), len(received)) == (len(sends), len(receives))
        for pending in (*sent, *received):
            pending.wait(0.0)


@pytest.mark.parametrize("fails", range(4))
def test_a_group_of_calls_is_not_left_open_by_an_error(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = _Nccl(fails)
    with pytest.raises(LinkError, match="refused"):
        over_nccl(nccl, monkeypatch).post(MESSAGES, MESSAGES, 0)
    assert nccl.calls[-1] == "end"


def test_nccl_reduces_by_itself_and_has_both_ends_of_a_message_posted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = ProcessGroupTransport(Membership(0, 2, ((0, 1),), dist.HashStore(), ("cpu",), b""), 1.0)
    for transport, device_types in ((over_nccl(_Nccl(), monkeypatch), ("cuda",)), (gloo, ())):
        assert transport.capabilities.posts_together == device_types
        assert transport.capabilities.preferred_on_gpu == dict.fromkeys(["allreduce"] if device_types else [], "native")


class _Unconnected:
    """Connects once it may."""

    def __init__(self) -> None:
        self.may_connect, self.devices = threading.Event(), list[Any]()

    def eager_connect_single_device(self, device: Any) -> None:
        assert self.may_connect.wait(10)
        self.devices.append(device)
        if device == "broken":
            raise RuntimeError("no such device")


def test_the_first_operation_on_a_device_has_a_deadline() -> None:
    nccl, is_over = _Unconnected(), threading.Event()
    connections = NcclConnections(nccl, is_over.is_set)
    with pytest.raises(LinkError) as caught:
        connections.connect("cuda:0", time.monotonic() + 0.05)  # type: ignore[arg-type]
    assert caught.value.timed_out
    is_over.set()  # as when another rank has ended
    with pytest.raises(LinkError) as caught:
        connections.connect("cuda:0", time.monotonic() + 60)  # type: ignore[arg-type]
    assert not caught.value.timed_out
    nccl.may_connect.set()
    is_over.clear()
    with pytest.raises(LinkError, match="no such device"):
        connections.connect("broken", time.monotonic() + 60)  # type: ignore[arg-type]
    wait_until(lambda: len(nccl.devices) == 3)  # those that nobody awaited
    for device in ("cuda:1", "cuda:1", "cuda:0"):
        connections.connect(device, time.monotonic() + 60)  # type: ignore[arg-type]
    assert nccl.devices[3:] == ["cuda:1", "cuda:0"]


def test_the_timeout_of_nccl_never_comes_before_that_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL would end the process at the first timeout, though a longer one was set later."""
    given: list[timedelta] = []

    def made(store: object, rank: int, size: int, timeout: timedelta) -> _Nccl:
        given.append(timeout)
        return _Nccl()

    monkeypatch.setattr(torch_internals, "nccl_backend", made)
    process_group(Membership(0, 3, ((0, 1, 2),), dist.HashStore(), ("cuda",), b""), 1.0)
    assert given[0] > timedelta(days=30)

"""How messages are handed to a backend, shown by one that only notes what it is asked for."""

from typing import Any

import pytest
import torch

from gradwire.collectives.errors import LinkError
from gradwire.collectives.link.process_group import ProcessGroupTransport


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
        if len(self.calls) - 1 == self._fails:
            raise RuntimeError("refused")
        self.calls.append(said)


class _OnCuda:
    is_cuda = True

    def view(self, dtype: torch.dtype) -> "_OnCuda":
        return self


MESSAGES: list[Any] = [(1, _OnCuda()), (2, _OnCuda())]


def test_a_round_is_one_group_of_calls_with_a_handle_for_every_message() -> None:
    for sends, receives in ((MESSAGES, MESSAGES[:1]), (MESSAGES, []), ([], MESSAGES)):
        nccl = _Nccl()
        sent, received = ProcessGroupTransport({"cuda": nccl}).post(sends, receives, 0)
        assert (nccl.calls[0], nccl.calls[-1]) == ("start", "end")
        assert (len(sent), len(received)) == (len(sends), len(receives))
        for pending in (*sent, *received):
            pending.wait(0.0)


@pytest.mark.parametrize("fails", range(4))
def test_a_group_of_calls_is_not_left_open_by_an_error(fails: int) -> None:
    nccl = _Nccl(fails)
    with pytest.raises(LinkError, match="refused"):
        ProcessGroupTransport({"cuda": nccl}).post(MESSAGES, MESSAGES, 0)
    assert nccl.calls[-1] == "end"


def test_both_ends_of_a_message_are_posted_together_over_nccl_alone() -> None:
    assert ProcessGroupTransport({"cuda": _Nccl()}).posts_together == ("cuda",)
    assert ProcessGroupTransport({"cpu": _Nccl()}).posts_together == ()


def test_nccl_reduces_cuda_tensors_by_itself() -> None:
    assert ProcessGroupTransport({"cuda": _Nccl()}).preferred_on_gpu == {"allreduce": "native"}
    assert not ProcessGroupTransport({"cpu": _Nccl()}).preferred_on_gpu

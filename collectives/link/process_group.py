"""Messages over the point-to-point operations of torch.distributed's backends: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, _get_default_store

from collectives.errors import CollectiveError, LinkError, ranks_text
from collectives.link.base import Backend, Message, Pending
from collectives.link.handshake import Listener
from collectives.link.interface import own_address
from collectives.link.watch import Watch

#: A tag that no operation uses, for a receive that nobody answers.
_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_POLL_S = 0.0005

#: gloo counts whole milliseconds, so its timeout may end a wait a little before the deadline.
_ROUNDING_S = 0.005

_SECRET_BYTES = 32

#: What every rank tells all others before there is anything else to tell it by: a digest of its host, a name for the store and a
#: secret for the connections (those of rank 0 count), a digest of its settings and their length, its note, and where it
#: listens for news.
_WHERE_BYTES = 256
_CARD = struct.Struct(f"=32s16s32s32sIB{_WHERE_BYTES}s")

#: In place of where a rank listens: why it cannot.
_REFUSAL = "!"


def _reason(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(". ")[0].strip()


class _GlooPending:
    """gloo's wait takes a timeout of its own; when it passes, gloo breaks all connections of the group."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: dist.Work, peer: int | None, tensor: torch.Tensor | None) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor  # the backend reads or writes it until the wait is over

    def wait(self, deadline: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            self._work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            timed_out = time.monotonic() >= deadline - _ROUNDING_S
            raise LinkError(self._peer, timed_out=timed_out, detail=_reason(error)) from None


class _StreamPending:
    """NCCL's wait only orders streams, so the deadline is kept by polling."""

    __slots__ = ("_peer", "_work")

    def __init__(self, work: dist.Work, peer: int | None) -> None:
        self._work = work
        self._peer = peer

    def wait(self, deadline: float) -> None:
        while not self._work.is_completed():
            if time.monotonic() >= deadline:
                raise LinkError(self._peer, timed_out=True, detail="no completion from NCCL")
            time.sleep(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkError(self._peer, timed_out=False, detail=_reason(error)) from None


class ProcessGroupTransport:
    """A Transport over backends that nothing else uses. backends: by the type of device whose tensors they carry."""

    def __init__(self, backends: dict[str, Backend]) -> None:
        self.backends = backends
        any_backend = next(iter(backends.values()))
        self.rank: int = any_backend.rank()
        self.size: int = any_backend.size()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            pending = self._post_nccl(sends, receives)
            return [pending] * len(sends), [pending] * len(receives)
        gloo = self.backends["cpu"]
        peer = None
        try:
            received: list[Pending] = []
            for peer, tensor in receives:
                received.append(_GlooPending(gloo.recv([tensor], peer, tag), peer, tensor))
            sent: list[Pending] = []
            for peer, tensor in sends:
                sent.append(_GlooPending(gloo.send([tensor], peer, tag), peer, tensor))
        except RuntimeError as error:
            raise LinkError(peer, timed_out=False, detail=_reason(error)) from None
        return sent, received

    def _post_nccl(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """NCCL deadlocks when the sends and receives of a round are not launched as one group. One work stands for
        all. Bytes travel: NCCL does not know every dtype."""
        nccl = self.backends["cuda"]
        try:
            nccl._start_coalescing()
            try:
                for peer, tensor in sends:
                    nccl.send([tensor.view(torch.uint8)], peer, 0)
                for peer, tensor in receives:
                    nccl.recv([tensor.view(torch.uint8)], peer, 0)
            finally:  # a group left open would swallow whatever else this process sends
                work = nccl._end_coalescing()
        except RuntimeError as error:
            raise LinkError(None, timed_out=False, detail=_reason(error)) from None
        return _StreamPending(work, None)

    def native(self, call: Callable[[Backend], dist.Work | None], device: str, deadline: float) -> None:
        """Run one of the backend's own collectives (see collectives.link.native) under the deadline."""
        try:
            work = call(self.backends[device])
        except RuntimeError as error:
            raise LinkError(None, timed_out=False, detail=_reason(error)) from None
        if work is not None:
            (_StreamPending(work, None) if device == "cuda" else _GlooPending(work, None, None)).wait(deadline)

    def abort(self) -> None:
        """A gloo receive that times out closes every connection of the group, which the peers see at once; one such receive
        is enough, unless its peer's connection is gone already."""
        for device, backend in self.backends.items():
            if device == "cuda":
                backend.abort()
                continue
            for peer in self._peers():
                try:
                    backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_ABORT_WAIT)
                except RuntimeError:
                    continue

    def close(self) -> None:
        """Connections close when the backends' last users, works in flight among them, let go of them."""
        self.backends = {}

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]


@dataclass(frozen=True)
class Connection:
    """What `connect` made: the transport, a store of the group's own, what watches over the ranks, a digest of each rank's host
    name, and each rank's note."""

    transport: ProcessGroupTransport
    store: Store
    watch: Watch
    host_digests: list[str]
    notes: list[int]


def connect(group: dist.ProcessGroup, host: str, timeout_s: float, *, note: int, settings: str) -> Connection:
    """Build backends of our own for the ranks and kinds of backend of a group, so that nothing meets the user's traffic.

    A collective call on `group`, which carries one small message, everyone's card. The name in it is for the store, without
    which a second connection would read the addresses of the first. (torch.distributed's own names for sub-groups are used
    again after a group is destroyed, so its new_group would do just that.) note: a byte. Raises ValueError for a group with
    neither gloo nor NCCL, and on all ranks where their settings differ; CollectiveError when the ranks do not come together
    within timeout_s seconds, or one cannot listen for the others.
    """
    config = dist.get_backend_config(group).split(",")
    kinds = [(device, kind) for device, kind in (("cpu", "gloo"), ("cuda", "nccl")) if f"{device}:{kind}" in config]
    if not kinds:
        raise ValueError(f"the group's backends are {config}; a Communicator needs cpu:gloo, cuda:nccl or both")
    rank, size = group.rank(), group.size()
    timeout = timedelta(seconds=timeout_s)
    deadline = time.monotonic() + timeout_s
    listener, where = _listen()
    try:
        told = settings.encode()
        card = _CARD.pack(
            _digest(host.encode()),
            uuid.uuid4().bytes,
            secrets.token_bytes(_SECRET_BYTES),
            _digest(told),
            len(told),
            note,
            where.encode()[:_WHERE_BYTES],
        )
        cards = _everyones(group, card, kinds[0][0], timeout)
        hosts, tokens, keys, digests, lengths, notes, addresses = zip(*map(_CARD.unpack, cards), strict=True)
        if len(set(digests)) > 1:
            texts = _everyones(group, told.ljust(max(lengths)), kinds[0][0], timeout)
            raise ValueError(_difference(rank, [text.decode().rstrip() for text in texts]))
        places = [address.rstrip(b"\0").decode(errors="replace") for address in addresses]
        if refusals := [f"rank {r}: {place[1:]}" for r, place in enumerate(places) if place.startswith(_REFUSAL)]:
            message = f"cannot listen for the other ranks: {'; '.join(refusals)}"
            raise CollectiveError(message, rank=rank, operation="making a Communicator")
        store = PrefixStore(f"gradwire/{tokens[0].hex()}", _get_default_store())
        backends = {device: _backend(kind, store, rank, size, timeout) for device, kind in kinds}
        assert listener is not None
        news = listener.join(rank, places, keys[0], deadline)
    except CollectiveError:
        raise
    except (RuntimeError, LinkError, OSError) as error:
        message = f"the ranks did not come together within {timeout_s:g} s: {error}"
        raise CollectiveError(message, rank=rank, operation="making a Communicator") from error
    finally:
        if listener is not None:
            listener.close()
    watch = Watch(rank, size, news)
    return Connection(ProcessGroupTransport(backends), store, watch, [each.hex() for each in hosts], list(notes))


def _listen() -> tuple[Listener | None, str]:
    """Listen for the other ranks, and return where. A rank that cannot says why instead, or the others would wait for it."""
    try:
        listener = Listener(own_address(os.environ))
    except (ValueError, OSError) as error:
        return None, _REFUSAL + str(error)
    return listener, listener.card


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _everyones(group: dist.ProcessGroup, mine: bytes, device: str, timeout: timedelta) -> list[bytes]:
    """Return every rank's bytes, equally many on all ranks. Raises RuntimeError."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    group.allgather([received], [sent]).wait(timeout)
    return [bytes(each.tolist()) for each in received]


def _difference(rank: int, settings: Sequence[str]) -> str:
    """Return what to say of settings, by rank, that are not all the same."""
    by_text: dict[str, list[int]] = {}
    for giver, text in enumerate(settings):
        by_text.setdefault(text, []).append(giver)
    given = "; ".join(f"{text} on {ranks_text(givers)}" for text, givers in by_text.items())
    return f"rank {rank}: a Communicator needs the same settings on all ranks; given are {given}"


def _backend(kind: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    prefixed = PrefixStore(kind, store)
    if kind == "gloo":
        return ProcessGroupGloo(prefixed, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)

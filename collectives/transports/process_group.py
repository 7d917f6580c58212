"""Messages and collectives over torch.distributed's backends: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradwire.collectives import torch_internals
from gradwire.collectives.control.asking import Asking
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.environment import GLOO_INTERFACE
from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.algorithms import PLANNERS, recursive_doubling
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.spans import segments_of_buffer
from gradwire.collectives.torch_internals import NEVER, Backend
from gradwire.collectives.transports.base import (
    KIND_BITS,
    Capabilities,
    GroupRun,
    Message,
    Operation,
    Pending,
    Posted,
    Run,
    Transport,
)
from gradwire.collectives.transports.loop import flat
from gradwire.collectives.transports.native import link_errors, options_of, perform, start
from gradwire.collectives.transports.nccl import Nccl

#: A tag that no operation uses, for a receive that no rank answers.
_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)


def process_group(membership: Membership, timeout_s: float) -> ProcessGroupTransport:
    """Connect the members by separate backends, so that no message mixes with the user's traffic.

    Raises RuntimeError or LinkError if they do not connect within timeout_s seconds.
    """
    transport = ProcessGroupTransport(membership, timeout_s)
    if "cpu" in membership.device_types:
        transport.connect(time.monotonic() + timeout_s)
    return transport


def _gloo_key(rank: int) -> str:
    """Return the key under which gloo stores a rank's address, which no rank needs once all are connected. The name is that
    of gloo's store in torch 2.9 to 2.13; tests/ranks/test_growth.py counts the keys, which grow if another version has another
    name."""
    return f"0/{rank}"


@dataclass(eq=False, slots=True)
class _GlooPending:
    """A message of gloo, whose wait takes a timeout. When it passes, gloo breaks all connections of the group. waits: those of
    threads, which is_done() adds."""

    work: dist.Work
    peer: int | None
    tensor: torch.Tensor | None  # the backend reads or writes it until the wait is over
    waits: set[Future[bool]] = field(default_factory=set)
    waiting: Future[bool] | None = None

    def wait(self, deadline: float) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        with link_errors(self.peer, deadline):
            if self.waiting is None:
                self.work.wait(timedelta(seconds=left_s))
            elif wait([self.waiting], left_s).done:
                self.waiting.result()
            else:
                raise LinkError(self.peer, timed_out=True, detail=f"received nothing from rank {self.peer}")

    def is_done(self) -> bool:
        if self.waiting is None:  # gloo answers only a wait
            thread = DaemonThread("gradwire-gloo")
            self.waiting = thread.submit(partial(self.work.wait, NEVER))
            self.waits.add(self.waiting)
            self.waiting.add_done_callback(self.waits.discard)
            thread.close()
        return self.waiting.done()


@dataclass(eq=False, slots=True)
class _Checked:
    """A message, and a second one whose tensor `sent_kind` contains the kind of numbers in the first."""

    parts: tuple[Pending, Pending]
    sent_kind: torch.Tensor
    kind: int
    peer: int
    nbytes: int

    def wait(self, deadline: float) -> None:
        for part in self.parts:
            part.wait(deadline)
        if (found := int(self.sent_kind)) != self.kind:
            detail = f"rank {self.peer} sent something else"
            raise LinkError(self.peer, timed_out=False, detail=detail, found=(found, self.nbytes))

    def is_done(self) -> bool:
        return all(part.is_done() for part in self.parts)


class ProcessGroupTransport(Transport):
    """A Transport over backends of torch.distributed that nothing else uses. timeout_s: for which connecting may take.

    gloo is connected by connect(), or else in the first operation that uses it, and NCCL in its first operation on a device.
    Operations have their own deadlines, and the limits of the backends never come first."""

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.rank, self.size = membership.rank, membership.size
        self._membership = membership
        self._timeout_s = timeout_s
        self._gloo: Backend | None = None
        self._nccl: Nccl | None = None
        self._is_aborted = False
        self._waits: set[Future[bool]] = set()
        self._process = os.getpid()
        device_types = membership.device_types
        if "cuda" in device_types:
            self._nccl = Nccl(PrefixStore("nccl", membership.store), self.rank, self.size, timeout_s)
        self.capabilities = Capabilities(
            device_types=device_types,
            posts_together=() if self._nccl is None else ("cuda",),
            algorithms={} if membership.why_no_gloo and self._nccl is None else dict.fromkeys(PLANNERS, ("native",)),
            # NCCL needs one kernel; the general loop launches kernels for each message.
            preferred_on_gpu={} if self._nccl is None else dict.fromkeys(PLANNERS, "native"),
        )
        names = {"cpu": "CPU tensors: gloo", "cuda": "CUDA tensors: NCCL"}
        if membership.is_private:
            names["cuda"] += ", which does not encrypt"
        self.routes = tuple(names[device] for device in device_types)

    def connect(self, deadline: float) -> None:
        """Connect gloo, once. Collective. Raises RuntimeError or LinkError if the ranks do not connect by the deadline
        (time.monotonic()), or cannot use gloo."""
        if self._gloo is not None:
            return
        membership, rank = self._membership, self.rank
        if why := membership.why_no_gloo:
            detail = f"{why}: use link 'auto' or 'tcp', and another algorithm than 'native'"
            raise LinkError(rank, timed_out=False, detail=detail, awaited={rank})
        store, timeout = PrefixStore("gloo", membership.store), timedelta(seconds=self._timeout_s)
        address = None if os.environ.get(GLOO_INTERFACE) else membership.address

        def check() -> None:
            if self._is_aborted:
                raise LinkError(None, timed_out=False, detail="the wait was ended")
            membership.channel.check()

        with closing(Asking(membership.store, check, membership.keepers)) as asking:
            gloo = asking.ask(lambda: torch_internals.gloo_backend(store, rank, self.size, timeout, address), deadline)
            self._gloo = gloo  # from here on, abort() ends its waits
            check()
            with link_errors(None, deadline):
                _GlooPending(gloo.barrier(dist.BarrierOptions()), None, None).wait(deadline)
            with suppress(LinkError, RuntimeError):  # all ranks have read this address
                asking.ask(lambda: store.delete_key(_gloo_key(rank)), deadline)

    def prepare(self, operation: Operation) -> Run:
        return self.native(operation, meets_over=self) if operation.program is None else super().prepare(operation)

    def native(self, operation: Operation, *, meets_over: Transport) -> Run:
        """Return what runs a backend's own collective. gloo's need a barrier before, over messages of `meets_over`: a longer
        message than expected ends the process."""
        if operation.device_type == "cuda":
            assert self._nccl is not None
            return self._nccl.prepare(operation)
        if why := self._membership.why_no_gloo:
            raise ValueError(f"rank {self.rank}: algorithm 'native': {why}")
        meet, options = _meeting(meets_over), options_of(operation)
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")

        def run_gloo(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            meet(token, token, tag, deadline)
            with link_errors(None, deadline):
                self.connect(deadline)
            gloo = self._gloo

            def complete(moved: torch.Tensor, landed: torch.Tensor) -> None:
                # gloo would end it at the group's timeout, before or after the deadline.
                options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                with link_errors():
                    work = start(operation, options, gloo, moved, landed)
                _GlooPending(work, None, None).wait(deadline)

            landing = flat(destination)
            given = landing if source is destination else flat(source)
            perform(operation, gloo, given, landing, complete)

        return run_gloo

    def prepare_group(self, operation: Operation) -> GroupRun | None:
        if operation.device_type != "cuda":
            return None
        assert self._nccl is not None
        return self._nccl.prepare_group(operation)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            assert self._nccl is not None
            pending = self._nccl.post(sends, receives, is_message=tag >> KIND_BITS != 0)
            return [pending] * len(sends), [pending] * len(receives)
        kind, tag = divmod(tag, 1 << KIND_BITS)
        gloo = self._gloo
        assert gloo is not None

        def posted(begin: Callable[..., dist.Work], peer: int | None, tensor: torch.Tensor, sent_kind: int) -> Pending:
            with link_errors(peer):
                message = _GlooPending(begin([tensor.view(torch.uint8)], peer, tag), peer, tensor, self._waits)
                if not kind:
                    return message
                after = torch.tensor([sent_kind], dtype=torch.int64, device="cpu")
                pending = _GlooPending(begin([after], peer, tag), peer, after, self._waits)
            assert peer is not None  # see Capabilities.receives_from_any
            return _Checked((message, pending), after, kind, peer, tensor.nbytes)

        received = [posted(gloo.recv, peer, tensor, 0) for peer, tensor in receives]
        return [posted(gloo.send, peer, tensor, kind) for peer, tensor in sends], received

    def trouble(self) -> str | None:
        nccl = self._nccl  # close() on another thread may drop it
        return None if nccl is None else nccl.trouble()

    def abort(self) -> None:
        """Let a gloo receive time out: gloo then closes every connection of the group, and the peers detect it at
        once. One such receive is enough, unless the connection to its peer is closed already."""
        self._is_aborted = True
        if self._nccl is not None:
            self._nccl.abort()
        if self._gloo is None:
            return
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    unsent = torch.empty(1, dtype=torch.uint8, device="cpu")
                    self._gloo.recv([unsent], peer, _ABORT_TAG).wait(_ABORT_WAIT)

    def close(self) -> None:
        """See Transport. gloo's connections close when their last user, such as a work in flight, releases them, too. NCCL is
        ended, because it would otherwise warn at the end of the process."""
        if os.getpid() != self._process:
            return
        if self._waits:  # for messages that never arrived
            self.abort()
        if self._nccl is not None:
            self._nccl.close()
        self._gloo = self._nccl = None


def _meeting(transport: Transport) -> Run:
    """Return a barrier over a transport's messages."""
    schedule = recursive_doubling.allreduce(Place(transport.rank, transport.size))
    program = Program(schedule, segments_of_buffer(1, schedule.blocks, 1))
    return transport.prepare(Operation("barrier", "recursive_doubling", torch.uint8, "cpu", 1, "max", program=program))

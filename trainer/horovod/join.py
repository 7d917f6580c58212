"""join(): ranks that have no more data wait for the others, and take part with zeros in their operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from concurrent.futures import Future

import torch

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.engine.join import WantedOperation
from gradwire.trainer.attachment import Attachment
from gradwire.trainer.horovod.state import share_optimizer_state
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.streams import gpus, synchronize
from gradwire.trainer.world.joined import World
from gradwire.trainer.world.world import current_world, names_rank


@names_rank
def join(device: int = -1) -> int:
    """Wait until every rank has called this, and return the rank that called it last, the same on all ranks.

    For uneven data: a rank that has no more data calls join(). Until all have, it takes part with zeros in the steps of the
    other ranks' DistributedOptimizers, in allreduce with Average or Sum, and in barriers. An Average is still over all ranks.
    Gradients that this rank has accumulated but not exchanged go into the first of these steps. Other verbs raise PeerJoined on
    the ranks that call them, which may continue. So do the exchanges of a DistributedOptimizer with op=Adasum,
    rules.LocalUpdates, rules.Sharded, rules.NextForward or a Rule without can_stand_in.

    A rank that waits here does not step. When all have called it, the optimizers that were stepped without all ranks, and
    their parameters, are broadcast from a rank that missed no step, so replicas are bitwise equal. Gradients of ranks that
    missed a step are cleared. LR schedulers, GradScaler and buffers of the model are for the caller to broadcast, from the
    returned rank. See docs/guides/optimizer.md.

    Keep every optimizer that other ranks may still step until join() has returned. If this rank has deleted one, as when it
    went out of scope, the other ranks' steps raise PeerLost, which says so.

    device: the index of the CUDA device for the zeros, if the other ranks' tensors are on CUDA devices; -1 for the current
    one. For tensors on the CPU, the zeros are on the CPU.

    Raises CollectiveError if an operation of the ranks fails, or if the other ranks neither begin an operation nor call join()
    for the timeout_s of init(). Raises ValueError for an invalid device.
    """
    if isinstance(device, bool) or not isinstance(device, int) or device < -1:
        raise ValueError(f"device must be the index of a CUDA device, or -1, not {device!r}")
    place = torch.device("cpu") if device == -1 else torch.device("cuda", device)
    world = current_world()
    try:
        return _Join(world, place).run()
    except CollectiveError as error:
        if deleted := world.deleted_optimizers:
            why = (
                f"{deleted} distributed optimizer{'s' if deleted > 1 else ''} of this rank, deleted without close(), "
                "could not take part in the steps of the other ranks: keep each optimizer until join() has returned"
            )
            raise error.again(f"{why}: {error}", "join()") from error
        raise


#: How long to wait for news before checking for it.
_POLL_S = 0.1

#: How long at most, since a Monitor may have ended, which is no news.
_LONGEST_POLL_S = 1.0


class _Join:
    """The state of one call of join(): the Communicators in use, and their optimizers."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._everyone = world.communicator()
        made = [each for each in world.optimizers if isinstance(each, Attachment)]
        self._optimizers = {optimizer.communicator: optimizer for optimizer in made}
        self._communicators = [
            communicator
            for communicator in dict.fromkeys([*world.communicators, *self._optimizers])
            if communicator.absence.is_usable or communicator is self._everyone
        ]
        self._device = device
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        mine = [parameter.device for each in made for parameter in tensors_of(each.optimizer.param_groups)]
        self._gpus = gpus([*([torch.device("cuda", self._cuda)] if self._cuda >= 0 else []), *mine])
        self._changed = threading.Event()
        self._threads: dict[Communicator, DaemonThread] = {}

    def run(self) -> int:
        synchronize(self._gpus)  # other threads, with other streams, go on
        for communicator in sorted(self._communicators, key=lambda each: each is self._everyone):
            communicator.absence.leave(self._changed.set)
        self._stand_in()
        for communicator, optimizer in self._optimizers.items():
            if communicator in self._communicators:
                self._even_out(communicator, optimizer)
        last = self._everyone.absence.last
        self._everyone.barrier()  # then all ranks have read the joins that they need
        for communicator in self._communicators:
            communicator.absence.resume()
        return last

    def _stand_in(self) -> None:
        """Take part with zeros until all ranks have joined; in several Communicators at once, as the others may use several."""
        absence = self._everyone.absence
        running: dict[Communicator, Future[None]] = {}
        quiet_since = time.monotonic()
        while True:
            self._changed.clear()
            for communicator in self._communicators:
                if communicator in running and running[communicator].done():
                    running.pop(communicator).result()
                    quiet_since = time.monotonic()
                if communicator not in running and (wanted := communicator.absence.wanted()) is not None:
                    running[communicator] = self._begin(communicator, wanted)
            if not running and absence.everyone_left:
                return
            self._check(running)
            left_s = quiet_since + absence.timeout_s - time.monotonic()
            if left_s <= 0 and not running:
                missing = set(range(self._everyone.size)) - absence.firsts.keys()
                raise CollectiveTimeout(absence.timeout_s, missing, rank=self._everyone.rank, operation="join()")
            self._changed.wait(min(max(left_s, _POLL_S), _LONGEST_POLL_S))

    def _begin(self, communicator: Communicator, wanted: WantedOperation) -> Future[None]:
        """Begin to take part in an operation, on a thread."""
        if communicator not in self._threads:
            self._threads[communicator] = DaemonThread("gradwire-join")
        future = self._threads[communicator].submit(lambda: self._take_part(communicator, wanted))
        future.add_done_callback(lambda _: self._changed.set())
        return future

    def _take_part(self, communicator: Communicator, wanted: WantedOperation) -> None:
        """Take part in an operation, with the optimizer's stand_in() if it has one for it."""
        with torch.cuda.device(self._cuda):
            optimizer = self._optimizers.get(communicator)
            if optimizer is None or not optimizer.rule.stand_in(wanted.verb, wanted.numel):
                communicator.absence.stand_in(wanted, self._device)
            synchronize(self._gpus)
        if communicator.absence.wanted() == wanted:
            raise RuntimeError(
                f"rank {communicator.rank}: has joined, and cannot take part in an operation of the other ranks: {wanted.call}"
            )

    def _check(self, running: Collection[Communicator]) -> None:
        """Raise the failure of other ranks, except if an operation is running that will raise it itself. First that of a broken
        Communicator: a rank that has failed there, because of another one, leaves all Communicators."""
        everyone = self._everyone.absence
        ends = everyone.has_leavers and not everyone.everyone_left  # read before the failures, which arrive before it
        broken = [each for each in self._communicators if each.absence.is_broken]
        for communicator in broken:
            if communicator not in running:
                communicator.absence.fail()
        if ends and not broken and self._everyone not in running:
            everyone.fail()

    def _even_out(self, communicator: Communicator, optimizer: Attachment) -> None:
        """Broadcast an optimizer and its parameters from a rank that missed no step, to all ranks that have the optimizer."""
        absence = communicator.absence
        deadline = time.monotonic() + absence.timeout_s
        while not absence.everyone_left:
            if absence.is_broken or absence.has_leavers or time.monotonic() > deadline:
                return  # a rank does not use it any more
            self._changed.wait(_POLL_S)
            self._changed.clear()
        optimizer.begin_window()
        firsts = absence.firsts
        most = max(firsts.values())
        source = min(rank for rank, first in firsts.items() if first == most)
        if min(firsts.values()) < most:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    communicator.broadcast(parameter.detach(), source)
            share_optimizer_state(optimizer.optimizer, communicator, source)
            reports = optimizer.reports
            reports.step = max(communicator.allgather_record(reports.step))
            if firsts[communicator.rank] < most:
                optimizer.zero_grad()

"""KeyGroup: connects this rank to the servers of a key-value store, and checks that all ranks pass equal arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from gradwire.trainer.reducer.agreement import check_settings
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.key_value.catalogue import dense
from gradwire.trainer.servers.roles import checked_ranks
from gradwire.trainer.servers.server import Server
from gradwire.trainer.servers.serving import Client, LocalClient, ServerAndClients
from gradwire.trainer.trees import broadcast
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import current_settings, current_world, here

_Result = TypeVar("_Result")

_SPEAKS_FIRST = 0.9
"""The fraction of timeout_s for which a server waits for other workers. The server then times out before the worker that waits
for it, and its error names the missing workers."""


class KeyGroup:
    """Connects a worker to the servers of a key-value store, one of which may be on its own rank. Collective, unless alone.

    alone: whether the store belongs to this process only. asynchronous: whether every push makes an update. servers: the ranks
    that serve; None for all. Attributes: rank, the worker's number; size, the number of workers; communicator, which joins all
    workers, None if alone; server, this rank's Server, None
    if it does not serve; part, whose close() ends the server and the clients.
    """

    def __init__(self, *, alone: bool, asynchronous: bool, servers: Sequence[int] | None) -> None:
        self.communicator = None if alone else current_world().open_communicator(global_process_set)
        self.rank = 0 if self.communicator is None else self.communicator.rank
        self.size = 1 if self.communicator is None else self.communicator.size
        self.server: Server | None = None
        self.part = ServerAndClients(current_settings().timeout_s)
        if self.communicator is not None:
            self.part.communicators.append(self.communicator)
        try:
            listed = checked_ranks("servers", servers, self.size) or list(range(self.size))
            quorum = 1 if asynchronous else self.size
            if self.communicator is not None:
                settings = {"asynchronous": repr(asynchronous), "servers": repr(listed)}
                check_settings(self.communicator, "KVStore", settings)
            everyone = range(self.size)
            if self.rank in listed:
                scheme = Scheme(quorum, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)
                timeout_s = _SPEAKS_FIRST * current_settings().timeout_s
                self.server = Server(self.rank, everyone, scheme, timeout_s)
            self.part.connect(
                "the key-value store", self.server, listed, everyone, self.communicator, world_ranks=everyone
            )
        except BaseException:
            self.part.break_off()
            raise

    @property
    def clients(self) -> dict[int, Client | LocalClient]:
        """Return the clients of all servers, by the server's rank."""
        return self.part.clients

    def agreed(self, compute: Callable[[], tuple[_Result, Any]]) -> _Result:
        """Call compute(), which returns a result and a record that JSON can hold. Return the result if all ranks have the same
        record. Collective.

        If compute() fails on a rank, raises its error on that rank and ValueError on the others. Raises ValueError on all ranks
        if the records differ.
        """
        result, record, error = None, None, None
        try:
            result, record = compute()
        except Exception as caught:  # the other ranks wait for this rank's record
            error = caught
        everyones = [[None, record]]
        if self.communicator is not None:
            everyones = self.communicator.allgather_record([None if error is None else str(error), record])
        if error is not None:
            raise error
        for rank, (fault, theirs) in enumerate(everyones):
            if fault is not None:
                raise ValueError(f"{here()}no rank did anything, because rank {rank} cannot: {fault}")
            if theirs != everyones[0][1]:
                raise ValueError(
                    f"{here()}the arguments differ between ranks: {everyones[0][1]} on rank 0; {theirs} on rank {rank}"
                )
        return cast(_Result, result)

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's tensors, on the CPU. The other ranks pass tensors of the same shapes and dtypes. Collective."""
        mine = [dense(tensor).cpu().clone() for tensor in tensors]
        return mine if self.communicator is None else cast(list[Tensor], broadcast(mine, 0, self.communicator))

    def meet(self) -> None:
        """Wait until all ranks have called this. Collective."""
        if self.communicator is not None:
            self.communicator.barrier()

"""KeyGroup: connects this rank to the servers of a key-value store, and checks that all ranks pass equal arguments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from gradwire.trainer.gradients.agreement import check_settings
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.connection import Flat, open_pairs
from gradwire.trainer.servers.key_value.keys import Keys
from gradwire.trainer.servers.key_value.messages import LocalKeys, RemoteKeys, answer
from gradwire.trainer.servers.roles import checked_ranks
from gradwire.trainer.servers.serving import ServerAndClients, Serving
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import current_settings, current_world, here

_Result = TypeVar("_Result")


class KeyGroup:
    """Connects a worker to the servers of a key-value store, one of which may be on its own rank. Collective, unless alone.

    alone: whether the store belongs to this process only. asynchronous: whether every push makes an update. servers: the ranks
    that serve; None for all. Attributes: rank, the worker's number; size, the number of workers; communicator, which joins all
    workers, None if alone; keys, the Keys of this rank's server, None if this rank does not serve; clients, by the server's
    rank; part, whose close() ends the server and the clients.
    """

    def __init__(self, *, alone: bool, asynchronous: bool, servers: Sequence[int] | None) -> None:
        self.communicator = None if alone else current_world().open_communicator(global_process_set)
        self.rank = 0 if self.communicator is None else self.communicator.rank
        self.size = 1 if self.communicator is None else self.communicator.size
        self.keys: Keys | None = None
        self.clients: dict[int, RemoteKeys | LocalKeys] = {}
        self.part = ServerAndClients(current_settings().timeout_s)
        if self.communicator is not None:
            self.part.communicators.append(self.communicator)
        try:
            listed = checked_ranks("servers", servers, self.size) or list(range(self.size))
            quorum = 1 if asynchronous else self.size
            if self.communicator is not None:
                settings = {"asynchronous": repr(asynchronous), "servers": repr(listed)}
                check_settings(self.communicator, "KVStore", settings)
            self._connect(listed, Scheme(quorum, grace_s=0.0, staleness=None, late="next"))
        except BaseException:
            self.part.break_off()
            raise

    def _connect(self, servers: Sequence[int], scheme: Scheme) -> None:
        """Make this rank's server, if it serves, and its connections to the other ranks."""
        rank = self.rank
        token = "" if self.communicator is None else self.communicator.allgather_record(secrets.token_hex(8))[0]
        everyone = range(self.size)
        for server in servers:
            pairs = open_pairs(f"kvstore {token}", server, everyone, rank=rank, world_ranks=everyone)
            self.part.communicators += pairs.values()
            if server == rank:
                self.keys = Keys(rank, everyone, scheme, current_settings().timeout_s)
                self.part.serving = Serving("the key-value store", self.keys, partial(answer, self.keys), pairs)
                self.clients[server] = LocalKeys(self.keys)
            else:
                self.clients[server] = RemoteKeys(rank, server, pairs[rank])
        self.part.clients += self.clients.values()

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
        flat = Flat(tensors)
        buffers = flat.pack(tensors)
        if self.communicator is not None:
            for buffer in buffers:
                self.communicator.broadcast(buffer, 0)
        return flat.views(buffers)

    def meet(self) -> None:
        """Wait until all ranks have called this. Collective."""
        if self.communicator is not None:
            self.communicator.barrier()

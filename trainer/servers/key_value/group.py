"""The workers and servers of one key-value store: this rank's connections to the others, and their agreement."""

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
from gradwire.trainer.servers.serving import Part, Serving
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import current_settings, current_world, here

_Result = TypeVar("_Result")


class KeyGroup:
    """Joins a worker with the servers of a key-value store, one of which may be its own. Collective, unless it is alone.

    alone: whether the store is of this process only. asynchronous: whether every push makes an update. servers: the ranks that
    serve. Attributes: rank and size among the workers; communicator, of all of them, None if alone; keys, those of this rank's
    server, None if it does not serve; clients, by the server's rank; part, whose close() ends all of it.
    """

    def __init__(self, *, alone: bool, asynchronous: bool, servers: Sequence[int] | None) -> None:
        self.communicator = None if alone else current_world().open_communicator(global_process_set)
        self.rank = 0 if self.communicator is None else self.communicator.rank
        self.size = 1 if self.communicator is None else self.communicator.size
        self.keys: Keys | None = None
        self.clients: dict[int, RemoteKeys | LocalKeys] = {}
        self.part = Part(current_settings().timeout_s)
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
        """Make this rank's server and its connections to the others."""
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
        """Return the first of the two results of compute(), if the second, which JSON must be able to hold, is the same on all
        ranks. Collective.

        Raises this rank's error; ValueError on all ranks if another rank has one, or the second results differ.
        """
        result, record, error = None, None, None
        try:
            result, record = compute()
        except Exception as caught:  # the others wait for a record of this rank
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
        """Return rank 0's tensors, on the CPU; the others give some of the same shapes and dtypes. Collective."""
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

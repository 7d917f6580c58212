"""KVStore: MXNet's key-value store, at servers inside the ranks, for programs that are ported from MXNet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, rehearse
from gradwire.trainer.checkpoint import on_all_ranks
from gradwire.trainer.reducer.agreement import check_settings
from gradwire.trainer.servers.aggregator import Counts, Scheme
from gradwire.trainer.servers.keys import (
    Catalogue,
    Factory,
    Name,
    agreed,
    check_updatable,
    dense,
    described,
    fill_rows,
    is_sparse,
    lists_of_rows,
    rows_of,
)
from gradwire.trainer.servers.messages import Flat
from gradwire.trainer.servers.packing import weighted_sum
from gradwire.trainer.servers.roles import checked_ranks
from gradwire.trainer.servers.server import Entry
from gradwire.trainer.servers.serving import Servers, Timeouts
from gradwire.trainer.servers.state_files import read_states, write_states
from gradwire.trainer.servers.two_bit import codec_of
from gradwire.trainer.servers.worker import Worker
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import current_settings, current_world, is_initialized, names_rank

_SPEAKS_FIRST = 0.9
"""The fraction of timeout_s for which a server waits for other workers. The server then times out before the worker that waits
for it, and its error names the missing workers."""

Type = Literal["local", "device", "dist_sync", "dist_device_sync", "dist_async"]
TYPES = get_args(Type)

Key: TypeAlias = Name | Sequence[Name]


class KVStore:
    """Stores tensors by key on servers inside the ranks. Servers update them with the tensors that ranks push, as in MXNet.

    type: "dist_sync" (or "dist_device_sync"): an update of a key adds one push of every rank, in the order of ranks, so runs
    are bitwise reproducible; a rank's pull waits until its pushes are applied. "dist_async": every push makes an update, one at
    a time per key, and no rank waits for others. "local" (or "device"): this process alone, with or without
    gradwire.init(). Servers compute on the CPU; tensors on GPUs are copied.
    servers: the ranks that hold keys and also train; default: all. Each key is on one server.

    A key is an int or a str. Methods that take a key also take a list of keys, with a list of values. A value or out is a
    tensor or a list of tensors. Sparse values are made dense. priority must be 0: a call returns when it is complete, so there
    is no queue in which a priority could have an effect.

    The constructor is collective, and so are init(), broadcast(), set_optimizer(), set_gradient_compression(), barrier() and
    the two methods of optimizer states: all ranks call them in the same order. push, pull, pushpull and row_sparse_pull are not
    collective. Only one thread of a rank may use the store.

    If a rank dies, the others continue with "dist_async"; only collective methods, and calls for keys of that rank, raise
    PeerLost. With "dist_sync", a pull that needs a push of the dead rank raises QuorumLost, and a pull that waits for about the
    timeout_s of gradwire.init() raises CollectiveTimeout. A rank that sends a server nothing for timeout_s counts as lost there.
    The others do not wait for a rank that has called close(). docs/guides/kvstore.md is the guide.

    Raises ValueError for another type, and for servers that are not ranks.
    """

    @names_rank
    def __init__(self, type: Type = "local", *, servers: Sequence[int] | None = None) -> None:
        if type not in TYPES:
            raise ValueError(f"type must be one of {', '.join(map(repr, TYPES))}, not {type!r}")
        self._type = type
        self._factory: Factory | None = None
        self._optimizer_name = ""
        self._is_compressed = False
        timeout_s = current_settings().timeout_s
        self._servers = Servers("the key-value store", timeout_s)
        self._is_alone = type in ("local", "device")
        open_alone, open_all = self._servers.open_alone, self._servers.open
        self._communicator = communicator = open_alone() if self._is_alone else open_all(global_process_set)
        try:
            everyone = range(communicator.size)
            listed = checked_ranks("servers", servers, communicator.size) or list(everyone)
            quorum = 1 if type == "dist_async" else communicator.size
            given = {"asynchronous": repr(type == "dist_async"), "servers": repr(listed)}
            check_settings(communicator, "KVStore", given)
            scheme = Scheme(quorum, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)
            timeouts = Timeouts(server=timeout_s, update=_SPEAKS_FIRST * timeout_s, worker=timeout_s)
            self._servers.connect(communicator, listed, everyone, scheme, timeouts)
        except BaseException:
            self._servers.break_off()
            raise
        self._worker = Worker(self._servers.links)
        self._catalogue = Catalogue(listed, current_world().rank if is_initialized() else 0)

    @property
    def type(self) -> str:
        """Return the type that was given to the constructor."""
        return self._type

    @property
    def rank(self) -> int:
        """Return this worker's number, 0 <= rank < num_workers."""
        return self._communicator.rank

    @property
    def num_workers(self) -> int:
        """Return the number of workers, which are the ranks; 1 for "local" and "device"."""
        return self._communicator.size

    @names_rank
    def init(self, key: Key, value: Any) -> None:
        """Add new keys, with the values of rank 0. Collective.

        Raises ValueError or TypeError on all ranks if one of them passes invalid values, a key that exists already, or other
        keys, shapes or dtypes than rank 0.
        """
        self._check()

        def given() -> tuple[dict[Name, Tensor], Any]:
            named = self._catalogue.new_values(key, value)
            if self._factory is not None:
                for name, tensor in named.items():
                    check_updatable(name, tensor.shape, tensor.dtype, self._factory)
            return named, [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named.items()]

        named = agreed(self._communicator, given)
        flat = Flat(list(named.values()))
        buffers = flat.pack(list(named.values()))
        for buffer in buffers:
            self._communicator.broadcast(buffer, 0)
        for name, first in zip(named, flat.views(buffers), strict=True):
            spec = self._catalogue.add(name, first)
            self._worker.add(spec, rank=self.rank, number=spec.number)
            if spec.server == self.rank and self._servers.server is not None:
                held = first.clone()  # of its own, not in the memory of all the values
                self._servers.server.add(spec, [held], None if self._factory is None else self._factory([held]))
        self._communicator.barrier()  # no rank pushes before all servers hold the keys

    @names_rank
    def push(self, key: Key, value: Any, priority: int = 0) -> None:
        """Send values to the servers. The server of a key steps its optimizer with the sum over all ranks; without an
        optimizer, it sets the value of the key to the sum.

        With "dist_async", a server uses each rank's push alone. Several tensors for a key are summed on this rank. A push takes
        effect after all earlier calls of this rank for the key, and does not wait for other ranks.

        Raises KeyError for a key that init() has not added, and ValueError for another shape or dtype, before anything is
        sent. Raises PeerLost if the rank that holds a key is lost.
        """
        self._check(priority)
        pushes = [
            (spec, weighted_sum([(dense(tensor).cpu(), 1.0) for tensor in tensors], spec.dtype))
            for spec, tensors in self._catalogue.tensors(key, value, "value")
        ]
        for spec, total in pushes:
            self._worker.push(spec, [total])

    @names_rank
    def pull(self, key: Key, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the newest values into tensors. The values contain all earlier pushes of this rank.

        ignore_sparse: whether to skip sparse tensors in out; otherwise they raise ValueError.

        Raises as push() does; QuorumLost or CollectiveTimeout if an update cannot be made; CollectiveError if the optimizer
        has failed.
        """
        self._check(priority)
        wanted = []
        for spec, tensors in self._catalogue.tensors(key, out, "out"):
            if not ignore_sparse and any(is_sparse(tensor) for tensor in tensors):
                raise ValueError(f"out of key {spec.name!r} is sparse: row_sparse_pull() is for that")
            wanted.append((spec, [tensor for tensor in tensors if not is_sparse(tensor)]))
        for spec, tensors in wanted:
            if tensors:
                _, (value,) = self._worker.pull(spec)
                with torch.no_grad():
                    for tensor in tensors:
                        tensor.copy_(value)

    @names_rank
    def pushpull(self, key: Key, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push values, then pull into out, or into the values themselves if out is None."""
        self._check(priority)
        out = value if out is None else out
        self._catalogue.tensors(key, out, "out")  # checked before anything is pushed
        self.push(key, value)
        self.pull(key, out)

    @names_rank
    def broadcast(self, key: Key, value: Any, out: Any, priority: int = 0) -> None:
        """Add new keys with the values of rank 0, and copy these values into out. Collective."""
        self._check(priority)
        self.init(key, value)
        self.pull(key, out)

    @names_rank
    def row_sparse_pull(self, key: Key, out: Any, priority: int = 0, row_ids: Any = None) -> None:
        """Fetch some rows of values; only these rows are sent.

        row_ids: a tensor of row numbers, in any order, possibly repeated; or a list of such tensors: one for each key, or with
        a single key, one for each tensor in out.
        out: a sparse tensor (torch.sparse_coo) then consists of these rows, in ascending order and each once; in a dense
        tensor, only these rows are written.

        Raises as pull() does; TypeError and ValueError for invalid row_ids.
        """
        self._check(priority)
        outs = self._catalogue.tensors(key, out, "out")
        chosen = lists_of_rows(key, [tensors for _, tensors in outs], row_ids)
        wanted = [
            (spec, tensor, rows_of(spec, rows))
            for (spec, tensors), ids in zip(outs, chosen, strict=True)
            for tensor, rows in zip(tensors, ids, strict=True)
        ]
        for spec, tensor, rows in wanted:
            _, (values,) = self._worker.pull(spec, rows)
            fill_rows(tensor, rows, values)

    @names_rank
    def set_optimizer(self, optimizer: Factory) -> None:
        """Make an optimizer for every key, present and future, on the key's server. Collective.

        optimizer: a function that makes an optimizer for a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.1)
        or torch.optim.Adam, with the same settings on all ranks. The gradient in a step is the sum of the pushed values, not
        their average. A second call replaces the optimizers and their states.

        Raises TypeError for anything else, ValueError if ranks differ, and for keys that are not floating-point tensors.
        """
        self._check()

        def given() -> tuple[str, Any]:
            name, settings = described(optimizer)
            for spec in self._catalogue:
                check_updatable(spec.name, spec.shape, spec.dtype, optimizer)
            return name, f"{name} {settings}"

        self.barrier()  # the earlier optimizers apply all earlier pushes
        self._optimizer_name = agreed(self._communicator, given)
        self._factory = optimizer
        for entry in self._entries():
            entry.set_optimizer(optimizer(entry.tensors))
        self._communicator.barrier()

    @names_rank
    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress the values that push() sends from now on. Collective; only once.

        compression_params: {"type": "2bit", "threshold": 0.5} as in MXNet, which sends threshold, 0 or -threshold; or the name
        of a codec in gradwire.collectives.compression.CODECS with its settings, such as {"type": "topk", "ratio": 0.01}. If the
        codec needs error feedback, the error is added to this rank's next push to the key. Floating-point values are encoded as
        float32. Other values, and pulled values, are not compressed.

        Raises ValueError for other types and settings; if ranks differ; and for "local" and "device", which send nothing.
        """
        self._check()
        if self._is_alone:
            raise ValueError(f"type {self._type!r} sends nothing that could be compressed")
        if self._is_compressed:
            raise ValueError("gradient compression is set already, and cannot be changed")

        def given() -> tuple[Codec, Any]:
            try:
                codec = codec_of(compression_params)
                return codec, codec.identity
            except Exception as error:
                raise ValueError(f"gradient compression by {compression_params!r}: {error}") from error

        self.barrier()  # all earlier pushes have arrived, as they were sent
        codec = agreed(self._communicator, given)
        rehearse(codec, torch.device("cpu"), with_feedback=codec.needs_feedback)  # compiles now, not in the first push
        self._catalogue.compress(codec)
        self._is_compressed = True
        for spec in self._catalogue:
            self._worker.add(spec, rank=self.rank, number=spec.number)
        self._communicator.barrier()

    @names_rank
    def save_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the states of all optimizers to one file on rank 0, with torch.save. Collective.

        The file does not contain the values of keys: pull and save them. Raises ValueError before set_optimizer(). If
        fname is not a path on one rank, this rank raises TypeError, and the others ValueError. If the file cannot be written,
        rank 0 raises OSError, and the others ValueError.
        """
        path = self._checked_path(fname)
        write_states(path, self._optimizer_name, self._states(), self._communicator)

    @names_rank
    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load the states that save_optimizer_states() wrote, on any number of ranks and servers. Only rank 0 reads the file.
        Collective.

        Raises ValueError, with nothing loaded, before set_optimizer(), for another kind of file, and if the state of a key is
        missing or cannot be loaded. For invalid paths and unreadable files, raises as save_optimizer_states() does.
        """
        path = self._checked_path(fname)
        states = read_states(path, self._optimizer_name, self._communicator)
        if missing := [spec.name for spec in self._catalogue if spec.name not in states]:
            raise ValueError(f"{fname} has no state of key {missing[0]!r}; it has {', '.join(map(repr, states))}")
        before = self._states()

        def take_back() -> None:
            self._load(before)
            self._communicator.barrier()  # no rank pushes before all servers have loaded

        on_all_ranks(self._communicator, lambda: self._load(states), take_back)

    @staticmethod
    @names_rank
    def is_capable(capability: str) -> bool:
        """Return True for "optimizer", the only capability that MXNet asks for. Raises ValueError for any other."""
        if not isinstance(capability, str) or capability.lower() != "optimizer":
            raise ValueError(f"capability must be 'optimizer', not {capability!r}")
        return True

    def barrier(self) -> None:
        """Wait until all ranks have called this and all their pushes have arrived at the servers. Collective."""
        self.report()
        self._communicator.barrier()

    @names_rank
    def report(self) -> Counts:
        """Return the counts of all pushes so far, summed over keys: updates, pushes by rank, and pushes by age. The age of
        a push is the number of updates of the key between the pushing rank's last pull of this key and the update that uses
        the push.

        Returns after all pushes of this rank have arrived at the servers.
        """
        self._check()
        return Counts.total(self._worker.counts())

    def close(self, timeout_s: float | None = None) -> None:
        """Announce that this rank sends nothing more, serve the others until they announce the same or are lost, and end the
        threads.

        timeout_s: how long to wait for the others; default: the timeout_s of gradwire.init(). After that, logs a warning and
        stops serving them. Further calls do nothing.
        """
        self._servers.close(timeout_s)

    def _entries(self) -> list[Entry]:
        """Return the entries of this rank's server."""
        return [] if self._servers.server is None else list(self._servers.server.entries.values())

    def _states(self) -> dict[Name, Any]:
        """Return the states of the optimizers of this rank's server, by key."""
        names = [spec.name for spec in self._catalogue]
        return {names[entry.key.number]: entry.state_dict()["optimizer"] for entry in self._entries()}

    def _load(self, states: dict[Name, Any]) -> None:
        """Load the states of the optimizers of this rank's server. states: by key; may contain other keys."""
        names = [spec.name for spec in self._catalogue]
        for entry in self._entries():
            entry.load_state_dict({"optimizer": states[names[entry.key.number]]})

    def _checked_path(self, fname: str | os.PathLike[str]) -> Path:
        """Return the path given to a method of optimizer states, once all pushes have arrived, if all ranks have passed a valid
        one. Collective. Raises ValueError before set_optimizer()."""
        self._check()
        if self._factory is None:
            raise ValueError("optimizer states need an optimizer: call set_optimizer() first")
        path = agreed(self._communicator, lambda: (Path(fname), None))
        self.barrier()
        return path

    def _check(self, priority: int = 0) -> None:
        """Raise RuntimeError if the store is closed, and ValueError for a priority other than 0."""
        if self._servers.is_closed:
            raise RuntimeError("this key-value store is closed")
        if priority != 0:
            raise ValueError(
                f"priority={priority!r}: only 0 is allowed; every call is done when it returns, so the queue is empty "
                "and priority has no effect"
            )

    def __repr__(self) -> str:
        return f"KVStore({self._type!r}), rank {self.rank} of {self.num_workers}, {len(self._catalogue)} keys"


def create(name: Type = "local", *, servers: Sequence[int] | None = None) -> KVStore:
    """Return a KVStore of a type, as mxnet.kvstore.create() does."""
    return KVStore(name, servers=servers)

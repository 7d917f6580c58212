"""Commits: write copies of the ranks' training state to the memory of their host and of the next one, and restore them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveTimeout, Communicator
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import ranks_text
from gradwire.collectives.schedules.topology import Topology
from gradwire.trainer.elastic.memory import Memory, Unfinished
from gradwire.trainer.elastic.parts import Found, Part, newest, takers
from gradwire.trainer.trees import ALIGNMENT_BYTES, decode, encode, flatten, unflatten
from gradwire.trainer.world.world import current_world

#: How long end() waits for a running commit to fail, once this rank has left the world.
_END_S = 2.0


@dataclass(frozen=True)
class Restored:
    """Holds the states that a rank restores from a commit.

    number: the number of the commit. size: the size of the world that made it. shared: the state that all its ranks shared.
    own: the own state of its rank of the same number, modulo size. also: the own states of its ranks that no longer exist, as
    far as this rank restores them. source: a text that says where the states were.
    """

    number: int
    size: int
    shared: Any
    own: Any
    also: list[Any]
    source: str


class Commits:
    """Keeps the two newest commits of the ranks of the world. Ranks whose memory has the same key are a host.

    Each rank of a host stores an equal part of the state that all ranks share. It stores all of its own state, and sends a copy
    to a rank of the next host while training continues. The constructor and all methods are collective.
    """

    def __init__(self, memory: Memory, wants_update: Callable[[], bool] = bool) -> None:
        """wants_update: returns whether this rank wants the ranks to stop. Each commit calls it once, on another thread."""
        self.memory = memory
        self._wants_update = wants_update
        self._world = current_world()
        self._communicator = self._world.communicator()
        self._topology = Topology.from_host_ids(self._world.rank, self._communicator.allgather_record(memory.key))
        hosts = self._topology.hosts
        # A copy in memory that ends with its process could not replace another process's state.
        pairs = zip(hosts, (*hosts[1:], hosts[0]), strict=True) if len(hosts) > 1 and memory.outlives_process else ()
        self._targets = {rank: nexts[i % len(nexts)] for ranks, nexts in pairs for i, rank in enumerate(ranks)}
        self._sources = [rank for rank, target in self._targets.items() if target == self._world.rank]
        self._beside = self._world.open_communicator(None, beside_others=True)
        # Of a commit, each message, the allreduce and wants_update() have limits of their own, which name ranks.
        self._limit_s = (3 * len(self._sources) + 5) * self._beside.timeout_s
        self._thread = DaemonThread("gradwire.commits")
        self._finished: Future[bool] | None = None
        self.update_is_due = False
        """Whether any rank wanted the ranks to stop when a commit before the last one was complete; the same on all ranks."""
        self._turns: dict[int, int] = {}  # by rank: which of its two slots the next part goes to; 0 if it is not there
        self._leftovers: set[str] = set()
        self._has_written = False
        self._era, self._number = 1, 0

    @property
    def host(self) -> tuple[int, ...]:
        """Return the ranks of this host."""
        return self._topology.hosts[self._topology.host_of(self._world.rank)]

    def write(self, shared: Any, own: Any) -> None:
        """Commit a tree of the state that all ranks share, and a tree of this rank's own state.

        Training waits for the copy. Another thread could copy while the next gradients are computed, but could not detect
        changes meanwhile: writes by .data, NumPy or a kernel do not increase the version counter of a tensor.

        Raises TypeError for a value that a tree cannot hold, OSError if memory runs out, and CollectiveError. After an OSError,
        the commit before is still valid, but this rank must end, since others wait for its part.
        """
        common, mine = flatten(shared, "state"), flatten(own, "state")
        self.update_is_due |= self.settle()  # the last commit is complete on all ranks: the one before it is not needed
        if self._has_written:
            self._remove_leftovers()
        part = [self._era, self._number + 1, self._world.size, self._world.rank]
        start, stop = self._share(common.nbytes)
        record = {"part": [*part, start, stop, common.nbytes], "own": mine.layout, "own_bytes": mine.nbytes}
        record["shared"] = common.layout
        slot = self.memory.slot(self._name(self._world.rank))
        room = slot.begin(encode(record), mine.nbytes + stop - start)
        for pieces in chain(mine.pieces(0, mine.nbytes), common.pieces(start, stop)):
            slot.append(pieces)
        slot.complete()
        self._number, self._has_written = self._number + 1, True
        record["part"] = [*part, 0, 0, common.nbytes]
        message = [encode(record), room[: mine.nbytes]] if self._targets else []
        names = list(map(self._name, self._sources))
        for rank in (self._world.rank, *self._sources):
            self._turns[rank] = 1 - self._turns.get(rank, 0)
        self._finished = self._thread.submit(lambda: self._finish(message, names))

    def settle(self) -> bool:
        """Wait until the last commit is complete on all ranks, which it usually is. Return whether any rank wanted the ranks to
        stop then. Raises CollectiveError, and OSError if memory ran out for a state that another host sent."""
        if self._finished is None:
            return False
        if not wait([self._finished], self._limit_s).done:
            raise CollectiveTimeout(self._limit_s, (), rank=self._world.rank, operation="commit")
        return self._finished.result()

    def ask_for_update(self) -> bool:
        """Return whether any rank wants the ranks to stop now, or wanted so when a commit was complete."""
        self.update_is_due |= self.settle()
        return self.update_is_due or self._agreed(self._communicator)

    def end(self) -> None:
        """Wait until the last commit is complete or has failed, and end its thread. Call it after leaving the world."""
        if self._finished is not None:
            wait([self._finished], _END_S)
        self._thread.close()

    def _share(self, nbytes: int) -> tuple[int, int]:
        """Return the start and the stop of the bytes of the shared state that this rank stores."""
        place, places = self.host.index(self._world.rank), len(self.host)
        lines = -(-nbytes // ALIGNMENT_BYTES)
        start, stop = (lines * each // places * ALIGNMENT_BYTES for each in (place, place + 1))
        return min(start, nbytes), min(stop, nbytes)

    def _name(self, rank: int) -> str:
        """Return the name of the slot for the next part of a rank."""
        return f"{rank}.{self._turns.get(rank, 0)}"

    def _remove_leftovers(self, kept: Collection[str] = ()) -> None:
        """Remove the slots of ranks whose parts are no longer stored here, but for the kept ones."""
        for name in self._leftovers.difference(kept):
            self.memory.remove(name)
        self._leftovers &= set(kept)

    def _agreed(self, communicator: Communicator) -> bool:
        """Return whether any rank wants the ranks to stop."""
        wanted = torch.tensor([int(self._wants_update())], device=communicator.control_device, dtype=torch.int64)
        communicator.allreduce(wanted, "max")
        return bool(wanted)

    def _finish(self, message: list[Tensor], names: list[str]) -> bool:
        """Send this rank's own state to the next host. Receive those of ranks of the previous host into the slots of these
        names. Wait until all ranks have done so, and return whether any rank wants the ranks to stop."""
        beside = self._beside
        sizes = torch.tensor([each.numel() for each in message], dtype=torch.int64, device="cpu")
        sent = [beside.isend(each, self._targets[beside.rank]) for each in message and [sizes, *message]]
        for source, name in zip(self._sources, names, strict=True):
            beside.recv(expected := torch.empty_like(sizes), source)
            layout_bytes, own_bytes = expected.tolist()
            beside.recv(layout := torch.empty(layout_bytes, dtype=torch.uint8, device="cpu"), source)
            slot = self.memory.slot(name)
            beside.recv(slot.begin(layout, own_bytes), source)
            slot.complete()
        for work in sent:
            work.wait()
        return self._agreed(beside)

    def restore(self) -> tuple[Restored | None, list[str]]:
        """Return what this rank restores from the newest commit that is not damaged, None if there is none; and messages about
        damaged slots and newer, damaged commits."""
        self.settle()
        place, places = self.host.index(self._world.rank), len(self.host)
        found, faults = [], []
        for name in self.memory.names()[place::places]:
            try:
                record, _ = self.memory.slot(name).read()
                found.append([*record["part"], name])
            except Unfinished:
                continue
            except (OSError, ValueError) as error:
                faults.append(f"{name} is not used: {error}")
        everyones = self._communicator.allgather_record([found, faults])
        parts: list[list[Part]] = [[] for _ in self._topology.hosts]
        for rank, (theirs, _) in enumerate(everyones):
            parts[self._topology.host_of(rank)] += [Part(*part) for part in theirs]
        commit, lacks = newest(parts)
        self._era = 1 + max((part.era for theirs in parts for part in theirs), default=0)
        self._has_written = False
        if commit is None:
            self._go_on_after(())
        faults = [fault for _, theirs in everyones for fault in theirs]
        return None if commit is None else self._load(commit), [*faults, *lacks]

    def _load(self, found: Found) -> Restored:
        """Return what this rank restores from a commit, and prepare for the commits after it."""
        (_, number, size), world, host_of = found.commit, self._world, self._topology.host_of
        kept: dict[int, tuple[Any, Tensor]] = {}
        moved = []
        for saved in range(size):
            takes = takers(saved, size, world.size)
            holders = [host for host, parts in enumerate(found.held) if saved in parts]
            is_near = {host_of(rank) for rank in takes} <= set(holders)
            giver = self._topology.hosts[holders[0]][0]
            record, data = self._read(found, saved) if world.rank in (takes if is_near else {giver}) else (None, None)
            if not is_near:
                moved.append(saved)
                record = decode(self._given(None if record is None else encode(record), giver))
                data = self._given(data, giver)
            if world.rank in takes:
                assert data is not None
                kept[saved] = record, data
        saved = world.rank % size
        record, data = kept.pop(saved)
        shared = unflatten(record["shared"], self._common(found))
        own, *also = [unflatten(each["own"], kept_bytes) for each, kept_bytes in ((record, data), *kept.values())]
        self._number = number
        self._go_on_after(found.held[host_of(world.rank)].values())
        lacking = [host for host in range(len(found.held)) if host not in found.whole]
        far = [f"the state of {ranks_text(moved)}"] if moved else []
        far += [f"the shared state for the host of rank {self._topology.hosts[host][0]}" for host in lacking]
        source = "the memory of each host" + (f", {' and '.join(far)} from that of another host" if far else "")
        return Restored(number, size, shared, own, also, source)

    def _read(self, found: Found, saved: int) -> tuple[Any, Tensor]:
        """Return the record and the bytes of a rank's own state from this host's memory."""
        record, data = self.memory.slot(found.held[self._topology.host_of(self._world.rank)][saved].name).read()
        return record, data[: record["own_bytes"]]

    def _common(self, found: Found) -> Tensor:
        """Return the bytes of the shared state: from this host's memory, or, if any host lacks a part of them, from a host that
        has all."""
        mine, giver = self._topology.host_of(self._world.rank), self._topology.hosts[found.whole[0]][0]
        is_near = len(found.whole) == len(found.held)
        if not is_near and self._world.rank != giver:
            return self._given(None, giver)
        parts = list(found.held[mine].values())
        common = torch.empty(parts[0].total, dtype=torch.uint8, device="cpu")
        for part in parts:
            record, data = self.memory.slot(part.name).read()
            common[part.start : part.stop].copy_(data[record["own_bytes"] :])
        return common if is_near else self._given(common, giver)

    def _given(self, data: Tensor | None, giver: int) -> Tensor:
        """Broadcast bytes from the rank `giver`, and return them on the CPU. data: the bytes on that rank, None on others."""
        communicator = self._communicator
        nbytes = torch.tensor(
            [0 if data is None else data.numel()], device=communicator.control_device, dtype=torch.int64
        )
        communicator.broadcast(nbytes, giver)
        given = torch.empty(int(nbytes), dtype=torch.uint8, device="cpu") if data is None else data
        given = given.to(communicator.control_device)
        communicator.broadcast(given, giver)
        return given.cpu()

    def _go_on_after(self, held: Collection[Part]) -> None:
        """Keep the slots of the restored commit until the next commit is complete. Remove the other slots of ranks whose parts
        are no longer stored here. held: this host's parts of the commit."""
        self._turns = {part.rank: 1 - int(part.name.partition(".")[2]) for part in held}
        kept_here = {*self.host, *(rank for rank, target in self._targets.items() if target in self.host)}
        self._leftovers = {name for name in self.memory.names() if int(name.partition(".")[0]) not in kept_here}
        self._remove_leftovers({part.name for part in held})

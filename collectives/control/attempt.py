"""Ranks that meet, or have met. Each rank counts its attempts to meet, also one in which it raises an error before it meets the
others. The Monitor of ranks of torch.distributed's default group stays with the group: later Communicators of these ranks, and
of some of them, use it again."""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from contextlib import closing, suppress
from dataclasses import replace
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.control.asking import Asking
from gradwire.collectives.control.key import UnusableKey, key_of_process
from gradwire.collectives.control.membership import (
    Membership,
    coming_together,
    device_types_of,
    keepers_among,
    membership_from,
)
from gradwire.collectives.control.own_address import card_of
from gradwire.collectives.control.rendezvous import rendezvous, withdraw_from
from gradwire.collectives.environment import KEY_FILE, RUN_ID
from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.topology import machine_id
from gradwire.collectives.torch_internals import default_store, is_of_parent, server_of

#: How long withdraw() waits for the store.
_WITHDRAW_S = 5.0


class Meetings:
    """The meetings of ranks of a default group of torch.distributed, whose Monitors are released when the group is destroyed."""

    _all: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Meetings]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._made: list[Membership] = []

    @classmethod
    def of_default_group(cls) -> Meetings:
        """Return those of the present default group."""
        group = dist.group.WORLD
        assert group is not None
        return cls.of(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meetings:
        """Return those of a default group, also of one that is being made."""
        if group not in cls._all:
            cls._all[group] = made = cls()
            weakref.finalize(group, made.release).atexit = False
        return cls._all[group]

    def keep(self, met: Membership) -> None:
        """Keep what has met. met: of global ranks; its Monitor is released with the group."""
        self._made.append(met)

    def find(self, ranks: tuple[int, ...]) -> Membership | None:
        """Return the Membership of the first meeting in which all of these global ranks took part: the same on all of them, since
        each was in each such meeting. None without one. A meeting that has failed on some of them, after it had succeeded
        here, does not count: they meet again."""
        for met in self._made:
            failed = set() if met.monitor is None else {met.global_ranks[place] for place in met.monitor.unmet}
            if set(ranks) <= set(met.global_ranks) - failed:
                return met
        return None

    def release(self) -> None:
        """Release the Monitors. Calling it again does nothing."""
        while self._made:
            self._made.pop().close()


class Attempt:
    """One attempt of ranks that share only a store to meet. A rank calls meet() or withdraw()."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        global_ranks: tuple[int, ...],
        meetings: Meetings | None = None,
        *,
        beside_gloo: bool = False,
    ) -> None:
        """store: only these ranks use names that begin with `name`. rank: this rank's place in global_ranks. meetings: in which
        the ranks may have met. beside_gloo: whether the script exchanges tensors of these ranks by gloo, too."""
        self._store, self._name = store, name
        self._rank, self._global_ranks = rank, global_ranks
        self._keepers = keepers_among(global_ranks)
        self._meetings = meetings
        self._beside_gloo = beside_gloo
        self._numbered: tuple[Store, str] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Attempt:
        """Return an attempt of a group's ranks. The default group's store counts them, because torch.distributed uses the names
        of destroyed sub-groups again. Raises ValueError for a group of the process from which this one was forked."""
        if is_of_parent(group):
            raise ValueError(
                f"rank {group.rank()}: this process was forked from the one that made the group, and cannot use its connections: "
                "start processes with the method 'spawn' or 'forkserver', or fork before torch.distributed is initialized"
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        name = f"gradwire/{group.group_name}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        beside_gloo = ":gloo" in dist.get_backend_config(group)
        return cls(default_store(), name, group.rank(), ranks, Meetings.of_default_group(), beside_gloo=beside_gloo)

    def meet(self, device_types: tuple[str, ...], host: str, timeout_s: float) -> Membership:
        """Return the Membership of the ranks. A collective call on these ranks. The caller closes it, unless it is kept in
        meetings.

        device_types: see Membership. host: a name that is the same on all ranks of a host. Raises CollectiveError if the ranks do
        not connect within timeout_s seconds; ValueError if the key cannot be read, if the ranks have met without it, and, on all
        ranks, if there is a key and gloo would carry tensors between their hosts.
        """
        size = len(self._global_ranks)
        if size == 1:
            key_of_process()  # what cannot be used is an error also where nothing is to be encrypted
            return Membership.alone(device_types, self._global_ranks)
        if (met := self._met()) is not None:
            if key_of_process() is not None and not met.is_private:
                raise ValueError(
                    f"rank {self._rank}: these ranks have met without the key: set {KEY_FILE} from the start"
                )
            self._refuse_gloo(met)
            return replace(met, device_types=device_types, host=host)
        deadline = time.monotonic() + timeout_s
        with coming_together(self._rank, timeout_s):
            try:
                key = key_of_process()
                store, place = self._count(deadline)
                card = card_of(self._rank, host, machine_id(), os.environ, deadline, server_of(self._store))
                monitor = rendezvous(store, size, card, deadline, keepers=self._keepers, key=key, place=place)
            except LinkError:  # the other ranks know, or find the same
                raise
            except Exception as error:
                self.withdraw(error)
                raise
        made = membership_from(monitor, store, device_types, self._global_ranks)
        if self._meetings is not None:
            self._meetings.keep(made)
        self._refuse_gloo(made)
        return made

    def _refuse_gloo(self, met: Membership) -> None:
        if self._beside_gloo and met.is_private and len(met.hosts) > 1:
            raise ValueError(
                f"rank {self._rank}: the process group uses gloo between {len(met.hosts)} hosts. {met.why_no_gloo}: use "
                'init_process_group("gradwire"), which encrypts all that torch and DDP send of tensors on the CPU, and uses NCCL '
                "for those on GPUs"
            )

    def withdraw(self, error: Exception) -> None:
        """Report to the other ranks that this rank has failed, so that they need not wait, and count the attempt as they do. Not
        a collective call. error: the reason, which the caller raises, also if the store does not answer."""
        if len(self._global_ranks) == 1:
            return
        if (met := self._met()) is not None:
            met.withdraw(error)
            return
        deadline = time.monotonic() + _WITHDRAW_S
        with suppress(LinkError, RuntimeError):
            try:
                key = key_of_process()
            except UnusableKey as unusable:  # no process could read what this one would leave
                key, error = None, unusable
            store, place = self._count(deadline)
            withdraw_from(store, error, self._rank, len(self._global_ranks), self._keepers, deadline, key, place)

    def _met(self) -> Membership | None:
        """Return the Membership of these ranks if they have met."""
        met = None if self._meetings is None else self._meetings.find(self._global_ranks)
        if met is None or met.global_ranks == self._global_ranks:
            return met
        return met.subset([met.global_ranks.index(rank) for rank in self._global_ranks], self._name)

    def _count(self, deadline: float) -> tuple[Store, str]:
        """Count the attempt, and return the part of the store that only this attempt uses, and its place for Texts. Raises as
        Asking.ask."""
        if self._numbered is None:
            with closing(Asking(self._store, keepers=self._keepers)) as asking:
                number = asking.ask(lambda: self._store.add(f"{self._name}/{self._rank}", 1), deadline)
            name = f"{self._name}/{number}"
            self._numbered = PrefixStore(name, self._store), f"{os.environ.get(RUN_ID, '')}/{name}"
        return self._numbered


def membership_of(group: dist.ProcessGroup, host: str, timeout_s: float) -> Membership:
    """Return the Membership of a group's ranks, as Attempt.meet(); the caller closes it. Raises
    ValueError for a group with neither gloo nor NCCL."""
    met = Attempt.of(group).meet(device_types_of(group), host, timeout_s).opened()
    if met.monitor is not None:
        met.monitor.hold()
    return met

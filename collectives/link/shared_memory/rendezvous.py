"""How the ranks of a host find the memory that they share, and agree on whether they do."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from gradwire.collectives.link.membership import Membership
from gradwire.collectives.link.shared_memory.group import LocalGroup
from gradwire.collectives.link.shared_memory.segment import Segment

_log = logging.getLogger("gradwire")


def join_host(membership: Membership, kernels: ModuleType | str, deadline: float) -> LocalGroup | None:
    """Return the group of this host's ranks; None for a rank that is alone on its host, or that must do without shared memory.

    A collective call. kernels: as from gradwire.collectives.kernels, or why there are none. The ranks of a host have a
    group all together or not at all: each maps the segment that the first of them made, and says whether it could; whoever
    could not is the proof that they do not share memory, whatever their host ids say.
    """
    rank = membership.rank
    members = next(host for host in membership.hosts if rank in host)
    first, joins = members[0], len(members) > 1
    segment: Segment | None = None
    group: LocalGroup | None = None
    with ExitStack() as made:
        card: dict[str, Any] = {"pid": os.getpid()}
        if joins and rank == first and isinstance(kernels, ModuleType):
            name = f"gradwire-{secrets.token_hex(16)}"
            try:
                segment = Segment.create(name, LocalGroup.segment_bytes(kernels, len(members)))
                made.callback(segment.close)
                card |= {"name": name, "descriptor": segment.descriptor}
            except OSError as error:
                card |= {"why": str(error)}
        cards = membership.exchange("segment", card, deadline)
        problem = kernels if isinstance(kernels, str) else None
        if joins and isinstance(kernels, ModuleType):
            try:
                theirs = cards[first]
                if "name" not in theirs:
                    raise OSError(theirs.get("why", f"rank {first} created no segment"))
                if segment is None:
                    nbytes = LocalGroup.segment_bytes(kernels, len(members))
                    segment = Segment.open(theirs["pid"], theirs["descriptor"], theirs["name"], nbytes)
                    made.callback(segment.close)
                pids = [cards[member]["pid"] for member in members]
                everyone = len(members) == len(cards) and not membership.beside_others
                group = LocalGroup(kernels, segment, theirs["name"], pids, members, rank, everyone=everyone)
                made.callback(group.close)
                for member in members:
                    if member != rank:
                        group.watch(member)
            except OSError as error:
                problem = str(error)
        answers = membership.exchange("joined", {"why": problem}, deadline)
        problems = {member: answers[member]["why"] for member in members if answers[member]["why"]}
        if group is not None and not problems:
            made.pop_all()
            group.seal_off()
            return group
        if joins and rank == first:
            member, why = next(iter(problems.items()))
            _log.warning("gradwire: ranks %s use sockets instead of shared memory: rank %d: %s", members, member, why)
    return None

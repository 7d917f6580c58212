"""How the ranks of a host find the memory that they share, and agree on whether they do."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
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
    segment: Segment | None = None
    group: LocalGroup | None = None
    try:
        card: dict[str, Any] = {"pid": os.getpid()}
        if rank == members[0] and len(members) > 1 and not isinstance(kernels, str):
            name = f"gradwire-{secrets.token_hex(16)}"
            try:
                segment = Segment.create(name, LocalGroup.segment_bytes(kernels, len(members)))
                card |= {"name": name, "descriptor": segment.descriptor}
            except OSError as error:
                card |= {"why": str(error)}
        cards = _exchange(membership, "segment", card, deadline)
        problem = kernels if isinstance(kernels, str) else None
        if len(members) > 1 and not isinstance(kernels, str):
            try:
                group = _join(kernels, segment, cards, members, membership)
            except OSError as error:
                problem = str(error)
        answers = _exchange(membership, "joined", {"why": problem}, deadline)
    except BaseException:
        _give_up(group, segment)
        raise
    problems = {member: answers[member]["why"] for member in members if answers[member]["why"]}
    if group is not None and not problems:
        segment = None
        group.seal_off()
        return group
    if rank == members[0] and len(members) > 1:
        member, why = next(iter(problems.items()))
        _log.warning(
            "gradwire: ranks %s talk through sockets, not through shared memory: rank %d: %s", members, member, why
        )
    _give_up(group, segment)
    return None


def _give_up(group: LocalGroup | None, segment: Segment | None) -> None:
    for made in (group, segment):
        if made is not None:
            made.close()


def _join(
    kernels: ModuleType,
    segment: Segment | None,
    cards: Sequence[dict[str, Any]],
    members: Sequence[int],
    membership: Membership,
) -> LocalGroup:
    rank = membership.rank
    first = cards[members[0]]
    if "name" not in first:
        raise OSError(first.get("why", f"rank {members[0]} made no segment"))
    if segment is None:
        nbytes = LocalGroup.segment_bytes(kernels, len(members))
        segment = Segment.open(first["pid"], first["descriptor"], first["name"], nbytes)
    pids = [cards[member]["pid"] for member in members]
    everyone = len(members) == len(cards) and not membership.beside_others
    group = LocalGroup(kernels, segment, first["name"], pids, members, rank, everyone=everyone)
    try:
        for member in members:
            if member != rank:
                group.watch(member)
    except OSError:
        group.close()
        raise
    return group


def _exchange(membership: Membership, name: str, card: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Return every rank's card."""
    return [json.loads(text) for text in membership.everyones(name, json.dumps(card).encode(), deadline)]

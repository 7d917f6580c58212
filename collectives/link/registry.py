"""All links, by the names that users give."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire.collectives.environment import shared_memory_wanted
from gradwire.collectives.link.auto import auto
from gradwire.collectives.link.base import Transport
from gradwire.collectives.link.membership import Membership
from gradwire.collectives.link.process_group import process_group
from gradwire.collectives.link.tcp import tcp
from gradwire.collectives.notation import check_name

#: Connects the members within so many seconds. A collective call. What it raises when they do not come together is a LinkError,
#: an OSError or a RuntimeError.
Link = Callable[[Membership, float], Transport]

#: The name of the one that is used unless told otherwise.
AUTO = "auto"

LINKS: dict[str, Link] = {AUTO: auto, "process_group": process_group, "tcp": tcp}


def register_link(name: str, link: Link) -> None:
    """Let Communicators made from now on move their bytes by a link of that name: Communicator(link=name) or COLLECTIVES_LINK.

    link: called with a Membership and timeout_s, returns the Transport between its ranks. Every rank must register the same:
    ranks compare the names alone. Raises ValueError for a name that is malformed or taken, TypeError for a link that cannot be
    called.
    """
    check_name("link", name, LINKS)
    if not callable(link):
        raise TypeError(
            f"link {name!r}: a function from a Membership and timeout_s to a Transport is needed, not {link!r}"
        )
    LINKS[name] = link


def check_link(name: object, environment: Mapping[str, str]) -> None:
    """Raise ValueError for a name that no link has, and for what the environment sets wrongly for the link."""
    if not isinstance(name, str) or name not in LINKS:
        raise ValueError(f"no link is called {name!r}; known are {', '.join(LINKS)}")
    if name == AUTO:
        shared_memory_wanted(environment)

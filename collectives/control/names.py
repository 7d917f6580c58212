"""The look-up of a host's name, with a deadline."""

from __future__ import annotations

import socket
import time
from concurrent.futures import wait
from contextlib import suppress

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import LinkError


def look_up(host: str, deadline: float) -> list[str]:
    """Return the numeric addresses of a host. host: a name or a numeric address. deadline: time.monotonic() seconds.

    A name is looked up on a separate thread, which can be abandoned: while name servers are down, the system may wait
    beyond the deadline. If no thread can be started, only the system's own timeouts bound the look-up. Raises LinkError,
    which contains the name, at the deadline; OSError or UnicodeError for a name that has no address.
    """
    with suppress(socket.gaierror):  # raised for a name
        return _addresses(host, socket.AI_NUMERICHOST)
    thread = DaemonThread("gradwire-names", or_callers=True)
    answer = thread.submit(lambda: _addresses(host))
    thread.close()
    if not wait([answer], max(0.0, deadline - time.monotonic())).done:
        late = f"the look-up of {host!r} on host {socket.gethostname()} has not returned: is a name server down?"
        raise LinkError(None, timed_out=True, detail=late)
    return answer.result()


def _addresses(host: str, flags: int = 0) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]

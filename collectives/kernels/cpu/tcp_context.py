"""What TCP kernels share with the process that calls them, and how a wait polls, offers the core and sleeps."""

from __future__ import annotations

from numba import njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import field, give_way, load, monotonic_ns, set_field
from gradwire.collectives.kernels.cpu.sockets import POLLIN, POLLOUT, POLLRDHUP, has_ended, poll, watch_for

#: After how many waits that polled without success TRIES is MOST_TRIES again.
_PROBE_AFTER = 32

#: How often a wait polls before it offers the core to other processes, and how long a computing process keeps the core.
_TRIES_ALONE, _LONG_NS = 20, 1_000_000


@njit
def connection_of(context, peer):
    """Return the address of the connection with a rank."""
    return field(context, layout.CONNECTIONS) + layout.CONNECTION_BYTES * peer


@njit
def sleep(context, milliseconds):
    """Sleep until a message can be moved, for at most `milliseconds`. Return FINISHED, or LOST if a connection has ended behind
    a message without a row: it is not read from, so only poll() shows its end."""
    polls, wanted = field(context, layout.POLLS), field(context, layout.WANTED)
    count = 0
    for peer in range(field(context, layout.SIZE)):
        state = load(wanted + 8 * peer)
        if state == 0:
            continue
        events = POLLOUT if state & layout.SENDS != 0 else 0
        if state & layout.RECEIVES != 0:
            events |= POLLIN if state & layout.STUCK == 0 else POLLRDHUP
        watch_for(polls, count, field(connection_of(context, peer), layout.DESCRIPTOR), events)
        count += 1
    if poll(polls, count, milliseconds) <= 0:
        return layout.FINISHED
    count = 0
    for peer in range(field(context, layout.SIZE)):
        state = load(wanted + 8 * peer)
        if state & layout.STUCK != 0 and has_ended(polls, count):
            set_field(context, layout.PEER, peer)
            set_field(context, layout.ERROR, 0)
            return layout.LOST
        count += state != 0
    return layout.FINISHED


@njit
def spin_less(context):
    """Halve the polls of later waits, after one that polled without success: the message is slow, or other processes need the
    core. Now and then allow all polls again, to see whether that has changed."""
    slept = field(context, layout.SLEPT) + 1
    if slept < _PROBE_AFTER:
        set_field(context, layout.TRIES, min(field(context, layout.TRIES) // 2, field(context, layout.MOST_TRIES)))
        set_field(context, layout.SLEPT, slept)
    else:
        set_field(context, layout.TRIES, field(context, layout.MOST_TRIES))
        set_field(context, layout.SLEPT, 0)


@njit
def spin_more(context, tries):
    """Let later waits poll four times as often as this one, which has polled with success."""
    if 0 < tries <= field(context, layout.TRIES):
        set_field(
            context, layout.TRIES, min(field(context, layout.MOST_TRIES), max(field(context, layout.TRIES), 4 * tries))
        )


@njit
def _offer_the_core(context):
    """Let other processes use the core. Other ranks return it soon. If another process computes on it, a sleeping process gets
    it back sooner than a spinning one, so later waits sleep at once for a while."""
    offered = monotonic_ns()
    give_way()
    if monotonic_ns() - offered > _LONG_NS:
        set_field(context, layout.TRIES, 0)
        set_field(context, layout.SLEPT, 0)


@njit
def polls_again(context, tries):
    """Return whether a wait that has polled so often polls again before it sleeps; after the first few polls, offer the
    core."""
    if tries > field(context, layout.TRIES):
        return False
    if tries > _TRIES_ALONE:
        _offer_the_core(context)
    return True

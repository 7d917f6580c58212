"""libc's calls for sockets, which return -errno if they fail."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import I8, I16, I32, I64, call, instruction

#: Linux's, on every processor: errno.h, poll.h.
EAGAIN, EBADMSG, EINTR, ENOTRECOVERABLE, EPIPE = 11, 74, 4, 131, 32
POLLIN, POLLOUT, _POLLERR, _POLLHUP, POLLRDHUP = 0x1, 0x4, 0x8, 0x10, 0x2000

#: sys/socket.h: return at once, and raise no SIGPIPE.
_FLAGS = ir.Constant(I32, 0x40 | 0x4000)


def _or_error(builder: Any, result: Any) -> Any:
    """Return what generates the result of a call of libc, or -errno where it failed."""
    location = call(builder, "__errno_location", I32.as_pointer())
    error = builder.neg(builder.sext(builder.load(location), I64))
    return builder.select(builder.icmp_signed("<", result, ir.Constant(I64, 0)), error, result)


def _pointer(builder: Any, address: Any, kind: Any = I8) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@instruction(int64, int64, int64, int64)
def receive(builder, descriptor, address, nbytes):
    """Read the bytes that have arrived, at most so many, without waiting: recv. Return 0 at the end of the connection."""
    given = builder.trunc(descriptor, I32), _pointer(builder, address), nbytes, _FLAGS
    return _or_error(builder, call(builder, "recv", I64, *given))


@instruction(int64, int64, int64, int64, int64, int64)
def send_two(builder, descriptor, first, first_bytes, second, second_bytes):
    """Write as much as there is room for of two pieces of memory, one after the other, without waiting: sendmsg."""
    pieces = cgutils.alloca_once(builder, ir.ArrayType(I64, 4))  # two struct iovec
    message = cgutils.alloca_once(builder, ir.ArrayType(I64, 7))  # a struct msghdr
    zero = ir.Constant(I64, 0)
    for place, word in enumerate((first, first_bytes, second, second_bytes)):
        builder.store(word, cgutils.gep_inbounds(builder, pieces, 0, place))
    words = (zero, zero, builder.ptrtoint(pieces, I64), ir.Constant(I64, 2), zero, zero, zero)
    for place, word in enumerate(words):
        builder.store(word, cgutils.gep_inbounds(builder, message, 0, place))
    given = builder.trunc(descriptor, I32), builder.bitcast(message, I8.as_pointer()), _FLAGS
    return _or_error(builder, call(builder, "sendmsg", I64, *given))


@instruction(types.void, int64, int64, int64, int64)
def watch_for(builder, polls, index, descriptor, events):
    """Set one of the struct pollfd that begin at an address."""
    place = builder.add(polls, builder.mul(index, ir.Constant(I64, layout.POLL_BYTES)))
    builder.store(builder.trunc(descriptor, I32), _pointer(builder, place, I32))
    half = _pointer(builder, builder.add(place, ir.Constant(I64, 4)), I16)
    builder.store(builder.trunc(events, I16), half)


@instruction(types.boolean, int64, int64)
def has_ended(builder, polls, index):
    """Return whether poll(), set to POLLRDHUP for a connection, has found that its other end is gone."""
    place = builder.add(polls, builder.mul(index, ir.Constant(I64, layout.POLL_BYTES)))
    found = builder.load(_pointer(builder, builder.add(place, ir.Constant(I64, 6)), I16))
    ended = builder.and_(found, ir.Constant(I16, _POLLERR | _POLLHUP | POLLRDHUP))
    return builder.icmp_unsigned("!=", ended, ir.Constant(I16, 0))


@instruction(int64, int64, int64, int64)
def poll(builder, polls, count, milliseconds):
    """Wait for the events that watch_for() has set: poll."""
    given = _pointer(builder, polls), count, builder.trunc(milliseconds, I32)
    return _or_error(builder, builder.sext(call(builder, "poll", I32, *given), I64))

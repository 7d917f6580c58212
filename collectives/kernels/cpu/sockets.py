"""What a kernel asks of the operating system about sockets: libc's calls, which return -errno where they fail."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

#: Linux's, on every processor: errno.h, poll.h.
EAGAIN, EINTR, EPIPE = 11, 4, 32
POLLIN, POLLOUT, _POLLERR, _POLLHUP, POLLRDHUP = 0x1, 0x4, 0x8, 0x10, 0x2000

#: sys/socket.h: return at once, and raise no SIGPIPE.
_FLAGS = ir.Constant(_I32, 0x40 | 0x4000)

#: Of a struct pollfd.
POLL_BYTES = 8


def _or_error(builder: Any, result: Any) -> Any:
    """Return what generates the result of a call of libc, or -errno where it failed."""
    kind = ir.FunctionType(_I32.as_pointer(), [])
    location = builder.call(cgutils.get_or_insert_function(builder.module, kind, "__errno_location"), [])
    error = builder.neg(builder.sext(builder.load(location), _I64))
    return builder.select(builder.icmp_signed("<", result, ir.Constant(_I64, 0)), error, result)


def _pointer(builder: Any, address: Any, kind: Any = _I8) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def receive(context: Any, descriptor: Any, address: Any, nbytes: Any) -> Any:
    """Read what there is, at most so many bytes, without waiting: recv. 0 at the end of the connection."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        descriptor, address, nbytes = arguments
        kind = ir.FunctionType(_I64, [_I32, _I8.as_pointer(), _I64, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "recv")
        told = [builder.trunc(descriptor, _I32), _pointer(builder, address), nbytes, _FLAGS]
        return _or_error(builder, builder.call(function, told))

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def send_two(context: Any, descriptor: Any, first: Any, first_bytes: Any, second: Any, second_bytes: Any) -> Any:
    """Write what there is room for of two pieces of memory, one after the other, without waiting: sendmsg."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        descriptor, first, first_bytes, second, second_bytes = arguments
        pieces = cgutils.alloca_once(builder, ir.ArrayType(_I64, 4))  # two struct iovec
        message = cgutils.alloca_once(builder, ir.ArrayType(_I64, 7))  # a struct msghdr
        zero = ir.Constant(_I64, 0)
        for place, word in enumerate((first, first_bytes, second, second_bytes)):
            builder.store(word, cgutils.gep_inbounds(builder, pieces, 0, place))
        words = (zero, zero, builder.ptrtoint(pieces, _I64), ir.Constant(_I64, 2), zero, zero, zero)
        for place, word in enumerate(words):
            builder.store(word, cgutils.gep_inbounds(builder, message, 0, place))
        kind = ir.FunctionType(_I64, [_I32, _I8.as_pointer(), _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "sendmsg")
        told = [builder.trunc(descriptor, _I32), builder.bitcast(message, _I8.as_pointer()), _FLAGS]
        return _or_error(builder, builder.call(function, told))

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def watch_for(context: Any, polls: Any, index: Any, descriptor: Any, events: Any) -> Any:
    """Set one of the struct pollfd that begin at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        polls, index, descriptor, events = arguments
        place = builder.add(polls, builder.mul(index, ir.Constant(_I64, POLL_BYTES)))
        builder.store(builder.trunc(descriptor, _I32), _pointer(builder, place, _I32))
        half = _pointer(builder, builder.add(place, ir.Constant(_I64, 4)), _I16)
        builder.store(builder.trunc(events, _I16), half)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def has_ended(context: Any, polls: Any, index: Any) -> Any:
    """Return whether poll() has found that the other end of a connection, for which POLLRDHUP was watched for, is gone."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        polls, index = arguments
        place = builder.add(polls, builder.mul(index, ir.Constant(_I64, POLL_BYTES)))
        found = builder.load(_pointer(builder, builder.add(place, ir.Constant(_I64, 6)), _I16))
        ended = builder.and_(found, ir.Constant(_I16, _POLLERR | _POLLHUP | POLLRDHUP))
        return builder.icmp_unsigned("!=", ended, ir.Constant(_I16, 0))

    return types.boolean(types.int64, types.int64), generate


@intrinsic
def poll(context: Any, polls: Any, count: Any, milliseconds: Any) -> Any:
    """Wait for what watch_for() has set: poll."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        polls, count, milliseconds = arguments
        kind = ir.FunctionType(_I32, [_I8.as_pointer(), _I64, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "poll")
        told = [_pointer(builder, polls), count, builder.trunc(milliseconds, _I32)]
        return _or_error(builder, builder.sext(builder.call(function, told), _I64))

    return types.int64(types.int64, types.int64, types.int64), generate

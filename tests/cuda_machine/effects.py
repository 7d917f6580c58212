"""Instructions that reach memory or other threads."""

from __future__ import annotations

import numpy as np

from tests.cuda_machine.decoder import Action, Decoder, Threads, dtype_of, handles
from tests.cuda_machine.memory import Array, MachineError
from tests.cuda_machine.ptx import PtxError

_HINTS = {"nc", "cg", "cs", "ca", "volatile", "relaxed", "gpu"}  # of caches and ordering: nothing here is out of order
_VECTORS = {"v2": 2, "v4": 4}


def _form(modifiers: list[str]) -> tuple[str, int, str]:
    """Space, elements and type of an access."""
    words = [word for word in modifiers if word not in _HINTS]
    space, kind = words[0], words[-1]
    if space not in ("global", "shared", "param") or words[1:-1] not in ([], ["v2"], ["v4"]):
        raise PtxError("form")
    return space, _VECTORS.get(words[-2], 1), kind


def _of_active(threads: Threads, value: Array) -> Array:
    if len(value) != len(threads.active):
        value = np.broadcast_to(value, threads.active.shape)
    return value[threads.active]


def _cells(threads: Threads, space: str, addresses: Array, size: int, count: int) -> tuple[Array, Array]:
    """The memory and where in it the active threads' accesses begin."""
    here = _of_active(threads, addresses)
    if space == "global":
        return threads.memory.view(here, size, count)
    return threads.shared.view(here, threads.block[threads.active], size, count)


def _spread(threads: Threads, value: Array) -> Array:
    """What the active threads got, among all."""
    result = np.zeros(threads.active.shape, value.dtype)
    result[threads.active] = value
    return result


@handles("ld")
def _load(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    space, count, kind = _form(modifiers)
    dtype, address = dtype_of(kind), decoder.address(operands[1])
    writes = [decoder.write(register, kind) for register in decoder.vector(operands[0])]
    if len(writes) != count:
        raise PtxError("form")

    def from_params(threads: Threads) -> None:
        first = address(threads).astype(np.int64)
        if len(first) > 1:
            first = first[threads.active]
        for part, write in enumerate(writes):
            places = first[:, None] + dtype.itemsize * part + np.arange(dtype.itemsize)
            if places.min() < 0 or places.max() >= len(threads.params):
                raise MachineError(f"byte {places.max()} of {len(threads.params)} of parameters")
            value = threads.params[places].view(dtype)[:, 0]
            write(threads, _spread(threads, value) if len(first) > 1 else value)

    def act(threads: Threads) -> None:
        cells, first = _cells(threads, space, address(threads), dtype.itemsize, count)
        for part, write in enumerate(writes):
            write(threads, _spread(threads, cells[first + part]).view(dtype))

    return from_params if space == "param" else act


@handles("st")
def _store(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    space, count, kind = _form(modifiers)
    size, address = dtype_of(kind).itemsize, decoder.address(operands[0])
    unsigned = np.dtype(f"u{size}")
    reads = [decoder.read(operand, kind) for operand in decoder.vector(operands[1])]
    if len(reads) != count or space == "param":
        raise PtxError("form")

    def act(threads: Threads) -> None:
        cells, first = _cells(threads, space, address(threads), size, count)
        for part, read in enumerate(reads):
            value = _of_active(threads, read(threads)).view(unsigned)
            cells[first + part] = value
            if (cells[first + part] != value).any():
                raise MachineError("threads store different values at one address")

    return act


@handles("atom", "red")
def _atomic_add(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    """Thread after thread, in the order of their numbers."""
    space, operation, kind = (word for word in modifiers if word not in _HINTS)
    dtype = dtype_of(kind)
    if space not in ("global", "shared") or operation != "add" or dtype.kind == "f":
        raise PtxError("form")
    write = decoder.write(operands[0], kind) if len(operands) == 3 else None
    address, read = decoder.address(operands[-2]), decoder.read(operands[-1], kind)

    def act(threads: Threads) -> None:
        cells, places = _cells(threads, space, address(threads), dtype.itemsize, 1)
        old = _add(cells.view(dtype), places, _of_active(threads, read(threads)))
        if write is not None:
            write(threads, _spread(threads, old))

    return act


def _add(cells: Array, places: Array, value: Array) -> Array:
    """Add, and return what was there when it was each one's turn: those before it at the same place have added their values."""
    order = np.argsort(places, kind="stable")
    place, added = places[order], value[order]
    before = np.cumsum(added, dtype=value.dtype) - added
    first = np.searchsorted(place, place, side="left")
    old = np.empty_like(value)
    old[order] = cells[place] + (before - before[first])
    np.add.at(cells, places, value)
    return old


def _warps(threads: Threads, mask: Array) -> Array:
    """Active threads by warp and lane; all threads that a mask of the warp names must be there, with the same mask."""
    active = threads.active.reshape(-1, 32)
    masks = np.broadcast_to(mask, threads.active.shape).reshape(-1, 32)
    named = (masks[:, :1] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0
    here = active.any(1)
    if (named != active)[here].any() or (masks != masks[:, :1])[active].any():
        raise MachineError("lanes that a mask names are not all here")
    return active


@handles("shfl")
def _shuffle(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    sync, how, kind = modifiers
    destination, *found = operands[0].split("|")
    if sync != "sync" or kind != "b32" or how not in ("bfly", "up"):
        raise PtxError("form")
    write = decoder.write(destination, "b32")
    write_inside = [decoder.write(predicate, "pred") for predicate in found]
    value, by, bounds, mask = (decoder.read(operand, "u32") for operand in operands[1:])

    def act(threads: Threads) -> None:
        _warps(threads, mask(threads))
        lane = threads.lane.astype(np.int64)
        c, b = bounds(threads).astype(np.int64), by(threads).astype(np.int64) & 31
        segment, clamp = c >> 8 & 31, c & 31
        last = lane & segment | clamp & ~segment
        source = lane - b if how == "up" else lane ^ b
        inside = source >= last if how == "up" else source <= last
        source = np.where(inside, source, lane)
        everyone = np.broadcast_to(value(threads), lane.shape)
        from_thread = np.arange(len(lane)) - lane + source
        if not threads.active[from_thread[threads.active]].all():
            raise MachineError("a shuffle reads from a lane that is not here")
        write(threads, everyone[from_thread])
        for write_predicate in write_inside:
            write_predicate(threads, inside)

    return act


@handles("redux")
def _reduce(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    *form, kind = modifiers
    if form not in (["sync", "max"], ["sync", "add"]) or kind not in ("u32", "s32"):
        raise PtxError("form")
    reduction = np.maximum if form[1] == "max" else np.add
    write, mask = decoder.write(operands[0], kind), decoder.read(operands[2], "u32")
    value = decoder.read(operands[1], kind)

    def act(threads: Threads) -> None:
        active = _warps(threads, mask(threads))
        numbers = np.broadcast_to(value(threads), threads.active.shape).reshape(-1, 32)
        result = np.zeros(len(active), numbers.dtype)
        for warp in np.flatnonzero(active.any(1)):
            result[warp] = reduction.reduce(numbers[warp][active[warp]])
        write(threads, np.repeat(result, 32))

    return act

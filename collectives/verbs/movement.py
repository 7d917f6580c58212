"""Prepares the verbs that move tensors between ranks without changing them, and runs messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import apart, kept
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.streams import devices_of, wait_on_host
from gradwire.collectives.errors import Mismatch
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import Span, consecutive, only
from gradwire.collectives.torch_internals import uncompiled
from gradwire.collectives.transports.base import Run

#: Moves the blocks of a tensor, or of a list of tensors, to another: (source, destination, tag, deadline) -> None.
_Move = Callable[[Any, Any, int, float], None]


def in_place(engine: Engine, exchange: Run, *, is_written: bool = True) -> Run:
    """Return what runs an exchange on any tensor, in place. is_written: whether the tensor gets the result; otherwise it is
    unchanged."""

    def run(tensor: Tensor, _: Tensor, tag: int, deadline: float) -> None:
        buffer = engine.buffer(tensor)
        flat = buffer.flat if is_written else buffer.expendable()
        exchange(flat, flat, tag, deadline)
        if is_written:
            buffer.store()

    return run


def between(engine: Engine, exchange: Run, *, overwrites: bool = False, own: Span | None = None) -> _Move:
    """Return what runs an exchange from tensors to others, which may share memory; a rank other than the root may have none of
    one kind. overwrites: whether the exchange changes its source, of which it gets a copy. own: where in the destination the
    source may lie without a copy."""

    def run(source: Tensor | list[Tensor], destination: Tensor | list[Tensor], tag: int, deadline: float) -> None:
        sources, destinations = arguments.listed(source), arguments.listed(destination)
        result = engine.buffer(*(destinations or [sources[0].new_empty(0)]), fill=False)
        sent = engine.buffer(*(sources or [destinations[0].new_empty(0)]))
        flat = sent.expendable() if overwrites else sent.flat
        if own is None or flat.data_ptr() != result.flat[own.start : own.stop].data_ptr():
            flat = apart(flat, result.flat)
        exchange(flat, result.flat, tag, deadline)
        result.store()

    return run


def broadcast(engine: Engine, tensor: Tensor, _: Tensor, src: int, algorithm: str) -> PreparedCall:
    """Prepare Communicator.broadcast, which runs on a tensor in place."""
    arguments.check_written(engine, tensor)
    arguments.check_root(engine, "src", src)
    chosen = engine.schedules.choose("broadcast", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
    exchange = engine.prepare("broadcast", chosen, tensor, tensor.numel(), root=src)
    text = f"broadcast({arguments.described(tensor)}{engine.place(tensor)}, src={src}, {chosen})"
    notes = engine.notes(chosen, tensor.nbytes, tensor)
    return PreparedCall(text, text, in_place(engine, exchange), exchange, notes)


def allgather(engine: Engine, input: Tensor, output: Tensor | list[Tensor], algorithm: str) -> PreparedCall:
    """Prepare Communicator.allgather, which runs on the input and the output."""
    parts = arguments.listed(output)
    arguments.check_tensors(engine, input, *parts)
    arguments.check_written(engine, *parts)
    lengths = arguments.part_lengths(engine, "output", output, input, "input")
    chosen = engine.schedules.choose_for_parts(
        "allgather", algorithm, lengths, input.element_size(), on_gpu=input.is_cuda
    )
    layout = consecutive(lengths)
    exchange = engine.prepare("allgather", chosen, input, input.numel(), layout=layout, lengths=((), lengths))
    run = between(engine, exchange, own=layout[engine.rank])
    text = f"allgather({arguments.dtype_name(input)}{lengths}{engine.place(input)}, {chosen})"
    notes = engine.notes(chosen, sum(part.nbytes for part in parts), input)
    return PreparedCall(text, arguments.signature(text, lengths), run, notes=notes)


def gather(engine: Engine, input: Tensor, output: list[Tensor], dst: int, algorithm: str) -> PreparedCall:
    """Prepare Communicator.gather, which runs on the input and the output; the output of ranks other than dst is empty."""
    arguments.check_root(engine, "dst", dst)
    arguments.check_rooted(engine, "output", output, input, "dst", dst)
    arguments.check_written(engine, *output)
    return _rooted(engine, "gather", input, len(output), f"dst={dst}", dst, algorithm)


def scatter(engine: Engine, input: list[Tensor], output: Tensor, src: int, algorithm: str) -> PreparedCall:
    """Prepare Communicator.scatter, which runs on the input and the output; the input of ranks other than src is empty."""
    arguments.check_root(engine, "src", src)
    arguments.check_rooted(engine, "input", input, output, "src", src)
    arguments.check_written(engine, output)
    return _rooted(engine, "scatter", output, len(input), f"src={src}", src, algorithm)


def _rooted(
    engine: Engine, verb: str, one: Tensor, count: int, named_root: str, root: int, algorithm: str
) -> PreparedCall:
    """Prepare a gather or a scatter. one: the tensor of every rank. count: the tensors in the list of this rank."""
    chosen = engine.schedules.choose(verb, algorithm, one.nbytes * engine.size, on_gpu=one.is_cuda)
    own = only(engine.rank, engine.size, one.numel())
    every = consecutive([one.numel()] * engine.size) if count else own
    sent, landed = (own, every) if verb == "gather" else (every, own)
    numel = one.numel() * (1 if verb == "gather" else count)
    exchange = engine.prepare(verb, chosen, one, numel, root=root, layout=landed, source_layout=sent)
    text = f"{verb}({arguments.described(one)}{engine.place(one)}, {named_root}, {chosen})"
    notes = engine.notes(chosen, one.nbytes * max(1, count), one)
    return PreparedCall(text, text, between(engine, exchange), notes=notes)


def alltoall(
    engine: Engine,
    input: Tensor,
    output: Tensor,
    output_splits: tuple[int, ...] | None,
    input_splits: tuple[int, ...] | None,
    algorithm: str,
) -> PreparedCall:
    """Prepare Communicator.alltoall, which runs on the input and the output."""
    arguments.check_tensors(engine, output, input)
    arguments.check_written(engine, output)
    if (output_splits is None) != (input_splits is None):
        raise ValueError(f"rank {engine.rank}: alltoall needs both output_splits and input_splits, or neither")
    if input_splits is None and output.numel() != input.numel():
        raise ValueError(
            f"rank {engine.rank}: alltoall without splits needs an output of input's {input.numel()} elements, not of "
            f"{output.numel()}"
        )
    incoming = arguments.split_lengths(engine, "output", output, output_splits)
    outgoing = arguments.split_lengths(engine, "input", input, input_splits)
    sent, landed = consecutive(outgoing), consecutive(incoming)
    lengths, like, numel, element_size = (outgoing, incoming), input.new_empty(0), input.numel(), input.element_size()

    def choose(nbytes: int) -> str:
        return engine.schedules.choose("alltoall", algorithm, nbytes, on_gpu=like.is_cuda)

    @cache
    def moving(name: str) -> _Move:
        exchange = engine.prepare("alltoall", name, like, numel, layout=landed, source_layout=sent, lengths=lengths)
        return between(engine, exchange)

    chosen = choose(input.nbytes)
    move = moving(chosen)  # before any deadline starts; ranks nearly always agree on it

    def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
        # Ranks may send different numbers of bytes, so they choose when they know those of all ranks.
        agreed = choose(_check_splits(engine, outgoing, incoming, tag, deadline) * element_size)
        moving(agreed)(source, destination, tag, deadline)

    shape, named = (arguments.described(input), chosen) if input_splits is None else ("splits", algorithm)
    text = f"alltoall({arguments.dtype_name(input)}, {shape}{engine.place(input)}, {named})"
    notes = engine.notes(named, max(input.nbytes, output.nbytes), input)
    return PreparedCall(text, text, move if input_splits is None else run, notes=notes)


def barrier(engine: Engine, _: tuple[()], __: tuple[()], algorithm: str) -> PreparedCall:
    """Prepare Communicator.barrier, which needs no tensors."""
    on_gpu = engine.control_device == "cuda"
    chosen = engine.schedules.choose("barrier", algorithm, 1, on_gpu=on_gpu)
    numel = 1 if on_gpu or chosen in PLANNERS["barrier"] else 0
    token = torch.zeros(numel, dtype=torch.uint8, device=engine.control_device)
    exchange = engine.prepare("barrier", chosen, token, numel, "max" if numel else "sum")
    text = f"barrier({chosen})"

    def run(_: object, __: object, tag: int, deadline: float) -> None:
        exchange(token, token, tag, deadline)
        if token.is_cuda:
            wait_on_host(deadline, lambda: engine.operations.monitor.is_broken)

    return PreparedCall(text, text, run, devices=devices_of(token))


def _check_splits(engine: Engine, outgoing: Sequence[int], incoming: Sequence[int], tag: int, deadline: float) -> int:
    """Compare what every rank sends with what every rank expects; the same verdict on all ranks, nothing sent yet. Return the
    most elements that a rank sends."""
    size = engine.size
    rows = engine.table([*outgoing, *incoming], tag, deadline)
    wrong = {
        rank: f"alltoall with input splits {row[:size]} and output splits {row[size:]} (elements)"
        for rank, row in enumerate(rows)
        if any(row[other] != rows[other][size + rank] for other in range(size))
        or any(row[size + other] != rows[other][rank] for other in range(size))
    }
    if wrong:
        operation, places = engine.operations.monitor.running_places()
        raise Mismatch(wrong, rank=engine.rank, operation=operation, places=places)
    return max(sum(row[:size]) for row in rows)


@uncompiled
def message(engine: Engine, verb: str, tensor: Tensor, peer: int | None, tag: int) -> MessageWork:
    """Run Communicator.send or recv, or begin isend or irecv. peer: the other rank; None receives from any."""
    sends, waits = verb.endswith("send"), not verb.startswith("i")
    name = "dst" if sends else "src"
    check = arguments.check_tensors if sends else arguments.check_written
    check(engine, tensor)
    arguments.check_message(engine, verb, tensor, name, peer, tag)
    text = f"{verb}({arguments.described(tensor)}, {name}={peer}, tag={tag})"
    with engine.recording(text, {"bytes": tensor.nbytes}):
        given = tensor if waits else kept(tensor)
        device, copies = engine.on_gpu(text, given, is_written=not sends)
        landed = copies.destination if copies is not None else given
        buffer = engine.buffer(landed, fill=sends)
        return engine.messages.transfer(
            text, buffer, peer, tag, sends=sends, async_op=not waits, device=device, copies=copies
        )

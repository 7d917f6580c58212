"""Prepares the verbs that reduce numbers over all ranks, and the two halves of an allreduce: reduce_shares leaves every rank its
share of the result, gather_shares spreads it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.schedule_cache import Shares
from gradwire.collectives.reduction import Op, check_dtype, finish
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import consecutive
from gradwire.collectives.transports.base import GroupRun, Run
from gradwire.collectives.verbs.movement import between, in_place


def allreduce(
    engine: Engine, tensor: Tensor, _: Tensor, op: Op, prescale: float, postscale: float, algorithm: str
) -> PreparedCall:
    """Prepare Communicator.allreduce without a codec, which runs on a tensor in place."""
    group = _grouped(engine, [tensor], op, prescale, postscale, algorithm)
    return replace(group, run=lambda given, _, tag, deadline: group.run([given], None, tag, deadline))


def grouped_allreduce(
    engine: Engine,
    tensors: list[Tensor],
    _: list[Tensor],
    op: Op,
    prescale: float,
    postscale: float,
    algorithm: str,
) -> PreparedCall:
    """Prepare Communicator.grouped_allreduce, which runs on a list of tensors in place."""
    return replace(_grouped(engine, tensors, op, prescale, postscale, algorithm), direct=None)


def _grouped(
    engine: Engine, tensors: list[Tensor], op: Op, prescale: float, postscale: float, algorithm: str
) -> PreparedCall:
    """Prepare an allreduce that runs on a list of tensors in place; `direct` runs on the only tensor of a list."""
    reduction = arguments.reduction_of(engine, tensors, op, prescale, postscale)
    fused: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        fused.setdefault((tensor.dtype, tensor.device), []).append(place)
    direct: Run | None = None
    parts: list[tuple[list[list[int]], GroupRun]] = []  # the places of the tensors in each buffer of a group
    names: list[str] = []
    for places in fused.values():
        like, numel = tensors[places[0]], sum(tensors[place].numel() for place in places)
        chosen = engine.schedules.choose("allreduce", algorithm, numel * like.element_size(), on_gpu=like.is_cuda)
        group = engine.prepare_group(chosen, like, numel, reduction.op) if len(places) > 1 else None
        if group is not None:
            parts.append(([[place] for place in places], group))
        else:
            direct = engine.prepare("allreduce", chosen, like, numel, reduction.op)
            parts.append(([places], _alone(direct)))
        names.append(chosen)

    def run(given: list[Tensor], _: object, tag: int, deadline: float) -> None:
        for groups, exchange in parts:
            buffers = [engine.buffer(*(given[place] for place in places)) for places in groups]
            numbers = [buffer.flat for buffer in buffers]
            for flat in numbers:
                reduction.begin(flat)
            exchange(numbers, tag, deadline)
            for buffer in buffers:
                reduction.end(buffer.flat)
                buffer.store()

    described = ", ".join(arguments.described(tensor) + engine.place(tensor) for tensor in tensors)
    text = f"allreduce({described}, {reduction}, {', '.join(names)})"
    shown = ", ".join(dict.fromkeys(names))
    notes = engine.notes(shown, sum(tensor.nbytes for tensor in tensors), tensors[0]) if tensors else {}
    return PreparedCall(text, text, run, direct if len(tensors) == 1 and not reduction.is_scaled else None, notes)


def _alone(run: Run) -> GroupRun:
    """Return what runs an operation in place on the only tensor of a list."""
    return lambda tensors, tag, deadline: run(tensors[0], tensors[0], tag, deadline)


def reduce_scatter(
    engine: Engine, input: Tensor | list[Tensor], output: Tensor, op: Op, algorithm: str
) -> PreparedCall:
    """Prepare Communicator.reduce_scatter, which runs on the input and the output."""
    parts = arguments.listed(input)
    arguments.check_tensors(engine, output, *parts)
    name = arguments.reduction_of(engine, [output], op).op
    lengths = arguments.part_lengths(engine, "input", input, output, "output")
    chosen = engine.schedules.choose_for_parts(
        "reduce_scatter", algorithm, lengths, output.element_size(), on_gpu=output.is_cuda
    )
    layout, numel = consecutive(lengths), sum(lengths)
    exchange = engine.prepare("reduce_scatter", chosen, output, numel, name, layout=layout, lengths=(lengths, ()))
    run = between(engine, exchange, overwrites=chosen in PLANNERS["reduce_scatter"])
    row = "" if isinstance(input, Tensor) else ", ".join(map(str, parts[0].shape[1:]))
    shape = f"shape=[..., {row}], " if row else ""  # with which the lengths say what shape all parts have
    text = f"reduce_scatter({arguments.dtype_name(output)}{lengths}{engine.place(output)}, {shape}{name}, {chosen})"
    notes = engine.notes(chosen, sum(part.nbytes for part in parts), output)
    return PreparedCall(text, arguments.signature(text, lengths), run, notes=notes)


def reduce(engine: Engine, tensor: Tensor, _: Tensor, dst: int, op: Op, algorithm: str) -> PreparedCall:
    """Prepare Communicator.reduce, which runs on a tensor, in place on rank dst."""
    name = arguments.reduction_of(engine, [tensor], op).op
    arguments.check_root(engine, "dst", dst)
    chosen = engine.schedules.choose("reduce", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
    exchange = engine.prepare("reduce", chosen, tensor, tensor.numel(), name, dst)
    is_root = engine.rank == dst
    text = f"reduce({arguments.described(tensor)}{engine.place(tensor)}, dst={dst}, {name}, {chosen})"
    notes = engine.notes(chosen, tensor.nbytes, tensor)
    run = in_place(engine, exchange, is_written=is_root)
    return PreparedCall(text, text, run, exchange if is_root else None, notes)


def reduce_shares(engine: Engine, tensor: Tensor, _: Tensor, op: Op, prescale: float, postscale: float) -> PreparedCall:
    """Prepare Communicator.reduce_shares, which runs on a tensor in place."""
    shares = _shares_of(engine, tensor)
    chosen = engine.schedules.choose("allreduce", "auto", tensor.nbytes, on_gpu=tensor.is_cuda)
    if shares.algorithm != chosen:
        return allreduce(engine, tensor, tensor, op, prescale, postscale, "auto")
    reduction = arguments.reduction_of(engine, [tensor], op, prescale, postscale)
    exchange = engine.prepare("reduce_shares", chosen, tensor, tensor.numel(), reduction.op)
    divides = reduction.op == "average" and chosen in PLANNERS["allreduce"]
    spans = shares.spans[engine.rank]

    def run(given: Tensor, _: Tensor, tag: int, deadline: float) -> None:
        buffer = engine.buffer(given)
        reduction.begin(buffer.flat)
        exchange(buffer.flat, buffer.flat, tag, deadline)
        for span in spans:
            if divides:
                finish(buffer.flat[span.start : span.stop], "average", engine.size)
            reduction.end(buffer.flat[span.start : span.stop])
        buffer.store()

    text = f"reduce_shares({arguments.described(tensor)}{engine.place(tensor)}, {reduction}, {chosen})"
    direct = None if divides or reduction.is_scaled else exchange
    return PreparedCall(text, text, run, direct, engine.notes(chosen, tensor.nbytes, tensor))


def gather_shares(engine: Engine, tensor: Tensor, _: Tensor) -> PreparedCall:
    """Prepare Communicator.gather_shares, which runs on a tensor in place."""
    shares = _shares_of(engine, tensor)
    algorithm = shares.algorithm or "rsag"
    layout = consecutive([span.length for (span,) in shares.spans]) if shares.algorithm is None else None
    exchange = engine.prepare("gather_shares", algorithm, tensor, tensor.numel(), layout=layout)
    text = f"gather_shares({arguments.described(tensor)}, {algorithm})"
    notes = engine.notes(algorithm, tensor.nbytes, tensor)
    return PreparedCall(text, text, in_place(engine, exchange), exchange, notes)


def _shares_of(engine: Engine, tensor: Tensor) -> Shares:
    """Return the ranks' shares of a tensor. Raises TypeError or ValueError for one that cannot be reduced."""
    arguments.check_written(engine, tensor)
    check_dtype(engine.rank, tensor.dtype)
    return engine.schedules.shares(tensor.numel(), tensor.element_size(), on_gpu=tensor.is_cuda)

"""The verbs that move tensors without a reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import apart, kept
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import Mismatch
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import consecutive, only
from gradwire.collectives.transports.base import Run
from gradwire.collectives.verbs.base import Ranks


class Movement(Ranks):
    """The verbs that move tensors between ranks without changing them."""

    def allgather(
        self,
        output: Tensor | Sequence[Tensor],
        input: Tensor,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Collect every rank's `input` on all ranks, in rank order.

        output: a tensor with input.numel() elements for each rank; or one tensor per rank, with the number of elements of
        that rank's input. With one tensor per rank, inputs may have different lengths.
        """
        engine = self._engine
        parts = arguments.listed(output)
        arguments.check_tensors(engine, input, *parts)
        arguments.check_written(engine, *parts)
        lengths = arguments.part_lengths(engine, "output", output, input, "input")
        chosen = engine.plans.choose_for_parts(
            "allgather", algorithm, lengths, input.element_size(), on_gpu=input.is_cuda
        )
        layout = consecutive(lengths)
        exchange = engine.prepare("allgather", chosen, input, input.numel(), layout=layout)
        text = f"allgather({arguments.dtype_name(input)}{lengths}{engine.place(input)}, {chosen})"
        mine, *theirs = arguments.held([input, *parts], async_op)

        def run(source: Tensor, destinations: list[Tensor], tag: int, deadline: float) -> None:
            own, result = engine.buffer(source).flat, engine.buffer(*destinations, fill=False)
            place = result.flat[layout[engine.rank].start : layout[engine.rank].stop]
            if own.data_ptr() != place.data_ptr():
                own = apart(own, result.flat)
            exchange(own, result.flat, tag, deadline)
            result.store()

        notes = engine.notes(chosen, sum(part.nbytes for part in parts), input)
        prepared = PreparedCall(text, arguments.signature(text, lengths), run, notes=notes)
        return engine.run(prepared, mine, theirs, async_op=async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Copy rank src's `tensor` into that of every other rank, in place."""
        engine = self._engine
        arguments.check_written(engine, tensor)
        arguments.check_root(engine, "src", src)
        chosen = engine.plans.choose("broadcast", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
        exchange = engine.prepare("broadcast", chosen, tensor, tensor.numel(), root=src)
        text = f"broadcast({arguments.described(tensor)}{engine.place(tensor)}, src={src}, {chosen})"
        held = kept(tensor) if async_op else tensor

        def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
            buffer = engine.buffer(source)
            exchange(buffer.flat, buffer.flat, tag, deadline)
            buffer.store()

        prepared = PreparedCall(text, text, run, notes=engine.notes(chosen, tensor.nbytes, tensor))
        return engine.run(prepared, held, held, async_op=async_op)

    def gather(
        self,
        input: Tensor,
        output: Sequence[Tensor] | None = None,
        dst: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Collect every rank's `input` on rank dst; all inputs have equal numbers of elements. output: on dst one tensor per
        rank; None elsewhere.
        """
        return self._rooted("gather", input, output, dst, algorithm, async_op)

    def scatter(
        self,
        output: Tensor,
        input: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Send the r-th tensor of rank src's `input` to `output` on rank r. input: on src one tensor per rank, all with equal
        numbers of elements; None elsewhere.
        """
        return self._rooted("scatter", output, input, src, algorithm, async_op)

    def _rooted(
        self, verb: str, one: Tensor, many: Sequence[Tensor] | None, root: int, algorithm: str, async_op: bool
    ) -> Work:
        """Gather, or scatter, its reverse. one: the tensor of every rank. many: the root's tensors, one for every rank."""
        engine = self._engine
        gathers = verb == "gather"
        many_name, root_name = ("output", "dst") if gathers else ("input", "src")
        arguments.check_root(engine, root_name, root)
        parts = arguments.rooted_list(engine, many_name, many, one, root_name, root)
        arguments.check_written(engine, *(parts if gathers else [one]))
        chosen = engine.plans.choose(verb, algorithm, one.nbytes * engine.size, on_gpu=one.is_cuda)
        own = only(engine.rank, engine.size, one.numel())
        every = consecutive([one.numel()] * engine.size) if parts else own
        layouts = (own, every) if gathers else (every, own)
        numel = one.numel() * (1 if gathers else len(parts))
        exchange = engine.prepare(verb, chosen, one, numel, root=root, layout=layouts[1], source_layout=layouts[0])
        text = f"{verb}({arguments.described(one)}{engine.place(one)}, {root_name}={root}, {chosen})"
        mine, *theirs = arguments.held([one, *parts], async_op)
        tensors = ([mine], theirs) if gathers else (theirs, [mine])

        def run(sources: list[Tensor], destinations: list[Tensor], tag: int, deadline: float) -> None:
            _move(engine, exchange, (sources, destinations), tag, deadline)

        notes = engine.notes(chosen, one.nbytes * max(1, len(parts)), one)
        return engine.run(PreparedCall(text, text, run, notes=notes), *tensors, async_op=async_op)

    def alltoall(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Send the r-th part of `input` to rank r. The part that rank r sends to this rank becomes the r-th part of `output`.

        output_splits, input_splits: for each rank, the number of rows (dimension 0); None for equal parts. Either all ranks
        give splits or none does. Raises Mismatch on all ranks if a rank sends another number of rows than the receiver expects.
        """
        engine = self._engine
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

        def planned(nbytes: int) -> tuple[str, Run]:
            chosen = engine.plans.choose("alltoall", algorithm, nbytes, on_gpu=input.is_cuda)
            return chosen, engine.prepare(
                "alltoall",
                chosen,
                input,
                input.numel(),
                layout=landed,
                source_layout=sent,
                lengths=(outgoing, incoming),
            )

        plan = planned(input.nbytes)
        # With splits, ranks may send different numbers of bytes, so they choose when they know those of all ranks.
        shape, named = (arguments.described(input), plan[0]) if input_splits is None else ("splits", algorithm)
        text = f"alltoall({arguments.dtype_name(input)}, {shape}{engine.place(input)}, {named})"
        mine, theirs = arguments.held([input, output], async_op)

        def run(source: list[Tensor], destination: list[Tensor], tag: int, deadline: float) -> None:
            _, exchange = plan
            if input_splits is not None:
                most = _check_splits(engine, outgoing, incoming, tag, deadline)
                _, exchange = planned(most * input.element_size())
            _move(engine, exchange, (source, destination), tag, deadline)

        notes = engine.notes(named, max(input.nbytes, output.nbytes), input)
        return engine.run(PreparedCall(text, text, run, notes=notes), [mine], [theirs], async_op=async_op)

    def barrier(self, *, timeout_s: float | None = None, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Wait until every rank has called this. timeout_s: seconds that this barrier may take from its start; None: the
        Communicator's timeout_s."""
        engine = self._engine
        if timeout_s is not None:
            arguments.check_seconds(engine.rank, "barrier: timeout_s", timeout_s)
        chosen = engine.plans.choose("barrier", algorithm, 1, on_gpu=False)
        nothing = torch.empty(0, dtype=torch.uint8, device=engine.control_device)
        numel = 0 if chosen not in PLANNERS["barrier"] else 1
        token = nothing.new_zeros(numel)
        exchange = engine.prepare("barrier", chosen, token, numel, "max" if numel else "sum")
        text = f"barrier({chosen})"
        prepared = PreparedCall(text, text, exchange)
        return engine.run(prepared, token, token, async_op=async_op, timeout_s=timeout_s)


def _move(
    engine: Engine,
    exchange: Run,
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
    tag: int,
    deadline: float,
) -> None:
    """Move blocks between two buffers. tensors: of the source and of the destination; a rank other than the root may have no
    tensors in one of them."""
    sources, destinations = (each or [other[0].new_empty(0)] for each, other in (tensors, tensors[::-1]))
    result = engine.buffer(*destinations, fill=False)
    exchange(apart(engine.buffer(*sources).flat, result.flat), result.flat, tag, deadline)
    result.store()


def _check_splits(engine: Engine, outgoing: list[int], incoming: list[int], tag: int, deadline: float) -> int:
    """Compare what every rank sends with what every rank expects; the same verdict on all ranks, nothing sent yet. Return the
    most elements that a rank sends."""
    size = engine.size
    rows = engine.table(outgoing + incoming, tag, deadline)
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

"""The verbs that move tensors without a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import apart
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.operations import Turn
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import Mismatch
from gradwire.collectives.schedules.spans import Layout, consecutive, only
from gradwire.collectives.transports.base import Whole
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
        whole = engine.whole("allgather", chosen, input, input.numel())
        text = f"allgather({arguments.dtype_name(input)}{lengths}{engine.place(input)}, {chosen})"
        mine, *theirs = arguments.held([input, *parts], async_op)

        def body(turn: Turn) -> None:
            source = engine.buffer(mine).flat
            result = engine.buffer(*theirs, fill=False)
            layout = consecutive(lengths)
            place = result.flat[layout[engine.rank].start : layout[engine.rank].stop]
            if source.data_ptr() != place.data_ptr():
                source = apart(source, result.flat)
            if whole is not None:
                engine.run_whole(turn, whole, source, result.flat)
            else:
                place.copy_(source)
                engine.over_buffer(turn, "allgather", chosen, result.flat, layout=layout)
            result.store()

        return engine.submit(text, body, async_op=async_op, signature=arguments.signature(text, lengths))

    def broadcast(self, tensor: Tensor, src: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Copy rank src's `tensor` into that of every other rank, in place."""
        engine = self._engine
        arguments.check_written(engine, tensor)
        arguments.check_root(engine, "src", src)
        chosen = engine.plans.choose("broadcast", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
        whole = engine.whole("broadcast", chosen, tensor, tensor.numel(), root=src)
        text = f"broadcast({arguments.described(tensor)}{engine.place(tensor)}, src={src}, {chosen})"
        (held,) = arguments.held([tensor], async_op)

        def body(turn: Turn) -> None:
            buffer = engine.buffer(held)
            engine.over_buffer(turn, "broadcast", chosen, buffer.flat, root=src, whole=whole)
            buffer.store()

        return engine.submit(text, body, async_op=async_op)

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
        whole = engine.whole(verb, chosen, one, one.numel() * (1 if gathers else len(parts)), root=root)
        text = f"{verb}({arguments.described(one)}{engine.place(one)}, {root_name}={root}, {chosen})"
        mine, *theirs = arguments.held([one, *parts], async_op)
        tensors = ([mine], theirs) if gathers else (theirs, [mine])

        def layouts() -> tuple[Layout, Layout]:
            own = only(engine.rank, engine.size, mine.numel())
            every = consecutive([mine.numel()] * engine.size) if theirs else own
            return (own, every) if gathers else (every, own)

        def body(turn: Turn) -> None:
            _move(engine, turn, verb, chosen, whole, tensors, layouts, root)

        return engine.submit(text, body, async_op=async_op)

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

        def planned(nbytes: int) -> tuple[str, Whole | None]:
            chosen = engine.plans.choose("alltoall", algorithm, nbytes, on_gpu=input.is_cuda)
            return chosen, engine.whole("alltoall", chosen, input, input.numel(), lengths=(outgoing, incoming))

        plan = planned(input.nbytes)
        # With splits, ranks may send different numbers of bytes, so they choose when they know those of all ranks.
        shape, named = (arguments.described(input), plan[0]) if input_splits is None else ("splits", algorithm)
        text = f"alltoall({arguments.dtype_name(input)}, {shape}{engine.place(input)}, {named})"
        mine, theirs = arguments.held([input, output], async_op)

        def layouts() -> tuple[Layout, Layout]:
            return consecutive(outgoing), consecutive(incoming)

        def body(turn: Turn) -> None:
            chosen, whole = plan
            if input_splits is not None:
                most = _check_splits(engine, turn, outgoing, incoming)
                chosen, whole = planned(most * mine.element_size())
            _move(engine, turn, "alltoall", chosen, whole, ([mine], [theirs]), layouts)

        return engine.submit(text, body, async_op=async_op)

    def barrier(self, *, timeout_s: float | None = None, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Wait until every rank has called this. timeout_s: seconds that this barrier may take from its start; None: the
        Communicator's timeout_s."""
        engine = self._engine
        if timeout_s is not None:
            arguments.check_seconds(engine.rank, "barrier: timeout_s", timeout_s)
        chosen = engine.plans.choose("barrier", algorithm, 1, on_gpu=False)
        nothing = torch.empty(0, dtype=torch.uint8, device=engine.control_device)
        whole = engine.whole("barrier", chosen, nothing, 0)

        def body(turn: Turn) -> None:
            if whole is not None:
                engine.run_whole(turn, whole, nothing, nothing)
            else:
                engine.meet(turn, chosen)

        return engine.submit(f"barrier({chosen})", body, async_op=async_op, timeout_s=timeout_s)


def _move(
    engine: Engine,
    turn: Turn,
    verb: str,
    algorithm: str,
    whole: Whole | None,
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
    layouts: Callable[[], tuple[Layout, Layout]],
    root: int = 0,
) -> None:
    """Move blocks between two buffers. tensors, layouts: of the source and of the destination; a rank other than the root may
    have no tensors in one of them."""
    sources, destinations = (each or [other[0].new_empty(0)] for each, other in (tensors, tensors[::-1]))
    result = engine.buffer(*destinations, fill=False)
    source = apart(engine.buffer(*sources).flat, result.flat)
    if whole is not None:
        engine.run_whole(turn, whole, source, result.flat)
    else:
        sent, landed = layouts()
        if all(tensors):
            own, place = sent[engine.rank], landed[engine.rank]
            result.flat[place.start : place.stop].copy_(source[own.start : own.stop])
        engine.between(turn, verb, algorithm, source, sent, result.flat, landed, root)
    result.store()


def _check_splits(engine: Engine, turn: Turn, outgoing: list[int], incoming: list[int]) -> int:
    """Compare what every rank sends with what every rank expects; the same verdict on all ranks, nothing sent yet. Return the
    most elements that a rank sends."""
    size = engine.size
    rows = engine.table(turn, outgoing + incoming)
    wrong = {
        rank: f"alltoall with input splits {row[:size]} and output splits {row[size:]} (elements)"
        for rank, row in enumerate(rows)
        if any(row[other] != rows[other][size + rank] for other in range(size))
        or any(row[size + other] != rows[other][rank] for other in range(size))
    }
    if wrong:
        raise Mismatch(
            wrong, rank=engine.rank, operation=turn.call, places=engine.operations.places(turn.sequence, turn.call)
        )
    return max(sum(row[:size]) for row in rows)

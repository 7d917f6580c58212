"""The verbs that reduce over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall, PreparedOperation
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import Op
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import consecutive
from gradwire.collectives.transports.base import Run
from gradwire.collectives.verbs.base import Ranks
from gradwire.collectives.verbs.compressed import allreduce_compressed, named_codec


class Reductions(Ranks):
    """The verbs that combine the numbers of all ranks."""

    def allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        compression: str | Codec | None = None,
        feedback: Feedback | None = None,
        step: int | None = None,
        seed: int | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        **former: object,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, with the result on every rank.

        prescale, postscale: factors by which each rank's numbers and the result are multiplied; floating-point tensors only.
        compression: a codec of gradwire.collectives.compression, or its name for the default settings. The ranks then send codes
        instead of float32 numbers. A codec requires a floating-point tensor, and op 'sum' or 'average'. If the codec is not the
        same on all ranks, all raise Mismatch.
        feedback: a Feedback from new_feedback(), which adds the error of each encoding to the input of the next one. Each
        buffer needs a Feedback of its own.
        step: the training step, for codecs whose codes depend on it: equal steps, seeds and inputs give equal bits.
        Default: feedback.step, one more than the step of the last call; 0 without feedback. A codec that selects numbers by
        the step, such as randomk, needs step or feedback; without both, the call raises ValueError.
        seed: a whole number that differs between the buffers of a step, so that their rounding differs. Default: feedback.seed;
        0 without feedback.

        If the codes of a codec cannot be added, algorithm='auto' runs 'two_shot', or 'one_shot' for chunktopk. In 'two_shot',
        each rank decodes and adds the codes of its share of the buffer, and sends a code of this sum to all other ranks. In
        'one_shot', each rank sends its code to all other ranks, and adds all codes. See docs/guides/compression.md.
        """
        engine = self._engine
        if former:
            remedy = "; codec= is now compression=" if "codec" in former else ""
            raise TypeError(f"rank {self.rank}: allreduce has no argument {next(iter(former))!r}{remedy}")
        if compression is not None or feedback is not None:
            made = named_codec(engine, compression, feedback, step, seed)
            if made is not None:
                numbers = op, prescale, postscale
                return allreduce_compressed(engine, tensor, *numbers, made, feedback, step, seed, algorithm, async_op)
        key = "allreduce", op, algorithm, prescale, postscale
        known: PreparedCall | None = engine.known(tensor, key)
        call = known or prepared(engine, tensor, op, prescale, postscale, algorithm)
        if known is None:
            engine.keep(tensor, key, call)
        held = kept(tensor) if async_op else tensor
        return engine.run(call, held, held, direct=known is not None, async_op=async_op)

    def new_feedback(
        self, compression: str | Codec, numel: int, device: str | torch.device = "cpu", *, seed: int = 0
    ) -> Feedback:
        """Make the Feedback of this rank for allreduce(compression=...) of one buffer of numel elements. Not a collective call.

        seed: the default of the argument `seed` in calls of allreduce with this object. Raises ValueError for an unknown codec,
        or if numel is negative.
        """
        made = make_codec(compression)
        if not isinstance(seed, int):
            raise ValueError(f"rank {self.rank}: seed={seed!r}; a whole number is needed")
        if not isinstance(numel, int) or numel < 0:
            raise ValueError(f"rank {self.rank}: numel={numel!r}; a whole number from 0 is needed")
        with torch.inference_mode(False):  # so that it can be used in any mode
            place = torch.device(device)
            return Feedback(made, self._engine.plans.partition(made, numel, device_type=place.type), place, seed)

    def prepare_allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
    ) -> PreparedOperation:
        """Return an allreduce of `tensor` that is checked and planned now, and can be run any number of times. Not a
        collective call.

        The tensor must keep its memory. The arguments are those of allreduce; there is no prepared form with a codec.
        """
        return PreparedOperation(
            self._engine, tensor, prepared(self._engine, tensor, op, prescale, postscale, algorithm)
        )

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Allreduce several tensors as one operation. Tensors of one dtype and device are joined in one buffer."""
        call = grouped(self._engine, tensors, op, prescale, postscale, algorithm)
        return self._engine.run(call, arguments.held(tensors, async_op), None, async_op=async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Reduce `input` over all ranks, and write the r-th part of the result to `output` on rank r.

        input: a tensor with output.numel() elements for each rank, or one tensor per rank, with the same shapes on all
        ranks. The input is not changed. If ranks give lists with different shapes, they raise Mismatch, even if the numbers
        of elements are equal.
        """
        engine = self._engine
        parts = arguments.listed(input)
        arguments.check_tensors(engine, output, *parts)
        name = arguments.reduction_of(engine, [output], op).op
        lengths = arguments.part_lengths(engine, "input", input, output, "output")
        chosen = engine.plans.choose_for_parts(
            "reduce_scatter", algorithm, lengths, output.element_size(), on_gpu=output.is_cuda
        )
        layout = consecutive(lengths)
        exchange = engine.prepare("reduce_scatter", chosen, output, sum(lengths), name, layout=layout)
        overwrites = chosen in PLANNERS["reduce_scatter"]
        first = [lengths[0]] if isinstance(input, Tensor) else list(parts[0].shape)
        row = ", ".join(map(str, first[1:]))  # with which the lengths say what shape all parts have
        shape = f"shape=[..., {row}], " if row else ""
        place = engine.place(output)
        text = f"reduce_scatter({arguments.dtype_name(output)}{lengths}{place}, {shape}{name}, {chosen})"
        mine, *theirs = arguments.held([output, *parts], async_op)

        def run(sources: list[Tensor], destination: Tensor, tag: int, deadline: float) -> None:
            source, result = engine.buffer(*sources), engine.buffer(destination, fill=False)
            exchange(source.expendable() if overwrites else source.flat, result.flat, tag, deadline)
            result.store()

        notes = engine.notes(chosen, sum(part.nbytes for part in parts), output)
        prepared_call = PreparedCall(text, arguments.signature(text, lengths), run, notes=notes)
        return engine.run(prepared_call, theirs, mine, async_op=async_op)

    def reduce(
        self, tensor: Tensor, dst: int = 0, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduce `tensor` over all ranks, in place on rank dst. On the other ranks it is unchanged."""
        engine = self._engine
        name = arguments.reduction_of(engine, [tensor], op).op
        arguments.check_root(engine, "dst", dst)
        chosen = engine.plans.choose("reduce", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
        exchange = engine.prepare("reduce", chosen, tensor, tensor.numel(), name, dst)
        text = f"reduce({arguments.described(tensor)}{engine.place(tensor)}, dst={dst}, {name}, {chosen})"
        held = kept(tensor) if async_op else tensor

        def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
            buffer = engine.buffer(source)
            flat = buffer.flat if engine.rank == dst else buffer.expendable()
            exchange(flat, flat, tag, deadline)
            if engine.rank == dst:
                buffer.store()

        prepared_call = PreparedCall(text, text, run, notes=engine.notes(chosen, tensor.nbytes, tensor))
        return engine.run(prepared_call, held, held, async_op=async_op)


def prepared(engine: Engine, tensor: Tensor, op: Op, prescale: float, postscale: float, algorithm: str) -> PreparedCall:
    """Check and prepare an allreduce of numbers, which runs on a tensor, in place."""
    group = grouped(engine, [tensor], op, prescale, postscale, algorithm)

    def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
        group.run([source], None, tag, deadline)

    return replace(group, run=run)


def grouped(
    engine: Engine, tensors: Sequence[Tensor], op: Op, prescale: float, postscale: float, algorithm: str
) -> PreparedCall:
    """Check and prepare an allreduce of numbers, which runs on a list of tensors, in place."""
    reduction = arguments.reduction_of(engine, tensors, op, prescale, postscale)
    fused: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        fused.setdefault((tensor.dtype, tensor.device), []).append(place)
    parts: list[tuple[list[int], Run]] = []
    names: list[str] = []
    for places in fused.values():
        like, numel = tensors[places[0]], sum(tensors[place].numel() for place in places)
        chosen = engine.plans.choose("allreduce", algorithm, numel * like.element_size(), on_gpu=like.is_cuda)
        parts.append((places, engine.prepare("allreduce", chosen, like, numel, reduction.op)))
        names.append(chosen)
    described = ", ".join(arguments.described(tensor) + engine.place(tensor) for tensor in tensors)
    text = f"allreduce({described}, {reduction}, {', '.join(names)})"

    def run(given: Sequence[Tensor], _: object, tag: int, deadline: float) -> None:
        for places, exchange in parts:
            buffer = engine.buffer(*(given[place] for place in places))
            reduction.begin(buffer.flat)
            exchange(buffer.flat, buffer.flat, tag, deadline)
            reduction.end(buffer.flat)
            buffer.store()

    direct = parts[0][1] if len(tensors) == 1 and not reduction.is_scaled else None
    shown = ", ".join(dict.fromkeys(names))
    notes = engine.notes(shown, sum(tensor.nbytes for tensor in tensors), tensors[0]) if tensors else {}
    return PreparedCall(text, text, run, direct, notes)

"""The verbs that reduce over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.operations import Turn
from gradwire.collectives.engine.prepared import PreparedOperation
from gradwire.collectives.engine.work import DONE, Work
from gradwire.collectives.reduction import Op, finish
from gradwire.collectives.schedules.spans import Layout, consecutive
from gradwire.collectives.transports.base import Whole
from gradwire.collectives.verbs.base import Ranks
from gradwire.collectives.verbs.compressed import allreduce_compressed, named_codec


class Planned(NamedTuple):
    """A checked and planned allreduce. whole: the verb that the link has prepared, if it runs the allreduce by itself."""

    text: str
    body: Callable[[Turn], None]
    whole: Whole | None


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
        key = op, algorithm, prescale, postscale
        if async_op:
            if (work := engine.repeat_later(tensor, key)) is not None:
                return work
        elif engine.repeat(tensor, key):
            return DONE
        call, body, whole = self._planned([tensor], op, prescale, postscale, algorithm, async_op)
        if whole is not None:
            engine.remember_whole(tensor, key, call, whole)
        return engine.submit(call, body, async_op=async_op)

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
        planned = self._planned([tensor], op, prescale, postscale, algorithm, True)
        return PreparedOperation(self._engine, tensor, *planned)

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
        call, body, _ = self._planned(tensors, op, prescale, postscale, algorithm, async_op)
        return self._engine.submit(call, body, async_op=async_op)

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
        whole = engine.whole("reduce_scatter", chosen, output, sum(lengths), name)
        first = [lengths[0]] if isinstance(input, Tensor) else list(parts[0].shape)
        row = ", ".join(map(str, first[1:]))  # with which the lengths say what shape all parts have
        shape = f"shape=[..., {row}], " if row else ""
        place = engine.place(output)
        text = f"reduce_scatter({arguments.dtype_name(output)}{lengths}{place}, {shape}{name}, {chosen})"
        mine, *theirs = arguments.held([output, *parts], async_op)

        def body(turn: Turn) -> None:
            source = engine.buffer(*theirs)
            result = engine.buffer(mine, fill=False)
            if whole is not None:
                engine.run_whole(turn, whole, source.flat, result.flat)
            else:
                layout = consecutive(lengths)
                every = source.expendable()
                engine.over_buffer(turn, "reduce_scatter", chosen, every, name, layout=layout)
                result.flat.copy_(every[layout[engine.rank].start : layout[engine.rank].stop])
                finish(result.flat, name, engine.size)
            result.store()

        return engine.submit(text, body, async_op=async_op, signature=arguments.signature(text, lengths))

    def reduce(
        self, tensor: Tensor, dst: int = 0, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduce `tensor` over all ranks, in place on rank dst. On the other ranks it is unchanged."""
        engine = self._engine
        name = arguments.reduction_of(engine, [tensor], op).op
        arguments.check_root(engine, "dst", dst)
        chosen = engine.plans.choose("reduce", algorithm, tensor.nbytes, on_gpu=tensor.is_cuda)
        whole = engine.whole("reduce", chosen, tensor, tensor.numel(), name, dst)
        text = f"reduce({arguments.described(tensor)}{engine.place(tensor)}, dst={dst}, {name}, {chosen})"
        (held,) = arguments.held([tensor], async_op)

        def body(turn: Turn) -> None:
            buffer = engine.buffer(held)
            flat = buffer.flat if engine.rank == dst else buffer.expendable()
            engine.over_buffer(turn, "reduce", chosen, flat, name, dst, whole=whole)
            if engine.rank == dst:
                finish(flat, name if whole is None else "sum", engine.size)
                buffer.store()

        return engine.submit(text, body, async_op=async_op)

    def _planned(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        prescale: float,
        postscale: float,
        algorithm: str,
        async_op: bool,
        spans: Layout | None = None,
    ) -> Planned:
        """Check the arguments of an allreduce of numbers, and plan it. spans: for the first half of an allreduce, where this
        rank's share of the only tensor lies."""
        engine = self._engine
        verb, collective = ("allreduce", "allreduce") if spans is None else ("reduce_shares", "reduce_scatter")
        reduction = arguments.reduction_of(engine, tensors, op, prescale, postscale)
        fused: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in arguments.held(tensors, async_op):
            fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        groups = list(fused.values())
        sizes = [sum(t.nbytes for t in group) for group in groups]
        chosen = [
            # The shares of halves do not depend on the device.
            engine.plans.choose("allreduce", algorithm, nbytes, on_gpu=spans is None and group[0].is_cuda)
            for group, nbytes in zip(groups, sizes, strict=True)
        ]
        described = [arguments.described(tensor) + engine.place(tensor) for tensor in tensors]
        text = f"{verb}({', '.join(described)}, {reduction}, {', '.join(chosen)})"

        wholes = [
            engine.whole(verb, choice, group[0], sum(t.numel() for t in group), reduction.op)
            for group, choice in zip(groups, chosen, strict=True)
        ]

        def body(turn: Turn) -> None:
            for group, choice, whole in zip(groups, chosen, wholes, strict=True):
                buffer = engine.buffer(*group)
                reduction.begin(buffer.flat)
                engine.over_buffer(turn, collective, choice, buffer.flat, reduction.op, whole=whole)
                for part in [buffer.flat] if spans is None else [buffer.flat[s.start : s.stop] for s in spans]:
                    reduction.end(part, engine.size, is_average=whole is not None)
                buffer.store()

        alone = wholes[0] if len(tensors) == 1 and not reduction.is_scaled else None
        return Planned(text, body, alone)

"""allreduce by codes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.buffers import Buffer, kept
from gradwire.collectives.engine.engine import CodesRun, Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import Op, Reduction
from gradwire.collectives.torch_internals import plain


def named_codec(
    engine: Engine, codec: str | Codec | None, feedback: Feedback | None, step: int | None, seed: int | None
) -> Codec | None:
    """Return the codec that a caller names; None for no compression. Raises ValueError for an unknown codec, or an invalid step
    or seed."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"rank {engine.rank}: step={step!r}; a whole number from 0 is needed")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"rank {engine.rank}: seed={seed!r}; a whole number is needed")
    made = codec if codec is None or isinstance(codec, Codec) else make_codec(codec)
    if made is None or made.name == "none":
        if feedback is not None:
            raise ValueError(f"rank {engine.rank}: feedback needs a codec: without one there is no error")
        return None
    return made


def allreduce_compressed(
    engine: Engine,
    tensor: Tensor,
    op: Op,
    prescale: float,
    postscale: float,
    codec: Codec,
    feedback: Feedback | None,
    step: int | None,
    seed: int | None,
    algorithm: str,
    async_op: bool,
) -> Work:
    """Allreduce a tensor by codes; see Communicator.allreduce. codec: other than 'none'."""
    key = "allreduce", op, prescale, postscale, codec, algorithm, feedback is not None
    planned: CompressedCall | None = engine.known(tensor, key)
    reduction = None if planned is None else planned.reduction
    if reduction is None:
        reduction = arguments.reduction_of(engine, [tensor], op, prescale, postscale)
        if not tensor.dtype.is_floating_point or reduction.op not in ("sum", "average"):
            raise ValueError(
                f"rank {engine.rank}: codec {codec.name!r} is for the sum or average of floating-point tensors, not for op "
                f"{reduction.op!r} of {tensor.dtype}"
            )
    if feedback is not None:
        _check_feedback(engine, feedback, codec, tensor)
    step, seed = _step_and_seed(engine, codec, feedback, step, seed)
    present = codec.at(step)
    if planned is None or planned.present != present:
        planned = CompressedCall(engine, tensor, reduction, codec, present, algorithm, feedback is not None)
        engine.keep(tensor, key, planned)
    work = planned.submit(tensor, feedback, step, seed, async_op=async_op)
    if feedback is not None:
        feedback.step = step + 1
    return work


class CompressedCall:
    """An allreduce by codes that is planned for tensors of one dtype, shape and device. present: the codec in its form for the
    step."""

    def __init__(
        self,
        engine: Engine,
        like: Tensor,
        reduction: Reduction,
        codec: Codec,
        present: Codec,
        algorithm: str,
        with_feedback: bool,
    ) -> None:
        self._engine, self._codec = engine, codec
        self.reduction, self.present = reduction, present
        numel, nbytes, on_gpu = like.numel(), present.wire_bytes(like.numel()), like.is_cuda
        chosen = engine.plans.choose_for_codec(codec, algorithm, nbytes, with_feedback=with_feedback, on_gpu=on_gpu)
        corrected = ", error feedback" if with_feedback else ""
        place = " on cuda" if on_gpu else ""  # which decides how the buffer is cut into chunks
        # For a codec that draws by the step, every step would be a new call, if its signature named the step.
        self._text, signature = (
            f"allreduce({arguments.described(like)}{place}, {reduction}, {chosen}, {each.identity}{corrected}"
            for each in (present, codec)
        )
        text = f"{self._text})"
        notes = engine.notes(chosen, 4 * numel, like, codec=codec.name)
        self._call = PreparedCall(text, signature if present.draws else text, self._run, notes=notes)
        engine.rehearse(codec, like.device, with_feedback=with_feedback)
        divisor = engine.size if reduction.op == "average" else 1
        if codec.summable and chosen != shot_of(codec):
            self._exchange = _adding_codes(engine, present, numel, chosen, like, divisor)
        else:
            self._exchange = engine.prepare_codes(codec, present, numel, chosen, like.device, divisor)

    def submit(self, tensor: Tensor, feedback: Feedback | None, step: int, seed: int, *, async_op: bool) -> Work:
        """Submit the operation for one tensor."""
        call = self._call
        if self.present.draws:
            text = f"{self._text}, step={step})"
            call = PreparedCall(text, call.signature, call.run, notes=call.notes)
        held = kept(tensor) if async_op else tensor
        return self._engine.run(call, held, (feedback, step, seed), async_op=async_op)

    def _run(self, tensor: Tensor, options: tuple[Feedback | None, int, int], tag: int, deadline: float) -> None:
        reduction, own = self.reduction, plain(tensor)
        needs_copy = own.dtype is not torch.float32 or not own.is_contiguous() or own.is_neg()
        buffer = Buffer([own], via_host=False) if needs_copy else None
        flat = own.as_strided((own.numel(),), (1,)) if buffer is None else buffer.flat.to(torch.float32)
        if reduction.prescale != 1.0:
            reduction.begin(flat)
        self._exchange(flat, *options, tag, deadline)
        if reduction.postscale != 1.0:
            reduction.end(flat)
        if buffer is not None:
            if flat.dtype is not buffer.flat.dtype:
                buffer.flat.copy_(flat)
            buffer.store()


def _adding_codes(engine: Engine, codec: Codec, numel: int, algorithm: str, like: Tensor, divisor: int) -> CodesRun:
    """Return what adds the codes of all ranks as they are, with the codec's headroom. codec: in its form for the step."""
    nbytes = codec.wire_bytes(numel)
    codes_like = torch.empty(0, dtype=codec.wire_dtype, device=like.device)
    exchange = engine.prepare("allreduce", algorithm, codes_like, nbytes // codes_like.element_size())
    shrink = codec.headroom(engine.size)

    def run(flat: Tensor, feedback: Feedback | None, step: int, seed: int, tag: int, deadline: float) -> None:
        residual = feedback.worker if feedback is not None else None
        scaled = [tensor for tensor in (flat, residual) if tensor is not None and shrink != 1.0]
        for tensor in scaled:
            tensor.mul_(shrink)
        wire = engine.memory_for_codes(nbytes, flat.device)
        with engine.span("encode", elements=numel):
            codec.encode(flat, wire, residual=residual)
        for tensor in scaled[1:]:
            tensor.div_(shrink)
        codes = engine.buffer(wire.view(codec.wire_dtype))
        exchange(codes.flat, codes.flat, tag, deadline)
        codes.store()
        with engine.span("decode", elements=numel):
            codec.decode(wire, flat, scale=1 / (shrink * divisor))

    return run


def _step_and_seed(
    engine: Engine, codec: Codec, feedback: Feedback | None, step: int | None, seed: int | None
) -> tuple[int, int]:
    """Return the step and the seed of a call: the given ones, else those of the feedback. Raises ValueError if the same numbers
    would be drawn at every call."""
    if feedback is not None:
        return feedback.step if step is None else step, feedback.seed if seed is None else seed
    if step is None and codec.draws:
        raise ValueError(
            f"rank {engine.rank}: codec {codec.name!r} selects by the step which numbers it sends, so it would always send the "
            f"same: give step=, or feedback=communicator.new_feedback(codec, numel), which counts its calls"
        )
    return step or 0, seed or 0


def _check_feedback(engine: Engine, feedback: Feedback, codec: Codec, tensor: Tensor) -> None:
    if not isinstance(feedback, Feedback):
        raise ValueError(f"rank {engine.rank}: feedback must be from Communicator.new_feedback, not {feedback!r}")
    given = (feedback.codec, feedback.partition.numel, feedback.device)
    own = engine.plans.partition(codec, tensor.numel(), device_type=tensor.device.type)
    if given != (codec, tensor.numel(), tensor.device) or feedback.partition != own:
        raise ValueError(
            f"rank {engine.rank}: feedback must be from this Communicator's new_feedback for {codec!r} and {tensor.numel()} "
            f"elements on {tensor.device}; it is for {feedback.codec!r} and {feedback.partition.numel} on {feedback.device}, "
            f"of rank {feedback.partition.rank} with shard {feedback.shard}"
        )

"""allreduce by codes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.buffers import Buffer
from gradwire.collectives.engine.engine import CodesRun, Engine, Rest
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import Op
from gradwire.collectives.torch_internals import plain
from gradwire.collectives.verbs import reductions


def allreduce(
    engine: Engine,
    tensor: Tensor,
    op: Op,
    prescale: float,
    postscale: float,
    compression: str | Codec | None,
    feedback: Feedback | None,
    step: int | None,
    seed: int | None,
    algorithm: str,
    *,
    async_op: bool,
    awaited: bool,
) -> Work:
    """Run Communicator.allreduce with a codec."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"rank {engine.rank}: step={step!r}; a whole number from 0 is needed")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"rank {engine.rank}: seed={seed!r}; a whole number is needed")
    codec = compression if compression is None or isinstance(compression, Codec) else make_codec(compression)
    if codec is None or codec.name == "none":
        if feedback is not None:
            raise ValueError(f"rank {engine.rank}: feedback needs a codec: without one there is no error")
        numbers = op, prescale, postscale, algorithm
        return engine.call(reductions.allreduce, tensor, tensor, *numbers, async_op=async_op, awaited=awaited)
    if feedback is not None:
        _check_feedback(engine, feedback, codec, tensor)
    step, seed = _step_and_seed(engine, codec, feedback, step, seed)
    given = op, prescale, postscale, algorithm, codec, codec.at(step), feedback is not None
    drawn = step if codec.draws else None
    options = feedback, step, seed
    work = engine.call(_prepare, tensor, options, *given, drawn, async_op=async_op, awaited=awaited)
    if feedback is not None:
        feedback.step = step + 1
    return work


def _prepare(
    engine: Engine,
    tensor: Tensor,
    _: object,
    op: Op,
    prescale: float,
    postscale: float,
    algorithm: str,
    codec: Codec,
    present: Codec,
    with_feedback: bool,
    drawn: int | None,
) -> PreparedCall:
    """Prepare an allreduce by codes, which runs on a tensor, in place, and a tuple of the feedback, the step and the seed.

    present: the codec in its form for the step. drawn: the step, if the codec selects numbers by it."""
    reduction = arguments.reduction_of(engine, [tensor], op, prescale, postscale)
    if not tensor.dtype.is_floating_point or reduction.op not in ("sum", "average"):
        raise ValueError(
            f"rank {engine.rank}: codec {codec.name!r} is for the sum or average of floating-point tensors, not for op "
            f"{reduction.op!r} of {tensor.dtype}"
        )
    numel, nbytes, device = tensor.numel(), present.wire_bytes(tensor.numel()), tensor.device
    chosen = engine.schedules.choose_for_codec(
        codec, algorithm, nbytes, with_feedback=with_feedback, on_gpu=tensor.is_cuda
    )
    engine.rehearse(codec, device, tensor.dtype, with_feedback=with_feedback)
    divisor = engine.size if reduction.op == "average" else 1
    adds_apart = True  # elsewhere than in the tensor
    if codec.summable and chosen != shot_of(codec):
        begin_exchange = _adding_codes(engine, present, numel, chosen, tensor, divisor)
    else:
        begin_exchange = engine.prepare_codes(codec, present, numel, chosen, device, divisor)
        adds_apart = engine.keeps_halves(codec, present, numel, chosen, device)

    takes_halves = tensor.dtype in (torch.bfloat16, torch.float16) and not reduction.is_scaled and adds_apart

    def begin(given: Tensor, options: tuple[Feedback | None, int, int]) -> Rest:
        own = plain(given)
        needs_copy = own.dtype is not torch.float32 and not takes_halves
        needs_copy |= not own.is_contiguous() or own.is_neg()
        buffer = Buffer([own]) if needs_copy else None
        flat = own.as_strided((own.numel(),), (1,)) if buffer is None else buffer.flat.to(torch.float32)
        if reduction.prescale != 1.0:
            reduction.begin(flat)
        if (feedback := options[0]) is not None:
            feedback.join()
        exchange = begin_exchange(flat, *options)
        for made in () if buffer is None else (buffer.flat, flat):
            engine.keep_for_rest(made)
        if buffer is None and reduction.postscale == 1.0:
            return exchange

        def rest(tag: int, deadline: float) -> None:
            exchange(tag, deadline)
            if reduction.postscale != 1.0:
                reduction.end(flat)
            if buffer is not None:
                if flat.dtype is not buffer.flat.dtype:
                    buffer.flat.copy_(flat)
                buffer.store()

        return rest

    def run(given: Tensor, options: tuple[Feedback | None, int, int], tag: int, deadline: float) -> None:
        begin(given, options)(tag, deadline)

    place = " on cuda" if tensor.is_cuda else ""  # which decides how the buffer is cut into chunks
    corrected = ", error feedback" if with_feedback else ""
    first = f"allreduce({arguments.described(tensor)}{place}, {reduction}, {chosen}, "
    text = f"{first}{present.identity}{corrected}{'' if drawn is None else f', step={drawn}'})"
    # For a codec that draws by the step, every step would be a new call, if its signature named the step.
    signature = text if drawn is None else f"{first}{codec.identity}{corrected}"
    notes = engine.notes(chosen, 4 * numel, tensor, codec=codec.name)
    return PreparedCall(text, signature, run, notes=notes, begin=begin)


def new_feedback(engine: Engine, compression: str | Codec, numel: int, device: torch.device, seed: int) -> Feedback:
    """Run Communicator.new_feedback."""
    codec = make_codec(compression)
    if not isinstance(seed, int):
        raise ValueError(f"rank {engine.rank}: seed={seed!r}; a whole number is needed")
    if not isinstance(numel, int) or numel < 0:
        raise ValueError(f"rank {engine.rank}: numel={numel!r}; a whole number from 0 is needed")
    if not codec.takes_feedback:
        raise ValueError(
            f"rank {engine.rank}: {codec!r} takes no feedback: with its omega of {codec.omega:.2g}, residuals would grow"
        )
    with torch.inference_mode(False):  # so that it can be used in any mode
        return Feedback(codec, engine.schedules.partition(codec, numel, device_type=device.type), device, seed)


def _adding_codes(engine: Engine, codec: Codec, numel: int, algorithm: str, like: Tensor, divisor: int) -> CodesRun:
    """Return what adds the codes of all ranks as they are, with the codec's headroom. codec: in its form for the step."""
    nbytes = codec.wire_bytes(numel)
    codes_like = torch.empty(0, dtype=codec.wire_dtype, device=like.device)
    exchange = engine.prepare("allreduce", algorithm, codes_like, nbytes // codes_like.element_size())
    shrink = codec.headroom(engine.size)

    def begin(flat: Tensor, feedback: Feedback | None, step: int, seed: int) -> Rest:
        residual = feedback.worker if feedback is not None else None
        scaled = [tensor for tensor in (flat, residual) if tensor is not None and shrink != 1.0]
        for tensor in scaled:
            tensor.mul_(shrink)
        wire = engine.memory_for_codes(nbytes, flat.device)
        engine.keep_for_rest(wire)
        with engine.span("encode", elements=numel):
            codec.encode(flat, wire, residual=residual)
        for tensor in scaled[1:]:
            tensor.div_(shrink)
        copies = engine.on_host(wire.view(codec.wire_dtype))

        def rest(tag: int, deadline: float) -> None:
            if copies is None:
                codes = wire.view(codec.wire_dtype)
                exchange(codes, codes, tag, deadline)
            else:
                copies.await_out(deadline)
                exchange(copies.source, copies.source, tag, deadline)
                copies.copy_back()
            with engine.span("decode", elements=numel):
                codec.decode(wire, flat, scale=1 / (shrink * divisor))

        return rest

    return begin


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
    own = engine.schedules.partition(codec, tensor.numel(), device_type=tensor.device.type)
    if given != (codec, tensor.numel(), tensor.device) or feedback.partition != own:
        raise ValueError(
            f"rank {engine.rank}: feedback must be from this Communicator's new_feedback for {codec!r} and {tensor.numel()} "
            f"elements on {tensor.device}; it is for {feedback.codec!r} and {feedback.partition.numel} on {feedback.device}, "
            f"of rank {feedback.partition.rank} with shard {feedback.shard}"
        )

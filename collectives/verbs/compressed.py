"""allreduce by codes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.link.base import Whole
from gradwire.collectives.reduction import Reduction
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.joined import DescribedCall
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.staging import Buffer
from gradwire.collectives.run.work import Work


def named_codec(
    engine: Engine, codec: str | Codec | None, feedback: Feedback | None, step: int | None, seed: int | None
) -> Codec | None:
    """Return the codec that a caller names; None for no compression. Raises ValueError for an unknown codec, or an invalid step
    or seed."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"rank {engine.rank}: step={step!r}; a whole number from 0 is needed")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"rank {engine.rank}: seed={seed!r}; a whole number is needed")
    made = make_codec(codec) if codec is not None else None
    if made is None or made.name == "none":
        if feedback is not None:
            raise ValueError(f"rank {engine.rank}: feedback needs a codec: without one there is no error")
        return None
    return made


def allreduce_compressed(
    engine: Engine,
    tensor: Tensor,
    reduction: Reduction,
    codec: Codec,
    feedback: Feedback | None,
    step: int | None,
    seed: int | None,
    algorithm: str,
    async_op: bool,
) -> Work | None:
    """Allreduce a tensor by codes; see Communicator.allreduce. codec: other than 'none'."""
    rank = engine.rank
    if not tensor.dtype.is_floating_point or reduction.op not in ("sum", "average"):
        raise ValueError(
            f"rank {rank}: codec {codec.name!r} is for the sum or average of floating-point tensors, not for op "
            f"{reduction.op!r} of {tensor.dtype}"
        )
    if feedback is not None:
        _check_feedback(engine, feedback, codec, tensor)
    step, seed = _step_and_seed(engine, codec, feedback, step, seed)
    present = codec.at(step)
    with_feedback = feedback is not None
    nbytes = present.wire_bytes(tensor.numel())
    on_gpu = tensor.is_cuda
    chosen = engine.plans.choose_for_codec(codec, algorithm, nbytes, with_feedback=with_feedback, on_gpu=on_gpu)
    corrected = ", error feedback" if with_feedback else ""
    place = " on cuda" if on_gpu else ""  # which decides how the buffer is cut into chunks
    text, signature = (
        f"allreduce({arguments.described(tensor)}{place}, {reduction}, {chosen}, {each.identity}{corrected})"
        for each in (present, codec)  # for a codec that draws by the step, every step would be a new call
    )
    call = DescribedCall(
        text,
        "allreduce",
        [arguments.sketch(tensor)],
        joinable=not with_feedback,  # a joined rank keeps no feedback of it
        algorithm=algorithm,
        codec=codec,
        feedback=with_feedback,
        step=step,
        seed=seed,
        **vars(reduction),
    )
    engine.prepare_codec(codec, tensor.device, with_feedback=with_feedback)
    adds_codes = codec.summable and chosen != shot_of(codec)
    codes = torch.empty(0, dtype=codec.wire_dtype, device=tensor.device)
    whole = engine.whole("allreduce", chosen, codes, nbytes // codes.element_size()) if adds_codes else None
    if not adds_codes:
        engine.plans.partition(codec, tensor.numel(), chosen, tensor.device.type)  # raises before anything is sent
    held = arguments.held([tensor], async_op)
    divisor = engine.size if reduction.op == "average" else 1

    def body(turn: Turn) -> None:
        buffer = Buffer(held, via_host=False)
        flat = buffer.flat.to(torch.float32)
        reduction.begin(flat)
        if adds_codes:
            _add_codes(engine, turn, flat, present, feedback, divisor, chosen, whole)
        else:
            engine.over_codes(turn, flat, codec, chosen, feedback=feedback, divisor=divisor, step=step, seed=seed)
        engine.note_codec(codec, flat.nbytes)
        reduction.end(flat, engine.size, is_average=True)
        if flat.dtype is not buffer.flat.dtype:
            buffer.flat.copy_(flat)
        buffer.store()

    work = engine.submit(call, body, async_op=async_op, signature=signature)
    if feedback is not None:
        feedback.step = step + 1
    return work


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


def _add_codes(
    engine: Engine,
    turn: Turn,
    flat: Tensor,
    codec: Codec,
    feedback: Feedback | None,
    divisor: int,
    algorithm: str,
    whole: Whole | None,
) -> None:
    """Add the codes of all ranks as they are, with the codec's headroom."""
    shrink = codec.headroom(engine.size)
    residual = feedback.worker if feedback is not None else None
    scaled = [tensor for tensor in (flat, residual) if tensor is not None and shrink != 1.0]
    for tensor in scaled:
        tensor.mul_(shrink)
    wire = engine.wire(codec.wire_bytes(flat.numel()), flat.device)
    with engine.span("encode", elements=flat.numel()):
        codec.encode(flat, wire, residual=residual)
    for tensor in scaled[1:]:
        tensor.div_(shrink)
    codes = engine.buffer(wire.view(codec.wire_dtype))
    engine.over_buffer(turn, "allreduce", algorithm, codes.flat, whole=whole)
    codes.store()
    with engine.span("decode", elements=flat.numel()):
        codec.decode(wire, flat, scale=1 / (shrink * divisor))

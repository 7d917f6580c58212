"""allreduce, of one tensor or of several fused into one message per dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire.collectives import arguments
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.link.base import Whole
from gradwire.collectives.reduction import Op, check_arithmetic, finish, op_name
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.prepared import PreparedOperation
from gradwire.collectives.run.staging import Buffer
from gradwire.collectives.run.work import Work


def allreduce(
    engine: Engine,
    tensor: torch.Tensor,
    op: Op,
    prescale: float,
    postscale: float,
    algorithm: str,
    async_op: bool,
) -> Work | None:
    """Allreduce one tensor: at once, where an equal call has been made ready before."""
    if not async_op and engine.repeat(tensor, (op, algorithm, prescale, postscale)):
        return None
    return grouped_allreduce(engine, [tensor], op, prescale, postscale, algorithm, async_op)


def grouped_allreduce(
    engine: Engine,
    tensors: Sequence[torch.Tensor],
    op: Op,
    prescale: float,
    postscale: float,
    algorithm: str,
    async_op: bool,
) -> Work | None:
    """Allreduce several tensors as one operation."""
    call, body, wholes = _planned(engine, tensors, op, prescale, postscale, algorithm, async_op)
    if len(tensors) == 1 and wholes[0] is not None and prescale == postscale == 1.0:
        engine.remember(tensors[0], (op, algorithm, prescale, postscale), call, wholes[0])
    return engine.submit(call, body, async_op=async_op)


def prepare_allreduce(
    engine: Engine, tensor: torch.Tensor, op: Op, prescale: float, postscale: float, algorithm: str
) -> PreparedOperation:
    """Do all of an allreduce that can be done once for many runs."""
    call, body, (whole,) = _planned(engine, [tensor], op, prescale, postscale, algorithm, True)
    return PreparedOperation(engine, tensor, call, body, whole if prescale == postscale == 1.0 else None)


def _planned(
    engine: Engine,
    tensors: Sequence[torch.Tensor],
    op: Op,
    prescale: float,
    postscale: float,
    algorithm: str,
    async_op: bool,
) -> tuple[str, Callable[[Turn], None], list[Whole | None]]:
    """Check the arguments, and return what is called, the body, and what the link has made ready, by dtype and device."""
    name = op_name(engine.rank, op)
    fused: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        arguments.check_written(engine, tensor)
        check_arithmetic(engine.rank, tensor.dtype, name, prescale, postscale)
    for tensor in arguments.held(tensors, async_op):
        fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    chosen = [engine.plans.choose("allreduce", algorithm, sum(t.nbytes for t in group)) for group in fused.values()]
    described = ", ".join(map(arguments.described, tensors))
    scales = f", prescale={prescale}, postscale={postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    call = Call(
        f"allreduce({described}, {name}{scales}, {', '.join(chosen)})",
        "allreduce",
        joinable=name in ("sum", "average"),
        shapes=[tensor.shape for tensor in tensors],
        like=[arguments.kind(tensor) for tensor in tensors],
        op=name,
        scales=[prescale, postscale],
        algorithm=algorithm,
    )

    wholes = [
        engine.whole("allreduce", choice, group[0], sum(t.numel() for t in group), name)
        for group, choice in zip(fused.values(), chosen, strict=True)
    ]

    def body(turn: Turn) -> None:
        for group, choice, whole in zip(fused.values(), chosen, wholes, strict=True):
            buffer = engine.buffer(*group)
            if prescale != 1.0:
                buffer.flat.mul_(prescale)
            if whole is not None:
                engine.run_whole(turn, whole, buffer.flat, buffer.flat)
            else:
                engine.over_buffer(turn, "allreduce", choice, buffer.flat, name)
            finish(buffer.flat, name if whole is None else "sum", engine.size, postscale)
            buffer.store()

    return call, body, wholes


def allreduce_compressed(
    engine: Engine,
    tensor: torch.Tensor,
    op: Op,
    codec: Codec,
    *,
    feedback: Feedback | None,
    step: int | None,
    seed: int | None,
    prescale: float,
    postscale: float,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    """Allreduce by codes. codec: other than 'none'."""
    rank = engine.rank
    name = op_name(rank, op)
    arguments.check_written(engine, tensor)
    check_arithmetic(rank, tensor.dtype, name, prescale, postscale)
    if not tensor.dtype.is_floating_point or name not in ("sum", "average"):
        raise ValueError(
            f"rank {rank}: codec {codec.name!r} is for the sum or average of floating-point tensors, not for op {name!r} "
            f"of {tensor.dtype}"
        )
    if feedback is not None:
        _check_feedback(engine, feedback, codec, tensor)
    step, seed = _step_and_seed(engine, codec, feedback, step, seed)
    present = codec.at(step)
    with_feedback = feedback is not None
    nbytes = present.wire_bytes(tensor.numel())
    chosen = engine.plans.choose_for_codec(codec, algorithm, nbytes, with_feedback=with_feedback)
    scales = f", prescale={prescale}, postscale={postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    corrected = ", error feedback" if with_feedback else ""
    text, signature = (
        f"allreduce({arguments.described(tensor)}, {name}{scales}, {chosen}, {each.identity}{corrected})"
        for each in (present, codec)  # to one that draws by the step, every step would be new
    )
    call = Call(
        text,
        "allreduce",
        joinable=not with_feedback,  # of which a rank that has joined keeps nothing here
        shapes=[tensor.shape],
        like=[arguments.kind(tensor)],
        op=name,
        scales=[prescale, postscale],
        algorithm=algorithm,
        codec=codec,
        feedback=with_feedback,
        step=step,
        seed=seed,
    )
    engine.prepare_codec(codec, tensor.device, with_feedback=with_feedback)
    adds_codes = codec.summable and chosen != shot_of(codec)
    codes = torch.empty(0, dtype=codec.wire_dtype, device=tensor.device)
    whole = engine.whole("allreduce", chosen, codes, nbytes // codes.element_size()) if adds_codes else None
    if not adds_codes:
        engine.plans.partition(codec, tensor.numel(), chosen)  # what cannot be planned is found before anything is sent
    held = arguments.held([tensor], async_op)

    def body(turn: Turn) -> None:
        buffer = Buffer(held, via_host=False)
        flat = buffer.flat.to(torch.float32)
        if prescale != 1.0:
            flat.mul_(prescale)
        if adds_codes:
            _add_codes(engine, turn, flat, present, feedback, name, chosen, whole)
        else:
            average = name == "average"
            engine.over_codes(turn, flat, codec, chosen, feedback=feedback, average=average, step=step, seed=seed)
        finish(flat, "sum", engine.size, postscale)
        if flat.dtype is not buffer.flat.dtype:
            buffer.flat.copy_(flat)
        buffer.store()

    work = engine.submit(call, body, async_op=async_op, signature=signature)
    if feedback is not None:
        feedback.step = step + 1
    return work


def named_codec(
    engine: Engine, codec: str | Codec | None, feedback: Feedback | None, step: int | None, seed: int | None
) -> Codec | None:
    """Return what a caller calls a codec; None for no compression. Raises ValueError for what is none, a wrong step or seed."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"rank {engine.rank}: step={step!r}; a whole number from 0 is needed")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"rank {engine.rank}: seed={seed!r}; a whole number is needed")
    made = make_codec(codec) if codec is not None else None
    if made is None or made.name == "none":
        if feedback is not None:
            raise ValueError(f"rank {engine.rank}: feedback needs a codec: without one nothing is lost")
        return None
    return made


def _step_and_seed(
    engine: Engine, codec: Codec, feedback: Feedback | None, step: int | None, seed: int | None
) -> tuple[int, int]:
    """Return those of a call: what is given, else what the feedback has counted and carries. Raises ValueError where the same
    numbers would be drawn at every call."""
    if feedback is not None:
        return feedback.step if step is None else step, feedback.seed if seed is None else seed
    if step is None and codec.draws:
        raise ValueError(
            f"rank {engine.rank}: codec {codec.name!r} draws by the step which numbers it sends, and would always send the same: "
            f"give step=, or feedback=communicator.new_feedback(codec, numel), which counts its calls"
        )
    return step or 0, seed or 0


def _check_feedback(engine: Engine, feedback: Feedback, codec: Codec, tensor: torch.Tensor) -> None:
    if not isinstance(feedback, Feedback):
        raise ValueError(f"rank {engine.rank}: feedback must be from Communicator.new_feedback, not {feedback!r}")
    given = (feedback.codec, feedback.partition.numel, feedback.device)
    if given != (codec, tensor.numel(), tensor.device) or feedback.partition != engine.plans.partition(
        codec, tensor.numel()
    ):
        raise ValueError(
            f"rank {engine.rank}: feedback must be from this Communicator's new_feedback for {codec!r} and {tensor.numel()} "
            f"elements on {tensor.device}; it is for {feedback.codec!r} and {feedback.partition.numel} on {feedback.device}, "
            f"of rank {feedback.partition.rank} with shard {feedback.shard}"
        )


def _add_codes(
    engine: Engine,
    turn: Turn,
    flat: torch.Tensor,
    codec: Codec,
    feedback: Feedback | None,
    op: str,
    choice: str,
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
    if whole is not None:
        engine.run_whole(turn, whole, codes.flat, codes.flat)
    else:
        engine.over_buffer(turn, "allreduce", choice, codes.flat)
    codes.store()
    with engine.span("decode", elements=flat.numel()):
        codec.decode(wire, flat, scale=1 / (shrink * (engine.size if op == "average" else 1)))

"""allreduce, of one tensor or of several fused into one message per dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import arguments, native
from collectives.engine import NATIVE, Engine
from collectives.operations import Turn
from collectives.reduction import Op, check_arithmetic, finish, op_name
from collectives.selection import SHARED
from collectives.work import Work


def allreduce(
    engine: Engine,
    tensors: Sequence[torch.Tensor],
    op: Op,
    *,
    prescale: float,
    postscale: float,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    key = (op, algorithm, prescale, postscale)
    if not async_op and len(tensors) == 1 and engine.repeat(tensors[0], key):
        return None
    name = op_name(engine.rank, op)
    fused: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        arguments.check_written(engine, tensor)
        check_arithmetic(engine.rank, tensor.dtype, name, prescale, postscale)
        fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    chosen = [engine.choose("allreduce", algorithm, sum(t.nbytes for t in group)) for group in fused.values()]
    described = ", ".join(map(arguments.described, tensors))
    scales = f", prescale={prescale}, postscale={postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    call = f"allreduce({described}, {name}{scales}, {', '.join(chosen)})"

    if SHARED in chosen:
        engine.prepare(dtype for dtype, _ in fused)
        if len(tensors) == 1 and prescale == postscale == 1.0:
            engine.remember(tensors[0], key, call, name)

    def body(turn: Turn) -> None:
        for group, choice in zip(fused.values(), chosen, strict=True):
            buffer = engine.buffer(*group)
            if prescale != 1.0:
                buffer.flat.mul_(prescale)
            if choice == SHARED:
                engine.in_shared_memory(turn, buffer.flat, name)
            elif choice == NATIVE:
                moved, native_op = native.reducible(buffer.flat, name)
                engine.native(turn, native.allreduce(moved, native_op), is_cuda=moved.is_cuda)
                buffer.flat.copy_(moved)
            else:
                engine.over_buffer(turn, "allreduce", choice, buffer.flat, name)
            finish(buffer.flat, "sum" if choice == SHARED else name, engine.size, postscale)
            buffer.store()

    return engine.submit(call, body, async_op=async_op)

"""recv, from one rank or from any."""

from __future__ import annotations

import torch

from gradwire.collectives import arguments
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.messages import MessageWork


def recv(engine: Engine, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> MessageWork | int | None:
    arguments.check_written(engine, tensor)
    arguments.check_message(engine, tensor, "src", src, tag)
    if src is None and not engine.hears_anyone(tensor):
        raise ValueError(
            f"rank {engine.rank}: recv() of a tensor on {tensor.device} needs src=, for what joins these ranks cannot wait for "
            f"all of them at once: {'; '.join(engine.routes)}"
        )
    call = f"recv({arguments.described(tensor)}, src={src}, tag={tag})"
    with engine.span("recv", call=call, bytes=tensor.nbytes):
        return engine.messages.receive(
            call, engine.buffer(*arguments.held([tensor], async_op), fill=False), src, tag, async_op=async_op
        )

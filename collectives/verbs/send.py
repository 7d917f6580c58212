"""send, to one rank."""

from __future__ import annotations

import torch

from gradwire.collectives import arguments
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.messages import MessageWork


def send(engine: Engine, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> MessageWork | None:
    arguments.check_tensors(engine, tensor)
    arguments.check_message(engine, tensor, "dst", dst, tag)
    call = f"send({arguments.described(tensor)}, dst={dst}, tag={tag})"
    with engine.span("send", call=call, bytes=tensor.nbytes):
        return engine.messages.send(
            call, engine.buffer(*arguments.held([tensor], async_op)), dst, tag, async_op=async_op
        )

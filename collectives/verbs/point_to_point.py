"""Messages between two ranks."""

from __future__ import annotations

from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.point_to_point import MessageWork


def send(engine: Engine, tensor: Tensor, dst: int, tag: int) -> None:
    """Run Communicator.send."""
    call = _checked_send(engine, "send", tensor, dst, tag)
    with engine.recording(call, {"bytes": tensor.nbytes}):
        engine.messages.send(call, engine.buffer(tensor), dst, tag)


def isend(engine: Engine, tensor: Tensor, dst: int, tag: int) -> MessageWork:
    """Run Communicator.isend."""
    call = _checked_send(engine, "isend", tensor, dst, tag)
    with engine.recording(call, {"bytes": tensor.nbytes}):
        return engine.messages.isend(call, engine.buffer(kept(tensor)), dst, tag)


def recv(engine: Engine, tensor: Tensor, src: int | None, tag: int) -> int:
    """Run Communicator.recv."""
    call = _checked_recv(engine, "recv", tensor, src, tag)
    with engine.recording(call, {"bytes": tensor.nbytes}):
        return engine.messages.recv(call, engine.buffer(tensor, fill=False), src, tag)


def irecv(engine: Engine, tensor: Tensor, src: int | None, tag: int) -> MessageWork:
    """Run Communicator.irecv."""
    call = _checked_recv(engine, "irecv", tensor, src, tag)
    with engine.recording(call, {"bytes": tensor.nbytes}):
        return engine.messages.irecv(call, engine.buffer(kept(tensor), fill=False), src, tag)


def _checked_send(engine: Engine, verb: str, tensor: Tensor, dst: int, tag: int) -> str:
    """Check the arguments of send or isend, and return the text of the call."""
    arguments.check_tensors(engine, tensor)
    arguments.check_message(engine, tensor, "dst", dst, tag)
    return f"{verb}({arguments.described(tensor)}, dst={dst}, tag={tag})"


def _checked_recv(engine: Engine, verb: str, tensor: Tensor, src: int | None, tag: int) -> str:
    """Check the arguments of recv or irecv, and return the text of the call."""
    arguments.check_written(engine, tensor)
    arguments.check_message(engine, tensor, "src", src, tag)
    if src is None and not engine.receives_from_any(tensor):
        raise ValueError(
            f"rank {engine.rank}: {verb}() of a tensor on {tensor.device} needs src=, because the link of these ranks cannot "
            f"wait for all of them at once: {'; '.join(engine.routes)}"
        )
    return f"{verb}({arguments.described(tensor)}, src={src}, tag={tag})"

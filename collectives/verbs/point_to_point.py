"""Messages between two ranks: send, recv, isend and irecv."""

from __future__ import annotations

from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.verbs.base import Ranks


class PointToPoint(Ranks):
    """The verbs that only two ranks call."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0, **former: object) -> None:
        """Send `tensor` to rank dst, which calls recv or irecv with a tensor of the same dtype and number of elements, and the
        same tag (0 to 65535).

        Only these two ranks make a call: messages do not count among the operations that all ranks call in the same order.
        But the messages and the operations of a rank reach another rank in the order of the calls. If a rank does not
        receive a message, its next operation waits until the deadline, and so does a recv of a later message from the same
        sender.

        When send has returned, the caller can change the tensor, even if the message has not arrived yet. send may also wait
        until dst receives, as it does inside a host. So two ranks that both send before they receive must use isend.
        Over NCCL, which has no tags, only tag 0 is allowed.
        """
        engine = self._engine
        call = _send_call(engine, "send", tensor, dst, tag, former)
        with engine.recording(call, {"bytes": tensor.nbytes}):
            engine.messages.send(call, engine.buffer(tensor), dst, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MessageWork:
        """Begin to send `tensor`, as send does, and return a handle. Do not change the tensor before wait() of the handle."""
        engine = self._engine
        call = _send_call(engine, "isend", tensor, dst, tag)
        with engine.recording(call, {"bytes": tensor.nbytes}):
            return engine.messages.isend(call, engine.buffer(kept(tensor)), dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0, **former: object) -> int:
        """Fill `tensor` with a message that has this tag, and return the sender. See send for the order.

        src: the rank that sends; None for any rank. With None, ranks whose messages have arrived take turns. If messages
        travel over gloo or NCCL, as with link='process_group', None raises ValueError. A thread that receives while other
        threads call operations needs its own Communicator.

        Raises Mismatch if the message has another dtype or length. Over gloo, a message that is longer than expected ends the
        process instead. NCCL compares neither.
        """
        engine = self._engine
        call = _recv_call(engine, "recv", tensor, src, tag, former)
        with engine.recording(call, {"bytes": tensor.nbytes}):
            return engine.messages.recv(call, engine.buffer(tensor, fill=False), src, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> MessageWork:
        """Begin to receive a message into `tensor`, as recv does, and return a handle, whose attribute `sender` names the rank
        that sends. Do not use the tensor before wait() of the handle."""
        engine = self._engine
        call = _recv_call(engine, "irecv", tensor, src, tag)
        with engine.recording(call, {"bytes": tensor.nbytes}):
            return engine.messages.irecv(call, engine.buffer(kept(tensor), fill=False), src, tag)


def _send_call(
    engine: Engine, verb: str, tensor: Tensor, dst: int, tag: int, former: dict[str, object] | None = None
) -> str:
    """Check the arguments of send or isend, and return the text of the call."""
    _check_former(engine, verb, former)
    arguments.check_tensors(engine, tensor)
    arguments.check_message(engine, tensor, "dst", dst, tag)
    return f"{verb}({arguments.described(tensor)}, dst={dst}, tag={tag})"


def _recv_call(
    engine: Engine, verb: str, tensor: Tensor, src: int | None, tag: int, former: dict[str, object] | None = None
) -> str:
    """Check the arguments of recv or irecv, and return the text of the call."""
    _check_former(engine, verb, former)
    arguments.check_written(engine, tensor)
    arguments.check_message(engine, tensor, "src", src, tag)
    if src is None and not engine.receives_from_any(tensor):
        raise ValueError(
            f"rank {engine.rank}: {verb}() of a tensor on {tensor.device} needs src=, because the link of these ranks cannot "
            f"wait for all of them at once: {'; '.join(engine.routes)}"
        )
    return f"{verb}({arguments.described(tensor)}, src={src}, tag={tag})"


def _check_former(engine: Engine, verb: str, former: dict[str, object] | None) -> None:
    """Raise TypeError for an argument that the verb does not have."""
    if former:
        remedy = f"; use i{verb} instead of async_op=True" if "async_op" in former else ""
        raise TypeError(f"rank {engine.rank}: {verb} has no argument {next(iter(former))!r}{remedy}")

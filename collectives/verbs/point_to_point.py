"""Messages between two ranks: send and recv."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.verbs.base import Ranks


class PointToPoint(Ranks):
    """The verbs that only two ranks call."""

    @overload
    def send(self, tensor: Tensor, dst: int, *, tag: int = ..., async_op: Literal[False] = ...) -> None: ...

    @overload
    def send(self, tensor: Tensor, dst: int, *, tag: int = ..., async_op: Literal[True]) -> MessageWork: ...

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0, async_op: bool = False) -> MessageWork | None:
        """Send `tensor` to rank dst, which calls recv with a tensor of the same dtype and number of elements, and the same tag
        (0 to 65535).

        Only these two ranks make a call: messages do not count among the operations that all ranks call in the same order.
        But the messages and the operations of a rank reach another rank in the order of the calls. If a rank does not
        receive a message, its next operation waits until the deadline, and so does a recv of a later message from the same
        sender.

        When send has returned, the caller can change the tensor, even if the message has not arrived yet. send may also wait
        until dst receives, as it does inside a host. So two ranks that both call send before recv must use async_op=True.
        Over NCCL, which has no tags, only tag 0 is allowed.
        """
        engine = self._engine
        arguments.check_tensors(engine, tensor)
        arguments.check_message(engine, tensor, "dst", dst, tag)
        call = f"send({arguments.described(tensor)}, dst={dst}, tag={tag})"
        with engine.span("send", call=call, bytes=tensor.nbytes):
            buffer = engine.buffer(*arguments.held([tensor], async_op))
            return engine.messages.send(call, buffer, dst, tag, async_op=async_op)

    @overload
    def recv(self, tensor: Tensor, src: int | None = ..., *, tag: int = ..., async_op: Literal[False] = ...) -> int: ...

    @overload
    def recv(
        self, tensor: Tensor, src: int | None = ..., *, tag: int = ..., async_op: Literal[True]
    ) -> MessageWork: ...

    def recv(
        self, tensor: Tensor, src: int | None = None, *, tag: int = 0, async_op: bool = False
    ) -> MessageWork | int | None:
        """Fill `tensor` with a message that has this tag, and return the sender. With async_op=True, return a handle instead,
        whose attribute `sender` names that rank. See send for the order.

        src: the rank that sends; None for any rank. With None, ranks whose messages have arrived take turns. If messages
        travel over gloo or NCCL, as with link='process_group', None raises ValueError. A thread that receives while other
        threads call operations needs its own Communicator.

        Raises Mismatch if the message has another dtype or length. Over gloo, a message that is longer than expected ends the
        process instead. NCCL compares neither.
        """
        engine = self._engine
        arguments.check_written(engine, tensor)
        arguments.check_message(engine, tensor, "src", src, tag)
        if src is None and not engine.receives_from_any(tensor):
            raise ValueError(
                f"rank {engine.rank}: recv() of a tensor on {tensor.device} needs src=, because the link of these ranks cannot "
                f"wait for all of them at once: {'; '.join(engine.routes)}"
            )
        call = f"recv({arguments.described(tensor)}, src={src}, tag={tag})"
        with engine.span("recv", call=call, bytes=tensor.nbytes):
            buffer = engine.buffer(*arguments.held([tensor], async_op), fill=False)
            return engine.messages.receive(call, buffer, src, tag, async_op=async_op)

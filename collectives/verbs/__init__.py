"""The verbs of a Communicator. The file of each family checks the arguments of its verbs, and prepares or runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.engine.prepared import PreparedOperation
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import Op
from gradwire.collectives.verbs import (
    compressed,
    movement,
    objects,
    reductions,
    shared_tensors,
)


class Verbs:
    """The methods that move tensors and objects between the ranks of a group. See Communicator."""

    _engine: Engine

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._engine.size

    # Reductions

    def allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        compression: str | Codec | None = None,
        feedback: Feedback | None = None,
        step: int | None = None,
        seed: int | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        awaited: bool = False,
        **former: object,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, with the result on every rank.

        prescale, postscale: factors by which each rank's numbers and the result are multiplied; floating-point tensors only.
        compression: a codec of gradwire.collectives.compression, or its name for the default settings. The ranks then send codes
        instead of float32 numbers. A codec requires a floating-point tensor, and op 'sum' or 'average'. If the codec is not the
        same on all ranks, all raise Mismatch.
        feedback: a Feedback from new_feedback(), which adds the error of each encoding to the input of the next one. Each
        buffer needs a Feedback of its own.
        step: the training step, for codecs whose codes depend on it: equal steps, seeds and inputs give equal bits.
        Default: feedback.step, one more than the step of the last call; 0 without feedback. A codec that selects numbers by
        the step, such as randomk, needs step or feedback; without both, the call raises ValueError.
        seed: a whole number that differs between the buffers of a step, so that their rounding differs. Default: feedback.seed;
        0 without feedback.
        awaited: with async_op=True, whether the caller waits for the Work next, so no thread wakes up for it: see
        PreparedOperation.start().

        If the codes of a codec cannot be added, algorithm='auto' runs 'two_shot', or 'one_shot' for chunktopk. In 'two_shot',
        each rank decodes and adds the codes of its share of the buffer, and sends a code of this sum to all other ranks. In
        'one_shot', each rank sends its code to all other ranks, and adds all codes. See docs/guides/compression.md.
        """
        if former:
            raise arguments.former(self._engine, "allreduce", former, codec="compression=")
        if compression is None and feedback is None:
            numbers = op, prescale, postscale, algorithm
            return self._engine.call(reductions.allreduce, tensor, tensor, *numbers, async_op=async_op, awaited=awaited)
        coded = op, prescale, postscale, compression, feedback, step, seed, algorithm
        return compressed.allreduce(self._engine, tensor, *coded, async_op=async_op, awaited=awaited)

    def new_feedback(
        self, compression: str | Codec, numel: int, device: str | torch.device = "cpu", *, seed: int = 0
    ) -> Feedback:
        """Make the Feedback of this rank for allreduce(compression=...) of one buffer of numel elements. Not a collective call.

        seed: the default of the argument `seed` in calls of allreduce with this object. Raises ValueError for an unknown codec,
        for one whose residuals would grow in every call (TernGrad, and QSGD with its default settings), or if numel is negative.
        """
        return compressed.new_feedback(self._engine, compression, numel, torch.device(device), seed)

    def prepare_allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
    ) -> PreparedOperation:
        """Return an allreduce of `tensor` that is checked and planned now, and can be run any number of times. Not a
        collective call.

        The tensor must keep its memory. The arguments are those of allreduce; there is no prepared form with a codec.
        """
        numbers = op, prescale, postscale, algorithm
        call = self._engine.prepared(reductions.allreduce, tensor, tensor, *numbers)
        return PreparedOperation(self._engine, tensor, call)

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Allreduce several tensors as one operation. Tensors of one dtype and device are joined in one buffer."""
        given, numbers = list(tensors), (op, prescale, postscale, algorithm)
        return self._engine.call(reductions.grouped_allreduce, given, given, *numbers, async_op=async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Reduce `input` over all ranks, and write the r-th part of the result to `output` on rank r.

        input: a tensor with output.numel() elements for each rank, or one tensor per rank, with the same shapes on all
        ranks. The input is not changed. If ranks give lists with different shapes, they raise Mismatch, even if the numbers
        of elements are equal.
        """
        given = input if isinstance(input, Tensor) else list(input)
        return self._engine.call(reductions.reduce_scatter, given, output, op, algorithm, async_op=async_op)

    def reduce(
        self, tensor: Tensor, dst: int = 0, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work:
        """Reduce `tensor` over all ranks, in place on rank dst. On the other ranks it is unchanged."""
        return self._engine.call(reductions.reduce, tensor, tensor, dst, op, algorithm, async_op=async_op)

    # The two halves of an allreduce

    def reduce_shares(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        async_op: bool = False,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, and keep only this rank's share of the result: the first half of
        allreduce.

        In this rank's slices of shares(), `tensor` has the same bits as after allreduce with the same arguments. The rest of
        `tensor` is undefined. Only the algorithms ring, rsag, direct and shared consist of such halves, and native with NCCL,
        which may add in another order than in its allreduce. If allreduce would run another algorithm, the whole `tensor` is
        reduced.
        """
        return self._engine.call(reductions.reduce_shares, tensor, tensor, op, prescale, postscale, async_op=async_op)

    def prepare_reduce_shares(
        self, tensor: Tensor, op: Op = "sum", *, prescale: float = 1.0, postscale: float = 1.0
    ) -> PreparedOperation:
        """Return a prepared reduce_shares of a tensor; see prepare_allreduce."""
        call = self._engine.prepared(reductions.reduce_shares, tensor, tensor, op, prescale, postscale)
        return PreparedOperation(self._engine, tensor, call)

    def shares(
        self, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> tuple[tuple[slice, ...], ...]:
        """Return, for each rank, the slices of a tensor of numel elements that are its share: reduce_shares reduces these
        slices on that rank, and gather_shares copies them from that rank. device: of the tensor.

        The slices of a rank are in order, and all ranks have nearly equal numbers of elements. Not a collective call; the
        result is the same on all ranks.
        """
        on_gpu = torch.device(device).type == "cuda"
        spans = self._engine.schedules.shares(numel, dtype.itemsize, on_gpu=on_gpu).spans
        return tuple(tuple(slice(span.start, span.stop) for span in mine) for mine in spans)

    def gather_shares(self, tensor: Tensor, *, async_op: bool = False) -> Work:
        """Copy every rank's share, as in shares(), into `tensor` on all ranks, in place: the second half of allreduce."""
        return self._engine.call(reductions.gather_shares, tensor, tensor, async_op=async_op)

    # Movement

    def allgather(
        self,
        output: Tensor | Sequence[Tensor],
        input: Tensor,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Collect every rank's `input` on all ranks, in rank order.

        output: a tensor with input.numel() elements for each rank; or one tensor per rank, with the number of elements of
        that rank's input. With one tensor per rank, inputs may have different lengths.
        """
        landed = output if isinstance(output, Tensor) else list(output)
        return self._engine.call(movement.allgather, input, landed, algorithm, async_op=async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Copy rank src's `tensor` into that of every other rank, in place."""
        return self._engine.call(movement.broadcast, tensor, tensor, src, algorithm, async_op=async_op)

    def gather(
        self,
        input: Tensor,
        output: Sequence[Tensor] | None = None,
        dst: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Collect every rank's `input` on rank dst; all inputs have equal numbers of elements. output: on dst one tensor per
        rank; None elsewhere.
        """
        return self._engine.call(movement.gather, input, list(output or ()), dst, algorithm, async_op=async_op)

    def scatter(
        self,
        output: Tensor,
        input: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Send the r-th tensor of rank src's `input` to `output` on rank r. input: on src one tensor per rank, all with equal
        numbers of elements; None elsewhere.
        """
        return self._engine.call(movement.scatter, list(input or ()), output, src, algorithm, async_op=async_op)

    def alltoall(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Send the r-th part of `input` to rank r. The part that rank r sends to this rank becomes the r-th part of `output`.

        output_splits, input_splits: for each rank, the number of rows (dimension 0); None for equal parts. Either all ranks
        give splits or none does. Raises Mismatch on all ranks if a rank sends another number of rows than the receiver expects.
        """
        splits = (None if given is None else tuple(given) for given in (output_splits, input_splits))
        return self._engine.call(movement.alltoall, input, output, *splits, algorithm, async_op=async_op)

    def barrier(self, *, timeout_s: float | None = None, algorithm: str = "auto", async_op: bool = False) -> Work:
        """Wait until every rank has called this. timeout_s: seconds that this barrier may take from its start; None: the
        Communicator's timeout_s."""
        if timeout_s is not None:
            arguments.check_seconds(self.rank, "barrier: timeout_s", timeout_s)
        return self._engine.call(movement.barrier, (), (), algorithm, async_op=async_op, timeout_s=timeout_s)

    # Messages, which only two ranks call

    def send(self, tensor: Tensor, dst: int, tag: int = 0, **former: object) -> None:
        """Send `tensor` to rank dst, which calls recv or irecv with a tensor of the same dtype and number of elements, and the
        same tag (0 to 65535).

        Only these two ranks make a call: messages do not count among the operations that all ranks call in the same order.
        But the messages and the operations of a rank reach another rank in the order of the calls. If a rank does not
        receive a message, its next operation waits until the deadline, and so does a recv of a later message from the same
        sender.

        When send has returned, the caller can change the tensor, even if the message has not arrived yet. send may also wait
        until dst receives, as it does inside a host. So two ranks that both send before they receive must use isend.
        Over NCCL, which has no tags, only tag 0 is allowed, and messages follow each other on one stream: one of two ranks
        must call isend before irecv, and the other irecv before isend.
        """
        if former:
            raise arguments.former(self._engine, "send", former, async_op="isend()")
        movement.message(self._engine, "send", tensor, dst, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MessageWork:
        """Begin to send `tensor`, as send does, and return a handle. Do not change the tensor before wait() of the handle."""
        return movement.message(self._engine, "isend", tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0, **former: object) -> int:
        """Fill `tensor` with a message that has this tag, and return the sender. See send for the order.

        src: the rank that sends; None for any rank. With None, ranks whose messages have arrived take turns. If messages
        travel over gloo or NCCL, as with link='process_group', None raises ValueError. A thread that receives while other
        threads call operations needs its own Communicator.

        Raises Mismatch if the message has another dtype or length. Over gloo, a message that is longer than expected ends the
        process instead. NCCL compares neither.
        """
        if former:
            raise arguments.former(self._engine, "recv", former, async_op="irecv()")
        sender = movement.message(self._engine, "recv", tensor, src, tag).sender
        assert sender is not None
        return sender

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> MessageWork:
        """Begin to receive a message into `tensor`, as recv does, and return a handle, whose attribute `sender` names the rank
        that sends. Do not use the tensor before wait() of the handle."""
        return movement.message(self._engine, "irecv", tensor, src, tag)

    # Objects

    def allgather_record(self, record: Any) -> list[Any]:
        """Return every rank's record, in rank order.

        A record consists of numbers, strings, booleans, None, and lists and dicts of these. It is sent as JSON, so a tuple
        comes back as a list, and a record cannot run code on another rank.
        """
        return objects.allgather_record(self._engine, record)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order. Use it only among processes that you trust."""
        return objects.allgather_object(self._engine, obj)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return rank src's picklable object on every rank. The argument of the other ranks is ignored."""
        return objects.broadcast_object(self._engine, obj, src)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return every rank's picklable object, in rank order, on rank dst, which alone unpickles them; None elsewhere."""
        return objects.gather_object(self._engine, obj, dst)

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0) -> Any:
        """Return, on rank r, the r-th of rank src's picklable objects. The argument of the other ranks is ignored."""
        return objects.scatter_object(self._engine, objs, src)

    # Memory

    @property
    def shares_memory(self) -> bool:
        """Return whether this rank exchanges CPU tensors with other ranks of its host through shared memory."""
        return self._engine.can.shares_memory

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised CPU tensor that ranks of one host allreduce without a copy, from its second allreduce on.

        Make the tensor once and reuse it. The shape is given as for torch.empty. Not a collective call, but every rank
        should pass a tensor that it made with empty() to the allreduce. The memory is reserved at once, and freed with the
        tensor. After a fork, parent and child share its contents. The result is an ordinary tensor if the ranks are on
        several hosts or cannot share memory, or if the group also has NCCL. It is also an ordinary tensor if 256 such tensors
        exist already, or if too little memory is left.

        Raises TypeError for a dtype that is not supported.
        """
        return self._engine.empty(shared_tensors.shape_of(self._engine, shape, dtype), dtype)

    def shared_empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a CPU tensor of zeros that is the same memory on all ranks of one host. A collective call.

        All ranks see what one writes; only barriers order their accesses. The shape is given as for torch.empty. Each rank has
        the memory for as long as it keeps the tensor, even if other ranks end or the Communicator is closed.

        Raises, on all ranks, ValueError if they are on several hosts, share no memory, or give different arguments, and
        CollectiveError if there is too little memory. Raises TypeError for a dtype that is not supported.
        """
        return shared_tensors.shared_empty(self._engine, shared_tensors.shape_of(self._engine, shape, dtype), dtype)

"""The verbs: what a user calls to move tensors between the ranks of a group."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import objects, shared_tensors, verbs
from gradwire.collectives.absence import Absence
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.diagnostics.timeline import Lane, Timeline
from gradwire.collectives.environment import LINK
from gradwire.collectives.link.membership import Membership, membership_of
from gradwire.collectives.link.registry import AUTO, check_link, connect
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.selection import Table, default_segment_bytes, default_table, overrides, variables
from gradwire.collectives.plan.topology import Topology, host_id
from gradwire.collectives.reduction import Op, check_dtype
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.messages import MessageWork
from gradwire.collectives.run.operations import DRAIN_S, MEET_S
from gradwire.collectives.run.plans import Plans, legal_algorithms
from gradwire.collectives.run.prepared import PreparedOperation
from gradwire.collectives.run.work import Work


class Communicator:
    """Collective operations among the ranks of a torch.distributed group, on a duplicate of that group.

    group: a ProcessGroup over gloo (CPU tensors; CUDA tensors travel through pinned memory) or NCCL (CUDA tensors); None is the
    world; or a Membership, of which no other Communicator is made. timeout_s: seconds that each operation may take from its
    start. segment_bytes: how large a piece of one rank's share is sent at once when a buffer is long; larger pieces cost less
    overhead, smaller ones overlap better; None chooses by topology. link: the name of what moves the bytes: 'auto', 'tcp',
    'process_group' or one that register_link was given; None is what COLLECTIVES_LINK says, else 'auto'. segment_bytes, link
    and the tables of COLLECTIVES_<VERB> must be the same on all ranks, or all get a ValueError that says what differs;
    the times need not be.

    stall_warning_s: after how long a wait the logger "gradwire" tells, on every rank that waits, which ranks have not come and in
    what file and line they are instead, and again each time the wait has become twice as long; None never does.
    stall_shutdown_s: a deadline for waits of operations alone, where timeout_s, which counts for making the Communicator too, is
    longer.

    By the link 'auto', CPU tensors travel through shared memory between ranks of one host, and over TCP between hosts; all else
    goes through the group's backend. Where memory cannot be shared (the log says why), or with COLLECTIVES_SHARED_MEMORY=0 on any
    rank, they travel over TCP, and where that is not possible either, through the group's backend.

    Making one is a collective call, and so is every verb: all ranks of the group call the same verbs in the same order. Threads
    of a rank may share one where it does not matter whose call comes first, because their calls are equal: otherwise ranks could
    take them in different orders, which is a Mismatch.
    Ranks in arguments (src, dst) count within the group. The verbs follow torch.distributed: results in place, None
    returned, or with async_op=True a Work; then the tensors belong to the operation until its wait() returns. It works on
    the memory that they had at the call, and a CPU tensor's storage can no longer be resized, as after Tensor.numpy().
    Operations run in the order issued. Tensors may be strided, empty or of inference mode, and an output may share
    memory with an input; a tensor without memory of its own (a DTensor, a FakeTensor, a nested one) is a TypeError.
    Dtypes are float16, bfloat16, float32, float64, int8, uint8, int16, int32, int64 and bool. `op` is 'sum', 'average',
    'min', 'max' or 'product', or torch's ReduceOp of that name; sums and products of integers wrap around, averages of
    them truncate toward zero; on bool, sum and max are "or", product and min are "and", average is a TypeError.
    `algorithm` is 'auto' or one of algorithms(verb). The result of one algorithm in one world is the same on all ranks
    to the bit, every time.

    Raises, from every verb: ValueError, TypeError for a wrong argument, at the call, before anything is sent. From the verb or,
    when asynchronous, from wait: PeerLost, CollectiveTimeout or Mismatch when the operation cannot finish. The Communicator is
    broken from then on and says so at each further call, with an error of the same kind; but for a Mismatch that was found
    before any data moved, as it is where a call is new to all ranks, or where the splits of alltoall differ: then it goes on.
    Over NCCL alone a lost peer shows as CollectiveTimeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Membership | None = None,
        *,
        timeout_s: float = 300.0,
        segment_bytes: int | None = None,
        link: str | None = None,
        stall_warning_s: float | None = 60.0,
        stall_shutdown_s: float | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup | Membership):
            raise ValueError(f"group is {group!r}: a ProcessGroup that this process belongs to is needed")
        rank = group.rank if isinstance(group, Membership) else group.rank()
        if segment_bytes is not None and not isinstance(segment_bytes, int):
            raise TypeError(f"segment_bytes={segment_bytes!r}: a whole number is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or (segment_bytes is not None and segment_bytes <= 0):
            raise ValueError(
                f"rank {rank}: timeout_s={timeout_s} and segment_bytes={segment_bytes} must be positive and finite"
            )
        for name, seconds in (("stall_warning_s", stall_warning_s), ("stall_shutdown_s", stall_shutdown_s)):
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"rank {rank}: {name}={seconds}: it must be positive and finite, or None for never")
        link = link or os.environ.get(LINK) or AUTO
        check_link(link, os.environ)  # what is wrong is found before anyone connects
        membership = group if isinstance(group, Membership) else membership_of(group, host_id(), timeout_s)
        #: Which ranks of torch.distributed's default group these are, by their rank here; empty where they are none.
        self.global_ranks = membership.global_ranks
        self.topology = Topology(membership.rank, membership.hosts)
        settings = [f"segment_bytes={segment_bytes}"]
        settings += [f"{name}={os.environ[name]!r}" for name in variables(PLANNERS, os.environ).values()]
        try:
            connection = connect(membership, link, ", ".join(settings), timeout_s)
        finally:
            if membership is not group:
                membership.close()
        try:
            transport = connection.transport
            quick = transport.quick
            if segment_bytes is None:
                segment_bytes = default_segment_bytes(self.topology, quick=quick)
            algorithms = legal_algorithms(transport.algorithms)
            tables = overrides(algorithms, os.environ)  # a wrong one is a ValueError on all ranks alike
            for collective in algorithms:
                tables.setdefault(
                    collective, default_table(collective, self.topology, transport.preferred, quick=quick)
                )
            plans = Plans(
                self.topology,
                algorithms,
                tables,
                segment_bytes,
                eager=transport.eager,
                share_alignment_bytes=transport.share_alignment_bytes,
            )
            patience_s = timeout_s if stall_shutdown_s is None else min(timeout_s, stall_shutdown_s)
            self._engine = Engine(transport, connection.watch, plans, patience_s, stall_warning_s)
            self._lanes = ""
            self.timeline: Timeline | None = None
            """Where operations are recorded at present."""
        except BaseException:  # or the others would believe that this rank takes part
            connection.close()
            raise

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._engine.size

    @property
    def control_device(self) -> str:
        """Where small tensors of one's own are best: on the CPU, or where the group carries none of those, on the GPU."""
        return self._engine.control_device

    @property
    def routes(self) -> tuple[str, ...]:
        """What joins this rank with which others, in lines for people."""
        return self._engine.routes

    @property
    def segment_bytes(self) -> int:
        """How large a piece of one rank's share is sent at once when a buffer is long."""
        return self._engine.plans.segment_bytes

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """The names that `algorithm=` takes for a verb, besides 'auto'. Raises ValueError for an unknown verb."""
        return self._engine.plans.algorithms(collective)

    @property
    def tables(self) -> dict[str, Table]:
        """What 'auto' runs by message size, for every verb: built in, or from COLLECTIVES_<VERB>."""
        return dict(self._engine.plans.tables)

    def chosen(self, collective: str, nbytes: int, codec: str | Codec | None = None) -> str:
        """What 'auto' runs for a message of nbytes (allgather, reduce_scatter: of all ranks together); with a codec, for an
        allreduce of nbytes of float32."""
        made = make_codec(codec) if codec is not None else None
        if made is None or made.name == "none":
            return self._engine.plans.choose(collective, "auto", nbytes)
        code_bytes = made.wire_bytes(nbytes // 4)
        return self._engine.plans.choose_for_codec(made, "auto", code_bytes, with_feedback=made.needs_feedback)

    def wire_bytes(
        self, collective: str, nbytes: int, algorithm: str = "auto", codec: str | Codec | None = None
    ) -> int | None:
        """Return how many bytes this rank sends for a message of nbytes in all, rooted collectives being rooted at rank 0.

        With a codec, the message is nbytes of float32, and what the ranks of a host send each other before codes are made does
        not count. None for the backend's own algorithm, and where nothing is sent because memory is shared. It is read off the
        plan.
        """
        made = make_codec(codec) if codec is not None else None
        return self._engine.plans.wire_bytes(collective, nbytes, algorithm, made)

    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors between this rank and others of its host go through memory that they share."""
        return self._engine.shares_memory

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised CPU tensor of a shape given as for torch.empty, that ranks of one host allreduce without copying it.

        From the second allreduce on, that is: make it once and use it often. It is an ordinary tensor where there is no memory to
        share, for more than 256 of them at a time, and where too little memory is left, for all of it is taken at once. Not a
        collective call; the ranks that reduce it should all have made theirs so. Its memory is given back with the tensor.
        After a fork, parent and child see the same numbers. Raises TypeError for a dtype that is not carried.
        """
        check_dtype(self.rank, dtype)
        sizes: Any = shape
        return self._engine.empty(tuple(torch.empty(*sizes, device="meta").shape), dtype)

    def shared_empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a CPU tensor, of zeros, that is the same memory on all ranks: what one writes, all see, in no order but that of
        barriers. Its shape is given as for torch.empty.

        A collective call, for ranks of one host. Each rank has the memory for as long as it keeps the tensor, whatever becomes
        of the others and of this Communicator. Raises, on all ranks, ValueError where they are on several hosts, share no
        memory, or differ in what they ask for, and CollectiveError where there is too little memory; TypeError for a dtype that
        is not carried.
        """
        check_dtype(self.rank, dtype)
        sizes: Any = shape
        size = tuple(torch.empty(*sizes, device="meta").shape)
        return shared_tensors.shared_empty(self._engine, self.topology.hosts, size, dtype)

    # Reductions

    @overload
    def allreduce(
        self,
        tensor: Tensor,
        op: Op = ...,
        *,
        prescale: float = ...,
        postscale: float = ...,
        codec: str | Codec | None = ...,
        feedback: Feedback | None = ...,
        step: int | None = ...,
        seed: int | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def allreduce(
        self,
        tensor: Tensor,
        op: Op = ...,
        *,
        prescale: float = ...,
        postscale: float = ...,
        codec: str | Codec | None = ...,
        feedback: Feedback | None = ...,
        step: int | None = ...,
        seed: int | None = ...,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        codec: str | Codec | None = None,
        feedback: Feedback | None = None,
        step: int | None = None,
        seed: int | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place, the result on every rank.

        prescale and postscale (floating-point tensors only) multiply the contributions and the result.

        codec: for the sum or average of floating-point tensors: what travels is not the numbers (as float32) but their codes,
        by one of collectives.compression, or its name with the default settings. Ranks that give different ones get a Mismatch.
        A codec whose codes can be added, or that does without feedback, rides any algorithm; 'auto' takes 'two_shot', for some
        'one_shot', for those that cannot be added (see collectives.compression.algorithms_for). feedback: from new_feedback,
        for this buffer alone: adds what was lost the last time. step: of training, for codecs that change, draw or round by it:
        with equal steps, runs repeat to the bit. Without it, feedback counts its calls; without either it is 0, and a codec
        that draws by it is a ValueError. seed: any whole number that tells this buffer from others of the step, so that they
        are not rounded alike; else feedback's.
        """
        if codec is not None or feedback is not None:
            made = verbs.named_codec(self._engine, codec, feedback, step, seed)
            if made is not None:
                return verbs.allreduce_compressed(
                    self._engine,
                    tensor,
                    op,
                    made,
                    feedback=feedback,
                    step=step,
                    seed=seed,
                    prescale=prescale,
                    postscale=postscale,
                    algorithm=algorithm,
                    async_op=async_op,
                )
        return verbs.allreduce(self._engine, tensor, op, prescale, postscale, algorithm, async_op)

    def new_feedback(
        self, codec: str | Codec, numel: int, device: str | torch.device = "cpu", *, seed: int = 0
    ) -> Feedback:
        """Make error feedback for allreduce(codec=codec) of one buffer of numel elements, on this rank. Not a collective call.

        seed: of these calls, as allreduce's.
        """
        made = make_codec(codec)
        if not isinstance(seed, int):
            raise ValueError(f"rank {self.rank}: seed={seed!r}; a whole number is needed")
        if not isinstance(numel, int) or numel < 0:
            raise ValueError(f"rank {self.rank}: numel={numel!r}; a whole number from 0 is needed")
        with torch.inference_mode(False):  # it is for calls in any mode
            return Feedback(made, self._engine.plans.partition(made, numel), torch.device(device), seed)

    def prepare_allreduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
    ) -> PreparedOperation:
        """Return an allreduce of `tensor` that is checked and planned now, to be run as often as wanted.

        Not a collective call. The tensor must stay where it is. Arguments are those of allreduce; codecs have no prepared form.
        """
        return verbs.prepare_allreduce(self._engine, tensor, op, prescale, postscale, algorithm)

    @overload
    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op = ...,
        *,
        prescale: float = ...,
        postscale: float = ...,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op = ...,
        *,
        prescale: float = ...,
        postscale: float = ...,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """allreduce of several tensors as one operation: those of one dtype and device travel as one message."""
        return verbs.grouped_allreduce(self._engine, tensors, op, prescale, postscale, algorithm, async_op)

    @overload
    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: Op = ...,
        *,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: Op = ...,
        *,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input` over all ranks and leave the r-th part of the result in `output` on rank r.

        input: a tensor of size * output.numel() elements, or one tensor per rank, the same shapes on all ranks; not changed. Of
        a list, ranks that give parts of other shapes get a Mismatch, also where these have equally many elements.
        """
        return verbs.reduce_scatter(self._engine, output, input, op, algorithm=algorithm, async_op=async_op)

    @overload
    def reduce_shares(
        self,
        tensor: Tensor,
        op: Op = ...,
        *,
        prescale: float = ...,
        postscale: float = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def reduce_shares(
        self, tensor: Tensor, op: Op = ..., *, prescale: float = ..., postscale: float = ..., async_op: bool = ...
    ) -> Work | None: ...

    def reduce_shares(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        async_op: bool = False,
    ) -> Work | None:
        """Do the first half of allreduce: leave in `tensor`, where shares() says that it is this rank's, the bits that allreduce
        with the same arguments would. What is elsewhere in it is undefined.

        Where the algorithm that allreduce would take has no halves (ring, rsag, direct and shared have), all of it is done.
        """
        shares = verbs.shares_of(self._engine, tensor)
        if shares.algorithm is None:
            return self.allreduce(tensor, op, prescale=prescale, postscale=postscale, async_op=async_op)
        return verbs.reduce_shares(self._engine, tensor, op, prescale, postscale, shares, async_op)

    def prepare_reduce_shares(
        self, tensor: Tensor, op: Op = "sum", *, prescale: float = 1.0, postscale: float = 1.0
    ) -> PreparedOperation:
        """Check and plan a reduce_shares of a tensor once, as prepare_allreduce does an allreduce."""
        shares = verbs.shares_of(self._engine, tensor)
        if shares.algorithm is None:
            return self.prepare_allreduce(tensor, op, prescale=prescale, postscale=postscale)
        return verbs.prepare_reduce_shares(self._engine, tensor, op, prescale, postscale, shares)

    def shares(self, numel: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[slice, ...], ...]:
        """Return, by rank, what is whose in a tensor of so many elements between reduce_shares and gather_shares: slices of its
        elements, in order, about as many elements for each rank. Not a collective call; the same on all ranks."""
        spans = self._engine.plans.shares(numel, dtype.itemsize).spans
        return tuple(tuple(slice(span.start, span.stop) for span in mine) for mine in spans)

    @overload
    def reduce(
        self, tensor: Tensor, dst: int = ..., op: Op = ..., *, algorithm: str = ..., async_op: Literal[True]
    ) -> Work: ...

    @overload
    def reduce(
        self, tensor: Tensor, dst: int = ..., op: Op = ..., *, algorithm: str = ..., async_op: bool = ...
    ) -> Work | None: ...

    def reduce(
        self, tensor: Tensor, dst: int = 0, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place on rank dst; on the others it is not changed."""
        return verbs.reduce(self._engine, tensor, dst, op, algorithm=algorithm, async_op=async_op)

    # Movement

    @overload
    def allgather(
        self, output: Tensor | Sequence[Tensor], input: Tensor, *, algorithm: str = ..., async_op: Literal[True]
    ) -> Work: ...

    @overload
    def allgather(
        self, output: Tensor | Sequence[Tensor], input: Tensor, *, algorithm: str = ..., async_op: bool = ...
    ) -> Work | None: ...

    def allgather(
        self,
        output: Tensor | Sequence[Tensor],
        input: Tensor,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Collect every rank's `input` on all ranks, in rank order.

        output: a tensor of size * input.numel() elements, or one tensor per rank, of that rank's size, which may differ.
        """
        return verbs.allgather(self._engine, output, input, algorithm=algorithm, async_op=async_op)

    @overload
    def gather_shares(self, tensor: Tensor, *, async_op: Literal[True]) -> Work: ...

    @overload
    def gather_shares(self, tensor: Tensor, *, async_op: bool = ...) -> Work | None: ...

    def gather_shares(self, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Do the second half of allreduce: fill `tensor`, in place, with what each rank has where shares() says that it is
        that rank's."""
        return verbs.gather_shares(self._engine, tensor, async_op)

    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., *, algorithm: str = ..., async_op: Literal[True]) -> Work: ...

    @overload
    def broadcast(
        self, tensor: Tensor, src: int = ..., *, algorithm: str = ..., async_op: bool = ...
    ) -> Work | None: ...

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """Copy rank src's `tensor` into that of every other rank, in place."""
        return verbs.broadcast(self._engine, tensor, src, algorithm=algorithm, async_op=async_op)

    @overload
    def gather(
        self,
        input: Tensor,
        output: Sequence[Tensor] | None = ...,
        dst: int = ...,
        *,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def gather(
        self,
        input: Tensor,
        output: Sequence[Tensor] | None = ...,
        dst: int = ...,
        *,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def gather(
        self,
        input: Tensor,
        output: Sequence[Tensor] | None = None,
        dst: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Collect every rank's `input`, of one size, on rank dst. output: on dst one tensor per rank, elsewhere None."""
        return verbs.gather(self._engine, input, output, dst, algorithm=algorithm, async_op=async_op)

    @overload
    def scatter(
        self,
        output: Tensor,
        input: Sequence[Tensor] | None = ...,
        src: int = ...,
        *,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def scatter(
        self,
        output: Tensor,
        input: Sequence[Tensor] | None = ...,
        src: int = ...,
        *,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def scatter(
        self,
        output: Tensor,
        input: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Hand rank r the r-th tensor of rank src's `input`. input: on src one tensor per rank, of one size; elsewhere None."""
        return verbs.scatter(self._engine, output, input, src, algorithm=algorithm, async_op=async_op)

    @overload
    def alltoall(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = ...,
        input_splits: Sequence[int] | None = ...,
        *,
        algorithm: str = ...,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def alltoall(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = ...,
        input_splits: Sequence[int] | None = ...,
        *,
        algorithm: str = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def alltoall(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Send the r-th part of `input` to rank r, whose part for this rank becomes the r-th part of `output` there.

        The splits count rows of dimension 0, one number per rank; None cuts into equal parts. Either all ranks give splits or
        none does. Raises Mismatch on all ranks when the rows that one rank sends another are not those it expects.
        """
        return verbs.alltoall(
            self._engine, output, input, output_splits, input_splits, algorithm=algorithm, async_op=async_op
        )

    @overload
    def barrier(self, *, algorithm: str = ..., async_op: Literal[True]) -> Work: ...

    @overload
    def barrier(self, *, algorithm: str = ..., async_op: bool = ...) -> Work | None: ...

    def barrier(self, *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
        """Return when every rank has called it."""
        return verbs.barrier(self._engine, algorithm=algorithm, async_op=async_op)

    # Messages between two ranks

    @overload
    def send(self, tensor: Tensor, dst: int, *, tag: int = ..., async_op: Literal[False] = ...) -> None: ...

    @overload
    def send(self, tensor: Tensor, dst: int, *, tag: int = ..., async_op: Literal[True]) -> MessageWork: ...

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0, async_op: bool = False) -> MessageWork | None:
        """Send `tensor` to rank dst, which calls recv with a tensor of as many bytes and the same tag (0 to 65535).

        Only the two ranks call anything; messages do not count among the operations that all ranks call in the same order. But
        what goes from one rank to another, in messages and in operations, is received in the order in which it is sent: a rank
        that enters an operation, or asks for a later message, before the message that was sent first is asked for, waits until
        its deadline passes. When send returns, the tensor is free; the message may still be on its way. It may also wait until
        dst asks for the message, as inside a host it does: two ranks that both send first use async_op=True. Over NCCL, which
        knows no tags, only tag 0 is allowed.
        """
        return verbs.send(self._engine, tensor, dst, tag, async_op)

    @overload
    def recv(self, tensor: Tensor, src: int | None = ..., *, tag: int = ..., async_op: Literal[False] = ...) -> int: ...

    @overload
    def recv(
        self, tensor: Tensor, src: int | None = ..., *, tag: int = ..., async_op: Literal[True]
    ) -> MessageWork: ...

    def recv(
        self, tensor: Tensor, src: int | None = None, *, tag: int = 0, async_op: bool = False
    ) -> MessageWork | int | None:
        """Fill `tensor` with a message that rank src sends with this tag; return src. See send for the order.

        src=None takes the next message with the tag from whichever rank sends one, ranks taking turns, and returns that rank
        (or tells it as .sender of the handle); over gloo's and NCCL's messages that is a ValueError. A thread that waits for
        messages while others call operations needs a Communicator of its own: there is one turn at a time.
        """
        return verbs.recv(self._engine, tensor, src, tag, async_op)

    # Objects

    def allgather_record(self, record: Any) -> list[Any]:
        """Return every rank's record, in rank order: numbers, strings, booleans, None, and lists and dicts of these, as JSON has
        them (a tuple comes back as a list). Nothing is pickled, so what comes from another rank cannot run anything here."""
        return objects.allgather_record(self._engine, record)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order. Objects are pickled: only use it among processes you trust."""
        return objects.allgather_object(self._engine, obj)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Rank src's picklable object, returned on every rank; what the others pass is ignored."""
        return objects.broadcast_object(self._engine, obj, src)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every rank's picklable object, in rank order, on rank dst; None elsewhere."""
        return objects.gather_object(self._engine, obj, dst)

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0) -> Any:
        """The r-th of rank src's picklable objects, on rank r; what the others pass is ignored."""
        return objects.scatter_object(self._engine, objs, src)

    # Uneven inputs

    @property
    def absence(self) -> Absence:
        """This rank's way to take part with zeros in what the others call. See there."""
        return Absence(self._engine)

    # What is told beside operations

    def post(self, topic: str, record: Any) -> None:
        """Tell all ranks a record, as of allgather_record, of which the latest of each topic counts. Returns at once, and is no
        operation: nobody needs to take part, and it is on its way for as long as it is."""
        self._engine.watch.post(topic, record)

    def posted(self, topic: str) -> dict[int, Any]:
        """Return the latest record that came from each rank, this one among them, by rank. Returns at once."""
        return dict(self._engine.watch.posts.get(topic, {}))

    def record(self, timeline: Timeline | None, name: str = "") -> None:
        """Record operations in a timeline from now on, in lanes that begin with this name; with None no more. On this rank
        only."""
        self._lanes = name
        self.timeline = timeline
        self._engine.record(self.lane("operations"))

    def lane(self, of: str) -> Lane | None:
        """Return the lane for what somebody does with this Communicator; None where nothing is recorded."""
        timeline = self.timeline
        return None if timeline is None else timeline.lane(f"{self._lanes}: {of}")

    # The end

    def close(self) -> None:
        """Finish what was issued and give the group back. A collective call that waits at most some seconds for the others;
        after a failure it returns at once. Calling it again does nothing."""
        close_all([self])

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all([self], error)


def close_all(communicators: Iterable[Communicator], error: BaseException | None = None) -> None:
    """Close several Communicators as close() does one, in little more time than one takes: all say so before any waits. error:
    the exception by which this rank leaves, of which the others are told."""
    engines = [communicator._engine for communicator in communicators]
    engines = [engine for engine in engines if engine.announce_close(error)]
    drain_by = time.monotonic() + DRAIN_S
    try:
        for engine in engines:
            engine.drain(drain_by)
    finally:
        part_by = time.monotonic() + MEET_S
        for engine in engines:
            engine.part(part_by)
        for engine in engines:
            engine.join()

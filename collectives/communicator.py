"""The verbs: what a user calls to move tensors between the ranks of a group."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from collectives import native
from collectives.algorithms import PLANNERS
from collectives.engine import NATIVE, SHARED, Engine, Turn
from collectives.errors import Mismatch
from collectives.neighbours import connect_neighbours
from collectives.reduction import Op, carried, check_arithmetic, check_dtype, finish, op_name
from collectives.schedule import Place
from collectives.selection import Table, default_segment_bytes
from collectives.spans import Layout, Span, consecutive
from collectives.staging import Buffer
from collectives.topology import Topology, host_id
from collectives.transport.process_group import connect
from collectives.work import Work


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(tensor: torch.Tensor) -> str:
    return f"{_dtype_name(tensor)}[{tensor.numel()}]"


class Communicator:
    """Collective operations among the ranks of a torch.distributed group, on a duplicate of that group.

    group: a ProcessGroup over gloo (CPU tensors; CUDA tensors travel through pinned memory) or NCCL (CUDA tensors); None is
    the world. timeout_s: seconds that each operation may take from its start. segment_bytes: how large a piece of one rank's
    share is sent at once when a buffer is long; larger pieces cost less overhead, smaller ones overlap better; None chooses
    by topology. shared_memory: whether ranks of one host talk through memory that they share; without it, or where they cannot
    (the log says why), everything goes through the group's backend.

    Making one is a collective call, and so is every verb: all ranks of the group call the same verbs in the same order. Ranks
    in arguments (src, dst) count within the group. The verbs follow torch.distributed: results in place, None returned, or
    with async_op=True a Work; then the tensors belong to the operation until its wait() returns. Operations run in the order
    issued. Tensors may be strided and may be empty; dtypes are float16, bfloat16, float32, float64, int8, uint8, int16,
    int32, int64 and bool. `op` is 'sum', 'average', 'min', 'max' or 'product', or torch's ReduceOp of that name; integers are
    averaged toward zero; on bool, sum and max are "or", product and min are "and", average is a TypeError. `algorithm` is
    'auto' or one of algorithms(verb). The result of one algorithm in one world is the same on all ranks to the bit, every time.

    Raises, from every verb (asynchronous: from wait): ValueError, TypeError for a wrong argument, before anything is sent;
    PeerLost, CollectiveTimeout, Mismatch when the operation cannot finish. After one of these three the Communicator is broken
    and says so at each further call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 300.0,
        segment_bytes: int | None = None,
        shared_memory: bool = True,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is {group!r}: a ProcessGroup that this process belongs to is needed")
        if timeout_s <= 0 or (segment_bytes is not None and segment_bytes <= 0):
            raise ValueError(f"timeout_s={timeout_s} and segment_bytes={segment_bytes} must be positive")
        connection = connect(group, host_id(), timeout_s)
        transport = connection.transport
        self._via_host = "cuda" not in transport.backends
        self._host_tensors = "cpu" in transport.backends
        self.topology = Topology.from_host_ids(transport.rank, connection.host_digests)
        if segment_bytes is None:
            segment_bytes = default_segment_bytes(self.topology)
        neighbours = connect_neighbours(transport, connection.store, self.topology, timeout_s, wanted=shared_memory)
        self._engine = Engine(
            neighbours.transport,
            connection.store,
            self.topology,
            neighbours.shared,
            timeout_s=timeout_s,
            segment_bytes=segment_bytes,
        )

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._engine.size

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """The names that `algorithm=` takes for a verb, besides 'auto'. Raises ValueError for an unknown verb."""
        if collective not in PLANNERS:
            raise ValueError(f"no collective is called {collective!r}; known are {', '.join(PLANNERS)}")
        return self._engine.algorithms(collective)

    @property
    def tables(self) -> dict[str, Table]:
        """What 'auto' runs by message size, for every verb: built in, or from COLLECTIVES_<VERB>."""
        return self._engine.tables

    def chosen(self, collective: str, nbytes: int) -> str:
        """What 'auto' runs for a message of nbytes (allgather, reduce_scatter: of all ranks together)."""
        self.algorithms(collective)
        return self._engine.choose(collective, "auto", nbytes)

    def wire_bytes(self, collective: str, nbytes: int, algorithm: str = "auto") -> int | None:
        """The most that any one rank sends, in bytes, for a message of nbytes in all; None for the backend's own, and where
        nothing is sent because memory is shared."""
        self.algorithms(collective)
        name = self._engine.choose(collective, algorithm, nbytes)
        if name in (NATIVE, SHARED):
            return None
        plans = [PLANNERS[collective][name](Place(r, self.size, 0, self.topology.hosts)) for r in range(self.size)]
        return max(math.ceil(nbytes * plan.sent_blocks() / plan.blocks) for plan in plans)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised CPU tensor that allreduce, among ranks of one host, reduces without copying it.

        An ordinary tensor otherwise, and where there is no memory to share. Not a collective call; the ranks that reduce it
        should all have made theirs so. Its memory is given back with the tensor.
        """
        check_dtype(dtype)
        return self._engine.empty(shape, dtype)

    # Reductions

    def allreduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place, the result on every rank.

        prescale and postscale (floating-point tensors only) multiply the contributions and the result.
        """
        key = (op, algorithm, prescale, postscale)
        if not async_op and self._engine.repeat(tensor, key):
            return None
        return self.grouped_allreduce(
            [tensor], op, prescale=prescale, postscale=postscale, algorithm=algorithm, async_op=async_op
        )

    def grouped_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """allreduce of several tensors as one operation: those of one dtype and device travel as one message."""
        name = op_name(op)
        fused: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            self._check(tensor)
            check_arithmetic(tensor.dtype, name, prescale, postscale)
            fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        chosen = [
            self._engine.choose("allreduce", algorithm, sum(t.numel() * t.element_size() for t in group))
            for group in fused.values()
        ]
        described = ", ".join(map(_described, tensors))
        call = f"allreduce({described}, {name}, prescale={prescale}, postscale={postscale}, {', '.join(chosen)})"
        if SHARED in chosen:
            self._engine.prepare(dtype for dtype, _ in fused)
            if len(tensors) == 1 and prescale == postscale == 1.0:
                self._engine.remember(tensors[0], (op, algorithm, prescale, postscale), call, name)

        def body(turn: Turn) -> None:
            for group, choice in zip(fused.values(), chosen, strict=True):
                whole = group[0] if len(group) == 1 else torch.cat([t.detach().reshape(-1) for t in group])
                buffer = self._buffer(whole)
                if prescale != 1.0:
                    buffer.flat.mul_(prescale)
                self._reduce_in_place(turn, choice, buffer.flat, name)
                finish(buffer.flat, "sum" if choice == SHARED else name, self.size, postscale)
                buffer.store()
                if len(group) > 1:
                    for tensor, part in zip(group, whole.split([t.numel() for t in group]), strict=True):
                        tensor.detach().copy_(part.view(tensor.shape))

        return self._engine.submit(call, body, async_op=async_op)

    def _reduce_in_place(self, turn: Turn, algorithm: str, flat: torch.Tensor, name: str) -> None:
        moved, op = carried(flat, name)
        if algorithm == SHARED:
            self._engine.in_shared_memory(turn, moved, op)
        elif algorithm == NATIVE:
            wide = native.reducible(moved)
            self._engine.native(turn, native.allreduce(wide, op), is_cuda=flat.is_cuda)
            if wide is not moved:
                moved.copy_(wide)
        else:
            self._engine.over_buffer(turn, "allreduce", algorithm, moved, op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input` over all ranks and leave the r-th part of the result in `output` on rank r.

        input: a tensor of size * output.numel() elements, or one tensor per rank, the same sizes on all ranks; not changed.
        """
        name = op_name(op)
        parts = list(input) if not isinstance(input, torch.Tensor) else None
        self._check(output, *(parts if parts is not None else [input]))
        check_arithmetic(output.dtype, name)
        lengths = self._lengths("input", input, output, "output")
        layout = consecutive(lengths)
        total = layout[-1].stop
        chosen = self._engine.choose("reduce_scatter", algorithm, total * output.element_size())
        if chosen == NATIVE and len(set(lengths)) > 1:
            raise ValueError(f"rank {self.rank}: reduce_scatter of unequal parts {lengths} has no algorithm 'native'")
        call = f"reduce_scatter({_dtype_name(output)}{lengths}, {name}, {chosen})"

        def body(turn: Turn) -> None:
            whole = torch.cat([p.detach().reshape(-1) for p in parts]) if parts is not None else input
            assert isinstance(whole, torch.Tensor)
            source = self._buffer(whole).flat
            result = self._buffer(output, fill=False)
            own = layout[self.rank]
            if chosen == NATIVE:
                moved, carried_op = carried(source, name)
                wide = native.reducible(moved)
                landed = torch.empty(own.length, dtype=wide.dtype, device=wide.device)
                call_native = native.reduce_scatter(landed, wide, carried_op)
                self._engine.native(turn, call_native, is_cuda=source.is_cuda)
            else:
                if source.data_ptr() == whole.data_ptr():
                    source = source.clone()
                moved, carried_op = carried(source, name)
                self._engine.over_blocks(turn, "reduce_scatter", chosen, moved, layout, carried_op)
                landed = moved[own.start : own.stop]
            result.flat.copy_(landed)
            finish(result.flat, name, self.size, 1.0)
            result.store()

        return self._engine.submit(call, body, async_op=async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place on rank dst; on the others it is not changed."""
        name = op_name(op)
        self._check(tensor)
        self._check_root("dst", dst)
        check_arithmetic(tensor.dtype, name)
        chosen = self._engine.choose("reduce", algorithm, tensor.numel() * tensor.element_size())
        call = f"reduce({_described(tensor)}, dst={dst}, {name}, {chosen})"

        def body(turn: Turn) -> None:
            buffer = self._buffer(tensor)
            flat = buffer.flat if self.rank == dst else buffer.flat.clone()
            moved, carried_op = carried(flat, name)
            if chosen == NATIVE:
                wide = native.reducible(moved)
                self._engine.native(turn, native.reduce(wide, dst, carried_op), is_cuda=flat.is_cuda)
                if wide is not moved:
                    moved.copy_(wide)
            else:
                self._engine.over_buffer(turn, "reduce", chosen, moved, carried_op, dst)
            if self.rank == dst:
                finish(flat, name, self.size, 1.0)
                buffer.store()

        return self._engine.submit(call, body, async_op=async_op)

    # Movement

    def allgather(
        self,
        output: torch.Tensor | Sequence[torch.Tensor],
        input: torch.Tensor,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Collect every rank's `input` on all ranks, in rank order.

        output: a tensor of size * input.numel() elements, or one tensor per rank, of that rank's size, which may differ.
        """
        parts = list(output) if not isinstance(output, torch.Tensor) else None
        self._check(input, *(parts if parts is not None else [output]))
        lengths = self._lengths("output", output, input, "input")
        layout = consecutive(lengths)
        total = layout[-1].stop
        chosen = self._engine.choose("allgather", algorithm, total * input.element_size())
        if chosen == NATIVE and len(set(lengths)) > 1:
            raise ValueError(f"rank {self.rank}: allgather of unequal parts {lengths} has no algorithm 'native'")
        call = f"allgather({_dtype_name(input)}{lengths}, {chosen})"

        def body(turn: Turn) -> None:
            if parts is None:
                assert isinstance(output, torch.Tensor)
                whole = output
            else:
                whole = torch.empty(total, dtype=input.dtype, device=input.device)
            result = self._buffer(whole, fill=False)
            own = layout[self.rank]
            source = self._buffer(input).flat
            if chosen == NATIVE:
                call_native = native.allgather(_bytes(result.flat), _bytes(source))
                self._engine.native(turn, call_native, is_cuda=source.is_cuda)
            else:
                result.flat[own.start : own.stop].copy_(source)
                self._engine.over_blocks(turn, "allgather", chosen, result.flat, layout)
            result.store()
            if parts is not None:
                for part, span in zip(parts, layout, strict=True):
                    part.detach().copy_(whole[span.start : span.stop].view(part.shape))

        return self._engine.submit(call, body, async_op=async_op)

    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, *, algorithm: str = "auto", async_op: bool = False
    ) -> Work | None:
        """Copy rank src's `tensor` into that of every other rank, in place."""
        self._check(tensor)
        self._check_root("src", src)
        chosen = self._engine.choose("broadcast", algorithm, tensor.numel() * tensor.element_size())
        call = f"broadcast({_described(tensor)}, src={src}, {chosen})"

        def body(turn: Turn) -> None:
            buffer = self._buffer(tensor)
            if chosen == NATIVE:
                call_native = native.broadcast(_bytes(buffer.flat), src)
                self._engine.native(turn, call_native, is_cuda=buffer.flat.is_cuda)
            else:
                self._engine.over_buffer(turn, "broadcast", chosen, buffer.flat, root=src)
            buffer.store()

        return self._engine.submit(call, body, async_op=async_op)

    def gather(
        self,
        input: torch.Tensor,
        output: Sequence[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Collect every rank's `input`, of one size, on rank dst. output: on dst one tensor per rank, elsewhere None."""
        self._check_root("dst", dst)
        parts = self._rooted_list("output", output, input, "dst", dst)
        chosen = self._engine.choose("gather", algorithm, input.numel() * input.element_size() * self.size)
        call = f"gather({_described(input)}, dst={dst}, {chosen})"

        def body(turn: Turn) -> None:
            source = self._buffer(input).flat
            numel = source.numel()
            landed = torch.empty(len(parts) * numel, dtype=source.dtype, device=source.device)
            if chosen == NATIVE:
                pieces = list(_bytes(landed).view(len(parts), -1)) if parts else []
                call_native = native.gather(_bytes(source), pieces, dst)
                self._engine.native(turn, call_native, is_cuda=source.is_cuda)
            else:
                if parts:
                    landed[dst * numel : (dst + 1) * numel].copy_(source)
                mine = self._only(numel)
                layout = consecutive([numel] * self.size) if parts else mine
                self._engine.between(turn, "gather", chosen, source, mine, landed, layout, dst)
            for rank, part in enumerate(parts):
                part.detach().copy_(landed[rank * numel : (rank + 1) * numel].view(part.shape))

        return self._engine.submit(call, body, async_op=async_op)

    def scatter(
        self,
        output: torch.Tensor,
        input: Sequence[torch.Tensor] | None = None,
        src: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work | None:
        """Hand rank r the r-th tensor of rank src's `input`. input: on src one tensor per rank, of one size; elsewhere None."""
        self._check_root("src", src)
        parts = self._rooted_list("input", input, output, "src", src)
        chosen = self._engine.choose("scatter", algorithm, output.numel() * output.element_size() * self.size)
        call = f"scatter({_described(output)}, src={src}, {chosen})"

        def body(turn: Turn) -> None:
            result = self._buffer(output, fill=False)
            numel = result.flat.numel()
            source = self._buffer(torch.cat([p.detach().reshape(-1) for p in parts])).flat if parts else result.flat[:0]
            if chosen == NATIVE:
                pieces = list(_bytes(source).view(len(parts), -1)) if parts else []
                call_native = native.scatter(_bytes(result.flat), pieces, src)
                self._engine.native(turn, call_native, is_cuda=source.is_cuda)
            else:
                if parts:
                    result.flat.copy_(source[src * numel : (src + 1) * numel])
                mine = self._only(numel)
                layout = consecutive([numel] * self.size) if parts else mine
                self._engine.between(turn, "scatter", chosen, source, layout, result.flat, mine, src)
            result.store()

        return self._engine.submit(call, body, async_op=async_op)

    def alltoall(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
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
        self._check(output, input)
        if (output_splits is None) != (input_splits is None):
            raise ValueError(f"rank {self.rank}: alltoall needs both output_splits and input_splits, or neither")
        incoming = self._split_lengths("output", output, output_splits)
        outgoing = self._split_lengths("input", input, input_splits)
        chosen = self._engine.choose("alltoall", algorithm, input.numel() * input.element_size())
        shape = "splits" if input_splits is not None else _described(input)
        call = f"alltoall({_dtype_name(input)}, {shape}, {chosen})"

        def body(turn: Turn) -> None:
            if input_splits is not None:
                self._check_splits(turn, outgoing, incoming)
            source = self._buffer(input).flat
            result = self._buffer(output, fill=False)
            sent, landed = consecutive(outgoing), consecutive(incoming)
            if chosen == NATIVE:
                width = source.element_size()
                call_native = native.alltoall(
                    _bytes(result.flat),
                    _bytes(source),
                    [n * width for n in incoming],
                    [n * width for n in outgoing],
                )
                self._engine.native(turn, call_native, is_cuda=source.is_cuda)
            else:
                own = source[sent[self.rank].start : sent[self.rank].stop]
                result.flat[landed[self.rank].start : landed[self.rank].stop].copy_(own)
                self._engine.between(turn, "alltoall", chosen, source, sent, result.flat, landed)
            result.store()

        return self._engine.submit(call, body, async_op=async_op)

    def barrier(self, *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
        """Return when every rank has called it."""
        chosen = self._engine.choose("barrier", algorithm, 1)
        if chosen == SHARED:
            self._engine.prepare([torch.uint8])

        def body(turn: Turn) -> None:
            if chosen == NATIVE:
                self._engine.native(turn, native.barrier(), is_cuda=False)
            elif chosen == SHARED:
                self._engine.in_shared_memory(turn, torch.empty(0, dtype=torch.uint8), "max")
            else:
                token = torch.zeros(1, dtype=torch.uint8, device="cpu" if self._host_tensors else "cuda")
                self._engine.over_buffer(turn, "barrier", chosen, token, "max")

        return self._engine.submit(f"barrier({chosen})", body, async_op=async_op)

    # Objects

    def allgather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order. Objects are pickled: only use it among processes you trust."""
        mine = self._pickled(obj)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=mine.device)
        self.allgather(lengths, torch.tensor([mine.numel()], device=mine.device))
        parts = [torch.empty(int(n), dtype=torch.uint8, device=mine.device) for n in lengths]
        self.allgather(parts, mine)
        return [_unpickled(part) for part in parts]

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Rank src's picklable object, returned on every rank; what the others pass is ignored."""
        self._check_root("src", src)
        mine = self._pickled(obj if self.rank == src else None)
        length = torch.tensor([mine.numel()], device=mine.device)
        self.broadcast(length, src)
        if self.rank != src:
            mine = torch.empty(int(length), dtype=torch.uint8, device=mine.device)
        self.broadcast(mine, src)
        return obj if self.rank == src else _unpickled(mine)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every rank's picklable object, in rank order, on rank dst; None elsewhere."""
        self._check_root("dst", dst)
        received = self._exchanged([obj if rank == dst else None for rank in range(self.size)])
        return received if self.rank == dst else None

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0) -> Any:
        """The r-th of rank src's picklable objects, on rank r; what the others pass is ignored."""
        self._check_root("src", src)
        if self.rank == src and (objs is None or len(objs) != self.size):
            raise ValueError(
                f"rank {self.rank}: scatter_object needs {self.size} objects on rank src={src}, not {objs!r}"
            )
        outgoing = list(objs) if self.rank == src and objs is not None else [None] * self.size
        return self._exchanged(outgoing)[src]

    def _exchanged(self, outgoing: Sequence[Any]) -> list[Any]:
        """Object r goes to rank r; returns what came from each rank."""
        pieces = [self._pickled(obj) for obj in outgoing]
        sent = torch.tensor([piece.numel() for piece in pieces], device=pieces[0].device)
        landed = torch.empty_like(sent)
        self.alltoall(landed, sent)
        output = torch.empty(int(landed.sum()), dtype=torch.uint8, device=sent.device)
        self.alltoall(output, torch.cat(pieces), landed.tolist(), sent.tolist())
        return [_unpickled(part) for part in output.split(landed.tolist())]

    def _pickled(self, obj: Any) -> torch.Tensor:
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        return payload if self._host_tensors else payload.cuda()

    # Arguments

    def _buffer(self, tensor: torch.Tensor, *, fill: bool = True) -> Buffer:
        return Buffer(tensor, via_host=tensor.is_cuda and self._via_host, fill=fill)

    def _check(self, *tensors: torch.Tensor) -> None:
        """Raises TypeError for what is no tensor of an allowed dtype, ValueError for a mixture or a wrong device."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"rank {self.rank}: a torch.Tensor is needed, not {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"rank {self.rank}: a dense tensor is needed, not one of layout {tensor.layout}")
            check_dtype(tensor.dtype)
            if tensor.device.type != "cuda" and not (tensor.device.type == "cpu" and self._host_tensors):
                allowed = "cpu and cuda" if self._host_tensors else "cuda"
                raise ValueError(f"rank {self.rank}: tensor on {tensor.device}; this group carries {allowed} tensors")
            if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
                raise ValueError(
                    f"rank {self.rank}: all tensors of a call need one dtype and device; given are "
                    f"{tensors[0].dtype} on {tensors[0].device} and {tensor.dtype} on {tensor.device}"
                )

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank}: {name}={root}; allowed are 0 to {self.size - 1}")

    def _lengths(
        self,
        many_name: str,
        many: torch.Tensor | Sequence[torch.Tensor],
        one: torch.Tensor,
        one_name: str,
    ) -> list[int]:
        """Elements of each rank's part of `many`, checked against this rank's `one`."""
        if isinstance(many, torch.Tensor):
            if many.numel() != self.size * one.numel():
                raise ValueError(
                    f"rank {self.rank}: {many_name} has {many.numel()} elements; {self.size} ranks times "
                    f"{one_name}'s {one.numel()} are needed"
                )
            return [one.numel()] * self.size
        lengths = [part.numel() for part in many]
        if len(lengths) != self.size or lengths[self.rank] != one.numel():
            raise ValueError(
                f"rank {self.rank}: {many_name} has parts of {lengths} elements; {self.size} parts are needed, the one of "
                f"this rank with {one_name}'s {one.numel()}"
            )
        return lengths

    def _rooted_list(
        self, name: str, tensors: Sequence[torch.Tensor] | None, one: torch.Tensor, root_name: str, root: int
    ) -> list[torch.Tensor]:
        """The list that only the root gives, empty elsewhere."""
        parts = list(tensors or ())
        self._check(one, *parts)
        wanted = self.size if self.rank == root else 0
        if len(parts) != wanted or any(part.numel() != one.numel() for part in parts):
            raise ValueError(
                f"rank {self.rank}: {name} has tensors of {[part.numel() for part in parts]} elements; with {root_name}={root} "
                f"this rank gives {wanted} of {one.numel()} elements"
            )
        return parts

    def _only(self, numel: int) -> Layout:
        """The layout of a buffer that holds this rank's block and no other."""
        return tuple(Span(0, numel if rank == self.rank else 0) for rank in range(self.size))

    def _split_lengths(self, name: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Elements that go to, or come from, each rank."""
        if splits is None:
            if tensor.numel() % self.size:
                raise ValueError(
                    f"rank {self.rank}: {name} has {tensor.numel()} elements, which {self.size} ranks cannot share equally"
                )
            return [tensor.numel() // self.size] * self.size
        rows = tensor.shape[0] if tensor.dim() else 0
        if len(splits) != self.size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"rank {self.rank}: {name}_splits={list(splits)}; {self.size} numbers >= 0 that add up to {rows} rows are needed"
            )
        width = math.prod(tensor.shape[1:])
        return [count * width for count in splits]

    def _check_splits(self, turn: Turn, outgoing: list[int], incoming: list[int]) -> None:
        """Compare what every rank sends with what every rank expects; the same verdict on all ranks, nothing sent yet."""
        rows = self._engine.table(turn, outgoing + incoming)
        wrong = {
            rank: f"alltoall with input splits {row[: self.size]} and output splits {row[self.size :]} (elements)"
            for rank, row in enumerate(rows)
            if any(row[other] != rows[other][self.size + rank] for other in range(self.size))
            or any(row[self.size + other] != rows[other][rank] for other in range(self.size))
        }
        if wrong:
            raise Mismatch(wrong, rank=self.rank, operation=turn.call)

    # The end

    def close(self) -> None:
        """Finish what was issued and give the group back. A collective call that waits at most some seconds for the others;
        after a failure it returns at once. Calling it again does nothing."""
        self._engine.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: backends move bytes of every dtype."""
    return flat.view(torch.uint8)


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.cpu().numpy().tobytes())

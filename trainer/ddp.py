"""Codecs for torch's DistributedDataParallel: a communication hook for it."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import atexit
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.collectives import Communicator, Work
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.run.queue import WorkQueue
from gradwire.collectives.torch_internals import (
    CAN_MOVE_STORAGE,
    OUTSIDE_BACKWARD,
    graph_task,
    move_storage,
    when_backward_ends,
)
from gradwire.trainer.reducer.arguments import Average, check_named_parameters
from gradwire.trainer.reducer.buffers import CodedBuffer, buffer_for
from gradwire.trainer.reducer.checkpoint_format import VERSION, check_part
from gradwire.trainer.reducer.choice import Choice, Size
from gradwire.trainer.reducer.combination import Combination, ExchangeStats, Traffic
from gradwire.trainer.reducer.compression import CASTS, Cast, Compressor, Encoding, Policy, encoding_for, wanted
from gradwire.trainer.reducer.layout import packed
from gradwire.trainer.reducer.residuals import Residuals

UNSETTLED_STEPS = 2
"""DDP lays out its buckets anew after the first step, and residuals begin with those that stay."""

_CLOSE_S = 5.0


def ddp_comm_hook(
    compression: Compressor,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    allow: Sequence[Compressor] | None = None,
    policy: Mapping[str, Compressor] | None = None,
    timeout_s: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
) -> "CompressionHook":
    """Return a hook that averages gradients: `model.register_comm_hook(None, gradwire.ddp_comm_hook("int8"))`.

    compression, allow, policy: as in DistributedOptimizer, with the same error feedback and warm-up. The first two
    exchanges are always uncompressed, because DDP rebuilds its buckets after the first step. Exception: if all parameters
    of a bucket use the same cast, the hook casts this bucket from the first exchange on.
    named_parameters: all parameters of the module under DDP; policy matches their names.
    timeout_s: the deadline of each operation of an exchange, in seconds from its start.
    process_group: the process group that DDP was given, if any.

    One hook is for one model on one device; there may be several hooks. init() is not needed: the first backward() makes a
    Communicator, and close() closes it. backward() raises CollectiveError if an exchange cannot finish. Raises ValueError for
    an invalid codec, for names that are not unique, and for a pattern of policy that matches no name.

    With find_unused_parameters=True and error feedback, a parameter that no rank has used in a step loses the part of its
    residual that the codes of this step contain, because DDP does not set its gradient.
    docs/guides/ddp.md is the guide.
    """
    names = None if named_parameters is None else check_named_parameters(named_parameters, ())
    checked = Policy(wanted(compression, allow), policy).checked(None if names is None else names.values())
    return CompressionHook(checked, names, timeout_s, process_group)


class CompressionHook:
    """Averages each full bucket over the ranks, when DDP calls this hook. ddp_comm_hook returns it.

    When DDP changes its buckets, the hook adds the residuals to the gradients, and exchanges these gradients once without
    compression.
    """

    def __init__(
        self, policy: Policy, names: Mapping[Tensor, str] | None, timeout_s: float, group: dist.ProcessGroup | None
    ) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__  # which DDP reads, of functions
        self._policy = policy
        self._names = names
        self._timeout_s = timeout_s
        self._group = group
        self._combination: Combination | None = None
        self._residuals: Residuals | None = None
        self._closed = False
        self._queue = WorkQueue("gradwire DDP hook")
        # Runs after the Communicator's exit function, which is registered later and ends the operations that the thread waits
        # for.
        atexit.register(self._queue.close, _CLOSE_S)
        self._graph_task = OUTSIDE_BACKWARD
        self._in_flight: list[Work] = []

        self._step = 0
        self._settled = False
        self._numbers: dict[Tensor, int] = {}
        self._encodings: list[Encoding | None] = []
        self._described: list[tuple[str, list[int]]] = []
        self._buffers: dict[tuple[int, ...], CodedBuffer] = {}
        self._moved: dict[int, tuple[int, Tensor | None]] = {}
        """By the index of a bucket of DDP: its address in shared memory, and the memory that it had before, which is kept where
        NumPy arrays may point to it."""
        self._loaded: list[dict[str, Any]] = []
        """What was loaded of buffers with parameters that DDP has not come with yet."""

        kinds = [*policy.encodings, *(policy.auto.allowed if policy.auto else ())]
        known = [_in_buffers(kind, torch.float32) for kind in kinds]
        self._known = {encoding.identity: encoding for encoding in known if encoding is not None}
        self._choice: Choice | None = None
        self._chosen: set[int] = set()
        """The numbers of the parameters whose compression is chosen by predictions."""
        self._sizes: list[Size] = []
        self._last_sizes: list[Size] = []
        self._exchange_s = 0.0

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to average the bucket over the ranks. The result of the future is the bucket's buffer. state: unused."""
        combination, residuals = self._open()
        device = bucket.buffer().device
        parameters = bucket.parameters()
        numbers = [self._number(parameter) for parameter in parameters]
        gradients = dict(zip(numbers, bucket.gradients(), strict=True))
        self._make_loaded(device)
        if bucket.index() == 0:
            self._follow(combination, device)
        self._choose([number for number in numbers if number in self._chosen], bucket.buffer())
        kinds: dict[Encoding | None, list[int]] = {}
        for number in numbers:
            kinds.setdefault(self._encodings[number], []).append(number)
        cast = next((codec for codec in CASTS.values() if kinds.keys() == {Encoding(codec)}), None)
        buffers: list[CodedBuffer] = []
        for encoding, members in kinds.items():
            coded = [] if encoding is None or cast is not None else self._buffers_of(tuple(members), device)
            if not residuals.add_to({number: gradients[number] for number in members}):
                buffers += coded
        if self._settled and kinds.keys() == {None}:
            self._share(bucket, combination.communicator)
        exchange = _Exchange(combination, bucket.buffer(), gradients, buffers, cast, self._step)
        if bucket.is_last():
            combination.traffic.count(exchanges=1)
            self._step += 1
            self._settled = True
            self._sizes, self._last_sizes = [], self._sizes
        # Later sums of a matrix codec depend on the first. All ranks run them in the same order if one thread does so.
        in_turn = any(isinstance(encoding.codec, MatrixCodec) for encoding in self._policy.encodings)
        if not in_turn:
            exchange.begin()
        return self._in_background(exchange, combination.communicator.rank, begins=in_turn)

    @property
    def stats(self) -> ExchangeStats:
        """Return how many bytes this rank has sent since the hook was made, and would have sent uncompressed."""
        return ExchangeStats() if self._combination is None else self._combination.traffic.stats

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and the step, which every rank must save, in the format of DistributedOptimizer. The dict has
        only numbers, strings, lists, dicts and tensors. Tensors are not copied."""
        return {
            **self._identity(),
            "op": Average,
            "predivide": 1.0,
            "step": self._step,
            "parameters": list(self._described),
            "buckets": [*self._loaded, *(buffer.state_dict() for buffer in self._buffers.values())],
            "waiting": {},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state that this rank saved in a world of the same size, with the same model, arguments of DDP, compression
        and policy. Training resumes bit for bit if the state was saved after three steps or more.

        Raises ValueError for any other state. Before its first backward(), the hook does not know the model: backward() then
        raises the ValueError for the state of another model.
        """
        for key, value in self._identity().items():
            if state_dict.get(key) != value:
                raise ValueError(
                    f"{self._here}this state was saved with {key} {state_dict.get(key)!r}, and the hook has {key} {value!r}: "
                    "load on every rank the state that it saved, in a world of the same size"
                )
        check_part(state_dict)
        for entry in state_dict["buckets"]:
            if entry.get("tensors") and entry["encoding"] not in self._known:
                raise ValueError(
                    f"{self._here}the state of a hook with {entry['encoding']} cannot be loaded into one with "
                    f"{', '.join(self._known) or 'no codec'}"
                )
        described = [(name, list(shape)) for name, shape, *_ in state_dict["parameters"]]
        for number, (was, now) in enumerate(zip(described, self._described, strict=False)):
            self._check_same(number, was, now)
        self._step, self._described = state_dict["step"], described
        self._buffers, self._loaded = {}, list(state_dict["buckets"])
        if self._residuals is not None:
            self._residuals.replace({})
        if self._choice is not None:
            self._choice.restart()

    def close(self) -> None:
        """Finish running exchanges and close the Communicator. The hook cannot be called any more."""
        self._closed = True
        atexit.unregister(self._queue.close)
        self._queue.close(_CLOSE_S)
        if self._combination is not None:
            self._combination.communicator.close()

    def _identity(self) -> dict[str, Any]:
        """Return the fields that must be equal when a state is saved and loaded."""
        group = self._group
        return {"version": VERSION, "world_size": dist.get_world_size(group), "rank": dist.get_rank(group)}

    @property
    def _here(self) -> str:
        """Return the beginning of error messages."""
        return f"rank {dist.get_rank(self._group)}: "

    def _open(self) -> tuple[Combination, Residuals]:
        """Return the Combination for averages, and the residuals; the first call makes its Communicator."""
        if self._closed:
            raise RuntimeError("the communication hook was called after its close()")
        if self._combination is None or self._residuals is None:
            communicator = Communicator(self._group, timeout_s=self._timeout_s)
            self._combination = Combination(communicator, Average, traffic=Traffic(communicator))
            self._residuals = Residuals(self._combination)
        return self._combination, self._residuals

    def _number(self, parameter: Tensor) -> int:
        """Return a parameter's number, in the order of DDP's first buckets, which is the same on all ranks."""
        if parameter in self._numbers:
            return self._numbers[parameter]
        number, shape = len(self._numbers), list(parameter.shape)
        if self._names is not None and parameter not in self._names:
            raise ValueError(
                f"{self._here}named_parameters must name all parameters of DDP's module; one of shape {shape} is not named"
            )
        name = f"parameter {number}" if self._names is None else self._names[parameter]
        if number == len(self._described):
            self._described.append((name, shape))
        self._check_same(number, self._described[number], (name, shape))
        self._encodings.append(_in_buffers(self._policy.encoding(name, parameter), parameter.dtype))
        if self._policy.is_chosen(name, parameter):
            self._chosen.add(number)
        self._numbers[parameter] = number
        return number

    def _check_same(self, number: int, was: tuple[str, list[int]], now: tuple[str, list[int]]) -> None:
        """Raise ValueError if a parameter differs from the saved one."""
        if was != now:
            raise ValueError(
                f"{self._here}the loaded state is that of another model: its parameter {number} is {was[0]!r} of "
                f"shape {was[1]}, the one here {now[0]!r} of shape {now[1]}"
            )

    def _make_loaded(self, device: torch.device) -> None:
        """Make the loaded buffers, once their parameters are known."""
        loaded, self._loaded = self._loaded, []
        for entry in loaded:
            if max(entry["parameters"]) >= len(self._numbers):
                self._loaded.append(entry)
                continue
            for number in self._chosen.intersection(entry["parameters"]):
                self._encodings[number] = self._known[entry["encoding"]]
            buffer = self._new_buffer(tuple(entry["parameters"]), device)
            if not buffer.fits(entry):
                raise ValueError(
                    f"{self._here}the loaded state is that of another model or policy: for parameters "
                    f"{entry['parameters']} it has other tensors"
                )
            buffer.load_state_dict(entry)

    def _buffers_of(self, wanted: tuple[int, ...], device: torch.device) -> list[CodedBuffer]:
        """Return the buffers of these parameters of a bucket; none if DDP's buckets have not settled."""
        inside = [members for members in self._buffers if set(wanted).issuperset(members)]
        if sum(map(len, inside)) != len(wanted):
            if not self._settled:
                return []
            self._dissolve(wanted)
            self._new_buffer(wanted, device)
            inside = [wanted]
        return [self._buffers[members] for members in inside]

    def _share(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        communicator: Communicator,
    ) -> None:
        """Move a bucket, once, to memory that the ranks of this host reduce without a copy. DDP's views of it follow, among them
        the gradients with gradient_as_bucket_view=True."""
        index, buffer = bucket.index(), bucket.buffer()
        address, _ = self._moved.get(index, (None, None))
        if not CAN_MOVE_STORAGE or not communicator.shares_memory or not buffer.is_cpu or address == buffer.data_ptr():
            return
        memory = communicator.empty(buffer.numel(), dtype=buffer.dtype)
        if buffer.untyped_storage().nbytes() != memory.untyped_storage().nbytes():
            return
        gradients = (parameter.grad for parameter in bucket.parameters() if parameter.grad is not None)
        has_views = any(each.untyped_storage().data_ptr() == buffer.data_ptr() for each in gradients)
        move_storage(buffer, memory)
        self._moved[index] = buffer.data_ptr(), memory if has_views else None

    def _follow(self, combination: Combination, device: torch.device) -> None:
        """With compression="auto", measure the codecs, and in later steps correct the choice by the times of exchanges. Called
        before the first bucket of a step, when no exchange is running, since it is collective in the second step and in some
        others."""
        if self._policy.auto is None or not self._chosen or not self._settled:
            return
        if self._choice is None:
            self._choice = Choice(combination, self._policy.auto, device.type)
        self._choice.follow(self._step, self._last_sizes, self._exchange_s)
        self._exchange_s = 0.0

    def _choose(self, numbers: Sequence[int], buffer: Tensor) -> None:
        """With compression="auto", choose the encoding of these parameters of a bucket; none before DDP's buckets have
        settled."""
        if not numbers or self._choice is None:
            return
        size = sum(math.prod(self._described[number][1]) for number in numbers), buffer.dtype
        self._sizes.append(size)
        encoding = _in_buffers(self._choice.of(size), buffer.dtype)
        if any(self._encodings[number] != encoding for number in numbers):
            self._dissolve(numbers)
            for number in numbers:
                self._encodings[number] = encoding

    def _new_buffer(self, members: tuple[int, ...], device: torch.device) -> CodedBuffer:
        encoding = self._encodings[members[0]]
        assert encoding is not None
        shapes = [self._described[number][1] for number in members]
        combination, _ = self._open()
        buffer = buffer_for(encoding)(combination, encoding, packed(members, shapes), shapes, device, members[0])
        self._buffers[members] = buffer
        return buffer

    def _dissolve(self, numbers: Collection[int]) -> None:
        """Remove the buffers that have any of these parameters, and keep their residuals."""
        _, residuals = self._open()
        for members in [members for members in self._buffers if not set(members).isdisjoint(numbers)]:
            residuals.export_local(self._buffers.pop(members))

    def _in_background(self, exchange: "_Exchange", rank: int, *, begins: bool) -> Future[Tensor]:
        """Finish an exchange on the queue's thread. begins: whether to begin it there too."""
        device = exchange.buffer.device
        done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)

        def run() -> None:
            try:
                if begins:
                    exchange.begin()
                exchange.finish()
                self._exchange_s += exchange.seconds
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]  # as torch documents it
                raise
            done.set_result(exchange.buffer)

        work = Work(rank, "exchange of a DDP bucket", run)
        self._queue.submit(work)
        self._wait_when_backward_ends(work)
        return done.then(lambda done: done.value())  # the error is raised inside, where DDP notices it

    def _wait_when_backward_ends(self, work: Work) -> None:
        """Wait before DDP does, so that backward() raises the error of the exchange: DDP turns every error into
        RuntimeError."""
        task = graph_task()
        if task == OUTSIDE_BACKWARD:  # in DDP's join(), after this rank's last backward()
            return
        if task != self._graph_task:
            self._graph_task = task
            self._in_flight.clear()
            when_backward_ends(self._wait)
        self._in_flight.append(work)

    def _wait(self) -> None:
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()


@dataclass
class _Exchange:
    """Averages one bucket: gradients in coded buffers by these, and the others uncompressed. Without coded buffers, the bucket
    is averaged as a whole, by `cast` if given."""

    combination: Combination
    buffer: Tensor
    gradients: Mapping[int, Tensor]
    coded: Sequence[CodedBuffer]
    cast: Codec | None
    step: int
    works: list[Work] = field(default_factory=list)

    def begin(self) -> None:
        """Start the operations that do not depend on others. All ranks begin their exchanges in the same order."""
        combination, traffic = self.combination, self.combination.traffic
        if not self.coded:
            traffic.count(uncompressed=traffic.wire_bytes(self.buffer.nbytes))
            self.works = [combination.start(self.buffer, self.cast)]
            return
        others = dict(self.gradients)
        for number, view in self._views():
            view.copy_(others.pop(number))
        for coded in self.coded:
            coded.start(self.step)
        if others:
            nbytes = traffic.wire_bytes(sum(gradient.nbytes for gradient in others.values()))
            traffic.count(sent=nbytes, uncompressed=nbytes)
            tensors = list(others.values())
            self.works = [combination.communicator.grouped_allreduce(tensors, combination.op, async_op=True)]

    def finish(self) -> None:
        """Wait until all gradients are averaged, and copy them into the bucket."""
        for coded in self.coded:
            coded.complete()
        for work in self.works:
            work.wait()
        for number, view in self._views():
            self.gradients[number].copy_(view)

    @property
    def seconds(self) -> float:
        """Return the seconds that its operations ran, once it has finished."""
        return sum(buffer.seconds for buffer in self.coded) + sum(work.seconds for work in self.works)

    def _views(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the parameters in coded buffers, by number, with the places of their gradients there."""
        for coded in self.coded:
            yield from zip(coded.items, coded.views, strict=True)


def _in_buffers(kind: Cast | Encoding, dtype: torch.dtype) -> Encoding | None:
    """Return the encoding of gradients in a separate buffer, which begins when DDP's buckets have settled; None for
    uncompressed ones."""
    encoding = encoding_for(kind, dtype)
    if encoding is None or isinstance(kind, Cast):
        return encoding
    return replace(encoding, warmup_steps=max(UNSETTLED_STEPS, encoding.warmup_steps))

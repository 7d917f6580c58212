"""Codecs for torch's DistributedDataParallel: a communication hook for it."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from gradwire.collectives import Communicator, Mismatch
from gradwire.collectives.compression.codec import MatrixCodec
from gradwire.collectives.end_of_backward import EndOfBackward, is_delayable
from gradwire.collectives.torch_internals import (
    CAN_MOVE_STORAGE,
    OUTSIDE_BACKWARD,
    graph_task,
    move_storage,
    uncompiled,
    when_backward_ends,
)
from gradwire.trainer.checkpoint import damage_named
from gradwire.trainer.reducer.arguments import Average, check_named_parameters
from gradwire.trainer.reducer.buffers import CodedBuffer, PlainBuffer, buffer_for
from gradwire.trainer.reducer.checkpoint import KEY, VERSION, check_part
from gradwire.trainer.reducer.choice import Choice
from gradwire.trainer.reducer.compression import CASTS, Cast, Compressor, Encoding, Policy, encoding_for, wanted
from gradwire.trainer.reducer.hooks import remove_all
from gradwire.trainer.reducer.layout import packed
from gradwire.trainer.reducer.residuals import Residuals
from gradwire.trainer.reducer.setup import Combination
from gradwire.trainer.reducer.streams import Background, gpus, on_streams, refuse_capture, synchronize
from gradwire.trainer.reducer.traffic import ExchangeStats, Traffic
from gradwire.trainer.reducer.trials import PlanTrials
from gradwire.trainer.reducer.weights import Weights, explain
from gradwire.trainer.world.world import names_rank

UNSETTLED_STEPS = 2
"""DDP lays out its buckets anew after the first step, and residuals begin with those that stay."""

_BESIDE, _AFTER = "beside backward()", "after backward()"
"""When buckets are exchanged: in the background, or when backward() has computed all gradients, in the thread that called it."""

_CLOSE_S = 5.0


@names_rank
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
    compression. Parameters are identified by their number, in the order of DDP's first buckets, which is the same on all ranks.
    """

    def __init__(
        self, policy: Policy, names: Mapping[Tensor, str] | None, timeout_s: float, group: dist.ProcessGroup | None
    ) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__  # which DDP reads, of functions
        self._policy, self._names, self._timeout_s, self._group = policy, names, timeout_s, group
        self._combination: Combination | None = None
        self._closed = False
        self._background = Background("gradwire DDP hook", own_streams=True)
        self._step = 0
        self._settled = False
        self._end_of_backward = EndOfBackward()
        self._numbers: dict[Tensor, int] = {}
        self._described: list[tuple[str, list[int]]] = []
        self._encodings: list[Encoding | None] = []
        self._dtypes: list[torch.dtype] = []
        self._chosen: set[int] = set()  # the parameters whose compression predictions choose
        self._choice: Choice | None = None
        self._exchanged: list[PlainBuffer] = []  # in the last step, if the times are wanted
        self._trials: PlanTrials[str] | None = None
        self._in_one_thread = any(isinstance(encoding.codec, MatrixCodec) for encoding in policy.encodings)

        self._coded: dict[tuple[int, ...], CodedBuffer] = {}
        self._plain: dict[int, PlainBuffer] = {}  # by the index of a bucket of DDP, of which it has the memory
        self._before: list[Tensor] = []  # memory that buckets had before, where NumPy arrays may point to it
        self._residuals = Residuals()
        self._weights = Weights()
        self._hooks: dict[Tensor, RemovableHandle] = {}  # which count passes for the weights
        # When the process ends, this runs after the Communicator's exit function, which is registered later and ends the
        # operations that the thread waits for.
        self._end = weakref.finalize(self, _end, self._hooks.values(), self._background)
        self._graph_task = OUTSIDE_BACKWARD
        self._arrivals = threading.Lock()  # autograd calls hooks from one thread per device
        self._loaded: list[dict[str, Any]] = []  # loaded buffers with parameters that DDP has not come with yet

    @uncompiled  # DDP calls it inside of a compiled training step
    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to average the bucket over the ranks. The result of the future is the bucket's buffer. state: unused.

        On a GPU, all of it is enqueued on a stream of this hook, which begins after the current one, and the future lets DDP's
        stream continue after it."""
        called = sys._getframe()
        if not (devices := gpus([bucket.buffer().device])):
            return self._begin(bucket, called)
        refuse_capture(dist.get_rank(self._group))
        with on_streams(self._background.streams(devices)):
            return self._begin(bucket, called)

    def _begin(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        called: FrameType,
    ) -> torch.futures.Future[torch.Tensor]:
        combination, buffer = self._open(), bucket.buffer()
        numbers = [self._number(parameter) for parameter in bucket.parameters()]
        gradients = dict(zip(numbers, bucket.gradients(), strict=True))
        if self._loaded:
            self._make_loaded(buffer.device)
        if self._weights.is_used:
            if bucket.index() == 0:
                self._agree_on_weights()
            if self._weights.factor:
                buffer.mul_(self._weights.factor)
            else:
                buffer.zero_()  # whatever a rank without samples has computed
        if self._chosen and self._settled:
            self._choose(bucket.index(), numbers, buffer)
        kinds: dict[Encoding | None, list[int]] = {}
        for number in numbers:
            kinds.setdefault(self._encodings[number], []).append(number)
        cast = next((codec for codec in CASTS.values() if kinds.keys() == {Encoding(codec)}), None)
        buffers: list[PlainBuffer] = []
        for encoding, members in kinds.items():
            coded = [] if encoding is None or cast is not None else self._buffers_of(tuple(members), buffer.device)
            if not self._residuals.add_to({number: gradients[number] for number in members}, combination.share):
                buffers += coded
        if not buffers:
            buffers = [self._whole(bucket, PlainBuffer(combination, buffer, cast))]
        else:
            coded_here = {number for each in buffers for number in each.items}
            if rest := {number: gradients[number] for number in numbers if number not in coded_here}:
                buffers.append(PlainBuffer.packed(combination, rest))
        beside = self._runs_beside(bucket, called)
        step = self._step
        if bucket.is_last():
            combination.traffic.count(exchanges=1)
            self._step += 1
            self._settled = True
            self._weights.close()
        if self._choice is not None:
            self._exchanged += buffers

        def begin() -> None:
            """Start the operations that do not depend on others. All ranks begin their exchanges in the same order."""
            for each in buffers:
                for number, view in zip(each.items, each.views, strict=True):
                    view.copy_(gradients[number])
                each.start(step, awaited=not beside)

        def finish() -> None:
            for each in buffers:
                each.complete()
                for number, view in zip(each.items, each.views, strict=True):
                    gradients[number].copy_(view)

        done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        begin_beside = partial(self._begin_beside, done, buffer, begin, finish)
        if beside:
            self._end_of_backward.begin()
            begin_beside()
        else:
            self._end_of_backward.add(partial(_run, done, buffer, begin, finish), begin_beside)
        return done.then(lambda done: done.value())  # the error is raised inside, where DDP notices it

    def weigh(self, samples: float | Tensor) -> None:
        """Set how many samples the gradients of the next backward() stand for: see DistributedOptimizer.weigh(). DDP's average is
        then sum(samples * gradient) / sum(samples).

        Every rank calls it before each backward(), also those in no_sync(). A rank without samples calls backward() too, as DDP
        needs it. A rank in DDP's join() has no samples. If the exchange raises ValueError, DDP cannot go on.

        A parameter that only ranks without samples use gets zeros, not None, so weight decay moves it: DDP decides that.

        Needs named_parameters of ddp_comm_hook(); raises RuntimeError without."""
        if self._names is None:
            raise RuntimeError(
                f"{self._here}weigh() needs named_parameters: ddp_comm_hook(..., model.named_parameters())"
            )
        for index, parameter in enumerate(self._names):
            if parameter.requires_grad and parameter not in self._hooks:
                hook = partial(CompressionHook._arrived, weakref.ref(self), index)
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        with names_rank:
            self._weights.weigh(samples, self._accumulated())

    def _accumulated(self) -> dict[int, Tensor]:
        """Return the gradients of the passes that DDP has not averaged yet, by parameter."""
        grads = [parameter.grad for parameter in self._names or () if self._weights.passes]
        return {index: grad for index, grad in enumerate(grads) if grad is not None}

    @staticmethod
    @uncompiled
    def _arrived(hook: "weakref.ref[CompressionHook]", index: int, parameter: Tensor) -> None:
        """Note a gradient that autograd has just accumulated in parameter.grad, before DDP does."""
        self = hook()
        if self is None:
            return
        with self._arrivals:
            if (task := graph_task()) != self._graph_task:
                self._graph_task = task
                self._weights.begin_pass()
                when_backward_ends(self._end_pass)
            if self._weights.discards_pass and parameter.grad is not None:
                parameter.grad = self._weights.undo_pass(index, parameter.grad)

    @uncompiled
    def _end_pass(self) -> None:
        self._weights.end_pass(self._accumulated())

    def _agree_on_weights(self) -> None:
        """Wait until the samples of all ranks are known, before the first bucket of a step."""
        if graph_task() == OUTSIDE_BACKWARD and not self._weights.passes:  # as in DDP's join()
            self._weights.weigh(0, {})
        self._weights.agree(self._open())

    @property
    def stats(self) -> ExchangeStats:
        """Return how many bytes this rank has sent since the hook was made, and would have sent uncompressed."""
        return ExchangeStats() if self._combination is None else self._combination.traffic.stats

    @property
    def exchange_plan(self) -> str | None:
        """Return when buckets are exchanged, "beside backward()" or "after backward()", once that stays; None while it is
        tried, and always with PowerSGD and on GPUs, where nothing is tried."""
        return self._trials.plan if self._trials is not None and self._trials.settled else None

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and the step, which every rank must save, in the format of DistributedOptimizer. The dict has
        only numbers, strings, lists, dicts and tensors. Tensors are not copied."""
        return {
            **self._identity(),
            "op": Average,
            "predivide": 1.0,
            "step": self._step,
            "parameters": list(self._described),
            "buckets": [*self._loaded, *(buffer.state_dict() for buffer in self._coded.values())],
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
        with damage_named(KEY):
            check_part(state_dict)
        for entry in state_dict["buckets"]:
            if entry.get("tensors") and entry["encoding"] not in self._known:
                raise ValueError(
                    f"{self._here}the state of a hook with {entry['encoding']} cannot be loaded into one with "
                    f"{', '.join(self._known) or 'no codec'}"
                )
        described = [(name, list(shape)) for name, shape, *_ in state_dict["parameters"]]
        for parameter, number in self._numbers.items():
            self._name(number, parameter, described)
        self._described = described  # after all checks: a state that is refused changes nothing
        self._step, self._loaded, self._coded = state_dict["step"], list(state_dict["buckets"]), {}
        self._residuals.replace({})
        if self._choice is not None:
            self._choice.restart()
        self._trials = None

    def close(self) -> None:
        """Finish running exchanges and close the Communicator. The hook cannot be called any more."""
        self._closed = True
        self._end()
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

    @property
    def _known(self) -> dict[str, Encoding]:
        """Return, by identity, the encodings that a parameter may have."""
        auto = self._policy.auto
        kinds = [*self._policy.encodings, *(auto.allowed if auto else ())]
        known = (_in_buffers(kind, torch.float32) for kind in kinds)
        return {encoding.identity: encoding for encoding in known if encoding is not None}

    def _open(self) -> Combination:
        """Return the Combination for averages; the first call makes its Communicator."""
        if self._closed:
            raise RuntimeError("the communication hook was called after its close()")
        if self._combination is None:
            communicator = Communicator(self._group, timeout_s=self._timeout_s)
            self._combination = Combination(communicator, Average, traffic=Traffic(communicator))
        return self._combination

    # Parameters

    def _number(self, parameter: Tensor) -> int:
        """Return the number of a parameter; that of a new one is the next."""
        number = self._numbers.get(parameter, len(self._numbers))
        if number == len(self._numbers):
            name = self._name(number, parameter, self._described)
            self._encodings.append(_in_buffers(self._policy.encoding(name, parameter), parameter.dtype))
            self._dtypes.append(parameter.dtype)
            if self._policy.is_chosen(name, parameter):
                self._chosen.add(number)
            self._numbers[parameter] = number
        return number

    def _name(self, number: int, parameter: Tensor, described: list[tuple[str, list[int]]]) -> str:
        """Return the name of a parameter. described: by number, the names and shapes of parameters, to which those of this one
        are added. Raises ValueError if a loaded state describes another parameter by this number."""
        name, shape = f"parameter {number}", list(parameter.shape)
        if self._names is not None:
            if parameter not in self._names:
                raise ValueError(
                    f"{self._here}named_parameters must name all parameters of DDP's module; one of shape {shape} is not named"
                )
            name = self._names[parameter]
        if number == len(described):
            described.append((name, shape))
        if (saved := described[number]) != (name, shape):
            raise ValueError(
                f"{self._here}the loaded state is that of another model: its parameter {number} is {saved[0]!r} of shape "
                f"{saved[1]}, the one here {name!r} of shape {shape}"
            )
        return name

    def _choose(self, index: int, numbers: Sequence[int], buffer: Tensor) -> None:
        """With compression="auto", choose the encoding of the parameters of a bucket. Before the first bucket of a step, when
        no exchange is running, correct the choice by the times of exchanges, which is collective in some steps."""
        if self._choice is None:
            assert self._policy.auto is not None
            self._choice = Choice(self._open(), self._policy.auto, buffer.device.type)
        if index == 0:
            if not self._choice.settled:
                synchronize(gpus([buffer.device]))  # only the steps that are measured wait
            self._choice.follow(self._step, sum(each.exchange_s for each in self._exchanged))
            self._choice.sizes.clear()
            self._exchanged.clear()
        if not (chosen := [number for number in numbers if number in self._chosen]):
            return
        numel = sum(math.prod(self._described[number][1]) for number in chosen)
        encoding = _in_buffers(self._choice.choose((numel, buffer.dtype)), buffer.dtype)
        if any(self._encodings[number] != encoding for number in chosen):
            self._dissolve(chosen)
            for number in chosen:
                self._encodings[number] = encoding

    # Buffers

    def _buffers_of(self, wanted: tuple[int, ...], device: torch.device) -> list[CodedBuffer]:
        """Return the buffers of these parameters of a bucket; none if DDP's buckets have not settled."""
        inside = [members for members in self._coded if set(wanted).issuperset(members)]
        if sum(map(len, inside)) != len(wanted):
            if not self._settled:
                return []
            self._dissolve(wanted)
            self._new_buffer(wanted, device)
            inside = [wanted]
        return [self._coded[members] for members in inside]

    def _new_buffer(self, members: tuple[int, ...], device: torch.device) -> CodedBuffer:
        encoding = self._encodings[members[0]]
        assert encoding is not None
        shapes = [self._described[number][1] for number in members]
        kind = device, self._dtypes[members[0]]
        buffer = buffer_for(encoding)(self._open(), encoding, packed(members, shapes), shapes, *kind, members[0])
        self._coded[members] = buffer
        return buffer

    def _dissolve(self, numbers: Collection[int]) -> None:
        """Remove the buffers that have any of these parameters, and keep their residuals."""
        for members in [members for members in self._coded if not set(members).isdisjoint(numbers)]:
            self._residuals.export_local(self._coded.pop(members))

    def _make_loaded(self, device: torch.device) -> None:
        """Make the loaded buffers, once their parameters are known."""
        loaded, self._loaded = self._loaded, []
        for entry in loaded:
            members = entry["parameters"]
            if max(members) >= len(self._numbers):
                self._loaded.append(entry)
                continue
            for number in self._chosen.intersection(members):
                self._encodings[number] = self._known[entry["encoding"]]
            if not self._new_buffer(tuple(members), device).load_state_dict(entry):
                raise ValueError(
                    f"{self._here}the loaded state is that of another model or policy: for parameters {members} it has "
                    "other tensors"
                )

    def _whole(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        new: PlainBuffer,
    ) -> PlainBuffer:
        """Return the buffer in the memory of a bucket: the one of the last step, or else the new one.

        The new one is moved to memory that the ranks of this host reduce without a copy. DDP's views of it follow, among them
        the gradients with gradient_as_bucket_view=True."""
        values, last = new.values, self._plain.get(bucket.index())
        if not self._settled:
            return new
        if last is not None and last.values.is_set_to(values) and last.codec is new.codec:
            return last
        communicator = new.combination.communicator
        if CAN_MOVE_STORAGE and communicator.shares_memory and values.is_cpu and new.codec is None:
            memory = communicator.empty(values.numel(), dtype=values.dtype)
            if values.untyped_storage().nbytes() == memory.untyped_storage().nbytes():
                gradients = [parameter.grad for parameter in bucket.parameters() if parameter.grad is not None]
                if any(each.untyped_storage().data_ptr() == values.data_ptr() for each in gradients):
                    self._before.append(memory)
                move_storage(values, memory)
        self._plain[bucket.index()] = new
        return new

    # The exchange of a bucket

    def _runs_beside(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        called: FrameType,
    ) -> bool:
        """Return whether a bucket is exchanged beside backward(). Before the first bucket of a step, when no exchange is running,
        record the time of steps, which is collective in some steps. called: the frame of the function that DDP has called."""
        if bucket.buffer().is_cuda or not self._settled or self._in_one_thread:
            return True
        if self._trials is None:
            self._trials = PlanTrials(self._open().communicator, _BESIDE, [_AFTER])
        if bucket.index() == 0 and (self._choice is None or self._choice.settled):
            self._trials.follow(self, self._step, counts=graph_task() != OUTSIDE_BACKWARD)  # as in DDP's join()
        return not ((self._trials.plan == _AFTER or bucket.is_last()) and is_delayable(called))

    def _begin_beside(
        self, done: Future[Tensor], buffer: Tensor, begin: Callable[[], None], finish: Callable[[], None]
    ) -> None:
        """Begin an exchange, and finish it in the background."""
        steps = [finish]
        if self._in_one_thread:
            # Later sums of a matrix codec depend on the first. All ranks run them in the same order if one thread does so.
            steps.insert(0, begin)
        else:
            begin()
        running = self._background.submit(partial(_run, done, buffer, *steps), gpus([buffer.device]))
        if graph_task() != OUTSIDE_BACKWARD:  # as in DDP's join(), after this rank's last backward()
            # Waits before DDP does, so that backward() raises the error of the exchange: DDP turns every error into
            # RuntimeError.
            when_backward_ends(running.wait)


def _end(hooks: Iterable[RemovableHandle], background: Background) -> None:
    """End what a hook has begun, at its close(), when it is deleted without, or when the process ends."""
    remove_all(hooks)
    background.close(_CLOSE_S)


def _run(done: Future[Tensor], buffer: Tensor, *steps: Callable[[], None]) -> None:
    """Run the steps of a bucket's exchange, and complete the future of the averaged buffer. Raises the error, too."""
    try:
        for step in steps:
            step()
    except Exception as error:
        if isinstance(error, Mismatch):
            explain(error)
        done.set_exception(error)  # type: ignore[arg-type]  # as torch documents it
        raise
    done.set_result(buffer)


def _in_buffers(kind: Cast | Encoding, dtype: torch.dtype) -> Encoding | None:
    """Return the encoding of gradients in a separate buffer, which begins when DDP's buckets have settled; None for
    uncompressed ones."""
    encoding = encoding_for(kind, dtype)
    if encoding is None or isinstance(kind, Cast):
        return encoding
    return replace(encoding, warmup_steps=max(UNSETTLED_STEPS, encoding.warmup_steps))

"""Codecs for those who keep torch's DistributedDataParallel: a communication hook for it."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import atexit
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from collectives import Communicator, Work
from collectives.compression.casts import BFloat16, Float16
from collectives.compression.codec import Codec
from collectives.compression.powersgd import PowerSGD
from collectives.run.work import WorkQueue
from trainer.compression import Cast, Compressor, Encoding, encoding_of, is_compressible
from trainer.gradients.ddp_exchange import CodedGroup, Exchange, Group, LowRankGroup

UNSETTLED_STEPS = 2
"""DDP lays out its buckets anew after the first step, and residuals begin with those that stay."""

_CASTS: dict[torch.dtype, Codec] = {torch.float16: Float16(), torch.bfloat16: BFloat16()}
_STATE_VERSION = 1
_CLOSE_S = 5.0


def ddp_comm_hook(
    codec: Compressor,
    *,
    warmup_steps: int = 0,
    timeout_s: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
) -> "CompressionHook":
    """A hook that averages gradients by a codec: `model.register_comm_hook(None, trainer.ddp_comm_hook("int8"))`.

    codec: as DistributedOptimizer's compression=; what needs error feedback gets it. Parameters of one dimension and small ones
    travel uncompressed, and in the first steps all do: `warmup_steps` of them, or ErrorFeedback's, and UNSETTLED_STEPS at least.
    timeout_s: of each exchange. process_group: DDP's, where it was given one.

    One hook is for one model on one device; there may be several. init() is not needed: the first backward() makes a
    Communicator, which close() closes. backward() raises CollectiveError where the ranks could not finish together. Raises
    ValueError for what is no codec.
    """
    encoding = encoding_of(codec)
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"warmup_steps must be a whole number >= 0, not {warmup_steps!r}")
    if isinstance(encoding, Encoding):
        warmup_steps = max(warmup_steps, encoding.warmup_steps)
    return CompressionHook(encoding, warmup_steps, timeout_s, process_group)


class CompressionHook:
    """What DDP calls with every bucket that is full. Made by ddp_comm_hook.

    The gradients in a bucket that a codec is for form a group, which is encoded as one buffer and has residuals of its own.
    Groups stay what they are until DDP fills other buckets with their parameters; then what is outstanding is added to the
    gradients, which for once travel uncompressed, and new groups begin.
    """

    def __init__(
        self, encoding: Cast | Encoding, warmup_steps: int, timeout_s: float, process_group: dist.ProcessGroup | None
    ) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__  # which DDP reads, of functions
        self._encoding = encoding
        self._warmup_steps = max(UNSETTLED_STEPS, warmup_steps)
        self._timeout_s = timeout_s
        self._process_group = process_group
        self._communicator: Communicator | None = None
        self._closed = False
        self._queue = WorkQueue("gradwire DDP hook")
        # Runs after the Communicator's own, which is made later, and lets go of what its thread waits for.
        atexit.register(self._queue.close, _CLOSE_S)
        self._graph_task = -1
        self._in_flight: list[Work] = []

        self._step = 0
        self._settled = False
        self._numbers: dict[Tensor, int] = {}
        self._shapes: list[list[int]] = []
        self._groups: dict[tuple[int, ...], Group] = {}
        self._owed: dict[int, Tensor] = {}
        self._loaded: dict[str, Any] | None = None

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to average the bucket over the ranks; its buffer will be the future's value. state: unused."""
        communicator = self._open(bucket.buffer().device)
        parameters = bucket.parameters()
        numbers = [self._number(parameter) for parameter in parameters]
        gradients = dict(zip(numbers, bucket.gradients(), strict=True))
        wanted = tuple(n for n, parameter in zip(numbers, parameters, strict=True) if is_compressible(parameter))
        groups = self._groups_of(communicator, wanted, gradients)
        exchange = Exchange(communicator, bucket.buffer(), gradients, groups, self._cast(bucket.buffer()), self._step)
        if bucket.is_last():
            self._step += 1
            self._settled = True
        # Of low-rank factors, the second sum depends on the first. All ranks have the same order if one thread makes all calls.
        if not self._in_two_calls:
            exchange.begin()
        return self._in_background(exchange, communicator.rank)

    def state_dict(self) -> dict[str, Any]:
        """The residuals and the step, to be saved by every rank for itself; only numbers, strings, lists, dicts and tensors,
        which are the hook's own."""
        if self._loaded is not None:
            return self._loaded
        return {
            "version": _STATE_VERSION,
            "world_size": dist.get_world_size(self._process_group),
            "rank": dist.get_rank(self._process_group),
            "codec": self._codec_name,
            "step": self._step,
            "shapes": self._shapes,
            "groups": [
                {"parameters": list(numbers), "residuals": group.state_dict()}
                for numbers, group in self._groups.items()
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what this rank saved, in a world of the same size, with the same model, DDP's arguments and codec; to
        the bit, if that was after three steps or more.

        Raises ValueError for anything else; for another model not before backward().
        """
        mine = {
            "version": _STATE_VERSION,
            "world_size": dist.get_world_size(self._process_group),
            "rank": dist.get_rank(self._process_group),
            "codec": self._codec_name,
        }
        for key, value in mine.items():
            if state_dict.get(key) != value:
                raise ValueError(
                    f"rank {mine['rank']}: the state of a hook with {key} {state_dict.get(key)!r} cannot be loaded into one "
                    f"with {key} {value!r}"
                )
        self._loaded = dict(state_dict)

    def close(self) -> None:
        """Finish what was begun and close the Communicator, as that does. The hook cannot be called any more."""
        self._closed = True
        atexit.unregister(self._queue.close)
        self._queue.close(_CLOSE_S)
        if self._communicator is not None:
            self._communicator.close()

    @property
    def _in_two_calls(self) -> bool:
        return isinstance(self._encoding, Encoding) and isinstance(self._encoding.codec, PowerSGD)

    @property
    def _codec_name(self) -> str:
        if isinstance(self._encoding, Cast):
            return repr(self._encoding)
        return repr(self._encoding.codec) + (" with error feedback" if self._encoding.feedback else "")

    def _cast(self, buffer: Tensor) -> Codec | None:
        """What all of a buffer travels as where it is not compressed."""
        if isinstance(self._encoding, Encoding):
            return None
        wire_dtype = self._encoding.dtype_on_wire(buffer.dtype)
        return _CASTS[wire_dtype] if wire_dtype != buffer.dtype else None

    def _open(self, device: torch.device) -> Communicator:
        """The Communicator; and groups that were loaded, now that there is one to make them."""
        if self._closed:
            raise RuntimeError("the communication hook was called after its close()")
        if self._communicator is None:
            self._communicator = Communicator(self._process_group, timeout_s=self._timeout_s)
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._step, self._shapes = state["step"], [list(shape) for shape in state["shapes"]]
            for number, parameter in enumerate(self._numbers):
                self._note_shape(number, parameter)
            self._groups, self._owed = {}, {}
            for saved in state["groups"]:
                group = self._new_group(self._communicator, tuple(saved["parameters"]), device)
                group.load_state_dict(saved["residuals"])
        return self._communicator

    def _number(self, parameter: Tensor) -> int:
        """Parameters go by the order in which DDP first came with them: equal models and arguments, equal numbers."""
        if parameter not in self._numbers:
            number = self._numbers[parameter] = len(self._numbers)
            self._note_shape(number, parameter)
        return self._numbers[parameter]

    def _note_shape(self, number: int, parameter: Tensor) -> None:
        shape = list(parameter.shape)
        if number == len(self._shapes):
            self._shapes.append(shape)
        if self._shapes[number] != shape:
            raise ValueError(
                f"the state that was loaded is of another model: its parameter {number} has the shape {self._shapes[number]}, "
                f"the one here {shape}"
            )

    def _groups_of(
        self, communicator: Communicator, wanted: tuple[int, ...], gradients: Mapping[int, Tensor]
    ) -> list[Group]:
        """The groups that the wanted parameters of a bucket are; none where the bucket is to go uncompressed."""
        if isinstance(self._encoding, Cast) or not wanted:
            return []
        inside = [numbers for numbers in self._groups if set(wanted).issuperset(numbers)]
        if sum(map(len, inside)) != len(wanted):
            if not self._settled:
                return []
            self._dissolve(wanted)
            self._new_group(communicator, wanted, gradients[wanted[0]].device)
            inside = [wanted]
        owed = [number for number in wanted if number in self._owed]
        for number in owed:
            gradients[number].add_(self._owed.pop(number))
        if owed or self._step < self._warmup_steps:
            return []
        return [self._groups[numbers] for numbers in inside]

    def _new_group(self, communicator: Communicator, numbers: tuple[int, ...], device: torch.device) -> Group:
        assert isinstance(self._encoding, Encoding)
        shapes = [self._shapes[number] for number in numbers]
        codec = self._encoding.codec
        group: Group
        if isinstance(codec, PowerSGD):
            group = LowRankGroup(communicator, codec, numbers, shapes, device)
        else:
            group = CodedGroup(communicator, codec, self._encoding.feedback, numbers, shapes, device)
        self._groups[numbers] = group
        return group

    def _dissolve(self, wanted: Iterable[int]) -> None:
        """End the groups that have any of these parameters."""
        for numbers in [numbers for numbers in self._groups if not set(numbers).isdisjoint(wanted)]:
            self._owed |= zip(numbers, self._groups.pop(numbers).outstanding(), strict=True)

    def _in_background(self, exchange: Exchange, rank: int) -> Future[Tensor]:
        """Have an exchange finished, and begun where it is not."""
        device = exchange.buffer.device
        done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)

        def run() -> None:
            try:
                if self._in_two_calls:
                    exchange.begin()
                exchange.finish()
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]  # as torch documents it
                raise
            done.set_result(exchange.buffer)

        work = Work(rank, "exchange of a DDP bucket", run)
        self._queue.submit(work)
        self._wait_when_backward_ends(work)
        return done.then(lambda done: done.value())  # raises inside, which is what DDP takes for an error

    def _wait_when_backward_ends(self, work: Work) -> None:
        """DDP makes a RuntimeError of every error. Waiting before it does lets backward() raise those of the exchange."""
        task = torch._C._current_graph_task_id()
        if task == -1:  # DDP's join(), after this rank's last backward()
            return
        if task != self._graph_task:
            self._graph_task = task
            self._in_flight.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        self._in_flight.append(work)

    def _wait(self) -> None:
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

"""Put the simulated GPU into a process."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collectives import torch_internals
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.transports.base import Transport
from tests.simulated_gpu import cuda, futures, kernels, mail, tensors, waits
from tests.simulated_gpu.memory import device_of, record_host
from tests.simulated_gpu.nccl import SimulatedNccl
from tests.simulated_gpu.operators import OperatorMode

_TRANSPORTS = ("shared_memory.transport", "tcp", "process_group", "routing", "compiled")


def install(rank: int, folder: Path, *, nccl: bool = False) -> None:
    """Give this process, in all threads that it starts from now on, the simulated GPU, which stays. rank: as World gives it.
    folder: for the messages of the simulated NCCL, the same on all ranks. nccl: whether torch has NCCL, and groups over gloo
    carry CUDA tensors over it."""
    cuda.install()
    futures.install()
    kernels.install()
    tensors.install()
    waits.watch()
    _in_all_threads()
    torch_internals.current_stream_handle = lambda device: cuda.current_stream(device).cuda_stream
    if nccl:
        mail.FOLDER = folder
        torch_internals.nccl_backend = partial(SimulatedNccl, blocks=True)
        torch_internals.nccl_group = SimulatedNccl  # type: ignore[assignment]
        dist.is_nccl_available = lambda: True
        dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    for name in _TRANSPORTS:
        importlib.import_module(f"gradwire.collectives.transports.{name}")
    for each in [*_subclasses(Transport), Transport]:
        _watch_transport(each)
    for codec in _subclasses(Codec):
        _watch_codec(codec)


def _in_all_threads() -> None:
    """Let this thread, and those that are started later, run in the mode."""
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        if getattr(self, "is_simulator", False):
            run(self)
            return
        with OperatorMode():  # type: ignore[no-untyped-call]
            run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    mode: Any = OperatorMode()  # type: ignore[no-untyped-call]
    mode.__enter__()


def _subclasses(kind: type[Any]) -> list[Any]:
    return [each for direct in kind.__subclasses__() for each in (direct, *_subclasses(direct))]


def _of_host(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in tensors if isinstance(each, torch.Tensor) and device_of(each) is None]


def _watch_transport(kind: Any) -> None:
    """Record what a transport reads and writes in the memory of the host."""
    if "prepare" in vars(kind):
        kind.prepare = _prepared(kind.prepare)
    if "post" in vars(kind):
        kind.post = _posted(kind.post)


def _prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare)
    def prepared(self: Any, operation: Any) -> Any:
        run = prepare(self, operation)

        def watched(source: Any, destination: Any, tag: int, deadline: float) -> None:
            if operation.codes is None:
                record_host("an exchange", _of_host([source]), _of_host([destination]))
            run(source, destination, tag, deadline)

        return watched

    return prepared


def _posted(post: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(post)
    def posted(self: Any, sends: Any, receives: Any, tag: int) -> Any:
        record_host("a message", _of_host([each for _, each in sends]), _of_host([each for _, each in receives]))
        return post(self, sends, receives, tag)

    return posted


def _watch_codec(kind: Any) -> None:
    """Record what a codec reads and writes in the memory of the host."""
    if "encode" in vars(kind):
        encode = kind.encode

        @wraps(encode)
        def watched_encode(self: Any, values: torch.Tensor, wire: torch.Tensor, *args: Any, **options: Any) -> Any:
            record_host("encoding", _of_host([values]), _of_host([wire, options.get("residual")]))
            return encode(self, values, wire, *args, **options)

        kind.encode = watched_encode
    if "decode" in vars(kind):
        decode = kind.decode

        @wraps(decode)
        def watched_decode(self: Any, wire: torch.Tensor, out: torch.Tensor, *args: Any, **options: Any) -> Any:
            record_host("decoding", _of_host([wire]), _of_host([out]))
            return decode(self, wire, out, *args, **options)

        kind.decode = watched_decode

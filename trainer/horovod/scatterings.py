"""Horovod's verbs that reduce, each rank having its rows of the result. What holds for all verbs stands in the package's
docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.gradients.arguments import OPS_BY_ELEMENT, Adasum, Average, resolve_op
from gradwire.trainer.gradients.compression import Cast, Compression
from gradwire.trainer.horovod.calls import Call
from gradwire.trainer.horovod.functional import ReduceScatter, Rows, begin_scaled_reducescatter
from gradwire.trainer.horovod.handles import Handle
from gradwire.trainer.horovod.reducible import check_reducible, summing_codec
from gradwire.trainer.world.errors import refused
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import communicator_of, here

T = TypeVar("T")


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction: dimension 0 is divided evenly, the first ranks taking one more where it
    must be.

    The tensors have the same shape on all ranks. op: any of allreduce()'s but Adasum, which is an error as with Horovod.

    The gradient is that of Horovod: all ranks' gradients of their rows, one after the other, times the factors; times the
    number of ranks too where op is Sum, not where it is Average.
    """
    scattered = _reducescatter(
        "reducescatter", [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return scattered[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Run reducescatter() in the background; synchronize() returns the new tensor."""
    return _reducescatter_async(
        "reducescatter", [tensor], itemgetter(0), name, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Run reducescatter() of several tensors, which are checked together before any is sent; return new tensors."""
    return _reducescatter(
        "grouped_reducescatter", tensors, name, compression, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Run grouped_reducescatter() in the background; synchronize() returns the new tensors."""
    return _reducescatter_async(
        "grouped_reducescatter", tensors, list, name, op, process_set, prescale_factor, postscale_factor
    )


def _reducescatter(
    verb: str,
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Cast,
    op: str,
    process_set: ProcessSetLike,
    prescale: float,
    postscale: float,
) -> list[Tensor]:
    communicator = communicator_of(process_set)
    with Call(verb, name, communicator):
        reduction = _resolve_op(communicator, verb, op)
        if not isinstance(compression, Cast):
            raise ValueError(f"{here()}{verb} has no codecs: compression must be Compression.none, .fp16 or .bf16")
        tensors = check_reducible(communicator, verb, tensors, reduction, prescale, postscale)
        rows = _even_rows(communicator, verb, tensors)
        codecs = [summing_codec(compression, tensor, reduction) for tensor in tensors]
        headrooms = [1.0 if codec is None else codec.headroom(communicator.size) for codec in codecs]
        sent = [
            compression.compress(tensor if headroom == 1 else tensor * headroom)[0]
            for tensor, headroom in zip(tensors, headrooms, strict=True)
        ]
        outputs = ReduceScatter.apply(communicator, rows, reduction, prescale, postscale, *sent)
        wide = [compression.decompress(o, tensor.dtype) for o, tensor in zip(outputs, tensors, strict=True)]
        return [o if headroom == 1 else o / headroom for o, headroom in zip(wide, headrooms, strict=True)]


def _reducescatter_async(
    verb: str,
    tensors: Sequence[Tensor],
    result: Callable[[Sequence[Tensor]], T],
    name: str | None,
    op: str,
    process_set: ProcessSetLike,
    prescale: float,
    postscale: float,
) -> Handle[T]:
    """Return the handle of what is `result` of this rank's rows."""
    communicator = communicator_of(process_set)
    with (call := Call(verb, name, communicator)):
        reduction = _resolve_op(communicator, verb, op)
        tensors = check_reducible(communicator, verb, tensors, reduction, prescale, postscale)
        rows = _even_rows(communicator, verb, tensors)
        works, outputs, finish = begin_scaled_reducescatter(
            communicator, rows, reduction, prescale, postscale, tensors, async_op=True
        )
        return Handle(call, works, lambda: result(finish(outputs)))


def _resolve_op(communicator: Communicator, verb: str, op: str) -> str:
    """Return the reduction, which computes each element from that element alone. Raises Refused for Adasum, ValueError for what
    is no reduction."""
    if op == Adasum:
        raise refused(communicator, verb, f"op must be one of {', '.join(OPS_BY_ELEMENT)}, not {op!r}")
    return resolve_op(op, allowed=OPS_BY_ELEMENT)


def _even_rows(communicator: Communicator, verb: str, tensors: Sequence[Tensor]) -> list[Rows]:
    """Return the rows of dimension 0 for every rank, of each tensor."""
    rows = []
    for tensor in tensors:
        if tensor.dim() == 0:
            raise refused(communicator, verb, "needs tensors of at least one dimension, not a scalar")
        fewer, longer = divmod(tensor.shape[0], communicator.size)
        rows.append([fewer + (rank < longer) for rank in range(communicator.size)])
    return rows

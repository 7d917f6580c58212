"""Horovod's verbs that reduce, all ranks having the result. What holds for all verbs stands in the package's docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

from torch import Tensor

from gradwire.trainer.gradients.arguments import check_tensor, resolve_op
from gradwire.trainer.gradients.compression import Cast, Compression, Compressor, verb_codec
from gradwire.trainer.horovod.calls import Call
from gradwire.trainer.horovod.functional import Allreduce, begin_allreduce, copied
from gradwire.trainer.horovod.handles import Handle
from gradwire.trainer.horovod.reducible import check_reducible, summing_codec
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import communicator_of

T = TypeVar("T")


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Tensor:
    """Return a new tensor like `tensor`: its reduction over all ranks.

    op: Average (the default), Sum, Min, Max, Product or Adasum; `average` is Horovod's older word for Average or Sum. The
    factors multiply before and after the reduction. compression: what floating-point tensors travel as; a codec, or its
    name, is for Average and Sum, without error feedback, and rounds equal tensors alike every time.

    Adasum is for floating-point tensors, on any number of ranks: gradients that are orthogonal are added, equal ones
    averaged (Maleki et al. 2020). Integers times a factor, and averages of them, are truncated toward zero; so no
    average of them is a fraction.

    The gradient is allreduce() of the result's gradients, with the same op (Average or Sum), compression and factors.
    """
    reduced = _allreduce(
        "allreduce", [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return reduced[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[Tensor]:
    """Run allreduce() in the background; synchronize() returns the new tensor."""
    output = copied(check_tensor(tensor))
    return allreduce_async_(output, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Tensor:
    """Run allreduce() in place, and return `tensor`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[Tensor]:
    """Run allreduce() in place, in the background: leave `tensor` alone until synchronize(), which returns it.

    Of Adasum, all is done when this returns.
    """
    return _allreduce_async_(
        "allreduce", [tensor], itemgetter(0), average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> list[Tensor]:
    """Run allreduce() of several tensors as one operation (those with a codec one by one); return new tensors."""
    return _allreduce(
        "grouped_allreduce", tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[list[Tensor]]:
    """Run grouped_allreduce() in the background; synchronize() returns the new tensors."""
    outputs = [copied(check_tensor(tensor)) for tensor in tensors]
    return grouped_allreduce_async_(outputs, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> list[Tensor]:
    """Run grouped_allreduce() in place, and return the tensors given."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[list[Tensor]]:
    """Run grouped_allreduce() in place, in the background: leave the tensors alone until synchronize() returns them."""
    return _allreduce_async_(
        "grouped_allreduce", tensors, list, average, name, op, prescale_factor, postscale_factor, process_set
    )


def _allreduce(
    verb: str,
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    compression: Compressor,
    op: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSetLike,
) -> list[Tensor]:
    communicator = communicator_of(process_set)
    with Call(verb, name, communicator):
        reduction = resolve_op(op, average)
        meant = verb_codec(compression)
        tensors = check_reducible(communicator, verb, tensors, reduction, prescale, postscale)
        cast = meant if isinstance(meant, Cast) else Compression.none
        codecs = [summing_codec(meant, tensor, reduction) for tensor in tensors]
        pairs = zip(tensors, codecs, strict=True)
        sent = [cast.compress(tensor)[0] if codec is None else tensor for tensor, codec in pairs]
        reduced = Allreduce.apply(communicator, reduction, codecs, prescale, postscale, *sent)
        return [cast.decompress(output, tensor.dtype) for output, tensor in zip(reduced, tensors, strict=True)]


def _allreduce_async_(
    verb: str,
    tensors: Sequence[Tensor],
    result: Callable[[Sequence[Tensor]], T],
    average: bool | None,
    name: str | None,
    op: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSetLike,
) -> Handle[T]:
    """Return the handle of what is `result` of the tensors, once these are reduced."""
    communicator = communicator_of(process_set)
    with (call := Call(verb, name, communicator)):
        reduction = resolve_op(op, average)
        tensors = check_reducible(communicator, verb, tensors, reduction, prescale, postscale)
        memories = [tensor.detach() for tensor in tensors]
        works, finish = begin_allreduce(communicator, memories, reduction, prescale, postscale, async_op=True)

        def finished() -> T:
            finish()
            return result(tensors)

        return Handle(call, works, finished)

"""Horovod's verbs that reduce. What holds for all verbs stands in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from collectives import Communicator
from collectives.compression.codec import Codec
from collectives.reduction import check_arithmetic
from trainer.compression import Cast, Compression, Compressor, verb_codec
from trainer.horovod.functional import Allreduce, ReduceScatter, copied, scattered
from trainer.horovod.handles import Handle
from trainer.ops import Average, Sum, resolve_op
from trainer.process_sets import ProcessSetLike, global_process_set
from trainer.validation import check_tensor
from trainer.world import communicator_of, here


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

    op: Average (the default), Sum, Min, Max or Product; `average` is Horovod's older word for Average or Sum. The
    factors multiply before and after the reduction. compression: what floating-point tensors travel as; a codec, or its
    name, is for Average and Sum, without error feedback, and rounds equal tensors alike every time.
    """
    (output,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return output


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
    """Run allreduce() in place, in the background: leave `tensor` alone until synchronize(), which returns it."""
    work = communicator_of(process_set).allreduce(
        check_tensor(tensor).detach(),
        resolve_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(work, tensor)


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
    meant = verb_codec(compression)
    reduction = resolve_op(op, average)
    cast = meant if isinstance(meant, Cast) else Compression.none
    codecs = [_summing(meant, check_tensor(tensor), reduction) for tensor in tensors]
    pairs = zip(tensors, codecs, strict=True)
    sent = [cast.compress(tensor)[0] if codec is None else tensor for tensor, codec in pairs]
    reduced = Allreduce.apply(communicator_of(process_set), reduction, codecs, prescale_factor, postscale_factor, *sent)
    return [cast.decompress(output, tensor.dtype) for output, tensor in zip(reduced, tensors, strict=True)]


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
    work = communicator_of(process_set).grouped_allreduce(
        [check_tensor(tensor).detach() for tensor in tensors],
        resolve_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(work, list(tensors))


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

    The tensors have the same shape on all ranks.
    """
    communicator = communicator_of(process_set)
    if not isinstance(compression, Cast):
        raise ValueError(f"{here()}reducescatter has no codecs: compression must be Compression.none, .fp16 or .bf16")
    reduction = resolve_op(op, None)
    rows = _even_rows(tensor, communicator)
    check_arithmetic(communicator.rank, tensor.dtype, reduction, prescale_factor, postscale_factor)
    codec = _summing(compression, tensor, reduction)
    headroom = 1.0 if codec is None else codec.headroom(communicator.size)
    sent, dtype = compression.compress(tensor if headroom == 1 else tensor * headroom)
    output = ReduceScatter.apply(communicator, rows, reduction, prescale_factor, postscale_factor, sent)
    result = compression.decompress(output, dtype)
    return result if headroom == 1 else result / headroom


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Run reducescatter() in the background; synchronize() returns the new tensor."""
    communicator = communicator_of(process_set)
    reduction = resolve_op(op, None)
    rows = _even_rows(tensor, communicator)
    check_arithmetic(communicator.rank, tensor.dtype, reduction, prescale_factor, postscale_factor)
    output, chunks = scattered(communicator, rows, tensor, prescale_factor)
    work = communicator.reduce_scatter(output, chunks, reduction, async_op=True)
    return Handle(work, output, None if postscale_factor == 1 else lambda result: result.mul_(postscale_factor))


def _summing(compression: Cast | Codec, tensor: Tensor, op: str) -> Codec | None:
    """Return the codec that a tensor is reduced by; None where it is reduced as it is, or cast."""
    if isinstance(compression, Codec):
        return compression
    return compression.codec(tensor.dtype) if op in (Average, Sum) else None


def _even_rows(tensor: Tensor, communicator: Communicator) -> list[int]:
    """Return the rows of dimension 0 for every rank."""
    if check_tensor(tensor).dim() == 0:
        raise ValueError(f"{here()}reducescatter needs a tensor of at least one dimension, not a scalar")
    rows, longer = divmod(tensor.shape[0], communicator.size)
    return [rows + (rank < longer) for rank in range(communicator.size)]

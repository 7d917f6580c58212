"""Horovod's verbs that reduce. The docstring of gradwire describes their common arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.reduction import Reduction, check_arithmetic
from gradwire.trainer.horovod.functional import (
    Collective,
    allreduce_of,
    begin_allreduce_,
    copied,
    is_integer,
    reducescatter_of,
)
from gradwire.trainer.horovod.handles import Handle, NamedCall
from gradwire.trainer.reducer.arguments import (
    OPS_BY_ELEMENT,
    Adasum,
    Average,
    Sum,
    check_group,
    resolve_op,
)
from gradwire.trainer.reducer.compression import Cast, Compression, Compressor, verb_codec
from gradwire.trainer.rules.adasum import check_adasum
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set, refused

T = TypeVar("T")


class _Given(NamedTuple):
    """The common arguments of these verbs."""

    verb: str
    name: str | None
    process_set: ProcessSetLike
    op: str | None
    prescale: float
    postscale: float
    average: bool | None = None


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

    op: Average (the default), Sum, Min, Max, Product or Adasum.
    average: Horovod's deprecated argument: True for Average, False for Sum.
    prescale_factor, postscale_factor: factors before and after the reduction.
    compression: the compression of floating-point tensors. Codecs are for Average and Sum; they have no error feedback here,
    and make the same error for the same tensor in every call. RandomK, PowerSGD and the names of codecs that always have error
    feedback, such as "topk", raise ValueError; TopK() does not.

    Adasum is for floating-point tensors, on any number of ranks: orthogonal gradients are added, equal ones averaged (Maleki
    et al. 2020).

    The gradient is allreduce() of the result's gradients, with the same op (Average or Sum), compression and factors.
    """
    given = _Given("allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce(given, [tensor], compression)[0]


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
    given = _Given("allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce_async(given, [tensor], itemgetter(0), in_place=False)


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
    """Run allreduce() in place, in the background. Do not use `tensor` until synchronize(), which returns it.

    With Adasum, the operation is done when this returns.
    """
    given = _Given("allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce_async(given, [tensor], itemgetter(0), in_place=True)


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
    given = _Given("grouped_allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce(given, tensors, compression)


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
    given = _Given("grouped_allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce_async(given, tensors, list, in_place=False)


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
    given = _Given("grouped_allreduce", name, process_set, op, prescale_factor, postscale_factor, average)
    return _allreduce_async(given, tensors, list, in_place=True)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction. Dimension 0 is divided evenly; if its size is not a multiple of the number of
    ranks, the first ranks have one row more.

    The tensors have the same shape on all ranks. op: as in allreduce(), except Adasum, which raises an error as in Horovod.

    The gradient is Horovod's: the concatenated gradients of all ranks' rows, times the factors, and with op=Sum times the
    number of ranks.
    """
    given = _Given("reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter(given, [tensor], compression)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Run reducescatter() in the background; synchronize() returns the new tensor."""
    given = _Given("reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter_async(given, [tensor], itemgetter(0))


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
    given = _Given("grouped_reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter(given, tensors, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Run grouped_reducescatter() in the background; synchronize() returns the new tensors."""
    given = _Given("grouped_reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter_async(given, tensors, list)


def _allreduce(given: _Given, tensors: Sequence[Tensor], compression: Compressor) -> list[Tensor]:
    with NamedCall(given.verb, given.name, given.process_set) as call:
        reduction = Reduction(resolve_op(given.op, given.average), given.prescale, given.postscale)
        meant = verb_codec(compression)
        tensors = _checked(call.communicator, given.verb, tensors, reduction)
        cast = meant if isinstance(meant, Cast) else Compression.none
        codecs = [_summing_codec(meant, tensor, reduction.op) for tensor in tensors]
        pairs = zip(tensors, codecs, strict=True)
        sent = [cast.compress(tensor)[0] if codec is None else tensor for tensor, codec in pairs]
        reduced = allreduce_of(call.communicator, reduction, codecs)(*sent)
        return [cast.decompress(output, tensor.dtype) for output, tensor in zip(reduced, tensors, strict=True)]


def _allreduce_async(
    given: _Given, tensors: Sequence[Tensor], result: Callable[[Sequence[Tensor]], T], *, in_place: bool
) -> Handle[T]:
    """Return the handle of an allreduce, whose result is `result` of the reduced tensors."""
    with NamedCall(given.verb, given.name, given.process_set) as call:
        reduction = Reduction(resolve_op(given.op, given.average), given.prescale, given.postscale)
        tensors = _checked(call.communicator, given.verb, tensors, reduction)
        outputs = tensors if in_place else [copied(tensor) for tensor in tensors]
        works, finish = begin_allreduce_(call.communicator, reduction, outputs, async_op=True)
        return Handle(call, works, lambda: result(finish()))


def _reducescatter(given: _Given, tensors: Sequence[Tensor], compression: Cast) -> list[Tensor]:
    with NamedCall(given.verb, given.name, given.process_set) as call:
        tensors, op, collective = _scattering(call.communicator, given, tensors)
        if not isinstance(compression, Cast):
            raise ValueError(f"{given.verb} has no codecs: compression must be Compression.none, .fp16 or .bf16")
        codecs = [_summing_codec(compression, tensor, op) for tensor in tensors]
        headrooms = [1.0 if codec is None else codec.headroom(call.communicator.size) for codec in codecs]
        sent = [
            compression.compress(tensor if headroom == 1 else tensor * headroom)[0]
            for tensor, headroom in zip(tensors, headrooms, strict=True)
        ]
        wide = [compression.decompress(o, tensor.dtype) for o, tensor in zip(collective(*sent), tensors, strict=True)]
        return [o if headroom == 1 else o / headroom for o, headroom in zip(wide, headrooms, strict=True)]


def _reducescatter_async(
    given: _Given, tensors: Sequence[Tensor], result: Callable[[Sequence[Tensor]], T]
) -> Handle[T]:
    """Return the handle of a reducescatter, whose result is `result` of this rank's rows."""
    with NamedCall(given.verb, given.name, given.process_set) as call:
        tensors, _, collective = _scattering(call.communicator, given, tensors)
        works, finish = collective.begin(tensors, True)
        return Handle(call, works, lambda: result(finish()))


def _scattering(
    communicator: Communicator, given: _Given, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], str, Collective]:
    """Return the tensors of a reducescatter, its op, and the function that computes it. Raises Refused for Adasum, which does
    not compute each element from that element alone, and for scalars; ValueError or TypeError as _checked() does."""
    if given.op == Adasum:
        raise refused(communicator, given.verb, f"op must be one of {', '.join(OPS_BY_ELEMENT)}, not {given.op!r}")
    reduction = Reduction(resolve_op(given.op, allowed=OPS_BY_ELEMENT), given.prescale, given.postscale)
    tensors = _checked(communicator, given.verb, tensors, reduction)
    rows = []
    for tensor in tensors:
        if tensor.dim() == 0:
            raise refused(communicator, given.verb, "needs tensors of at least one dimension, not a scalar")
        fewer, longer = divmod(tensor.shape[0], communicator.size)
        rows.append([fewer + (rank < longer) for rank in range(communicator.size)])
    return tensors, reduction.op, reducescatter_of(communicator, reduction, rows)


def _checked(communicator: Communicator, verb: str, tensors: Sequence[Tensor], reduction: Reduction) -> list[Tensor]:
    """Return the tensors of a reduction. Raises TypeError or ValueError for those that cannot be reduced by its op, and factors
    that do not fit their dtypes."""
    checked = check_group(communicator.rank, verb, tensors)
    op, factors = reduction.op, (reduction.prescale, reduction.postscale)
    are_numbers = all(isinstance(factor, int | float) for factor in factors)
    for tensor in checked:
        prescale, postscale = (1.0, 1.0) if are_numbers and is_integer(tensor) else factors
        check_arithmetic(communicator.rank, tensor.dtype, op, prescale, postscale)
    if op == Adasum:
        check_adasum(checked)
    return checked


def _summing_codec(compression: Cast | Codec, tensor: Tensor, op: str) -> Codec | None:
    """Return the codec by which a tensor is reduced; None if it is reduced uncompressed or cast."""
    if isinstance(compression, Cast):
        return compression.codec(tensor.dtype) if op in (Average, Sum) else None
    if op not in (Average, Sum) or not tensor.dtype.is_floating_point:
        raise ValueError(
            f"codec {compression.name!r} is for the sum or average of floating-point tensors, not for op {op!r} of {tensor.dtype}"
        )
    return compression

"""The Adasum rule: every rank steps by itself, and the steps are combined by adaptive summation.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

(Maleki et al. 2020, "Scaling distributed training with adaptive summation"): the sum of vectors that are orthogonal, the mean
of vectors that are equal. More ranks are combined in a binary tree: ranks 0 and 1, 2 and 3, then the results. If their number
is not a power of two, the last ranks are first combined with earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.agreement import agree_on_parameters
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.compression import Cast
from gradwire.trainer.reducer.dtensors import shard_of
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.rules.rule import Rule

Pairs = tuple[slice, slice]
"""The places of the vectors that are combined: of the first ones, which become the results, and of the second ones."""


@dataclass(frozen=True)
class Adasum:
    """The rule of op=Adasum: each rank steps with its own gradients, and the changes of the parameters are combined by adaptive
    summation (Maleki et al. 2020), with the learning rate of one rank. It takes the casts of compression=, and no codec.
    """

    def __call__(self, setup: Setup) -> AdaptiveSummation:
        return AdaptiveSummation(setup)


class AdaptiveSummation(Rule):
    """Combines, after every step, the changes that each rank's step has made (section 4 of the paper).

    The optimizer steps with this rank's own gradients, and its state differs between ranks. Then the changes of a parameter by
    the steps of all ranks are combined, and every rank continues from the previous parameter plus the result: replicas that
    start equal stay equal bit for bit. The learning rate is that of one rank.

    Casts apply to the changes; codecs raise ValueError. Do not use GradScaler: the GradScaler of each rank decides separately
    whether to step.
    """

    shares_state = False
    starts_equal = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.op == Sum or setup.predivide != 1:
            raise ValueError(
                f"rank {self.communicator.rank}: Adasum combines changes of parameters, and does not support op={Sum!r} or "
                "gradient_predivide_factor"
            )
        if setup.policy.encodings:
            raise ValueError(
                f"rank {self.communicator.rank}: op='adasum' takes the casts of compression= only (none, fp16, bf16), no "
                "codec"
            )
        self._names: dict[Tensor, str] = {}
        self._casts: dict[Tensor, Cast] = {}
        self._before: dict[Tensor, Tensor] | None = None
        self._wait_s = 0.0

    @property
    def wait_s(self) -> float:
        return self._wait_s

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            if shard_of(parameter):
                raise ValueError(
                    f"rank {self.communicator.rank}: op='adasum' needs whole parameters, and {name!r} is sharded"
                )
        for name, parameter in zip(names, parameters, strict=True):
            cast = self.setup.policy.encoding(name, parameter)
            assert isinstance(cast, Cast)
            self._names[parameter], self._casts[parameter] = name, cast

    def start(self) -> None:
        trained = {parameter: name for parameter, name in self._names.items() if parameter.requires_grad}
        order = agree_on_parameters(self.communicator, list(trained.values()), list(trained))
        place = {name: number for number, name in enumerate(order)}
        frozen = len(place)  # one that is trained later has the same place on all ranks too
        self._names = dict(sorted(self._names.items(), key=lambda item: (place.get(item[1], frozen), item[1])))

    def synchronize(self) -> None:
        """Copy the parameters from which the optimizer takes the next step. It steps frozen ones, too, if they have gradients."""
        self._before = {
            parameter: parameter.detach().clone()
            for parameter in self._names
            if parameter.requires_grad or parameter.grad is not None
        }

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return this rank's own loss, since the optimizer steps on this rank alone, and may call the closure any number of
        times."""
        if self._before is None:
            self.synchronize()
        return closure()

    @torch.no_grad()
    def after_step(self) -> None:
        before, self._before = self._before, None
        if before is None:  # the optimizer has not called its closure
            return
        before = self._with_those_of_others(before)
        changes = [
            (parameter - start).to(self._casts[parameter].dtype_on_wire(parameter.dtype))
            for parameter, start in before.items()
        ]
        traffic = self.setup.traffic
        sent, uncompressed = (sum(traffic.wire_bytes(each.nbytes) for each in some) for some in (changes, before))
        traffic.count(exchanges=1, sent=sent, uncompressed=uncompressed)
        began = time.perf_counter()
        adasum_(self.communicator, changes, prescale=1.0, postscale=1.0)
        self._wait_s += time.perf_counter() - began
        for (parameter, start), change in zip(before.items(), changes, strict=True):
            parameter.copy_(start + change)

    def _with_those_of_others(self, before: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Add the frozen parameters that have gradients on other ranks only; this rank's step has not changed them. Collective if
        parameters are frozen."""
        frozen = {name: parameter for parameter, name in self._names.items() if not parameter.requires_grad}
        if not frozen:
            return before
        mine = [name for name, parameter in frozen.items() if parameter in before]
        stepped = {name for theirs in self.communicator.allgather_record(mine) for name in theirs}
        return {
            parameter: before.get(parameter, parameter)
            for parameter, name in self._names.items()
            if parameter in before or name in stepped
        }


def check_adasum(tensors: Sequence[Tensor]) -> None:
    """Raise TypeError unless all tensors are floating-point tensors."""
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"op='adasum' needs floating-point tensors, not {tensor.dtype}")


def adasum_(communicator: Communicator, tensors: Sequence[Tensor], prescale: float, postscale: float) -> None:
    """Replace each tensor by the Adasum over the ranks of the tensor times prescale, times postscale. Collective.

    The tensors must be floating-point. The computation is in float64, and rounded once, at the end; every rank gets the same
    bits. A rank sends about as many bytes as in an allreduce, and needs about 24 bytes of memory an element during the call.
    """
    fused: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in fused.values():
        _adasum_fused(communicator, group, prescale, postscale)


def _adasum_fused(communicator: Communicator, tensors: Sequence[Tensor], prescale: float, postscale: float) -> None:
    """Replace tensors of one dtype on one device: see adasum_().

    Each rank gets its chunk of the concatenated tensors from all ranks, and combines these vectors up the tree. At each level,
    the ranks only sum the dot products, to which each rank contributes those of its chunk.
    """
    size = communicator.size
    numels = [tensor.numel() for tensor in tensors]
    chunk = -(-sum(numels) // size)
    flat = tensors[0].new_zeros(size * chunk)
    torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=flat[: sum(numels)])
    chunks = torch.empty_like(flat)
    communicator.alltoall(chunks, flat)
    vectors = chunks.view(size, chunk).double() * prescale
    parts = _parts(numels, communicator.rank * chunk, chunk)
    for pairs in tree(size):
        _add_pairs(communicator, vectors, parts, pairs)
    communicator.allgather(flat, (vectors[0] * postscale).to(flat.dtype))
    for tensor, values in zip(tensors, flat[: sum(numels)].split(numels), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))


def _add_pairs(communicator: Communicator, vectors: Tensor, parts: list[int], pairs: Pairs) -> None:
    """Replace the first vector of each pair by the Adasum of both. parts: the number of elements of each tensor in a vector."""

    def sums(products: Tensor) -> Tensor:
        return torch.stack([part.sum(-1) for part in products.split(parts, dim=1)], dim=-1)

    a, b = vectors[pairs[0]], vectors[pairs[1]]
    dots = torch.stack([sums(a * b), sums(a * a), sums(b * b)])
    communicator.allreduce(dots)
    factors = torch.where(dots[1:] > 0, 1 - dots[:1] / (2 * dots[1:]), 1.0)
    each = [factor.expand(-1, -1, length) for factor, length in zip(factors.split(1, dim=2), parts, strict=True)]
    of_a, of_b = torch.cat(each, dim=2)
    a.copy_(of_a * a + of_b * b)


def tree(size: int) -> Iterator[Pairs]:
    """Yield, from the leaves up, the pairs of vectors to combine."""
    power = 1 << (size.bit_length() - 1)
    if rest := size - power:
        yield slice(power - rest, power), slice(power, size)
    distance = 1
    while distance < power:
        yield slice(0, power, 2 * distance), slice(distance, power, 2 * distance)
        distance *= 2


def _parts(numels: Sequence[int], start: int, length: int) -> list[int]:
    """Return how many elements of each tensor, and of the padding, are in a chunk of the concatenated tensors."""
    parts, end = [], 0
    for numel in numels:
        begin, end = end, end + numel
        parts.append(max(0, min(end, start + length) - max(begin, start)))
    return [*parts, length - sum(parts)]

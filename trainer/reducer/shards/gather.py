"""How the optimizer gets its shards of a bucket's parameters, and how all ranks get the stepped shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import NUMBERS, Codec, rehearse, rounding_seed
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.compression import Cast, Compressor, Encoding, encoding_for, encoding_of
from gradwire.trainer.reducer.setup import Combination
from gradwire.trainer.reducer.shards.shard import Shard, in_place, memory_of, parts_of, split

_SHOT = 2
"""Makes the seeds of stochastic rounding here differ from those for gradients, whose shots are 0 and 1."""

_Pairs: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""Tensors to change, and at the same places the tensors to copy to, add to or subtract from them."""


def parameter_encoding_of(compression: Compressor) -> Cast | Encoding | None:
    """Return the encoding of the parameters' deltas for a user's argument; None to send parameters uncompressed. Raises
    ValueError for a codec that is for gradients only."""
    kind = encoding_of(compression)
    if isinstance(kind, Cast):
        return None if kind.wire_dtype is None else kind
    if not isinstance(kind.codec, Codec) or kind.codec.remembers:
        raise ValueError(
            f"parameter_compression={kind.codec.name!r} is for gradients, because it keeps state between steps: give a "
            "cast, or a codec without state, such as 'int8'"
        )
    if not kind.codec.takes_feedback:
        raise ValueError(
            f"parameter_compression={kind.codec.name!r} is for gradients: parameters always have error feedback, whose "
            f"residuals would grow in every step (omega is {kind.codec.omega:.2g}): give a cast, or a codec such as 'int8'"
        )
    return kind


class ShardGather:
    """Copies a bucket's parameters to the optimizer's shards, and the stepped shards to all ranks, by views that are made once.

    flat: memory with the bucket's layout. Other gathers may use it except during gather().
    """

    def __init__(self, bucket: Bucket, shards: Sequence[Shard], flat: Tensor, combination: Combination) -> None:
        self._flat = flat[: bucket.memory.numel()]
        self._communicator = combination.communicator
        self._traffic = combination.traffic
        self._owned = shards
        self._spans = bucket.spans
        memories = [bucket.memory[span] for span in bucket.spans]
        self._parts = [parts_of(each, shard.ranges) for each, shard in zip(memories, shards, strict=True)]
        self._gradients = [in_place(each, shard.ranges) for each, shard in zip(memories, shards, strict=True)]
        self._make_views()

    def gradients(self) -> list[Tensor]:
        """Return views of the shards of the existing gradients."""
        pairs = zip(self._owned, self._parts, strict=True)
        return [part for shard, parts in pairs if shard.parameter.grad is not None for part in parts]

    def _make_views(self) -> None:
        """Make views of the parameters at their current addresses."""
        self._addresses = [shard.parameter.data_ptr() for shard in self._owned]
        self._homes: list[Tensor] = []
        """The memory of each shard; gather() restores it if an optimizer has given the shard other memory."""
        self._filled: _Pairs = [], []
        self._taken: _Pairs = [], []
        self._given: _Pairs = [], []
        for shard, span, parts, gradient in zip(self._owned, self._spans, self._parts, self._gradients, strict=True):
            if len(shard.ranges) != 1:
                _pair(self._filled, split(gradient, shard.ranges), parts)
            self._join(shard, memory_of(shard.parameter), self._flat[span])

    def _join(self, shard: Shard, whole: Tensor, place: Tensor) -> None:
        """Make the views of a parameter. whole: its elements. place: their place in `flat`."""
        ranges = shard.ranges
        is_one = len(ranges) == 1
        if is_one and shard.tensor.data_ptr() != whole[slice(*ranges[0])].data_ptr():
            shard.tensor.data = whole[slice(*ranges[0])]
        home = shard.tensor.detach()
        self._homes.append(home)
        _pair(self._taken, parts_of(place, ranges), split(home, ranges))
        if is_one:  # the shard is a view of the parameter
            (start, stop), numel = ranges[0], whole.numel()
            others = tuple(each for each in ((0, start), (stop, numel)) if each[0] < each[1])
            _pair(self._given, parts_of(whole, others), parts_of(place, others))
        else:
            _pair(self._filled, split(home, ranges), parts_of(whole, ranges))
            _pair(self._given, [whole], [place])

    def fill(self) -> None:
        """Set the values and gradients of the shards, for the optimizer."""
        if self._addresses != [shard.parameter.data_ptr() for shard in self._owned]:
            self._make_views()
        _apply(torch._foreach_copy_, self._filled)
        for shard, gradient in zip(self._owned, self._gradients, strict=True):
            shard.tensor.grad = gradient if shard.parameter.grad is not None else None

    def gather(self, step: int) -> None:
        """Copy the stepped shards to all ranks' parameters. Collective. step: the number of earlier exchanges of gradients."""
        for shard, home in zip(self._owned, self._homes, strict=True):
            if shard.tensor.data_ptr() != home.data_ptr():
                home.copy_(shard.tensor)
                shard.tensor.data = home
        self._exchange(step)

    def _exchange(self, step: int) -> None:
        _apply(torch._foreach_copy_, self._taken)
        self._gather_shares()
        _apply(torch._foreach_copy_, self._given)

    def _gather_shares(self) -> None:
        """Fill `flat` with the shares of all ranks. Collective."""
        self._traffic.count(sent=self._traffic.wire_bytes(self._flat.nbytes) // 2)
        self._communicator.gather_shares(self._flat)


class CodedShardGather(ShardGather):
    """Sends the deltas of the shards, which the optimizer's step makes, to all ranks as codes. A shard keeps the error of its
    code, which is added to its next delta, so every codec has error feedback here (8-bit weights on the wire: ZeRO++, Wang et
    al. 2023).

    kind: the encoding of deltas, by a codec without state. number: differs between buckets.
    """

    def __init__(
        self,
        bucket: Bucket,
        shards: Sequence[Shard],
        flat: Tensor,
        combination: Combination,
        kind: Cast | Encoding,
        number: int,
    ) -> None:
        self._encoding = encoding_for(kind, flat.dtype)
        self._number = number
        super().__init__(bucket, shards, flat, combination)
        self._shares = [[self._flat[part] for part in parts] for parts in bucket.shares]
        self._lengths = [sum(part.numel() for part in parts) for parts in self._shares]
        dtype = flat.dtype if flat.dtype in NUMBERS else torch.float32
        self._numbers = torch.empty(max(self._lengths), dtype=dtype, device=flat.device)
        if self._encoding is not None and isinstance(self._encoding.codec, Codec):
            # Compiles now, not in the first step.
            rehearse(self._encoding.codec, flat.device, with_feedback=False, dtype=dtype)

    def _make_views(self) -> None:
        self._moved: _Pairs = [], []
        self._residuals: _Pairs = [], []
        super()._make_views()

    def _join(self, shard: Shard, whole: Tensor, place: Tensor) -> None:
        home = shard.tensor.detach()
        self._homes.append(home)
        _pair(self._moved, split(home, shard.ranges), parts_of(whole, shard.ranges))
        _pair(self._taken, parts_of(place, shard.ranges), split(home, shard.ranges))
        _pair(self._residuals, split(home, shard.ranges), parts_of(place, shard.ranges))
        _pair(self._given, [whole], [place])

    def fill(self) -> None:
        super().fill()
        _apply(torch._foreach_add_, self._moved)

    def _exchange(self, step: int) -> None:
        _apply(torch._foreach_sub_, self._moved)  # now the shards are deltas
        for part in self._shares[self._communicator.rank]:
            part.zero_()  # also between parameters, where other uses of `flat` have left numbers
        _apply(torch._foreach_copy_, self._taken)
        codec = None if self._encoding is None else self._encoding.codec_at(step)
        longest = max(self._lengths)
        if codec is None or codec.wire_bytes(longest) >= longest * self._flat.element_size():
            self._gather_shares()
        else:
            self._gather_codes(codec, step)
        _apply(torch._foreach_add_, self._given)
        _apply(torch._foreach_sub_, self._residuals)

    def _gather_codes(self, codec: Codec, step: int) -> None:
        """Fill `flat` with the decoded codes of all ranks' shares, including this rank's own. Collective."""
        rank, device = self._communicator.rank, self._flat.device
        codes = [torch.empty(codec.wire_bytes(each), dtype=torch.uint8, device=device) for each in self._lengths]
        mine = torch.empty_like(codes[rank])
        if self._lengths[rank]:
            numbers = torch.cat(self._shares[rank]).to(self._numbers.dtype)
            codec.encode(numbers, mine, seed=rounding_seed(step, rank, 0, 0, _SHOT, self._number))
        self._traffic.count(sent=self._traffic.gathered_bytes(mine.numel()))
        self._communicator.allgather(codes, mine)
        for parts, code, numel in zip(self._shares, codes, self._lengths, strict=True):
            if numel:
                decoded = self._numbers[:numel]
                codec.decode(code, decoded)
                for part, values in zip(parts, decoded.split([part.numel() for part in parts]), strict=True):
                    part.copy_(values)


def _pair(pairs: _Pairs, changed: Sequence[Tensor], by: Sequence[Tensor]) -> None:
    """Append the tensors to change, and the tensors by which to change them."""
    pairs[0].extend(changed)
    pairs[1].extend(by)


def _apply(function: Callable[[list[Tensor], list[Tensor]], Any], pairs: _Pairs) -> None:
    """Apply one of torch's foreach functions to all pairs. These functions do not take empty lists."""
    if pairs[0]:
        function(*pairs)

"""Batch normalization over the batches of all ranks, as if these were one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import communicator_of, names_rank

_Module = TypeVar("_Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Normalizes as torch's BatchNorm1d, 2d and 3d do, but in training uses the statistics of all ranks' batches.

    Batches may differ in length between ranks, or be empty, but all ranks must run these layers in the same order, forward
    and backward. In evaluation, and with one rank, it works as the ordinary BatchNorm. The gradients of weight and bias are
    those of this rank, for DistributedOptimizer to average. It runs on the CPU and on GPUs.

    process_set: the ranks whose batches count as one. The other arguments are torch's.

    Raises ValueError if the input has fewer than two dimensions or another number of channels than num_features; in
    training, also if all ranks together have fewer than two values per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSetLike = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: _Module, process_set: ProcessSetLike = global_process_set
    ) -> _Module | SyncBatchNorm:
        """Replace every BatchNorm layer of a module, in place, by a SyncBatchNorm with its parameters and statistics, and
        return the module; if the module is such a layer itself, return its replacement."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._like(module, process_set)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: ProcessSetLike) -> SyncBatchNorm:
        """Return a layer that shares the parameters and buffers of another."""
        made = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_set, "meta"
        )
        made.weight, made.bias = layer.weight, layer.bias
        made.running_mean, made.running_var = layer.running_mean, layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        made.training = layer.training
        return made

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # the mean over all batches so far
            factor = 1 / float(self.num_batches_tracked) if tracks and self.num_batches_tracked is not None else 0.0
        mean, var = (self.running_mean, self.running_var) if tracks or not self.training else (None, None)
        communicator = communicator_of(self.process_set) if self.training else None
        if communicator is None or communicator.size == 1:
            own = self.training or (self.running_mean is None and self.running_var is None)
            return nn.functional.batch_norm(input, mean, var, self.weight, self.bias, own, factor, self.eps)
        output, total_mean, total_var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, communicator)
        if mean is not None and var is not None:
            with torch.no_grad():
                mean.lerp_(total_mean.to(mean.dtype), factor)
                var.lerp_((total_var * (count / (count - 1))).to(var.dtype), factor)
        return output  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            with names_rank:
                raise ValueError(
                    f"SyncBatchNorm({self.num_features}) needs an input of shape (batch, {self.num_features}, ...), "
                    f"not {list(input.shape)}"
                )


class _Normalize(torch.autograd.Function):
    """Maps (input, weight, bias, eps, communicator) to the output; and the mean, the variance (divided by the count)
    and the count of all ranks' values, float64 and without gradient. The count is a tensor if the host need not read it."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, communicator: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, count = _statistics(communicator, values)
        if not isinstance(count, Tensor) and count < 2:
            raise ValueError(
                f"rank {communicator.rank}: SyncBatchNorm needs two values of each channel in training, over all ranks; "
                f"there is {count:g}"
            )
        inverse = (var + eps).rsqrt()
        normalized = (values - _wide(mean.to(values.dtype), values)) * _wide(inverse.to(values.dtype), values)
        ctx.save_for_backward(normalized, weight, inverse)
        ctx.communicator, ctx.count, ctx.has_bias = communicator, count, bias is not None
        output = normalized
        if weight is not None:
            output = output * _wide(weight.to(values.dtype), values)
        if bias is not None:
            output = output + _wide(bias.to(values.dtype), values)
        ctx.mark_non_differentiable(mean, var, *([count] if isinstance(count, Tensor) else []))
        return output.to(input.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        normalized, weight, inverse = ctx.saved_tensors
        wide = gradient.to(normalized.dtype)
        over = _all_but_channels(wide)
        of_bias = wide.sum(over, dtype=torch.float64)
        of_weight = (wide * normalized).sum(over, dtype=torch.float64)
        # The input changes mean and variance of all ranks' outputs: each rank adds the effect on its own gradients.
        totals = torch.stack([of_bias, of_weight])
        ctx.communicator.allreduce(totals, Sum)
        shift, tilt = (_wide((total / ctx.count).to(wide.dtype), wide) for total in totals)
        scale = inverse if weight is None else inverse * weight
        of_input = (wide - shift - normalized * tilt) * _wide(scale.to(wide.dtype), wide)
        return (
            of_input.to(gradient.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(gradient.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _statistics(communicator: Communicator, values: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return mean, variance and count of all ranks' values, by channel, combined as Chan et al. 1979 do. The count is a number
    on the CPU, and where this rank has less than two values, so that all ranks together may have."""
    over, count = _all_but_channels(values), values.numel() // max(1, values.shape[1])
    mine = torch.zeros(2, values.shape[1], dtype=torch.float64, device=values.device)
    if count:
        var, mean = torch.var_mean(values, over, correction=0)
        mine[0], mine[1] = mean, var
    mine = torch.cat([mine.view(-1), mine.new_full((1,), count)])
    everyones = mine.new_empty(communicator.size, mine.numel())
    communicator.allgather(everyones, mine)
    counts = everyones[:, -1]
    total = counts.sum()
    means, variances = everyones[:, :-1].view(communicator.size, 2, -1).unbind(1)
    shares = (counts / total.clamp(min=1.0)).unsqueeze(1)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return mean, var, total if values.is_cuda and count > 1 else float(total)


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _wide(of_channels: Tensor, like: Tensor) -> Tensor:
    """Return one number per channel in a shape that broadcasts over a tensor."""
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))

"""Sharded parameters (DTensor, as after fully_shard): this rank's elements, and the identity of its shard.

Each function imports DTensor when called, since the import takes half a second; any optimizer has imported it before.
"""

from __future__ import annotations

from torch import Tensor


def held_here(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory: a DTensor's local tensor, else the tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def as_gradient_of(parameter: Tensor, held: Tensor) -> Tensor:
    """Return this rank's part of a gradient as the gradient of its parameter, in the same memory. Not collective."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the parameter's placements. If the gradient is a pending sum, as it may be for a replicated
    parameter, this sums it, collectively over the parameter's mesh."""
    from torch.distributed.tensor import DTensor

    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def is_placed_like(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient has the parameter's placements."""
    from torch.distributed.tensor import DTensor

    return (
        isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements == parameter.placements
    )


def shard_of(parameter: Tensor) -> str:
    """Return a text that identifies this rank's shard, equal for equal shards; empty for an ordinary tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return ""
    mesh = parameter.device_mesh
    return f"{parameter.placements} at {tuple(mesh.get_coordinate() or ())} of a mesh of shape {tuple(mesh.shape)}"

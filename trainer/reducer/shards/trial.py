"""A trial of an optimizer: whether it steps the shards of parameters as it steps whole parameters.

Sharded states are right only for optimizers that update every element independently. Nothing in an optimizer says whether it
does so. Therefore copies of the optimizer step small tensors: one copy steps them whole, and others step the shards that ranks
would have.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.collectives.torch_internals import without_step_hooks
from gradwire.trainer.optimizers.copies import of_copies
from gradwire.trainer.reducer.shards.optimizer_shards import cut_whole, is_by_element
from gradwire.trainer.reducer.shards.shard import Ranges, Shard, length, memory_of, parts_of, split

_STEPS = 32
"""Some optimizers combine elements only after their first steps, up to the 25th."""

_SCALES = 1.0, 8.0, 0.125
"""The scales of the gradients of subsequent steps, so that clipping applies in some steps and not in others."""

_MOST, _SECOND, _THIRD = 32768, 128, 2
"""The most elements of a tensor, of its second, and of its third largest dimension. Some optimizers combine elements only of
tensors of 4096 elements or more, or of matrices with 128 rows and columns or more. torch computes so many elements in one
thread."""

_LEAST, _ALIGNMENT = 256, 64
"""The least elements of a tensor, and a divisor of the lengths of its shards. At the end of a shard of another length, torch may
compute with single numbers instead of vectors, which can change the last bit."""

_LEAST_RATE = 0.01
"""The least learning rate. With a smaller one, such as that of the first step of a warm-up, differences might be rounded off."""


def fault_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> str | None:
    """Return why an optimizer cannot step its parameters in shards; None if it can.

    parameters: those of the optimizer to decide about. The optimizer, the random number generators and the hooks of optimizers
    are left alone.
    """
    shapes = _shapes(optimizer, set(parameters))
    if not shapes:
        return None
    try:
        with _random_numbers_kept({parameter.device for parameter in shapes}), without_step_hooks(optimizer):
            return _difference(optimizer, shapes)
    except Exception as error:
        return f"a trial of it, on small tensors and shards of them, raised {type(error).__name__}: {error}"


def _shapes(optimizer: torch.optim.Optimizer, parameters: set[Tensor]) -> dict[Tensor, list[int]]:
    """Return the shapes of trial tensors, by the parameters that they are like: the largest of each group, number of
    dimensions, dtype and device."""
    found: dict[Any, tuple[Tensor, list[int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in parameters or not parameter.numel():
                continue
            kind, shape = (number, parameter.dim(), parameter.dtype, parameter.device), _trial_shape(parameter.shape)
            if kind not in found or math.prod(shape) > math.prod(found[kind][1]):
                found[kind] = parameter, shape
    return dict(found.values())


def _trial_shape(shape: Sequence[int]) -> list[int]:
    """Return a similar shape with about _LEAST to _MOST elements, a multiple of _ALIGNMENT; without dimensions, that of one
    element."""
    if not shape:
        return []
    largest, *others = sorted(range(len(shape)), key=shape.__getitem__, reverse=True)
    limits = [_SECOND, _THIRD, *[1] * len(shape)]
    found = [*shape]
    for place, limit in zip(others, limits, strict=False):
        found[place] = min(shape[place], limit)
    rest = math.prod(found[place] for place in others)
    wanted, divisor = max(min(shape[largest], _MOST // rest), _LEAST // rest), _ALIGNMENT // math.gcd(_ALIGNMENT, rest)
    found[largest] = -(-wanted // divisor) * divisor
    return found


def _cut(numel: int) -> tuple[Ranges, ...]:
    """Return the ranges of three ranks: the first has two ranges, as with several hosts, and the last has none, as of a small
    parameter."""
    start, stop = (numel * part // 4 // _ALIGNMENT * _ALIGNMENT for part in (1, 2))
    wanted = (((0, start), (stop, numel)), ((start, stop),), ())
    return tuple(tuple(each for each in ranges if each[0] < each[1]) for ranges in wanted)


def _difference(optimizer: torch.optim.Optimizer, shapes: Mapping[Tensor, list[int]]) -> str | None:
    """Step tensors of these shapes whole and in shards; return the first difference in text, or None."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    wholes = {
        parameter: nn.Parameter(_spread(generator, shape, -4, 0).to(parameter.device, parameter.dtype))
        for parameter, shape in shapes.items()
    }
    states = {
        parameter: _resized(state, parameter.shape, shapes[parameter])
        for parameter in shapes
        if (state := optimizer.state.get(parameter))
    }
    ranks: list[dict[Tensor, Shard]] = []
    steppers = [_stepper(optimizer, wholes, {each: copy.deepcopy(state) for each, state in states.items()})]
    for rank in range(len(_cut(0))):
        shards = {}
        for parameter, whole in wholes.items():
            by_rank = _cut(whole.numel())
            shards[parameter] = Shard(whole.detach().clone(), by_rank, by_rank[rank], has_residual=False)
        ranks.append(shards)
        cut = {each: cut_whole(shards[each], copy.deepcopy(state)) for each, state in states.items()}
        steppers.append(_stepper(optimizer, {each: shard.tensor for each, shard in shards.items()}, cut))
    for step in range(_STEPS):
        for parameter, whole in wholes.items():
            gradient = _gradient(generator, whole, step)
            whole.grad = gradient.clone()
            for shards in ranks:
                shard = shards[parameter]
                shard.tensor.grad = _taken(gradient, shard.ranges)
        for stepper in steppers:
            stepper.step()
    for parameter, whole in wholes.items():
        shards_of = [shards[parameter] for shards in ranks]
        kept = [stepper.state.get(shard.tensor, {}) for stepper, shard in zip(steppers[1:], shards_of, strict=True)]
        if what := _differing(whole, steppers[0].state.get(whole, {}), shards_of, kept):
            return (
                f"it steps the shards of a tensor of shape {shapes[parameter]} to other values of {what} than the tensor. If it "
                "clips gradients by their norm, use one that does not, and clip_grad_norm_() of the distributed optimizer"
            )
    return None


def _stepper(
    optimizer: torch.optim.Optimizer, tensors: Mapping[Tensor, Tensor], states: Mapping[Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer for some tensors in place of its parameters."""
    made = of_copies(optimizer, tensors, states)
    made.param_groups = [group for group in made.param_groups if group["params"]]
    for group in made.param_groups:
        if isinstance(rate := group.get("lr"), Tensor):
            rate.detach().clamp_(min=_LEAST_RATE)
        elif rate is not None:
            group["lr"] = max(rate, _LEAST_RATE)
    return made


def _spread(generator: torch.Generator, shape: Sequence[int], least: float, most: float) -> Tensor:
    """Return random numbers of both signs, with absolute values from 10**least to 10**most."""
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * (most - least) + least
    signs = torch.randint(2, shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    return signs * 10**exponents


def _gradient(generator: torch.Generator, whole: Tensor, step: int) -> Tensor:
    """Return the gradient of a step. That of every fourth step is orthogonal to the values, for optimizers that project."""
    scale = _SCALES[step % len(_SCALES)]
    gradient = _spread(generator, whole.shape, -1, 1).to(whole.device, whole.dtype) * scale
    if step % 4 == 3:
        values = memory_of(whole)
        even, flat = values.numel() // 2 * 2, memory_of(gradient)
        largest = values.abs().max()
        flat[0:even:2], flat[1:even:2] = values[1:even:2] / largest * scale, values[0:even:2] / -largest * scale
    return gradient


def _taken(gradient: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements of a gradient."""
    return torch.cat([gradient.new_empty(0), *parts_of(memory_of(gradient), ranges)])


def _resized(state: Mapping[str, Any], shape: Sequence[int], wanted: Sequence[int]) -> dict[str, Any]:
    """Return the state of a parameter of one shape as if it had another: with fewer elements, or with some repeated."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape == shape:
            for dim, numel in enumerate(wanted):
                value = value.index_select(
                    dim, torch.arange(numel, dtype=torch.int64, device=value.device) % shape[dim]
                )
        found[name] = value
    return found


def _differing(
    whole: Tensor, state: Mapping[str, Any], shards: Sequence[Shard], states: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what differs between a stepped tensor and its stepped shards, and between their states; None if nothing does."""
    if not _is_joined(whole, shards, [shard.tensor for shard in shards]):
        return "the weights"
    stepped = [(shard, kept) for shard, kept in zip(shards, states, strict=True) if shard.ranges]
    for name in dict.fromkeys([*state, *(name for _, kept in stepped for name in kept)]):
        values = [kept.get(name) for _, kept in stepped]
        if is_by_element(name, values[0]):
            is_same = _is_joined(state.get(name), [shard for shard, _ in stepped], values)
        else:
            is_same = all(_is_same(state.get(name), value) for value in values)
        if not is_same:
            return f"its state {name!r}"
    return None


def _is_joined(whole: object, shards: Sequence[Shard], values: Sequence[object]) -> bool:
    """Return whether the values of the shards are those of the whole tensor."""
    if not isinstance(whole, Tensor) or whole.shape != shards[0].parameter.shape:
        return False
    elements = whole.detach().reshape(-1)
    return all(
        isinstance(value, Tensor)
        and value.shape == (length(shard.ranges),)
        and all(map(_is_same, parts_of(elements, shard.ranges), split(value.detach(), shard.ranges)))
        for shard, value in zip(shards, values, strict=True)
    )


def _is_same(one: object, other: object) -> bool:
    """Return whether two values in a state are equal, where NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return (
        not isinstance(one, Tensor)
        and not isinstance(other, Tensor)
        and (one == other or (one != one and other != other))
    )


@contextmanager
def _random_numbers_kept(devices: set[torch.device]) -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's random number generators at the end of the with block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

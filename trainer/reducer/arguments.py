"""The arguments of verbs and optimizers: the names of the reductions, and checks of tensors and groups.

Errors name no rank here: the public functions that call these, which are doors, do (see world.names_rank)."""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives.engine.buffers import refusal
from gradwire.collectives.reduction import MOVED, check_dtype
from gradwire.collectives.torch_internals import has_accumulator

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
Adasum: Final = "adasum"

OPS: Final = (Average, Sum, Min, Max, Product, Adasum)
OPS_BY_ELEMENT: Final = (Average, Sum, Min, Max, Product)
"""The reductions in which an element of the result depends on that element alone, so that ranks can compute parts of it."""

_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


def resolve_op(op: str | None, average: bool | None = None, allowed: Sequence[str] = OPS) -> str:
    """Return the reduction for Horovod's arguments op and average: Average if neither is given.

    Raises ValueError for an op that is not allowed, and if both are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError(f"give op or average, not both (op={op!r}, average={average!r})")
        warnings.warn("average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in allowed:
        raise ValueError(f"op must be one of {', '.join(allowed)}, not {op!r}")
    return op


def check_tensor(value: object) -> Tensor:
    """Return the value, which must be a tensor that can be moved. Raises TypeError."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(value).__name__}")
    if reason := refusal(value):
        raise TypeError(reason)
    return value


def check_group(rank: int, verb: str, tensors: Iterable[object]) -> list[Tensor]:
    """Return the tensors of a group. Raises TypeError and ValueError unless all can be moved, and are on one device."""
    checked = [check_tensor(tensor) for tensor in tensors]
    for tensor in checked:
        check_dtype(rank, tensor.dtype, MOVED)
        if tensor.device != checked[0].device:
            raise ValueError(
                f"{verb} needs all tensors on one device; given are some on {checked[0].device} and on {tensor.device}"
            )
    return checked


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError unless an object is an optimizer of torch, or has the attributes of one, as ScheduleFreeWrapper does."""
    is_like_one = hasattr(optimizer, "state") and isinstance(getattr(optimizer, "param_groups", None), list)
    if (
        isinstance(optimizer, type)
        or not is_like_one
        or not all(callable(getattr(optimizer, name, 0)) for name in _METHODS)
    ):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")


def check_arguments(optimizer: object, passes: object, op: object, predivide: float) -> None:
    """Raise TypeError or ValueError, with what was given and what is allowed, for invalid arguments."""
    check_optimizer(optimizer)
    check_passes(passes)
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be {Average!r}, {Sum!r} or {Adasum!r}, not {op!r}")
    if not (math.isfinite(predivide) and predivide > 0):
        raise ValueError(f"gradient_predivide_factor must be a finite number > 0, not {predivide!r}")
    if predivide != 1 and op != Average:
        raise ValueError(f"gradient_predivide_factor={predivide!r} needs op={Average!r}, not {op!r}")


def check_passes(passes: object) -> None:
    """Raise ValueError unless passes is a whole number >= 1."""
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be a whole number >= 1, not {passes!r}")


def check_groups(num_groups: object, groups: object, parameters: Sequence[Tensor]) -> dict[Tensor, int]:
    """Return the number of the group of each parameter that is in a group.

    num_groups: the number of groups into which parameters are divided evenly, in their order; frozen parameters are in no
    group. groups: the same number, or a list of parameters for each group; it takes precedence over num_groups. Raises
    ValueError for anything else, and for parameters that are not the optimizer's or are in two groups.
    """
    if not _is_count(num_groups):
        raise ValueError(f"num_groups must be a whole number >= 0, not {num_groups!r}")
    wanted = num_groups if groups is None else groups
    if isinstance(wanted, int) and _is_count(wanted):
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        return {parameter: place * wanted // len(trainable) for place, parameter in enumerate(trainable) if wanted}
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in wanted):
        raise ValueError(f"groups must be lists of parameters, or a whole number >= 0, not {groups!r}")
    numbers: dict[Tensor, int] = {}
    known = set(parameters)
    for number, group in enumerate(wanted):
        for parameter in group:
            if not isinstance(parameter, Tensor) or parameter not in known:
                what = (
                    f"a tensor of shape {list(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
                )
                raise ValueError(f"groups[{number}] must have parameters of the optimizer, not {what}")
            if parameter in numbers:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is in groups[{numbers[parameter]}] and in "
                    f"groups[{number}]; it can be in one only"
                )
            numbers[parameter] = number
    return numbers


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_named_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], parameters: Iterable[Tensor]
) -> dict[Tensor, str]:
    """Return the name of every parameter. Raises ValueError unless names are unique and cover all parameters."""
    pairs = list(named_parameters)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"named_parameters must be pairs (name, parameter), as from model.named_parameters(), "
                f"not {type(pair).__name__}"
            )
    if repeated := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
        raise ValueError(f"names in named_parameters must be unique; found more than once: {', '.join(repeated)}")
    names: dict[Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    if unnamed := [f"{list(parameter.shape)}" for parameter in parameters if parameter not in names]:
        raise ValueError(
            f"named_parameters must name all parameters of the optimizer; {len(unnamed)} of them are not named "
            f"(of shape {', '.join(unnamed)})"
        )
    return names


def refuse_exchanged_by_ddp(rank: int, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if a DistributedDataParallel exchanges the gradient of a parameter.

    The search goes through all objects of the process, since a parameter does not know its models, but only if a parameter has a
    node in a graph: a DistributedDataParallel holds those of its parameters.
    """
    held = {
        each: name for name, each in zip(names, parameters, strict=True) if each.requires_grad and has_accumulator(each)
    }
    if held and _of_ddp().intersection(held):
        gc.collect()  # which removes those that only a cycle of references has kept
        if found := _of_ddp().intersection(held):
            name = next(name for each, name in held.items() if each in found)
            raise ValueError(
                f"rank {rank}: {name!r} is a parameter of a DistributedDataParallel, which exchanges its gradient, too: what "
                "both exchange is wrong. Use the model inside it, or DDP with ddp_comm_hook() and the optimizer inside this one"
            )


def _of_ddp() -> set[Tensor]:
    """Return the parameters whose gradients the DistributedDataParallels of this process exchange."""
    return {
        parameter
        for each in gc.get_referrers(DistributedDataParallel, *DistributedDataParallel.__subclasses__())
        if isinstance(each, DistributedDataParallel) and hasattr(each, "reducer")  # else its constructor has failed
        for name, parameter in each.module.named_parameters()
        if name not in each.parameters_to_ignore
    }

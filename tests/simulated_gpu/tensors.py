"""What tensors say about their device: attributes and methods of torch.Tensor, which answer for the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from tests.simulated_gpu.cuda import DeviceContext, current_stream, index_of
from tests.simulated_gpu.memory import device_of, put, record_host, shadow
from tests.simulated_gpu.operators import HOST, making, place_of

_T: Any = torch.Tensor
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_own: dict[str, Any] = {
    name: getattr(_T, name)
    for name in ("is_cpu", "to", "numpy", "__array__", "tolist", "__repr__", "__format__", "__deepcopy__", *_HOOKS)
}
_device_of_cpu, _tensor = _T.device, torch.tensor


def _device(self: torch.Tensor) -> torch.device:
    return device_of(self) or _device_of_cpu.__get__(self)


def _is_cuda(self: torch.Tensor) -> bool:
    return device_of(self) is not None


def _is_cpu(self: torch.Tensor) -> bool:
    return device_of(self) is None and bool(_own["is_cpu"].__get__(self))


def _get_device(self: torch.Tensor) -> int:
    device = device_of(self)
    return -1 if device is None else int(device.index)


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    beside = shadow(self)
    return beside is not None and beside.device is None


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if device_of(self) is not None:
        raise RuntimeError("cannot pin a tensor of a GPU, only dense CPU tensors can be pinned")
    copy = torch.empty_like(self, pin_memory=True)
    return copy.copy_(self)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    if (beside := shadow(self)) is not None:
        beside.recorded.add(stream)


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    options = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **options)
    target = None if device is None else place_of(device)
    if target is None:  # no device, or neither a GPU nor the CPU
        return _own["to"](self, *args, **kwargs)  # type: ignore[no-any-return]
    options = {"dtype": dtype, "non_blocking": non_blocking, "memory_format": memory_format, "copy": kwargs.get("copy")}
    return _moved(self, target, **{name: value for name, value in options.items() if value is not None})


def _moved(tensor: torch.Tensor, target: torch.device, **options: Any) -> torch.Tensor:
    if (device_of(tensor) or HOST) != target:
        options["copy"] = True
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Move.apply(tensor, target, options)  # type: ignore[no-any-return,no-untyped-call]
    with making(target):
        return _own["to"](tensor, HOST, **options)  # type: ignore[no-any-return]


class _Move(torch.autograd.Function):
    """A copy to another device, whose gradient returns to the first one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, target: torch.device, options: dict[str, Any]) -> torch.Tensor:
        ctx.back = device_of(tensor) or HOST, tensor.dtype
        return _moved(tensor, target, **options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(*ctx.back), None, None


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return _moved(self, torch.device("cuda", index_of(device)), non_blocking=non_blocking)


def _cpu(self: torch.Tensor, **_: Any) -> torch.Tensor:
    return _moved(self, HOST)


def _new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)


def _to_numpy(name: str) -> Callable[..., Any]:
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(self)) is not None:
            raise TypeError(f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() first.")
        record_host("a read", [self], ())
        return _own[name](self, *args, **kwargs)

    return numpy


def _reads(name: str) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor = self if device_of(self) is None else _moved(self.detach(), HOST)
        record_host("a read", [tensor], ())
        return _own[name](tensor, *args, **kwargs)

    return read


def _registers(name: str) -> Callable[..., Any]:
    """Return what stands in for a method that registers a hook. On a GPU, autograd calls hooks on a thread of the device, which
    is the current one there."""

    def register(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if (device := device_of(self)) is None:
            return _own[name](self, hook)

        @wraps(hook)
        def on_device(*args: Any) -> Any:
            with DeviceContext(device):
                return hook(*args)

        return _own[name](self, on_device)

    return register


def _deepcopy(self: torch.Tensor, memo: Any) -> Any:
    made = _own["__deepcopy__"](self, memo)
    if shadow(made) is None and (device := device_of(self)) is not None:
        put(made, device, current_stream(device))
    return made


def _from_data(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what stands in for torch.tensor() and its kind, whose work torch hides from modes."""

    def make(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            made = data.detach().clone() if function is _tensor else data
            return made.to(made.device if device is None else device, kwargs.get("dtype"))
        made = function(data, *args, **kwargs)
        made = made.pin_memory() if pin_memory else made
        return made if device is None else made.detach().to(device).requires_grad_(made.requires_grad)

    return make


def install() -> None:
    """Put the stand-ins in the places of torch's."""
    for name, answer in {
        "device": _device,
        "is_cuda": _is_cuda,
        "is_cpu": _is_cpu,
    }.items():
        setattr(_T, name, property(answer))
    for name, method in {
        "get_device": _get_device,
        "is_pinned": _is_pinned,
        "pin_memory": _pin_memory,
        "record_stream": _record_stream,
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "new_tensor": _new_tensor,
        "__deepcopy__": _deepcopy,
        **{name: _to_numpy(name) for name in ("numpy", "__array__")},
        **{name: _registers(name) for name in _HOOKS},
        **{name: _reads(name) for name in ("tolist", "__repr__", "__format__")},
    }.items():
        setattr(_T, name, method)
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _from_data(getattr(torch, name)))

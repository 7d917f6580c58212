"""Every operator of torch, as the dispatcher runs it: which memory it reads and writes, on which stream, and whether it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_gpu.clocks import learn, pass_gates
from tests.simulated_gpu.cuda import Stream, current_stream, index_of
from tests.simulated_gpu.memory import device_of, put, record, record_host, shadow
from tests.simulated_gpu.waits import waits

#: Where operators make tensors, if not on a GPU.
HOST, PINNED = torch.device("cpu"), torch.device("cpu", 1)

#: Operators whose result has a size, or a meaning for the host, that only the device knows.
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)

#: Operators that use no contents of memory.
_USES_NOTHING = ("new_empty", "new_empty_strided", "set_", "resize_", "is_set_to", "is_same_size", "detach", "alias")

#: Operators that take tensors of the host beside those of a GPU.
_MIXES = ("index", "index_put", "index_put_", "_index_put_impl_", "set_")


class _Thread(threading.local):
    target: torch.device | None = None
    collected: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None


thread = _Thread()


@contextmanager
def making(target: torch.device | None) -> Iterator[None]:
    """Make new tensors on a GPU, or on the HOST, in the block; with None, where the operators' own tensors are."""
    before, thread.target = thread.target, target
    try:
        yield
    finally:
        thread.target = before


@contextmanager
def collecting() -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """In the block, gather what operators read and write, and record nothing."""
    before, thread.collected = thread.collected, ([], [])
    try:
        yield thread.collected
    finally:
        thread.collected = before


def run_on(stream: Stream, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    """Launch work on a stream which the host computes at once: wait for what it needs, and record what it uses."""
    if thread.collected is not None:
        thread.collected[0].extend(reads)
        thread.collected[1].extend(writes)
        return
    clock = stream.launch()
    pass_gates(clock)
    record(what, stream, clock, reads, writes)


def wait_for(stream: Stream, what: str) -> None:
    """Let the host wait for a stream."""
    if thread.collected is None:
        waits(what, stream.clock)
        pass_gates(stream.clock)
        learn(stream.clock)


def tensors_in(given: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator of a thread that uses memory of a GPU, or pinned memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    given = list(tensors_in((args, kwargs)))
    devices = [device for each in given if (device := device_of(each)) is not None]
    target, args, kwargs = _target(name, args, kwargs, given, devices)
    if name == "copy_" and len(given) == 2:
        return _copied(func, args, kwargs, given[0], given[1])
    if name == "_to_copy" and (devices or target not in (None, HOST)):
        return _moved(func, args, kwargs, given[0], target)
    writes = _written(func, args, kwargs)
    written = {id(each) for each in writes}
    reads = [each for each in given if id(each) not in written]
    is_view = _is_view(func) or name in _USES_NOTHING or name.startswith("empty")
    if not devices:
        if any(shadow(each) is not None for each in given) and not is_view:
            record_host(name, reads, writes)
        outputs = func(*args, **kwargs)
        if target is PINNED:
            put(outputs, None, None)
        elif target is not None and target is not HOST:
            stream = current_stream(target)
            made = _made(outputs, given, target, stream)
            if not is_view and made:
                run_on(stream, name, (), made)
        return outputs
    if not is_view:
        _check_devices(func, name, given, target or devices[0])
    device = device_of(writes[0]) if writes else None
    stream = current_stream(device or devices[0])
    # An operator on lists of tensors, for which torch makes a list for each device.
    for each in () if is_view else dict.fromkeys(devices) if name.startswith("_f") else (stream.device,):
        here = [[tensor for tensor in some if device_of(tensor) in (None, each)] for some in (reads, writes)]
        run_on(current_stream(each), name, *here if name.startswith("_f") else (reads, writes))
    if name in _READS or (name.startswith("index") and _has_mask(args)):
        wait_for(stream, name)
    outputs = func(*args, **kwargs)
    if (made := _made(outputs, given, target or devices[0], stream)) and not is_view and thread.collected is None:
        record(name, stream, stream.clock, (), made)
    return outputs


def _target(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """Return where an operator makes tensors, and its arguments without the device."""
    target = None
    if kwargs.get("device") is not None:
        target = place_of(kwargs["device"])
        kwargs = kwargs if target is None else {**kwargs, "device": HOST}
    if kwargs.get("pin_memory"):
        target, kwargs = PINNED, {**kwargs, "pin_memory": False}
    if thread.target is not None:
        target = thread.target
    return target or (devices[0] if devices else None), args, kwargs


def place_of(device: Any) -> torch.device | None:
    """Return a GPU with its index, or HOST; None for other devices."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        return torch.device("cuda", index_of(device))
    return HOST if device.type == "cpu" else None


def _made(outputs: Any, given: Sequence[torch.Tensor], device: torch.device, stream: Stream) -> list[torch.Tensor]:
    """Put new tensors among the outputs on a device; return them."""
    if device.type == "cpu":
        return []
    old = {_address(each) for each in given}
    made = [each for each in tensors_in(outputs) if _address(each) not in old and shadow(each) is None]
    for each in made:
        put(each, device, stream)
    return made


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _is_view(func: Any) -> bool:
    kinds = [each.alias_info for each in func._schema.returns]
    return bool(kinds) and all(each is not None and not each.is_write for each in kinds)


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _check_devices(func: Any, name: str, given: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise RuntimeError, as torch does, where an operator gets tensors of several devices."""
    if name in _MIXES or name.startswith(("_foreach", "_fused")) or func.namespace != "aten":
        return
    for each in given:
        own = device_of(each)
        if own is None and shadow(each) is None and each.dim() > 0 and torch._C._current_graph_task_id() != -1:
            put(each, device, current_stream(device))  # autograd's own zeros
        elif own != device and each.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and {own or 'cpu'}! "
                f"({name})"
            )


# Copies


def _copied(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], destination: torch.Tensor, source: torch.Tensor
) -> Any:
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    _copy("copy_", destination, source, device_of(destination), device_of(source), non_blocking)
    return func(*args, **kwargs)


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.Tensor, target: torch.device | None
) -> Any:
    there, here = None if target is HOST else target, device_of(source)
    pass_gates(current_stream(here or there).clock)
    outputs = func(*args, **kwargs)
    if there is not None:
        put(outputs, there, current_stream(there))
    elif kwargs.get("non_blocking"):
        put(outputs, None, None)  # torch makes it in pinned memory
    _copy("_to_copy", outputs, source, there, here, bool(kwargs.get("non_blocking")))
    return outputs


def _copy(
    what: str,
    destination: torch.Tensor,
    source: torch.Tensor,
    there: torch.device | None,
    here: torch.device | None,
    non_blocking: bool,
) -> None:
    """Record a copy, which has not run yet, or whose destination is new."""
    if there is None and here is None:
        if thread.collected is None:
            record_host(what, [source], [destination])
        return
    stream = current_stream(here or there)
    if here is not None and there is not None and here != there:  # torch orders both streams around it
        other = current_stream(there)
        stream.wait_stream(other)
        run_on(stream, what, [source], [destination])
        other.wait_stream(stream)
        return
    run_on(stream, what, [source], [destination])
    if here == there:
        return
    pinned = shadow(source if here is None else destination)
    if pinned is not None:
        pinned.recorded.add(stream)  # by torch's allocator of pinned memory
    if pinned is None or not non_blocking:
        direction = "from" if here is not None else "to"
        wait_for(
            stream, f"a copy {direction} the device ({'pageable memory' if pinned is None else 'not non_blocking'})"
        )

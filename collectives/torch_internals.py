"""Private names of torch, most of those that gradwire uses: a new version of torch may change them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceCoalescedOptions as AllreduceCoalescedOptions
from torch._C._distributed_c10d import HashStore as HashStore
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from gradwire.collectives.forks import in_forked_child

#: One of torch.distributed's C++ backends, whose methods torch's type stubs leave out.
Backend = Any

#: The base class of a process group written in Python.
ProcessGroup: Any = dist.ProcessGroup

P = ParamSpec("P")
T = TypeVar("T")

#: The timeout of backends whose operations have gradwire's deadlines.
NEVER = timedelta(days=365)

_NOT_PROFILED = nullcontext()

#: The graph task outside of backward().
OUTSIDE_BACKWARD = -1

_HOOKS = [
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]

# Tensors, autograd and optimizers


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose elements are the negatives of what the memory holds."""
    return torch._neg_view(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without autograd history. Views of a tensor made in inference mode cannot be written outside of that
    mode, so for such a tensor return an ordinary one over the same memory."""
    if not tensor.is_inference():
        return tensor.detach()
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    memory = memory.conj() if tensor.is_conj() else memory
    return negative_view(memory) if tensor.is_neg() else memory


def map_only(kind: type[Any], function: Callable[[Any], object], tree: object) -> Any:
    """Return a structure of lists, (named) tuples and dicts with function(leaf) for each leaf of a kind."""
    return _pytree.tree_map_only(kind, function, tree)


def leaves(kind: type[T], tree: object) -> dict[Any, T]:
    """Return the leaves of a kind in a structure of lists, (named) tuples and dicts, by their paths."""
    found, _ = _pytree.tree_flatten_with_path(tree)
    return {path: leaf for path, leaf in found if isinstance(leaf, kind)}


def plainly(function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """Call a function with __torch_function__ disabled: subclasses of Tensor are treated as plain tensors, in its result
    too."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def current_stream_handle(device: torch.device) -> int:
    """Return the address of the current cudaStream_t of a CUDA device that has an index. torch.cuda.current_stream() takes 6 us
    longer."""
    return torch._C._cuda_getCurrentRawStream(device.index)


CAN_MOVE_STORAGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this version of torch can do what move_storage() does."""


def move_storage(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy a tensor, which is all of its storage, to the memory of another one of the same size. Its storage has this memory from
    then on, and so have all views of it. `memory` has the old memory, to which NumPy arrays of the tensor still point."""
    memory.copy_(tensor)
    tensor.untyped_storage()._swap_data_ptr_(memory.untyped_storage())  # type: ignore[attr-defined]


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number that identifies the running backward(), or OUTSIDE_BACKWARD."""


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Let the autograd engine call a function at the end of the running backward(), which raises its errors."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def called_by_accumulation(frame: FrameType) -> bool:
    """Return whether C++ code that runs when a gradient is accumulated, such as DDP's, has called the function of a frame without
    Python code in between, in a backward() that no other backward() has called."""
    caller = frame.f_back
    if caller is None or caller.f_code is not _CALLS_ENGINE:
        return False
    node = _node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return False
    while (caller := caller.f_back) is not None:  # then the node may be that of the outer backward()
        if caller.f_code is _CALLS_ENGINE:
            return False
    return True


#: Of the Python function in which torch calls the autograd engine; None if a version of torch lacks it.
_CALLS_ENGINE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)

#: Returns the node of the graph that the engine runs; None at the end of backward(), when the engine calls functions.
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


def hook_runs_last(tensor: torch.Tensor, handle: RemovableHandle) -> bool:
    """Return whether no other hook runs on the tensor's accumulated gradient after this one."""
    return next(reversed(tensor._post_accumulate_grad_hooks)) == handle.id  # type: ignore[no-any-return]


def run_hook_last(tensor: torch.Tensor, handle: RemovableHandle) -> None:
    """Let a hook on the tensor's accumulated gradient run after those that were registered later. Do not call it in a hook:
    fully_shard iterates over them."""
    hooks = tensor._post_accumulate_grad_hooks
    hooks[handle.id] = hooks.pop(handle.id)


def has_accumulator(tensor: torch.Tensor) -> bool:
    """Return whether anything, such as a graph or a DistributedDataParallel, holds the node of autograd that accumulates the
    gradient of a leaf. Otherwise, torch makes a new one each time."""
    _accumulator(tensor).metadata[__name__] = True
    return _accumulator(tensor).metadata.pop(__name__, False)  # type: ignore[no-any-return]


def _accumulator(tensor: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def share_hooks(wrapper: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Let a wrapper use the hooks of the optimizer inside it, in place of those that torch's __init__ would make. Some optimizers
    around others do not call torch's __init__: the wrapper lacks the hooks that they lack."""
    for hooks in _HOOKS:
        if hasattr(optimizer, hooks):
            setattr(wrapper, hooks, getattr(optimizer, hooks))


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has all of torch's hooks, and torch runs them in its step()."""
    return getattr(type(optimizer).step, "hooked", False) and all(hasattr(optimizer, hooks) for hooks in _HOOKS)


def _step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Return the tables of the hooks before and after the steps of an optimizer: its own, and those of all optimizers."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # which optimizers around others may lack
    own = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    return [*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run before or after the steps of an optimizer, also those of all optimizers."""
    return any(_step_hooks(optimizer))


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run no hooks before and after the steps of an optimizer in the with block, and none of those of all optimizers."""
    tables = _step_hooks(optimizer)
    kept = [dict(hooks) for hooks in tables]
    for hooks in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(tables, kept, strict=True):
            hooks.update(before)


def profiling(name: str) -> AbstractContextManager[object]:
    """Return a context manager that shows profilers a range of this name; it does nothing if none records."""
    return torch.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else _NOT_PROFILED


# The compiler


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that torch.compile, also of a backward(), neither traces nor compiles, nor anything that it calls. Return
    it. The mark is in its code, so a call takes no longer, whereas torch.compiler.disable() wraps each call. Do not mark what a
    decorator has made: all functions that it has decorated have the same code, also those of users."""
    assert not hasattr(function, "__wrapped__"), f"the code of {function!r} is that of its decorator"
    dynamo: Any = torch._C._dynamo.eval_frame
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return _disabled(function)
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(
        function.__code__, dynamo._FrameExecStrategy(skip, skip)
    )  # its frame, and frames inside
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # so that a compiled caller calls it
    return function


def _disabled(function: Callable[P, T]) -> Callable[P, T]:
    """Return torch.compiler.disable() of a function. It imports the compiler, which takes a second, so the first call does it: by
    then an optimizer has imported it anyway."""
    disabled: Callable[P, T] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run


# Stores and backends


def store_of_one() -> Store:
    """Return a store for a process that is alone."""
    return HashStore()


def default_store() -> Store:
    """Return the store of the default group."""
    return _get_default_store()


def server_of(store: Store) -> str | None:
    """Return the host to which a store connects; None if it is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def gloo_backend(store: Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Backend:
    """Return a backend over gloo. address: that of this host at which it listens; None: that of GLOO_SOCKET_IFNAME."""
    if address is None:
        return left_to_parent(dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return left_to_parent(dist.ProcessGroupGloo(store, rank, size, options))


def nccl_backend(store: Store, rank: int, size: int) -> Backend:
    """Return a backend over NCCL whose operations end only by themselves or by abort(). None of torch's threads looks at them:
    these would end the process at a time limit, and some minutes after any error of NCCL, also where another group of NCCL could
    not be used any more. Work.wait() blocks the host, and Work.synchronize() does not."""
    unlimited = store.clone()  # type: ignore[attr-defined]
    unlimited.set_timeout(NEVER)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.blocking = 1  # otherwise, torch limits each call
    with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):  # which is read when the object is made
        return left_to_parent(dist.ProcessGroupNCCL(unlimited, rank, size, options))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in the with block. A change while another thread reads the environment may crash the process,
    so the block should be short, and entered rarely."""
    with _IN_TURN:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


_IN_TURN = threading.Lock()


def nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group, unknown to torch.distributed, for CUDA tensors, as the backend "nccl" makes it with this timeout. torch's
    threads end its operations, because no others look at them."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = left_to_parent(dist.ProcessGroupNCCL(store, rank, size, options))
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def nccl_communicator(backend: Backend) -> int:
    """Return the address of NCCL's communicator on the current device, on which the ranks are connected; 0 if it is unknown."""
    return int(backend._comm_ptr()) if hasattr(backend, "_comm_ptr") else 0


def nccl_error(communicator: int) -> str | None:
    """Return the text of the error that NCCL has found in the background, "" if it has found none; None if it cannot be asked.
    communicator: an address from nccl_communicator(), which is not aborted meanwhile. Any thread may call this."""
    nccl, found = _nccl_library(), ctypes.c_int(0)
    if nccl is None or not communicator:
        return None
    address = ctypes.c_void_p(communicator)
    if nccl.ncclCommGetAsyncError(address, ctypes.byref(found)) or found.value in _NO_ERROR:
        return ""
    texts = [nccl.ncclGetErrorString(found), nccl.ncclGetLastError(address)]
    return ": ".join(text.decode(errors="replace").strip() for text in texts if text)


#: ncclSuccess and ncclInProgress.
_NO_ERROR = (0, 7)


@cache
def _nccl_library() -> ctypes.CDLL | None:
    """Return the NCCL that torch uses; None if it is not a library of its own."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    version = ctypes.c_int(0)
    nccl.ncclGetVersion(ctypes.byref(version))
    major, minor, patch = torch.cuda.nccl.version()[:3]
    if version.value != 10_000 * major + 100 * minor + patch:
        return None
    for function in (nccl.ncclGetErrorString, nccl.ncclGetLastError):
        function.restype = ctypes.c_char_p
    return nccl


def allow_captures() -> None:
    """Let the calling thread ask for events while other threads capture CUDA graphs, which would otherwise become invalid."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # no CUDA in this process
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


#: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: a capture of another thread is no reason to refuse a call.
_THREAD_LOCAL = 1


def begin_coalescing(backend: Backend) -> None:
    """Let NCCL gather the sends and receives from now on into one group of calls."""
    backend._start_coalescing()


def end_coalescing(backend: Backend) -> dist.Work:
    """Launch the gathered calls."""
    work: dist.Work = backend._end_coalescing()
    return work


def allgather(backend: Backend, output: torch.Tensor, source: torch.Tensor, options: AllgatherOptions) -> dist.Work:
    """Collect every rank's source, one after the other, in one tensor."""
    work: dist.Work = backend._allgather_base(output, source, options)
    return work


def reduce_scatter(
    backend: Backend, output: torch.Tensor, source: torch.Tensor, options: dist.ReduceScatterOptions
) -> dist.Work:
    """Reduce the sources and leave one part of the result on each rank."""
    work: dist.Work = backend._reduce_scatter_base(output, source, options)
    return work


def forget_failed_groups() -> None:
    """Let the next process group use the same keys in its store on all ranks, also on those where init_process_group() has
    failed: torch has counted that group, and the keys contain the count."""
    _world.group_count = 0


# Threads that a forked process does not have


def left_to_parent(made: T) -> T:
    """Return a backend or store whose destructor is never called in a child that is forked from this process.

    There, it would wait for ever for threads that only the parent has, when the child ends.
    """
    in_forked_child(made, _keep_for_ever)
    return made


def _keep_for_ever(made: object) -> None:
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes, keep.restype = [ctypes.py_object], None
    keep(made)


def is_of_parent(group: dist.ProcessGroup) -> bool:
    """Return whether this process has been forked from the one that made a group of torch.distributed."""
    return any(group is each for each in _of_parent)


_of_parent: list[dist.ProcessGroup] = []


def _keep_groups(world: Any) -> None:
    """Never destroy the groups of torch.distributed in this process."""
    _of_parent.extend(world.pg_map)
    for group, (_, store) in list(world.pg_map.items()):
        for made in (group, store, *(group._get_backend(device) for device in group._device_types)):
            _keep_for_ever(made)


in_forked_child(_world, _keep_groups)

"""Data-parallel training with Horovod's interface: `import gradwire as hvd`.

The collective operations (*verbs*), such as allreduce(), have Horovod's names, argument names and defaults. All verbs differ
from Horovod's in these points:

- Operations are matched by the order of the calls, not by `name`. The order must be the same on all ranks. A `name` appears
  in errors. From the start of an asynchronous operation until synchronize() returns, or poll() returns True, another call of
  the same verb with the same process set and the same `name` raises ValueError.
- `process_set` may also be a torch.distributed group, a dimension of a DeviceMesh, or a Communicator. Ranks outside of it need
  not call anything; a verb called on such a rank raises ValueError. If process_set is a ProcessSet, this error is also a
  HorovodInternalError.
- `root_rank` is a rank of the world, also in a call with a `process_set`.

Tensors may have any shape (at least one dimension for allgather, alltoall and reducescatter) and the dtypes float16, bfloat16,
float32, float64, int8, uint8, int16, int32, int64 and bool. Verbs that only move data, such as broadcast(), also take complex,
float8, float4, uint16, uint32 and uint64 tensors. The tensors of one grouped call, such as grouped_allreduce(), must be on one
device. A result is on the device of its tensor. prescale_factor and postscale_factor multiply integers in float64. The result
is then truncated toward zero, and so are averages of integers.

Verbs that are neither in place nor asynchronous are differentiable, with Horovod's gradients; reductions only with op=Average
or op=Sum. The gradient of allgather, and on the root rank that of broadcast, is the average of all ranks' gradients. The
gradient of reducescatter with op=Sum is the concatenation of all ranks' gradients, times the number of ranks.

All verbs raise ValueError or TypeError for invalid arguments, before anything is sent. If an operation cannot finish, its verb
raises gradwire.CollectiveError; for an asynchronous verb, synchronize() raises it. gradwire.HorovodInternalError is
the same class. allgather and alltoall compare the arguments of all ranks before data is sent. If the arguments do not fit
together, all ranks raise an error that is both a ValueError and a HorovodInternalError. The table in
docs/guides/from-horovod.md compares the errors with Horovod's.
"""

import types as _types
import typing as _typing

from gradwire import elastic as elastic
from gradwire import optimizers as optimizers
from gradwire import reports as reports
from gradwire import rules as rules
from gradwire import servers as servers
from gradwire.collectives.errors import CollectiveError as CollectiveError
from gradwire.collectives.errors import CollectiveTimeout as CollectiveTimeout
from gradwire.collectives.errors import Mismatch as Mismatch
from gradwire.collectives.errors import PeerJoined as PeerJoined
from gradwire.collectives.errors import PeerLost as PeerLost
from gradwire.collectives.errors import ReplicasDiffer as ReplicasDiffer
from gradwire.collectives.torch_backend import register as _register_torch_backend
from gradwire.trainer.batch_shares import BatchShares as BatchShares
from gradwire.trainer.ddp import ddp_comm_hook as ddp_comm_hook
from gradwire.trainer.horovod import probes as _probes
from gradwire.trainer.horovod.alias import alias_horovod as alias_horovod
from gradwire.trainer.horovod.handles import poll as poll
from gradwire.trainer.horovod.handles import synchronize as synchronize
from gradwire.trainer.horovod.join import join as join
from gradwire.trainer.horovod.movements import allgather as allgather
from gradwire.trainer.horovod.movements import allgather_async as allgather_async
from gradwire.trainer.horovod.movements import alltoall as alltoall
from gradwire.trainer.horovod.movements import alltoall_async as alltoall_async
from gradwire.trainer.horovod.movements import barrier as barrier
from gradwire.trainer.horovod.movements import broadcast as broadcast
from gradwire.trainer.horovod.movements import broadcast_ as broadcast_
from gradwire.trainer.horovod.movements import broadcast_async as broadcast_async
from gradwire.trainer.horovod.movements import broadcast_async_ as broadcast_async_
from gradwire.trainer.horovod.movements import grouped_allgather as grouped_allgather
from gradwire.trainer.horovod.movements import grouped_allgather_async as grouped_allgather_async
from gradwire.trainer.horovod.movements import sparse_allreduce_async as sparse_allreduce_async
from gradwire.trainer.horovod.probes import ccl_built as ccl_built
from gradwire.trainer.horovod.probes import cuda_built as cuda_built
from gradwire.trainer.horovod.probes import ddl_built as ddl_built
from gradwire.trainer.horovod.probes import gloo_built as gloo_built
from gradwire.trainer.horovod.probes import gloo_enabled as gloo_enabled
from gradwire.trainer.horovod.probes import is_homogeneous as is_homogeneous
from gradwire.trainer.horovod.probes import mpi_built as mpi_built
from gradwire.trainer.horovod.probes import mpi_enabled as mpi_enabled
from gradwire.trainer.horovod.probes import mpi_threads_supported as mpi_threads_supported
from gradwire.trainer.horovod.probes import nccl_built as nccl_built
from gradwire.trainer.horovod.probes import rocm_built as rocm_built
from gradwire.trainer.horovod.reductions import allreduce as allreduce
from gradwire.trainer.horovod.reductions import allreduce_ as allreduce_
from gradwire.trainer.horovod.reductions import allreduce_async as allreduce_async
from gradwire.trainer.horovod.reductions import allreduce_async_ as allreduce_async_
from gradwire.trainer.horovod.reductions import grouped_allreduce as grouped_allreduce
from gradwire.trainer.horovod.reductions import grouped_allreduce_ as grouped_allreduce_
from gradwire.trainer.horovod.reductions import grouped_allreduce_async as grouped_allreduce_async
from gradwire.trainer.horovod.reductions import grouped_allreduce_async_ as grouped_allreduce_async_
from gradwire.trainer.horovod.reductions import grouped_reducescatter as grouped_reducescatter
from gradwire.trainer.horovod.reductions import grouped_reducescatter_async as grouped_reducescatter_async
from gradwire.trainer.horovod.reductions import reducescatter as reducescatter
from gradwire.trainer.horovod.reductions import reducescatter_async as reducescatter_async
from gradwire.trainer.horovod.state import allgather_object as allgather_object
from gradwire.trainer.horovod.state import broadcast_object as broadcast_object
from gradwire.trainer.horovod.state import broadcast_optimizer_state as broadcast_optimizer_state
from gradwire.trainer.horovod.state import broadcast_parameters as broadcast_parameters
from gradwire.trainer.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from gradwire.trainer.optimizer import DistributedOptimizer as DistributedOptimizer
from gradwire.trainer.reducer.arguments import Adasum as Adasum
from gradwire.trainer.reducer.arguments import Average as Average
from gradwire.trainer.reducer.arguments import Max as Max
from gradwire.trainer.reducer.arguments import Min as Min
from gradwire.trainer.reducer.arguments import Product as Product
from gradwire.trainer.reducer.arguments import Sum as Sum
from gradwire.trainer.reducer.compression import Compression as Compression
from gradwire.trainer.reducer.compression import ErrorFeedback as ErrorFeedback
from gradwire.trainer.reducer.plans import ExchangePlan as ExchangePlan
from gradwire.trainer.reports.timeline import start_timeline as start_timeline
from gradwire.trainer.reports.timeline import stop_timeline as stop_timeline
from gradwire.trainer.world.process_sets import ProcessSet as ProcessSet
from gradwire.trainer.world.process_sets import global_process_set as global_process_set
from gradwire.trainer.world.world import add_process_set as add_process_set
from gradwire.trainer.world.world import cross_rank as cross_rank
from gradwire.trainer.world.world import cross_size as cross_size
from gradwire.trainer.world.world import init as init
from gradwire.trainer.world.world import is_initialized as is_initialized
from gradwire.trainer.world.world import local_rank as local_rank
from gradwire.trainer.world.world import local_size as local_size
from gradwire.trainer.world.world import rank as rank
from gradwire.trainer.world.world import remove_process_set as remove_process_set
from gradwire.trainer.world.world import shutdown as shutdown
from gradwire.trainer.world.world import size as size

__version__ = "0.3.0"

_register_torch_backend()

HorovodInternalError = CollectiveError

_MOVED = {
    **{
        name: f"hvd.servers.{name}"
        for name in ("Hogwild", "KVStore", "ParameterServer", "QuorumLost", "ServerReport", "kvstore")
    },
    **{name: f"hvd.optimizers.{name}" for name in ("DelayedNesterov", "LAMB", "LARS", "WarmupLR")},
    **{name: f"hvd.reports.{name}" for name in ("StepMetrics", "Stragglers")},
    **{name: f"hvd.rules.{name}" for name in ("LocalReport", "Rule")},
    "ElasticSampler": "hvd.elastic.ElasticSampler",
    "LocalUpdates": "hvd.DistributedOptimizer(optimizer, named_parameters, rule=hvd.rules.LocalUpdates(every=...)), in which "
    "compression= of the rule encodes pseudo-gradients, and compression= of the optimizer the gradients of the warm-up",
}
"""What has taken the place of names of gradwire 0.2."""

if not _typing.TYPE_CHECKING:  # type checkers know that the names are gone

    def __getattr__(name: str) -> object:
        if name in _MOVED:
            raise AttributeError(f"gradwire.{name} is now {_MOVED[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = sorted(
    name
    for name, value in globals().items()
    if not name.startswith("_")
    and not isinstance(value, _types.ModuleType)
    and name not in _probes.NAMES  # which only programs written for Horovod ask
)

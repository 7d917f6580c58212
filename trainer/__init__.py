"""Data-parallel training with Horovod's interface: `import trainer as hvd`.

The verbs have Horovod's names, argument names and defaults. What differs, for all of them: operations are matched by the
order in which ranks call them, which must be the same on all, and not by `name`; `process_set` may be a
torch.distributed group, a dimension of a DeviceMesh, or a Communicator, too. A root rank is one of the world, whatever
the process set, whose other ranks need not call anything: a verb called outside of its process set raises what is a
ValueError and a HorovodInternalError.

A `name` stands in errors, and while an operation has it, until its synchronize(), no other one of that verb and process
set can have it: that is a ValueError.

Tensors may have any shape (at least one dimension where rows are moved) and the dtypes float16, bfloat16, float32,
float64, int8, uint8, int16, int32, int64, bool; results live on the device of the tensor given; those of a group are on
one device. Factors multiply integers in float64, and the result is truncated toward zero, as an average of integers is.
Verbs that are neither in place nor asynchronous can be differentiated, and have Horovod's gradients: through allgather
and broadcast the average of all ranks' gradients, through reducescatter with op=Sum the number of ranks times what was
gathered. Each verb says its own.

All raise ValueError or TypeError for arguments that cannot be meant, before anything is sent, and
collectives.CollectiveError, which is HorovodInternalError here, where the ranks could not finish together. What the ranks give
to allgather and alltoall is compared before it is sent: where it does not fit, all ranks raise what is both. Of
docs/guides/from-horovod.md, the table of errors has what Horovod raises, and what is raised here.
"""

from collectives.errors import CollectiveError as HorovodInternalError
from trainer import elastic as elastic
from trainer import kvstore as kvstore
from trainer.alias import alias_horovod
from trainer.compression import Compression, ErrorFeedback
from trainer.ddp import ddp_comm_hook
from trainer.hogwild import Hogwild
from trainer.horovod.handles import Handle, poll, synchronize
from trainer.horovod.join import join
from trainer.horovod.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from trainer.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from trainer.horovod.scatterings import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from trainer.horovod.sparse import sparse_allreduce_async
from trainer.horovod.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from trainer.kvstore import KVStore
from trainer.local_updates import LocalReport, LocalUpdates
from trainer.ops import Adasum, Average, Max, Min, Product, Sum
from trainer.optimizer import DistributedOptimizer
from trainer.optimizers.delayed_nesterov import DelayedNesterov
from trainer.optimizers.lamb import LAMB
from trainer.optimizers.lars import LARS
from trainer.parameter_server import ParameterServer
from trainer.probes import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from trainer.process_sets import ProcessSet, global_process_set
from trainer.reports.metrics import StepMetrics
from trainer.reports.server import ServerReport
from trainer.reports.stragglers import Stragglers
from trainer.reports.timeline import start_timeline, stop_timeline
from trainer.rules.rule import Rule
from trainer.sampler import ElasticSampler
from trainer.schedules import WarmupLR
from trainer.server.errors import QuorumLost
from trainer.sync_batch_norm import SyncBatchNorm
from trainer.world import (
    add_process_set,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)

__all__ = [
    "LAMB",
    "LARS",
    "Adasum",
    "Average",
    "Compression",
    "DelayedNesterov",
    "DistributedOptimizer",
    "ElasticSampler",
    "ErrorFeedback",
    "Handle",
    "Hogwild",
    "HorovodInternalError",
    "KVStore",
    "LocalReport",
    "LocalUpdates",
    "Max",
    "Min",
    "ParameterServer",
    "ProcessSet",
    "Product",
    "QuorumLost",
    "Rule",
    "ServerReport",
    "StepMetrics",
    "Stragglers",
    "Sum",
    "SyncBatchNorm",
    "WarmupLR",
    "add_process_set",
    "alias_horovod",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_comm_hook",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

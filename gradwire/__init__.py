"""Data-parallel training with Horovod's interface: `import gradwire as hvd`.

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

from gradwire.collectives.errors import CollectiveError as HorovodInternalError
from gradwire.trainer.ddp import ddp_comm_hook
from gradwire.trainer.gradients.arguments import Adasum, Average, Max, Min, Product, Sum
from gradwire.trainer.gradients.compression import Compression, ErrorFeedback
from gradwire.trainer.horovod import elastic as elastic
from gradwire.trainer.horovod.alias import alias_horovod
from gradwire.trainer.horovod.handles import Handle, poll, synchronize
from gradwire.trainer.horovod.join import join
from gradwire.trainer.horovod.movements import (
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
from gradwire.trainer.horovod.probes import (
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
from gradwire.trainer.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from gradwire.trainer.horovod.sampler import ElasticSampler
from gradwire.trainer.horovod.scatterings import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from gradwire.trainer.horovod.schedules import WarmupLR
from gradwire.trainer.horovod.sparse import sparse_allreduce_async
from gradwire.trainer.horovod.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gradwire.trainer.horovod.sync_batch_norm import SyncBatchNorm
from gradwire.trainer.local_updates import LocalReport, LocalUpdates
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.optimizers.delayed_nesterov import DelayedNesterov
from gradwire.trainer.optimizers.layerwise import LAMB, LARS
from gradwire.trainer.reports.metrics import StepMetrics
from gradwire.trainer.reports.stragglers import Stragglers
from gradwire.trainer.reports.timeline import start_timeline, stop_timeline
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.servers import kvstore as kvstore
from gradwire.trainer.servers.connection import QuorumLost
from gradwire.trainer.servers.hogwild import Hogwild
from gradwire.trainer.servers.kvstore import KVStore
from gradwire.trainer.servers.parameter_server import ParameterServer
from gradwire.trainer.servers.report import ServerReport
from gradwire.trainer.world.process_sets import ProcessSet, global_process_set
from gradwire.trainer.world.world import (
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

__version__ = "0.1.0"

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

"""Data-parallel training with Horovod's interface: `import trainer as hvd`.

The verbs have Horovod's names, argument names and defaults. What differs, for all of them: `name` is accepted for the
sake of Horovod's code but unused, since operations are matched by the order in which ranks call them, which must be the
same on all; `process_set` is None (all ranks), a torch.distributed group or a Communicator, and a root rank counts
inside of it.

Tensors may have any shape (at least one dimension where rows are moved) and the dtypes float16, bfloat16, float32,
float64, int8, uint8, int16, int32, int64, bool; results live on the device of the tensor given. Verbs that are neither
in place nor asynchronous can be differentiated; their gradients are those of the sum of all ranks' losses.

All raise ValueError or TypeError for arguments that cannot be meant, before anything is sent, and
collectives.CollectiveError where the ranks could not finish together.
"""

from trainer.compression import Compression, ErrorFeedback
from trainer.ddp import ddp_comm_hook
from trainer.horovod.handles import Handle, poll, synchronize
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
    reducescatter,
    reducescatter_async,
)
from trainer.horovod.state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from trainer.local_updates import LocalReport, LocalUpdates
from trainer.ops import Average, Max, Min, Product, Sum
from trainer.optimizer import DistributedOptimizer
from trainer.optimizers.lamb import LAMB
from trainer.optimizers.lars import LARS
from trainer.rules.rule import Rule
from trainer.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "LAMB",
    "LARS",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Handle",
    "LocalReport",
    "LocalUpdates",
    "Max",
    "Min",
    "Product",
    "Rule",
    "Sum",
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
    "cross_rank",
    "cross_size",
    "ddp_comm_hook",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]

"""Optimizers and a schedule that torch lacks, for large batches and for late gradients: `hvd.optimizers`."""

from gradwire.trainer.horovod.schedules import WarmupLR as WarmupLR
from gradwire.trainer.optimizers.foreach import LAMB as LAMB
from gradwire.trainer.optimizers.foreach import LARS as LARS
from gradwire.trainer.optimizers.foreach import DelayedNesterov as DelayedNesterov

"""The numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.gradients.bucket import Bucket

#: At every how many steps what the codes owe is compared with the gradients, which reads all of them.
ERROR_EVERY = 10


@dataclass(frozen=True)
class BucketChoice:
    """Says how one bucket of gradients is exchanged: its bytes as they are, by which algorithm, by which codec ("none"
    without one)."""

    nbytes: int
    algorithm: str
    codec: str


@dataclass(frozen=True)
class StepMetrics:
    """Holds what on_step is called with after a step, on each rank that rank's.

    step: how many steps there have been, this one included. seconds: since the end of the last step; of the first, since
    the optimizer was made. wait_s: of these, how long backward(), step() and synchronize() waited for the exchange.
    exchange_s: from the first bucket's start to the end of the exchange, backward() meanwhile included; None where there
    was no exchange. bytes_sent, bytes_uncompressed: as in stats, of this step.
    busbw_gb_s: 2(p-1)/p times the bytes of the gradients over exchange_s, in 1e9 bytes per second.
    buckets: how each bucket is exchanged at present. compression_error: the length of what this rank's error feedback
    owes, as a share of the length of the gradients it belongs to; every tenth step, else None, and without error feedback.
    slowest_rank: who made the others wait longest, as far as is known (see DistributedOptimizer.stragglers).
    """

    step: int
    seconds: float
    wait_s: float
    exchange_s: float | None
    bytes_sent: int
    bytes_uncompressed: int
    busbw_gb_s: float | None
    buckets: tuple[BucketChoice, ...]
    compression_error: float | None
    slowest_rank: int | None


def choices(communicator: Communicator, buckets: Sequence[Bucket]) -> tuple[BucketChoice, ...]:
    """Return how each bucket is exchanged, once it is past its warm-up."""
    return tuple(_choice(communicator, bucket) for bucket in buckets)


def _choice(communicator: Communicator, bucket: Bucket) -> BucketChoice:
    values, codec = bucket.buffer.values, bucket.buffer.codec
    if isinstance(codec, Codec):
        algorithm = communicator.chosen("allreduce", 4 * values.numel(), codec)
    else:  # what a codec of matrices exchanges are sums, of a size of their own each
        algorithm = "auto" if codec is not None else communicator.chosen("allreduce", values.nbytes)
    return BucketChoice(values.nbytes, algorithm, "none" if codec is None else codec.name)


@torch.no_grad()
def compression_error(buckets: Sequence[Bucket]) -> float | None:
    """Return the length of what is owed as a share of that of the gradients, in buckets that owe anything."""
    owed = exchanged = 0.0
    for bucket in buckets:
        if bucket.coded is not None and (residual := bucket.coded.tensors().get("worker")) is not None:
            owed += float(residual.norm()) ** 2
            exchanged += float(bucket.coded.values.norm()) ** 2
    return math.sqrt(owed / exchanged) if exchanged else None

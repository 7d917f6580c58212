"""What moves data between the processes of a host: allreduce, messages, and the arithmetic of dtypes.

All but the arithmetic is compiled, or loaded from the disk, when this file is loaded: no deadline runs yet.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.allreduce import REDUCES, SPREADS, allreduce
from gradwire.collectives.kernels.cpu.arithmetic import DIVIDE, OPS, arithmetic
from gradwire.collectives.kernels.cpu.context import (
    ABORTED,
    ANNOUNCED,
    BASES,
    BLOCK,
    CHUNK_BYTES,
    DEPTH,
    DIRECT,
    DISAGREED,
    FAILED,
    FIELDS,
    FINISHED_WITH_NEWS,
    FOUND_NBYTES,
    FOUND_TAG,
    KNOWN,
    LINE,
    PATIENT,
    PEER,
    PENDING,
    RANK,
    RANK_BYTES,
    RANKS,
    SIZE,
    SLOTS,
    SPINS,
    STAGING,
    STATE,
    STOPPED,
    VERSION,
    WAIT_LEAST,
    WAIT_LINE,
    WHOLE,
    WHOLE_BYTES,
    YIELD_NS,
    publish,
)
from gradwire.collectives.kernels.cpu.messages import (
    RING_BYTES,
    ROW_DONE,
    ROW_FIELDS,
    ROW_MOVED,
    ROW_NBYTES,
    ROW_SENDS,
    move,
    next_sender,
)

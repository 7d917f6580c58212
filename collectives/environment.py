"""The names of the environment variables that the collective layer reads, all when a Communicator is made."""

from __future__ import annotations

#: Prefix of the per-collective algorithm tables: COLLECTIVES_ALLREDUCE="recursive_doubling:0-16K;rsag:16K-max".
TABLE_PREFIX = "COLLECTIVES_"

#: Overrides what `topology.host_id` finds out.
HOST_ID = "COLLECTIVES_HOST_ID"

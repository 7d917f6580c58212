"""Horovod's calls for a timeline."""

from __future__ import annotations

import os

from gradwire.trainer.world.world import current_world


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record what this rank does: backward, buckets, operations with their parts, steps. All ranks call it.

    file_path: where rank 0 writes the timeline of all ranks, for https://ui.perfetto.dev or chrome://tracing.
    mark_cycles: whether to mark where each exchange of gradients begins. The last 100,000 events of each rank are kept;
    the file says how many were dropped. Raises ValueError while a timeline is being recorded, and on rank 0 where the
    folder does not exist.
    """
    current_world().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop recording, and have rank 0 write the file; shutdown() does so too. Collective over all ranks.

    All times are on the clock of rank 0. What clocks are apart is measured now, in some rounds of messages
    among all ranks; the file says by how much that may be wrong. Raises ValueError where nothing is being recorded, and
    CollectiveError where the others do not come; each rank that gets it has then written what it has recorded itself,
    beside file_path, with ".rank" and its rank behind.
    """
    current_world().stop_timeline()

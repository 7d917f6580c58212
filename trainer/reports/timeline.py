"""Horovod's calls for a timeline."""

from __future__ import annotations

import os

from gradwire.trainer.world.world import current_world


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording on this rank: backward, buckets, operations with their parts, and steps. All ranks call it.

    file_path: the file in which rank 0 writes the timeline of all ranks, for https://ui.perfetto.dev or chrome://tracing.
    mark_cycles: whether to mark the start of each exchange of gradients.

    The last 100,000 events of each rank are kept; the file states how many were dropped. Raises ValueError while a timeline is
    being recorded, and on rank 0 if the folder does not exist.
    """
    current_world().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop recording, and write the file on rank 0; shutdown() does so too. Collective over all ranks.

    All times are on the clock of rank 0. The offsets of the other clocks are measured now, in some rounds of messages; the
    file states the error of the offsets. Raises ValueError if nothing is being recorded. Raises CollectiveError if other ranks
    do not take part; each rank that raises it has written its own recording to a file whose path is file_path with ".rank" and
    the number of the rank appended.
    """
    current_world().stop_timeline()

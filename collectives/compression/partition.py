"""The partition of a buffer into parts for the ranks of a host, shards for their owners, and chunks, which are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from gradwire.collectives.compression.codec import Codec, Raw
from gradwire.collectives.schedules.algorithms import direct
from gradwire.collectives.schedules.schedule import Place, Planner
from gradwire.collectives.schedules.spans import Layout, Span, split_aligned

#: The maximum bytes of a chunk's code, and numbers of a chunk, which is encoded as a whole. Longer codes delay the first chunk on
#: the wire and the last chunk at the receiver; with more numbers, fewer sums stay in the cache; with shorter chunks, there are
#: more messages.
_MOST_ON_CPU = 256 << 10, 1 << 21
#: On a GPU, the host needs longer to launch a kernel than the GPU to encode a million numbers.
_MOST_ON_GPU = 4 << 20, 1 << 23

_SAMPLE = 1 << 20


@dataclass(frozen=True)
class Partition:
    """The work of one rank in a compressed allreduce of a buffer of `numel` elements; spans count elements of the buffer.

    inside_hosts: whether the ranks of each host first sum the buffer among themselves, uncompressed, and share the result at
    the end, see sums_inside(). parts: of the buffer; a different rank of the host sums and exchanges each part. Without
    inside_hosts there is one part. group: the ranks that exchange codes of this rank's part, including this rank: one rank of
    each host, or all ranks. Empty for a rank without a part, if its host has more ranks than there are parts. shards: of the
    part, one for each block of the schedule; if each rank has a shard, they are in the order of the group. chunks: of all
    shards, in the order of sending; each chunk has one span for every shard, which may be empty.
    """

    numel: int
    rank: int
    inside_hosts: bool
    parts: Layout
    group: tuple[int, ...]
    shards: Layout
    chunks: tuple[Layout, ...]

    @property
    def shard(self) -> Span:
        """Return the shard that this rank owns, if each rank has one; else an empty one."""
        owns = self.group and len(self.shards) == len(self.group)
        return self.shards[self.group.index(self.rank)] if owns else Span(0, 0)

    @cached_property
    def longest(self) -> int:
        """Return the maximum number of elements in a chunk of a shard."""
        return max((span.length for chunk in self.chunks for span in chunk), default=0)


def sums_inside(hosts: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of each host first sum a buffer among themselves, uncompressed, so that a host sends one code of
    each sum. They do so if there are several hosts, and some host has several ranks."""
    return len(hosts) > 1 and any(len(host) > 1 for host in hosts)


def partition_of(
    codec: Codec,
    numel: int,
    rank: int,
    hosts: Sequence[Sequence[int]],
    segment_bytes: int,
    planner: Planner = direct.allreduce,
    device_type: str = "cpu",
) -> Partition:
    """Cut a buffer for the schedule that a planner makes for a group. hosts: the ranks of each host, see Topology.
    segment_bytes: the wanted maximum size of a chunk's code, of numbers on the CPU. device_type: of the numbers."""
    everything = Span(0, numel)
    inside_hosts = sums_inside(hosts)
    if not inside_hosts:
        parts: Layout = (everything,)
        group = tuple(sorted(chain.from_iterable(hosts)))
        part = everything
    else:
        parts = split_aligned(everything, min(len(host) for host in hosts), codec.alignment)
        index = next(list(host).index(rank) for host in hosts if rank in host)
        if index >= len(parts):
            return Partition(numel, rank, inside_hosts, parts, (), (), ())
        group = tuple(host[index] for host in hosts)
        part = parts[index]
    blocks = planner(Place(group.index(rank), len(group))).blocks
    shards = split_aligned(part, blocks, codec.alignment)
    longest = max(shard.length for shard in shards)
    most_bytes, most_numbers = _MOST_ON_CPU if device_type == "cpu" else _MOST_ON_GPU
    wire_bytes = min(segment_bytes, most_bytes) if device_type == "cpu" else most_bytes
    wanted = min(most_numbers, wire_bytes * _SAMPLE // codec.wire_bytes(_SAMPLE))
    count = max(1, -(-longest // max(codec.alignment, wanted)))
    sliced = [split_aligned(shard, count, codec.alignment) for shard in shards]
    return Partition(numel, rank, inside_hosts, parts, group, shards, tuple(zip(*sliced, strict=True)))


def effective(codec: Codec, partition: Partition) -> Codec:
    """Return the codec, or Raw if the numbers are not longer than their code. A codec with state is always used, since its
    result may differ from the numbers. So is a one-shot codec, since each rank then adds all codes by itself."""
    longest = partition.longest
    if codec.wire_bytes(longest) < 4 * longest or codec.one_shot or codec.keeps_state:
        return codec
    return Raw()

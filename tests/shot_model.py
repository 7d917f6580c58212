"""A compressed allreduce of all ranks in one process, one step after another: what the real one is compared with."""

from collections.abc import Sequence

import torch

from gradwire.collectives.compression.algorithms_for import ride, shot_of
from gradwire.collectives.compression.codec import Codec, rounding_seed
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import effective, partition_of
from gradwire.collectives.schedules.spans import Span
from tests.cuda_machine.cases import encoded

CPU = torch.device("cpu")


class ShotModel:
    """Compute what a compressed allreduce of all ranks must give, of one shot or two as the codec says.

    hosts: the ranks of each. with_feedback: whether what is lost comes back in the next step.
    """

    def __init__(
        self, codec: Codec, numel: int, hosts: Sequence[Sequence[int]], segment_bytes: int, *, with_feedback: bool
    ) -> None:
        self.codec, self.hosts, self.numel = codec, hosts, numel
        size = sum(len(host) for host in hosts)
        planner = ride(shot_of(codec)).planner
        self.partitions = [partition_of(codec, numel, rank, hosts, segment_bytes, planner) for rank in range(size)]
        self.feedbacks = [Feedback(codec, partition, CPU) for partition in self.partitions] if with_feedback else None

    def step(self, inputs: Sequence[torch.Tensor], op: str, step: int, seed: int = 0) -> torch.Tensor:
        """The result that every rank must have of its input."""
        result = torch.full((self.numel,), float("nan"))
        divisor = len(inputs) if op == "average" else 1
        sums = [self._inside_host(inputs, rank) for rank in range(len(inputs))]

        def exchange(codec: Codec, group: Sequence[int], c: int, owner: int, span: Span) -> None:
            """Do one chunk of one owner."""
            total = torch.zeros(span.length)
            for position, rank in enumerate(group):
                feedback = self.feedbacks[rank] if self.feedbacks else None
                wire = encoded(
                    codec,
                    sums[rank][span.start : span.stop],
                    feedback.worker[span.start : span.stop] if feedback else None,
                    seed=rounding_seed(step, rank, c, owner, 0, seed),
                    state=feedback.state[c][owner] if feedback else None,
                )
                codec.decode(wire, total, add=position > 0)
            total /= divisor
            if self.codec.one_shot:
                result[span.start : span.stop] = total
                return
            feedback = self.feedbacks[group[owner]] if self.feedbacks else None
            start = span.start - self.partitions[group[owner]].shard.start
            residual = feedback.owner[start : start + span.length] if feedback else None
            wire = encoded(codec, total, residual, seed=rounding_seed(step, group[owner], c, owner, 1, seed))
            codec.decode(wire, result[span.start : span.stop])

        for group in {partition.group for partition in self.partitions if partition.group}:
            codec = effective(self.codec.at(step), self.partitions[group[0]])
            for c, spans in enumerate(self.partitions[group[0]].chunks):
                for owner, span in enumerate(spans):
                    if span.length:
                        exchange(codec, group, c, owner, span)
        return result

    def _inside_host(self, inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """What a rank encodes: its own numbers, with those of the others of its host where there are several hosts."""
        total = inputs[rank].clone()
        if len(self.hosts) > 1:
            for other in next(host for host in self.hosts if rank in host):
                if other != rank:
                    total += inputs[other]
        return total

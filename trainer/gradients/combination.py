"""How the gradients of all ranks become one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from collectives import Communicator, PreparedOperation, Work
from collectives.compression.codec import Codec
from collectives.compression.feedback import Feedback
from trainer.gradients.traffic import Traffic
from trainer.ops import Average


@dataclass(frozen=True)
class Combination:
    """Says among whom, and by which op, "sum" or "average", numbers are combined; they are divided by `predivide`
    before and multiplied by it after. in_shares: whether each rank needs its share of the result only, which the
    Communicator's shares() are. traffic: counts what is sent for that."""

    communicator: Communicator
    op: str
    predivide: float = 1.0
    in_shares: bool = False
    traffic: Traffic = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traffic", Traffic(self.communicator))

    @property
    def inputs(self) -> int:
        """Return how many ranks' numbers the result is the mean of; 1 where it is their sum."""
        return self.communicator.size if self.op == Average else 1

    def start(
        self,
        values: Tensor,
        codec: Codec | None = None,
        feedback: Feedback | None = None,
        step: int = 0,
        seed: int = 0,
        *,
        divided: bool = False,
    ) -> Work:
        """Begin to combine values, in place. divided: whether they have been divided by `predivide` already."""
        if codec is None:
            self.traffic.count_sent(values.nbytes)
        else:
            self.traffic.count_sent(4 * values.numel(), codec.at(step))
        return self.communicator.allreduce(
            values,
            self.op,
            prescale=1.0 if divided else 1 / self.predivide,
            postscale=self.predivide,
            codec=codec,
            feedback=feedback,
            step=step,
            seed=seed,
            async_op=True,
        )

    def prepare(self, values: Tensor) -> PreparedOperation:
        """Prepare to combine values as they are, in place, as often as wanted."""
        prepare = self.communicator.prepare_reduce_shares if self.in_shares else self.communicator.prepare_allreduce
        return prepare(values, self.op, prescale=1 / self.predivide, postscale=self.predivide)

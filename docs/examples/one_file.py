"""gradwire in one file: train with averaged gradients, in float32 or int8: torchrun --nproc-per-node 2 one_file.py

The file needs only PyTorch. Its four parts compute the same numbers as these folders of the package:

1. schedules, which list the messages of each rank: collectives/schedules/
2. the loop that runs a schedule, and an allreduce of float32 numbers: collectives/transports/
3. the codec int8 with error feedback: collectives/compression/
4. an optimizer that averages gradients in backward(): trainer/

The package also exchanges while backward() computes, over shared memory and TCP, cuts long buffers, adds inside hosts first, and
reports failed ranks. Here, gradients are float32 on CPUs, and ranks wait for a failed one until the timeout of the group.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# 1. Schedules: functions of a rank that send nothing. A buffer is cut into one chunk per rank, the owner of the chunk.


class Step(NamedTuple):
    """One message: "send" a chunk, "receive" its final numbers, or receive numbers and add them ("reduce")."""

    action: str
    peer: int
    chunk: int


Schedule = list[list[Step]]  # the rounds of one rank; the messages of a round are in flight together


def ring(rank: int, size: int) -> Schedule:
    """Plan an allreduce in which each rank sends to its right neighbour only (Patarasuk and Yuan, 2009).

    In the first size - 1 rounds, the partial sum of each chunk travels around the ring to the owner. In the other rounds, the
    sums travel around it once more.
    """
    right, left, rounds = (rank + 1) % size, (rank - 1) % size, []
    for k in range(2 * (size - 1)):
        action = "reduce" if k < size - 1 else "receive"
        rounds.append([Step("send", right, (rank - 1 - k) % size), Step(action, left, (rank - 2 - k) % size)])
    return rounds


def direct(rank: int, size: int) -> Schedule:
    """Plan an allreduce in two rounds: each rank sends every chunk to its owner, then each owner sends the sum to all ranks."""
    others = [(rank + k) % size for k in range(1, size)]  # so that not all ranks send to rank 0 first
    return [
        [Step("send", peer, peer) for peer in others] + [Step("reduce", peer, rank) for peer in others],
        [Step("send", peer, rank) for peer in others] + [Step("receive", peer, peer) for peer in others],
    ]


def from_root(rank: int, size: int) -> Schedule:
    """Plan a broadcast: rank 0 sends the only chunk to all other ranks."""
    return [[Step("send", peer, 0) for peer in range(1, size)] if rank == 0 else [Step("receive", 0, 0)]]


# 2. The loop, and the allreduce of float32 numbers.


def run(schedule: Schedule, chunks: Sequence[Tensor]) -> Iterator[tuple[Step, Tensor]]:
    """Run a schedule, and yield each step that receives, with the numbers or codes that have arrived.

    The caller adds them to the chunk, or copies them, before the next round begins: the loop does not read messages.
    """
    for steps in schedule:
        messages = []
        for step in steps:
            chunk = chunks[step.chunk]
            if chunk.numel():  # both ends of an empty message leave it out
                buffer = chunk if step.action == "send" else torch.empty_like(chunk)
                start = dist.isend if step.action == "send" else dist.irecv
                messages.append((step, buffer, start(buffer, step.peer)))
        for _, _, work in messages:
            work.wait()
        yield from ((step, buffer) for step, buffer, _ in messages if step.action != "send")


def allreduce(numbers: Tensor) -> None:
    """Replace 1-D numbers with their sum over all ranks. The owner of a chunk computes it, so all ranks get the same bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = numbers.tensor_split(size)
    for step, arrived in run(ring(rank, size), chunks):
        chunk = chunks[step.chunk]
        chunk.copy_(chunk + arrived if step.action == "reduce" else arrived)


def average(bucket: Tensor) -> None:
    """Replace numbers with their average over all ranks."""
    allreduce(bucket.view(-1))
    bucket.div_(dist.get_world_size())


# 3. The codec int8: blocks of 256 numbers share a scale, so that they take 260 bytes instead of 1024.

BLOCK = 256


def encode(numbers: Tensor) -> Tensor:
    """Return the codes of (blocks, 256) numbers as (blocks, 260) bytes: integers from -127 to 127, and the scale.

    A block with a NaN or Inf (in the package: 2^127 or more) decodes to NaN, one without a number of 2^-100 or more to zeros.
    """
    largest = numbers.abs().amax(1)
    inverse = torch.where(largest >= 2.0**-100, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (numbers * inverse[:, None]).round().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), (largest / 127.0)[:, None].view(torch.uint8)], dim=1)


def decode(codes: Tensor) -> Tensor:
    """Return the numbers of codes."""
    return codes[:, :BLOCK].view(torch.int8) * codes[:, BLOCK:].view(torch.float32)


def encode_with_feedback(numbers: Tensor, residual: Tensor) -> Tensor:
    """Return the codes of numbers + residual, and set the residual to their error, for the next step (Seide et al., 2014)."""
    corrected = numbers + residual
    codes = encode(corrected)
    residual.copy_((corrected - decode(codes)).nan_to_num(0.0, 0.0, 0.0))  # one Inf must not spoil all later steps
    return codes


class Int8Average:
    """Averages by codes. Keeps the residuals of this rank's numbers, and of the averages it owns (Tang et al., 2019).

    A ring would encode every partial sum. Here each number is encoded twice, for any number of ranks: before it is sent to the
    owner of its chunk, and when the owner sends the average.
    """

    def __init__(self, blocks: int) -> None:
        self.of_own = torch.zeros(blocks, BLOCK)
        self.of_averages = torch.zeros_like(self.of_own.tensor_split(dist.get_world_size())[dist.get_rank()])

    def __call__(self, bucket: Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        to_owners, from_owners = direct(rank, size)
        codes = encode_with_feedback(bucket, self.of_own)
        chunks = codes.tensor_split(size)
        contributions = {rank: chunks[rank]} | {step.peer: arrived for step, arrived in run([to_owners], chunks)}
        mean = sum(decode(contributions[peer]) for peer in sorted(contributions)) / size
        chunks[rank].copy_(encode_with_feedback(mean, self.of_averages))
        for step, arrived in run([from_owners], chunks):
            chunks[step.chunk].copy_(arrived)
        bucket.copy_(decode(codes))  # also the owner's own chunk, so that replicas stay equal


# 4. The optimizer, and a training loop.


class DistributedOptimizer:
    """Wraps an optimizer: when backward(), which all ranks must call, returns, all gradients are averages over the ranks.

    A missing gradient counts as zero. (In the package, a parameter without a gradient on any rank still has none.)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, compression: str = "none") -> None:
        if compression not in ("none", "int8"):
            raise ValueError(f"compression must be 'none' or 'int8', not {compression!r}")
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        parameters.reverse()  # in the order of backward(), as in the package, where full buckets leave early
        *starts, numel = accumulate((-(-each.numel() // 16) * 16 for each in parameters), initial=0)
        self._bucket = torch.zeros(-(-numel // BLOCK), BLOCK)  # one: large messages are faster than many small ones
        self._average = Int8Average(len(self._bucket)) if compression == "int8" else average
        self._backward, self._views = -1, []
        for parameter, start in zip(parameters, starts, strict=True):
            self._views.append((parameter, self._bucket.view(-1)[start : start + parameter.numel()].view_as(parameter)))
            for _, arrived in run(from_root(dist.get_rank(), dist.get_world_size()), [parameter.data]):
                parameter.data.copy_(arrived)  # so that replicas begin equal
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _: Tensor) -> None:
        """Exchange when this backward() ends; autograd calls this whenever it has accumulated a gradient."""
        backward = torch._C._current_graph_task_id()  # an earlier backward() may have raised
        if self._backward != backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._exchange)

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, view in self._views:
            if parameter.grad is not view:
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        self._average(self._bucket)
        for parameter, view in self._views:
            parameter.grad = view


def train(model: nn.Module, optimizer: DistributedOptimizer, steps: int = 200) -> list[float]:
    """Train a model of 8 inputs and 1 output on batches that differ between ranks. Return the mean loss of each step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = torch.zeros(steps)
    for step in range(steps):
        inputs = torch.randn(64, 8, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    average(losses)
    return losses.tolist()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for compression in ("none", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), compression)
        losses = train(model, optimizer)
        for end in range(40, 201, 40) if dist.get_rank() == 0 else ():
            print(f"{compression}, steps {end - 39} to {end}: loss {sum(losses[end - 40 : end]) / 40:.4f}")
    dist.destroy_process_group()

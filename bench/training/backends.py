"""`torchrun --nproc-per-node 2 -m gradwire.bench backends`: torch's parallel training, over gloo and over our backend.

DDP, FSDP2, tensor parallelism and a pipeline train the same layers on the same data. Each runs over a group of either
backend, in turns of a few steps (see `gradwire.bench.timing`). At the end, the parameters of both backends are
compared. DDP also runs with our hook, without a codec, and with a hook that exchanges nothing. `compute` is the same
training without DDP. The difference between the last two is the overhead of DDP itself, which no backend can save.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.futures import Future
from torch.nn.functional import gelu, mse_loss
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.bench.options import add_results, add_turns, count_from, names_of
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import TURNS, Times, format_interval, median_and_p99, speedup_interval, step_seconds
from gradwire.bench.workloads.loop import join_ranks, share_cores, shares

GLOO, OURS, NOTHING, COMPUTE = "gloo", "gradwire", "no exchange", "compute"
WITH_HOOK, OWN_MEMORY = "gradwire, its hook", "gradwire, its memory"
SAMPLES, MICROBATCHES, LR, SEED = 32, 4, 0.01, 1
TOLERANCE = 1e-4
"""The allowed difference of parameters from those over gloo, relative to the largest. With more than two ranks, the
order of additions differs."""


@dataclass(frozen=True)
class BackendRow:
    """The result of one program over one backend. step_ms: the time per step on the slowest rank, a median.

    as_gloo: the speed as a multiple of that over gloo. interval: its 95 % interval; None with too few turns.
    beyond_of_gloo: the median time beyond `compute` in the same round, over gloo's; None without `compute`. difference:
    that of the final parameters from those over gloo, relative to the largest; None if nothing is exchanged.
    """

    program: str
    backend: str
    world_size: int
    step_ms: float
    as_gloo: float
    interval: tuple[float, float] | None
    beyond_of_gloo: float | None
    difference: float | None


class Layer(nn.Module):
    """Adds to its input the result of a normalization and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.down(gelu(self.up(self.norm(inputs))))
        return inputs + added


def layers(chosen: argparse.Namespace) -> nn.Sequential:
    """Return a new model. Every call returns the same weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Layer(chosen.width) for _ in range(chosen.layers)))


class BackendCompetitor:
    """Trains a module. A call trains for one turn. train: computes the module's gradients for a batch."""

    def __init__(self, module: nn.Module, train: Callable[[Tensor], object], chosen: argparse.Namespace) -> None:
        self.module = module
        self._train = train
        self._optimizer = torch.optim.SGD(module.parameters(), LR)
        self._data = torch.Generator().manual_seed(SEED)
        self._shape = (SAMPLES * hvd.size(), chosen.width)
        self._steps = chosen.steps

    def __call__(self) -> None:
        for _ in range(self._steps):
            self._optimizer.zero_grad()
            self._train(torch.randn(self._shape, generator=self._data))
            self._optimizer.step()

    def parameters(self) -> Tensor:
        """Return this rank's parameters, concatenated into one dimension."""
        own = (p.to_local() if isinstance(p, DTensor) else p for p in self.module.parameters())
        return torch.cat([parameter.detach().flatten() for parameter in own])


def loss_of(forward: nn.Module, batch: Tensor) -> None:
    """Compute the gradients of the task: to reverse the features of a batch."""
    mse_loss(forward(batch), batch.flip(1)).backward()


def loss_of_share(forward: nn.Module, batch: Tensor) -> None:
    loss_of(forward, *shares([batch]))


def exchange_nothing(state: object, bucket: GradBucket) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def ddp(chosen: argparse.Namespace, backend: str, *, views: bool = False) -> BackendCompetitor:
    module = layers(chosen)
    if backend == COMPUTE:
        return BackendCompetitor(module, partial(loss_of_share, module), chosen)
    group = dist.new_group(backend={NOTHING: GLOO, WITH_HOOK: OURS}.get(backend, backend))
    forward = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)
    if backend == NOTHING:
        forward.register_comm_hook(None, exchange_nothing)
    if backend == WITH_HOOK:
        forward.register_comm_hook(None, hvd.ddp_comm_hook("none", process_group=group))
    return BackendCompetitor(module, partial(loss_of_share, forward), chosen)


def mesh_of(competitor: str) -> DeviceMesh:
    backend = OURS if competitor == OWN_MEMORY else competitor
    # Meshes that differ only in their groups are equal, and DTensor would use the group of the first one for both.
    return DeviceMesh.from_group(dist.new_group(backend=backend), "cpu", mesh_dim_names=(competitor,))


def fsdp2(chosen: argparse.Namespace, backend: str) -> BackendCompetitor:
    model, mesh = layers(chosen), mesh_of(backend)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    if backend == OWN_MEMORY:
        sharded.set_allocate_memory_from_process_group_for_comm(True)
    return BackendCompetitor(model, partial(loss_of_share, model), chosen)


def tensor_parallel(chosen: argparse.Namespace, backend: str) -> BackendCompetitor:
    model, mesh = layers(chosen), mesh_of(backend)
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return BackendCompetitor(model, partial(loss_of, model), chosen)


def pipeline(chosen: argparse.Namespace, backend: str) -> BackendCompetitor:
    first, last = hvd.rank() == 0, hvd.rank() == hvd.size() - 1
    each = chosen.layers // hvd.size()
    module = layers(chosen)[hvd.rank() * each : (hvd.rank() + 1) * each]
    group = dist.new_group(backend=backend)
    stage = PipelineStage(module, hvd.rank(), hvd.size(), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=mse_loss)

    def train(batch: Tensor) -> None:
        schedule.step(*([batch] if first else []), target=batch.flip(1) if last else None)

    return BackendCompetitor(module, train, chosen)


#: For each program, the function that makes a competitor, and the backends that it compares.
PROGRAMS: dict[str, tuple[Callable[..., BackendCompetitor], tuple[str, ...]]] = {
    "ddp": (ddp, (GLOO, OURS, WITH_HOOK, NOTHING, COMPUTE)),
    "ddp+views": (partial(ddp, views=True), (GLOO, OURS, WITH_HOOK, NOTHING, COMPUTE)),
    "fsdp2": (fsdp2, (GLOO, OURS, OWN_MEMORY)),
    "tensor-parallel": (tensor_parallel, (GLOO, OURS)),
    "pipeline": (pipeline, (GLOO, OURS)),
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench backends",
        description="Time a training step of torch's DDP, FSDP2, tensor parallelism and pipeline over gloo and over gradwire."
        " Run under torchrun.",
    )
    add = parser.add_argument
    programs = partial(names_of, tuple(PROGRAMS))
    add(
        "--programs",
        type=programs,
        default=list(PROGRAMS),
        help="comma-separated: ddp, ddp+views, fsdp2, tensor-parallel, pipeline",
    )
    add("--width", type=partial(count_from, 1), default=512, help="features of a sample (default 512)")
    add("--layers", type=partial(count_from, 1), default=6, help="layers, each of 8 width^2 parameters (default 6)")
    add_turns(parser, steps=2)
    add_results(parser)
    return parser.parse_args(arguments)


def measure(chosen: argparse.Namespace, program: str) -> list[BackendRow]:
    """Return the rows of a program, the same on all ranks."""
    build, backends = PROGRAMS[program]
    competitors = {backend: build(chosen, backend) for backend in backends}
    seconds = step_seconds(competitors, torch.device("cpu"), chosen.rounds, chosen.steps)
    return [
        BackendRow(
            program=program,
            backend=backend,
            world_size=hvd.size(),
            step_ms=1e3 * median_and_p99(seconds[backend])[0],
            as_gloo=float(np.median(seconds[GLOO]) / np.median(seconds[backend])),
            interval=None if backend == GLOO else speedup_interval(seconds[backend], seconds[GLOO]),
            beyond_of_gloo=beyond(seconds, backend),
            difference=None if backend in (NOTHING, COMPUTE) else difference(competitor, competitors[GLOO]),
        )
        for backend, competitor in competitors.items()
    ]


def beyond(seconds: dict[str, Times], backend: str) -> float | None:
    """Return BackendRow.beyond_of_gloo. None also if gloo takes no longer than `compute`."""
    if COMPUTE not in seconds:
        return None
    ours, gloo = (float(np.median(seconds[name] - seconds[COMPUTE])) for name in (backend, GLOO))
    return ours / gloo if gloo > 0 else None


def difference(competitor: BackendCompetitor, reference: BackendCompetitor) -> float:
    """Return the largest difference of parameters over all ranks, relative to the largest parameter."""
    expected = reference.parameters()
    off = (competitor.parameters() - expected).abs().max() / expected.abs().max()
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    return float(off)


def format_table(rows: Sequence[BackendRow], meta: dict[str, Any]) -> list[str]:
    width = max(len(row.backend) for row in rows)
    lines = [
        f"# {meta['layers']} layers, {meta['parameters'] / 1e6:.2f} M parameters, {SAMPLES} samples a rank,"
        f" world size {rows[0].world_size}, {meta['rounds']} turns of {meta['steps']} steps",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        f"# {'program':16} {'backend':{width}}  step (ms)  times as fast as gloo   overhead, of gloo's",
    ]
    for row in rows:
        part = "" if row.beyond_of_gloo is None else f"{row.beyond_of_gloo:.2f}"
        times = f"{row.as_gloo:.2f} {format_interval(row.interval)}"
        lines.append(f"  {row.program:16} {row.backend:{width}} {row.step_ms:10.2f}  {times:22} {part}".rstrip())
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1, on every rank, if parameters differ from those over gloo by more than TOLERANCE."""
    chosen = parse_arguments(arguments)
    join_ranks("cpu")
    share_cores()
    if "pipeline" in chosen.programs and chosen.layers % hvd.size():
        raise SystemExit(
            f"a pipeline needs equally many layers on each rank: {chosen.layers} layers, {hvd.size()} ranks"
        )
    rows = [row for program in chosen.programs for row in measure(chosen, program)]
    if hvd.rank() == 0:
        meta = {
            **software_and_machine(torch.device("cpu")),
            "parameters": sum(parameter.numel() for parameter in layers(chosen).parameters()),
            "samples": SAMPLES,
            **{name: getattr(chosen, name) for name in ("width", "layers", "steps", "rounds")},
            "time": TURNS,
        }
        print("\n".join(format_table(rows, meta)), flush=True)
        write_json(chosen.json, meta, rows)
    hvd.shutdown()
    return 0 if all(row.difference is None or row.difference <= TOLERANCE for row in rows) else 1

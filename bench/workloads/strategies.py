"""The ways to train a model on several ranks: each function makes a Trainee of a module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.bench.workloads.loop import Trainee
from gradwire.collectives import Communicator
from gradwire.collectives.diagnostics.timeline import Timeline

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW that applies weight decay to matrices only."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS)


def exchanged_bytes(module: nn.Module) -> float:
    """Return the bytes that a rank sends to average one float32 per parameter: 2(p-1)/p of their bytes."""
    size = hvd.size()
    return 2 * (size - 1) / size * 4 * sum(parameter.numel() for parameter in module.parameters())


def alone(module: nn.Module) -> Trainee:
    """Exchange nothing: each rank trains on its own share of the data."""
    return Trainee(module, adamw(module), wait_s=lambda: 0.0, in_step=False)


def ours(module: nn.Module, **options: Any) -> Trainee:
    """Average gradients by DistributedOptimizer. options: its other arguments."""
    optimizer = hvd.DistributedOptimizer(adamw(module), module.named_parameters(), **options)
    return Trainee(
        module,
        optimizer,
        wait_s=lambda: optimizer.communication_wait_s,
        sent_bytes=lambda steps: optimizer.stats.bytes_sent,
        report=lambda: str(optimizer.stats),
        plan=lambda: optimizer.exchange_plan,
        close=optimizer.close,
    )


def overlapping(module: nn.Module, **options: Any) -> Trainee:
    """Train as ours(), but delay each update to the next forward."""
    return ours(module, rule=hvd.rules.NextForward(module), **options)


def recorded(module: nn.Module) -> Trainee:
    """Train as ours(), and record all operations for a timeline that is not written."""
    communicator = Communicator()
    trainee = ours(module, process_set=communicator)
    communicator.record(Timeline(), "gradwire")
    return trainee


def committing(module: nn.Module) -> Trainee:
    """Train as ours(), and commit each step as elastic training does. hvd.elastic.run must call what trains."""
    trainee = ours(module)
    return replace(trainee, state=hvd.elastic.TorchState(module, trainee.optimizer))


def local_updates(module: nn.Module, rule: hvd.rules.LocalUpdates, **options: Any) -> Trainee:
    """Train as ours(), and average parameters now and then by a rule. options: the other arguments of DistributedOptimizer."""
    trainee = ours(module, rule=rule, **options)
    optimizer: Any = trainee.optimizer
    return replace(trainee, report=lambda: str(optimizer.rule.report()), warm_up=rule.warmup_steps, period=rule.every)


def server(module: nn.Module, quorum: int, **options: Any) -> Trainee:
    """Train by a ParameterServer, which updates with the gradients of `quorum` ranks. options: its other arguments."""
    optimizer = hvd.servers.ParameterServer(adamw(module), module.named_parameters(), quorum=quorum, **options)
    sent = exchanged_bytes(module)  # a step's gradients to the servers, and parameters from this rank's server
    return Trainee(
        module,
        optimizer,
        sent_bytes=lambda steps: sent * steps,
        report=lambda: str(optimizer.report()),
        close=optimizer.close,
        in_step=quorum == hvd.size(),
    )


def hogwild(module: nn.Module) -> Trainee:
    """Train the same parameters, in the shared memory of a host, without waiting."""
    optimizer = hvd.servers.Hogwild(adamw(module), module.named_parameters())
    return Trainee(module, optimizer, wait_s=lambda: 0.0, close=optimizer.close, in_step=False)


def ddp(module: nn.Module, backend: str | None = None, *, fp16: bool = False, bucket_view: bool = False) -> Trainee:
    """Train under torch's DDP. backend: of torch.distributed; None for the default. fp16: use torch's fp16 hook. bucket_view:
    keep gradients in DDP's buckets."""
    group = dist.new_group(backend=backend) if backend else None
    forward = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=bucket_view)
    if fp16:
        forward.register_comm_hook(None, fp16_compress_hook)
    sent = exchanged_bytes(module)
    return Trainee(module, adamw(module), forward, sent_bytes=lambda steps: sent * steps)


def hooked(module: nn.Module, **options: Any) -> Trainee:
    """Train under torch's DDP, whose buckets our hook averages without a codec. options: those of ddp()."""
    trainee, hook = ddp(module, **options), hvd.ddp_comm_hook("none")
    assert isinstance(trainee.forward, DistributedDataParallel)
    trainee.forward.register_comm_hook(None, hook)
    return replace(trainee, plan=lambda: hook.exchange_plan, close=hook.close)


def zero(module: nn.Module, **options: Any) -> Trainee:
    """Train under torch's DDP, with an AdamW whose state is divided among the ranks. options: those of ddp()."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a slow import

    groups = adamw(module).param_groups
    settings = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
    return replace(ddp(module, **options), optimizer=ZeroRedundancyOptimizer(settings, torch.optim.AdamW, betas=BETAS))

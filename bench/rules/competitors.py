"""The update rules that `python -m gradwire.bench rules` compares: their optimizers, and when their ranks have equal
parameters."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.collectives.compression.sparse import ChunkTopK
from gradwire.trainer.examples.loop import adamw
from gradwire.trainer.reducer.compression import NAMES, Compressor
from gradwire.trainer.servers.aggregator import Late

NONE = "none"
FRAGMENTS = 4
"""The number of fragments into which streaming divides the parameters. It exchanges one fragment at a time."""


@dataclass(frozen=True)
class RuleSettings:
    """The settings of the rules, from the options of `bench rules`."""

    every: int
    outer_lr: float
    outer_momentum: float
    warmup_steps: int
    warmup_codec: str
    staleness: int
    late: Late
    delay: int
    k: int

    def codec(self, name: str) -> Compressor:
        """Return the codec of a name. chunktopk has the k of the options and error feedback."""
        return hvd.ErrorFeedback(ChunkTopK(self.k)) if name == "chunktopk" else name


@dataclass(frozen=True)
class Competitor:
    """A model and the rule that trains it.

    forward: the module to call, which is the model or its wrapper. in_step: whether all ranks take the same number of steps.
    warmup_steps, period: all ranks hold the same parameters after warmup_steps steps, and after every period steps from then
    on. sent_bytes: the bytes that this rank has sent after a number of steps. wait_s: the time that this rank has waited for
    others; None if it is not known. report: the rule's own report at the end.
    """

    module: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    sent_bytes: Callable[[int], float]
    wait_s: Callable[[], float | None] = lambda: None
    report: Callable[[], str] = lambda: ""
    close: Callable[[], None] = lambda: None
    in_step: bool = True
    warmup_steps: int = 0
    period: int = 1


@dataclass(frozen=True)
class CompetitorSpec:
    """The name of one competitor of a run: RULE[+CODEC][@SHARE]. share: its share of the steps or the time of the run."""

    text: str
    rule: str
    codec: str
    share: float


def competitor_spec(text: str) -> CompetitorSpec:
    """Return the CompetitorSpec of a text. Raises argparse.ArgumentTypeError for an invalid one."""
    named, at, share = text.partition("@")
    rule, plus, codec = named.partition("+")
    codec = codec if plus else NONE
    if rule not in RULES:
        raise argparse.ArgumentTypeError(f"{rule!r} is not one of {', '.join(RULES)}")
    if codec not in NAMES or (codec != NONE and rule not in CODED):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a codec is one of {', '.join(NAMES)}, with {' or '.join(sorted(CODED))}"
        )
    try:
        portion = float(share) if at else 1.0
    except ValueError:
        portion = math.nan
    if not 0 < portion <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: after @ comes a share of the run, such as 0.6")
    return CompetitorSpec(text, rule, codec, portion)


def exchanged_bytes(module: nn.Module) -> float:
    """Return the bytes that a rank sends to average one float32 per parameter: 2(p-1)/p of their bytes."""
    size = hvd.size()
    return 2 * (size - 1) / size * 4 * sum(parameter.numel() for parameter in module.parameters())


def _alone(module: nn.Module, codec: str, settings: RuleSettings) -> Competitor:
    return Competitor(module, module, adamw(module), lambda steps: 0.0, wait_s=lambda: 0.0, in_step=False)


def _ddp(module: nn.Module, codec: str, settings: RuleSettings) -> Competitor:
    sent = exchanged_bytes(module)
    return Competitor(module, DistributedDataParallel(module), adamw(module), lambda steps: sent * steps)


def _synchronous(module: nn.Module, codec: str, settings: RuleSettings) -> Competitor:
    optimizer = hvd.DistributedOptimizer(adamw(module), module.named_parameters(), settings.codec(codec))
    return Competitor(
        module,
        module,
        optimizer,
        sent_bytes=lambda steps: optimizer.stats.bytes_sent,
        wait_s=lambda: optimizer.communication_wait_s,
        report=lambda: str(optimizer.stats),
        close=optimizer.close,
    )


def _local(
    module: nn.Module,
    codec: str,
    settings: RuleSettings,
    outer: torch.optim.Optimizer | None,
    *,
    fragments: int = 1,
    delay: int = 0,
) -> Competitor:
    optimizer = hvd.LocalUpdates(
        adamw(module),
        module.named_parameters(),
        every=settings.every,
        outer=outer,
        warmup_steps=settings.warmup_steps,
        warmup_codec=settings.codec(settings.warmup_codec),
        codec=settings.codec(codec),
        fragments=fragments,
        delay=delay,
    )
    return Competitor(
        module,
        module,
        optimizer,
        sent_bytes=lambda steps: optimizer.report().bytes_sent,
        wait_s=lambda: optimizer.communication_wait_s,
        report=lambda: str(optimizer.report()),
        close=optimizer.close,
        warmup_steps=settings.warmup_steps,
        period=settings.every,
    )


def _nesterov(module: nn.Module, settings: RuleSettings) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer."""
    momentum = settings.outer_momentum
    return torch.optim.SGD(module.parameters(), lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0)


def _streaming(module: nn.Module, codec: str, settings: RuleSettings) -> Competitor:
    outer = _nesterov(module, settings)
    return _local(module, codec, settings, outer, fragments=FRAGMENTS, delay=settings.delay)


def _served(module: nn.Module, quorum: int, *, staleness: int | None = None, late: Late = "weight") -> Competitor:
    optimizer = hvd.ParameterServer(
        adamw(module), module.named_parameters(), quorum=quorum, staleness=staleness, late=late
    )
    sent = exchanged_bytes(module)
    return Competitor(
        module,
        module,
        optimizer,
        sent_bytes=lambda steps: sent * steps,  # gradients to the servers, and parameters from this rank's server
        report=lambda: str(optimizer.report()),
        close=optimizer.close,
        in_step=quorum == hvd.size(),
    )


def _all_but_one() -> int:
    return max(1, hvd.size() - 1)


def _hogwild(module: nn.Module, codec: str, settings: RuleSettings) -> Competitor:
    optimizer = hvd.Hogwild(adamw(module), module.named_parameters())
    return Competitor(
        module, module, optimizer, lambda steps: 0.0, wait_s=lambda: 0.0, close=optimizer.close, in_step=False
    )


#: The functions that make a competitor from a model, the name of a codec and the settings.
RULES: dict[str, Callable[[nn.Module, str, RuleSettings], Competitor]] = {
    "alone": _alone,
    "ddp": _ddp,
    "synchronous": _synchronous,
    "average": lambda module, codec, settings: _local(module, codec, settings, None),
    "diloco": lambda module, codec, settings: _local(module, codec, settings, _nesterov(module, settings)),
    "streaming": _streaming,
    "server": lambda module, codec, settings: _served(module, hvd.size()),
    "quorum": lambda module, codec, settings: _served(module, _all_but_one(), late=settings.late),
    "stale": lambda module, codec, settings: _served(
        module, _all_but_one(), staleness=settings.staleness, late=settings.late
    ),
    "asynchronous": lambda module, codec, settings: _served(module, 1),
    "hogwild": _hogwild,
}
CODED = {"synchronous", "average", "diloco", "streaming"}
"""The rules whose exchanges can use a codec."""
UNLIKE = {"alone", "streaming", "quorum", "stale", "asynchronous", "hogwild"}
"""The rules whose ranks do not hold the same parameters at the end."""

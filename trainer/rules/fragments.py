"""A fragment, the parameters that local updates exchange together: their outer copies, and the outer optimizer that steps the
copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.partition import sums_inside
from gradwire.trainer.optimizers.copies import of_copies
from gradwire.trainer.reducer.compression import Cast, Encoding
from gradwire.trainer.reducer.replicas import ReplicaCheck, hash_of
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.streams import gpus, keep_for
from gradwire.trainer.rules.synchronous import Synchronous


class Fragment:
    """Holds the outer copies of some parameters, in float32 at least, so that small steps are not lost, and a copy of the outer
    optimizer, which steps them. Its gradients are the pseudo-gradients, which the synchronous rule exchanges. gpus: the GPUs of
    the parameters; exchange() may run on other streams than the other methods."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], outer: torch.optim.Optimizer, setup: Setup
    ) -> None:
        narrow = (torch.float16, torch.bfloat16)
        wide = [torch.float32 if parameter.dtype in narrow else parameter.dtype for parameter in parameters]
        self._parameters = parameters
        self._outer = [
            nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)
            for parameter, dtype in zip(parameters, wide, strict=True)
        ]
        self._optimizer = of_copies(outer, dict(zip(parameters, self._outer, strict=True)))
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            group for group in groups if group["params"]
        ]  # without those of other fragments
        self.rule = Synchronous(replace(setup, optimizer=self._optimizer))
        self.rule.add(names, self._outer)
        self.rule.reducer.planner.learn(range(len(self._outer)))  # the order does not matter, since all arrive together
        self.rule.start()
        for bucket in self.rule.buckets:
            bucket.place_gradients()
        named: dict[Tensor, str] = dict(zip(self._outer, names, strict=True))
        self._names = names
        self._marks: list[tuple[int, int]] | None = None
        self._trained: set[int] = set()  # the parameters that a step may have changed since the last move()
        self._merged_late: dict[int, Tensor] = {}  # what _merged() returns, where it depends on the parameter, too
        # By parameter, a value that no step has set, since the last move(), and whether it was set during an exchange.
        self._loaded: dict[int, tuple[Tensor, bool]] = {}
        self._moving: dict[int, tuple[Tensor, bool]] = {}  # the same before the last move()
        self.gpus = gpus(outer.device for outer in self._outer)
        self._check = ReplicaCheck(setup.communicator, self._optimizer, lambda: named)

    @torch.no_grad()
    def take_over(self) -> None:
        """Set the outer parameters to this rank's parameters."""
        for parameter, outer in zip(self._parameters, self._outer, strict=True):
            outer.copy_(parameter)

    def mark(self) -> None:
        """Note the parameters at the end of a step, so that look() finds changes after it."""
        self._marks = self._now()

    @torch.no_grad()
    def look(self, *, in_flight: bool) -> None:
        """Keep the values of parameters that something else than a step has changed since mark(), such as a load_state_dict()
        of the model, and note which ones the next step may change: torch also steps frozen ones that have gradients.
        in_flight: whether the fragment is being exchanged."""
        now = self._now()
        for index, (mark, before) in enumerate(zip(now, self._marks or now, strict=True)):
            if mark != before:
                self._loaded[index] = self._parameters[index].detach().clone(), in_flight
        self._marks = now
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad or parameter.grad is not None:
                self._trained.add(index)

    @torch.no_grad()
    def move(self) -> None:
        """Set the outer parameters' gradients, in the buckets, to this rank's pseudo-gradients: the values that the parameters
        had, minus the parameters. Parameters that no step may have changed have none."""
        self._moving, self._loaded = self._loaded, {}
        trained, self._trained = self._trained, set()
        for index, (parameter, outer) in enumerate(zip(self._parameters, self._outer, strict=True)):
            outer.requires_grad_(index in trained)
            if index not in trained:
                outer.grad = None
                continue
            begin = self._moving[index][0].to(outer.dtype) if index in self._moving else self._merged(index)
            if outer.grad is None:
                outer.grad = begin - parameter
            else:
                torch.sub(begin, parameter, out=outer.grad)

    def weigh(self, samples: float) -> None:
        """Set how many samples the pseudo-gradients stand for; NaN if a step was without weigh(), so that exchange() raises
        ValueError on all ranks."""
        self.rule.weigh(samples)

    def exchange(self, step: int) -> None:
        """Step the outer parameters by all ranks' pseudo-gradients. Raises ReplicasDiffer if they then differ between ranks."""
        self._agree()
        self.rule.synchronize()
        self._optimizer.step()
        self.rule.after_step()
        self.rule.reset()
        self._check.compare(step)

    @torch.no_grad()
    def _agree(self) -> None:
        """Set the outer parameters to values that all ranks have loaded alike since the last exchange. Changes that differ
        between ranks, such as those of clamp_(), become part of the pseudo-gradients. Include the parameters that move() has
        moved on any rank: a frozen one may have a gradient on some ranks only. Collective.

        Raises RuntimeError on all ranks if the values were loaded during the exchange of this fragment, whose result has then
        been merged into them.
        """
        mine = [[index, hash_of(value), late] for index, (value, late) in self._moving.items()]
        unmoved = [index for index, outer in enumerate(self._outer) if not outer.requires_grad]
        records = self._check.communicator.allgather_record((mine, unmoved))
        everyones = [loaded for loaded, _ in records]
        for index in set(unmoved) - set.intersection(*(set(theirs) for _, theirs in records)):
            self._outer[index].requires_grad_(True)
        alike = set.intersection(*({(index, value) for index, value, _ in theirs} for theirs in everyones))
        agreed = {index for index, _ in alike}
        if mixed := agreed & {index for theirs in everyones for index, _, late in theirs if late}:
            raise RuntimeError(
                f"rank {self._check.communicator.rank}: the parameter {self._names[min(mixed)]!r} was loaded while the "
                "pseudo-gradients of an earlier step were exchanged, so it has been mixed with the common parameters of that "
                "step: after a load_state_dict() of the model, call load_state_dict() of the optimizer, too"
            )
        for index, (value, _) in self._moving.items():
            outer, begin = self._outer[index], self._merged(index)
            if index in agreed:
                outer.copy_(torch.where(begin == value, outer, value.to(outer.dtype)))
                if self._merged_late.pop(index, None) is not None and begin.is_cuda:
                    keep_for(torch.cuda.current_stream(begin.device), [begin])
            elif outer.grad is not None:
                outer.grad.add_(begin - value)

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Set the parameters that move() has moved to (1 - alpha) * outer parameter + alpha * parameter; those that are frozen
        now to the outer parameter, since no later exchange might make them equal on all ranks."""
        for index, (parameter, outer) in enumerate(zip(self._parameters, self._outer, strict=True)):
            if not outer.requires_grad:
                continue
            own = alpha if parameter.requires_grad else 0.0
            wanted = outer if own == 0 else torch.lerp(outer, parameter.to(outer.dtype), own)
            parameter.copy_(wanted)
            if own and parameter.dtype != outer.dtype:
                self._merged_late[index] = outer - (wanted - parameter)
            else:
                self._merged_late.pop(index, None)

    def _merged(self, index: int) -> Tensor:
        """Return the outer parameter, less the rounding error with which merge() wrote it into the parameter. Movements are
        measured from this value; the error would become part of the pseudo-gradient otherwise."""
        parameter, outer = self._parameters[index], self._outer[index]
        if index in self._merged_late:
            return self._merged_late[index]
        return outer if parameter.dtype == outer.dtype else outer.to(parameter.dtype).to(outer.dtype)

    def _now(self) -> list[tuple[int, int]]:
        """Return numbers that change with the parameters: by operations in place, and by other memory."""
        return [(parameter._version, parameter.data_ptr()) for parameter in self._parameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the outer parameters, the state of the outer optimizer and its exchange, the values from which the parameters
        are subtracted, where they are not those of the outer parameters, and which parameters steps and move() have changed."""
        return {
            "outer": [outer.detach().clone() for outer in self._outer],
            "optimizer": self.rule.state_dict(),
            "merged": {index: value.clone() for index, value in self._merged_late.items()},
            "loaded": {index: [value.clone(), late] for index, (value, late) in self._loaded.items()},
            "trained": sorted(self._trained),
            "moved": [index for index, outer in enumerate(self._outer) if outer.requires_grad],
        }

    def load_state_dict(self, state: dict[str, Any], also: Sequence[dict[str, Any]], *, keep_rates: bool) -> None:
        """Load a state_dict(). also: those of ranks that no longer exist. keep_rates: whether to keep the outer optimizer's
        current rates, which depend on the world, in place of the saved ones. Raises the errors of the optimizer's
        load_state_dict()."""
        with torch.no_grad():
            for outer, saved in zip(self._outer, state["outer"], strict=True):
                outer.copy_(saved)
        for index, value in state.get("merged", {}).items():
            self._merged_late[index] = value.to(self._outer[index].device)
        for index, (value, late) in state.get("loaded", {}).items():
            self._loaded[index] = value.to(self._outer[index].device), late
        self._trained = set(state.get("trained", ()))
        if (moved := state.get("moved")) is not None:
            for index, outer in enumerate(self._outer):
                outer.requires_grad_(index in moved)
        rates = [group["lr"] for group in self._optimizer.param_groups] if keep_rates else []
        self.rule.load_state_dict(state["optimizer"], [other["optimizer"] for other in also])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=keep_rates):
            group["lr"] = rate


def cut(parameters: Sequence[Tensor], fragments: int) -> list[slice]:
    """Return `fragments` parts of the list, none of them empty, with about equal numbers of elements."""
    total = sum(parameter.numel() for parameter in parameters)
    cuts, before = [0], 0
    for index, parameter in enumerate(parameters):
        left = len(parameters) - index
        if index > cuts[-1] and (before >= len(cuts) * total / fragments or left == fragments - len(cuts)):
            cuts.append(index)
        if len(cuts) == fragments:
            break
        before += parameter.numel()
    return [slice(start, stop) for start, stop in zip(cuts, (*cuts[1:], len(parameters)), strict=True)]


def is_one_shot(encoding: Cast | Encoding) -> bool:
    """Return whether a one-shot codec sends the pseudo-gradients, so that every rank adds all codes."""
    return isinstance(encoding, Encoding) and isinstance(encoding.codec, Codec) and encoding.codec.one_shot


def averaging_outer(
    parameters: Sequence[Tensor], encodings: Sequence[Cast | Encoding], among: Communicator, inner: Communicator | None
) -> torch.optim.Optimizer:
    """Return the outer optimizer that averages parameters. encodings: of the pseudo-gradients of the parameters. Collective.

    The optimizer is SGD with rate 1, except for one-shot codecs. A one-shot code has few numbers, mostly at different places on
    every rank, so the mean over all ranks would be only a fraction of each number sent. With the number of different codes as
    the rate, the result is their sum. Each rank sends one code, or each host if its ranks sum inside. Ranks with the same
    `inner` ranks have the same pseudo-gradients, and so the same code.
    """
    hosts = among.topology.hosts
    encoders = hosts if sums_inside(hosts) else [[rank] for host in hosts for rank in host]
    codes = len(encoders)
    if inner is not None:
        first = min(inner.allgather_record(among.rank))  # identifies this rank's inner ranks
        firsts = among.allgather_record(first)
        codes = len({frozenset(firsts[rank] for rank in encoder) for encoder in encoders})
    kinds: dict[bool, list[Tensor]] = {}  # not by rate: on one rank both rates are 1, but checkpoints must fit
    for parameter, encoding in zip(parameters, encodings, strict=True):
        kinds.setdefault(is_one_shot(encoding), []).append(parameter)
    return torch.optim.SGD([{"params": kinds[kind], "lr": float(codes) if kind else 1.0} for kind in kinds])

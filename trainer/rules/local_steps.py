"""The rule of local updates: ranks step alone, and meet every so many steps.

Each rank trains a copy of its own. Every `every` steps the ranks average what their parameters have moved by since they
last met, and an outer optimizer applies that, as if it were a gradient, to the outer parameters, of which all ranks
hold the same (DiLoCo, Douillard et al. 2023). With an outer SGD of rate 1 that is averaging the parameters (local SGD,
Stich 2018). Where movements travel in codes of few numbers each, mostly other ones on every rank, the mean over all
ranks is a fraction of what the sender of a number wants; a rate of as many as there are different codes makes it the
sum of these. The outer optimizer is exchanged for like any other, by the synchronous rule, with its buckets, codecs and
checkpoints.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.partition import sums_inside
from gradwire.collectives.daemon import DaemonThread
from gradwire.trainer.gradients.agreement import check_settings
from gradwire.trainer.gradients.arguments import Average
from gradwire.trainer.gradients.combination import Combination
from gradwire.trainer.gradients.compression import Cast, Encoding, Policy
from gradwire.trainer.gradients.exchange import Passes
from gradwire.trainer.gradients.replicas import ReplicaCheck
from gradwire.trainer.optimizers.copies import of_copies
from gradwire.trainer.rules.rule import Rule, Setup
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.world import here

_log = logging.getLogger("gradwire")

KEY = "gradwire_local"
"""In the state_dict() of an optimizer with local updates."""


@dataclass(frozen=True)
class Locality:
    """Says how far ranks go alone.

    every: steps between two exchanges of the same parameters. outer: an optimizer of the same parameters, whose class,
    settings and state the outer one begins with; None to average. warmup_steps: in which gradients are averaged first.
    policy: what movements travel as. fragments: into how many parts the parameters are cut, which are exchanged one
    after the other. delay: for how many steps ranks go on while a fragment is exchanged. alpha: the share of its own
    parameters that a rank keeps of a fragment that is so late. inner: ranks that average their gradients in every step;
    None for none. owns_inner: whether nobody else uses that Communicator.
    """

    every: int
    outer: torch.optim.Optimizer | None
    warmup_steps: int
    policy: Policy
    fragments: int
    delay: int
    alpha: float
    inner: Communicator | None
    owns_inner: bool

    @property
    def described(self) -> dict[str, str]:
        """Return in words, by the names of arguments, what must be the same on all ranks."""
        codec, policy = self.policy.described
        groups = [] if self.outer is None else self.outer.param_groups
        settings = [{name: group[name] for name in group if name != "params"} for group in groups]
        return {
            **{name: str(getattr(self, name)) for name in ("every", "warmup_steps", "fragments", "delay", "alpha")},
            "codec": codec,
            "policy": policy,
            "outer": "none" if self.outer is None else f"{type(self.outer).__name__} {settings}",
            "inner": "none" if self.inner is None else "a process set",
        }


@dataclass(frozen=True)
class Sent:
    """Says what this rank has sent since the rule was made, in bytes, and in how many steps.

    warmup_steps, warmup_bytes: of averaged gradients. steps: after the warm-up. movement_bytes: of movements in these,
    and movement_bytes_uncompressed what they would have been without a codec. inner_bytes: of gradients to inner ranks.
    """

    warmup_steps: int = 0
    warmup_bytes: int = 0
    steps: int = 0
    movement_bytes: int = 0
    movement_bytes_uncompressed: int = 0
    inner_bytes: int = 0


class LocalUpdates(Rule):
    """Averages gradients during the warm-up (and among inner ranks after it), and movements from then on."""

    def __init__(self, setup: Setup, locality: Locality) -> None:
        super().__init__(setup)
        self._locality = locality
        self._outer_combination = replace(setup.combination, op=Average, predivide=1.0)
        self._inner_combination = (
            None if locality.inner is None else replace(setup.combination, communicator=locality.inner)
        )
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._fragments: list[Fragment] = []
        self._averaging: Synchronous | None = None
        self._pending: _Pending | None = None
        self._thread = DaemonThread("gradwire-local") if locality.delay else None
        self._waited_s = 0.0
        self._has_common = False  # whether the outer parameters are what all ranks have in common
        self.step = 0
        """How many steps the optimizer has taken."""
        self._warmup_taken = self._alone_taken = 0  # since this was made: a checkpoint sets `step`, and sends nothing

    @property
    def wait_s(self) -> float:
        rules = [fragment.rule for fragment in self._fragments if not self._locality.delay]
        return self._waited_s + sum(rule.wait_s for rule in (*rules, *filter(None, [self._averaging])))

    @property
    def sent(self) -> Sent:
        """Return what this rank has sent so far."""
        warmup, movements = self.setup.combination.traffic.stats, self._outer_combination.traffic.stats
        inner = self._inner_combination
        return Sent(
            warmup_steps=self._warmup_taken,
            warmup_bytes=warmup.bytes_sent,
            steps=self._alone_taken,
            movement_bytes=movements.bytes_sent,
            movement_bytes_uncompressed=movements.bytes_uncompressed,
            inner_bytes=0 if inner is None else inner.traffic.stats.bytes_sent,
        )

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        if self._fragments or self._averaging is not None:
            raise ValueError(f"{here()}parameters cannot be added to an optimizer with local updates once it is made")
        self._names += names
        self._parameters += parameters

    def start(self) -> None:
        check_settings(self.communicator, "LocalUpdates", self._locality.described)
        self._enter(0)

    def synchronize(self) -> None:
        self._begin()
        if self._averaging is not None:
            self._averaging.synchronize()

    def _begin(self) -> None:
        """Take the parameters for the common ones before the first step, which may have been broadcast or loaded since."""
        if not self._has_common:
            for fragment in self._fragments:
                fragment.take_over()
            self._has_common = True

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        self._begin()
        return super().evaluate(closure) if self._averaging is None else self._averaging.evaluate(closure)

    def reset(self) -> None:
        if self._averaging is not None:
            self._averaging.reset()

    def after_step(self) -> None:
        self.step += 1
        if self._averaging is not None:
            self._averaging.after_step()
        if self.step <= self._locality.warmup_steps:
            self._warmup_taken += 1
            if self.step == self._locality.warmup_steps:
                self._enter(self.step)
            return
        self._alone_taken += 1
        if self._pending is not None and self._pending.merge_at == self.step:
            self._merge()
        for number, fragment in enumerate(self._fragments):
            if self._is_due(number):
                self._exchange(fragment)

    def _is_due(self, number: int) -> bool:
        """Return whether a fragment is exchanged after this step: fragments take turns, evenly spread over `every`."""
        every, fragments = self._locality.every, self._locality.fragments
        return (self.step - self._locality.warmup_steps - (number + 1) * every // fragments) % every == 0

    def _enter(self, step: int) -> None:
        """Enter the phase to which a step belongs: that of averaging gradients, or that of local updates."""
        self.step = step
        self._waited_s = self.wait_s  # which is to include that of the rules that end here
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        for fragment in self._fragments:
            fragment.rule.close()
        self._fragments = []
        locality = self._locality
        if step < locality.warmup_steps:
            self._averaging = self._averaged(self.setup.combination)
            return
        if self._inner_combination is not None:
            self._averaging = self._averaged(self._inner_combination)
        setup = replace(self.setup, combination=self._outer_combination, policy=locality.policy, passes=Passes(1))
        cut = _cut(self._parameters, locality.fragments)
        outer = locality.outer or self._averaging_outer()
        self._fragments = [Fragment(self._names[part], self._parameters[part], outer, setup) for part in cut]

    def _averaging_outer(self) -> torch.optim.Optimizer:
        """Return the outer optimizer that averages: what travels in one shot over those that send a number, if that is one.
        Collective."""
        codes = self._different_codes()
        kinds: dict[bool, list[Tensor]] = {}  # not by rate: on one rank both are 1, and checkpoints of several must fit
        for name, parameter in zip(self._names, self._parameters, strict=True):
            kinds.setdefault(is_one_shot(self._locality.policy.encoding(name, parameter)), []).append(parameter)
        return torch.optim.SGD(
            [{"params": kinds[one_shot], "lr": float(codes) if one_shot else 1.0} for one_shot in kinds]
        )

    def _different_codes(self) -> int:
        """Return how many different codes are sent of the same movements: one by each rank, or by each host where its ranks
        sum inside. Inner ranks move alike, so the codes of the same sets of these are the same code. Collective."""
        hosts = self.communicator.topology.hosts
        encoders = hosts if sums_inside(hosts) else [[rank] for host in hosts for rank in host]
        if self._locality.inner is None:
            return len(encoders)
        first = min(self._locality.inner.allgather_record(self.communicator.rank))  # stands for this rank's set
        firsts = self.communicator.allgather_record(first)
        return len({frozenset(firsts[rank] for rank in encoder) for encoder in encoders})

    def _averaged(self, combination: Combination) -> Synchronous:
        """Return the rule that averages gradients among these ranks."""
        rule = Synchronous(replace(self.setup, combination=combination))
        rule.add(self._names, self._parameters)
        rule.start()
        return rule

    def _exchange(self, fragment: Fragment) -> None:
        fragment.move()
        step = self.step
        if self._thread is None:
            fragment.exchange(step)
            fragment.hand_out(0.0)
        else:
            done = self._thread.submit(lambda: fragment.exchange(step))
            self._pending = _Pending(self._fragments.index(fragment), step + self._locality.delay, done)

    def _merge(self) -> None:
        """Wait for the fragment that is on its way, and hand it out."""
        pending = self._settled()
        if pending is not None:
            self._pending = None
            self._fragments[pending.fragment].hand_out(self._locality.alpha)

    def _settled(self) -> _Pending | None:
        """Return what is on its way, once it has been exchanged."""
        if self._pending is not None and self._pending.done is not None:
            begin = time.perf_counter()
            try:
                self._pending.done.result()  # within the deadlines of its operations
            finally:
                self._waited_s += time.perf_counter() - begin
            self._pending = replace(self._pending, done=None)
        return self._pending

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's, and under KEY where this rank stands: another on every rank where there is a codec."""
        pending = self._settled()
        state = self.setup.optimizer.state_dict() if self._averaging is None else self._averaging.state_dict()
        return {
            **state,
            KEY: {
                "step": self.step,
                "pending": None if pending is None else (pending.fragment, pending.merge_at),
                "fragments": [fragment.state_dict() for fragment in self._fragments],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Go on from a state_dict(), collectively; without KEY, begin anew. Raises ValueError on all ranks, with nothing
        loaded, where they were given different steps, other fragments than these, or one what cannot be loaded."""
        self._settled()
        before: dict[str, Any] = {}

        def look() -> list[Any] | None:
            before.update(self.state_dict())
            return self._label([state_dict, *also])

        for rank, theirs in enumerate(everyones := self._on_all(look)):
            if theirs != everyones[0]:
                raise ValueError(
                    f"{here()}load_state_dict: ranks 0 and {rank} were given states of different steps or settings "
                    f"(step, fragment on its way, fragments: {everyones[0]} and {theirs})"
                )
        try:
            self._take(state_dict, also)
        except ValueError:
            self._take(before, ())
            raise

    def _on_all(self, function: Callable[[], Any]) -> list[Any]:
        """Return what a function returns on every rank, of what JSON has. Raises ValueError on all ranks where it fails on
        any. Collective."""
        value, fault = None, ""
        try:
            value = function()
        except Exception as error:  # told to the others, who would wait
            fault = f"{type(error).__name__}: {error}"
        gathered = self.communicator.allgather_record((value, fault))
        for rank, (_, theirs) in enumerate(gathered):
            if theirs:
                raise ValueError(f"{here()}load_state_dict failed on rank {rank}, and nothing was loaded ({theirs})")
        return [theirs for theirs, _ in gathered]

    def _label(self, given: Sequence[dict[str, Any]]) -> list[Any] | None:
        """Return step, fragment on its way and number of fragments of states of one checkpoint; None where these are without
        KEY. Raises ValueError, or what looking into them raises, where they are damaged or not of these parameters."""
        labels = [self._label_of(state_dict[KEY]) if KEY in state_dict else None for state_dict in given]
        if any(label != labels[0] for label in labels):
            raise ValueError(f"also: of other steps or settings (step, fragment on its way, fragments: {labels})")
        return labels[0]

    def _label_of(self, part: dict[str, Any]) -> list[Any]:
        step, pending, fragments = part["step"], part["pending"], part["fragments"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a whole number >= 0, not {step!r}")
        cut = _cut(self._parameters, self._locality.fragments) if step >= self.warmup_steps else []
        if len(fragments) != len(cut):
            raise ValueError(
                f"saved with {len(fragments)} fragments after step {step}, which is not what "
                f"warmup_steps={self.warmup_steps} and fragments={self._locality.fragments} make"
            )
        for saved, mine in zip(fragments, cut, strict=True):
            shapes = [list(outer.shape) for outer in saved["outer"]], [list(p.shape) for p in self._parameters[mine]]
            if shapes[0] != shapes[1]:
                raise ValueError(f"saved outer parameters of shapes {shapes[0]}, not {shapes[1]}")
            if "optimizer" not in saved:
                raise ValueError("a fragment is without its outer optimizer")
        if pending is None:
            return [step, None, len(fragments)]
        number, merge_at = pending
        if number not in range(len(fragments)) or type(merge_at) is not int or merge_at <= step:
            raise ValueError(f"after step {step}, fragment {number!r} cannot be on its way until step {merge_at!r}")
        return [step, [number, merge_at], len(fragments)]

    def _take(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Go on from states that have a label, the same on all ranks. Collective. Raises ValueError on all ranks, with some
        of it loaded, where a part cannot be loaded on one."""
        part: dict[str, Any] | None = state_dict.get(KEY)
        step = 0 if part is None else part["step"]
        self._pending = None
        self._has_common = step > 0
        self._enter(step)
        if self._averaging is not None:
            self._on_all(functools.partial(self._averaging.load_state_dict, state_dict, also))
        else:
            state = {key: value for key, value in state_dict.items() if key != KEY}
            self._on_all(functools.partial(self.setup.optimizer.load_state_dict, state))
        if part is None:
            return
        keep_rates = self._locality.outer is None
        for number, fragment in enumerate(self._fragments):
            mine, *others = [each[KEY]["fragments"][number] for each in (state_dict, *also)]
            self._on_all(functools.partial(fragment.load_state_dict, mine, others, keep_rates=keep_rates))
        if part["pending"] is not None:
            fragment_number, merge_at = part["pending"]
            self._pending = _Pending(fragment_number, merge_at, None)

    @property
    def warmup_steps(self) -> int:
        return self._locality.warmup_steps

    def close(self) -> None:
        try:
            self._settled()
        except CollectiveError as error:
            _log.warning("gradwire: %sthe last exchange of local updates has failed: %s", here(), error)
        if self._averaging is not None:
            self._averaging.close()
        for fragment in self._fragments:
            fragment.rule.close()
        if self._thread is not None:
            self._thread.close()
        if self._locality.inner is not None and self._locality.owns_inner:
            self._locality.inner.close()


@dataclass(frozen=True)
class _Pending:
    """Stands for a fragment on its way: which, after which step it is merged, and what tells that it has come."""

    fragment: int
    merge_at: int
    done: Future[None] | None


class Fragment:
    """Holds some parameters' outer copies, with the outer optimizer that steps them."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], outer: torch.optim.Optimizer, setup: Setup
    ) -> None:
        self._parameters = list(parameters)
        self._outer = [nn.Parameter(_widened(parameter)) for parameter in parameters]
        self._optimizer = of_copies(outer, dict(zip(parameters, self._outer, strict=True)))
        filled = [
            group for group in self._optimizer.param_groups if group["params"]
        ]  # the others are of other fragments
        self._optimizer.param_groups = filled
        self.rule = Synchronous(replace(setup, optimizer=self._optimizer))
        self.rule.add(names, self._outer)
        self.rule.bucketing.learn(range(len(self._outer)))  # any order will do, as all arrive together
        self.rule.start()
        named: dict[Tensor, str] = dict(zip(self._outer, names, strict=True))
        self._check = ReplicaCheck(setup.combination.communicator, self._optimizer, lambda: named, every=1)

    @torch.no_grad()
    def move(self) -> None:
        """Set the outer parameters' gradients to by how much this rank's parameters are below them: in place from the second
        time on, where the gradients lie in what is exchanged."""
        for parameter, outer in zip(self._parameters, self._outer, strict=True):
            if outer.grad is None:
                outer.grad = outer - parameter
            else:
                torch.sub(outer, parameter, out=outer.grad)

    def exchange(self, step: int) -> None:
        """Step the outer parameters by all ranks' movements. Raises ReplicasDiffer where ranks then hold different
        ones."""
        self.rule.synchronize()
        self._optimizer.step()
        self.rule.after_step()
        self.rule.reset()
        self._check.compare(step)

    @torch.no_grad()
    def take_over(self) -> None:
        """Set the outer parameters to this rank's own."""
        for parameter, outer in zip(self._parameters, self._outer, strict=True):
            outer.copy_(parameter)

    @torch.no_grad()
    def hand_out(self, alpha: float) -> None:
        """Give the parameters the outer ones' values, but for the share alpha of their own."""
        for parameter, outer in zip(self._parameters, self._outer, strict=True):
            parameter.copy_(outer if alpha == 0 else torch.lerp(outer, parameter.to(outer.dtype), alpha))

    def state_dict(self) -> dict[str, Any]:
        """Return the outer parameters and what the outer optimizer and its exchange remember."""
        return {"outer": [outer.detach().clone() for outer in self._outer], "optimizer": self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any], also: Sequence[dict[str, Any]], *, keep_rates: bool) -> None:
        """Go on from a state_dict(), and `also` of ranks that are no more. keep_rates: whether the outer optimizer's rates are
        those of this world, and not the saved ones. Raises what an optimizer raises that cannot load its own."""
        with torch.no_grad():
            for outer, saved in zip(self._outer, state["outer"], strict=True):
                outer.copy_(saved)
        rates = [group["lr"] for group in self._optimizer.param_groups] if keep_rates else []
        self.rule.load_state_dict(state["optimizer"], [other["optimizer"] for other in also])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=keep_rates):
            group["lr"] = rate


def is_one_shot(encoding: Cast | Encoding) -> bool:
    """Return whether movements travel in codes of which every rank adds up all."""
    return isinstance(encoding, Encoding) and isinstance(encoding.codec, Codec) and encoding.codec.one_shot


def _widened(parameter: Tensor) -> Tensor:
    """Return a copy in which small steps are not lost: in float32 at least."""
    wide = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    return parameter.detach().to(wide, copy=True)


def _cut(parameters: Sequence[Tensor], fragments: int) -> list[slice]:
    """Return so many parts of the list, none of them empty, about equal in the number of elements."""
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

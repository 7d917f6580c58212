"""The rule of local updates: ranks step by themselves, and exchange their pseudo-gradients at intervals.

Each rank trains its own copy of the model. Every `every` steps, the ranks average their pseudo-gradients: the parameters at the
last exchange minus the parameters now. An outer optimizer applies the average, as if it were a gradient, to the outer parameters,
which are equal on all ranks (DiLoCo, Douillard et al. 2023). With an outer SGD of rate 1, this averages the parameters (local
SGD, Stich 2018). The synchronous rule exchanges the pseudo-gradients like gradients, with its buckets, codecs and checkpoints.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.control.membership import Membership
from gradwire.trainer.checkpoint import agree, need, need_whole, on_all_ranks, without
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.arguments import Average
from gradwire.trainer.reducer.compression import Compression, Compressor, Policy
from gradwire.trainer.reducer.plans import ExchangePlan
from gradwire.trainer.reducer.setup import Passes, Setup
from gradwire.trainer.reducer.streams import Background, Running
from gradwire.trainer.reducer.traffic import ExchangeStats, Traffic
from gradwire.trainer.rules.fragments import Fragment, averaging_outer, cut, is_one_shot
from gradwire.trainer.rules.local_report import LocalReport
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.process_sets import ProcessSetLike
from gradwire.trainer.world.world import current_world, names_rank

_log = logging.getLogger("gradwire")

KEY = "gradwire_local"
"""The key of this rule's state in the state_dict() of an optimizer with local updates."""


@dataclass(frozen=True)
class LocalUpdates:
    """The rule of local updates: every rank steps alone, and the ranks exchange the changes of their parameters once in `every`
    steps. docs/guides/local-updates.md is the guide.

    In the first `warmup_steps` steps, gradients are averaged, as without this rule. After that, only the ranks of the same
    `inner` set exchange gradients. Once in `every` steps, all ranks average their *pseudo-gradients*, that is, the parameters
    at the last exchange minus the parameters now. The outer optimizer applies the average to the *common parameters*, a copy
    that is equal on all ranks. With an outer Nesterov SGD of rate 0.7 and momentum 0.9 this is DiLoCo (Douillard et al. 2023);
    with outer=None the parameters are averaged.

    Replicas must start equal (broadcast_parameters before the first step). Right after an exchange, they are equal again,
    or with several fragments or a delay, nearly equal. Validate, and end training, when a multiple of `every` steps
    has followed the warm-up. After each exchange the ranks compare hashes of the common parameters and of the outer optimizer's
    state. If the hashes differ, all ranks raise ReplicasDiffer; so does check_replicas_every= between exchanges, when the ranks
    have different parameters.

    The compression= and policy= of the optimizer are for the gradients of the warm-up, and among inner ranks. op= must be
    Average. `optimizer.rule.report(batch_per_rank)` returns the costs so far, a LocalReport.

    Every rank saves its own state_dict() and parameters. On the same number of ranks, training resumes bit for bit. On
    another number, every rank loads the state_dict() and parameters of any rank, and the residuals are redistributed as by
    DistributedOptimizer. load_state_dict() is collective, and raises ValueError on all ranks, with nothing loaded, if any
    of them cannot load its state.

    every: the number of steps from one exchange to the next.
    outer: an optimizer of the same parameters, as a template: its class, settings and state are used. None averages the
    parameters. With compression="chunktopk", None sums the pseudo-gradients, because few ranks send the same elements.
    warmup_steps: the number of synchronous steps at the start.
    compression, policy: the compression of pseudo-gradients, as compression= and policy= of DistributedOptimizer, for
    parameters of any size; not "auto". The error feedback of "chunktopk" takes the place of outer momentum (SparseLoCo, 2025).
    fragments: the number of parts of the parameters, which are exchanged in turn, each once in `every` steps.
    delay: the number of steps that a rank takes while a fragment is exchanged.
    alpha: the weight of a rank's own parameters after such a delay: alpha * own + (1 - alpha) * common parameters.
    inner: a process set that averages gradients in every step, such as the ranks of a host; the ranks of each host pass
    their own process set.

    Raises ValueError or TypeError for invalid arguments; the optimizer does so for those that do not fit its parameters.
    """

    every: int
    outer: torch.optim.Optimizer | None = None
    warmup_steps: int = 0
    compression: Compressor = Compression.none
    policy: Mapping[str, Compressor] | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.5
    inner: ProcessSetLike = None

    @names_rank
    def __post_init__(self) -> None:
        for name in ("every", "warmup_steps", "fragments", "delay"):
            value, least = getattr(self, name), 1 if name in ("every", "fragments") else 0
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments} must be at most every={self.every}")
        if self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay={self.delay} must be less than every // fragments = {self.every // self.fragments}: one fragment "
                "is in flight at a time"
            )
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, not {self.alpha!r}")
        if not isinstance(self.outer, torch.optim.Optimizer | None):
            raise TypeError(f"outer must be a torch.optim.Optimizer or None, not {type(self.outer).__name__}")
        if self.outer is None:
            _check_averaging(self.policy_of_pseudo_gradients)

    def __call__(self, setup: Setup) -> LocalSteps:
        parameters = tensors_of(setup.optimizer.param_groups)
        if self.fragments > len(parameters):
            raise ValueError(f"fragments={self.fragments} must be at most the number of parameters, {len(parameters)}")
        if self.outer is not None and set(tensors_of(self.outer.param_groups)) != set(parameters):
            raise ValueError("outer must be an optimizer of the same parameters as optimizer")
        inner = self.inner
        if not isinstance(inner, Communicator | None):
            inner = current_world().open_communicator(inner, tensors=parameters)
        try:
            return LocalSteps(setup, self, inner)
        except BaseException:
            if inner is not None and inner is not self.inner:
                inner.close()
            raise

    @property
    def policy_of_pseudo_gradients(self) -> Policy:
        """Return the policy of pseudo-gradients, in which compression= applies to parameters of any size."""
        by_pattern = dict(self.policy or {})
        return Policy(Compression.none, by_pattern if "*" in by_pattern else {**by_pattern, "*": self.compression})

    @property
    def described(self) -> str:
        """Return the rule and its settings as text, which must be equal on all ranks."""
        codec, policy = self.policy_of_pseudo_gradients.described
        groups = [] if self.outer is None else self.outer.param_groups
        settings = [{name: group[name] for name in group if name != "params"} for group in groups]
        outer = "none" if self.outer is None else f"{type(self.outer).__name__} {settings}"
        numbers = {name: getattr(self, name) for name in ("every", "warmup_steps", "fragments", "delay", "alpha")}
        inner = "none" if self.inner is None else "a process set"
        given = {**numbers, "compression": codec, "policy": policy, "outer": outer, "inner": inner}
        return f"LocalUpdates({', '.join(f'{name}={value}' for name, value in given.items())})"


class LocalSteps(Rule):
    """Averages gradients during the warm-up (and among inner ranks after it), and pseudo-gradients from then on.

    step: the number of steps of the optimizer, including those before a checkpoint.
    """

    shares_state = False

    def __init__(self, setup: Setup, settings: LocalUpdates, inner: Communicator | None) -> None:
        """inner: the Communicator of settings.inner."""
        super().__init__(setup)
        if setup.op != Average:
            raise ValueError(f"LocalUpdates averages, and does not support op={setup.op!r}")
        self._settings = settings
        self._policy = settings.policy_of_pseudo_gradients
        self.can_move = inner is None
        self._outer = replace(
            setup, predivide=1.0, policy=self._policy, passes=Passes(1), traffic=Traffic(setup.communicator)
        )
        self._inner = None if inner is None else replace(setup, communicator=inner, traffic=Traffic(inner))
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._averaging: Synchronous | None = None
        self._fragments: list[Fragment] = []
        self._pending: tuple[int, int] | None = None  # (fragment that is exchanged, step after which it is merged)
        self._running: Running | None = None  # the exchange of that fragment, until it has been waited for
        self._background = Background("gradwire-local", own_streams=True) if settings.delay else None
        self._waited_s = 0.0
        self._looks = True  # whether to look for parameters that something else than a step has changed
        self._weighs = False  # whether weigh() was ever called
        self._alone: Setup | None = None  # with a Communicator of this rank alone, for weights without inner ranks
        # By fragment, those of this rank since the last exchange; NaN if a step was without weigh().
        self._samples: list[float] = []
        self._has_common = False  # whether the outer parameters are equal on all ranks
        self.step = self._warmup_taken = self._alone_taken = 0
        self._began = time.perf_counter()

    @property
    def wait_s(self) -> float:
        rules = [fragment.rule for fragment in self._fragments if not self._settings.delay]
        return self._waited_s + sum(rule.wait_s for rule in (*rules, *filter(None, [self._averaging])))

    def report(self, batch_per_rank: int | None = None) -> LocalReport:
        """Return the costs of local updates so far. batch_per_rank: this rank's batch size, for the report."""
        warmup, moved, inner = self._sent
        alone = max(1, self._alone_taken)
        return LocalReport(
            steps=self.step,
            warmup_bytes_per_step=warmup.bytes_sent / max(1, self._warmup_taken),
            bytes_per_step=moved.bytes_sent / alone,
            inner_bytes_per_step=inner.bytes_sent / alone,
            bytes_sent=self.stats.bytes_sent,
            bytes_saved=moved.ratio,
            wait_share=self.wait_s / (time.perf_counter() - self._began),
            batch_per_rank=batch_per_rank,
            global_batch=None if batch_per_rank is None else batch_per_rank * self.communicator.size,
        )

    @property
    def _sent(self) -> tuple[ExchangeStats, ExchangeStats, ExchangeStats]:
        """Return the counts of bytes that this rank has sent so far: of gradients in the warm-up, of pseudo-gradients, and of
        gradients to inner ranks."""
        inner = ExchangeStats() if self._inner is None else self._inner.traffic.stats
        return self.setup.traffic.stats, self._outer.traffic.stats, inner

    @property
    def stats(self) -> ExchangeStats:
        sent = self._sent
        return ExchangeStats(
            sum(each.exchanges for each in sent),
            sum(each.bytes_sent for each in sent),
            sum(each.bytes_uncompressed for each in sent),
        )

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        if self._fragments or self._averaging is not None:
            raise ValueError("parameters cannot be added to or removed from an optimizer with local updates")
        self._names += names
        self._parameters += parameters

    def start(self) -> None:
        self._policy.checked(self._names)
        self._enter(0)

    def weigh(self, samples: float | Tensor) -> None:
        """Set how many samples the gradients of the next backward() stand for. Pseudo-gradients stand for the samples of all
        steps since the last exchange. A rank without samples in a step does not change its parameters."""
        if self._averaging is None:  # as among inner ranks: passes are averaged over their samples
            self._alone = self._alone or _alone(self.setup, self._parameters)
            self._averaging = self._averaged(self._alone)
        self._averaging.weigh(samples)
        self._weighs = True

    @property
    def weighs(self) -> bool:
        return self._weighs

    def synchronize(self) -> None:
        self._begin()
        if self._averaging is not None:
            self._averaging.synchronize()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        self._begin()
        self._looks = False  # since an optimizer may change parameters before it calls the closure again
        return super().evaluate(closure) if self._averaging is None else self._averaging.evaluate(closure)

    def reset(self) -> None:
        if self._averaging is not None:
            self._averaging.reset()

    def after_step(self) -> None:
        self._after_step()
        self._looks = True
        for fragment in self._fragments:
            fragment.mark()

    def _after_step(self) -> None:
        self.step += 1
        if self._averaging is not None:
            self._averaging.after_step()
        if self.step <= self._settings.warmup_steps:
            self._warmup_taken += 1
            if self.step == self._settings.warmup_steps:
                self._enter(self.step)
            return
        self._alone_taken += 1
        mine = self._averaging.reducer.weights.samples if self._weighs and self._averaging is not None else math.nan
        self._samples = [samples + mine for samples in self._samples]
        if self._pending is not None and self._pending[1] == self.step:
            self._merge(self._pending[0])
        for number in range(len(self._fragments)):
            if self._is_due(number):
                self._exchange(number)

    def _begin(self) -> None:
        """Find parameters that were loaded since the last step. Before the first step, set the outer parameters to them."""
        if not self._has_common:
            for fragment in self._fragments:
                fragment.take_over()
            self._has_common = True
        for number, fragment in enumerate(self._fragments if self._looks else ()):
            fragment.look(in_flight=self._pending is not None and self._pending[0] == number)

    def _is_due(self, number: int) -> bool:
        """Return whether a fragment is exchanged after this step: fragments take turns, evenly spread over `every`."""
        every, fragments = self._settings.every, self._settings.fragments
        return (self.step - self._settings.warmup_steps - (number + 1) * every // fragments) % every == 0

    def _exchange(self, number: int) -> None:
        """Exchange a fragment: at once, or with a delay in the background."""
        fragment, step = self._fragments[number], self.step
        fragment.move()
        if self._weighs:
            fragment.weigh(self._samples[number])
        self._samples[number] = 0.0
        if self._background is None:
            fragment.exchange(step)
            fragment.merge(0.0)
        else:
            self._running = self._background.submit(lambda: fragment.exchange(step), fragment.gpus)
            self._pending = number, step + self._settings.delay

    def _merge(self, number: int) -> None:
        """Wait for the fragment that is being exchanged, and merge it into the parameters."""
        self._settle()
        self._pending = None
        self._fragments[number].merge(self._settings.alpha)

    def _settle(self) -> None:
        """Wait until the exchange of a fragment that is running is done."""
        if self._running is not None:
            begin = time.perf_counter()
            running, self._running = self._running, None
            try:
                running.wait()  # within the deadlines of its operations
            except CollectiveError:
                self._running = running  # later calls raise it, too
                raise
            finally:
                self._waited_s += time.perf_counter() - begin

    def _enter(self, step: int) -> None:
        """Enter the phase to which a step belongs: the averaging of gradients, or local updates. Collective."""
        self.step = step
        self._waited_s = self.wait_s  # includes the waits of the rules that end here
        self._close_rules()
        self._averaging, self._fragments = None, []
        settings = self._settings
        if step < settings.warmup_steps:
            self._averaging = self._averaged(self.setup)
            return
        if (among := self._inner or (self._alone if self._weighs else None)) is not None:
            self._averaging = self._averaged(among)
        outer = settings.outer
        if outer is None:
            encodings = list(map(self._policy.encoding, self._names, self._parameters))
            inner = None if self._inner is None else self._inner.communicator
            outer = averaging_outer(self._parameters, encodings, self.communicator, inner)
        parts = cut(self._parameters, settings.fragments)
        self._fragments = [Fragment(self._names[part], self._parameters[part], outer, self._outer) for part in parts]
        self._samples = [0.0] * len(parts)

    def _averaged(self, setup: Setup) -> Synchronous:
        """Return the rule that averages gradients among the ranks of a setup."""
        rule = Synchronous(setup)
        rule.add(self._names, self._parameters)
        rule.start()
        rule.reducer.weights.is_used = self._weighs
        rule.reducer.weights.may_be_empty = setup is not self.setup
        return rule

    def _close_rules(self) -> None:
        for rule in (*filter(None, [self._averaging]), *(fragment.rule for fragment in self._fragments)):
            rule.close()

    def close(self) -> None:
        try:
            self._settle()
        except CollectiveError as error:
            _log.warning("gradwire: the last exchange of local updates has failed: %s", error)
        finally:
            self._close_rules()
            if self._background is not None:
                self._background.close()
            if self._alone is not None:
                self._alone.communicator.close()
            if self._inner is not None and self._inner.communicator is not self._settings.inner:
                self._inner.communicator.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under KEY the rule's state, which differs between ranks if there is a codec."""
        self._settle()
        state = self.setup.optimizer.state_dict() if self._averaging is None else self._averaging.state_dict()
        fragments = [fragment.state_dict() for fragment in self._fragments]
        samples = list(self._samples) if self._weighs else None
        return {
            **state,
            KEY: {"step": self.step, "pending": self._pending, "fragments": fragments, "samples": samples},
        }

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load a state_dict(). If it has no KEY, restart the rule. Collective. Raises ValueError on all ranks, with nothing
        loaded, if the states of ranks are of different steps or other fragments, or if one cannot be loaded."""
        self._settle()
        before: dict[str, Any] = {}
        self._on_all(lambda: before.update(self.state_dict()))
        agree(self.communicator, KEY, [state_dict, *also], self._read)
        try:
            self._take(state_dict, also)
        except ValueError:
            self._take(before, ())
            raise

    def _on_all(self, attempt: Callable[[], Any]) -> list[Any]:
        failed = "load_state_dict failed on rank {}, and nothing was loaded ({})"
        return on_all_ranks(self.communicator, attempt, failed=failed)

    def _read(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state, and return what is equal in all states of one checkpoint."""
        part, warmup_steps = state_dict[KEY], self._settings.warmup_steps
        step, pending, fragments = part["step"], part["pending"], part["fragments"]
        need_whole("step", step, 0)
        mine = cut(self._parameters, self._settings.fragments) if step >= warmup_steps else []
        if len(fragments) != len(mine):
            raise ValueError(
                f"saved with {len(fragments)} fragments after step {step}, which is not what "
                f"warmup_steps={warmup_steps} and fragments={self._settings.fragments} make"
            )
        for saved, span in zip(fragments, mine, strict=True):
            shapes = [list(outer.shape) for outer in saved["outer"]], [list(p.shape) for p in self._parameters[span]]
            if shapes[0] != shapes[1]:
                raise ValueError(f"saved outer parameters of shapes {shapes[0]}, not {shapes[1]}")
            need("optimizer" in saved, "a fragment is without its outer optimizer")
        if pending is not None:
            need_whole("the fragment in flight", pending[0], 0, len(fragments))
            need_whole("the step until which it is in flight", pending[1], step + 1)
        if (samples := part.get("samples")) is not None:
            need(
                len(samples) == len(fragments) and all(math.isnan(each) or 0 <= each < math.inf for each in samples),
                f"the samples of {len(fragments)} fragments are {samples}",
            )
        label = {"step": step, "pending": pending and list(pending), "fragments": len(fragments)}
        return {**label, "weighs": samples is not None}

    def _take(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load states whose label is the same on all ranks. Collective. Raises ValueError on all ranks, with a part of them
        loaded, if one rank cannot load its part."""
        part = state_dict.get(KEY, {"step": 0, "pending": None, "fragments": None})
        self._has_common = part["step"] > 0
        samples = part.get("samples")
        self._weighs = samples is not None
        self._enter(part["step"])
        self._samples = list(samples or self._samples)

        def load() -> None:
            if self._averaging is not None:
                self._averaging.load_state_dict(state_dict, also)
            else:
                self.setup.optimizer.load_state_dict(without(state_dict, KEY))

        self._on_all(load)
        keep_rates = self._settings.outer is None
        for number, fragment in enumerate(self._fragments if part["fragments"] is not None else ()):
            mine, *others = [each[KEY]["fragments"][number] for each in (state_dict, *also)]
            self._on_all(functools.partial(fragment.load_state_dict, mine, others, keep_rates=keep_rates))
        self._pending = None
        if part["pending"] is not None:
            number, merge_at = part["pending"]
            self._pending = number, merge_at


def _alone(setup: Setup, parameters: Sequence[Tensor]) -> Setup:
    """Return a Setup with a Communicator of this rank alone."""
    kinds = {"cpu": None} | {parameter.device.type: None for parameter in parameters}
    alone = Communicator(Membership.alone(tuple(kinds)))
    policy, plan = Policy(Compression.none), ExchangePlan(None, at_end=True)
    return replace(setup, communicator=alone, predivide=1.0, policy=policy, plan=plan, traffic=Traffic(alone))


def _check_averaging(policy: Policy) -> None:
    """Raise ValueError if pseudo-gradients would first be averaged over all ranks, and later over those that send a number."""
    for encoding in policy.encodings:
        if is_one_shot(encoding) and encoding.warmup_steps:
            raise ValueError(
                f"ErrorFeedback({encoding.codec.name!r}, warmup_steps={encoding.warmup_steps}) does not support "
                "outer=None: pseudo-gradients with this codec are summed, but those of its warm-up, which are uncompressed, "
                "would have to be averaged. Use a warm-up in which gradients are averaged: LocalUpdates(warmup_steps=...)"
            )

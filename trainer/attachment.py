"""The attachment of a DistributedOptimizer to the other ranks; in an elastic job, it ends and begins again with each world."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from operator import is_, itemgetter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.agreement import check_settings
from gradwire.trainer.reducer.setup import Passes, Setup
from gradwire.trainer.reducer.traffic import Traffic
from gradwire.trainer.reports.metrics import Reports, WantedReports
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.sharded import Sharded
from gradwire.trainer.world.process_sets import ProcessSet, ProcessSetLike, global_process_set
from gradwire.trainer.world.world import current_world, is_initialized, names_rank, record_in_timelines

_params_of = itemgetter("params")

_log = logging.getLogger("gradwire")


class _Superseded(Rule):
    """The rule of an optimizer whose parameters a later DistributedOptimizer exchanges: it refuses every further step.

    closed: the rule until then, whose state can still be saved. name: a parameter that both optimizers have.
    """

    supports_auto = True

    def __init__(self, closed: Rule, name: str) -> None:
        super().__init__(closed.setup)
        self._closed, self._name = closed, name

    def weigh(self, samples: float | Tensor) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        raise RuntimeError(
            f"rank {self.communicator.rank}: this optimizer was closed when another DistributedOptimizer with its "
            f"{self._name!r} was made, because the gradients of a parameter can be exchanged by one only. If both are to step "
            "it: move the parameters that they share into a DistributedOptimizer of their own, or make one optimizer with "
            "several param groups"
        )

    def state_dict(self) -> dict[str, Any]:
        return self._closed.state_dict()


class Attachment:
    """Holds what depends on the ranks: the Communicator, the rule, and the reports. join(), broadcasts, elastic training and
    shutdown() use it.

    optimizer: the wrapped optimizer. process_set: that of the DistributedOptimizer. make_rule: makes the rule from its Setup.
    make_setup: makes the Setup for a Communicator and the count of its bytes. passes: counts calls of backward(). names: the
    user's names of parameters. reported: the wanted reports.

    communicator: the Communicator of the ranks; it belongs to this optimizer alone. rule: the rule. parameters: those of the
    param groups, as the rule knows them. called: their names. was_synchronized: whether the user has called synchronize() since
    the last step() or zero_grad().
    """

    communicator: Communicator
    reports: Reports

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        process_set: ProcessSetLike,
        make_rule: Callable[[Setup], Rule],
        make_setup: Callable[..., Setup],
        passes: Passes,
        names: Mapping[Tensor, str],
        reported: WantedReports,
    ) -> None:
        self.optimizer = optimizer
        self.rule: Rule
        self.parameters: list[Tensor] = []
        self.called: dict[Tensor, str] = {}
        self.was_synchronized = False
        self._process_set, self._make_rule, self._make_setup = process_set, make_rule, make_setup
        self._passes, self._names, self._reported = passes, names, reported
        self._attach(described_passes=str(passes.per_step))

    def _attach(self, described_passes: str) -> None:
        """Connect to the other ranks of the process set, and begin to exchange with them. Collective. described_passes: the
        text by which backward_passes_per_step is compared."""
        process_set = self._process_set
        parameters = tensors_of(self.optimizer.param_groups)
        if isinstance(process_set, Communicator):
            self.communicator = process_set
        else:
            self.communicator = current_world().open_communicator(process_set, tensors=parameters)
        record_in_timelines(self.communicator)
        setup = self._make_setup(self.communicator, traffic=Traffic(self.communicator))
        self.rule = Rule(setup)  # a rule without communication, until the real one is made
        self.parameters, self.called = [], {}
        check_every = self._reported.check_replicas_every
        try:
            described = _described(setup, self._make_rule, parameters)
            described |= {"backward_passes_per_step": described_passes}
            described |= {"check_replicas_every": str(check_every)}
            check_settings(self.communicator, "DistributedOptimizer", described)
            outside = isinstance(process_set, ProcessSet) and not process_set.included()
            made = Rule(setup) if outside else self._make_rule(setup)
            if not isinstance(made, Rule):
                raise TypeError(f"rank {self.communicator.rank}: rule returned {made!r}; a Rule is needed")
            self.rule = made
            self.add_new()
            made.start()
            compared_on = self.communicator
            compares = check_every or (check_every == 0 and made.starts_equal)
            if not isinstance(process_set, Communicator) and not outside and compares:
                compared_on = current_world().communicator(process_set)
            all_names = partial(names_of, self.parameters, self.called)  # does not keep this object alive
            self.reports = Reports(made, self._reported, all_names, compared_on)
            for other, name in self._others_with(self.parameters):
                other.supersede(name)
        except BaseException:
            self.close()  # else its hooks would go on exchanging, as long as the error is alive
            raise
        is_allowed = made.can_stand_in
        self.communicator.absence.allow(lambda _: is_allowed)
        _attached.add(self)
        if is_initialized():
            current_world().enrol(self)

    def _others_with(self, parameters: Iterable[Tensor]) -> list[tuple[Attachment, str]]:
        """Return the attachments of other optimizers that exchange any of these parameters on this rank, each with the name of
        one; none if this one exchanges nothing here, as outside of its process set."""
        if type(self.rule) is Rule:
            return []
        exchanging = [each for each in _attached if each is not self and type(each.rule) is not Rule]
        shared = [(other, [other.called[p] for p in parameters if p in other.called]) for other in exchanging]
        return [(other, names[0]) for other, names in shared if names]

    @property
    def can_move(self) -> bool:
        """Return whether attach_again() is possible: the process set is all ranks of the world, and the rule uses no other."""
        return (self._process_set is None or self._process_set is global_process_set) and self.rule.can_move

    @property
    def is_sharded(self) -> bool:
        """Return whether this rank keeps only the optimizer state of its share of the parameters."""
        return isinstance(self._make_rule, Sharded)

    def detach(self) -> None:
        """Disconnect from the other ranks until attach_again(), and abandon running exchanges. Remove the hooks, set all
        gradients to None, and with rules.Sharded clear the optimizer's state."""
        with suppress(CollectiveError):  # running exchanges have failed
            self.rule.close()
        self.rule = Rule(self.rule.setup)
        for parameter in tensors_of(self.optimizer.param_groups):
            parameter.grad = None
        if self.is_sharded:
            self.optimizer.state.clear()  # it is that of shards which no longer exist

    def attach_again(self) -> None:
        """After detach(), connect to the ranks of the present world, as when the optimizer was made. Collective.
        load_state_dict() then restores the states of rules and codecs. backward_passes_per_step is unchanged, and may differ
        between ranks until it is set on all of them."""
        self.begin_window()
        self.was_synchronized = False
        self._attach(described_passes="any")

    def check_passes_agree(self) -> None:
        """Raise ValueError on all ranks unless they have the same backward_passes_per_step. Collective."""
        passes = {"backward_passes_per_step": str(self._passes.per_step)}
        check_settings(self.communicator, "DistributedOptimizer", passes)

    def begin_window(self) -> None:
        """Count calls of backward() towards backward_passes_per_step from 0 again."""
        self._passes.ended = 0

    def settle(self) -> None:
        """See Rule.settle()."""
        self.rule.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and the number of passes that count towards backward_passes_per_step."""
        self.follow_groups()
        self.optimizer.zero_grad(set_to_none)
        self.rule.reset()
        self.was_synchronized = False

    def follow_groups(self) -> None:
        """Exchange from now on what the program has put into the param groups, in place of what it has removed. Raises
        ValueError for parameters that cannot be exchanged."""
        now = [*chain.from_iterable(map(_params_of, self.optimizer.param_groups))]
        if len(now) != len(self.parameters) or not all(map(is_, now, self.parameters)):
            self.rule.settle()
            self.add_new()

    @names_rank
    def add_new(self) -> None:
        """Add the parameters that are not known yet to the exchange."""
        now = [*chain.from_iterable(map(_params_of, self.optimizer.param_groups))]
        places = {parameter: place for place, parameter in enumerate(dict.fromkeys(now))}
        new = [parameter for parameter in places if parameter not in self.called]
        if self.parameters and (others := self._others_with(new)):
            raise ValueError(
                f"{others[0][1]!r} is a parameter of another DistributedOptimizer: the gradients of a parameter can be "
                "exchanged by one only. close() the other one before"
            )
        called = {parameter: name for parameter, name in self.called.items() if parameter in places}
        taken = {*called.values(), *self._names.values()}
        for parameter in new:
            numbered = (f"parameter {number}" for number in count(places[parameter]))
            called[parameter] = self._names.get(parameter) or next(name for name in numbered if name not in taken)
            taken.add(called[parameter])
        self.rule.add([called[parameter] for parameter in new], new)
        self.called.clear()
        self.called.update(called)
        self.parameters[:] = now

    def supersede(self, name: str) -> None:
        """Close this one for a later DistributedOptimizer, and refuse further steps. name: a parameter that both have.

        An exchange that has failed is not an error of the later one, which other ranks then have."""
        try:
            self.close()
        except CollectiveError as error:
            rank = self.communicator.rank
            _log.warning("gradwire: rank %d: the update of the last step is not complete: %s", rank, error)
        self.rule = _Superseded(self.rule, name)

    def close(self) -> None:
        """Remove the hooks, and close the Communicator unless it was given as process_set."""
        _attached.discard(self)
        if is_initialized():
            current_world().withdraw(self)  # else an elastic job that begins later would connect it to the next world
        try:
            self.rule.close()
        finally:
            if not isinstance(self._process_set, Communicator):
                self.communicator.close()


#: Those of this process that are not closed. World.optimizers has those of one world, and not those that were made without
#: init() or before shutdown(), whose parameters are still hooked.
_attached: WeakSet[Attachment] = WeakSet()


def names_of(parameters: Iterable[Tensor], called: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return the name of each parameter."""
    return {parameter: called[parameter] for parameter in dict.fromkeys(parameters)}


def _described(setup: Setup, rule: Callable[[Setup], Rule], parameters: Sequence[Tensor]) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as text by the names of the arguments."""
    compression, policy = setup.policy.described
    return {
        "rule": str(getattr(rule, "described", getattr(rule, "__qualname__", type(rule).__qualname__))),
        "op": setup.op,
        "gradient_predivide_factor": str(setup.predivide),
        "compression": compression,
        "policy": policy,
        "exchange_plan": "a file" if isinstance(setup.plan, Path) else repr(setup.plan),
        "groups": str([setup.groups.get(parameter) for parameter in parameters] if setup.groups else None),
        "sparse_as_dense": str(setup.sparse_as_dense),
    }

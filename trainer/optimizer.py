"""DistributedOptimizer: a torch optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.torch_internals import share_hooks
from gradwire.trainer.gradients.agreement import check_settings
from gradwire.trainer.gradients.arguments import (
    Average,
    check_arguments,
    check_groups,
    check_named_parameters,
    check_passes,
    warn_of_wrapped,
)
from gradwire.trainer.gradients.combination import Combination, ExchangeStats
from gradwire.trainer.gradients.compression import AUTO, Compression, Compressor, Policy, wanted
from gradwire.trainer.gradients.layout import SMALL_BUCKET_BYTES
from gradwire.trainer.gradients.setup import Passes, Setup
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer, tensors_of, uncompiled
from gradwire.trainer.reports.metrics import Reports, StepMetrics, WantedReports
from gradwire.trainer.reports.stragglers import Stragglers
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.selection import checked_rule, described_settings, overlapping
from gradwire.trainer.rules.sharded import Sharded
from gradwire.trainer.rules.superseded import Superseded
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.process_sets import ProcessSet, ProcessSetLike, global_process_set
from gradwire.trainer.world.world import current_settings, current_world, here, is_initialized, record_in_timelines

_FORMER: Final = {
    "shard_states": "shard_states=True is now rule=hvd.rules.Sharded()",
    "parameter_compression": "parameter_compression= is now rule=hvd.rules.Sharded(parameter_compression=...)",
}
"""What has taken the place of arguments of gradwire 0.2."""


class DistributedOptimizer(WrappingOptimizer):
    """Wraps an optimizer so that every rank steps with the gradients of all ranks.

    When backward() returns, the gradients of this optimizer's parameters are averaged (or summed) over the ranks. Clipping,
    GradScaler, LR schedulers, step(closure) and hooks work as with one process, and replicas that start equal
    (broadcast_parameters) stay bitwise equal. The attribute `optimizer` is the wrapped optimizer. The DistributedOptimizer has
    the param_groups, state, defaults and hooks of the wrapped optimizer, and the same format of state_dict(). Public attributes
    and methods that only the wrapped optimizer has, such as first_step() of SAM, can be used as if they were its own.
    docs/guides/optimizer.md is the guide, and has the special cases.

    - `parameter.grad` is in the memory of a bucket. Clone it to keep it beyond the next backward(), or give
      gradient_as_bucket_view=False. Exception: if parameter.grad exists before backward(), as a view of a buffer of yours may,
      it remains the same tensor, and the results are copied to it.
    - All ranks call backward(), step(), synchronize() and zero_grad() in the same order, and freeze, unfreeze or add the same
      parameters. If a parameter has a gradient on some ranks only, the other ranks contribute zeros. If it has a gradient on no
      rank, its grad stays None.
    - With backward_passes_per_step = n, the gradients of n calls of backward() are summed, and averaged over ranks in the
      n-th call. An earlier step() or synchronize() exchanges the gradients so far. If code such as clipping or
      GradScaler.unscale_ uses the gradients before the n-th call, call synchronize() before this code, and step() inside
      skip_synchronize() after it.
    - After an exchange, calls of backward() without zero_grad() accumulate onto the average; with op=Sum or rules.Sharded
      they raise RuntimeError.
    - step(closure) gives the optimizer the loss averaged (or summed) over the ranks.
    - If parameters are DTensors, as after fully_shard(model, mesh=mesh["shard"]), pass process_set=mesh["replicate"]: ranks
      that hold the same shards then exchange the gradients of these shards.
    - With activation checkpoints of use_reentrant=True, gradients are exchanged once per checkpointed segment of the model.
      Prefer use_reentrant=False; with op=Sum or backward_passes_per_step > 1, use_reentrant=True is not supported.

    optimizer: any torch optimizer, or an object with the same methods. Its parameters that require gradients are of dtype
    float16, bfloat16, float32 or float64. Move them to their device first: if all are on the CPU now, later gradients on a GPU
    are copied through the host.
    named_parameters: pairs (name, parameter) for all parameters of the optimizer, the same on all ranks. `policy` and error
    messages use the names.
    compression: an attribute of gradwire.Compression or its name ("int8"), a codec of gradwire.collectives.compression, or
    ErrorFeedback(codec). Codecs apply to matrices (two dimensions or more) of 4096 elements or more; the casts fp16 and bf16
    apply to all parameters. onebit, topk, threshold, randomk, dgc, chunktopk and powersgd always have error feedback, which
    adds the error of each encoding (the *residual*) to the next step's gradient. Other codecs have error feedback only as
    ErrorFeedback(...). See docs/guides/compression.md. With "auto", the ranks measure links and codecs, in about a second.
    From these measurements, they predict for each bucket which codec in `allow`, or no codec, is fastest, and choose it. They
    correct the choice once, by the times of the first training steps.
    allow: for compression="auto", the codecs to choose from, each as compression= takes it, except PowerSGD; None: ("int8",).
    policy: the compression of parameters by name, whatever their size: `{"*.bias": "none", "embed*": "topk"}`. The keys are
    patterns as in fnmatch; for each parameter, the first one that matches its name counts. Needs named_parameters.
    op: Average or Sum of gradients; or Adasum, with which each rank steps with its own gradients and the changes of the
    parameters are combined (gradwire.trainer.rules.adasum).
    gradient_predivide_factor: a factor f for op=Average: gradients are divided by f before the sum, and multiplied by f / size
    after it.
    num_groups: the number of buckets into which the gradients are divided evenly, instead of by bucket_bytes.
    groups: a number of buckets, as num_groups; or lists of parameters. The parameters of one list share a bucket (one per dtype
    and codec) of any size. The other parameters are fused by bucket_bytes. groups takes precedence over num_groups.
    sparse_as_dense: True makes sparse gradients, such as those of nn.Embedding(sparse=True), dense for the exchange; step() gives
    them to the optimizer as sparse ones again, as Horovod does. Otherwise all ranks gather their indices and values, and the
    result is sparse and coalesced.
    process_set: a ProcessSet, a torch.distributed group, a dimension of a DeviceMesh (mesh["dp"]), or a Communicator that
    nothing else uses. On a rank outside of a ProcessSet, the optimizer steps without an exchange.
    bucket_bytes: the maximum size of a bucket in bytes. A larger gradient has a bucket of its own, and the first bucket holds
    at most 1 MB. None: the value of HOROVOD_FUSION_THRESHOLD. If that is not set, the default is 4 MB in two
    cases, with overlap="next_forward" and for gradients on the CPU that no codec encodes, and otherwise 25 MB.
    rule: what the ranks exchange, and when: an object of gradwire.rules, such as hvd.rules.Sharded(); a class derived from Rule;
    or a function that makes a Rule from a Setup, which holds the arguments of this optimizer. None: gradients in every step, as
    this docstring describes.
    on_step: a function that is called on each rank with its StepMetrics after each step. step() propagates its exceptions.
    check_replicas_every: the number of steps after which the ranks compare hashes of their parameters and optimizer state; 0:
    never. With rules.Sharded or op=Adasum, only parameters are compared. Before the first step, the ranks compare the parameters
    that require gradients in any case, unless check_replicas_every=None. If values differ, step() raises ReplicasDiffer on all
    ranks.
    overlap: "backward": the exchange overlaps with backward(), which waits for the end of the exchange. "next_forward":
    backward() and step() do not wait for the exchange, and a module's parameters are updated before its next forward,
    with bitwise the same result for equal bucket_bytes. Call settle() before parameters are used outside of a forward of
    the model. docs/guides/optimizer.md lists what "next_forward" supports.
    model: with overlap="next_forward", the model that is trained. The optimizer hooks the forward of every module of this
    model.
    gradient_as_bucket_view: as in DistributedDataParallel, but True by default. False leaves parameter.grad in the memory that
    backward() has allocated, and copies the results to it.
    straggler_report_every: the number of exchanges after which stragglers() is updated. Rank 0 logs when the others have waited
    for the same rank in three reports in a row, each time for more than a tenth of a step and more than 5 ms on average. Rank 0
    also logs when this ends.

    The constructor is collective over the process set. Raises ValueError or TypeError for invalid arguments, RuntimeError
    before init(), and ValueError on all ranks if they have different parameters or shards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Compressor = Compression.none,
        backward_passes_per_step: int = 1,
        op: str = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSetLike = global_process_set,
        *,
        allow: Sequence[Compressor] | None = None,
        policy: Mapping[str, Compressor] | None = None,
        bucket_bytes: int | None = None,
        rule: Callable[[Setup], Rule] | None = None,
        on_step: Callable[[StepMetrics], object] | None = None,
        check_replicas_every: int | None = 0,
        straggler_report_every: int = 100,
        overlap: str = "backward",
        model: nn.Module | None = None,
        gradient_as_bucket_view: bool = True,
        **former: NoReturn,
    ) -> None:
        for name in former:
            raise TypeError(here() + _FORMER.get(name, f"DistributedOptimizer has no argument {name!r}"))
        if bucket_bytes is None:
            awaited = SMALL_BUCKET_BYTES if overlap == "next_forward" else None
            bucket_bytes = current_settings().fusion_bytes or awaited
        reported = WantedReports(on_step, check_replicas_every, straggler_report_every)
        check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor, bucket_bytes)
        self.rule = rule
        """The argument `rule`."""
        rule = overlapping(checked_rule(rule, op), overlap, model)
        if overlap == "next_forward" and not gradient_as_bucket_view:
            raise ValueError(
                f"{here()}gradient_as_bucket_view=False is for overlap='backward': with overlap='next_forward', gradients are in "
                "their buckets until the next forward"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"{here()}optimizer is a DistributedOptimizer already")
        parameters = tensors_of(optimizer.param_groups)
        self._names = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        names = self._names.values()
        warn_of_wrapped(names)
        checked = Policy(wanted(compression, allow), policy).checked(None if named_parameters is None else names)
        numbers = check_groups(num_groups, groups, parameters)
        tried: set[Tensor] = set()  # kept in rebind(), since release() clears the state that some optimizers begin with

        self.optimizer = optimizer
        share_hooks(self, optimizer)  # because the wrapped optimizer runs them, each once
        self._process_set = process_set
        self._passes = passes = Passes(backward_passes_per_step)
        self._was_synchronized = self._skips = False
        self._make_rule, self._overlap, self._reported = rule, overlap, reported

        def setup_on(communicator: Communicator) -> Setup:
            combination = Combination(communicator, op, gradient_predivide_factor)
            return Setup(
                optimizer,
                combination,
                checked,
                bucket_bytes,
                passes,
                numbers,
                sparse_as_dense,
                gradient_as_bucket_view,
                tried=tried,
            )

        self._setup_on = setup_on
        self._bind(described_passes=str(backward_passes_per_step))

    def _bind(self, described_passes: str) -> None:
        """Connect to the other ranks of the process set, and begin to exchange with them. Collective. described_passes: the
        text by which backward_passes_per_step is compared."""
        process_set = self._process_set
        if isinstance(process_set, Communicator):
            self._communicator = process_set
        else:
            parameters = tensors_of(self.param_groups)
            self._communicator = current_world().open_communicator(process_set, tensors=parameters)
        record_in_timelines(self._communicator)
        setup = self._setup_on(self._communicator)
        self._rule = Rule(setup)  # a rule without communication, until the real one is made
        self._parameters: list[Tensor] = []  # of the param groups, as the rule knows them
        self._called: dict[Tensor, str] = {}  # their names
        check_every = self._reported.check_replicas_every
        try:
            described = described_settings(setup, self._make_rule, tensors_of(self.param_groups))
            described |= {"backward_passes_per_step": described_passes}
            described |= {"check_replicas_every": str(check_every), "overlap": self._overlap}
            check_settings(self._communicator, "DistributedOptimizer", described)
            outside = isinstance(process_set, ProcessSet) and not process_set.included()
            made = Rule(setup) if outside else self._make_rule(setup)
            if not isinstance(made, Rule):
                raise TypeError(f"{here()}rule returned {made!r}; a Rule is needed")
            if setup.policy.auto is not None and not (outside or isinstance(made, Synchronous)):
                raise ValueError(
                    f"{here()}compression={AUTO!r} is for gradients that are averaged in every step, as by the default rule, not "
                    f"for {type(made).__name__}: name a codec"
                )
            self._rule = made
            self._add_new()
            made.start()
            compared_on = self._communicator
            compares = check_every or (check_every == 0 and made.starts_equal)
            if not isinstance(process_set, Communicator) and not outside and compares:
                compared_on = current_world().communicator(process_set)
            all_names = partial(_named, self._parameters, self._called)  # does not keep this optimizer alive
            self._reports = Reports(made, self._reported, all_names, compared_on)
        except BaseException:
            self.close()  # else its hooks would go on exchanging, as long as the error is alive
            raise
        is_allowed = made.can_stand_in
        self._communicator.absence.allow(lambda _: is_allowed)
        for other, name in self._others_with(self._parameters):
            other.close()
            other._rule = Superseded(other._rule, name)
        if is_initialized():
            current_world().enrol(self)

    def _others_with(self, parameters: Iterable[Tensor]) -> list[tuple[DistributedOptimizer, str]]:
        """Return the other optimizers in use that exchange any of these parameters on this rank, each with the name of one; none
        if this one exchanges nothing here, as outside of its process set."""
        if type(self._rule) is Rule:
            return []
        enrolled = current_world().optimizers if is_initialized() else []
        others = [each for each in enrolled if isinstance(each, DistributedOptimizer) and each is not self]
        exchanging = [other for other in others if type(other._rule) is not Rule]
        shared = [(other, [other._called[p] for p in parameters if p in other._called]) for other in exchanging]
        return [(other, names[0]) for other, names in shared if names]

    @property
    def can_rebind(self) -> bool:
        """Return whether rebind() is possible, that is, whether the process set is all ranks of the world."""
        return self._process_set is None or self._process_set is global_process_set

    def release(self) -> None:
        """Disconnect from the other ranks until rebind(), and abandon running exchanges. Remove the hooks, set all gradients to
        None, and with rules.Sharded clear the optimizer's state."""
        with suppress(CollectiveError):  # running exchanges have failed
            self._rule.close()
        self._rule = Rule(self._rule.setup)
        for parameter in tensors_of(self.param_groups):
            parameter.grad = None
        if isinstance(self.rule, Sharded):
            self.optimizer.state.clear()  # it is that of pieces which no longer exist

    def rebind(self) -> None:
        """After release(), connect to the ranks of the present world, as the constructor does with the same arguments.
        Collective. load_state_dict() then restores the states of rules and codecs. backward_passes_per_step is unchanged,
        and may differ between ranks until it is set on all of them."""
        self._passes.ended = 0
        self._was_synchronized = self._skips = False
        self._bind(described_passes="any")

    def check_passes_agree(self) -> None:
        """Raise ValueError on all ranks unless they have the same backward_passes_per_step. Collective."""
        passes = {"backward_passes_per_step": str(self._passes.per_step)}
        check_settings(self._communicator, "DistributedOptimizer", passes)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Complete the updates of all steps, and return the wrapped optimizer's state."""
        self._rule.settle()
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = value

    @property
    def communication_wait_s(self) -> float:
        """Return the seconds for which backward(), step() and synchronize() have waited for other ranks so far."""
        return self._rule.wait_s

    @property
    def stats(self) -> ExchangeStats:
        """Return how many bytes this rank has sent so far, and how many it would have sent uncompressed. Counts the bytes of
        gradients; with rules.Sharded also of parameters; with LocalUpdates also of the changes of parameters."""
        return self._rule.stats

    def stragglers(self) -> Stragglers | None:
        """Return which rank made the others wait in the last straggler_report_every exchanges that all ranks have reported.

        None before the first report, in a world of one, with overlap="next_forward", and with a rule that does not exchange
        gradients in buckets. Any rank may call it; it returns at once.
        """
        return self._reports.stragglers()

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change backward_passes_per_step, from the next backward() on. Raises ValueError unless passes >= 1."""
        check_passes(passes)
        self._passes.per_step = passes

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer. Before that, exchange the gradients if gradients were accumulated since the last
        exchange, or if there was no exchange since the last step() or zero_grad().

        closure: a function that clears gradients, calls backward() and returns the loss. step() returns the loss averaged (with
        op=Sum: summed) over the ranks.

        Warns (UserWarning), as Horovod does, if step() follows synchronize() outside of skip_synchronize().
        """
        if self._was_synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Write `with optimizer.skip_synchronize(): optimizer.step()`. After the backward() that completes "
                "backward_passes_per_step, gradients are averaged already, and synchronize() can be left out",
                UserWarning,
                stacklevel=4,  # the caller's line: two frames of `uncompiled` lie between
            )
        self._was_synchronized = False
        self._follow_groups()
        self._reports.before_step(self._rule.synchronize if closure is None else None)
        loss = self._rule.take_step() if closure is None else self.optimizer.step(lambda: self._rule.evaluate(closure))
        self._rule.after_step()
        self._reports.after_step()
        return loss

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does, and the number of passes that count towards backward_passes_per_step."""
        self._follow_groups()
        self.optimizer.zero_grad(set_to_none)
        self._rule.reset()
        self._was_synchronized = False

    @uncompiled
    def synchronize(self) -> None:
        """Exchange the gradients that were accumulated since the last exchange, if any. With overlap="next_forward", also wait
        for running exchanges and complete the update of the last step.
        """
        self._rule.synchronize()
        self._was_synchronized = True

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that the norm of all of them together is at most max_norm. Return the norm before scaling.

        It does what torch.nn.utils.clip_grad_norm_ does. With rules.Sharded it is collective, and the norm
        is that of all ranks' shards. norm_type: the type of the norm; float("inf") for the largest element. Raises ValueError
        unless norm_type is above 0.
        """
        if not norm_type > 0:
            raise ValueError(f"{here()}norm_type must be a number > 0, not {norm_type!r}")
        return self._rule.clip_grad_norm_(max_norm, norm_type)

    @uncompiled
    def _before_method(self, name: str) -> None:
        """See Rule.before_method()."""
        self._rule.before_method(name)
        if self._rule.stats.exchanges:  # else a rank may call this alone, before training
            self._reports.compare_start(None)

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context manager in which step() after synchronize() raises no warning, for programs written for Horovod.

        It has no other effect: gradients that have been exchanged are never exchanged again.
        """
        return _switched_on(self, "_skips")

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which backward() only accumulates gradients, and does not count towards
        backward_passes_per_step."""
        return _switched_on(self._passes, "paused")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the wrapped optimizer, and its parameters to the exchange. Collective with rules.Sharded.
        Raises ValueError, with nothing added, for parameters that cannot be exchanged."""
        self._rule.settle()
        self.optimizer.add_param_group(param_group)
        try:
            self._add_new()
        except BaseException:
            self.optimizer.param_groups.pop()
            raise

    def _follow_groups(self) -> None:
        """Exchange from now on what the program has put into the param groups, in place of what it has removed. Raises
        ValueError for parameters that cannot be exchanged."""
        now = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            self._rule.settle()
            self._add_new()

    def _add_new(self) -> None:
        """Add the parameters that are not known yet to the exchange."""
        now = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        places = {parameter: place for place, parameter in enumerate(dict.fromkeys(now))}
        new = [parameter for parameter in places if parameter not in self._called]
        if self._parameters and (others := self._others_with(new)):
            raise ValueError(
                f"{here()}{others[0][1]!r} is a parameter of another DistributedOptimizer: the gradients of a parameter can be "
                "exchanged by one only. close() the other one before"
            )
        called = {parameter: name for parameter, name in self._called.items() if parameter in places}
        taken = {*called.values(), *self._names.values()}
        for parameter in new:
            numbered = (f"parameter {number}" for number in itertools.count(places[parameter]))
            called[parameter] = self._names.get(parameter) or next(name for name in numbered if name not in taken)
            taken.add(called[parameter])
        self._rule.add([called[parameter] for parameter in new], new)
        self._called.clear()
        self._called.update(called)
        self._parameters[:] = now

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters, in the order of the param groups. A parameter without a name is called
        "parameter" with its number."""
        return list(self._parameter_names.values())

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Return the names by parameter. Programs that are written for Horovod read this attribute."""
        return _named(self._parameters, self._called)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict() of the wrapped optimizer, so that checkpoints do not depend on this class.

        With codecs it has one more key, "gradwire", which other optimizers ignore: residuals, codec states and buckets, with
        which training resumes bit for bit. They differ between ranks, so every rank saves its own state_dict(). With
        rules.Sharded, every rank does so too: its state_dict() has the state of its share, and a key that describes the share.

        Raises RuntimeError, with codecs, while gradients are exchanged, as after a backward() that failed midway.
        """
        return self._rule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]] = ()) -> None:
        """Load a state into the wrapped optimizer of this rank. Collective with codecs or rules.Sharded.
        docs/guides/checkpoints.md is the guide.

        If the number of ranks is that of the checkpoint, and each rank loads its own state_dict, training continues bit for
        bit. With another number of ranks, or other codecs, the residuals are redistributed: every rank gets the mean (op=Sum:
        an equal part of the sum) of all residuals that the ranks pass as state_dict and `also`. A warning on rank 0 says
        which residuals were lost. If no rank's state_dict has the key "gradwire", error feedback starts from zero.

        state_dict: the state that this rank saved; on a rank that did not exist then, the state of any rank.
        also: the states of ranks that no longer exist.

        With codecs, raises ValueError on all ranks, with nothing loaded, if only some ranks have the key "gradwire"; if the
        parts under this key are damaged, are of different checkpoints, or are of other parameters; or if the wrapped
        optimizer of any rank cannot load its state.
        """
        self._rule.load_state_dict(state_dict, also)

    @property
    def keeps_replicas(self) -> bool:
        """Return whether all ranks of the process set hold the same parameters and optimizer state after each step."""
        return self._rule.keeps_replicas

    @property
    def communicator(self) -> Communicator:
        """Return the Communicator of the ranks; it belongs to this optimizer alone."""
        return self._communicator

    @uncompiled
    def stand_in(self, verb: str, numel: int) -> bool:
        """See Rule.stand_in()."""
        return self._rule.stand_in(verb, numel)

    def settle(self) -> None:
        """With overlap="next_forward", wait for running exchanges, and complete the update of the last step.

        Call it before parameters are used outside of a forward of the model. Not collective: a single rank may call it.
        """
        self._rule.settle()

    def fill_gradients(self) -> None:
        """See Rule.fill(); broadcast_optimizer_state() calls this."""
        self._rule.settle()
        self._rule.fill()

    def begin_window(self) -> None:
        """Count calls of backward() towards backward_passes_per_step from 0 again; join() calls this."""
        self._passes.ended = 0

    @property
    def steps(self) -> int:
        """Return how many steps were taken; join() sets it on ranks that missed some."""
        return self._reports.step

    @steps.setter
    def steps(self, value: int) -> None:
        self._reports.step = value

    def close(self) -> None:
        """Remove the hooks, and close the Communicator unless it was given as process_set. The wrapped optimizer remains
        usable."""
        if is_initialized():
            current_world().withdraw(self)  # else an elastic job that begins later would connect it to the next world
        try:
            self._rule.close()
        finally:
            if not isinstance(self._process_set, Communicator):
                self._communicator.close()


def _named(parameters: Iterable[Tensor], names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return the name of each parameter."""
    return {parameter: names[parameter] for parameter in dict.fromkeys(parameters)}


@contextmanager
def _switched_on(owner: object, name: str) -> Iterator[None]:
    """Set an attribute to True, inside."""
    before = getattr(owner, name)
    setattr(owner, name, True)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""DistributedOptimizer: a torch optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.collectives import Communicator
from gradwire.collectives.torch_internals import share_hooks, uncompiled
from gradwire.trainer.attachment import Attachment, names_of
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer, shared, tensors_of
from gradwire.trainer.reducer.arguments import (
    Adasum,
    Average,
    check_arguments,
    check_groups,
    check_named_parameters,
    check_passes,
)
from gradwire.trainer.reducer.compression import Compression, Compressor, Policy, wanted
from gradwire.trainer.reducer.plans import ExchangePlan, check_plan
from gradwire.trainer.reducer.setup import Passes, Setup
from gradwire.trainer.reducer.traffic import ExchangeStats
from gradwire.trainer.reports.metrics import StepMetrics, WantedReports
from gradwire.trainer.reports.stragglers import Stragglers
from gradwire.trainer.rules.adasum import Adasum as AdasumRule
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import current_settings, names_rank

_FORMER: Final = {
    "shard_states": "shard_states=True is now rule=hvd.rules.Sharded()",
    "parameter_compression": "parameter_compression= is now rule=hvd.rules.Sharded(parameter_compression=...)",
    "overlap": 'overlap="next_forward" is now rule=hvd.rules.NextForward(model)',
    "model": "model= is now an argument of the rule: rule=hvd.rules.NextForward(model)",
    "codec": "codec= is now compression=",
    "warmup_codec": "warmup_codec= is now compression=",
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
    parameters are combined (Maleki et al. 2020).
    gradient_predivide_factor: a factor f for op=Average: gradients are divided by f before the sum, and multiplied by f / size
    after it.
    num_groups: the number of buckets into which the gradients are divided evenly, instead of by bucket_bytes.
    groups: a number of buckets, as num_groups; or lists of parameters. The parameters of one list share a bucket (one per dtype
    and codec) of any size. The other parameters are fused by bucket_bytes. groups takes precedence over num_groups.
    sparse_as_dense: True makes sparse gradients, such as those of nn.Embedding(sparse=True), dense. In step(), only SparseAdam,
    which accepts no dense gradients, gets sparse ones. Otherwise all ranks gather their indices and values, and the result is
    sparse and coalesced.
    process_set: a ProcessSet, a torch.distributed group, a dimension of a DeviceMesh (mesh["dp"]), or a Communicator that
    nothing else uses. On a rank outside of a ProcessSet, the optimizer steps without an exchange.
    bucket_bytes: the maximum size of a bucket in bytes, for exchange_plan=ExchangePlan(bucket_bytes). None: the value of
    HOROVOD_FUSION_THRESHOLD, if that is set.
    exchange_plan: the sizes of buckets, and whether gradients are exchanged beside backward() or after it. None: if all gradients
    are on the CPU and have no codec but fp16 or bf16, a few plans are tried in turns within the first hundred exchanges, and the
    one with the fastest steps stays. Nothing is tried with groups: then, and with rules.Sharded on the CPU and rules.NextForward,
    buckets hold 4 MB, and otherwise 25 MB. The plan decides in which order numbers of
    more than two ranks are added: give an ExchangePlan for the same bits in every run. A path: the plan in this JSON file,
    which rank 0 reads; if there is no such file, rank 0 writes it when a plan has been chosen.
    rule: what the ranks exchange, and when: an object of gradwire.rules, such as hvd.rules.Sharded(); a class derived from Rule;
    or a function that makes a Rule from a Setup, which holds the arguments of this optimizer. None: gradients in every step, as
    this docstring describes.
    on_step: a function that is called on each rank with its StepMetrics after each step. step() propagates its exceptions.
    check_replicas_every: the number of steps after which the ranks compare hashes of their parameters and optimizer state; 0:
    never. With rules.Sharded or op=Adasum, only parameters are compared. Before the first step, the ranks compare the parameters
    that require gradients in any case, unless check_replicas_every=None. If values differ, step() raises ReplicasDiffer on all
    ranks.
    gradient_as_bucket_view: as in DistributedDataParallel, but True by default. False leaves parameter.grad in the memory that
    backward() has allocated, and copies the results to it.
    straggler_report_every: the number of exchanges after which stragglers() is updated. Rank 0 logs when the others have waited
    for the same rank in three reports in a row, each time for more than a tenth of a step and more than 5 ms on average. Rank 0
    also logs when this ends.

    The constructor is collective over the process set. Raises ValueError or TypeError for invalid arguments, RuntimeError
    before init(), and ValueError on all ranks if they have different parameters or shards.
    """

    @names_rank
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
        exchange_plan: ExchangePlan | str | os.PathLike[str] | None = None,
        rule: Callable[[Setup], Rule] | None = None,
        on_step: Callable[[StepMetrics], object] | None = None,
        check_replicas_every: int | None = 0,
        straggler_report_every: int = 100,
        gradient_as_bucket_view: bool = True,
        **former: NoReturn,
    ) -> None:
        for name in former:
            raise TypeError(_FORMER.get(name, f"DistributedOptimizer has no argument {name!r}"))
        plan = check_plan(exchange_plan, bucket_bytes, current_settings().fusion_bytes)
        reported = WantedReports(on_step, check_replicas_every, straggler_report_every)
        check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
        make_rule = _checked_rule(rule, op)
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("optimizer is a DistributedOptimizer already")
        parameters = tensors_of(optimizer.param_groups)
        names = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        given = None if named_parameters is None else names.values()
        checked = Policy(wanted(compression, allow), policy).checked(given)
        numbers = check_groups(num_groups, groups, parameters)
        self.optimizer = optimizer
        share_hooks(self, optimizer)  # because the wrapped optimizer runs them, each once
        self._passes = passes = Passes(backward_passes_per_step)
        self._skips = False

        make_setup = partial(
            Setup,
            op=op,
            predivide=gradient_predivide_factor,
            optimizer=optimizer,
            policy=checked,
            plan=plan,
            passes=passes,
            groups=numbers,
            sparse_as_dense=sparse_as_dense,
            gradient_as_bucket_view=gradient_as_bucket_view,
            tried=WeakTensorKeyDictionary(),  # for all worlds, since detach() clears the state that some optimizers begin with
        )
        self.attachment = Attachment(optimizer, process_set, make_rule, make_setup, passes, names, reported)
        """What connects this optimizer to the other ranks, for join(), elastic training and the like."""

    # What GradScaler gives to an optimizer whose step() unscales the gradients, as with fused=True.
    grad_scale: Tensor | None = shared("grad_scale")
    found_inf: Tensor | None = shared("found_inf")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether step() of the wrapped optimizer takes the scale and the check for Inf from GradScaler, so that the host
        does not wait for the check."""
        takes = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return takes and "grad_scaler" not in inspect.signature(self.optimizer.step).parameters

    @property
    def rule(self) -> Any:
        """Return the Rule of this optimizer, which may have methods of its own, such as report() with rules.LocalUpdates. On a
        rank outside of the process set, it is one that exchanges nothing."""
        return self.attachment.rule

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Complete the updates of all steps, and return the wrapped optimizer's state."""
        self.attachment.rule.settle()
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = value

    @property
    def communication_wait_s(self) -> float:
        """Return the seconds for which backward(), step() and synchronize() have waited for other ranks so far. A GPU's own
        waits are not counted."""
        return self.attachment.rule.wait_s

    @property
    def stats(self) -> ExchangeStats:
        """Return how many bytes this rank has sent so far, and how many it would have sent uncompressed. Counts the bytes of
        gradients; with rules.Sharded also of parameters; with rules.LocalUpdates also of the changes of parameters."""
        return self.attachment.rule.stats

    @property
    def exchange_plan(self) -> ExchangePlan | None:
        """Return the plan by which gradients are exchanged, once it stays, the same on all ranks. None while plans are tried, and
        where they are not."""
        return self.attachment.rule.exchange_plan

    def stragglers(self) -> Stragglers | None:
        """Return which rank made the others wait in the last straggler_report_every exchanges that all ranks have reported.

        None before the first report, in a world of one, with rules.NextForward, and with a rule that does not exchange
        gradients in buckets. Any rank may call it; it returns at once.
        """
        return self.attachment.reports.stragglers()

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    @names_rank
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
        if self.attachment.was_synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Write `with optimizer.skip_synchronize(): optimizer.step()`. After the backward() that completes "
                "backward_passes_per_step, gradients are averaged already, and synchronize() can be left out",
                UserWarning,
                stacklevel=2,
            )
        attached = self.attachment
        attached.was_synchronized = False
        attached.follow_groups()
        rule, reports = attached.rule, attached.reports
        reports.before_step(rule.synchronize if closure is None else None)
        loss = rule.take_step() if closure is None else self.optimizer.step(lambda: rule.evaluate(closure))
        rule.after_step()
        reports.after_step()
        return loss

    @uncompiled
    def weigh(self, samples: float | Tensor) -> None:
        """Set how many samples the gradients of the next backward() stand for, so that ranks may have batches of different sizes.
        The exchange then gives the gradient of the joint batch, sum(samples * gradient) / sum(samples) over the ranks.

        samples: the number of samples, or of tokens, over which the loss of this rank is a mean. A rank without samples gives 0.
        The gradients of its next backward() do not count, even if they are NaN, and it need not call backward(), unless one
        backward() of the other ranks reaches several optimizers.

        Once a rank calls it, all ranks call it before each backward(), and once in a step without backward(). It sends nothing:
        the ranks sum their samples at the beginning of the exchange, before gradients are sent.

        If several passes are accumulated, their samples add up, and the result is the mean over all of them, so do not divide
        losses by the number of passes. Until the exchange, parameter.grad has another unit. With op=Sum, the result is
        sum(samples * gradient). step(closure) weighs the loss by the samples of the step; a rank without samples returns a number
        or a tensor like the others, whose value does not count. With rules.LocalUpdates, the samples since the last exchange
        weigh the pseudo-gradients. docs/guides/machines-that-differ.md is the guide.

        Raises TypeError unless samples is a number, and RuntimeError with op=Adasum, and outside of the process set. The exchange
        raises ValueError on all ranks, and training can go on with the next batch, if samples are negative, infinite or NaN, if a
        pass was without weigh(), or if the samples of all ranks add up to 0. It raises Mismatch if some ranks have never called
        weigh().
        """
        with names_rank:
            self.attachment.rule.weigh(samples)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does, and the number of passes that count towards backward_passes_per_step."""
        self.attachment.zero_grad(set_to_none)

    @uncompiled
    def synchronize(self) -> None:
        """Exchange the gradients that were accumulated since the last exchange, if any. With rules.NextForward, also wait
        for running exchanges and complete the update of the last step.
        """
        self.attachment.rule.synchronize()
        self.attachment.was_synchronized = True

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that the norm of all of them together is at most max_norm. Return the norm before scaling.

        It does what torch.nn.utils.clip_grad_norm_ does. With rules.Sharded it is collective, and the norm
        is that of all ranks' shards. norm_type: the type of the norm; float("inf") for the largest element. Raises ValueError
        unless norm_type is above 0.
        """
        with names_rank:
            if not norm_type > 0:
                raise ValueError(f"norm_type must be a number > 0, not {norm_type!r}")
            return self.attachment.rule.clip_grad_norm_(max_norm, norm_type)

    @uncompiled
    def _before_method(self, name: str) -> None:
        """See Rule.before_method()."""
        with names_rank:
            self.attachment.rule.before_method(name)
            if self.attachment.rule.stats.exchanges:  # else a rank may call this alone, before training
                self.attachment.reports.compare_start(None)

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
        self.attachment.rule.settle()
        self.optimizer.add_param_group(param_group)
        try:
            self.attachment.add_new()
        except BaseException:
            self.optimizer.param_groups.pop()
            raise

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters, in the order of the param groups. A parameter without a name is called
        "parameter" with its number."""
        return list(self._parameter_names.values())

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Return the names by parameter. Programs that are written for Horovod read this attribute."""
        return names_of(self.attachment.parameters, self.attachment.called)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict() of the wrapped optimizer, so that checkpoints do not depend on this class.

        With codecs it has one more key, "gradwire", which other optimizers ignore: residuals, codec states and buckets, with
        which training resumes bit for bit. They differ between ranks, so every rank saves its own state_dict(). With
        rules.Sharded, every rank does so too: its state_dict() has the state of its share, and a key that describes the share.

        Raises RuntimeError, with codecs, while gradients are exchanged, as after a backward() that failed midway.
        """
        return self.attachment.rule.state_dict()

    @names_rank
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
        self.attachment.rule.load_state_dict(state_dict, also)

    @property
    def communicator(self) -> Communicator:
        """Return the Communicator of the ranks; it belongs to this optimizer alone."""
        return self.attachment.communicator

    def settle(self) -> None:
        """With rules.NextForward, wait for running exchanges, and complete the update of the last step.

        Call it before parameters are used outside of a forward of the model. Not collective: a single rank may call it.
        """
        self.attachment.rule.settle()

    @property
    def steps(self) -> int:
        """Return how many steps were taken."""
        return self.attachment.reports.step

    def close(self) -> None:
        """Remove the hooks, and close the Communicator unless it was given as process_set. The wrapped optimizer remains
        usable."""
        self.attachment.close()


def _checked_rule(rule: Any, op: str) -> Callable[[Setup], Rule]:
    """Return the function from a Setup to the Rule for the arguments rule= and op=. Raises TypeError."""
    if rule is None:
        return AdasumRule() if op == Adasum else Synchronous
    if not callable(rule) or (isinstance(rule, type) and not issubclass(rule, Rule)):
        raise TypeError(
            f"rule must be an object of gradwire.rules, a class derived from Rule, or a function that makes one, not "
            f"{rule!r}"
        )
    made: Callable[[Setup], Rule] = rule
    return made


@contextmanager
def _switched_on(owner: object, name: str) -> Iterator[None]:
    """Set an attribute to True, inside."""
    before = getattr(owner, name)
    setattr(owner, name, True)
    try:
        yield
    finally:
        setattr(owner, name, before)

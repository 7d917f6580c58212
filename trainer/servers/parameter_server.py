"""ParameterServer: a torch optimizer that runs at servers inside the ranks. Ranks need not wait for all others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.compression.codec import MatrixCodec, rehearse
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.torch_internals import share_hooks, uncompiled
from gradwire.trainer.checkpoint import agree, on_all_ranks, without
from gradwire.trainer.optimizers.copies import copied_attributes, of_copies
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer
from gradwire.trainer.reducer.agreement import agree_on_parameters, check_settings
from gradwire.trainer.reducer.arguments import check_named_parameters, check_optimizer
from gradwire.trainer.reducer.compression import Compression, Compressor, Policy, encoding_for
from gradwire.trainer.reducer.replicas import hash_of
from gradwire.trainer.servers.aggregator import Late, Scheme, ServerReport
from gradwire.trainer.servers.messages import text_of
from gradwire.trainer.servers.packing import Packing
from gradwire.trainer.servers.push_pull import GroupPushPull, Part, PushPull
from gradwire.trainer.servers.roles import Roles, checked_ranks, checked_scheme, cut, roles_of
from gradwire.trainer.servers.server import Entry, Key, Server
from gradwire.trainer.servers.serving import Servers, Timeouts
from gradwire.trainer.servers.worker import Worker
from gradwire.trainer.world.process_sets import ProcessSet, ProcessSetLike, global_process_set
from gradwire.trainer.world.world import current_world, names_rank

KEY = "gradwire_server"
"""The key of the parameter server's entry in state_dict()."""

_REPORT_S, _REPORT = 3.0, 0.1
"""The difference between the timeouts of waits that depend on each other, in seconds, and the largest fraction of the timeout_s
of init(). From the shortest: a server for a worker, an update for all workers, a worker for its server, the members of a group
for their first rank, which wait for timeout_s. The shortest wait raises first, and its error names the rank that does not
answer."""

_SLICE_S = 1.0
"""How many seconds Ctrl-C takes at most to interrupt serve()."""

_SMALL_NUMEL = 1 << 14
"""A parameter with fewer elements is hashed together with others."""


class ParameterServer(WrappingOptimizer):
    """Wraps an optimizer so that servers inside the ranks run it. Each server holds a part of the parameters.

    step() pushes this rank's gradients to all servers, waits until each of them lets it continue, and pulls the newest
    parameters. A server makes an update when the gradients of `quorum` ranks have arrived and grace_s seconds have passed, or
    when all have arrived. The update uses the weighted average. docs/guides/parameter-server.md is the guide.

    optimizer, named_parameters, process_set: as in DistributedOptimizer, but a rank outside of process_set raises
    ValueError. Each parameter is on one server, so the optimizer must update each parameter independently. An update uses the
    settings of the param groups on the server's rank. If that rank does not train, the update uses the settings that the
    lowest-numbered remaining worker had in its last step(). These settings must be numbers, strings or tuples.
    quorum: the number of ranks whose gradients make an update. Default: all that push (synchronous). Fewer: updates do not
    wait for the slowest ranks (Chen et al. 2016). 1: asynchronous (Dean et al. 2012).
    grace_s: how many seconds a server waits for further gradients after the quorum.
    staleness: how many steps a rank may be ahead of the slowest before it waits (Ho et al. 2013); None: any number.
    late: what happens to late gradients, which were computed with parameters from before the server's last update. "weight":
    the next update uses them, weighted by 1 / (1 + age); the age is the number of updates from the rank's last pull of
    parameters to the arrival of the gradients.
    "next": the next update uses them like others. "drop": they are counted but not used. Gradients that are used count towards
    the quorum.
    servers: the ranks of the process set that serve. Default: the ranks that do not train; if all train, all that push.
    workers: the ranks that train; default: all. Other ranks only serve, by serve().
    inner: a process set, such as the ranks of a host, that averages its gradients in every step. Only the first rank of this
    *group* pushes and pulls, and the quorum counts groups (hybrid; Kurth et al. 2017). Each group passes its own process set. A
    Communicator as inner= keeps its own timeout_s, which should not be less than that of init().
    compression: the compression of pushed gradients, as in DistributedOptimizer, except PowerSGD and "auto". The worker keeps
    the residuals of error feedback. Parameters are pulled uncompressed.

    Replicas must start equal: load or broadcast the parameters (broadcast_parameters) before making the optimizer, since the
    constructor copies them to the servers. If only some of the ranks of an update have a gradient of a parameter, the others
    contribute zeros; if none has one, the update leaves this parameter and its state as they are. Sparse gradients remain
    sparse. Runs with a quorum of all are bitwise reproducible. With a smaller quorum, results depend on the order of arrival.

    If a rank dies, the others continue if at least `quorum` remain and the rank was not a server; otherwise step() raises
    QuorumLost or PeerLost. If a rank of a group dies, the whole group ends. A lost rank cannot return. A rank that pushes
    nothing for almost the timeout_s of init(), at most 9 seconds less, counts as lost; a server that does not answer ends the
    step within timeout_s. The others do not wait for a rank that has called close().

    Each server has a small Communicator and a thread for each worker, which suits a few dozen ranks. Servers compute on the
    CPU; CUDA parameters are copied.

    The constructor is collective. Raises ValueError or TypeError for invalid arguments.
    """

    _step_supports_amp_scaling = True
    """Lets torch's GradScaler call step() on ranks whose gradients are not finite too: the others wait for their push."""

    @names_rank
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        quorum: int | None = None,
        grace_s: float = 0.0,
        staleness: int | None = None,
        late: Late = "weight",
        servers: Sequence[int] | None = None,
        workers: Sequence[int] | None = None,
        inner: ProcessSetLike = None,
        compression: Compressor = Compression.none,
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        check_optimizer(optimizer)
        copied_attributes(optimizer)  # checked before ranks connect
        for each in (process_set, inner):
            if isinstance(each, ProcessSet) and each.included() is False:
                raise ValueError(f"this process is not part of {each!r}, which alone may make this optimizer")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        names = [named.get(parameter, f"parameter {number}") for number, parameter in enumerate(parameters)]
        policy = Policy(compression)
        for encoding in policy.encodings:
            if isinstance(encoding.codec, MatrixCodec):
                raise ValueError(
                    f"compression={encoding.codec.name!r} compresses sums over all ranks, but what a rank pushes to a "
                    f"server is its own gradient: give a codec of buffers ({', '.join(CODECS)})"
                )
        self._timeout_s = current_world().settings.timeout_s
        self._servers = Servers("the parameter server", self._timeout_s)
        self._held: list[Tensor] = []  # the parameters of which this rank's server has copies
        self._push_pull: PushPull | None = None
        self._failure: BaseException | None = None
        self._hashes: list[int] = []  # of the parameters that this rank's servers have last copied or sent
        self.optimizer = optimizer
        share_hooks(self, optimizer)
        try:
            self._communicator = communicator = self._servers.open(process_set)
            group = None if inner is None else self._servers.open(inner)

            def scheme_of(count: int) -> Scheme:
                return Scheme(count if quorum is None else quorum, grace_s, staleness, late)

            self._roles, self._scheme = self._agree(servers, workers, group, scheme_of, policy)
            mine = dict(zip(names, parameters, strict=True))
            by_name = {name: mine[name] for name in agree_on_parameters(communicator, names, parameters)}
            self._trained = {name: parameter for name, parameter in by_name.items() if parameter.requires_grad}
            self._frozen = {name: parameter for name, parameter in by_name.items() if not parameter.requires_grad}
            self._connect(policy, group)
            self._hashes = self._hashed()
        except BaseException:
            self._servers.break_off()
            raise
        place = [communicator.rank, communicator.size, self._roles.servers, self._roles.groups]
        self._layout = [*place, policy.described[0], len(self._trained)]

    def _agree(
        self,
        servers: Sequence[int] | None,
        workers: Sequence[int] | None,
        group: Communicator | None,
        scheme_of: Callable[[int], Scheme],
        policy: Policy,
    ) -> tuple[Roles, Scheme]:
        """Return the roles of all ranks, and the Scheme; equal on all ranks. Raises ValueError if arguments are invalid or
        differ. group: joins this rank's group. scheme_of: returns the Scheme of a number of groups."""
        communicator = self._communicator
        serving, training = (
            checked_ranks(name, given, communicator.size)
            for name, given in (("servers", servers), ("workers", workers))
        )
        settings = {"servers": repr(serving), "workers": repr(training), "compression": policy.described[0]}
        check_settings(communicator, "ParameterServer", settings)
        members = None
        if group is not None:
            place = {launched: number for number, launched in enumerate(communicator.global_ranks)}
            if not all(launched in place for launched in group.global_ranks):
                raise ValueError("inner must be ranks of the process_set")
            members = [place[launched] for launched in group.global_ranks]
        roles = roles_of(serving, training, communicator.allgather_record(members))
        scheme = scheme_of(len(roles.groups))
        check_settings(communicator, "ParameterServer", {name: repr(value) for name, value in vars(scheme).items()})
        return roles, checked_scheme(scheme, len(roles.groups))

    def _connect(self, policy: Policy, group: Communicator | None) -> None:
        """Make the servers, and this rank's connections to them."""
        rank, roles, parameters = self._communicator.rank, self._roles, list(self._trained.values())
        chosen = [
            encoding_for(policy.encoding(name, parameter), parameter.dtype) for name, parameter in self._trained.items()
        ]
        for encoding in filter(None, dict.fromkeys(chosen)):  # compiles now, not in the first step
            rehearse(encoding.codec, torch.device("cpu"), with_feedback=encoding.feedback)
        parts = {}
        for place, (server, numbers) in enumerate(cut(parameters, roles.servers).items()):
            packing = Packing([parameters[number] for number in numbers], [chosen[number] for number in numbers])
            parts[server] = Part(Key("the parameters", place, server, packing), numbers)

        def add(server: Server) -> None:
            key, numbers = parts[rank]
            self._held = [parameters[number] for number in numbers]
            held = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in self._held]
            optimizer = of_copies(self.optimizer, dict(zip(self._held, held, strict=True)))
            server.add(key, held, optimizer, users=self.optimizer)

        report_s = min(_REPORT_S, _REPORT * self._timeout_s)
        timeouts = Timeouts(*(self._timeout_s - times * report_s for times in (3, 2, 1)))
        self._servers.connect(self._communicator, parts, roles.workers, self._scheme, timeouts, add, needed=parts)
        trains = {member for members in roles.groups for member in members}
        worker = None
        if rank in roles.workers:
            worker = Worker(self._servers.links, {server: self.optimizer for server in parts if server not in trains})
        if rank in trains:
            make = PushPull if group is None else partial(GroupPushPull, group=group)
            self._push_pull = make(rank, parameters, list(parts.values()), worker, timeouts.worker)

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the versions of this rank's parameters: the number of updates by each server that has parameters, in the
        order of the servers' ranks.
        """
        return tuple(self._training().versions)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Push this rank's gradients, wait until the servers let it continue, and copy the newest parameters into its own.

        closure: a function that clears gradients, calls backward() and returns this rank's loss, which step() returns.
        weight: the weight of these gradients in the average, such as their number of samples or tokens. With 0, the gradients are
        not used, even if they are NaN, and parameters without other gradients stay as they are.

        With a GradScaler: scaler.step() calls this on every rank. A rank whose gradients are not finite contributes none, and the
        update uses those of the others.

        Raises QuorumLost if too few ranks remain, and PeerLost if a server is lost. If anything but the servers has changed this
        rank's parameters, raises RuntimeError here, and CollectiveError in the next step of all other ranks. After any such
        error or Ctrl-C, every further call raises CollectiveError. Raises ValueError if a parameter requires a gradient now but
        did not when this optimizer was made.
        """
        with names_rank:
            push_pull = self._training()
            self._check_unbroken()
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight must be a finite number >= 0, not {weight!r}")
            for name, parameter in self._frozen.items():
                if parameter.requires_grad:
                    raise ValueError(
                        f"{name!r} requires a gradient, and did not when this optimizer was made, whose servers do not have "
                        "it: make a new one"
                    )
        refusal = self._changes()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients, weight = self._unscaled([parameter.grad for parameter in self._trained.values()], weight)
        try:
            with names_rank:
                push_pull.step(gradients, weight, refusal)
            self._hashes = self._hashed()
        except BaseException as error:  # also Ctrl-C, after which a server's answer may be due
            self._failure = error
            raise
        return loss

    @names_rank
    def _before_method(self, name: str) -> None:
        """Raise RuntimeError: the servers step copies of the wrapped optimizer."""
        raise RuntimeError(
            f"{name}() of the wrapped {type(self.optimizer).__name__} would have no effect on the servers, which step "
            f"copies of it. Call it before making the {type(self).__name__}; optimizer.optimizer.{name}() calls it on the "
            "optimizer of this rank alone"
        )

    @names_rank
    def serve(self) -> None:
        """Serve until all workers have left or are lost, on a rank that does not train.

        A worker that pushes nothing for almost the timeout_s of init() counts as lost. Returns at once if there are fewer
        parameters than servers, and none is left for this rank. Raises ValueError on a rank that trains; RuntimeError if
        parameters have changed since this optimizer was made, and the workers then raise CollectiveError.
        """
        self._check_open()
        if self._push_pull is not None:
            raise ValueError("serve() is for ranks that serve only; this one is one of workers=, and trains")
        if (refusal := self._changes()) is not None:
            if self._servers.server is not None:
                self._servers.server.refuse(refusal)
            raise RuntimeError(refusal)
        while not self._servers.join(time.monotonic() + _SLICE_S):
            pass

    @names_rank
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the parameters are divided among the servers when the optimizer is made."""
        raise ValueError("parameters cannot be added to an optimizer at a parameter server once it is made")

    @names_rank
    def report(self) -> ServerReport:
        """Return the counts of all contributions so far; on a rank that serves only, those at this server.

        A rank may call it at any time except during its step(). In a group, only the first rank may call it.
        """
        self._check_open()
        if self._push_pull is not None:
            return ServerReport.of(self._push_pull.counts())
        return ServerReport.of([] if self._servers.server is None else [self._servers.server.counts()])

    @names_rank
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank and its server. Every rank saves its own, after the same step, together with the
        model.

        Raises ValueError if the quorum is less than all, since ranks then have different states, and if some ranks only serve,
        since they do not stop between two steps. Raises CollectiveError after a step() that has failed, since only some servers
        may have updated.
        """
        self._check_synchronous("state_dict")
        self._check_unbroken()
        push_pull = self._training()
        mine = None if (entry := self._entry) is None else entry.state_dict()
        at = {
            "layout": self._layout,
            "version": push_pull.versions[0],
            "updater": mine,
            "worker": push_pull.state_dict(),
        }
        return {**self.optimizer.state_dict(), KEY: at}

    @names_rank
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, to resume training bit for bit on the same number of ranks with the same servers. Collective.

        Load the model first: the servers copy its parameters. Raises ValueError on all ranks, with nothing loaded, if the state
        of one rank does not fit or is that of another step; CollectiveError after a step() that has failed.
        """
        self._check_synchronous("load_state_dict")
        self._training()
        self._check_unbroken()
        if agree(self._communicator, KEY, [state_dict], self._read) is None:
            raise ValueError(f"load_state_dict needs the state_dict() of a {type(self).__name__}")
        before = self.state_dict()

        def take_back() -> None:
            self._take(before)
            self._communicator.barrier()

        on_all_ranks(self._communicator, lambda: self._take(state_dict), take_back)
        self._communicator.barrier()  # no rank contributes before all servers have loaded the version

    def _read(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state, and return what is equal in the states of all ranks."""
        saved = state_dict[KEY]
        if saved["layout"] != self._layout or (saved["updater"] or saved)["version"] != saved["version"]:
            raise ValueError(
                "saved by another rank, or with another number of ranks, other servers or other parameters"
            )
        return {"version": saved["version"]}

    def _take(self, state_dict: dict[str, Any]) -> None:
        """Load a state on this rank and at its server. Raises the errors of their load_state_dict()."""
        saved = state_dict[KEY]
        self.optimizer.load_state_dict(without(state_dict, KEY))
        if (entry := self._entry) is not None:
            entry.load_state_dict(saved["updater"], self._held)
        self._training().load_state_dict(saved["worker"], saved["version"])
        self._hashes = self._hashed()

    def close(self, timeout_s: float | None = None) -> None:
        """Announce that this rank sends nothing more, serve the others until they announce the same or are lost, and end the
        threads.

        timeout_s: how long to wait for the others; default: the timeout_s of init(). After that, logs a warning and stops
        serving them. The parameters and the wrapped optimizer remain usable. Further calls do nothing.
        """
        self._servers.close(timeout_s)

    @property
    def _entry(self) -> Entry | None:
        """Return what this rank's server holds; None if it does not serve."""
        return None if self._servers.server is None else next(iter(self._servers.server.entries.values()))

    def _check_open(self) -> None:
        if self._servers.is_closed:
            raise RuntimeError("this optimizer is closed")

    def _check_unbroken(self) -> None:
        """Raise CollectiveError after a step() that has failed."""
        if self._failure is not None:
            message = f"this optimizer is broken by an earlier failure: {text_of(self._failure)}"
            raise CollectiveError(f"rank {self._communicator.rank}: {message}") from self._failure

    @torch.no_grad()
    def _hashed(self) -> list[int]:
        """Return hashes of the parameters: one for each large one, and one for the small ones of each dtype and device, since
        each call takes time. (Tensor._version would not suffice: `parameter.data` and broadcasts leave it.)"""
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        hashes = []
        for parameter in self._trained.values():
            if parameter.numel() < _SMALL_NUMEL:
                small.setdefault((parameter.dtype, parameter.device), []).append(parameter.reshape(-1))
            else:
                hashes.append(hash_of(parameter))
        return hashes + [hash_of(torch.cat(parameters)) for parameters in small.values()]

    def _changes(self) -> str | None:
        """Return what to raise if parameters have changed since the servers copied or sent them; None if none has."""
        if self._hashed() == self._hashes:
            return None
        return (
            f"rank {self._communicator.rank}: this rank's parameters have changed since the servers copied or sent them, and "
            "the next pull would undo the change. Load or broadcast parameters before you make this optimizer or load its "
            "state; let step() of the wrapped optimizer, which the servers call, make changes such as clamp_()"
        )

    def _unscaled(self, gradients: list[Tensor | None], weight: float) -> tuple[list[Tensor | None], float]:
        """Return what to push: nothing, with weight 0, if the weight is 0 or a GradScaler has found gradients that are not
        finite; otherwise the gradients, divided in place by its scale unless unscale_() has done so."""
        if not weight or getattr(self, "found_inf", False):
            return [None] * len(gradients), 0.0
        if (scale := getattr(self, "grad_scale", None)) is not None:
            factor = 1 / scale.item()
            with torch.no_grad():
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(factor)
        return gradients, weight

    def _training(self) -> PushPull:
        """Return this rank's PushPull. Raises RuntimeError on a rank that only serves, and after
        close()."""
        self._check_open()
        if self._push_pull is None:
            raise RuntimeError("this rank serves only: call serve(), then close()")
        return self._push_pull

    def _check_synchronous(self, verb: str) -> None:
        count, trained = len(self._roles.groups), sum(map(len, self._roles.groups))
        if self._scheme.quorum < count or trained < self._communicator.size:
            raise ValueError(
                f"{verb} needs quorum={count}, all that push, not {self._scheme.quorum}, and no ranks that serve only: "
                "otherwise no step leaves all ranks with the same state. Save the model of one rank, and begin with new servers"
            )

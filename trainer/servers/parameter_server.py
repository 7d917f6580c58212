"""ParameterServer: a torch optimizer that runs at servers inside the ranks. Ranks need not wait for all others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.compression.rehearsal import rehearse
from gradwire.collectives.torch_internals import share_hooks
from gradwire.trainer.optimizers.copies import copied_attributes, of_copies
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer, uncompiled
from gradwire.trainer.reducer.agreement import agree_on_parameters, check_settings, on_all_ranks
from gradwire.trainer.reducer.arguments import check_named_parameters, check_optimizer
from gradwire.trainer.reducer.compression import Compression, Compressor, Policy, encoding_for
from gradwire.trainer.reducer.replicas import hash_of
from gradwire.trainer.servers.aggregator import Late, Scheme, ServerReport
from gradwire.trainer.servers.connection import text_of
from gradwire.trainer.servers.pushed import Packing, encodings_of
from gradwire.trainer.servers.roles import checked_ranks, checked_scheme, cut, roles_of
from gradwire.trainer.servers.server import Key, Server
from gradwire.trainer.servers.serving import ServerAndClients
from gradwire.trainer.servers.worker import Member, PushPullWorker
from gradwire.trainer.world.process_sets import ProcessSet, ProcessSetLike, global_process_set
from gradwire.trainer.world.world import current_world, here, names_rank

KEY = "gradwire_server"
"""The key of the parameter server's entry in state_dict()."""

_REPORT_S, _REPORT = 3.0, 0.1
"""The difference between the timeouts of waits that depend on each other, in seconds, and the largest fraction of the timeout_s
of init(). From the shortest: a server for a worker, an update for all workers, a worker for its server, the members of a group
for their first rank, which wait for timeout_s. The shortest wait raises first, and its error names the rank that does not
answer."""

_SLICE_S = 1.0

#: A parameter with fewer elements is hashed together with others.
_SMALL_NUMEL = 1 << 14
"""How many seconds Ctrl-C takes at most to interrupt serve()."""


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
                raise ValueError(f"{here()}this process is not part of {each!r}, which alone may make this optimizer")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        names = [named.get(parameter, f"parameter {number}") for number, parameter in enumerate(parameters)]
        encodings = encodings_of(compression)
        self._timeout_s = current_world().settings.timeout_s
        self._part = ServerAndClients(self._timeout_s)
        self._communicator = self._open(process_set)
        self._server: Server | None = None
        self._held: list[Tensor] = []  # the parameters of which this rank's server has copies
        self._worker: PushPullWorker | Member | None = None
        self._failure: BaseException | None = None
        self._hashes: list[int] = []  # of the parameters that this rank's servers have last copied or sent
        self.optimizer = optimizer
        share_hooks(self, optimizer)
        try:
            size = self._communicator.size
            asked = {
                name: checked_ranks(name, given, size) for name, given in (("servers", servers), ("workers", workers))
            }
            described = {name: repr(ranks) for name, ranks in asked.items()}
            check_settings(self._communicator, "ParameterServer", {**described, "compression": encodings.described[0]})
            group = None if inner is None else self._open(inner)
            self._roles = roles_of(
                asked["servers"], asked["workers"], self._communicator.allgather_record(self._numbers(group))
            )
            count = len(self._roles.groups)
            scheme = Scheme(count if quorum is None else quorum, grace_s, staleness, late)
            described = {name: repr(value) for name, value in vars(scheme).items()}
            check_settings(self._communicator, "ParameterServer", described)
            self._scheme = checked_scheme(scheme, count)
            mine = dict(zip(names, parameters, strict=True))
            by_name = {name: mine[name] for name in agree_on_parameters(self._communicator, names, parameters)}
            self._trained = {name: parameter for name, parameter in by_name.items() if parameter.requires_grad}
            self._frozen = {name: parameter for name, parameter in by_name.items() if not parameter.requires_grad}
            self._connect(list(self._trained), list(self._trained.values()), encodings, group)
            place = [self._communicator.rank, size]
            self._layout = [*place, self._roles.servers, self._roles.groups, encodings.described[0], len(self._trained)]
            self._hashes = self._hashed()
        except BaseException:
            self._part.break_off()
            raise

    def _open(self, process_set: ProcessSetLike) -> Communicator:
        """Return the Communicator of a process set."""
        if isinstance(process_set, Communicator):
            return process_set
        self._part.communicators.append(current_world().open_communicator(process_set))
        return self._part.communicators[-1]

    def _numbers(self, group: Communicator | None) -> list[int] | None:
        """Return a group's ranks, numbered as in the process set. Raises ValueError if one is not in the process set."""
        if group is None:
            return None
        place = {launched: number for number, launched in enumerate(self._communicator.global_ranks)}
        if not all(launched in place for launched in group.global_ranks):
            raise ValueError(f"{here()}inner must be ranks of the process_set")
        return [place[launched] for launched in group.global_ranks]

    def _connect(
        self, names: Sequence[str], parameters: Sequence[Tensor], encodings: Policy, group: Communicator | None
    ) -> None:
        """Make the servers, and this rank's connections to them."""
        rank, roles = self._communicator.rank, self._roles
        ranks = [place for place in current_world().ranks_of(self._communicator) if place is not None]
        if len(ranks) != self._communicator.size:
            raise ValueError(f"{here()}process_set is a Communicator of ranks that are not in this world")
        chosen = [
            encoding_for(encodings.encoding(name, parameter), parameter.dtype)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        for encoding in filter(None, dict.fromkeys(chosen)):  # compiles now, not in the first step
            rehearse(encoding.codec, torch.device("cpu"), with_feedback=encoding.feedback)
        shares = cut(parameters, roles.servers)
        keys = {}
        for server, numbers in shares.items():
            packing = Packing([parameters[number] for number in numbers], [chosen[number] for number in numbers])
            keys[server] = Key("the parameters", 0, server, packing)
        report_s = min(_REPORT_S, _REPORT * self._timeout_s)
        if rank in shares:
            self._server = Server(rank, roles.workers, self._scheme, self._timeout_s - 2 * report_s, needed=shares)
            self._held = [parameters[number] for number in shares[rank]]
            held = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in self._held]
            optimizer = of_copies(self.optimizer, dict(zip(self._held, held, strict=True)))
            self._server.add(keys[rank], held, optimizer, users=self.optimizer)
        trains = {member for members in roles.groups for member in members}
        self._part.connect(
            "the parameter server",
            self._server,
            shares,
            roles.workers,
            self._communicator,
            world_ranks=ranks,
            server_s=self._timeout_s - 3 * report_s,
            worker_s=self._timeout_s - report_s,
            settings={server: self.optimizer for server in shares if server not in trains},
        )
        worker_here = None
        if rank in roles.workers:
            parts = [(client, keys[server], shares[server]) for server, client in self._part.clients.items()]
            worker_here = PushPullWorker(rank, parameters, parts, self._timeout_s - report_s)
        self._worker = worker_here if group is None else Member(rank, group, parameters, worker_here, len(shares))

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
        weight: the weight of these gradients in the average, such as their number of tokens.

        With a GradScaler: scaler.step() calls this on every rank. A rank whose gradients are not finite contributes none, and the
        update uses those of the others.

        Raises QuorumLost if too few ranks remain, and PeerLost if a server is lost. If anything but the servers has changed this
        rank's parameters, raises RuntimeError here, and CollectiveError in the next step of all other ranks. After any such
        error or Ctrl-C, every further call raises CollectiveError. Raises ValueError if a parameter requires a gradient now but
        did not when this optimizer was made.
        """
        worker = self._training()
        self._check_unbroken()
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{here()}weight must be a finite number > 0, not {weight!r}")
        refusal = self._changes()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{here()}{name!r} requires a gradient, and did not when this optimizer was made, whose servers do not have "
                    "it: make a new one"
                )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients, weight = self._unscaled([parameter.grad for parameter in self._trained.values()], weight)
        try:
            worker.step(gradients, weight, refusal)
            self._hashes = self._hashed()
        except BaseException as error:  # also Ctrl-C, after which a server's answer may be due
            self._failure = error
            raise
        return loss

    def _before_method(self, name: str) -> None:
        """Raise RuntimeError: the servers step copies of the wrapped optimizer."""
        raise RuntimeError(
            f"{here()}{name}() of the wrapped {type(self.optimizer).__name__} would have no effect on the servers, which step "
            f"copies of it. Call it before making the {type(self).__name__}; optimizer.optimizer.{name}() calls it on the "
            "optimizer of this rank alone"
        )

    def serve(self) -> None:
        """Serve until all workers have left or are lost, on a rank that does not train.

        A worker that pushes nothing for almost the timeout_s of init() counts as lost. Returns at once if there are fewer
        parameters than servers, and none is left for this rank. Raises ValueError on a rank that trains; RuntimeError if
        parameters have changed since this optimizer was made, and the workers then raise CollectiveError.
        """
        self._check_open()
        if self._worker is not None:
            raise ValueError(f"{here()}serve() is for ranks that serve only; this one is one of workers=, and trains")
        if (refusal := self._changes()) is not None:
            if self._server is not None:
                self._server.refuse(refusal)
            raise RuntimeError(refusal)
        while (server := self._part.serving) is not None and not server.join(time.monotonic() + _SLICE_S):
            pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the parameters are divided among the servers when the optimizer is made."""
        raise ValueError(f"{here()}parameters cannot be added to an optimizer at a parameter server once it is made")

    def report(self) -> ServerReport:
        """Return the counts of all contributions so far; on a rank that serves only, those at this server.

        A rank may call it at any time except during its step(). In a group, only the first rank may call it.
        """
        self._check_open()
        if self._worker is not None:
            return ServerReport.of(self._worker.counts())
        return ServerReport.of([] if self._server is None else [self._server.counts()])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank and its server. Every rank saves its own, after the same step, together with the
        model.

        Raises ValueError if the quorum is less than all, since ranks then have different states, and if some ranks only serve,
        since they do not stop between two steps. Raises CollectiveError after a step() that has failed, since only some servers
        may have updated.
        """
        self._check_synchronous("state_dict")
        self._check_unbroken()
        mine = None if self._server is None else self._server.entries[0].state_dict()
        worker = self._training()
        at = {"layout": self._layout, "version": worker.versions[0], "updater": mine, "worker": worker.state_dict()}
        return {**self.optimizer.state_dict(), KEY: at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, to resume training bit for bit on the same number of ranks with the same servers. Collective.

        Load the model first: the servers copy its parameters. Raises ValueError on all ranks, with nothing loaded, if the state
        of one rank does not fit or is that of another step; CollectiveError after a step() that has failed.
        """
        self._check_synchronous("load_state_dict")
        self._training()
        self._check_unbroken()
        saved = state_dict.get(KEY) or {}
        version = saved.get("version")
        mine_fits = saved.get("layout") == self._layout and (saved.get("updater") or saved).get("version") == version
        gathered = self._communicator.allgather_record([mine_fits, version])
        wrong = [rank for rank, (fits, other) in enumerate(gathered) if not fits or other != gathered[0][1]]
        if wrong:
            raise ValueError(
                f"{here()}load_state_dict needs the state_dict() of this rank, from the same number of ranks, the same servers "
                f"and parameters, after the same step; this is not so on {', '.join(f'rank {rank}' for rank in wrong)}"
            )
        before = self.state_dict()

        def take_back() -> None:
            self._take(before)
            self._communicator.barrier()

        on_all_ranks(self._communicator, lambda: self._take(state_dict), take_back)
        self._communicator.barrier()  # no rank contributes before all servers have loaded the version

    def _take(self, state_dict: dict[str, Any]) -> None:
        """Load a state on this rank and at its server. Raises the errors of their load_state_dict()."""
        saved = state_dict[KEY]
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != KEY})
        if self._server is not None:
            self._server.entries[0].load_state_dict(saved["updater"], self._held)
        self._training().load_state_dict(saved["worker"], saved["version"])
        self._hashes = self._hashed()

    def close(self, timeout_s: float | None = None) -> None:
        """Announce that this rank sends nothing more, serve the others until they announce the same or are lost, and end the
        threads.

        timeout_s: how long to wait for the others; default: the timeout_s of init(). After that, logs a warning and stops
        serving them. The parameters and the wrapped optimizer remain usable. Further calls do nothing.
        """
        self._part.close(timeout_s)

    def _check_open(self) -> None:
        if self._part.is_closed:
            raise RuntimeError(f"{here()}this optimizer is closed")

    def _check_unbroken(self) -> None:
        """Raise CollectiveError after a step() that has failed."""
        if self._failure is not None:
            message = f"this optimizer is broken by an earlier failure: {text_of(self._failure)}"
            raise CollectiveError(f"{here()}{message}") from self._failure

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
            f"{here()}this rank's parameters have changed since the servers copied or sent them, and the next pull would undo "
            "the change. Load or broadcast parameters before you make this optimizer or load its state; let step() of the "
            "wrapped optimizer, which the servers call, make changes such as clamp_()"
        )

    def _unscaled(self, gradients: list[Tensor | None], weight: float) -> tuple[list[Tensor | None], float]:
        """Return what to push: nothing, with weight 0, if a GradScaler has found gradients that are not finite; otherwise the
        gradients, divided in place by its scale unless unscale_() has done so."""
        if getattr(self, "found_inf", 0):
            return [None] * len(gradients), 0.0
        if (scale := getattr(self, "grad_scale", None)) is not None:
            factor = 1 / scale.item()
            with torch.no_grad():
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(factor)
        return gradients, weight

    def _training(self) -> PushPullWorker | Member:
        """Return this rank's PushPullWorker or Member. Raises RuntimeError on a rank that only serves, and after
        close()."""
        self._check_open()
        if self._worker is None:
            raise RuntimeError(f"{here()}this rank serves only: call serve(), then close()")
        return self._worker

    def _check_synchronous(self, verb: str) -> None:
        count, trained = len(self._roles.groups), sum(map(len, self._roles.groups))
        if self._scheme.quorum < count or trained < self._communicator.size:
            raise ValueError(
                f"{here()}{verb} needs quorum={count}, all that push, not {self._scheme.quorum}, and no ranks that serve only: "
                "otherwise no step leaves all ranks with the same state. Save the model of one rank, and begin with new servers"
            )

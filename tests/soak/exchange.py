"""Make a drawn call on a rank, and compare every result with what it must be."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.engine.work import DONE
from tests.ranks.exact import Checks
from tests.ranks.test_collectives import VERBS, Case, elements
from tests.ranks.test_compressed import COMPRESSING
from tests.ranks.test_compressed import inputs as uneven_magnitudes
from tests.shot_model import ShotModel
from tests.soak.operations import OBJECT_VERBS, Operation, Session

CALLED_S = 60.0  # longer than the deadlines of operations
UNTOUCHED = 7  # what lies between and around the elements of a tensor
NOT_FINITE = (float("nan"), float("inf"), float("-inf"), -0.0)
RELATIVE_ERROR_OF_CASTS = {"fp16": 2.0**-10, "bf16": 2.0**-7}


class Waitable(Protocol):
    """What has a wait()."""

    def wait(self) -> None: ...


class Started(NamedTuple):
    """An operation that has been issued. check: compares its results, once it is done; replicas: what must then be the same
    on all ranks to the bit."""

    work: Waitable
    check: Callable[[Checks], None]
    replicas: Sequence[torch.Tensor] = ()


class _Inside:
    """An operation that a function issues, which is called after another operation. replicas: of the operation."""

    def __init__(self, issue: Callable[[], Started]) -> None:
        self._issue = issue
        self._called = threading.Event()
        self._started: Started | None = None
        self._error: BaseException | None = None
        self.replicas: list[torch.Tensor] = []

    def run(self) -> None:
        try:
            self._started = self._issue()
            self.replicas.extend(self._started.replicas)
        except BaseException as error:  # wait() raises it
            self._error = error
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(CALLED_S), "a function was not called"
        if self._error is not None:
            raise self._error
        assert self._started is not None
        self._started.work.wait()

    def check(self, checks: Checks) -> None:
        assert self._started is not None
        self._started.check(checks)


class Laid(NamedTuple):
    """A tensor in some layout, and the elements around it that nobody may write."""

    tensor: torch.Tensor
    around: torch.Tensor


class _Memory:
    """Lays tensors in the memory of one operation. shared: tensors of the Communicator's own memory that are free, by dtype and
    length, for this operation to take and to give back."""

    def __init__(
        self, comm: Communicator, layout: str, shared: dict[tuple[torch.dtype, int], list[torch.Tensor]]
    ) -> None:
        self._comm, self._layout, self._shared = comm, layout, shared
        self._laid: list[Laid] = []

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of these values."""
        numel = values.numel()
        base = torch.full((2 * numel + 3,), UNTOUCHED, dtype=values.dtype)
        laid = Laid(values.clone(), base[:0])
        if self._layout == "every second":
            laid = Laid(base[: 2 * numel : 2], base[1 : 2 * numel : 2])
        elif self._layout == "shifted":
            laid = Laid(base[1 : numel + 1], base[numel + 1 :])
        elif self._layout == "columns" and numel and numel % 2 == 0:
            laid = Laid(torch.empty(numel // 2, 2, dtype=values.dtype).t(), base[:0])
        elif self._layout == "shared":
            kept = self._shared[values.dtype, numel]
            laid = Laid(kept.pop() if kept else self._comm.empty(numel, dtype=values.dtype), base[:0])
        laid.tensor.copy_(values.view(laid.tensor.shape))
        self._laid.append(laid)
        return laid.tensor

    def check(self, checks: Checks) -> None:
        """See that nothing around the tensors was written, and give the memory back."""
        for tensor, around in self._laid:
            checks.equal(around, torch.full_like(around, UNTOUCHED))
            if self._layout == "shared":
                self._shared[tensor.dtype, tensor.numel()].append(tensor)


@dataclass(frozen=True)
class _Drawn(Case):
    """A verb's call as an operation has it."""

    operation: Operation
    memory: _Memory

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.memory.lay(tensor)

    def cuts(self) -> list[int]:
        return list(self.operation.parts)

    def counts(self) -> tuple[int, Sequence[Sequence[int]]]:
        return self.numel, self.operation.counts


class Exchange:
    """Issues the operations of one session on its Communicator."""

    def __init__(self, session: Session, comm: Communicator) -> None:
        self._session, self._comm = session, comm
        self._shared: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def start(self, position: int, operation: Operation, *, asynchronous: bool) -> Started:
        """Issue an operation; position: in its session."""
        if not operation.inside:
            return self._issue(position, operation, asynchronous=asynchronous)
        inside = _Inside(partial(self._issue, position, operation, asynchronous=asynchronous))
        self._comm.allreduce(torch.ones(1000), async_op=True).when_done(inside.run)
        if not asynchronous:
            inside.wait()
        return Started(inside, inside.check, inside.replicas)

    def _issue(self, position: int, operation: Operation, *, asynchronous: bool) -> Started:
        o, memory = operation, _Memory(self._comm, operation.layout, self._shared)
        kind = "ordinary" if o.layout == "contiguous" else "transposed"  # of what has rows
        case = _Drawn(self._comm, o.algorithm, o.dtype, o.op, o.numel, kind, o.root, o, memory)
        how = {"async_op": asynchronous, "algorithm": o.algorithm}
        if o.verb == "barrier":
            return Started(self._comm.barrier(**how), lambda checks: None)
        if o.verb in OBJECT_VERBS:
            return self._objects(o, position)
        if o.verb == "compressed":
            return self._compressed(o, position, how)
        if o.values == "any":
            return self._allreduce_of_any(case, position, how)
        return self._grouped_allreduce(case, how) if o.together else self._verb(case, how)

    def _verb(self, case: _Drawn, how: dict[str, Any]) -> Started:
        """Call a verb as its test calls it."""
        o = case.operation
        prescale, postscale = o.scales
        call, tensors, wanted = VERBS[o.verb + ("_list" if o.parts else "_splits" if o.counts else "")][1](case)
        early = Checks()
        if o.verb == "allreduce":
            call, wanted = (
                partial(call, prescale=prescale, postscale=postscale),
                [scaled(wanted[0], prescale * postscale)],
            )
            for repeat in range(1, o.repeats):
                call(algorithm=o.algorithm)
                with early.case(repeat=repeat):
                    early.equal(elements(tensors[0]), wanted[0])
                tensors[0].copy_(case.own().view(tensors[0].shape))
        work = call(**how)

        def check(checks: Checks) -> None:
            checks.failures.extend(early.failures)
            for tensor, values in zip(tensors, wanted, strict=False):
                checks.equal(elements(tensor), values.reshape(-1))
            case.memory.check(checks)

        alike = {"allreduce": 1, "broadcast": 1, "allgather": len(o.parts) or 1}
        return Started(work, check, tensors[: alike.get(o.verb, 0)])

    def _allreduce_of_any(self, case: _Drawn, position: int, how: dict[str, Any]) -> Started:
        """Numbers whose sum depends on the order, and some that are not finite."""
        o, size = case.operation, self._comm.size
        random = self._session.random(f"values/{position}")
        generator = torch.Generator().manual_seed(random.getrandbits(63))
        every = torch.randn(size, o.numel, generator=generator, dtype=torch.float64).to(o.dtype)
        for _ in range(min(4, o.numel)):
            every[random.randrange(size), random.randrange(o.numel)] = random.choice(NOT_FINITE)
        tensor = case.make(every[self._comm.rank])
        work = self._comm.allreduce(tensor, o.op, **how)

        def check(checks: Checks) -> None:
            wide = every.double()
            expected = {"min": lambda: wide.amin(0), "max": lambda: wide.amax(0)}.get(o.op, lambda: wide.sum(0))()
            divisor = size if o.op == "average" else 1
            allowed = 0.0 if o.op in ("min", "max") else torch.finfo(o.dtype).eps * (size + 1)
            actual = tensor.reshape(-1).double()
            expected = expected / divisor
            right = (actual - expected).abs() <= allowed * wide.abs().sum(0) / divisor
            right |= (actual == expected) | (actual.isnan() & expected.isnan())
            _compare(checks, o, right, actual, expected)
            case.memory.check(checks)

        return Started(work, check, [tensor])

    def _grouped_allreduce(self, case: _Drawn, how: dict[str, Any]) -> Started:
        cases = [replace(case, dtype=dtype, numel=numel) for dtype, numel in case.operation.together]
        tensors = [each.make(each.own()) for each in cases]
        work = self._comm.grouped_allreduce(tensors, case.op, **how)

        def check(checks: Checks) -> None:
            for tensor, each in zip(tensors, cases, strict=True):
                checks.equal(elements(tensor), each.total())
            case.memory.check(checks)

        return Started(work, check, tensors)

    def _compressed(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        """Against a model of it in one process where there is one: of all ways but those that add codes as they are."""
        comm, codec, steps = self._comm, COMPRESSING[o.codec], range(o.steps)
        numbers = [uneven_magnitudes(comm.size, o.numel, 1000 * position + step) for step in steps]
        results = [numbers[step][comm.rank].clone() for step in steps]
        feedback = comm.new_feedback(codec, o.numel) if o.steps > 1 and codec.takes_feedback else None
        options = {"compression": codec, "feedback": feedback, "seed": position}
        for step in steps[:-1]:
            comm.allreduce(results[step], o.op, step=step, algorithm=o.algorithm, **options)
        work = comm.allreduce(results[-1], o.op, step=steps[-1], **options, **how)
        modelled = o.algorithm == shot_of(codec) or not codec.summable

        def check(checks: Checks) -> None:
            if modelled:
                segment_bytes = comm.segment_bytes
                with_feedback = feedback is not None
                model = ShotModel(codec, o.numel, comm.topology.hosts, segment_bytes, with_feedback=with_feedback)
                for step in steps:
                    checks.equal(results[step], model.step(numbers[step], o.op, step, seed=position))
            else:
                self._check_added_codes(checks, o, results[0], torch.stack(numbers[0]).double())

        return Started(work, check, results)

    def _check_added_codes(self, checks: Checks, o: Operation, result: torch.Tensor, every: torch.Tensor) -> None:
        divisor = self._comm.size if o.op == "average" else 1
        expected, magnitude = every.sum(0) / divisor, every.abs().sum(0) / divisor
        if o.codec.startswith("randomk"):  # what it leaves out is zero
            expected = torch.where(result == 0, 0.0, expected)
        allowed = (self._comm.size + 1) * RELATIVE_ERROR_OF_CASTS.get(o.codec, 1e-6) * magnitude + 1e-5
        _compare(checks, o, (result - expected).abs() <= allowed, result, expected)

    def _objects(self, o: Operation, position: int) -> Started:
        comm, is_root = self._comm, self._comm.rank == o.root

        def drawn(rank: int) -> object:
            random = self._session.random(f"objects/{position}/{rank}")
            return {"rank": rank, "bytes": random.randbytes(random.choice((0, 1, 100, 50_000))), "none": None}

        everyone = [drawn(rank) for rank in range(comm.size)]
        mine = everyone[comm.rank]
        call, expected = {
            "allgather_object": (lambda: comm.allgather_object(mine), everyone),
            "broadcast_object": (lambda: comm.broadcast_object(mine, o.root), everyone[o.root]),
            "gather_object": (lambda: comm.gather_object(mine, o.root), everyone if is_root else None),
            "scatter_object": (lambda: comm.scatter_object(everyone if is_root else None, o.root), mine),
        }[o.verb]
        actual = call()

        def check(checks: Checks) -> None:
            if actual != expected:
                checks.failures.append(f"{o}: {str(actual)[:200]} instead of {str(expected)[:200]}")

        return Started(DONE, check)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor


def _compare(checks: Checks, o: Operation, right: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Add the elements that are not right, where equality is not the question."""
    wrong = (~right).nonzero().flatten().tolist()
    if wrong:
        first = f"the first at {wrong[0]}: {actual[wrong[0]].item()} instead of {expected[wrong[0]].item()}"
        checks.failures.append(f"{o}: {len(wrong)} of {len(right)} wrong, {first}")


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Of the bits of some tensors."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        whole = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        hashed.update(whole.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()

"""Make a drawn call on a rank, and compare every result with what it must be."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.run.work import Work
from tests.ranks.exact import Checks, contribution, reduced
from tests.ranks.test_compressed import codec_named
from tests.ranks.test_compressed import inputs as uneven_magnitudes
from tests.shot_model import ShotModel
from tests.soak.operations import Operation, Session

UNTOUCHED = 7  # what lies between and around the elements of a tensor
NOT_FINITE = (float("nan"), float("inf"), float("-inf"), -0.0)
RELATIVE_ERROR_OF_CASTS = {"fp16": 2.0**-10, "bf16": 2.0**-7}


class Started(NamedTuple):
    """An operation that has been issued. check: compares its results, once it is done; replicas: what must then be the same
    on all ranks to the bit."""

    work: Work | None
    check: Callable[[Checks], None]
    replicas: Sequence[torch.Tensor] = ()


class Laid(NamedTuple):
    """A tensor in some layout, and the elements around it that nobody may write."""

    tensor: torch.Tensor
    around: torch.Tensor

    def check(self, checks: Checks, expected: torch.Tensor) -> None:
        checks.equal(self.tensor.reshape(-1), expected)
        checks.equal(self.around, torch.full_like(self.around, UNTOUCHED))


class Exchange:
    """Issues the operations of one session on its Communicator."""

    def __init__(self, session: Session, comm: Communicator) -> None:
        self._session, self._comm = session, comm
        self._shared: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def start(self, position: int, operation: Operation, *, asynchronous: bool) -> Started:
        """Issue an operation; position: in its session."""
        call = getattr(self, f"_{operation.verb}")
        started: Started = call(operation, position, {"async_op": asynchronous, "algorithm": operation.algorithm})
        return started

    def _mine(self, operation: Operation, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._of(self._comm.rank, operation, numel, dtype)

    def _of(self, rank: int, operation: Operation, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return contribution(rank, self._comm.size, numel, dtype or operation.dtype, operation.op)

    def _reduced(self, operation: Operation, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return reduced(self._comm.size, numel, dtype or operation.dtype, operation.op)

    def _lay(self, values: torch.Tensor, layout: str) -> Laid:
        numel = values.numel()
        base = torch.full((2 * numel + 3,), UNTOUCHED, dtype=values.dtype)
        laid = Laid(values.clone(), base[:0])
        if layout == "every second":
            laid = Laid(base[: 2 * numel : 2], base[1 : 2 * numel : 2])
        elif layout == "shifted":
            laid = Laid(base[1 : numel + 1], base[numel + 1 :])
        elif layout == "columns" and numel and numel % 2 == 0:
            laid = Laid(torch.empty(numel // 2, 2, dtype=values.dtype).t(), base[:0])
        elif layout == "shared":
            kept = self._shared[values.dtype, numel]
            laid = Laid(kept.pop() if kept else self._comm.empty(numel, dtype=values.dtype), base[:0])
        laid.tensor.copy_(values.view(laid.tensor.shape))
        return laid

    def _empty(self, numel: int, operation: Operation) -> Laid:
        return self._lay(torch.full((numel,), UNTOUCHED, dtype=operation.dtype), operation.layout)

    def _checked(
        self, laid: Laid, operation: Operation, expected: Callable[[], torch.Tensor]
    ) -> Callable[[Checks], None]:
        def check(checks: Checks) -> None:
            laid.check(checks, expected())
            if operation.layout == "shared":
                self._shared[laid.tensor.dtype, laid.tensor.numel()].append(laid.tensor)

        return check

    # Reductions

    def _allreduce(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        if o.values == "any":
            return self._allreduce_of_any(o, position, how)
        prescale, postscale = o.scales
        early = Checks()
        laid = self._lay(self._mine(o, o.numel), o.layout)

        def expected() -> torch.Tensor:
            result = self._reduced(o, o.numel)
            return result if o.scales == (1.0, 1.0) else result * (prescale * postscale)

        for repeat in range(1, o.repeats):
            self._comm.allreduce(laid.tensor, o.op, prescale=prescale, postscale=postscale, algorithm=o.algorithm)
            with early.case(repeat=repeat):
                laid.check(early, expected())
            laid.tensor.copy_(self._mine(o, o.numel).view(laid.tensor.shape))
        work = self._comm.allreduce(laid.tensor, o.op, prescale=prescale, postscale=postscale, **how)
        last = self._checked(laid, o, expected)

        def check(checks: Checks) -> None:
            checks.failures.extend(early.failures)
            last(checks)

        return Started(work, check, [laid.tensor])

    def _allreduce_of_any(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        """Numbers whose sum depends on the order, and some that are not finite."""
        random = self._session.random(f"values/{position}")
        generator = torch.Generator().manual_seed(random.getrandbits(63))
        size = self._comm.size
        every = torch.randn(size, o.numel, generator=generator, dtype=torch.float64).to(o.dtype)
        for _ in range(min(4, o.numel)):
            every[random.randrange(size), random.randrange(o.numel)] = random.choice(NOT_FINITE)
        laid = self._lay(every[self._comm.rank], o.layout)
        work = self._comm.allreduce(laid.tensor, o.op, **how)

        def check(checks: Checks) -> None:
            wide = every.double()
            expected = {"min": lambda: wide.amin(0), "max": lambda: wide.amax(0)}.get(o.op, lambda: wide.sum(0))()
            divisor = size if o.op == "average" else 1
            allowed = 0.0 if o.op in ("min", "max") else torch.finfo(o.dtype).eps * (size + 1)
            actual = laid.tensor.reshape(-1).double()
            expected = expected / divisor
            right = (actual - expected).abs() <= allowed * wide.abs().sum(0) / divisor
            right |= (actual == expected) | (actual.isnan() & expected.isnan())
            _compare(checks, o, right, actual, expected)
            checks.equal(laid.around, torch.full_like(laid.around, UNTOUCHED))

        return Started(work, check, [laid.tensor])

    def _grouped_allreduce(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        laid = [self._lay(self._mine(o, numel, dtype), o.layout) for dtype, numel in o.together]
        work = self._comm.grouped_allreduce([each.tensor for each in laid], o.op, **how)
        checked = [
            self._checked(each, o, lambda dtype=dtype, numel=numel: self._reduced(o, numel, dtype))  # type: ignore[misc]
            for each, (dtype, numel) in zip(laid, o.together, strict=True)
        ]
        return Started(work, lambda checks: [check(checks) for check in checked] and None, [e.tensor for e in laid])

    def _compressed(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        """Against a model of it in one process where there is one: of all ways but those that add codes as they are."""
        comm, codec, steps = self._comm, codec_named(o.codec), range(o.steps)
        numbers = [uneven_magnitudes(comm.size, o.numel, 1000 * position + step) for step in steps]
        results = [numbers[step][comm.rank].clone() for step in steps]
        feedback = comm.new_feedback(codec, o.numel) if o.steps > 1 else None
        options = {"codec": codec, "feedback": feedback, "seed": position}
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

    def _reduce_scatter(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        parts = o.parts or (o.numel,) * self._comm.size
        values = self._mine(o, sum(parts))
        given = [self._lay(piece, o.layout) for piece in (values.split(parts) if o.parts else [values])]
        output = self._empty(parts[self._comm.rank], o)
        tensors = [each.tensor for each in given]
        work = self._comm.reduce_scatter(output.tensor, tensors if o.parts else tensors[0], o.op, **how)

        def check(checks: Checks) -> None:
            output.check(checks, self._reduced(o, sum(parts)).split(parts)[self._comm.rank])
            self._check_given(checks, given, values.split(parts) if o.parts else [values])

        return Started(work, check)

    def _reduce(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        laid = self._lay(self._mine(o, o.numel), o.layout)
        work = self._comm.reduce(laid.tensor, o.root, o.op, **how)
        result = self._reduced if self._comm.rank == o.root else self._mine
        return Started(work, self._checked(laid, o, lambda: result(o, o.numel)))

    # Movement

    def _allgather(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        comm = self._comm
        parts = o.parts or (o.numel,) * comm.size
        given = self._lay(self._mine(o, parts[comm.rank]), o.layout)
        outputs = [self._empty(numel, o) for numel in (o.parts or [sum(parts)])]
        tensors = [output.tensor for output in outputs]
        work = comm.allgather(tensors if o.parts else tensors[0], given.tensor, **how)

        def check(checks: Checks) -> None:
            pieces = [self._of(rank, o, numel) for rank, numel in enumerate(parts)]
            for output, piece in zip(outputs, pieces if o.parts else [torch.cat(pieces)], strict=True):
                output.check(checks, piece)
            self._check_given(checks, [given], [self._mine(o, parts[comm.rank])])

        return Started(work, check, tensors)

    def _broadcast(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        laid = self._lay(self._mine(o, o.numel), o.layout)
        work = self._comm.broadcast(laid.tensor, o.root, **how)
        return Started(work, self._checked(laid, o, lambda: self._of(o.root, o, o.numel)), [laid.tensor])

    def _gather(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        comm = self._comm
        given = self._lay(self._mine(o, o.numel), o.layout)
        outputs = [self._empty(o.numel, o) for _ in range(comm.size)] if comm.rank == o.root else []
        work = comm.gather(given.tensor, [output.tensor for output in outputs] or None, o.root, **how)

        def check(checks: Checks) -> None:
            for rank, output in enumerate(outputs):
                output.check(checks, self._of(rank, o, o.numel))
            self._check_given(checks, [given], [self._mine(o, o.numel)])

        return Started(work, check)

    def _scatter(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        comm = self._comm
        values = [self._of(rank, o, o.numel) for rank in range(comm.size)] if comm.rank == o.root else []
        given = [self._lay(each, o.layout) for each in values]
        output = self._empty(o.numel, o)
        work = comm.scatter(output.tensor, [each.tensor for each in given] or None, o.root, **how)

        def check(checks: Checks) -> None:
            output.check(checks, self._mine(o, o.numel))
            self._check_given(checks, given, values)

        return Started(work, check)

    def _alltoall(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        """Parts of numel elements; or rows of so many columns, counts[i][j] of them from rank i to rank j."""
        comm, rank = self._comm, self._comm.rank
        sent = o.counts or ((1,) * comm.size,) * comm.size
        values = self._mine(o, o.numel * sum(sent[rank]))
        given = self._lay(values, o.layout)
        received = [sent[peer][rank] for peer in range(comm.size)]
        output = self._empty(o.numel * sum(received), o)
        if o.counts:
            rows = [tensor.reshape(-1, o.numel) for tensor in (output.tensor, given.tensor)]
            work = comm.alltoall(rows[0], rows[1], received, list(sent[rank]), **how)
        else:
            rows = [output.tensor]
            work = comm.alltoall(output.tensor, given.tensor, **how)

        def check(checks: Checks) -> None:
            pieces = []
            for peer in range(comm.size):
                theirs = self._of(peer, o, o.numel * sum(sent[peer]))
                pieces.append(theirs.split([o.numel * count for count in sent[peer]])[rank])
            checks.equal(rows[0].reshape(-1), torch.cat(pieces))
            self._check_given(checks, [given], [values])

        return Started(work, check)

    def _barrier(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        return Started(self._comm.barrier(**how), lambda checks: None)

    # Objects

    def _object(self, position: int, rank: int) -> object:
        random = self._session.random(f"objects/{position}/{rank}")
        return {"rank": rank, "bytes": random.randbytes(random.choice((0, 1, 100, 50_000))), "none": None}

    def _objects(self, position: int) -> list[object]:
        return [self._object(position, rank) for rank in range(self._comm.size)]

    def _compare_objects(self, o: Operation, actual: object, expected: object) -> Started:
        def check(checks: Checks) -> None:
            if actual != expected:
                checks.failures.append(f"{o}: {str(actual)[:200]} instead of {str(expected)[:200]}")

        return Started(None, check)

    def _allgather_object(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        everyone = self._objects(position)
        return self._compare_objects(o, self._comm.allgather_object(everyone[self._comm.rank]), everyone)

    def _broadcast_object(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        everyone = self._objects(position)
        received = self._comm.broadcast_object(everyone[self._comm.rank], o.root)
        return self._compare_objects(o, received, everyone[o.root])

    def _gather_object(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        everyone = self._objects(position)
        received = self._comm.gather_object(everyone[self._comm.rank], o.root)
        return self._compare_objects(o, received, everyone if self._comm.rank == o.root else None)

    def _scatter_object(self, o: Operation, position: int, how: dict[str, Any]) -> Started:
        everyone = self._objects(position)
        received = self._comm.scatter_object(everyone if self._comm.rank == o.root else None, o.root)
        return self._compare_objects(o, received, everyone[self._comm.rank])

    def _check_given(self, checks: Checks, given: Sequence[Laid], values: Sequence[torch.Tensor]) -> None:
        """What is only read must be as it was."""
        for each, wanted in zip(given, values, strict=True):
            each.check(checks, wanted)


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

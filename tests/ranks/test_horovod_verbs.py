"""Horovod's verbs: defaults, forms, shapes, groups, names, integers, and errors found before data moves."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gradwire as hvd
from gradwire.collectives import CollectiveTimeout, PeerLost
from gradwire.trainer.horovod.handles import Handle
from tests.ranks.forms import GROUPED, VERBS, done, forms
from tests.ranks.training import on_ranks


def own(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that tell the rank: 1, 2, ... times rank + 1."""
    numel = torch.Size(shape).numel()
    return (torch.arange(1, numel + 1) * (hvd.rank() + 1)).to(dtype).view(shape)


def uneven(rank: int, size: int) -> list[Tensor]:
    """Return what a rank has to gather: as many rows as its number, two, what is missing to as many as ranks, and three."""
    return [
        torch.full((rank, 2), float(rank)),
        torch.full((2,), rank, dtype=torch.int16),
        torch.full((size - rank, 1, 2), rank, dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).t() + rank,
    ]


@on_ranks(3)
def test_gathers_uneven_rows_alone_and_in_groups() -> None:
    rank, size = hvd.rank(), hvd.size()
    wanted = [torch.cat(parts) for parts in zip(*(uneven(other, size) for other in range(size)), strict=True)]
    found = [[done(form(tensor)) for tensor in uneven(rank, size)] for form in forms("allgather").values()]
    found += [done(form(uneven(rank, size))) for form in forms("grouped_allgather").values()]
    for gathered in found:
        assert isinstance(gathered, list)
        for one, other in zip(gathered, wanted, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
    assert hvd.grouped_allgather([]) == []


@on_ranks(3)
def test_scatters_groups() -> None:
    size = hvd.size()
    given = [own(7, dtype=torch.float64), own(size, 2), own(2, dtype=torch.int64)]
    for options in (
        {"op": hvd.Sum},
        {"op": hvd.Average},
        {"op": hvd.Max},
        {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0},
    ):
        alone = [hvd.reducescatter(tensor, **options) for tensor in given]
        for form in forms("grouped_reducescatter").values():
            assert all(map(torch.equal, done(form(given, **options)), alone))
    assert torch.equal(
        alone[0], 1.5 * sum(range(1, size + 1)) * torch.arange(1.0, 8.0).double().tensor_split(size)[hvd.rank()]
    )
    halved = hvd.grouped_reducescatter(given, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert [tensor.dtype for tensor in halved] == [tensor.dtype for tensor in given]
    assert torch.equal(halved[1], hvd.reducescatter(given[1], op=hvd.Sum))
    with pytest.raises(ValueError, match="grouped_reducescatter has no codecs"):
        hvd.grouped_reducescatter(given, compression="int8")


@on_ranks(3)
def test_integers() -> None:
    """Times a factor in float64, truncated toward zero, before and after; an average with a factor is truncated once."""
    size = hvd.size()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        sign = 1 if dtype is torch.uint8 else -1
        numbers = [[sign * (3 * rank + i) for i in range(1, 5)] for rank in range(size)]
        given = torch.tensor(numbers[hvd.rank()], dtype=dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            for prescale, postscale in ((1, 1), (0.5, 1), (1, 0.75), (1.5, 2), (1, 2)):
                wanted = [of_integers(op, column, prescale, postscale) for column in zip(*numbers, strict=True)]
                options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
                for form in forms("allreduce").values():
                    assert done(form(given.clone(), **options)).tolist() == wanted, (dtype, options)
                mixed = hvd.grouped_allreduce([given.double(), given], **options)
                assert mixed[1].tolist() == wanted
                assert mixed[0].dtype is torch.float64
                mine = list(torch.tensor(wanted).tensor_split(size)[hvd.rank()])
                for form in forms("reducescatter").values():
                    assert done(form(given, **options)).tolist() == mine
    exact = hvd.allreduce(torch.tensor([2**53 + 1]), op=hvd.Max)
    assert exact.item() == 2**53 + 1, "without a factor nothing is rounded"
    if hvd.rank() == 0:  # alone: before anything is sent
        for verb in forms("allreduce", "reducescatter").values():
            with pytest.raises(TypeError, match=r"prescale='2' and postscale=1.0; numbers are needed"):
                verb(own(2, dtype=torch.int32), prescale_factor="2")
            with pytest.raises(TypeError, match="average of bool"):
                verb(torch.ones(2, dtype=torch.bool))
            with pytest.raises(TypeError, match=r"need a floating-point tensor, not torch.bool"):
                verb(torch.ones(2, dtype=torch.bool), op=hvd.Sum, prescale_factor=2.0)


def of_integers(op: str, numbers: tuple[int, ...], prescale: float, postscale: float) -> int:
    """In exact arithmetic; int() truncates toward zero."""
    scaled = [int(number * Fraction(prescale)) for number in numbers]
    if op == hvd.Max:
        return int(max(scaled) * Fraction(postscale))
    return int(sum(scaled) * Fraction(postscale) / (len(scaled) if op == hvd.Average else 1))


@on_ranks(2)
def test_names() -> None:
    """A name in flight is refused, whatever form asks for it; the one that has it ends well; then it is free."""
    size = hvd.size()
    of_verbs = {verb: list(forms(verb).values()) for verb in (*VERBS, *GROUPED)}
    for verb, (begin, *others) in of_verbs.items():
        first = begin(own(size), name="loss")
        for form in (begin, *others):
            with pytest.raises(
                ValueError, match=rf"rank \d: {verb}: the name 'loss' is in flight already; synchronize"
            ):
                form(own(size), name="loss")
        other_verb = next(name for name in of_verbs if name != verb)
        hvd.synchronize(of_verbs[other_verb][0](own(size), name="loss"))  # a name counts for one verb
        hvd.synchronize(begin(own(size), name="another"))
        hvd.synchronize(begin(own(size)))  # and so may have the one that has none
        result = hvd.synchronize(first)
        plain = hvd.synchronize(begin(own(size)))
        for one, two in zip(flat(result), flat(plain), strict=True):
            assert torch.equal(one, two)
        for form in (*others, begin):
            got = form(own(size), name="loss")
            if isinstance(got, Handle):
                while not hvd.poll(got):
                    pass
                second = begin(own(size), name="loss")  # free, as poll() has said that it is done
                hvd.synchronize(got)
                with pytest.raises(ValueError, match="in flight"):
                    begin(own(size), name="loss")
                hvd.synchronize(second)
                assert all(map(torch.equal, flat(hvd.synchronize(got)), flat(plain))), "again, it does the same"


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@on_ranks(2)
def test_names_in_errors() -> None:
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match=r"op must be one of .* \(allreduce, name='loss'\)$"):
            hvd.allreduce_async(own(2), name="loss", op="mean")
        with pytest.raises(TypeError, match=r"a torch.Tensor is needed, not int \(grouped_allgather, name='loss'\)$"):
            hvd.grouped_allgather([5], "loss")
        with pytest.raises(
            ValueError,
            match=r"root_rank=7 does not take part; ranks of the world that do are 0, 1 \(broadcast, name='loss'\)$",
        ):
            hvd.broadcast(own(2), 7, name="loss")
    # What has failed gives its name back.
    assert hvd.allreduce(torch.ones(1), name="loss", op=hvd.Sum).item() == 2
    assert hvd.broadcast(own(1), 1, name="loss").item() == 2


@on_ranks(2)
def test_names_of_the_lost() -> None:
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    handle = hvd.allreduce_async(own(2), name="loss")
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"lost rank 1.*\(allreduce, name='loss'\)$") as error:
            hvd.synchronize(handle)
        assert str(error.value).count("loss") == 1


@on_ranks(3)
def test_errors_found_before_data_moves() -> None:
    """Of one rank's arguments, which name it on all ranks; after each the next verb works. The table of the guide has others."""
    rank, size = hvd.rank(), hvd.size()

    def works() -> None:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size

    for wrong in ([1, 1, 0], [2, -1, 0], [1, 0], [1.0, 0.0, 0.0], torch.tensor([[1, 0, 0]]), torch.tensor(1)):
        for verb in (hvd.alltoall, hvd.alltoall_async):
            with pytest.raises(
                ValueError, match=rf"rank {rank}: alltoall: splits must be 3 whole numbers .*rank 1 gave"
            ):
                verb(own(1), wrong if rank == 1 else [1, 0, 0])
        works()
    received, from_each = hvd.alltoall(own(3), None if rank == 0 else [1, 1, 1]), [1, 1, 1]  # splits on some ranks only
    if rank > 0:
        received, from_each = received
    assert (received.tolist(), list(from_each)) == ([(r + 1) * (rank + 1) for r in range(size)], [1, 1, 1])
    for verb in (hvd.grouped_allgather, hvd.grouped_allgather_async):
        with pytest.raises(ValueError, match=r"grouped_allgather: rank \d gave \d tensors, this rank \d"):
            verb([own(1)] * (2 if rank == 1 else 1))
        with pytest.raises(ValueError, match=r"grouped_allgather: .* rank 2 gave \[1\] torch.int32"):
            verb([own(1), own(1, dtype=torch.int32 if rank == 2 else torch.float32)])
    works()
    if rank == 0:
        with pytest.raises(ValueError, match="grouped_reducescatter: needs tensors of at least one dimension"):
            hvd.grouped_reducescatter([own(2), own()])
        with pytest.raises(ValueError, match="codec 'int8' is for"):
            hvd.grouped_allreduce([own(2), own(2, dtype=torch.int32)], compression="int8")
        for root in (-1, size, size + 5):
            for verb in forms("broadcast").values():
                with pytest.raises(ValueError, match=f"rank 0: root_rank={root} does not take part"):
                    verb(own(2), root_rank=root)
    works()


@on_ranks(2)
def test_the_deadline_of_init_holds_for_all_operations() -> None:
    """Rank 0 stays away from what the others call, of the world's own Communicator and of an optimizer's."""
    hvd.shutdown()
    hvd.init(timeout_s=2.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    if hvd.rank() > 0:
        for call in (hvd.barrier, parameter.sum().backward):
            with pytest.raises(CollectiveTimeout) as error:
                call()
            assert error.value.seconds == 2.0
    torch.distributed.barrier()
    optimizer.close()


@on_ranks(3)
def test_init_and_shutdown() -> None:
    """All ranks are on one host. init() is idempotent, and a torch.distributed that was there before survives shutdown()."""
    hvd.init()
    assert hvd.is_initialized()
    position = (hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert position == (3, hvd.rank(), 3, 0, 1)
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total == torch.distributed.get_world_size()
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@on_ranks(3)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_and_reducescatter(op: str) -> None:
    everyones = torch.stack([torch.arange(1.0, 7.0).view(2, 3) * (rank + 1) for rank in range(hvd.size())])
    by_op = (Tensor.mean, Tensor.sum, Tensor.amin, Tensor.amax, Tensor.prod)
    wanted = by_op[("average", "sum", "min", "max", "product").index(op)](everyones, 0)
    for name, form in forms("allreduce", "grouped_allreduce").items():
        given = own(2, 3)
        (result,) = flat(done(form(given, op=op)))
        assert torch.equal(result, wanted), name
        assert (result is given) == name.endswith("_"), name
        assert torch.equal(given, wanted if name.endswith("_") else own(2, 3)), name
    handle = hvd.allreduce_async(own(2, 3), op=op)
    hvd.synchronize(handle)
    assert hvd.poll(handle)
    for form in forms("reducescatter").values():
        assert torch.equal(done(form(own(2, 3), op=op)), wanted[hvd.rank() : hvd.rank() + 1])


@on_ranks(3)
def test_arguments() -> None:
    size = hvd.size()
    mean, total = (size + 1) / 2, size * (size + 1) / 2
    assert hvd.allreduce(own(1)).item() == mean, "the default is Average"
    with pytest.warns(DeprecationWarning, match="average= is deprecated") as warned:
        assert hvd.allreduce(own(1), False).item() == total
    assert warned[0].filename == __file__, "where the user's line is"
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert hvd.allreduce(own(1), average=True).item() == mean
    with pytest.raises(ValueError, match="op must be one of average, sum, min, max, product, adasum, not 'mean'"):
        hvd.allreduce(own(1), op="mean")
    scaled = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
    assert hvd.allreduce(own(1), **scaled).item() == 2 * total
    rounded = hvd.allreduce(torch.full((3,), 1 + 2**-12), compression=hvd.Compression.fp16)
    assert rounded.dtype == torch.float32
    assert rounded.tolist() == [1.0] * 3
    assert hvd.reducescatter(own(size)).item() == mean * (hvd.rank() + 1), "the default is Average"
    handle = hvd.reducescatter_async(own(size), **scaled)
    results = [hvd.reducescatter(own(size), **scaled), hvd.synchronize(handle), hvd.synchronize(handle)]
    assert [result.item() for result in results] == [2 * total * (hvd.rank() + 1)] * 3


@on_ranks(3)
def test_what_is_no_tensor_or_has_no_memory() -> None:
    """Refused by every verb, before the sizes or splits of those that exchange them are sent."""
    with FakeTensorMode():
        fake = torch.empty(3)
    needed, no_memory = "a torch.Tensor is needed, not", "this FakeTensor on cpu has no memory of its own"
    wrong = [(5, f"{needed} int"), ([1], f"{needed} list"), (None, f"{needed} NoneType"), (fake, no_memory)]
    calls: list[tuple[Callable[[], Any], str]] = [
        *((partial(form, value), said) for form in forms(*VERBS).values() for value, said in wrong),
        *((partial(form, [torch.ones(3), value]), said) for form in forms(*GROUPED).values() for value, said in wrong),
        (lambda: hvd.alltoall_async(fake, [1, 1, 1]), no_memory),
        (lambda: hvd.broadcast_parameters({"a": torch.ones(3), "b": fake}, 0), no_memory),
        (lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([fake.requires_grad_()]), 0), no_memory),
        *((partial(call, 5), "a Handle is needed, .*, not int") for call in (hvd.poll, hvd.synchronize)),
    ]
    if hvd.rank() == 1:
        for call, said in calls:
            with pytest.raises(TypeError, match=f"rank 1: {said}"):
                call()
    assert hvd.allreduce(own(3), op=hvd.Sum).shape == (3,)


@on_ranks(3)
def test_broadcast() -> None:
    for root in range(hvd.size()):
        wanted = torch.arange(1.0, 5.0) * (root + 1)
        for name, form in forms("broadcast").items():
            given = own(4)
            result = done(form(given, root_rank=root))
            assert torch.equal(result, wanted), name
            assert (result is given) == name.endswith("_"), name
            assert torch.equal(given, wanted if name.endswith("_") else own(4)), name
    hvd.barrier()


@on_ranks(3)
def test_alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    equal = torch.arange(2 * size) + 100 * rank
    wanted = [100 * source + 2 * rank + i for source in range(size) for i in (0, 1)]
    assert hvd.alltoall(equal).tolist() == wanted
    received, from_each = hvd.synchronize(hvd.alltoall_async(equal))
    assert received.tolist() == wanted
    assert from_each.tolist() == [2] * size, "as Horovod's, a pair without splits too"

    splits = [destination if rank != 1 else 0 for destination in range(size)]  # rank 1 sends nothing
    rows = torch.full((sum(splits), 2), rank)
    wanted_rows = [source for source in range(size) if source != 1 for _ in range(rank)]
    for received, from_each in (
        hvd.alltoall(rows, splits=splits),
        hvd.alltoall(rows, torch.tensor(splits)),
        hvd.synchronize(hvd.alltoall_async(rows, splits=torch.tensor(splits, dtype=torch.int32))),
    ):
        assert received[:, 0].tolist() == wanted_rows
        assert received.shape == (len(wanted_rows), 2)
        assert from_each.dtype == torch.int32
        assert from_each.tolist() == [0 if source == 1 else rank for source in range(size)]

"""Gradients that travel as codes: equal replicas, nothing lost, all that optimizers can."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Int8, OneBit
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC, RandomK, TopK
from gradwire.trainer.reducer.compression import NAMES, Compressor, ErrorFeedback
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds, wide
from tests.ranks.exact import on_host
from tests.ranks.ladder import (
    BUCKET_BYTES,
    REMEMBERING,
    Ladder,
    Weights,
    given,
    loss_at,
    optimizer_of,
    residuals_of,
    train,
)
from tests.ranks.training import (
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    distributed,
    in_world,
    on_ranks,
    spy,
)
from tests.shot_model import ShotModel

CODECS = [name for name in NAMES if name not in ("none", "fp16", "bf16")]

SAMPLE = ["int8", "onebit", "topk", "powersgd"]
SEGMENT_BYTES = 1 << 14

REST = [name for name in CODECS if name not in SAMPLE]


@on_ranks(3)
@pytest.mark.parametrize("name", ["int8", "powersgd", "int4, after a warm-up", *wide("onebit", "topk", *REST)])
def test_replicas_stay_equal(name: str) -> None:
    model = Ladder()
    optimizer = optimizer_of(model, REMEMBERING.get(name, name))
    losses = train(model, optimizer, range(4))
    assert_same_on_all_ranks(model.parameters())
    assert losses[-1] < 2 * losses[0]  # each of other data


@on_ranks(3)
@pytest.mark.parametrize("codec", [Int8(stochastic=True), OneBit()], ids=lambda codec: codec.name)
def test_gradients_are_those_of_a_model_of_the_codec(codec: Codec) -> None:
    """In two buckets, each rounded in its own way, with gaps between parameters, in which a code may leave something that must
    not stay."""
    weights = [nn.Parameter(torch.zeros(65, 65)) for _ in range(3)]
    communicator = Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES)
    optimizer = distributed(weights, compression=codec, bucket_bytes=BUCKET_BYTES, process_set=communicator)
    hosts = [list(host) for host in communicator.topology.hosts]
    buckets = optimizer.state_dict()["gradwire"]["buckets"]
    models = [
        ShotModel(codec, bucket["numel"], hosts, SEGMENT_BYTES, with_feedback=codec.needs_feedback)
        for bucket in buckets
    ]
    assert [len(bucket["parameters"]) for bucket in buckets] == [2, 1]
    for step in range(4):
        everyones = [
            torch.randn(3, 65, 65, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(3)
        ]
        optimizer.zero_grad()
        torch.stack([(w * x).sum() for w, x in zip(weights, everyones[hvd.rank()], strict=True)]).sum().backward()
        for number, (bucket, shot_model) in enumerate(zip(buckets, models, strict=True)):
            inputs = [torch.zeros(bucket["numel"]) for _ in everyones]
            spans = [slice(start, start + 65 * 65) for start in bucket["starts"]]
            for buffer, gradients in zip(inputs, everyones, strict=True):
                for index, span in zip(bucket["parameters"], spans, strict=True):
                    buffer[span] = gradients[index].flatten()
            expected = shot_model.step(inputs, "average", step, seed=number)
            found = [weights[index].grad for index in bucket["parameters"]]
            assert_equal(map(torch.flatten, found), [expected[span] for span in spans])  # type: ignore[arg-type]
    optimizer.close()
    communicator.close()


@in_world
def conserve(host_of: str, name: str, op: str, predivide: float) -> None:
    """Through the learned layout, a parameter frozen and thawed, one added, one without gradient on any rank."""
    with on_host(host_of[dist.get_rank()]):
        compression, model = REMEMBERING[name], Weights()
        first, last = list(model.weights)[:3], model.weights[3]
        optimizer = distributed(
            first,
            0.1,
            named_parameters=model.named_parameters(),
            compression=compression,
            op=op,
            gradient_predivide_factor=predivide,
            bucket_bytes=45_000,
        )
        totals: dict[int, Tensor] = {i: torch.zeros(60 + i, 80) for i in range(4)}
        results = {i: torch.zeros(60 + i, 80) for i in range(4)}
        for step in range(11):
            model.weights[0].requires_grad_(step not in (4, 5))
            if step == 6:
                optimizer.add_param_group({"params": [last]})
            reached = [i for i, weight in enumerate(model.weights) if weight.requires_grad and (i < 3 or step >= 6)]
            reached = [i for i in reached if (i, step) != (1, 8)]
            mine = reached if hvd.rank() or step != 9 else reached[1:]
            optimizer.zero_grad()
            model(given(step, hvd.rank(), mine)).backward()
            for i, weight in enumerate(model.weights):
                assert (weight.grad is None) == (i not in reached)
                if weight.grad is not None:
                    results[i] += weight.grad
            for rank in range(hvd.size()):
                for i, gradient in given(step, rank, reached if rank or step != 9 else reached[1:]).items():
                    totals[i] += gradient / (hvd.size() if op == hvd.Average else 1)
            optimizer.step()
            assert_same_on_all_ranks(list(results.values()))
            if step in (1, 4, 8, 10):
                debts = residuals_of(optimizer, op=op, gradient_predivide_factor=predivide)
                largest = max(debt.abs().max() for debt in debts)
                assert (largest > 1e-3) == (step >= 2 or "warmup_steps=2" not in repr(compression))
                for i, debt in enumerate(debts):
                    torch.testing.assert_close(results[i] + debt, totals[i], rtol=0, atol=1e-4 + 0.02 * float(largest))


@pytest.mark.parametrize(
    ("host_of", "name", "op", "predivide"),
    [
        ("aa", "int8, stochastic", hvd.Average, 1.0),
        ("aa", "topk", hvd.Sum, 1.0),
        ("aa", "threshold", hvd.Average, 1.0),
        ("aa", "randomk", hvd.Average, 4.0),
        ("aa", "int4, after a warm-up", hvd.Average, 1.0),
        ("aa", "powersgd", hvd.Average, 4.0),
        ("aab", "onebit", hvd.Average, 4.0),
        ("aab", "powersgd", hvd.Sum, 1.0),
        pytest.param("aaabb", "onebit", hvd.Sum, 1.0, marks=pytest.mark.wide),
    ],
)
def test_nothing_is_lost(ranks: Worlds, host_of: str, name: str, op: str, predivide: float) -> None:
    """But by DGC, whose momentum would be added. Of several hosts, ranks of one share the encoding, and some do none."""
    ranks(len(host_of)).run(conserve, host_of, name, op, predivide)


@pytest.mark.parametrize("compression", [DGC(ratio=0.5), PowerSGD(rank=2)], ids=lambda codec: codec.name)
@on_ranks(2)
def test_what_codecs_remember_goes_along(compression: Compressor) -> None:
    """A momentum, a basis: they do not depend on whether buckets were laid out anew meanwhile, since another parameter froze.

    All ranks have equal gradients, and so equal residuals, which are averaged then.
    """
    seen = []
    for freezes in (False, True):
        matrix, vector = nn.Parameter(torch.zeros(60, 80)), nn.Parameter(torch.zeros(10))
        optimizer = distributed([matrix, vector], 0.1, compression=compression)
        for step in range(5):
            vector.requires_grad_(not (freezes and step == 2))
            optimizer.zero_grad()
            (vector.sum() + (matrix * given(step, 0)[0]).sum()).backward()
            assert matrix.grad is not None
            seen.append(matrix.grad.clone())
            optimizer.step()
        optimizer.close()
    assert_close(seen[5:], seen[:5], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_nan_is_gone_in_the_next_step() -> None:
    model = Weights()
    optimizer = distributed(model.parameters(), 0.1, compression="onebit")
    for step in range(4):
        optimizer.zero_grad()
        numbers = given(step, hvd.rank(), [0, 1, 2, 3] if step != 1 else [0, 2])
        if step == 1:
            numbers[2][:] = float("nan")
        model(numbers).backward()
        grads = [weight.grad for weight in model.weights if weight.grad is not None]
        assert all(grad.isfinite().all() for grad in grads) == (step != 1)


@on_ranks(2)
def test_codecs_count_from_the_end_of_the_warm_up() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = distributed([weight], compression=ErrorFeedback("dgc", 2))
    seen: list[int | None] = []
    spy(
        optimizer,
        lambda tensor, options: seen.append(options["step"] if options.get("compression") is not None else None),
    )
    for _ in range(4):
        weight.sum().backward()
    assert [step for step in seen if step is not None] == [0, 1]


@on_ranks(2)
def test_sums_of_powersgd_are_under_way_together() -> None:
    """Say what the buckets of two layers ask for, and when backward has come to the first layer."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    model = nn.Sequential(*layers)
    optimizer = distributed(model.parameters(), compression=PowerSGD(rank=2), bucket_bytes=1)
    seen: list[str] = []
    spy(optimizer, lambda tensor, options: seen.append("counts" if tensor.numel() == 2 else "sum"))
    model(torch.ones(2, 64)).sum().backward()  # buckets are in the order of gradients from now on
    seen.clear()
    layers[0].weight.register_hook(lambda gradient: seen.append("first layer"))
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    assert seen == ["sum", "first layer", "sum", "counts", "sum", "sum"]


@on_ranks(2)
def test_a_second_sum_that_fails() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = distributed([weight], compression=PowerSGD(rank=2))
    sums: list[Tensor] = []

    def fail(tensor: Tensor, options: dict[str, Any]) -> None:
        if tensor.numel() > 1:
            sums.append(tensor)
        if len(sums) == 2:
            raise ConnectionError("the second sum")

    spy(optimizer, fail)
    with pytest.raises(ConnectionError, match="the second sum"):
        weight.sum().backward()
    optimizer.state_dict()  # which is refused while gradients are being exchanged


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, torch.nan) for name in SAMPLE),
        *((name, torch.inf) for name in ("int8", "topk")),
    ],
)
def test_what_is_not_finite_reaches_every_rank(name: Compressor, value: float) -> None:
    """A gradient that is not finite on rank 1: on all ranks the scaler skips the step, and all is well afterwards."""
    model = Ladder()
    optimizer = optimizer_of(model, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    train(model, optimizer, range(2))
    before = copies(model.parameters())
    for step in range(2, 6):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step, hvd.rank())).backward()
        if step == 2:
            optimizer.zero_grad()
            scaled = scaler.scale(loss_at(model, step, hvd.rank()))
            spoiled = model.layers[1][0].weight.register_hook(
                lambda g: g.index_fill(0, torch.tensor([3]), value) if hvd.rank() == 1 else g
            )
            scaled.backward()
            spoiled.remove()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 2)
    assert_same_on_all_ranks(model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["onebit", "int8", "topk", "powersgd"])
@on_ranks(2)
def test_other_dtypes(name: str) -> None:
    """The codes and residuals are those of the same numbers as float32, and the results are rounded to the gradients' dtype."""
    shapes = (80, 64), (96, 64), (64, 128)
    drawn = torch.Generator().manual_seed(hvd.rank())
    given = [[torch.randint(-9, 9, shape, generator=drawn) / 8 for shape in shapes] for _ in range(3)]

    def exchanged(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        optimizer = distributed(parameters, compression=ErrorFeedback(name))
        found = []
        for step in given:
            optimizer.zero_grad()
            torch.stack([(p * g).sum() for p, g in zip(parameters, step, strict=True)]).sum().backward()
            found += copies(p.grad for p in parameters if p.grad is not None)
        residuals = [state["tensors"]["worker"] for state in optimizer.state_dict()["gradwire"]["buckets"]]
        optimizer.close()
        return found, residuals

    expected, kept = exchanged(torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found, residuals = exchanged(dtype)
        assert_equal(found, [each.to(dtype) for each in expected])
        assert_equal(residuals, kept)
        assert_same_on_all_ranks([each.view(torch.uint8) for each in found])


@on_ranks(2)
def test_verbs_with_codecs() -> None:
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(hvd.rank()), requires_grad=True)
    exact = hvd.allreduce(mine)
    rounded = hvd.allreduce(mine, compression=hvd.Compression.int8)
    assert 0 < (rounded - exact).abs().max() < 0.05
    assert_same_on_all_ranks([rounded])
    assert torch.equal(rounded, hvd.allreduce(mine, compression="int8"))
    pair = hvd.grouped_allreduce([mine, mine.view(50, 100)], compression=TopK(ratio=0.1))
    assert [tuple(tensor.shape) for tensor in pair] == [(5000,), (50, 100)]
    rounded.sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, torch.ones(5000))
    for refused in ("topk", hvd.Compression.powersgd, ErrorFeedback("int8")):
        with pytest.raises(ValueError, match=r"with error feedback is for DistributedOptimizer"):
            hvd.allreduce(mine, compression=refused)
    with pytest.raises(ValueError, match=r"rank [01]: 'randomk' selects by the step"):
        hvd.allreduce(mine, compression=RandomK())
    with pytest.raises(ValueError, match="reducescatter has no codecs"):
        hvd.reducescatter(mine, compression=hvd.Compression.int8)

"""Checkpoints of a DistributedOptimizer with codecs: as good as never having stopped, and refused where they are not whole."""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.reducer.checkpoint import KEY
from gradwire.trainer.reducer.compression import Compressor
from tests.harness import Worlds
from tests.ranks.ladder import HEIGHT, REMEMBERING, Ladder, optimizer_of, residuals_of, train
from tests.ranks.test_trainer_accumulation import failing_hook
from tests.ranks.training import (
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    distributed,
    in_world,
    on_ranks,
    through_a_file,
)


@on_ranks(2)
@pytest.mark.parametrize("name", ["onebit", "powersgd"])
def test_nothing_is_saved_while_gradients_are_exchanged(name: str) -> None:
    """Where a backward() fails when its first bucket is under way, nothing can be saved or loaded before it is caught up with.
    Nor can anything be saved while residuals of parameters that have been moved are in no buffer."""
    first, last = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = distributed([first, last], compression=name, bucket_bytes=1)
    before = optimizer.state_dict()
    with failing_hook(first):
        (first.tanh() * 5 + last).sum().backward()
    with pytest.raises(RuntimeError, match=r"rank \d.*being exchanged.*synchronize"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="being exchanged"):
        optimizer.load_state_dict(before)
    optimizer.synchronize()
    optimizer.zero_grad()
    assert optimizer.state_dict()["gradwire"]["step"] == 1
    optimizer.set_backward_passes_per_step(2)
    for moved in (False, True):
        if moved:
            first.data = first.data.double()
        for last_pass in (False, True):
            (first.tanh() * 5 + last).sum().backward()
            if moved and not last_pass:
                with pytest.raises(RuntimeError, match=r"rank \d.*residuals"):
                    optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "stop"),
    [("onebit", 0), ("onebit", 4), ("dgc", 1), ("powersgd", 4), ("int8, stochastic", 4), ("int4, after a warm-up", 4)]
    + [pytest.param(name, 4, marks=pytest.mark.wide) for name in ("qsgd", "topk", "threshold", "randomk")],
)
def test_a_loaded_state_continues_bit_for_bit(name: str, stop: int) -> None:
    """Into a new optimizer, and into one that has gone on elsewhere: the losses are those of a run that is not stopped."""
    compression = REMEMBERING.get(name, name)
    model = Ladder()
    optimizer = optimizer_of(model, compression)
    train(model, optimizer, range(stop))
    saved, weights = through_a_file([optimizer.state_dict(), model.state_dict()])
    straight = train(model, optimizer, range(stop, 7))
    optimizer.close()
    for has_gone_on in (False, True):
        other = Ladder(seed=5)
        optimizer = optimizer_of(other, compression)
        if has_gone_on:
            train(other, optimizer, range(50, 53))
        other.load_state_dict(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved)
        assert train(other, optimizer, range(stop, 7)) == straight
        assert_equal(other.parameters(), model.parameters())
        optimizer.close()


@on_ranks(2)
def test_a_frozen_parameter_keeps_its_claim() -> None:
    runs = []
    for stopped in (False, True):
        model = Ladder()
        frozen = model.layers[0][0].weight
        optimizer = optimizer_of(model, "onebit")
        train(model, optimizer, range(2))
        frozen.requires_grad_(False)
        train(model, optimizer, range(2, 4))
        assert optimizer.state_dict()["gradwire"]["waiting"]
        if stopped:
            saved = through_a_file(optimizer.state_dict())
            optimizer.close()
            optimizer = optimizer_of(model, "onebit")
            optimizer.load_state_dict(saved)
        frozen.requires_grad_(True)
        train(model, optimizer, range(4, 7))
        runs.append(copies(model.parameters()))
        optimizer.close()
    assert_equal(*runs)


@in_world
def saved(
    compression: Compressor, op: str, shape: tuple[int, int] | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return this rank's state, and its residuals. shape: of one matrix, whose gradients are 1 and
    -1, so that onebit loses nothing of them, but of their sums; before the
    step after which buckets are laid out anew, and residuals shared."""
    model = Ladder() if shape is None else nn.ParameterList([nn.Parameter(torch.zeros(shape))])
    optimizer = optimizer_of(model, compression, op=op)
    if shape is None:
        train(model, optimizer, range(3))
    else:
        signs = torch.randn(shape, generator=torch.Generator().manual_seed(hvd.rank())).sign()
        (model[0] * signs).sum().backward()  # type: ignore[index]
    state, debts = through_a_file(optimizer.state_dict()), residuals_of(optimizer, op=op)
    optimizer.close()
    return state, debts


@in_world
def load(
    states: list[dict[str, Any]],
    compression: Compressor,
    op: str,
    with_also: bool,
    shape: tuple[int, int] | None = None,
) -> tuple[list[Tensor], list[str]]:
    """Load on another number of ranks, and train on; return the residuals, and what was warned of."""
    model = Ladder() if shape is None else nn.ParameterList([nn.Parameter(torch.zeros(shape))])
    optimizer = optimizer_of(model, compression, op=op)
    if shape is None:
        train(model, optimizer, range(10, 12))
    extra = states[hvd.size() + hvd.rank() :: hvd.size()] if with_also else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(states[hvd.rank() % len(states)], also=extra)
    debts = residuals_of(optimizer, op=op)
    if shape is None:
        train(model, optimizer, range(3, 5))
    assert_same_on_all_ranks(model.parameters()) if op == hvd.Sum else None
    optimizer.close()
    return debts, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "before", "now", "op"),
    [
        ("onebit", 3, 2, hvd.Sum),
        ("threshold", 2, 3, hvd.Average),
        ("powersgd", 3, 2, hvd.Average),
    ],
)
def test_other_ranks_take_over_what_is_owed(ranks: Worlds, name: str, before: int, now: int, op: str) -> None:
    parts = ranks(before).run(saved, REMEMBERING[name], op)
    debts = parts[0][1]
    assert sum(bool(debt.any()) for debt in debts) == 2 * HEIGHT
    loaded = ranks(now).run(load, [state for state, _ in parts], REMEMBERING[name], op, True)
    for found, _ in loaded:
        assert_close(found, debts, rtol=0, atol=0.03 * max(float(debt.abs().max()) for debt in debts))
    messages, *others = [warned for _, warned in loaded]
    assert others == [[]] * (now - 1)
    assert len(messages) == 1
    assert "lost" not in messages[0]


def test_what_nobody_loads_is_lost_with_a_warning(ranks: Worlds) -> None:
    """The shard that rank 2 owned is gone, and nothing else."""
    shape = (96, 64)
    parts = ranks(3).run(saved, "onebit", hvd.Average, shape)
    loaded = ranks(2).run(load, [state for state, _ in parts], "onebit", hvd.Average, False, shape)
    lost = parts[0][1][0].flatten() - loaded[0][0][0].flatten()
    assert lost[:4000].abs().max() < 0.1 < lost[-2000:].abs().max()
    assert_equal(loaded[0][0], loaded[1][0])
    ((message,), nothing) = (warned for _, warned in loaded)
    assert nothing == []
    assert "ranks [2]" in message


@on_ranks(2)
def test_parts_that_do_not_belong_together_are_refused_everywhere() -> None:
    """All ranks fail alike, and the optimizer stays usable."""
    model = Ladder()
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(3))
    mine = through_a_file(optimizer.state_dict())
    part = mine[KEY]
    plain = {key: value for key, value in mine.items() if key != KEY}
    (name, shape), *rest = part["parameters"]
    for wrong, on_both in (
        (plain, False),
        ({**mine, KEY: {**part, "step": 99}}, False),
        ({**mine, KEY: {**part, "version": 7}}, True),
        ({**mine, KEY: {**part, "op": hvd.Sum}}, True),
        ({**mine, KEY: {**part, "parameters": [(name, shape[::-1]), *rest]}}, True),
    ):
        with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: load_state_dict: "):
            optimizer.load_state_dict(wrong if on_both or hvd.rank() else mine)
    optimizer.load_state_dict(plain)
    optimizer.load_state_dict(mine)
    train(model, optimizer, range(2))
    assert_same_on_all_ranks(model.parameters())


def as_bytes(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


Damage = Callable[[], object]


def damages(tree: Any, place: str = "") -> Iterator[tuple[str, Damage]]:
    """Yield what may be wrong anywhere in a part of a checkpoint, by a name: something is missing, of another dtype or length,
    not finite, or negative."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        value, name = tree[key], f"{place}.{key}"
        change = partial(tree.__setitem__, key)
        if isinstance(tree, dict) and isinstance(key, str):
            yield f"{name} missing", partial(tree.pop, key)
        if isinstance(value, Tensor):
            for what, wrong in (
                ("whole numbers", value.int()),
                ("double", value.double()),
                ("too short", value[1:]),
                ("too long", value.repeat(3)),
                ("infinite", value + torch.inf),
                ("another shape", value.view(2, -1)),
                ("no tensor", 7),
            ):
                yield f"{name} {what}", partial(change, wrong)
        elif type(value) in (int, float):
            yield f"{name} negative", partial(change, -1)
            yield f"{name} not finite", partial(change, float("nan"))
        elif isinstance(value, list) and len(value) > 1:
            yield f"{name} reversed", partial(change, value[::-1])
            yield f"{name} doubled", partial(change, value + value)
        if isinstance(value, (dict, list)):
            yield from damages(value, name)


@on_ranks(2)
def test_a_damaged_part_is_refused_everywhere() -> None:
    """It is rank 1's; both refuse it, and have loaded nothing. Then the checkpoint itself is loaded."""
    model = Ladder()
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(3))
    mine = through_a_file(optimizer.state_dict())
    mine["param_groups"][0]["lr"] = 7.0
    optimizer.close()
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(2))
    before, taken = as_bytes(optimizer.state_dict()), []
    for number, (name, _) in enumerate(damages(mine[KEY])):
        wrong = through_a_file(mine)
        if hvd.rank() == 1:
            list(damages(wrong[KEY]))[number][1]()
        try:
            optimizer.load_state_dict(wrong)
        except ValueError:
            assert as_bytes(optimizer.state_dict()) == before, name
        else:
            taken.append(name)
            before = as_bytes(optimizer.state_dict())
    assert taken == [".sparse missing"]
    optimizer.load_state_dict(mine)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["lr"] == 7.0


@on_ranks(2)
def test_nothing_is_loaded_where_one_optimizer_refuses() -> None:
    model = Ladder()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), compression="onebit")
    train(model, optimizer, range(2))
    before = as_bytes(optimizer.state_dict())
    wrong = through_a_file(optimizer.state_dict())
    wrong["param_groups"][0]["lr"] = 7.0
    wrong[KEY]["step"] = 99
    if hvd.rank() == 1:
        wrong["param_groups"][0]["params"].pop()
    with pytest.raises(
        ValueError, match=r"rank 1 was given a state that cannot be loaded \(ValueError: loaded state dict contains"
    ):
        optimizer.load_state_dict(wrong)
    assert as_bytes(optimizer.state_dict()) == before
    train(model, optimizer, range(2))
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("onebit", "topk", None),
        ("onebit", "int8", "are now shared by all$"),
        ("onebit", "fp16", "^rank 0: saved with codecs, loaded without: the residuals are lost$"),
        ("int8", "none", None),
    ],
)
def test_another_codec_takes_over_what_is_owed(before: str, now: str, said: str | None) -> None:
    """Or, where it has no error feedback, the next gradients; without codecs, rank 0 warns that it is lost."""
    model = Ladder()
    optimizer = optimizer_of(model, before)
    train(model, optimizer, range(3))
    saved, debts = through_a_file(optimizer.state_dict()), residuals_of(optimizer)
    optimizer.close()
    optimizer = optimizer_of(model, now)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    messages = [str(warning.message) for warning in caught if "saved" in str(warning.message)]
    takes_over = debts if now in ("topk", "int8") else []
    assert len(messages) == (hvd.rank() == 0 and (said is not None or bool(takes_over)))
    if said is not None and messages:
        assert re.search(said, messages[0])
    found = residuals_of(optimizer)
    if takes_over:
        assert_close(found, takes_over, rtol=0, atol=0.03 * max(float(debt.abs().max()) for debt in takes_over))
    else:
        assert not any(debt.any() for debt in found)
    train(model, optimizer, range(1))
    assert now == "topk" or not any(debt.any() for debt in residuals_of(optimizer))


@on_ranks(2)
@pytest.mark.parametrize("rule", ["default", "next_forward", "sharded", "local"])
def test_the_warning_points_to_the_line_that_loads(rule: str) -> None:
    model = Ladder()
    rules = {
        "next_forward": hvd.rules.NextForward(model),
        "sharded": hvd.rules.Sharded(),
        "local": hvd.rules.LocalUpdates(every=2, warmup_steps=9),
    }
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(2))
    saved = through_a_file(optimizer.state_dict())
    optimizer.close()
    optimizer = optimizer_of(model, "int8", rule=rules.get(rule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    files = [warning.filename for warning in caught if "shared" in str(warning.message)]
    assert files == [__file__] * (hvd.rank() == 0)
    optimizer.close()


@on_ranks(2)
def test_broadcast_optimizer_state() -> None:
    model = Ladder()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9), compression="onebit"
    )
    train(model, optimizer, range(2))
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2

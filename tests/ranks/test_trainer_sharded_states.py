"""Sharded states (ZeRO stage 1): against the same training unsharded, to the bit, also through checkpoints on other worlds."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.trainer.reducer.shards.optimizer_shards import SHARDS
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds, wide, wide_rows
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

STEPS = 4
SEGMENT_BYTES = 256

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(SGD, foreach=False),
    "sgd foreach": partial(SGD, foreach=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),  # which has a state from the beginning
}


def steps_added_parameters(make: Callable[..., torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer can step parameters that are added to it later."""
    optimizer = make([nn.Parameter(torch.ones(1))])
    optimizer.add_param_group({"params": [added := nn.Parameter(torch.ones(1))]})
    added.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


SKIPS_OLD_ADAGRAD = pytest.mark.skipif(
    not steps_added_parameters(OPTIMIZERS["adagrad"]),
    reason=f"Adagrad of torch {torch.__version__} cannot step added parameters",
)


class Network(nn.Module):
    """Has parameters of every kind: of two dtypes, smaller than a rank's share, unused, frozen, in another order in memory."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.one = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(20, 33)
        self.last = nn.Linear(33, 7).double()

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.convolution(inputs).flatten(1).tanh()
        result: Tensor = self.last((self.wide(seen) * self.one).tanh().double())
        return result


def loss_of(model: Network, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(6, 3, 4, 4, generator=generator)
    return (model(inputs) - 1).square().mean()


def grouped(model: Network) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "lr": 0.03}, {"params": others, "weight_decay": 0.0}]


@contextmanager
def exchanged_by(algorithm: str) -> Iterator[Communicator]:
    """Return a Communicator of small segments whose allreduces go by this algorithm."""
    if algorithm != "auto":
        os.environ["COLLECTIVES_ALLREDUCE"] = algorithm
    try:
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES) as communicator:
            yield communicator
    finally:
        os.environ.pop("COLLECTIVES_ALLREDUCE", None)


def wrapped(
    model: Network,
    communicator: Communicator,
    name: str,
    *,
    shard: bool,
    parameter_compression: Any = "none",
    **options: Any,
) -> hvd.DistributedOptimizer:
    rule = hvd.rules.Sharded(parameter_compression) if shard else None
    optimizer = OPTIMIZERS[name](grouped(model))
    options = {"process_set": communicator, "bucket_bytes": 1500, **options}
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), rule=rule, **options)


def train(model: Network, optimizer: hvd.DistributedOptimizer, steps: range, *, schedule: bool = True) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        if schedule:
            scheduler.step()


def state_bytes(optimizer: hvd.DistributedOptimizer) -> int:
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step")


#: Of the optimizers, the algorithms and what changes the exchange, each and each pair that matters.
CASES: list[Any] = [
    (3, "adam", "rsag", {}),
    pytest.param(2, "adagrad", "tree", {"gradient_predivide_factor": 3.0}, marks=SKIPS_OLD_ADAGRAD),
    (3, "sgd foreach", "ring", {"op": hvd.Sum, "groups": 2}),
    (3, "sgd", "ring", {"compression": "bf16"}),
    (3, "adamw foreach", "ring", {"compression": "int8", "policy": {"*.weight": "topk"}}),
    (2, "adamw foreach", "auto", {"policy": {"wide.weight": "powersgd"}}),
]
SWEEP = [
    pytest.param(size, name, algorithm, {}, marks=[pytest.mark.wide, *marks])
    for size, name, algorithm, marks in (
        (1, "adamw foreach", "auto", ()),
        (5, "adamw foreach", "auto", ()),
        (4, "sgd", "ring", ()),
        (1, "adagrad", "tree", [SKIPS_OLD_ADAGRAD]),
    )
]


@on_ranks()
@pytest.mark.parametrize(("size", "name", "algorithm", "options"), [*CASES, *SWEEP], ids=str)
def test_it_is_the_unsharded_training_to_the_bit(name: str, algorithm: str, options: dict[str, Any]) -> None:
    with exchanged_by(algorithm) as one, exchanged_by(algorithm) as other:
        model, twin = Network(), Network()
        whole = wrapped(model, one, name, shard=False, **options)
        sharded = wrapped(twin, other, name, shard=True, **options)
        for steps in (range(1), range(1, STEPS)):  # buckets are laid out anew after the first step
            train(model, whole, steps)
            train(twin, sharded, steps)
            assert_equal(model.parameters(), twin.parameters())
        before = copies(twin.parameters())
        for each, net in ((whole, model), (sharded, twin)):
            net.frozen.requires_grad_(True)
            net.wide.weight.requires_grad_(False)
            each.add_param_group({"params": [extra := nn.Parameter(torch.ones(7))], "lr": 0.5})
            loss = (net.frozen(torch.ones(4)).sum() + net.convolution.bias.sum() + (extra * extra).sum()) * (
                hvd.rank() + 0.3
            )
            each.zero_grad()
            loss.backward()
            each.step()
            net.wide.weight.requires_grad_(True)
            train(net, each, range(STEPS, STEPS + 2))
        assert_equal(model.parameters(), twin.parameters())
        assert not torch.equal(before[0], next(twin.parameters()))
        assert_same_on_all_ranks(twin.parameters())
        each_rank = hvd.allgather_object(state_bytes(sharded))
        assert sum(each_rank) == state_bytes(whole)
        mine, theirs = sharded.stats, whole.stats
        assert (mine.exchanges, mine.bytes_uncompressed) == (theirs.exchanges, theirs.bytes_uncompressed)
        assert mine.exchanges > 0
        if "compression" in options or "policy" in options:
            # Parameters come back as they are, some as float64, which codes are not of.
            assert theirs.bytes_sent < mine.bytes_sent <= theirs.bytes_sent + theirs.bytes_uncompressed
        else:
            assert mine.bytes_sent == theirs.bytes_sent
        whole.close()
        sharded.close()


@on_ranks(2)
@pytest.mark.parametrize("way", ["adamw foreach", "clipped", "coded"])
def test_a_frozen_parameter_with_a_gradient_goes_on_as_without_shards(way: str) -> None:
    """One that was frozen before backward() and has zeros, one that was frozen after it and keeps its average, and one that was
    never trained and gets a gradient from the program; all are trained again."""
    with exchanged_by("ring") as one, exchanged_by("ring") as other:
        models = Network(), Network()
        for model, communicator, shard in zip(models, (one, other), (False, True), strict=True):
            compression = "int8" if way == "coded" else "none"
            name = way if way in OPTIMIZERS else "sgd"
            optimizer = wrapped(model, communicator, name, shard=shard, parameter_compression=compression)
            train(model, optimizer, range(2), schedule=False)
            optimizer.zero_grad(set_to_none=False)
            model.wide.weight.requires_grad_(False)
            model.frozen.weight.grad = torch.arange(16.0).view(4, 4).t()
            for step in range(2, 5):
                loss_of(model, step, hvd.rank()).backward()
                model.convolution.weight.requires_grad_(False)
                if way == "clipped":
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = None
            model.requires_grad_(True)
            train(model, optimizer, range(5, 7), schedule=False)
            assert_same_on_all_ranks(model.parameters())
            optimizer.close()
        if way in OPTIMIZERS:
            assert_equal(models[0].parameters(), models[1].parameters())
        else:
            tolerance = 1e-6 if way == "clipped" else 0.02
            assert_close(models[0].parameters(), models[1].parameters(), rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_a_frozen_parameter_with_a_gradient_on_some_ranks_only() -> None:
    """All ranks refuse it, and training goes on. The ranks list their parameters in different orders."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    model[:2].requires_grad_(False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    twin = copy.deepcopy(model)
    alone, listed = SGD(twin.parameters()), [*model.parameters()]
    optimizer = hvd.DistributedOptimizer(
        SGD(listed[::-1] if hvd.rank() else listed), model.named_parameters(), rule=hvd.rules.Sharded()
    )
    for net, each in ((model, optimizer), (twin, alone)):
        for step in range(3):
            each.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            if step == 1:
                net[0].weight.grad = torch.ones(4, 4)
                if net is model:
                    net[1].weight.grad = torch.ones(4, 4) if hvd.rank() else None
                    with pytest.raises(ValueError, match=r"'1\.weight'"):
                        each.step()
                net[1].weight.grad = torch.arange(16.0).view(4, 4)
            each.step()
    assert_close(model.parameters(), twin.parameters())
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on_ranks(2)
def test_a_group_may_be_added_just_before_a_checkpoint() -> None:
    """Saved and loaded before a step has put the new parameters in a bucket."""
    trained = nn.Linear(4, 4, bias=False)
    saved: dict[str, Any] = {}
    for model in (trained, copy.deepcopy(trained)):
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), rule=hvd.rules.Sharded())
        if not saved:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        optimizer.add_param_group({"params": [added := nn.Parameter(torch.ones(7))]})
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
            model.load_state_dict(saved["model"])
        else:
            saved = copy.deepcopy({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
        optimizer.zero_grad()
        ((added * added).sum() + model.weight.square().sum()).backward()
        optimizer.step()
        saved.setdefault("after", [*copies(model.parameters()), added.detach()])
        assert_equal([*model.parameters(), added], saved["after"])
        optimizer.close()


@on_ranks(2)
def test_reading_the_state_of_a_parameter_changes_nothing() -> None:
    with exchanged_by("ring") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adam", shard=True)
        train(model, optimizer, range(2))
        before = through_a_file(optimizer.state_dict())
        assert all(not optimizer.state[parameter] for parameter in model.parameters())
        after = through_a_file(optimizer.state_dict())
        assert str(before) == str(after)
        optimizer.load_state_dict(after)
        train(model, optimizer, range(2, 3))
        optimizer.close()


class Replacing(torch.optim.SGD):
    """Gives parameters other memory in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["auto", *wide("ring")])
@pytest.mark.parametrize("kind", [Replacing, partial(torch.optim.SGD, momentum=0.9)], ids=["replaced", "kept"])
def test_memory_of_parameters_may_change(kind: Callable[..., torch.optim.Optimizer], algorithm: str) -> None:
    with exchanged_by(algorithm) as one, exchanged_by(algorithm) as other:
        model, twin = Network(), Network()
        for net, communicator, shard in ((model, one, False), (twin, other, True)):
            optimizer = kind(net.parameters(), lr=0.1)
            wrapping = hvd.DistributedOptimizer(
                optimizer, process_set=communicator, rule=hvd.rules.Sharded() if shard else None
            )
            for step in range(4):
                train(net, wrapping, range(step, step + 1), schedule=False)
                net.wide.weight.data = net.wide.weight.data.clone()
                net.one.data = net.one.data.clone()
            wrapping.close()
        assert_equal(model.parameters(), twin.parameters())


@on_ranks(3)
def test_a_rank_keeps_its_part_of_the_state() -> None:
    """But for padding, of which one rank may have more than another."""
    model = nn.Sequential(nn.Linear(100, 301), nn.Linear(301, 7))
    whole = torch.optim.AdamW(model.parameters())
    sharded = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), rule=hvd.rules.Sharded())
    (model(torch.ones(2, 100)).sum()).backward()
    sharded.step()
    whole.step()
    in_all = sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in whole.state.values())
    padding = 2 * 64 * len([*model.parameters()])
    assert sum(hvd.allgather_object(state_bytes(sharded))) == in_all
    assert abs(state_bytes(sharded) - in_all / hvd.size()) <= padding
    sharded.close()


@in_world
def saved(shard: bool, options: dict[str, Any]) -> dict[str, Any]:
    with exchanged_by("ring") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adam", shard=shard, **options)
        train(model, optimizer, range(3), schedule=False)
        state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        optimizer.close()
    return state


@in_world
def go_on(wholes: list[Any], shards: list[Any], options: dict[str, Any]) -> None:
    """Go on from what ranks have saved, sharded from sharded and from whole, and whole from whole; all alike."""
    rank, size = hvd.rank(), hvd.size()
    runs = []
    for given, shard in ((wholes, False), (shards, True), (wholes, True)):
        with exchanged_by("ring") as communicator:
            model = Network(seed=3)
            optimizer = wrapped(model, communicator, "adam", shard=shard, **options)
            train(model, optimizer, range(50, 52))  # the state and the buckets of which are to be forgotten
            model.load_state_dict(given[0]["model"])
            states = copy.deepcopy([each["optimizer"] for each in given])  # which an optimizer goes on to change
            also = states[size + rank :: size] if shard or options else []
            optimizer.load_state_dict(states[rank % len(states)], also=also)
            assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01]
            train(model, optimizer, range(3, 6))
            runs.append(model)
            optimizer.close()
    for other in runs[1:]:
        assert_equal(runs[0].parameters(), other.parameters())


@pytest.mark.parametrize(
    ("now", "options"),
    [(2, {}), *wide_rows((3, {"policy": {"wide.weight": "onebit"}}), (1, {}), (5, {}))],
    ids=str,
)
def test_a_checkpoint_goes_on_on_any_number_of_ranks(ranks: Worlds, now: int, options: dict[str, Any]) -> None:
    wholes, shards = (ranks(3).run(saved, shard, options) for shard in (False, True))
    ranks(now).run(go_on, wholes, shards, options)


@in_world
def load_wrongly(shards: list[Any]) -> None:
    with exchanged_by("ring") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adam", shard=True)
        before = through_a_file(optimizer.state_dict())
        states = [each["optimizer"] for each in shards]
        mine = states[hvd.rank()]
        part, first = mine[SHARDS], mine["state"][0]
        whole = {key: value for key, value in mine.items() if key != SHARDS}
        with_first = lambda state: {**mine, "state": {**mine["state"], 0: state}}  # noqa: E731
        with pytest.raises(ValueError, match="saved on 4 ranks, and no rank was given the state of ranks 2, 3"):
            optimizer.load_state_dict(mine)
        for culprit, wrong, said in (
            (0, whole, r"ranks \[0\] were given a state_dict without"),
            (1, {**mine, SHARDS: {**part, "version": 7}}, "rank 1 was given"),
            (1, with_first({**first, "exp_avg": torch.ones(1)}), "rank 1 was given"),
            (1, with_first({}), "ranks 0 and 1 were given parts of different checkpoints"),
            (1, {**mine, SHARDS: {"version": part["version"]}}, "rank 1 was given"),
            (1, {**mine, SHARDS: {**part, "shapes": part["shapes"][::-1]}}, "rank 1 was given"),
        ):
            with pytest.raises(ValueError, match=said):
                optimizer.load_state_dict(wrong if hvd.rank() == culprit else mine, also=states[2:])
        assert str(through_a_file(optimizer.state_dict())) == str(before)
        optimizer.load_state_dict(mine, also=states[2:])
        train(model, optimizer, range(2))
        optimizer.close()
    plain = hvd.DistributedOptimizer(OPTIMIZERS["adam"](grouped(model)), model.named_parameters())
    with pytest.raises(ValueError, match=r"saved with rules\.Sharded, and loaded without"):
        plain.load_state_dict(mine)


def test_what_cannot_be_loaded_is_refused_on_all_ranks(ranks: Worlds) -> None:
    ranks(2).run(load_wrongly, ranks(4).run(saved, True, {}))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks(2)
def test_gradients_are_clipped_by_the_norm_over_all_ranks(norm_type: float) -> None:
    """Clip with a limit that is exceeded, with one that is not, and where one gradient of one rank is NaN, which makes all
    gradients NaN, as in torch."""
    with exchanged_by("ring") as one, exchanged_by("ring") as other:
        model, twin = Network(), Network()
        whole, sharded = (
            wrapped(net, each, "sgd", shard=shard) for net, each, shard in ((model, one, False), (twin, other, True))
        )
        for step, limit in enumerate((0.01, 100.0, 1.0)):
            norms = []
            for net, optimizer in ((model, whole), (twin, sharded)):
                optimizer.zero_grad()
                bad = net.one * float("nan") if step == 2 and hvd.rank() == 1 else 0.0
                (loss_of(net, step, hvd.rank()) + bad).backward()
                norms.append(optimizer.clip_grad_norm_(limit, norm_type))
                optimizer.step()
            torch.testing.assert_close(norms[1].double(), norms[0].double(), rtol=1e-6, atol=0, equal_nan=True)
            assert float(norms[0]) > 0.01 or step == 2
            assert len(set(hvd.allgather_object(str(float(norms[1]))))) == 1
            assert_close(model.parameters(), twin.parameters(), rtol=1e-6, atol=1e-8, equal_nan=True)
        assert norms[1].isnan()
        assert model.wide.weight.isnan().all(), "as torch does"
        assert_same_on_all_ranks(twin.parameters())
        with pytest.raises(ValueError, match="norm_type must be a number > 0, not 0"):
            sharded.clip_grad_norm_(1.0, 0)
        whole.close()
        sharded.close()


@on_ranks(2)
def test_a_gradient_is_whole_in_the_shares_of_all_ranks() -> None:
    """What may not be done with a share of a gradient stands in test_rules_table.py; training goes on after a refusal."""
    with exchanged_by("ring") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adam", shard=True, compression="none")
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        loss_of(model, 1, hvd.rank()).backward()
        shares = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        owned = [torch.stack(hvd.allgather_object(share)) for share in shares]
        assert all(((each != 0).sum(0) <= 1).all() for each in owned), "each element is one rank's, and zero elsewhere"
        model.one.grad = torch.ones(())
        with pytest.raises(RuntimeError, match=r"'one' .*changed since backward"):
            optimizer.step()
        with pytest.raises(ValueError, match="every rank has its own state"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, range(1, 3))
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()


@on_ranks(2)
def test_what_does_not_go_with_it_is_refused_when_the_optimizer_is_made() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    gaps = nn.Parameter(torch.ones(4, 8)[:, ::2])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer, options, words in (
        (hvd.optimizers.LAMB(model.parameters()), {}, "update every element independently; LAMB does not"),
        (torch.optim.LBFGS(model.parameters()), {}, "LBFGS does not"),
        (torch.optim.SGD([gaps], lr=0.1), {}, r"without gaps in memory.*strides \[8, 2\]"),
        (sgd, {"op": hvd.Adasum}, "does not support op='adasum'"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(optimizer, rule=hvd.rules.Sharded(), **options)
    with pytest.raises(ValueError, match="do not make the same DistributedOptimizer: rule is"):
        hvd.DistributedOptimizer(sgd, rule=hvd.rules.Sharded() if hvd.rank() == 0 else None)
    embedding = nn.Embedding(4, 3, sparse=True)
    rows = distributed(embedding.parameters(), 0.1, rule=hvd.rules.Sharded())
    with pytest.raises(ValueError, match=r"is sparse, which rules.Sharded does not support.*sparse_as_dense"):
        embedding(torch.tensor([1])).sum().backward()
    rows.close()

"""Local updates: against the same training simulated in one process, resumed, with codecs, in fragments, in groups."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, ReplicasDiffer
from tests.harness import Worlds, segments, wide
from tests.ranks.exact import on_host
from tests.ranks.training import (
    assert_close,
    assert_equal,
    assert_goes_on,
    assert_same_on_all_ranks,
    batch_of,
    in_world,
    loss_of,
    network,
    on_ranks,
    through_a_file,
    train,
)

STEPS, WARMUP = 11, 3


def outer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def wrapped(
    model: nn.Module, options: Mapping[str, Any] = {}, *, outer: bool = True, **settings: Any
) -> hvd.DistributedOptimizer:
    """Return an optimizer with options of its own, whose rule has these settings."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    rule = hvd.rules.LocalUpdates(outer=outer_of(list(model.parameters())) if outer else None, **settings)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), rule=rule, **options)


def simulated(
    size: int,
    *,
    every: int,
    outer: bool = True,
    warmup_steps: int = 0,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.5,
    change: Callable[[int, Sequence[Tensor], Sequence[Tensor]], object] = lambda *_: None,
    dtype: torch.dtype = torch.float64,
) -> list[list[Tensor]]:
    """Return every rank's parameters after the same steps, taken one rank after the other. change: called before each step, with
    its number, the parameters of a rank and the common ones."""
    models = [network().to(dtype) for _ in range(size)]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    ranks = [list(model.parameters()) for model in models]
    inners = [torch.optim.SGD(parameters, lr=0.1, momentum=0.5) for parameters in ranks]
    parts = [[0], [1, 2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
    common: list[Tensor] = []
    outers: list[torch.optim.Optimizer] = []
    late: dict[int, int] = {}
    errors: list[dict[int, Tensor]] = [{} for _ in ranks]  # of rounding, when common parameters were written

    def write(part: Sequence[int], alpha: float) -> None:
        for parameters, error in zip(ranks, errors, strict=True):
            for i in part:
                own = alpha if parameters[i].requires_grad else 0.0
                wanted = torch.lerp(common[i].detach(), parameters[i].detach().to(wide), own)
                parameters[i].data.copy_(wanted)
                error[i] = wanted - parameters[i].detach()

    for step in range(STEPS):
        alone = step - warmup_steps  # how many steps have been taken alone
        if alone == 0:
            common = [nn.Parameter(parameter.detach().to(wide, copy=True)) for parameter in ranks[0]]
            made = outer_of if outer else (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
            outers = [made([common[i] for i in part]) for part in parts]
        for parameters in ranks:
            change(step, parameters, common)
        for rank, model in enumerate(models):
            inners[rank].zero_grad()
            loss_of(model, batch_of(step, rank, dtype)).backward()
        if alone < 0:
            for together in zip(*ranks, strict=True):
                mean = torch.stack([parameter.grad for parameter in together]).mean(0)  # type: ignore[misc]
                for parameter in together:
                    parameter.grad = mean.clone()
        for inner in inners:
            inner.step()
        if alone < 0:
            continue
        if step in late:
            write(parts[late[step]], alpha)
        for number, part in enumerate(parts):
            if (alone + 1 - (number + 1) * every // fragments) % every:
                continue
            for i in part:
                begins = [common[i].detach() - error.get(i, 0.0) for error in errors]
                moves = [begin - each[i].detach() for begin, each in zip(begins, ranks, strict=True)]
                common[i].grad = torch.stack(moves).mean(0)
            outers[number].step()
            if delay:
                late[step + delay] = number
            else:
                write(part, 0.0)
    return [[parameter.detach() for parameter in parameters] for parameters in ranks]


CASES: dict[str, dict[str, Any]] = {
    "averaging": {"every": 4, "outer": False},
    "every step": {"every": 1},
    "Nesterov": {"every": 4},
    "after a warm-up": {"every": 3, "warmup_steps": WARMUP},
    "two fragments": {"every": 4, "fragments": 2},
    "late": {"every": 5, "delay": 2, "alpha": 0.25},
    "two fragments, late, after a warm-up": {"every": 4, "fragments": 2, "delay": 1, "warmup_steps": WARMUP},
    "late, taken whole": {"every": 4, "delay": 3, "alpha": 0.0},
}


@on_ranks(2, *wide(1, 3))
def test_steps_are_those_of_a_simulation() -> None:
    for case, options in CASES.items():
        model = network().double()
        optimizer = wrapped(model, **options)
        train(model, optimizer, range(STEPS))
        optimizer.close()
        expected = simulated(hvd.size(), **options)[hvd.rank()]
        assert_close(model.parameters(), expected, rtol=1e-9, atol=1e-12, msg=lambda said, case=case: f"{case}: {said}")


def load_by_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state, strict=False)


def load_as_data(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        model.get_parameter(name).data = value.clone()


def load_on_one_rank(model: nn.Module, state: dict[str, Tensor]) -> None:
    if hvd.rank() == hvd.size() - 1:
        model.load_state_dict(state, strict=False)
    hvd.broadcast_parameters({name: model.get_parameter(name) for name in state}, hvd.size() - 1)


@on_ranks(2, *wide(3))
@pytest.mark.parametrize("load", [load_by_model, load_as_data, load_on_one_rank])
def test_loaded_weights_become_the_common_parameters(load: Callable[..., None]) -> None:
    """Load in the middle between exchanges, once all parameters, and once a part of them."""
    options = {"every": 4, "warmup_steps": 1}
    whole = network(seed=5).double().state_dict()
    part = {name: value + 1 for name, value in whole.items() if name.startswith("2")}
    loads = {3: whole, 5: whole, 7: part}

    def change(step: int, parameters: Sequence[Tensor], common: Sequence[Tensor]) -> None:
        for number, name in enumerate(whole):
            if step in loads and name in loads[step]:
                for each in (parameters[number], *common[number : number + 1]):
                    each.data.copy_(loads[step][name])

    model = network().double()
    optimizer = wrapped(model, **options)
    for step in range(STEPS):
        if step in loads:
            load(model, loads[step])
        train(model, optimizer, [step])
    optimizer.close()
    expected = simulated(hvd.size(), **options, change=change)[hvd.rank()]
    assert_close(model.parameters(), expected, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_changes_that_differ_between_ranks_are_part_of_pseudo_gradients() -> None:
    """Clamp the parameters in place between all steps; the common parameters remain as they are."""

    def clamp(_: int, parameters: Sequence[Tensor], __: Sequence[Tensor]) -> None:
        for parameter in parameters:
            parameter.data.copy_(parameter.detach().clamp(-0.1, 0.1))

    options = {"every": 4}
    model = network().double()
    optimizer = wrapped(model, **options)
    for step in range(STEPS):
        if step % options["every"]:  # right after an exchange, parameters are equal, so common ones would follow
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)
        train(model, optimizer, [step])
    optimizer.close()
    change = lambda step, *tensors: clamp(step, *tensors) if step % options["every"] else None  # noqa: E731
    assert_close(model.parameters(), simulated(2, **options, change=change)[hvd.rank()], rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_weights_that_are_loaded_during_an_exchange_are_an_error() -> None:
    """All ranks raise it at the next exchange, and go on once they load the optimizer's state, too."""
    model = network().double()
    optimizer = wrapped(model, every=4, delay=2)
    initial = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(5))
    model.load_state_dict(network(seed=5).double().state_dict())
    with pytest.raises(RuntimeError, match="load_state_dict"):
        train(model, optimizer, range(5, 12))
    optimizer.load_state_dict(initial["optimizer"])
    model.load_state_dict(initial["model"])
    train(model, optimizer, range(STEPS))
    optimizer.close()
    expected = simulated(2, every=4, delay=2)[hvd.rank()]
    assert_close(model.parameters(), expected, rtol=1e-9, atol=1e-12)


PULSES = 8


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_narrow_parameters_add_up(dtype: torch.dtype) -> None:
    """Move a parameter by one unit in the last place at a time, and the common one by a third of that, in every fourth round; and
    go on from a checkpoint."""
    ulp = torch.finfo(dtype).eps / 2  # below 1
    for options in ({"every": 1}, {"every": 3, "delay": 1, "alpha": 0.5}):
        found = []
        for kind in (torch.float32, dtype):
            parameter = nn.Parameter(torch.ones(40, dtype=kind))
            optimizer, saved = None, None
            for _ in range(2):
                if optimizer is not None:
                    saved = through_a_file(optimizer.state_dict())
                    optimizer.close()
                inner = torch.optim.SGD([parameter], lr=1.0)
                outer = torch.optim.SGD([parameter], lr=0.3)
                rule = hvd.rules.LocalUpdates(outer=outer, **options)
                optimizer = hvd.DistributedOptimizer(inner, rule=rule)
                if saved is not None:
                    optimizer.load_state_dict(saved)
                for round_ in range(4 * PULSES // 2):
                    for step in range(options["every"]):
                        optimizer.zero_grad()
                        (parameter.sum() * (ulp if round_ % 4 == step == 0 else 0.0)).backward()
                        optimizer.step()
            assert optimizer is not None
            optimizer.close()
            found.append(parameter.detach().float())
        reference, narrow = found
        if options["every"] == 1:
            assert_close([reference], [torch.full((40,), 1 - PULSES * 0.3 * ulp)], rtol=0, atol=1e-6)
        assert (narrow - reference).abs().max() <= ulp, (options, narrow[0], reference[0])


@on_ranks(2)
def test_narrow_parameters_move_as_in_a_simulation() -> None:
    """One of them is frozen in one step, which is during an exchange if that is late."""

    def freeze(step: int, parameters: Sequence[Tensor], _: Sequence[Tensor] = ()) -> None:
        parameters[0].requires_grad_(step != 6)

    for options in ({"every": 4}, {"every": 3, "outer": False}, {"every": 3, "delay": 1}):
        model = network().bfloat16()
        optimizer = wrapped(model, **options)
        for step in range(STEPS):
            freeze(step, list(model.parameters()))
            train(model, optimizer, [step])
        optimizer.close()
        expected = simulated(hvd.size(), **options, change=freeze, dtype=torch.bfloat16)[hvd.rank()]
        assert_equal(model.parameters(), expected)


def big_wrapped(model: nn.Module, gradients: str = "none", **settings: Any) -> hvd.DistributedOptimizer:
    """gradients: the codec of the gradients of the warm-up."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = hvd.rules.LocalUpdates(**settings)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), gradients, rule=rule)


CODED: dict[str, dict[str, Any]] = {
    "none": {"every": 4, "warmup_steps": WARMUP},
    "chunktopk": {"every": 3, "compression": "chunktopk"},
    "onebit": {"every": 3, "compression": "onebit"},
    "topk, by name": {"every": 3, "compression": "int4", "policy": {"0.*": "topk"}},
    "int8, warm-up with fp16": {"every": 3, "compression": "int8", "warmup_steps": WARMUP, "gradients": "fp16"},
    "onebit, late fragments": {"every": 4, "compression": "onebit", "fragments": 2, "delay": 1},
    "onebit, warm-up with powersgd": {
        "every": 4,
        "compression": "onebit",
        "warmup_steps": WARMUP,
        "gradients": "powersgd",
    },
}


@in_world
def sum_of_codes(team_of: str, *, inner: bool) -> None:
    """Have each team move numbers of its own by 1, on all of its ranks: with outer=None, all move as far.

    inner: whether a team's ranks average their gradients.
    """
    teams = {team: dist.new_group([i for i, of in enumerate(team_of) if of == team]) for team in sorted({*team_of})}
    team = team_of[hvd.rank()]
    parameter = nn.Parameter(torch.zeros(4 * 4096))
    rule = hvd.rules.LocalUpdates(every=1, compression="chunktopk", inner=teams[team] if inner else None)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), rule=rule)
    mine = torch.arange(parameter.numel()) % 512 == ord(team)
    (parameter * -mine.float()).sum().backward()
    optimizer.step()
    moved = torch.zeros(512, dtype=torch.bool)
    moved[[ord(each) for each in team_of]] = True
    assert torch.equal(parameter.detach(), moved.repeat(parameter.numel() // 512).float())


def sum_of_codes_on_hosts(host_of: str, team_of: str, *, inner: bool) -> None:
    with on_host(host_of[dist.get_rank()]):
        sum_of_codes(team_of, inner=inner)


@pytest.mark.parametrize(
    ("host_of", "team_of", "inner"),
    [
        ("aabb", "aabb", False),
        ("ab", "xx", True),
        ("aaaa", "xxyy", True),
        ("aabb", "xxyy", True),
        ("aabb", "xxxx", True),
    ],
)
def test_few_numbers_of_each_rank_or_team_are_summed(ranks: Worlds, host_of: str, team_of: str, inner: bool) -> None:
    """What the inner ranks of a team send alike counts once."""
    ranks(len(host_of)).run(sum_of_codes_on_hosts, host_of, team_of, inner=inner)


@on_ranks(2)
@pytest.mark.parametrize("case", CODED)
def test_training_goes_on_bit_for_bit(case: str) -> None:
    """To where the ranks meet, which is where they hold the same, but for fragments on their way."""
    options = CODED[case]

    def made() -> tuple[nn.Module, hvd.DistributedOptimizer]:
        model = network(700)
        return model, big_wrapped(model, outer=outer_of(list(model.parameters())), **options)

    warmup_steps = options.get("warmup_steps", 0)
    model, optimizer = assert_goes_on(
        made, (2, WARMUP, 8, 9)[0 if warmup_steps else 2 :], warmup_steps + 3 * options["every"]
    )
    if not options.get("delay"):
        assert_same_on_all_ranks(model.parameters())
    report = optimizer.rule.report(batch_per_rank=4)
    assert (report.batch_per_rank, report.global_batch) == (4, 8)
    assert "a batch of 4 a rank, 8 in all" in str(report)
    assert (report.bytes_saved > 2) == (case != "none")
    assert 0 <= report.wait_share <= 1


@in_world
def moved_to(states: list[dict[str, Any]] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train from states of another number of ranks, all of which this rank is given, or from the beginning."""
    model = network(700)
    optimizer = big_wrapped(model, **options)
    if states is not None:
        own, *others = states[hvd.rank() % len(states) :] + states[: hvd.rank() % len(states)]
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"], also=[other["optimizer"] for other in others])
    train(model, optimizer, range(6))
    assert_same_on_all_ranks(model.parameters())
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.close()
    return state


@pytest.mark.filterwarnings("ignore:.*saved on . ranks")
@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({"every": 3, "compression": "onebit"}, 2, 3),
        ({"every": 3, "compression": "int4", "policy": {"0.*": "chunktopk"}}, 2, 1),
    ],
)
def test_another_number_of_ranks_goes_on(ranks: Worlds, options: dict[str, Any], before: int, after: int) -> None:
    states = ranks(before).run(moved_to, None, options)
    ranks(after).run(moved_to, states, options)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no step": lambda state: state["gradwire_local"].pop("step"),
    "a step in words": lambda state: state["gradwire_local"].update(step="four"),
    "no fragments": lambda state: state["gradwire_local"].pop("fragments"),
    "a fragment that there is not": lambda state: state["gradwire_local"].update(pending=(2, 5)),
    "other shapes": lambda state: state["gradwire_local"]["fragments"][1].update(outer=[torch.zeros(2)]),
    "no outer optimizer": lambda state: state["gradwire_local"]["fragments"][1].pop("optimizer"),
    "an outer optimizer without groups": lambda state: state["gradwire_local"]["fragments"][1]["optimizer"].update(
        param_groups=[]
    ),
    "an optimizer without groups": lambda state: state.update(param_groups=[]),
    "no residual": lambda state: state["gradwire_local"]["fragments"][1]["optimizer"]["gradwire"]["buckets"][0][
        "tensors"
    ].pop("worker"),
}


@pytest.mark.parametrize("codec", ["none", "onebit"])
@on_ranks(2)
def test_what_one_rank_cannot_load_no_rank_loads(codec: str) -> None:
    """Give one rank damaged states of an earlier step, and states to hand over that are of other steps; then train on as if
    nothing had happened."""
    models = [network(700), network(700)]
    for model in models:
        optimizer = big_wrapped(model, every=4, compression=codec, fragments=2, delay=1)
        train(model, optimizer, range(4))
        state = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(4, 6))  # a fragment is in flight
        if model is models[1]:
            for damage, harm in DAMAGES.items():
                if damage == "no residual" and codec == "none":
                    continue
                mine = copy.deepcopy(state)
                if hvd.rank() == 1:
                    harm(mine)
                with pytest.raises(ValueError, match=r"rank 1|ranks 0 and 1"):
                    optimizer.load_state_dict(mine)
            for other in ({}, copy.deepcopy(optimizer.state_dict())):
                with pytest.raises(ValueError, match="given"):
                    optimizer.load_state_dict(state, also=[other] if hvd.rank() == 1 else [])
        train(model, optimizer, range(6, STEPS))
        optimizer.close()
    assert_equal(*(model.parameters() for model in models))


@on_ranks(2)
def test_a_report_counts_the_warm_up_and_the_steps_after_it() -> None:
    """Count bytes: as many go out for all gradients of a step as for all pseudo-gradients every fourth step."""
    model = network().double()
    optimizer = wrapped(model, every=4, warmup_steps=WARMUP)
    train(model, optimizer, range(WARMUP))
    before = optimizer.rule.report()
    waits = [0.0, optimizer.communication_wait_s]
    assert before.bytes_sent == optimizer.stats.bytes_sent == WARMUP * before.warmup_bytes_per_step > 0
    assert (before.bytes_per_step, before.bytes_saved) == (0, 1)
    train(model, optimizer, range(WARMUP, WARMUP + 8))
    report = optimizer.rule.report()
    assert report.warmup_bytes_per_step == before.warmup_bytes_per_step == 4 * report.bytes_per_step
    assert report.bytes_sent == (WARMUP + 2) * report.warmup_bytes_per_step
    assert optimizer.stats.bytes_sent == report.bytes_sent
    waits.append(optimizer.communication_wait_s)
    optimizer.load_state_dict(optimizer.state_dict())
    waits.append(optimizer.communication_wait_s)
    assert waits == sorted(waits), "time spent waiting is not forgotten"
    assert waits[1] > 0
    saved = optimizer.state_dict()
    optimizer.close()

    optimizer = wrapped(model, every=4, warmup_steps=WARMUP)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(4))
    again = optimizer.rule.report()
    assert again.steps == WARMUP + 12
    assert (again.warmup_bytes_per_step, again.bytes_per_step) == (0, report.bytes_per_step)
    assert again.bytes_sent == 4 * again.bytes_per_step  # what was sent before the checkpoint, another has counted


@on_ranks(2)
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_frozen_parameters_stay_until_they_are_trained(warmup_steps: int) -> None:
    model = network().double()
    model[0].register_parameter(
        "count", nn.Parameter(torch.arange(3), requires_grad=False)
    )  # of a dtype without exchange
    frozen = model[0].weight.requires_grad_(False)
    before = frozen.clone()
    outer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = hvd.rules.LocalUpdates(every=2, outer=outer, warmup_steps=warmup_steps)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), rule=rule)
    train(model, optimizer, range(4))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert torch.equal(frozen, before)
    sent, trained_bytes = 2 * optimizer.rule.report().bytes_per_step, sum(parameter.nbytes for parameter in trained)
    assert trained_bytes <= sent < trained_bytes + frozen.nbytes
    frozen.requires_grad_(True)
    train(model, optimizer, range(4, 8))
    assert not torch.equal(frozen, before)
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@pytest.mark.parametrize("frozen_at", [5, 6, 7])
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"fragments": 2}], ids=str)
@on_ranks(2)
def test_what_is_frozen_between_exchanges_becomes_equal(options: dict[str, int], frozen_at: int) -> None:
    model = network()
    optimizer = wrapped(model, every=4, **options)
    train(model, optimizer, range(frozen_at))
    frozen = model[0].weight.requires_grad_(False)
    saved = optimizer.state_dict()
    optimizer.close()

    optimizer = wrapped(model, every=4, **options)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(frozen_at, 12))
    assert_same_on_all_ranks([frozen])
    optimizer.close()


@on_ranks(2)
def test_what_is_trained_again_during_an_exchange_goes_on_from_a_checkpoint() -> None:
    """The exchange does not include it, so that it keeps the movement of each rank until the next one."""
    models = [network(), network()]
    for model in models:
        frozen = model[0].weight.requires_grad_(False)
        optimizer = wrapped(model, every=4, delay=2)
        train(model, optimizer, range(4))
        frozen.requires_grad_(True)
        train(model, optimizer, [4])
        if model is models[1]:
            saved = through_a_file(optimizer.state_dict())
            optimizer.close()
            optimizer = wrapped(model, every=4, delay=2)
            optimizer.load_state_dict(saved)
        train(model, optimizer, range(5, 12))
        optimizer.close()
    assert_equal(*(model.parameters() for model in models))


@on_ranks(2)
def test_a_step_after_the_end_leaves_nothing_to_wait_for() -> None:
    model = network()
    optimizer = wrapped(model, every=2, delay=1)
    optimizer.close()
    with pytest.raises((RuntimeError, CollectiveError)):
        train(model, optimizer, range(3))
    optimizer.state_dict()


@on_ranks(4)
def test_groups_average_inside_and_meet_outside() -> None:
    """Average among two ranks in every step, and with the other two in every third."""
    groups = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    mine = groups[hvd.rank() // 2]
    model = network().double()
    optimizer = wrapped(model, every=3, inner=mine)
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1))
        vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        all_of_them = hvd.allgather_object(vector)
        assert torch.equal(all_of_them[0], all_of_them[1])
        assert torch.equal(all_of_them[2], all_of_them[3])
        assert torch.equal(all_of_them[0], all_of_them[2]) == ((step + 1) % 3 == 0)
    report = optimizer.rule.report()
    assert report.inner_bytes_per_step > 0
    sent = (report.bytes_per_step + report.inner_bytes_per_step) * STEPS
    assert report.bytes_sent == pytest.approx(sent)
    assert optimizer.stats.bytes_sent == report.bytes_sent


@on_ranks(2)
def test_an_inner_communicator_that_was_given_stays_open() -> None:
    with Communicator() as given:
        before = segments()
        for inner in (given, None, torch.distributed.group.WORLD):
            wrapped(network().double(), every=3, inner=inner).close()
            given.barrier()
            assert segments() == before, "what it opened is closed"


@on_ranks(2)
def test_other_arguments_of_the_optimizer_change_no_bits() -> None:
    models = []
    for options in ({}, {"groups": 2}, {"gradient_as_bucket_view": False}):
        model = network().double()
        models.append(model)
        optimizer = wrapped(model, options, every=3, warmup_steps=WARMUP, fragments=2)
        train(model, optimizer, range(STEPS))
        optimizer.close()
        assert_equal(models[0].parameters(), model.parameters())
    with pytest.raises(ValueError, match="does not support op='sum'"):
        wrapped(models[0], {"op": hvd.Sum}, every=3)


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    model = network().double()
    other = network().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, options in (
        ("every", {"every": 0}),
        ("warmup_steps", {"every": 2, "warmup_steps": -1}),
        ("fragments", {"every": 2, "fragments": 3}),
        ("delay", {"every": 4, "fragments": 2, "delay": 2}),
        ("alpha", {"every": 2, "alpha": 1.0}),
        ("outer", {"every": 2, "outer": outer_of(list(other.parameters()))}),
        ("name", {"every": 2, "policy": {"nothing*": "int8"}}),
        ("outer=None", {"every": 2, "compression": hvd.ErrorFeedback("chunktopk", 2)}),
    ):
        with pytest.raises(ValueError, match=name):
            hvd.DistributedOptimizer(inner, model.named_parameters(), rule=hvd.rules.LocalUpdates(**options))
    with pytest.raises(TypeError, match="outer must be a torch"):
        hvd.rules.LocalUpdates(every=2, outer="sgd")  # type: ignore[arg-type]
    optimizer = hvd.DistributedOptimizer(inner, rule=hvd.rules.LocalUpdates(every=2))
    with pytest.raises(ValueError, match="cannot be added"):
        optimizer.add_param_group({"params": list(other.parameters())})
    assert len(optimizer.param_groups) == 1
    later = hvd.DistributedOptimizer(inner, rule=hvd.rules.LocalUpdates(every=3, fragments=2))
    with pytest.raises(ValueError, match="saved with 1 fragments"):
        later.load_state_dict(optimizer.state_dict())


@on_ranks(2)
def test_what_is_not_alike_on_all_ranks_is_an_error() -> None:
    """Settings; and parameters in the beginning, which then are not what ranks have in common."""
    for name, values in {"every": (2, 3), "alpha": (0.25, 0.5), "compression": ("int8", "none")}.items():
        options = {"every": 2, name: values[hvd.rank()]}
        with pytest.raises(ValueError, match=r"rule is LocalUpdates.* on rank 0; .* on rank 1"):
            wrapped(network().double(), **options)
    model = network(seed=hvd.rank()).double()
    optimizer = wrapped(model, every=2)
    with pytest.raises(ReplicasDiffer, match="weight"):
        train(model, optimizer, range(STEPS))


@on_ranks(3)
def test_a_rank_outside_of_the_set_trains_by_itself() -> None:
    pair = hvd.add_process_set([0, 2])
    model = network().double()
    optimizer = wrapped(model, {"process_set": pair}, every=2)
    train(model, optimizer, range(4))
    assert optimizer.steps == 4
    assert hvd.rank() == 1 or optimizer.rule.report().steps == 4
    vectors = hvd.allgather_object(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(vectors[0], vectors[2])
    assert not torch.equal(vectors[0], vectors[1])

"""Which gradients, beside test_rules_table.py: frozen, mixed, odd, of replaced parameters, of several optimizers, under hooks,
compiled."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import gradwire as hvd
from gradwire.collectives import ReplicasDiffer
from tests.harness import wide_rows
from tests.ranks.training import (
    STEPS,
    Data,
    assert_as_in_one_process,
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    batch,
    batch_of,
    copies,
    distributed,
    gradients,
    loss_of,
    network,
    on_ranks,
    perceptron,
    sgd,
    share,
    spy,
    take_steps,
)

Optimizer = torch.optim.Optimizer


@on_ranks(2)
def test_frozen_parameters_do_not_travel() -> None:
    """One that the program has taken out of the param groups and put back travels once, even if only one rank did so."""
    small, large = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10000), requires_grad=False)
    optimizer = distributed([small, large])
    sent: list[int] = []
    spy(optimizer, lambda tensor, options: sent.append(tensor.nbytes))
    (small.sum() + large.sum()).backward()
    assert 40 < sum(sent) < 200
    group, at_first = optimizer.param_groups[0], list(sent)
    for ranks in ((0, 1), (0,), (1,)):
        optimizer.step()
        optimizer.zero_grad()
        if hvd.rank() in ranks:
            group["params"].pop(0)
            optimizer.zero_grad()
            group["params"].append(small)  # in another place, so that it gets another name
            optimizer.zero_grad()
            group["params"].reverse()
            optimizer.zero_grad()
        sent.clear()
        (small * hvd.rank()).sum().backward()
        assert sent == at_first
        assert small.grad is not None
        assert small.grad.tolist() == [0.5] * 10


@on_ranks(2)
@pytest.mark.parametrize("rule", ["local", "adasum"])
def test_frozen_parameters_that_have_gradients_stay_equal(rule: str) -> None:
    """Torch moves them on by momentum and weight decay: one on all ranks, the other on the one rank that used it last."""
    model = network()
    options: dict[str, Any] = {"local": {"rule": hvd.rules.LocalUpdates(every=4)}, "adasum": {"op": hvd.Adasum}}[rule]
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
    frozen = [model[0].weight, model[2].bias]
    for step in range(8):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch_of(step, hvd.rank())).backward()
        if step == 4:
            for parameter in frozen:
                parameter.requires_grad_(False)
            if hvd.rank() == 1:
                model[2].bias.grad = None
            before = copies(frozen)
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    assert not any(map(torch.equal, frozen, before))
    optimizer.close()


@on_ranks(2)
def test_thawed_without_zero_grad() -> None:
    """Nothing tells the wrapper of the thaw before backward() reaches the parameter, which is the first that it reaches; or,
    where nothing else requires gradients, there was nothing to exchange before."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = distributed([first, last])
    optimizer.zero_grad()
    last.requires_grad_(True)
    (first * 2 * last * hvd.rank()).sum().backward()
    assert (first.grad, last.grad) == (1.0, 1.0)
    optimizer.close()
    weight = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = distributed([weight])
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight * hvd.rank()).sum().backward()
    assert weight.grad == 0.5
    optimizer.close()
    kept, moved, thawed = (nn.Parameter(torch.ones(64, 64)) for _ in range(3))
    thawed.requires_grad_(False)
    optimizer = distributed([kept, moved, thawed], compression="int8", bucket_bytes=1)
    moved.data = moved.data.double()
    thawed.requires_grad_(True)
    seeds: list[int] = []
    spy(optimizer, lambda tensor, options: seeds.append(options.get("seed", -1)))
    (kept + moved + thawed).sum().backward()
    seeds = [seed for seed in seeds if seed >= 0]
    assert len(seeds) == len(set(seeds)) == 3, "stochastic rounding needs other numbers for each bucket"


@on_ranks(3)
def test_mixed_dtypes() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32)
    weights = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
    optimizer = distributed(weights, compression=hvd.Compression.fp16)
    for _ in range(2):
        optimizer.zero_grad()
        sum(((i + 1 + hvd.rank()) * w.sum()).double() for i, w in enumerate(weights)).backward()  # type: ignore[union-attr]
        assert all(w.grad is not None and w.grad.dtype == w.dtype for w in weights)
        optimizer.step()
    assert [float(w[0]) for w in weights] == [-4.0, -6.0, -8.0, -10.0, -12.0]


@on_ranks(2)
def test_odd_shapes() -> None:
    """Scalars, empty, transposed, channels-last and large parameters; gradients are laid out like their parameters."""
    weights = [
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(150, 200).t()),
        nn.Parameter(torch.zeros(4).expand(2, 4)),
    ]
    optimizer = distributed(weights)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(w * torch.arange(w.numel()).view(w.shape) * hvd.rank()).sum() for w in weights]).sum().backward()
    assert all(w.grad is not None and w.grad.stride() == w.stride() for w in weights[:5])
    for weight in weights:
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == [i / 2 for i in range(weight.numel())]


@on_ranks(3)
def test_two_wrapped_optimizers() -> None:
    """Both are reached by one backward(), on odd ranks in the other order; then each by its own.

    Each has a parameter that is not reached, so that some of its buckets have to wait for the end of backward().
    """
    first, second = perceptron(1), perceptron(2)
    optimizers = [
        hvd.DistributedOptimizer(sgd([nn.Parameter(torch.zeros(1)), *model.parameters()]), bucket_bytes=200)
        for model in (first, second)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, share(step)) for model in ((first, second) if hvd.rank() % 2 else (second, first))]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    before = gradients(second.parameters())
    take_steps(first, optimizers[0], share, [0])
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(second.parameters()), strict=True))  # type: ignore[arg-type]
    for seed, model, steps in ((1, first, [*range(STEPS), 0]), (2, second, [*range(STEPS)])):
        optimizers[seed - 1].close()
        assert_same_on_all_ranks(model.parameters())
        alone = perceptron(seed)
        take_steps(alone, sgd(alone.parameters()), batch, steps)
        assert_close(model.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"rule": hvd.rules.NextForward}, {"rule": hvd.rules.Sharded()}, {"policy": {"0.*": "int8"}}],
    ids=str,
)
def test_a_parameter_may_be_replaced(options: dict[str, Any]) -> None:
    """In the model and in the param groups, before the first step and later; another one is moved to a group of its own, and the
    first one is given back."""

    def train(model: Any, optimizer: Optimizer, data: Data) -> None:
        group = optimizer.param_groups[0]
        first = model[0].weight
        for step in range(STEPS):
            if isinstance(optimizer, hvd.DistributedOptimizer):
                optimizer.settle()
            if step in (0, 2):
                new = nn.Parameter(model[2].weight.detach() * 0.9)
                group["params"] = [new if old is model[2].weight else old for old in group["params"]]
                model[2].weight = new
            if step == 3:
                group["params"].remove(first)
            if step == 4:
                optimizer.param_groups.append({**group, "params": [first]})
            if step % 2 and "rule" not in options:
                model.zero_grad()  # which the wrapper does not notice
                loss_of(model, data(step)).backward()
                optimizer.step()
            else:
                take_steps(model, optimizer, data, [step])

    tolerance = 0.05 if "policy" in options else 1e-5
    assert_as_in_one_process(train, rtol=tolerance, atol=tolerance, **options)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"compression": "onebit"}, {"rule": hvd.rules.Sharded("int8")}], ids=str)
def test_replaced_parameters_are_released(options: dict[str, Any]) -> None:
    """And their state, which the program takes out of the optimizer, unless it is that of shards."""
    model: Any = nn.Sequential(nn.Linear(6, 64, bias=False), nn.Linear(64, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    old = []
    for step in range(6):
        take_steps(model, optimizer, share, [step])
        old += [
            weakref.ref(model[0].weight),
            *(weakref.ref(each["momentum_buffer"]) for each in optimizer.state.values()),
        ]
        new = nn.Parameter(model[0].weight.detach() * 0.9)
        group = optimizer.param_groups[0]
        optimizer.state.pop(model[0].weight, None)
        group["params"] = [new if each is model[0].weight else each for each in group["params"]]
        model[0].weight = new
    take_steps(model, optimizer, share, [6, 7])
    del new
    gc.collect()
    states = optimizer.state_dict()["state"].values()
    left = {id(each) for ref in old if (each := ref()) is not None}
    assert left <= {id(state["momentum_buffer"]) for state in states}
    assert len(optimizer.state) == len(states) == 3


@on_ranks(2)
def test_a_parameter_of_two_optimizers() -> None:
    """The one that was made first refuses to step, before anything changes; a set that this rank is not in does not count."""
    for rule in (None, hvd.rules.LocalUpdates(every=2)):
        encoder, actor, critic = (perceptron(seed)[0] for seed in range(3))
        first = hvd.DistributedOptimizer(sgd([*encoder.parameters(), *actor.parameters()]), rule=rule)
        second = hvd.DistributedOptimizer(sgd([*encoder.parameters(), *critic.parameters()]), rule=rule)
        inputs = share(0)[0]
        (encoder(inputs) + actor(inputs) + critic(inputs)).sum().backward()
        before = [parameter.detach().clone() for parameter in [*encoder.parameters(), *actor.parameters()]]
        with pytest.raises(RuntimeError, match="a DistributedOptimizer of their own"):
            first.step()
        assert_close([*encoder.parameters(), *actor.parameters()], before, rtol=0, atol=0)
        second.step()
        second.close()
    third = distributed([*actor.parameters(), *encoder.parameters()])
    third.param_groups[0]["params"] = list(actor.parameters())
    third.zero_grad()
    fourth = distributed([*critic.parameters(), *encoder.parameters()])  # which the third one no longer has
    third.step()
    with pytest.raises(ValueError, match="parameter of another DistributedOptimizer"):
        fourth.add_param_group({"params": list(actor.parameters())})
    third.close()
    fourth.add_param_group({"params": list(actor.parameters())})
    fourth.close()
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    apart = [distributed(encoder.parameters(), process_set=each) for each in sets]
    for optimizer in apart:
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("rule", [None, hvd.rules.NextForward])
def test_a_parameter_of_an_optimizer_that_was_made_before_shutdown(rule: Callable[[nn.Module], Any] | None) -> None:
    model = perceptron()
    first = distributed(model.parameters(), rule=rule and rule(model))
    take_steps(model, first, share, [0, 1])
    hvd.shutdown()
    hvd.init()
    second = distributed(model.parameters(), rule=rule and rule(model))
    take_steps(model, second, share, [2, 3])
    second.settle()
    assert_same_on_all_ranks(list(model.parameters()))
    with pytest.raises(RuntimeError, match="a DistributedOptimizer of their own"):
        first.step()


@on_ranks(2)
def test_a_parameter_of_an_optimizer_whose_update_has_failed() -> None:
    """One rank has not taken part. All have the next optimizer, and train from before that update."""
    model = perceptron()
    first = distributed(model.parameters(), rule=hvd.rules.NextForward(model))
    take_steps(model, first, share, [0, 1])
    first.settle()
    if hvd.rank() == 0:
        take_steps(model, first, share, [2])
    hvd.barrier()
    if hvd.rank() == 1:
        del first
        gc.collect()
    second = distributed(model.parameters(), rule=hvd.rules.NextForward(model))
    take_steps(model, second, share, [2, 3])
    second.settle()
    assert_same_on_all_ranks(model.parameters())
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="a DistributedOptimizer of their own"):
            first.step()
    second.close()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["backward", "next_forward", "sharded", "adasum", "a rank without a gradient"])
def test_replicas_that_do_not_start_equal(kind: str) -> None:
    options: dict[str, Any] = {
        "sharded": {"rule": hvd.rules.Sharded()},
        "adasum": {"op": hvd.Adasum},
    }.get(kind, {})
    for compared in (0, None):
        model = perceptron(hvd.rank() if compared == 0 else 0)
        if compared is None:
            with torch.no_grad():
                model[2].weight[0, 0] += hvd.rank()
        model[0].requires_grad_(False)  # a frozen parameter may differ
        if kind == "next_forward":
            options["rule"] = hvd.rules.NextForward(model)
        optimizer = distributed(model.parameters(), 0.1, check_replicas_every=compared, **options)
        if hvd.rank() == 0 or kind != "a rank without a gradient":
            loss_of(model, share(0)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if compared is None:
            optimizer.step()
        else:
            with pytest.raises(ReplicasDiffer) as caught:
                optimizer.step()
            assert "parameter 2" in str(caught.value)
            assert_close(model.parameters(), before, rtol=0, atol=0)
        optimizer.close()
    model = perceptron(0)
    with torch.no_grad():
        model[0].weight += hvd.rank()
    model[0].requires_grad_(False)
    take_steps(model, distributed(model.parameters()), share, [0])


@on_ranks(2)
def test_a_weight_inside_and_outside_of_a_reentrant_checkpoint() -> None:
    """The weight's gradient arrives twice, and that of `first` last. They are the derivatives of
    32 * rank * first * shared**2 + sum(bias), averaged."""
    first, shared = (nn.Parameter(torch.tensor([float(value)])) for value in (2, 3))
    bias = nn.Parameter(torch.zeros(32))
    optimizer = distributed([first, shared, bias], bucket_bytes=128)
    inputs = torch.full((1,), float(hvd.rank()), requires_grad=True)
    (checkpoint(shared.mul, inputs * first, use_reentrant=True) * shared + bias).sum().backward()
    optimizer.close()
    found = [float(p.grad[0]) for p in (first, shared, bias) if p.grad is not None]
    assert found == [32 * 9 / 2, 32 * 2 * 2 * 3 / 2, 1.0]


def called_hooks(model: nn.Module, optimizer: Optimizer, data: Data) -> list[str]:
    calls = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(f"before {math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())):.4f}")  # type: ignore[union-attr]

    everywhere = register_optimizer_step_pre_hook(before)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("state_dict"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: calls.append("state_dict done"))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: calls.append("load done"))
    if isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer.set_backward_passes_per_step(2)  # so that it is step() that exchanges
    loss_of(model, data(0)).backward()
    optimizer.step()
    everywhere.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    return calls


@on_ranks(2)
def test_hooks_run_once_each_and_see_the_gradients_that_a_step_uses() -> None:
    model, alone = perceptron(), perceptron()
    expected = called_hooks(alone, sgd(alone.parameters()), batch)
    assert len(expected) == 7
    assert called_hooks(model, hvd.DistributedOptimizer(sgd(model.parameters())), share) == expected


@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "passes", "policy", "autograd"),
    [
        ("eager", 1, {"*": "onebit"}, False),
        *wide_rows(("eager", 2, None, False), ("aot_eager", 1, None, False), ("eager", 1, None, True)),
    ],
)
def test_a_compiled_step(backend: str, passes: int, policy: dict[str, Any] | None, autograd: bool) -> None:
    """The whole of each step, from zero_grad() to step(), is the same compiled and as written, to the bit. autograd: whether
    torch compiles the graph of backward(), too, with the hooks in it.

    With two passes a step it is step() that exchanges. (aot_eager hands out gradients in another order, so buckets are others;
    where a codec rounds them together, that shows.)
    """
    weights = []
    for compiled in (False, True):
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model.named_parameters(),
            backward_passes_per_step=passes,
            policy=policy,
            bucket_bytes=400,
        )

        def train(inputs: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model, (inputs, targets)).backward()
            optimizer.step()

        with torch._dynamo.config.patch(compiled_autograd=autograd):
            run = torch.compile(train, backend=backend) if compiled else train
            for step in range(3):
                run(*share(step))
        assert_same_on_all_ranks(model.parameters())
        weights.append(copies(model.parameters()))
        optimizer.close()
    assert_equal(*weights)

"""What workers push: nothing is lost but what is kept, and what is small, or in a warm-up, travels as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.trainer.reducer.compression import Compressor, ErrorFeedback, Policy, encoding_for
from gradwire.trainer.servers.packing import Packing, Sender

NAMES = ["matrix", "bias", "other matrix", "wide"]
PARAMETERS = [torch.zeros(64, 65), torch.zeros(64), torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(9).double()]
STEPS = 4


def gradients_of(step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(parameter.shape, generator=generator).to(parameter.dtype) for parameter in PARAMETERS]
    return [*drawn[:2], None if step == 2 else drawn[2], drawn[3]]


def dense(gradients: list[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, PARAMETERS, strict=True)]


def packing_of(count: int, compression: Compressor) -> Packing:
    """Return the packing of the first parameters."""
    policy, parameters = Policy(compression), PARAMETERS[:count]
    kinds = [policy.encoding(name, parameter) for name, parameter in zip(NAMES, parameters, strict=False)]
    return Packing(parameters, [encoding_for(kind, each.dtype) for kind, each in zip(kinds, parameters, strict=True)])


def through(packing: Packing, sender: Sender, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients of a step as a server gets them."""
    step = sender.steps
    forms, pushed = sender.encode(gradients)
    return packing.decode(forms, pushed, step)


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "dgc", "qsgd"])
def test_small_gradients_travel_as_they_are_and_others_as_codes(compression: str) -> None:
    packing = packing_of(4, compression)
    decoded = through(packing, Sender(packing, 3), gradients_of(0))
    exact = [torch.equal(one, other) for one, other in zip(dense(decoded), dense(gradients_of(0)), strict=True)]
    if compression == "none":
        assert exact == [True] * 4
    elif compression == "fp16":  # a cast of all that is wider
        assert exact == [False, False, True, False]
    else:
        assert exact == [False, True, False, True]
        codes = Sender(packing, 3).encode(gradients_of(0))[1][2:]
        assert sum(code.nbytes for code in codes) < 4 * (64 * 65 + 70 * 64)


@pytest.mark.parametrize("compression", ["onebit", "topk", "randomk", ErrorFeedback("int4", warmup_steps=2)])
def test_with_error_feedback_only_what_is_kept_is_missing(compression: Compressor) -> None:
    packing = packing_of(1, compression)
    sender = Sender(packing, 3)
    total, given = torch.zeros(64, 65), torch.zeros(64, 65)
    for step in range(STEPS):
        (gradient, *_) = dense(gradients_of(step))
        (decoded,) = through(packing, sender, [gradient])
        assert decoded is not None
        total += decoded
        given += gradient
        if isinstance(compression, ErrorFeedback) and step < 2:
            assert torch.equal(total, given)
    kept = sender.state_dict()["residual.0"].view(64, 65)
    assert kept.abs().sum() > 0
    torch.testing.assert_close(total + kept, given, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compression", ["none", "fp16", ErrorFeedback("int4"), "onebit"])
def test_what_is_absent_or_sparse_is_so_at_the_server_and_nothing_is_lost(compression: Compressor) -> None:
    """Have a matrix without a gradient in step 1, with a sparse one in step 2, and nothing at all in step 3."""
    packing = packing_of(4, compression)
    sender = Sender(packing, 3)
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 5, 3]]), torch.ones(3, 65), (64, 65), check_invariants=True)
    given, total = torch.zeros(64, 65), torch.zeros(64, 65)
    for step in range(STEPS):
        gradients = [None] * 4 if step == 3 else gradients_of(step)
        gradients[0] = [gradients[0], None, rows, None][step]
        decoded = through(packing, sender, gradients)
        assert [each is None for each in decoded] == [each is None for each in gradients]
        if step == 2:
            assert decoded[0] is not None
            assert decoded[0].is_sparse
            assert torch.equal(decoded[0].to_dense(), rows.to_dense())
        elif step == 0:
            given += dense(gradients)[0]
            total += dense(decoded)[0]
    kept = sender.state_dict().get("residual.0")
    if kept is not None:
        total += kept[: given.numel()].view(64, 65)
    torch.testing.assert_close(total, given, rtol=1e-2 if compression == "fp16" else 1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda residual: residual / 0, "residual.0 has numbers that are not finite"),
        (lambda residual: residual.view(64, -1), "residual.0 is torch.float32 of shape"),
        (lambda residual: residual[:1], "residual.0 is torch.float32 of shape"),
        (lambda residual: residual.double(), "residual.0 is torch.float64"),
    ],
)
def test_a_state_that_would_spoil_the_next_update_is_not_loaded(damage: Callable[[Tensor], Tensor], said: str) -> None:
    packing = packing_of(4, "dgc")
    sender = Sender(packing, 3)
    sender.encode(gradients_of(0))
    before = sender.state_dict()
    with pytest.raises(ValueError, match=said):
        sender.load_state_dict(
            {name: tensor + 1 for name, tensor in before.items()} | {"residual.0": damage(before["residual.0"])}
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in sender.state_dict().items())

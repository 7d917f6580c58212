"""What compression= takes, what it means for which parameter, and what a checkpoint holds; in a world of one."""

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives.compression.codec import Codec, Raw
from gradwire.collectives.compression.dense import QSGD, Int4, Int8, OneBit
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.registry import CODECS, find_codec
from gradwire.collectives.compression.sparse import TopK
from gradwire.trainer.reducer.checkpoint import KEY
from gradwire.trainer.reducer.compression import (
    LEAST_NUMEL,
    NAMES,
    Cast,
    Encoding,
    ErrorFeedback,
    Policy,
    encoding_of,
    verb_codec,
)
from tests.ranks.training import through_a_file


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 64), nn.Tanh(), nn.Linear(64, 80))


def optimizer_of(module: nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    inner = torch.optim.Adam(module.parameters())
    return hvd.DistributedOptimizer(inner, module.named_parameters(), **options)


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, 80, generator=generator)).square().mean().backward()
        optimizer.step()


def test_every_codec_has_a_name() -> None:
    assert set(NAMES) == {*CODECS, "powersgd"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_what_compression_has_of_it(name: str) -> None:
    encoding = encoding_of(name)
    assert encoding == encoding_of(getattr(hvd.Compression, name))
    if name in ("none", "fp16", "bf16"):
        assert isinstance(encoding, Cast)
    else:
        codec = find_codec(name)
        assert encoding == Encoding(codec, feedback=isinstance(codec, Codec) and codec.needs_feedback)
        assert encoding == encoding_of(codec)


def test_error_feedback_where_asked() -> None:
    assert encoding_of(ErrorFeedback("int8")) == Encoding(Int8(), feedback=True)
    assert encoding_of(ErrorFeedback(TopK(), warmup_steps=3)) == Encoding(TopK(), feedback=True, warmup_steps=3)
    assert encoding_of(ErrorFeedback("powersgd", 3)) == Encoding(PowerSGD(), feedback=False, warmup_steps=3)
    assert encoding_of(Raw()) == hvd.Compression.none


@pytest.mark.parametrize("codec", ["qsgd", "terngrad", Int4(block=256, stochastic=True)])
def test_feedback_that_diverges_is_refused(codec: Any) -> None:
    with pytest.raises(ValueError, match=r"error feedback cannot be used with .*omega is"):
        ErrorFeedback(codec)


@pytest.mark.parametrize("codec", ["natural", Int8(stochastic=True), Int4(stochastic=True), QSGD(block=32)])
def test_feedback_of_unbiased_codecs_that_lose_little_is_allowed(codec: Any) -> None:
    assert encoding_of(ErrorFeedback(codec)).feedback  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoding_of("zip"), "no codec is called 'zip'; known are none, fp16"),
        (lambda: encoding_of(torch.float16), "compression must be a codec, ErrorFeedback"),
        (lambda: ErrorFeedback("int9"), "no codec is called 'int9'"),
        (lambda: ErrorFeedback("none"), "without one there is no error"),
        (lambda: ErrorFeedback(7), "a codec or its name"),
        (lambda: ErrorFeedback("int8", warmup_steps=-1), "warmup_steps must be a whole number >= 0, not -1"),
        (lambda: verb_codec("onebit"), "'onebit' with error feedback is for DistributedOptimizer"),
        (lambda: verb_codec("randomk"), "'randomk' selects by the step"),
    ],
)
def test_what_cannot_be_meant(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_first_pattern_counts() -> None:
    policy = Policy("int8", {"*.bias": "fp16", "head.*": "topk", "*": "none"})
    large, vector = torch.zeros(64, 64), torch.zeros(LEAST_NUMEL)
    assert policy.encoding("head.bias", vector) == hvd.Compression.fp16
    assert policy.encoding("head.weight", vector) == Encoding(TopK(), feedback=True)
    assert policy.encoding("body.weight", large) == hvd.Compression.none


def test_codecs_are_for_large_matrices() -> None:
    shapes = [(64, 64), (8, 8, 8, 8), (63, 65), (LEAST_NUMEL,), ()]
    encoded = [isinstance(Policy("int8").encoding("", torch.zeros(shape)), Encoding) for shape in shapes]
    assert encoded == [True, True, False, False, False]
    assert all(Policy("fp16").encoding("", torch.zeros(shape)) == hvd.Compression.fp16 for shape in shapes)


@pytest.mark.usefixtures("alone")
def test_a_policy_that_goes_astray() -> None:
    module = model()
    with pytest.raises(ValueError, match=r"no parameter's name matches '1\.\*'; names are 0.weight, 0.bias, 2.weight"):
        optimizer_of(module, policy={"1.*": "int8"})
    with pytest.raises(ValueError, match="needs named_parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(module.parameters()), policy={"*": "int8"})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_without_codecs_a_checkpoint_is_as_ever(compression: str) -> None:
    module = model()
    optimizer = optimizer_of(module, compression=compression)
    train(module, optimizer)
    assert str(optimizer.state_dict()) == str(optimizer.optimizer.state_dict())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rule", ["default", "next_forward", "sharded", "local"])
def test_an_optimizer_without_codecs_loads_what_codecs_have_saved(rule: str) -> None:
    module = model()
    optimizer = optimizer_of(module, compression="topk")
    train(module, optimizer)
    saved = through_a_file(optimizer.state_dict())
    assert KEY in saved
    plain = torch.optim.Adam(module.parameters())
    plain.load_state_dict(saved)
    train(module, plain)
    assert KEY not in plain.state_dict()

    rules = {
        "next_forward": hvd.rules.NextForward(module),
        "sharded": hvd.rules.Sharded(),
        "local": hvd.rules.LocalUpdates(every=2, warmup_steps=9),
    }
    wrapped = optimizer_of(module, rule=rules.get(rule))
    with pytest.warns(UserWarning, match="the residuals are lost") as warned:
        wrapped.load_state_dict(saved)
    assert warned[0].filename == __file__
    train(module, wrapped)
    assert KEY not in wrapped.state_dict()
    wrapped.close()


@pytest.mark.usefixtures("alone")
def test_what_is_owed_begins_anew_without_a_saved_part() -> None:
    module = model()
    optimizer = optimizer_of(module, compression=OneBit())
    plain = optimizer.optimizer.state_dict()
    train(module, optimizer)
    optimizer.load_state_dict(plain)
    saved = optimizer.state_dict()[KEY]
    assert saved["step"] == 0
    tensors = [tensor for entry in saved["buckets"] for tensor in entry.get("tensors", {}).values()]
    assert tensors
    assert not any(tensor.any() for tensor in tensors)

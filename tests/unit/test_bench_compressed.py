"""What stands in for a codec while its parts are timed, and what a rank is said to send."""

import pytest
import torch

pytest.importorskip("numba")

from gradwire.bench.micro.compressed import Clock, StandIn
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.registry import CODECS

NUMEL = 3000
VALUES = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def encoded(codec: Codec) -> torch.Tensor:
    wire = torch.zeros(codec.wire_bytes(NUMEL), dtype=torch.uint8)
    codec.encode(VALUES, wire, residual=torch.zeros(NUMEL), seed=5, state=codec.new_state(NUMEL, VALUES.device))
    return wire


@pytest.mark.parametrize("name", CODECS)
def test_a_timed_codec_is_that_codec(name: str) -> None:
    real, clock = CODECS[name](), Clock()
    stand = StandIn(real, clock)
    for step in (0, 3):
        assert torch.equal(encoded(stand.at(step)), encoded(real.at(step)))
    out, expected = torch.ones(NUMEL), torch.ones(NUMEL)
    stand.decode(encoded(real), out, add=True, scale=0.5)
    real.decode(encoded(real), expected, add=True, scale=0.5)
    assert torch.equal(out, expected)
    encode_s, decode_s = clock.read()
    assert encode_s > 0
    assert decode_s > 0
    assert clock.read() == (0, 0)


@pytest.mark.parametrize("name", CODECS)
def test_a_blank_goes_the_same_way_and_touches_nothing(name: str) -> None:
    real = CODECS[name]()
    stand = StandIn(real)
    for one in (stand, StandIn(real, Clock())):
        assert (one.summable, one.wire_dtype, one.alignment) == (real.summable, real.wire_dtype, real.alignment)
        assert [one.wire_bytes(n) for n in (0, 1, NUMEL)] == [real.wire_bytes(n) for n in (0, 1, NUMEL)]
        assert (one.new_state(1, VALUES.device) is None) == (real.new_state(1, VALUES.device) is None)
    assert not encoded(stand.at(2)).any()
    out = torch.ones(NUMEL)
    stand.decode(encoded(real), out)
    assert torch.equal(out, torch.ones(NUMEL))


def test_ranks_say_the_same_of_a_stand() -> None:
    """Look into the text of the call, which ranks compare."""
    assert repr(StandIn(Int8(), Clock())) == repr(StandIn(Int8(), Clock())) != repr(StandIn(Int8(block=64), Clock()))

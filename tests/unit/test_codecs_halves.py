"""Codecs of bfloat16 and float16: as of the same numbers in float32, and rounded once when they are decoded."""

import pytest
import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, Raw
from tests.cuda_machine.cases import CODECS, SEED, bits, encoded, numbers, same

HALVES = (torch.bfloat16, torch.float16)
KINDS = ("gaussian", "wide", "few", "large", "not finite", "denormal")
NUMEL = 4500


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("codec", [Raw(), *CODECS], ids=repr)
class TestHalves:
    def test_encoded(self, codec: Codec, dtype: torch.dtype) -> None:
        for kind in KINDS:
            values = numbers(NUMEL, kind).to(dtype)
            both = []
            for given in (values, values.to(torch.float32)):
                residual, state = numbers(NUMEL, "gaussian", 1), codec.new_state(NUMEL, values.device)
                wires = [
                    encoded(codec, given, residual, seed=SEED, state=state),
                    encoded(codec, given, residual, seed=SEED, state=state),
                    encoded(codec, given, seed=SEED),
                ]
                both.append([*wires, bits(residual), *map(bits, (state or {}).values())])
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True)), kind

    def test_decoded(self, codec: Codec, dtype: torch.dtype) -> None:
        before = numbers(NUMEL, "wide", 3).to(dtype)

        def decoded(wire: Tensor, out: Tensor, add: bool, scale: float) -> Tensor:
            codec.decode(wire, out, add=add, scale=scale)
            return out.to(dtype).to(torch.float32)

        for kind in KINDS:
            wire = encoded(codec, numbers(NUMEL, kind), seed=SEED)
            for add, scale in ((False, 1.0), (True, 1.0), (False, 0.3), (True, 0.3)):
                expected = decoded(wire, before.to(torch.float32), add, scale)
                assert same(decoded(wire, before.clone(), add, scale), expected), kind


def test_residual_and_state_are_float32() -> None:
    for codec in CODECS:
        values = numbers(NUMEL, "gaussian").to(torch.bfloat16)
        with pytest.raises(ValueError, match="float32"):
            encoded(codec, values, values.clone())

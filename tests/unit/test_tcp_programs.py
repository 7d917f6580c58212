"""Programs over connections of our own: one compiled call gives the bits that the loop in Python gives."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from gradwire.collectives.kernels import cpu_arithmetic
from gradwire.collectives.reduction import COMBINE, DTYPES
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.transports.loop import Numbers, Scratch, execute
from gradwire.collectives.transports.tcp import TcpTransport
from tests.harness import wide
from tests.ranks.exact import cover
from tests.ranks.test_shared_memory import contribution
from tests.unit.in_process import run_ranks
from tests.unit.over_tcp import Connect, in_time, prepared, program

ALGORITHMS = [name for name in PLANNERS["allreduce"] if "hierarchical" not in name]
CARRIED = [dtype for dtype in DTYPES if dtype is not torch.bool]  # which travels as uint8
OPS = ("sum", "min", "max", "product")
NUMELS = (0, 1, 37, 999)


def peculiar(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, no numbers and infinite ones, met in every order."""
    values = torch.tensor([0.0, -0.0, torch.nan, -0.0, 0.0, 1.0, -torch.inf, torch.inf, -torch.nan, torch.inf])
    return values.repeat(20).roll(rank * 3).to(dtype)


def allreduced(
    transports: Sequence[TcpTransport],
    algorithm: str,
    op: str,
    contributions: Sequence[torch.Tensor],
    *,
    compiled: bool,
    tag: int = 7,
) -> list[bytes]:
    """The bits that every rank has in the end, by the compiled loop or by the one in Python."""
    size, results = len(transports), [tensor.clone() for tensor in contributions]

    def body(rank: int) -> None:
        transport, buffer = transports[rank], results[rank]
        followed = program(algorithm, rank, size, buffer.numel())
        if compiled:
            run = prepared(transport, followed, buffer.dtype, op)
            run(buffer, buffer, tag, in_time())
        else:
            numbers = Numbers(followed, buffer, buffer, COMBINE[op], rank, Scratch())
            execute(followed, numbers, transport, tag=tag, deadline=in_time())

    run_ranks(size, body)
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


def assert_same_bits(
    transports: Sequence[TcpTransport], algorithm: str, op: str, contributions: Sequence[torch.Tensor]
) -> None:
    cpu_arithmetic(contributions[0].dtype)  # compiled before any deadline begins
    in_python = allreduced(transports, algorithm, op, contributions, compiled=False)
    in_one_call = allreduced(transports, algorithm, op, contributions, compiled=True)
    assert in_one_call == in_python, (op, contributions[0].numel())
    assert len(set(in_one_call)) == 1, "the ranks' bits differ"


@pytest.mark.parametrize(
    "rows",
    [
        cover((2, 3), ALGORITHMS, CARRIED, OPS, NUMELS),
        *wide(cover((4, 5), ALGORITHMS, CARRIED, OPS, NUMELS)),
    ],
    ids=["few ranks", "more ranks"],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_compiled_program_gives_the_bits_that_python_gives(
    connect: Connect, algorithm: str, rows: list[tuple[int, str, torch.dtype, str, int]]
) -> None:
    transports = cache(connect)
    for size, name, dtype, op, numel in rows:
        if name == algorithm:
            given = [contribution(rank, numel, dtype) for rank in range(size)]
            assert_same_bits(transports(size), algorithm, op, given)


@pytest.mark.parametrize("dtype", [dtype for dtype in CARRIED if dtype.is_floating_point], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_odd_numbers_come_out_alike_everywhere(connect: Connect, algorithm: str, dtype: torch.dtype) -> None:
    """All ranks have the same bits. torch does not define the sign of a zero from min and max, nor the bits of a NaN, so these
    are not compared with torch's."""
    transports, given = connect(4), [peculiar(rank, dtype) for rank in range(4)]
    for op in OPS:
        bits = allreduced(transports, algorithm, op, given, compiled=True)
        assert len(set(bits)) == 1
        if op in ("min", "max"):
            expected = getattr(torch.stack(given), f"a{op}")(0)
            found = torch.frombuffer(bytearray(bits[0]), dtype=dtype)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("constant", "value"),
    [("transports.requests._FIRST_ROWS", 1), ("schedules.program._KEPT", 7)],
    ids=["outgrows its table", "goes in several tables"],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_long_program(
    connect: Connect, algorithm: str, constant: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"gradwire.collectives.{constant}", value)
    assert_same_bits(connect(3), algorithm, "sum", [contribution(rank, 999, torch.float32) for rank in range(3)])

"""The turns of `python -m gradwire.bench codec`: their inputs, the checks of their results, and their times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradwire.bench.codec.checks import count_outside, count_unequal, relative_error
from gradwire.bench.codec.peers import PEERS, Contender
from gradwire.bench.timing import Protocol, median_and_p99, speedup_interval, take_turns
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Float8, Int4, Int8
from gradwire.collectives.compression.registry import CODECS as REGISTRY
from gradwire.collectives.compression.sparse import DGC, Sparse

_DEFAULTS: dict[str, Codec] = {name: codec() for name, codec in REGISTRY.items() if name != "none"}
#: Settings that run other paths of the kernels than the defaults.
_VARIANTS: dict[str, Codec] = {
    "fp8-e5m2": Float8("e5m2"),
    "int8-stochastic": Int8(stochastic=True),
    "int4-stochastic": Int4(stochastic=True),
}
#: The codecs by name, in the order of the registry.
CODECS = dict(sorted((_DEFAULTS | _VARIANTS).items(), key=lambda item: list(REGISTRY).index(item[1].name)))
OPERATIONS = ("encode", "encode_ef", "decode", "decode_add")
#: The bytes that a copy reads and writes per float32 number.
COPIED_BYTES = 8
SEED = 1
#: The clock cycles, about a millisecond, for which a GPU is kept busy while the host enqueues the timed operation.
BUSY_CYCLES = 2_000_000


@dataclass(frozen=True)
class CodecRow:
    """The result of one operation of one codec. Field names are the keys of the JSON.

    operation: encode_ef encodes with error feedback. rate_GBps: in 1e9 bytes of float32 per second. wire_bytes,
    moved_bytes: the bytes of the code, and those that the operation must read and write, per element. of_copy: the rate
    of moving them, over a copy's. torch_over_ours: torch's time over ours, with temporaries kept. torch_interval: its
    95 % interval; None with few turns. plain_over_ours: the same with temporaries allocated in each call.
    relative_error: of the codec, in L2, against float64. wrong, torch_wrong: the elements outside the codec's bound.
    """

    codec: str
    settings: str
    operation: str
    elements: int
    time_us: float
    p99_us: float
    rate_GBps: float  # noqa: N815
    wire_bytes: float
    moved_bytes: float
    of_copy: float
    torch_us: float
    torch_over_ours: float
    torch_interval: tuple[float, float] | None
    plain_over_ours: float
    relative_error_gaussian: float
    relative_error_laplace: float
    wrong: int
    torch_wrong: int


class Ours(Contender):
    """One of our codecs. encode and encode_ef have separate states, since the numbers of encode_ef are larger."""

    def __init__(self, codec: Codec, numel: int, device: torch.device) -> None:
        super().__init__(codec, numel, device)
        self._wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
        self._state, self._plain_state = (codec.new_state(numel, device) for _ in range(2))

    def restart(self) -> None:
        """Reset the momentum of dgc, which belongs to the residual, and keep the state of threshold."""
        if self._state is not None and isinstance(self.codec, DGC):
            self._state["momentum"].zero_()

    def encode(self, values: Tensor) -> None:
        state = None if isinstance(self.codec, DGC) else self._plain_state
        self.codec.encode(values, self._wire, seed=SEED, state=state)

    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        self.codec.encode(values, self._wire, residual=residual, seed=SEED, state=self._state)

    def decode(self, out: Tensor) -> None:
        self.codec.decode(self._wire, out)

    def decode_add(self, out: Tensor) -> None:
        self.codec.decode(self._wire, out, add=True)


class CodecInputs:
    """The inputs of all contenders, float32 of shape (numel,). residual and out are restored before each turn."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.values = gaussian(numel, device, seed=0)
        self.laplace = laplace(numel, device, seed=1)
        self.old_residual = gaussian(numel, device, seed=2)
        self.old_out = gaussian(numel, device, seed=3)
        self.residual = self.old_residual.clone()
        self.out = self.old_out.clone()

    def reset(self) -> None:
        self.residual.copy_(self.old_residual)
        self.out.copy_(self.old_out)


def gaussian(numel: int, device: torch.device, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device)


def laplace(numel: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    magnitudes = torch.empty(numel, device=device).exponential_(generator=generator)
    return magnitudes.copysign_(torch.rand(numel, generator=generator, device=device) - 0.5)


class Turns:
    """The four operations of one contender for one codec, and the number of wrong elements in their results."""

    def __init__(
        self, contender: Callable[[Codec, int, torch.device], Contender], codec: Codec, numbers: CodecInputs
    ) -> None:
        values = numbers.values
        self._encoder, self._decoder = (contender(codec, values.numel(), values.device) for _ in range(2))
        self._codec, self._numbers = codec, numbers
        self._decoder.encode(numbers.values)
        self._decoded = torch.empty_like(numbers.values)
        self._decoder.decode(self._decoded)
        self.operations = {
            "encode": partial(self._encoder.encode, numbers.values),
            "encode_ef": partial(self._encoder.encode_ef, numbers.values, numbers.residual),
            "decode": partial(self._decoder.decode, numbers.out),
            "decode_add": partial(self._decoder.decode_add, numbers.out),
        }

    def restart(self) -> None:
        self._encoder.restart()

    def wrong(self, operation: str) -> int:
        numbers, codec = self._numbers, self._codec
        values, out = numbers.values, numbers.out
        if operation == "decode":
            return count_outside(codec, values, out)
        if operation == "decode_add":
            terms = numbers.old_out.abs().add_(self._decoded.abs())
            return count_unequal(out, numbers.old_out + self._decoded, terms)
        self._encoder.decode(out)
        if operation == "encode":
            return count_outside(codec, values, out)
        corrected = values + numbers.old_residual
        wrong = count_outside(codec, corrected, out)
        return wrong + count_unequal(numbers.residual, corrected - out, corrected.abs().add_(out.abs()))


def on_core(operation: Callable[[], object]) -> float:
    """Run an operation on the CPU, and return its processor time, which excludes other processes."""
    start = time.process_time()
    operation()
    return time.process_time() - start


def on_device(operation: Callable[[], object]) -> float:
    """Run an operation on a GPU, and return the GPU's time, without the time of the host and the launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    operation()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def moved_bytes(codec: Codec, operation: str, numel: int) -> float:
    """Return the bytes moved per element: each number, residual and code is read once, and each result written once."""
    wire = codec.wire_bytes(numel) / numel
    if operation == "encode":
        return 4 + wire
    if operation == "encode_ef":
        return (20 if isinstance(codec, DGC) else 12) + wire  # DGC: a momentum read and written
    if isinstance(codec, Sparse):
        sent = codec.count(numel) / numel
        return wire + (4 + 4 * sent if operation == "decode" else 8 * sent)
    return wire + (4 if operation == "decode" else 8)


def error_of(codec: Codec, values: Tensor) -> tuple[float, int]:
    """Return the relative error, and the number of elements outside the bound."""
    contender, decoded = Ours(codec, values.numel(), values.device), torch.empty_like(values)
    contender.encode(values)
    contender.decode(decoded)
    return relative_error(values, decoded), count_outside(codec, values, decoded)


def measure(name: str, numbers: CodecInputs, protocol: Protocol) -> tuple[list[CodecRow], float]:
    """Measure a codec. Return its rows, and the median seconds of a copy."""
    codec, values = CODECS[name], numbers.values
    peer = PEERS[codec.name]
    turns = [Turns(contender, codec, numbers) for contender in (Ours, peer, partial(peer, keeps=False))]

    def reset() -> None:
        numbers.reset()
        for turn in turns:
            turn.restart()

    operations: list[Callable[[], object]] = [partial(numbers.out.copy_, values)]
    checks: list[Callable[[], int]] = [lambda: int((numbers.out != values).sum())]
    for turn in turns:
        operations += [turn.operations[name] for name in OPERATIONS]
        checks += [partial(turn.wrong, name) for name in OPERATIONS]
    timer = on_device if values.device.type == "cuda" else on_core
    seconds, wrong = take_turns(operations, timer, protocol, reset, *checks)
    copy_s = median_and_p99(seconds[0])[0]
    (gaussian_error, _), (laplace_error, laplace_wrong) = error_of(codec, values), error_of(codec, numbers.laplace)
    ours, torchs, plains = seconds[1:].reshape(3, len(OPERATIONS), -1)
    ours_wrong, torchs_wrong, plains_wrong = np.reshape(wrong[1:], (3, len(OPERATIONS)))
    numel = values.numel()
    rows: list[CodecRow] = []
    for index, operation in enumerate(OPERATIONS):
        ours_s, p99_s = median_and_p99(ours[index])
        torch_s = median_and_p99(torchs[index])[0]
        moved = moved_bytes(codec, operation, numel)
        rows.append(
            CodecRow(
                codec=name,
                settings=repr(codec),
                operation=operation,
                elements=numel,
                time_us=ours_s * 1e6,
                p99_us=p99_s * 1e6,
                rate_GBps=4 * numel / ours_s / 1e9,
                wire_bytes=codec.wire_bytes(numel) / numel,
                moved_bytes=moved,
                of_copy=moved / COPIED_BYTES * copy_s / ours_s,
                torch_us=torch_s * 1e6,
                torch_over_ours=torch_s / ours_s,
                torch_interval=speedup_interval(ours[index], torchs[index]),
                plain_over_ours=median_and_p99(plains[index])[0] / ours_s,
                relative_error_gaussian=gaussian_error,
                relative_error_laplace=laplace_error,
                wrong=int(ours_wrong[index]) + (laplace_wrong if operation == "encode" else 0),
                torch_wrong=int(torchs_wrong[index] + plains_wrong[index]),
            )
        )
    return rows, copy_s

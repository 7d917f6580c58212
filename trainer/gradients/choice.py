"""What buckets travel as with compression="auto": what is predicted to be quickest, corrected once by what steps take."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import median
from typing import TypeAlias

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.trainer.gradients.combination import Combination
from gradwire.trainer.gradients.compression import Auto, Cast, Compression, Encoding

Size: TypeAlias = tuple[int, torch.dtype]
"""Of a bucket: how many numbers it has, and of which dtype."""

SKIPPED, COUNTED = 2, 7
"""Steps after a change that are not measured, as memory is touched for the first time, and those that are after them."""

WINDOW = 1 + SKIPPED + COUNTED
"""Steps from one change to the next."""

_CLOSE = 0.1
"""Predictions that are off by no more than this part are not tried against steps."""

_HOPELESS = 2.0
"""A rival that is predicted to take so many times what the choice was measured to take is not tried."""

_NEAR = 0.97
"""What loses nothing stays unless codecs have steps take less than this part."""

_log = logging.getLogger("gradwire")


class Choice:
    """Chooses what buckets travel as, the same on all ranks.

    Each bucket takes that of the candidates by which its exchange is predicted to be quickest. Where exchanges then take another
    time than predicted, each of the candidates is tried in all buckets for some steps, the one that was predicted best first, and
    what has the quickest steps stays. After that the choice is settled.

    combination: of the gradients. auto: what is allowed. device_type: where gradients lie. candidates: what is allowed, and none.
    Making one is a collective call, which measures codecs, and links unless they were measured. Raises ValueError where links
    cannot be measured.
    """

    def __init__(self, combination: Combination, auto: Auto, device_type: str) -> None:
        self.candidates: tuple[Cast | Encoding, ...] = (*auto.allowed, Compression.none)
        self.settled = False
        self._communicator = combination.communicator
        self._in_shares = combination.in_shares
        self._communicator.measure_codecs(filter(None, map(_codec_of, auto.allowed)), device_type)
        self._warmup_steps = max(kind.warmup_steps if isinstance(kind, Encoding) else 0 for kind in auto.allowed)
        self._predicted: dict[Size, dict[Cast | Encoding, float]] = {}
        self._everywhere: Cast | Encoding | None = None
        # Those still to be tried; None before the predicted choice is measured.
        self._rivals: list[Cast | Encoding] | None = None
        # Seconds of a step by what was tried everywhere, and for how many they count.
        self._taken: list[tuple[float, Cast | Encoding | None, float]] = []
        self._step, self._now_s = -1, 0.0
        self._told: Sequence[Size] = ()
        self.restart()

    def restart(self) -> None:
        """Begin to measure steps anew."""
        self._sizes: Sequence[Size] = ()
        self._due = 0
        self._measured: list[tuple[float, float]] = []

    def of(self, size: Size) -> Cast | Encoding:
        """Return what a bucket travels as. Sends nothing."""
        return self._everywhere or next(iter(self._ranked(size)))

    def follow(self, step: int, sizes: Sequence[Size], exchange_s: float) -> bool:
        """Take note of a step, and return whether of() has changed, so that buckets are to be laid out anew. Collective in the
        steps that end a measurement, and only a look where it is called again after the same step.

        step: how many exchanges there were. sizes: of the buckets that of() was asked about. exchange_s: how long their last
        exchanges took on this rank.
        """
        if self.settled or step == self._step or not sizes:
            return False
        now_s = time.perf_counter()
        step_s, self._step, self._now_s = now_s - self._now_s, step, now_s
        if sizes != self._sizes:
            self._sizes, self._measured = list(sizes), []
            self._due = max(step, self._warmup_steps) + SKIPPED + COUNTED
            self._tell()
        elif step > self._due - COUNTED:
            self._measured.append((step_s, exchange_s))
        if step < self._due:
            return False
        mine = [median(column) for column in zip(*self._measured, strict=True)]  # none where this rank has joined
        steps, exchanges = zip(*filter(None, self._communicator.allgather_record(mine)), strict=True)
        return self._judge(max(steps), min(exchanges))  # the last rank to come to an exchange waits for nobody

    def _judge(self, step_s: float, exchange_s: float) -> bool:
        """Return whether of() changes, by what steps and exchanges took."""
        sizes, before = self._sizes, self._everywhere
        self.restart()
        if self._rivals is None:
            predicted_s = sum(min(self._ranked(size).values()) for size in sizes)
            self._say(f"exchanges take {_ms(exchange_s)}, and {_ms(predicted_s)} were predicted")
            totals = {kind: sum(self._ranked(size)[kind] for size in sizes) for kind in self.candidates}
            others = [kind for kind in totals if any(kind != self.of(size) for size in sizes)]
            is_off = abs(exchange_s - predicted_s) > _CLOSE * predicted_s
            rivals = [kind for kind in others if is_off and totals[kind] <= _HOPELESS * exchange_s]
            self._rivals = sorted(rivals, key=totals.__getitem__)
        codes = any(self.of(size) != Compression.none for size in sizes)
        self._taken.append((step_s, before, step_s if codes else _NEAR * step_s))
        if self._rivals:
            self._everywhere = self._rivals.pop(0)
            self._say(f"{self._everywhere.name} is tried in all buckets")
        else:
            self.settled = True
            self._everywhere = min(self._taken, key=lambda taken: taken[2])[1]
            steps = "; ".join(
                f"{kind.name if kind else 'as predicted'} {_ms(seconds)}" for seconds, kind, _ in self._taken
            )
            stays = self._everywhere.name if self._everywhere else "what was predicted best"
            self._say(f"{stays} stays: a step takes {steps}")
        return self._everywhere != before

    def _ranked(self, size: Size) -> dict[Cast | Encoding, float]:
        """Return how many seconds the exchange of a bucket is predicted to take by each candidate, the quickest first."""
        if size not in self._predicted:
            seconds = {kind: self._predict(size, kind) for kind in self.candidates}
            self._predicted[size] = dict(sorted(seconds.items(), key=lambda item: item[1]))
        return self._predicted[size]

    def _predict(self, size: Size, kind: Cast | Encoding) -> float:
        numel, dtype = size
        codec = _codec_of(kind, dtype)
        seconds = self._communicator.predict(numel, dtype.itemsize, codec)
        return seconds / 2 if codec is None and self._in_shares else seconds  # shares are half of an allreduce

    def _tell(self) -> None:
        """Log a line a bucket, unless that was done, or a rival is tried."""
        if self._everywhere is not None or self._sizes == self._told:
            return
        self._told = self._sizes
        for number, (numel, dtype) in enumerate(self._sizes):
            (first, first_s), *others = list(self._ranked((numel, dtype)).items())[:3]
            rest = "".join(f"; {kind.name} {_ms(seconds)}" for kind, seconds in others)
            nbytes = numel * dtype.itemsize
            self._say(f"bucket {number} ({1e-6 * nbytes:.3g} MB): {first.name}, {_ms(first_s)} predicted{rest}")

    def _say(self, text: str) -> None:
        if self._communicator.rank == 0:
            _log.info("gradwire: compression='auto': %s", text)


def _codec_of(kind: Cast | Encoding, dtype: torch.dtype = torch.float32) -> Codec | None:
    codec = kind.codec(dtype) if isinstance(kind, Cast) else kind.codec
    assert not isinstance(codec, MatrixCodec), "wanted() refuses them"
    return codec


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

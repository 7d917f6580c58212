"""Choose the codecs of buckets for compression="auto": those predicted to be fastest, corrected once by the measured time of
steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import TypeAlias

import torch

from gradwire.collectives.compression.codec import Codec, MatrixCodec
from gradwire.trainer.reducer.compression import Auto, Cast, Compression, Encoding, encoding_for
from gradwire.trainer.reducer.setup import Combination
from gradwire.trainer.reducer.steps import SKIPPED, StepTimer

Size: TypeAlias = tuple[int, torch.dtype]
"""The number of elements of a bucket, and their dtype."""

COUNTED = 7
"""The number of steps that are timed for each choice."""

WINDOW = 1 + SKIPPED + COUNTED
"""Steps from one change to the next."""

_CLOSE = 0.1
"""Predictions with a relative error of at most this are not corrected."""

_HOPELESS = 2.0
"""Candidates whose predicted time is more than this multiple of the measured time are not tried."""

_NEAR = 0.97
"""Codecs replace an uncompressed exchange only if steps then take less than this share of their time."""

_log = logging.getLogger("gradwire")


class Choice:
    """Chooses the codec, or none, of each bucket; the same on all ranks.

    Each bucket uses the candidate with the fastest predicted exchange. If the exchanges do not take the predicted time, each
    promising candidate is tried in all buckets for ten steps (WINDOW), the one with the best prediction first, and the one with
    the fastest steps stays. After that, the choice is settled.

    combination, device_type: of the gradients. auto: holds the allowed codecs. candidates: the allowed codecs, and none. The
    constructor is a collective call. It measures the codecs, and the links unless they were measured before. Raises ValueError
    if links cannot be measured.
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
        # Candidates still to be tried; None before the predicted choice is measured.
        self._rivals: list[Cast | Encoding] | None = None
        # For each choice tried: seconds of a step, the candidate (None: as predicted), and the seconds used for comparison.
        self._taken: list[tuple[float, Cast | Encoding | None, float]] = []
        self._timer = StepTimer(self._communicator, COUNTED)
        self.sizes: list[Size] = []
        """The sizes of all buckets whose candidate choose() has returned. Clear it when the buckets are laid out anew."""
        self._reported: Sequence[Size] = ()
        self.restart()

    def restart(self) -> None:
        """Restart the measurement of steps."""
        self._sizes: list[Size] = []  # of the steps that are measured

    def choose(self, size: Size) -> Cast | Encoding:
        """Return the candidate of a new bucket, and record its size. Sends nothing."""
        self.sizes.append(size)
        return self._best(size)

    def _best(self, size: Size) -> Cast | Encoding:
        return self._everywhere or next(iter(self._ranked(size)))

    def follow(self, step: int, exchange_s: float, *, counts: bool = True) -> bool:
        """Record a step, and return whether the choices have changed, so that buckets must be laid out anew. Collective in the
        steps that end a measurement. A second call after the same step does nothing.

        step: the number of earlier exchanges. exchange_s: the seconds of the last exchanges of the chosen buckets on this rank.
        counts: False on a rank that has joined, whose steps are not measured.
        """
        if self.settled or step == self._timer.step or not self.sizes:
            return False
        if self.sizes != self._sizes:
            self._sizes = list(self.sizes)
            self._timer.restart(max(step, self._warmup_steps))
            self._report_predictions()
        found = self._timer.record(step, exchange_s, counts=counts)
        return found is not None and self._judge(median(found.steps), found.part)

    def _judge(self, step_s: float, exchange_s: float) -> bool:
        """Evaluate a measurement of steps and exchanges, and return whether the choices have changed."""
        sizes, before = self._sizes, self._everywhere
        self.restart()
        if self._rivals is None:
            predicted_s = sum(min(self._ranked(size).values()) for size in sizes)
            self._report(f"the exchanges of a step take {_ms(exchange_s)} ({_ms(predicted_s)} predicted)")
            totals = {kind: sum(self._ranked(size)[kind] for size in sizes) for kind in self.candidates}
            others = [kind for kind in totals if any(kind != self._best(size) for size in sizes)]
            is_off = abs(exchange_s - predicted_s) > _CLOSE * predicted_s
            rivals = [kind for kind in others if is_off and totals[kind] <= _HOPELESS * exchange_s]
            self._rivals = sorted(rivals, key=totals.__getitem__)
        codes = any(self._best(size) != Compression.none for size in sizes)
        self._taken.append((step_s, before, step_s if codes else _NEAR * step_s))
        if self._rivals:
            self._everywhere = self._rivals.pop(0)
            self._report(f"the next steps try {self._everywhere.name} in all buckets")
        else:
            self.settled = True
            self._everywhere = min(self._taken, key=lambda taken: taken[2])[1]
            steps = "; ".join(
                f"{_ms(seconds)} with {kind.name if kind else 'the predicted choice'}"
                for seconds, kind, _ in self._taken
            )
            kept = self._everywhere
            final = f"all buckets use {kept.name!r} from now on" if kept else "the predicted choice stays"
            self._report(f"{final}: a step takes {steps}")
        return self._everywhere != before

    def _ranked(self, size: Size) -> dict[Cast | Encoding, float]:
        """Return the predicted seconds of a bucket's exchange by each candidate, the fastest first."""
        if size not in self._predicted:
            seconds = {kind: self._predict(size, kind) for kind in self.candidates}
            self._predicted[size] = dict(sorted(seconds.items(), key=lambda item: item[1]))
        return self._predicted[size]

    def _predict(self, size: Size, kind: Cast | Encoding) -> float:
        numel, dtype = size
        codec = _codec_of(kind, dtype)
        seconds = self._communicator.predict(numel, dtype.itemsize, codec)
        return seconds / 2 if codec is None and self._in_shares else seconds  # shares are half of an allreduce

    def _report_predictions(self) -> None:
        """Log the prediction for each bucket, unless it is logged already or a rival is tried."""
        if self._everywhere is not None or self._sizes == self._reported:
            return
        self._reported = self._sizes
        for number, (numel, dtype) in enumerate(self._sizes):
            (first, first_s), *others = list(self._ranked((numel, dtype)).items())[:3]
            rest = "".join(f"; {kind.name} {_ms(seconds)}" for kind, seconds in others)
            nbytes = numel * dtype.itemsize
            self._report(f"bucket {number} ({1e-6 * nbytes:.3g} MB): {first.name}, {_ms(first_s)} predicted{rest}")

    def _report(self, text: str) -> None:
        if self._communicator.rank == 0:
            _log.info("gradwire: compression='auto': %s", text)


def _codec_of(kind: Cast | Encoding, dtype: torch.dtype = torch.float32) -> Codec | None:
    encoding = encoding_for(kind, dtype)
    codec = None if encoding is None else encoding.codec
    assert not isinstance(codec, MatrixCodec), "wanted() refuses them"
    return codec


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

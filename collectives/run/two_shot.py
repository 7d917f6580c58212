"""Allreduce of codes: the two-shot way, which every codec may go, and which codec may go which other way.

Two-shot: each rank encodes every shard of its buffer and sends it to the shard's owner; the owner decodes all, its own too, adds
them in float32 in the order of the ranks, encodes the sum once, and sends that to all; everyone, the owner too, takes what that
decodes to. So there are two encodings whatever the number of ranks, and the result is the same on all to the bit.

Shards go chunk by chunk: while one chunk is encoded, the sum of the one before and the result of the one before that are on
their way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.compression.codec import Codec
from collectives.compression.feedback import Feedback
from collectives.compression.raw import Raw
from collectives.compression.seeds import rounding_seed
from collectives.compression.sharing import Sharing
from collectives.link.base import Pending, Transport

TWO_SHOT = "two_shot"

#: By how many chunks adding up follows encoding, and taking the result adding up: as many are on their way meanwhile.
_LAG = 2

#: How many chunks ahead of its turn a receive is posted: see collectives.run.executor.
_LOOKAHEAD = 2

#: Chunks for which there is room, so that the place of a message is free when its receive is posted.
_WINDOW = _LAG + _LOOKAHEAD + 1

#: What a place in memory holds, by chunk and member of the group: codes on their way to an owner, and results.
_GIVEN, _TAKEN, _RESULT = range(3)

#: In place of (kind, chunk): sends that were posted in groups, with receives.
_GROUP = (-1, -1)


def legal_with(codec: Codec, algorithms: Sequence[str]) -> tuple[str, ...]:
    """Of the algorithms that allreduce has, and two_shot, those that a codec may ride: codes that cannot be added as they are
    must be decoded by somebody."""
    return (TWO_SHOT, *algorithms) if codec.summable else (TWO_SHOT,)


def effective(codec: Codec, sharing: Sharing) -> Codec:
    """The codec, or none where the numbers themselves are shorter than their code. A codec that remembers must be asked all the
    same, as what it makes of the numbers may be another thing than the numbers."""
    longest = sharing.longest
    if codec.wire_bytes(longest) < 4 * longest or codec.new_state(1, torch.device("cpu")) is not None:
        return codec
    return Raw()


class Wires:
    """Memory for codes, kept between calls. via_host: whether what is on CUDA reaches the transport through pinned memory."""

    def __init__(self, *, via_host: bool) -> None:
        self._via_host = via_host
        self._held: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """nbytes on the device and where the transport reaches them, which is the same unless via_host. Until the next call."""
        held = self._held.get(device)
        if held is None or held[0].numel() < nbytes:
            codes = messages = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if self._via_host and codes.is_cuda:
                messages = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            held = self._held[device] = codes, messages
        return held


class TwoShot:
    """One allreduce in progress.

    flat: float32, 1-D, contiguous; of it, this rank's part is replaced by the result. codec: of this step. divisor: of the sum.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        codec: Codec,
        sharing: Sharing,
        transport: Transport,
        wires: Wires,
        *,
        feedback: Feedback | None,
        divisor: int,
        step: int,
        tag: int,
        deadline: float,
        seed: int = 0,
    ) -> None:
        self._flat, self._codec, self._transport = flat, codec, transport
        self._chunks, self._group, self._rank = sharing.chunks, sharing.group, sharing.rank
        self._me = sharing.group.index(sharing.rank)
        # A group of a rank after the other: not all send to the same one at a time.
        self._others = [(self._me + k) % len(self._group) for k in range(1, len(self._group))]
        self._shard_start = sharing.shard.start
        self._feedback, self._divisor, self._step, self._seed = feedback, divisor, step, seed
        self._tag, self._deadline = tag, deadline
        longest = sharing.longest
        self._stride = -(-max(codec.wire_bytes(longest), 1) // 64) * 64
        self._window = min(_WINDOW, len(self._chunks))
        places = 3 * self._window * len(self._group) * self._stride
        self._codes, self._messages = wires.take(places + 4 * longest, flat.device)
        self._sum = self._codes[places : places + 4 * longest].view(torch.float32)
        self._nbytes: dict[int, int] = {}
        # A CUDA transport's messages must be posted in groups, the same on both sides, or they would wait for each other.
        self._grouped = self._messages.is_cuda
        self._lookahead = 0 if self._grouped else _LOOKAHEAD
        self._posted = [0, 0]  # chunks of which the receives are, by shot
        self._sends: list[tuple[int, torch.Tensor]] = []
        self._receives: list[tuple[int, torch.Tensor]] = []
        self._awaited: list[tuple[int, int, int]] = []
        self._sent: dict[tuple[int, int], list[Pending]] = {}
        self._arriving: dict[tuple[int, int, int], Pending] = {}

    def run(self) -> None:
        """Raises LinkError."""
        count = len(self._chunks)
        for turn in range(count + 2 * _LAG):
            self._expect(turn)
            if turn < count:
                self._give(turn)
            if 0 <= turn - _LAG < count:
                self._add_up(turn - _LAG)
            self._post_group()
            if turn >= 2 * _LAG:
                self._take(turn - 2 * _LAG)
        for pendings in self._sent.values():
            for pending in pendings:
                pending.wait(self._deadline)

    def _expect(self, turn: int) -> None:
        """Post the receives for which there is room."""
        for shot, kind in ((0, _TAKEN), (1, _RESULT)):
            while self._posted[shot] < min(len(self._chunks), turn - shot * _LAG + self._lookahead + 1):
                chunk = self._posted[shot]
                for member in self._others:
                    self._receive(kind, chunk, member, self._me if kind == _TAKEN else member)
                self._posted[shot] += 1

    def _give(self, chunk: int) -> None:
        """Encode this rank's numbers for all owners."""
        feedback, spans = self._feedback, self._chunks[chunk]
        self._finish_sends(_GIVEN, chunk - _WINDOW)
        for member in (*self._others, self._me):
            span = spans[member]
            if span.length == 0:
                continue
            self._codec.encode(
                self._flat[span.start : span.stop],
                self._code(_GIVEN, chunk, member, span.length),
                residual=feedback.worker[span.start : span.stop] if feedback is not None else None,
                seed=rounding_seed(self._step, self._rank, chunk, member, 0, self._seed),
                state=feedback.state[chunk][member] if feedback is not None else None,
            )
            if member != self._me:
                self._send(_GIVEN, chunk, member, [member], span.length)

    def _add_up(self, chunk: int) -> None:
        """Encode the sum of everyone's numbers for the shard of this rank."""
        span = self._chunks[chunk][self._me]
        if span.length == 0:
            return
        total = self._sum[: span.length]
        for member in range(len(self._group)):
            kind = _GIVEN if member == self._me else _TAKEN
            self._arrive(kind, chunk, member, span.length)
            self._codec.decode(self._code(kind, chunk, member, span.length), total, add=member > 0)
        if self._divisor != 1:
            total.div_(self._divisor)
        self._finish_sends(_RESULT, chunk - _WINDOW)
        start, feedback = span.start - self._shard_start, self._feedback
        result = self._code(_RESULT, chunk, self._me, span.length)
        self._codec.encode(
            total,
            result,
            residual=feedback.owner[start : start + span.length] if feedback is not None else None,
            seed=rounding_seed(self._step, self._rank, chunk, self._me, 1, self._seed),
        )
        self._send(_RESULT, chunk, self._me, self._others, span.length)
        self._codec.decode(result, self._flat[span.start : span.stop])

    def _take(self, chunk: int) -> None:
        """Decode the results of the other owners."""
        for member in self._others:
            span = self._chunks[chunk][member]
            if span.length:
                self._arrive(_RESULT, chunk, member, span.length)
                code = self._code(_RESULT, chunk, member, span.length)
                self._codec.decode(code, self._flat[span.start : span.stop])

    def _place(self, kind: int, chunk: int, member: int, numel: int) -> slice:
        if numel not in self._nbytes:
            self._nbytes[numel] = self._codec.wire_bytes(numel)
        start = ((kind * self._window + chunk % self._window) * len(self._group) + member) * self._stride
        return slice(start, start + self._nbytes[numel])

    def _code(self, kind: int, chunk: int, member: int, numel: int) -> torch.Tensor:
        return self._codes[self._place(kind, chunk, member, numel)]

    def _send(self, kind: int, chunk: int, member: int, to: Sequence[int], numel: int) -> None:
        place = self._place(kind, chunk, member, numel)
        message = self._messages[place]
        if self._messages is not self._codes:
            message.copy_(self._codes[place])
        sends = [(self._group[other], message) for other in to]
        if self._grouped:
            self._sends += sends
        else:
            sent, _ = self._transport.post(sends, [], self._tag_of(kind, chunk))
            self._sent.setdefault((kind, chunk), []).extend(sent)

    def _receive(self, kind: int, chunk: int, member: int, shard: int) -> None:
        numel = self._chunks[chunk][shard].length
        if numel == 0:
            return
        receive = self._group[member], self._messages[self._place(kind, chunk, member, numel)]
        if self._grouped:
            self._receives.append(receive)
            self._awaited.append((kind, chunk, member))
        else:
            _, [pending] = self._transport.post([], [receive], self._tag_of(kind, chunk))
            self._arriving[kind, chunk, member] = pending

    def _post_group(self) -> None:
        """What was left for the end of the turn. Whoever waits for one message of a group waits for all."""
        if self._sends or self._receives:
            sent, received = self._transport.post(self._sends, self._receives, self._tag)
            self._arriving.update(zip(self._awaited, received, strict=False))
            self._sent.setdefault(_GROUP, []).extend((*sent, *received[len(self._awaited) :]))
            self._sends, self._receives, self._awaited = [], [], []

    def _arrive(self, kind: int, chunk: int, member: int, numel: int) -> None:
        """Wait for a code, unless it is this rank's own."""
        if member != self._me:
            self._arriving.pop((kind, chunk, member)).wait(self._deadline)
            if self._messages is not self._codes:
                place = self._place(kind, chunk, member, numel)
                self._codes[place].copy_(self._messages[place])

    def _finish_sends(self, kind: int, chunk: int) -> None:
        for pending in self._sent.pop((kind, chunk), ()):
            pending.wait(self._deadline)

    def _tag_of(self, kind: int, chunk: int) -> int:
        return self._tag + 2 * chunk + (kind == _RESULT)

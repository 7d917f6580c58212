"""Messages over connections of our own, all ranks in this process: the bytes, and what a rank hears if they do not come."""

import gc
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import LinkError
from gradwire.collectives.kernels import cpu_sockets
from gradwire.collectives.schedules.spans import segments_of_buffer
from gradwire.collectives.transports.base import Pending
from gradwire.collectives.transports.tcp import TcpTransport
from tests.harness import wait_until
from tests.unit.in_process import run_ranks
from tests.unit.over_tcp import DEADLINE_S, SEGMENT, Connect, in_time, prepared, program

SOON_S = 0.05
STAGE_BYTES = cpu_sockets().STAGE_BYTES


@pytest.fixture
def over_loopback() -> Iterator[tuple[TcpTransport, socket.socket]]:
    """Rank 0 of two, and the other end of its connection, which is one of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname(), DEADLINE_S)
        peer, _ = server.accept()
    connection.setblocking(False)
    peer.settimeout(DEADLINE_S)
    transport = TcpTransport(0, 2, {1: connection})
    yield transport, peer
    peer.close()
    transport.close()


def receive(transport: TcpTransport, peer: int, tensor: torch.Tensor, tag: int) -> Pending:
    return transport.post([], [(peer, tensor)], tag)[1][0]


def send(transport: TcpTransport, peer: int, tensor: torch.Tensor, tag: int) -> Pending:
    return transport.post([(peer, tensor)], [], tag)[0][0]


def failure(wait: Callable[[], object]) -> LinkError:
    with pytest.raises(LinkError) as caught:
        wait()
    return caught.value


def assert_lost(peer: int, pending: Pending) -> LinkError:
    """A message fails, and not by its deadline; return the error, which names the peer."""
    error = failure(lambda: pending.wait(in_time()))
    assert (error.peer, error.timed_out) == (peer, False)
    return error


def test_a_message_that_nobody_awaits_yet_waits_in_its_connection(connect: Connect) -> None:
    """What comes after it waits too; what others send passes."""
    first, middle, last = connect(3)
    early, late, passing = (torch.full((3,), float(which)) for which in range(3))
    landed = {tag: torch.empty(3) for tag in (5, 6, 7)}
    send(first, 1, early, 5)
    send(first, 1, late, 6)
    behind = receive(middle, 0, landed[6], 6)
    beside = receive(middle, 2, landed[7], 7)
    send(last, 1, passing, 7)
    beside.wait(in_time())
    assert torch.equal(landed[7], passing)
    assert failure(lambda: behind.wait(time.monotonic() + SOON_S)).timed_out
    receive(middle, 0, landed[5], 5).wait(in_time())
    behind.wait(in_time())
    assert torch.equal(landed[5], early)
    assert torch.equal(landed[6], late)


def framed(tag: int, content: bytes) -> bytes:
    return struct.pack("<qq", tag, len(content)) + content


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def move(transport: TcpTransport, peer: int, connection: socket.socket) -> None:
    """Let a transport take what has come by now: sending is one of the occasions."""
    send(transport, peer, torch.empty(0), 1).wait(in_time())
    assert connection.recv(1 << 16) == framed(1, b"")


@pytest.mark.parametrize("piece", [1, 3, 15, 16, 17, 100])
@pytest.mark.parametrize(
    "lengths", [(0, 0, 5, 0), (1, 15, 16, 17, 31, 0), (300, 1, 300)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_messages_that_come_in_pieces_are_put_together(
    over_loopback: tuple[TcpTransport, socket.socket], piece: int, lengths: tuple[int, ...]
) -> None:
    transport, peer = over_loopback
    contents = [bytes((which + place) % 256 for place in range(length)) for which, length in enumerate(lengths)]
    landed = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    received = [receive(transport, 1, tensor, 7) for tensor in landed]
    stream = b"".join(framed(7, content) for content in contents)
    for begin in range(0, len(stream), piece):
        peer.sendall(stream[begin : begin + piece])
        move(transport, 1, peer)
    for pending in received:
        pending.wait(in_time())
    assert [bytes_of(tensor) for tensor in landed] == contents


@pytest.mark.parametrize("around", [STAGE_BYTES // 2, STAGE_BYTES, 256 << 10])
def test_messages_about_as_long_as_what_is_read_at_once(connect: Connect, around: int) -> None:
    one, other = connect(2)
    numbers = [torch.arange(around + more).to(torch.uint8) for more in (-17, -16, -1, 0, 1, 16, 17)]
    landed = [torch.zeros_like(tensor) for tensor in numbers]

    def body(rank: int) -> None:
        for tensor in (numbers, landed)[rank]:
            (send(one, 1, tensor, 7) if rank == 0 else receive(other, 0, tensor, 7)).wait(in_time())

    run_ranks(2, body)
    assert all(torch.equal(*pair) for pair in zip(landed, numbers, strict=True))


@pytest.mark.parametrize("numel", [0, 5, 1_000_000])
def test_what_travels_is_a_tag_a_length_and_the_bytes(
    over_loopback: tuple[TcpTransport, socket.socket], numel: int
) -> None:
    transport, peer = over_loopback
    tensor = torch.arange(numel)
    expected = framed(7, bytes_of(tensor))
    sent = send(transport, 1, tensor, 7)
    waiting = DaemonThread("waits").submit(lambda: sent.wait(in_time()))
    with peer.makefile("rb") as stream:
        assert stream.read(len(expected)) == expected
    waiting.result(DEADLINE_S)


@pytest.mark.parametrize(("sent", "expected"), [(3, 4), (4, 3), (0, 4), (4, 0)])
def test_a_message_of_another_length_than_expected(connect: Connect, sent: int, expected: int) -> None:
    one, other = connect(2)
    send(one, 1, torch.ones(sent), 7)
    error = assert_lost(0, receive(other, 0, torch.ones(expected), 7))
    assert "rank 0 called another operation" in str(error)


BROKEN_OFF = {
    "nothing": b"",
    "half a header": framed(7, bytes(400))[:8],
    "a header": framed(7, bytes(400))[:16],
    "half a message": framed(7, bytes(400))[:200],
    "what nobody awaits, longer than what is read at once": framed(8, bytes(4 * STAGE_BYTES)),
}


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("said", BROKEN_OFF)
@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_connection_ends_in_the_middle(
    over_loopback: tuple[TcpTransport, socket.socket], end: Callable[[socket.socket], None], said: str
) -> None:
    transport, peer = over_loopback
    pending = receive(transport, 1, torch.empty(100), 7)
    peer.sendall(BROKEN_OFF[said])
    end(peer)
    assert_lost(1, pending)


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_connection_ends_while_a_message_is_sent(
    over_loopback: tuple[TcpTransport, socket.socket], end: Callable[[socket.socket], None]
) -> None:
    transport, peer = over_loopback
    pending = send(transport, 1, torch.empty(10_000_000), 7)
    peer.recv(1000, socket.MSG_WAITALL)
    end(peer)
    assert_lost(1, pending)


def test_a_rank_that_talks_to_others_is_told_who_is_gone(connect: Connect) -> None:
    """Of two messages it waits for that of rank 1, but the connection to rank 2 is the one that ends."""
    first, _, last = connect(3)
    pending = receive(first, 1, torch.empty(3), 7)
    receive(first, 2, torch.empty(3), 7)
    last.close()
    assert_lost(2, pending)


def test_what_came_before_a_link_was_closed_is_received(connect: Connect) -> None:
    one, other = connect(2)
    numbers, landed = torch.arange(1000), torch.empty(1000, dtype=torch.int64)
    send(one, 1, numbers, 7).wait(in_time())
    one.close()
    one.close()
    assert "closed" in str(failure(lambda: send(one, 1, torch.empty(3), 7)))
    receive(other, 0, landed, 7).wait(in_time())
    assert torch.equal(landed, numbers)
    assert_lost(0, receive(other, 0, torch.empty(3), 7))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_deadline_holds_while_messages_trickle_in(
    over_loopback: tuple[TcpTransport, socket.socket], compiled: bool
) -> None:
    transport, peer = over_loopback
    buffer = torch.zeros(20_000)
    run = prepared(transport, program("ring", 0, 2, buffer.numel()), buffer.dtype)
    assert run is not None
    over = threading.Event()

    def trickle() -> None:
        """All that a ring would send, in each segment first what is reduced, then what is copied."""
        segments = [len(layout) for layout in segments_of_buffer(buffer.numel(), 2, SEGMENT)]
        content = bytes(4 * SEGMENT) if compiled else bytes(80_000)
        stream = b"".join(framed(7 + segment, content) * 2 for segment in range(len(segments)))
        for begin in range(0, len(stream), 40):
            if over.wait(0.001):
                break
            peer.send(stream[begin : begin + 40])

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        deadline = time.monotonic() + SOON_S
        if compiled:
            error = failure(lambda: run(buffer, buffer, 7, deadline))
        else:
            error = failure(lambda: receive(transport, 1, buffer, 7).wait(deadline))
        assert sender.is_alive()
    finally:
        over.set()
        sender.join()
    assert (error.peer, error.timed_out) == (1, True)


def test_a_compiled_program_ends_when_another_thread_aborts(connect: Connect) -> None:
    one, _ = connect(2)
    buffer = torch.ones(1000)
    run = prepared(one, program("ring", 0, 2, 1000), buffer.dtype)
    assert run is not None
    waiting = DaemonThread("waits").submit(lambda: failure(lambda: run(buffer, buffer, 7, in_time())))
    wait_until(one.running.locked)
    one.abort()
    error = waiting.result(DEADLINE_S)
    assert not error.timed_out
    assert "ended" in str(error)


def test_recording_a_program_in_pieces_does_not_change_its_result(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are in flight from one piece to the next, and so many have been posted that others would get new numbers."""
    monkeypatch.setattr("gradwire.collectives.schedules.program._KEPT", 7)
    transports, numbers = connect(2), torch.arange(1000 * SEGMENT, dtype=torch.int64)
    buffers = [numbers.clone(), 2 * numbers]
    recorded: list[tuple[list[Sequence[int]], Sequence[int]]] = []

    def body(rank: int) -> None:
        transport, buffer = transports[rank], buffers[rank]
        transport.trace = lambda rows, nbytes, began_ns, ends: recorded.append((list(rows), ends))
        prepared(transport, program("ring", rank, 2, len(numbers)), buffer.dtype)(buffer, buffer, 3, in_time())

    run_ranks(2, body)
    assert all(torch.equal(buffer, 3 * numbers) for buffer in buffers)
    assert [len(rows) == len(ends) > 7 for rows, ends in recorded] == [True, True]


@pytest.fixture
def without_collecting() -> Iterator[None]:
    """Have reference counting free things, at once."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collecting")
def test_a_link_that_nobody_holds_is_freed_though_it_has_run_a_program() -> None:
    ends = socket.socketpair()
    link = TcpTransport(0, 2, {1: ends[0]})
    prepared(link, program("ring", 0, 2, 10), torch.float32)
    freed = weakref.ref(link)
    del link
    assert freed() is None
    for end in ends:
        end.close()


@pytest.mark.usefixtures("without_collecting")
def test_a_closed_link_keeps_no_tensor_of_a_message_that_never_came(connect: Connect) -> None:
    """Its memory may be shared with other processes."""
    one, _ = connect(2)
    landed = torch.empty(3)
    freed = weakref.ref(landed)
    receive(one, 1, landed, 7)
    del landed
    assert freed() is not None
    one.close()
    assert freed() is None

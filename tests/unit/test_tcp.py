"""Messages over connections of our own, all ranks in this process: the bytes, and what a rank hears if they do not come."""

import gc
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

import pytest
import torch

from gradwire.collectives.compression.algorithms_for import Ride, ride
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import partition_of
from gradwire.collectives.compression.sparse import ChunkTopK
from gradwire.collectives.daemon import DaemonThread
from gradwire.collectives.errors import LinkError
from gradwire.collectives.kernels import cpu_arithmetic, cpu_programs, cpu_sockets
from gradwire.collectives.link.base import Coding, Pending
from gradwire.collectives.link.rows import FIRST_LOOK
from gradwire.collectives.link.tcp import TcpTransport
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.coded import CodedProgram
from gradwire.collectives.plan.program import Instruction, Kind, Program
from gradwire.collectives.plan.schedule import Place
from gradwire.collectives.plan.spans import segments_of_buffer
from gradwire.collectives.reduction import COMBINE, DTYPES
from gradwire.collectives.run.executor import Codes, Numbers, Scratch, execute
from tests.harness import wait_until, wide
from tests.ranks.exact import cover
from tests.ranks.test_shared_memory import contribution
from tests.unit.in_process import run_ranks

DEADLINE_S = 20.0
SOON_S = 0.05
ALGORITHMS = [name for name in PLANNERS["allreduce"] if "hierarchical" not in name]
CARRIED = [dtype for dtype in DTYPES if dtype is not torch.bool]  # which travels as uint8
OPS = ("sum", "min", "max", "product")
NUMELS = (0, 1, 37, 999)
SEGMENT = 50  # elements, so that the last of NUMELS makes several
STAGE_BYTES = cpu_sockets().STAGE_BYTES

Connect = Callable[[int], list[TcpTransport]]


def in_time() -> float:
    return time.monotonic() + DEADLINE_S


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(size): the transports of so many ranks, each connected to every other one."""
    made: list[TcpTransport] = []

    def connect(size: int) -> list[TcpTransport]:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one, other in combinations(range(size), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        for connections in ends:
            for connection in connections.values():
                connection.setblocking(False)
        made.extend(TcpTransport(rank, size, connections) for rank, connections in enumerate(ends))
        return made[-size:]

    yield connect
    for transport in made:
        transport.abort()
        transport.close()


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


def peculiar(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, no numbers and infinite ones, met in every order."""
    values = torch.tensor([0.0, -0.0, torch.nan, -0.0, 0.0, 1.0, -torch.inf, torch.inf])
    return values.repeat(20).roll(rank * 3).to(dtype)


def program(algorithm: str, rank: int, size: int, numel: int) -> Program:
    schedule = PLANNERS["allreduce"][algorithm](Place(rank, size))
    return Program(schedule, segments_of_buffer(numel, schedule.blocks, SEGMENT), answered=True)


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
            run = transport.follow(followed, buffer.dtype, op)
            assert run is not None
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
        *wide([*product((2, 3, 4, 5), ALGORITHMS, CARRIED, OPS, NUMELS)]),
    ],
    ids=["some", "all"],
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
    """Which zero it is, and which of the bits that are no number, torch leaves open itself.

    The processor has one kind of no number of its own, torch another, and of two it keeps one.
    """
    transports = connect(4)
    no_numbers = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.0]).repeat(20)
    for op in OPS:
        given = [no_numbers.roll(rank).to(dtype) for rank in range(4)]
        assert len(set(allreduced(transports, algorithm, op, given, compiled=True))) == 1
    for op in ("min", "max"):
        given = [peculiar(rank, dtype) for rank in range(4)]
        bits = allreduced(transports, algorithm, op, given, compiled=True)
        assert len(set(bits)) == 1
        expected = getattr(torch.stack(given), f"a{op}")(0)
        found = torch.frombuffer(bytearray(bits[0]), dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def riding(codec: Codec) -> Ride:
    return ride("one_shot" if codec.one_shot else "two_shot")


def run_codes(
    transport: TcpTransport, codec: Codec, feedback: Feedback, result: torch.Tensor, step: int, *, compiled: bool
) -> None:
    """Average a buffer on one rank, by the compiled loop or by the one in Python."""
    size, rank, partition = transport.size, transport.rank, feedback.partition
    how = riding(codec)
    longest = codec.wire_bytes(partition.longest)
    schedule = how.planner(Place(rank, size))
    planned = CodedProgram(schedule, partition.chunks, longest, range(size), encodes_sums=how.encodes_sums)
    memory = Scratch(), Scratch()
    payload = Codes(
        planned,
        result,
        codec,
        partition,
        *memory,
        feedback=feedback,
        divisor=size,
        step=step,
        seed=3,
        via_host=False,
    )
    if compiled:
        assert transport.follow_codes(planned, payload, step, in_time())
    else:
        execute(planned, payload, transport, tag=step, deadline=in_time())


CODED = [
    Float16(), BFloat16(), Float8("e5m2", block=48), Int8(stochastic=True), Int4(), OneBit(), QSGD(), TernGrad(), Natural(),
    ChunkTopK(),
]  # fmt: skip


def averaged(
    transports: Sequence[TcpTransport], codec: Codec, *, compiled: bool
) -> tuple[list[torch.Tensor], list[Feedback]]:
    """Each rank's result of the second step, and its error feedback."""
    size, hosts = len(transports), [[rank] for rank in range(len(transports))]
    planner = riding(codec).planner
    partitions = [partition_of(codec, 60_011, rank, hosts, 200, planner) for rank in range(size)]
    assert len(partitions[0].chunks) > 1
    feedbacks = [Feedback(codec, partition, torch.device("cpu")) for partition in partitions]
    generator = torch.Generator().manual_seed(1)
    first, second = ([torch.randn(60_011, generator=generator) for _ in range(size)] for _ in range(2))

    def body(rank: int) -> None:
        for step, results in enumerate((first, second)):
            run_codes(transports[rank], codec, feedbacks[rank], results[rank], step, compiled=compiled)

    run_ranks(size, body)
    return second, feedbacks


@pytest.mark.parametrize("codec", CODED, ids=repr)
def test_a_compiled_program_of_codes_gives_the_bits_that_python_gives(connect: Connect, codec: Codec) -> None:
    transports = connect(3)
    results, feedbacks = averaged(transports, codec, compiled=True)
    in_python, feedbacks_in_python = averaged(transports, codec, compiled=False)
    assert all(map(torch.equal, results, in_python))
    assert all(torch.equal(results[0], each) for each in results)
    for one, other in zip(feedbacks, feedbacks_in_python, strict=True):
        assert torch.equal(one.worker, other.worker)
        assert torch.equal(one.owner, other.owner)


@dataclass(frozen=True)
class Outside(ChunkTopK):
    """Writes indices beyond the numbers."""

    def _encode(self, values: torch.Tensor, wire: torch.Tensor, *_: object) -> None:
        wire.fill_(255)


def test_a_compiled_loop_finds_an_invalid_code(connect: Connect) -> None:
    transports, codecs = connect(2), (ChunkTopK(), Outside())
    assert codecs[1].c_functions() is None, "a derived class encodes by itself"
    raised = []

    def body(rank: int) -> None:
        partition = partition_of(codecs[0], 100, rank, [[0], [1]], 500, riding(codecs[0]).planner)
        feedback = Feedback(codecs[0], partition, torch.device("cpu"))
        with pytest.raises(ValueError, match="indices") as caught:
            run_codes(transports[rank], codecs[rank], feedback, torch.randn(100), 0, compiled=rank == 0)
        raised.append(caught)

    run_ranks(2, body)
    assert len(raised) == 2


def test_more_messages_than_the_table_had_rows(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.collectives.link.rows._FIRST_ROWS", 2)
    one, other = connect(2)
    numbers = [torch.full((3,), float(which)) for which in range(50)]
    landed = [torch.empty(3) for _ in numbers]
    sent = [send(one, 1, tensor, 7) for tensor in numbers]
    received = [receive(other, 0, tensor, 7) for tensor in landed]
    assert len(other._rows) >= 50
    for pending in (*reversed(received), *sent):
        pending.wait(in_time())
    assert all(torch.equal(*pair) for pair in zip(landed, numbers, strict=True))


def test_a_message_that_stays_while_others_pass_is_still_found(connect: Connect) -> None:
    """Messages that are not done get new numbers, once many others have passed."""
    slow, middle, busy = connect(3)
    landed = torch.zeros(3)
    stays = receive(middle, 0, landed, 5)
    for _ in range(2 * FIRST_LOOK):
        send(busy, 1, torch.ones(3), 6)
        receive(middle, 2, torch.empty(3), 6).wait(in_time())
    assert not stays.is_done()
    send(slow, 1, torch.ones(3), 5)
    stays.wait(in_time())
    assert torch.equal(landed, torch.ones(3))


def test_the_compiled_loop_reads_instructions_as_a_program_lays_them_out() -> None:
    kernels = cpu_programs()
    assert list(Kind) == [getattr(kernels, f"_{kind.name}") for kind in Kind]
    for place, name in enumerate(Coding._fields):
        assert getattr(kernels, name.upper()) == place
    assert len(Instruction._fields) == kernels.INSTRUCTION_FIELDS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_compiled_program_outgrows_the_table(
    connect: Connect, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.collectives.link.rows._FIRST_ROWS", 1)
    transports = connect(3)
    assert_same_bits(transports, algorithm, "sum", [contribution(rank, 999, torch.float32) for rank in range(3)])
    assert all(len(transport._rows) > 1 for transport in transports)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_long_program_goes_in_several_tables(
    connect: Connect, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.collectives.plan.program._KEPT", 7)
    assert len(list(program(algorithm, 0, 3, 999).tables())) > 1
    assert_same_bits(connect(3), algorithm, "sum", [contribution(rank, 999, torch.float32) for rank in range(3)])


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
}


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("said", BROKEN_OFF)
@pytest.mark.parametrize(
    ("end", "detail"), [(socket.socket.close, "the connection has ended"), (reset, "Connection reset by peer")]
)
def test_a_connection_ends_in_the_middle(
    over_loopback: tuple[TcpTransport, socket.socket], end: Callable[[socket.socket], None], detail: str, said: str
) -> None:
    transport, peer = over_loopback
    pending = receive(transport, 1, torch.empty(100), 7)
    peer.sendall(BROKEN_OFF[said])
    end(peer)
    assert f"rank 1: {detail}" in str(assert_lost(1, pending))


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


def test_a_connection_ends_behind_a_message_that_nobody_awaits(
    over_loopback: tuple[TcpTransport, socket.socket],
) -> None:
    """So long that all of it does not fit where headers arrive."""
    transport, peer = over_loopback
    pending = receive(transport, 1, torch.empty(100), 7)
    peer.sendall(framed(8, bytes(4 * STAGE_BYTES)))
    peer.close()
    assert_lost(1, pending)


def test_what_came_before_the_end_of_a_connection_is_received(connect: Connect) -> None:
    one, other = connect(2)
    numbers, landed = torch.arange(1000), torch.empty(1000, dtype=torch.int64)
    send(one, 1, numbers, 7).wait(in_time())
    one.close()
    receive(other, 0, landed, 7).wait(in_time())
    assert torch.equal(landed, numbers)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_deadline_holds_while_messages_trickle_in(
    over_loopback: tuple[TcpTransport, socket.socket], compiled: bool
) -> None:
    transport, peer = over_loopback
    buffer = torch.zeros(20_000)
    run = transport.follow(program("ring", 0, 2, buffer.numel()), buffer.dtype, "sum")
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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wait_ends_when_another_thread_aborts(connect: Connect, compiled: bool) -> None:
    one, other = connect(2)
    buffer = torch.ones(1000)
    run = one.follow(program("ring", 0, 2, 1000), buffer.dtype, "sum")
    assert run is not None
    mine = receive(one, 1, torch.empty(3), 8)
    theirs = receive(other, 0, torch.empty(3), 8)
    waits: list[Callable[[], object]] = [
        lambda: run(buffer, buffer, 7, in_time()) if compiled else mine.wait(in_time()),
        lambda: theirs.wait(in_time()),
    ]
    waiting = [DaemonThread("waits").submit(partial(failure, wait)) for wait in waits]
    wait_until(one.running.locked)
    one.abort()
    ended, lost = (each.result(DEADLINE_S) for each in waiting)
    assert (ended.timed_out, lost.timed_out, lost.peer) == (False, False, 0)
    assert "ended" in str(ended)


def test_a_message_that_was_waited_for_is_let_go(connect: Connect) -> None:
    one, other = connect(2)
    sent, landed = torch.ones(3), torch.empty(3)
    messages = [send(one, 1, sent, 7), receive(other, 0, landed, 7)]
    for message in messages:
        message.wait(in_time())
    tensors = [weakref.ref(sent), weakref.ref(landed)]
    del sent, landed, message, messages
    assert [tensor() for tensor in tensors] == [None, None]


def test_close_takes_nothing_from_a_wait_that_lasts(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.collectives.link.tcp._LEAVE_S", SOON_S)
    one, other = connect(2)
    landed = torch.empty(3)
    pending = receive(other, 0, landed, 7)
    waiting = DaemonThread("waits").submit(lambda: pending.wait(in_time()))
    wait_until(other.running.locked)
    other.close()
    send(one, 1, torch.ones(3), 7)
    waiting.result(DEADLINE_S)
    assert torch.equal(landed, torch.ones(3))


def test_close_ends_the_connections_once_nobody_waits(connect: Connect) -> None:
    one, other = connect(2)
    connections = list(one._sockets.values())
    one.close()
    one.close()
    assert [connection.fileno() for connection in connections] == [-1]
    assert "closed" in str(failure(lambda: send(one, 1, torch.empty(3), 7)))
    assert failure(lambda: receive(other, 0, torch.empty(3), 7).wait(in_time())).peer == 0


def test_a_link_that_nobody_holds_closes_its_connections_at_once() -> None:
    """Reference counting frees it, also after it has run a program."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    link = TcpTransport(0, 2, {1: ends[0]})
    link.follow(program("ring", 0, 2, 10), torch.float32, "sum")
    freed = weakref.ref(link)
    gc.disable()
    try:
        del link
        assert freed() is None
    finally:
        gc.enable()
        for end in ends:
            end.close()


def test_a_closed_link_keeps_no_tensor_of_a_message_that_never_came(connect: Connect) -> None:
    """Reference counting frees it, at once: the memory may be shared with other processes."""
    one, _ = connect(2)
    landed = torch.empty(3)
    freed = weakref.ref(landed)
    gc.disable()
    try:
        receive(one, 1, landed, 7)
        del landed
        assert freed() is not None
        one.close()
        assert freed() is None
    finally:
        gc.enable()

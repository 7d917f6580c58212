"""What kernels and their callers agree on: the tables of words that they share, the results of kernels, and the bits of a tag.

Every table has fields of 64 bits; a constant below is the place of a field in its table.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

#: The lowest bits of a tag match sends to receives. The bits above them hold the kind of numbers in the message.
KIND_BITS = 32
TAG_MASK = 2**KIND_BITS - 1


def pad16(nbytes: int) -> int:
    """Return the next multiple of 16. Sections of a wire begin at multiples of 16, to be read 16 bytes at a time."""
    return -(-nbytes // 16) * 16


#: The numbers of a chunk of the codec chunktopk.
CHUNK = 4096

#: The bytes that a checksum of memory adds at once.
LINE_BYTES = 64

# Room for the numbers that a selection gathers: so many more than it needs, at least as many as a guess samples, and those that
# it writes ahead.
SELECT_LEAST, SELECT_SAMPLES, SELECT_AHEAD = 4096, 65536, 64

# The ops of the arithmetic of reductions; DIVIDE by a divisor.
SUM, PRODUCT, MIN, MAX, DIVIDE = range(5)
OPS = {"sum": SUM, "average": SUM, "product": PRODUCT, "min": MIN, "max": MAX}

#: The halves of an allreduce in shared memory: rank r reduces the r-th share; every rank's share is copied to all.
REDUCES, SPREADS = 1, 2

# The results of a kernel.
FINISHED, FINISHED_WITH_NEWS, PENDING, STOPPED, DISAGREED, LOST, FULL, MALFORMED, TOO_MANY = range(9)

# The first fields of every context, which a kernel shares with the process that calls it.
(
    RANK,  # place of this process among those that the link connects
    SIZE,
    ABORTED,  # 1 when this process must not wait any more
    ROWS,  # address of the table of posted messages, ROW_BYTES a message
    CAPACITY,  # rows of the table, a power of two: message n is in row n % CAPACITY
    FIRST,  # number of the first message that may be unfinished
    COUNT,  # number that the next posted message gets
    PEER,  # the place of the process that the last wait was for, or that failed
    FOUND_TAG,  # the header of a message that does not match its posted row
    FOUND_NBYTES,
    OTHER_FIELDS,
) = range(11)

# A row of the table of posted messages.
(
    ROW_SENDS,  # 1 for a send, 0 for a receive
    ROW_PEER,
    ROW_TAG,  # with the length that follows, the header of a sent message
    ROW_NBYTES,
    ROW_ADDRESS,
    ROW_MOVED,  # bytes sent or received; below 0 before the header has moved
    ROW_DONE,
    ROW_START,  # for the link's own use
    ROW_FIELDS,
) = range(9)
ROW_BYTES = 8 * ROW_FIELDS

# More fields of the context of a link in shared memory, private to the process. PEER is -1 after a wait for all whose word in
# WAIT_LINE was below WAIT_LEAST.
(
    SPINS,  # beats that a wait spins before it yields the core
    YIELD_NS,  # how long a wait yields the core before it sleeps
    BLOCK,  # bytes that are reduced at once, so that they stay in the first-level cache
    PATIENT,  # 1 when the last wait has been long: sleep at once
    RANKS,  # address of the ranks' lines, RANK_BYTES each
    WHOLE,  # address of two slots a rank for small messages
    WHOLE_BYTES,  # of a slot
    STAGING,  # address of DEPTH * SIZE * SIZE chunks
    CHUNK_BYTES,
    DEPTH,
    SLOTS,  # shared allocations that a rank may have
    BASES,  # address of SIZE * SLOTS words: where this process has mapped them, or 0
    KNOWN,  # address of SIZE words: the version of each rank's allocations up to which this process has mapped them
    ANNOUNCED,  # address of SIZE words: the version of each rank's allocations in the last operation
    FAILED,  # 1 when this process could not map one
    CHUNKS,  # staged before this operation
    PHASE,  # of the operation that was interrupted, 0 for none
    MINE_STAGED,
    MINE_REDUCED,
    MINE_COPIED,
    DIRECT,  # 1 when the operation runs without a copy
    WAIT_LINE,
    WAIT_LEAST,
    NEWS,  # 1 when a rank has announced a version that is not KNOWN, in this operation
    RINGS,  # address of a ring for each ordered pair of ranks
    RING_CAPACITY,  # bytes of a ring's data
    BLOCKED,  # address of 2 * SIZE words
    MEMORY_FIELDS,
) = range(OTHER_FIELDS, OTHER_FIELDS + 28)

# A rank's lines in the segment, each apart from the others, so that no two processes write to one cache line. The
# first two are headers, for operations of even and odd number.
LINE = 128
DONE, STAGED, REDUCED, COPIED, STATE, VERSION = (line * LINE for line in range(2, 8))
RANK_BYTES = 8 * LINE

# A ring in the segment, one for each ordered pair of ranks: bytes written so far, bytes read so far, where its data begins.
HEAD, TAIL, RING_BYTES = 0, LINE, 2 * LINE

# More fields of the context of TCP connections.
(
    MOST_TRIES,  # how often a wait may poll before it sleeps
    TRIES,  # how often it polls at present: fewer times after polls without success
    SLEPT,  # how many waits have polled without success since TRIES was MOST_TRIES
    CONNECTIONS,  # address of SIZE connections
    WANTED,  # address of SIZE words: SENDS and RECEIVES that are under way with each rank
    POLLS,  # address of SIZE struct pollfd
    ERROR,  # errno of a failure; 0 for a connection that ended
    TCP_FIELDS,
) = range(OTHER_FIELDS, OTHER_FIELDS + 8)

# A TCP connection.
(
    DESCRIPTOR,  # of the socket, -1 for none
    STAGE,  # address of STAGE_BYTES, in which headers and short messages arrive
    BEGIN,  # where the unread bytes in it begin
    END,
    CURRENT,  # number of the message that is arriving, -1 for none
    ENDED,  # 1 once the other end has ended its output
    SEALS,  # address of the Seal of the records that leave; 0 for a connection without records
    UNSEALS,  # address of the Seal of the records that arrive
    LEAVING,  # address of LEAVING_BYTES, from which records are sent
    LEFT,  # where the unsent bytes in it begin
    LEAVES,  # where they end
    LEAVING_TO,  # ROW_MOVED of the message once they are sent
    HEADER_TAG,  # the header that has arrived in a record, with the length that follows
    HEADER_NBYTES,
    HAS_HEADER,  # 1 until the message of this header has a row
    CONNECTION_FIELDS,
) = range(16)
CONNECTION_BYTES = 8 * CONNECTION_FIELDS
STAGE_BYTES = 16 << 10

#: The header of a message over TCP: its tag and its length.
HEADER_BYTES = 16
POLL_BYTES = 8  # of a struct pollfd

#: Bytes that one call moves over TCP, so that sends and receives alternate. Less than the 64 KB that Linux processes as one unit:
#: with more, Linux may hold back a small tail (net.ipv4.tcp_autocorking), which has made exchanges eight times slower.
PIECE_BYTES = 56 << 10

# A Seal: the cipher of one direction of a connection. A record is a text, encrypted, and MAC_BYTES, by which its reader verifies
# it. Without a cipher, the text is plain, and the MAC is a checksum and the number of the record.
(
    CIPHER,  # EVP_CIPHER_CTX of AES-256-GCM; 0 for checksums
    RECORDS,  # records so far: with the zeros that follow, the nonce of the next one
    ZEROS,
    WRITTEN,  # an int for results of the library
    FUNCTIONS,  # address of the table below
    FAILED,  # the errno of the first record that failed, 0 before: no record follows it
    KEY,  # KEY_BYTES
) = range(7)
SEAL_FIELDS = KEY + 4
MAC_BYTES, KEY_BYTES = 16, 32

#: After so many records the next key replaces a key: 240 GB in records of PIECE_BYTES, below the limit of AES-GCM for data that
#: an attacker cannot tell from random bytes, which is 388 GB in records of 16 KB (RFC 8446, 2018, section 5.5).
RECORDS_OF_A_KEY = 1 << 22

# The addresses of what kernels call of libcrypto, and the text from which the next key is derived.
EVP_INIT, EVP_UPDATE, EVP_FINAL, EVP_CONTROL, HMAC_DIGEST, SHA_256, NEXT_KEY, NEXT_KEY_BYTES, CRYPTO_FIELDS = range(9)
#: Of EVP_CIPHER_CTX_ctrl (openssl/evp.h).
GET_MAC, SET_MAC = 0x10, 0x11

#: The rooms of a connection with records: one that arrives, with what is read beyond it, and a header and a piece that leave.
ARRIVING_BYTES = STAGE_BYTES + PIECE_BYTES + 2 * MAC_BYTES + HEADER_BYTES
LEAVING_BYTES = HEADER_BYTES + PIECE_BYTES + 2 * MAC_BYTES

#: The bits of a word of WANTED.
SENDS, RECEIVES, STUCK = 1, 2, 4

# A request to run a program, the same in all calls for the program.
(
    FAR,  # the context of the TCP connections
    NEAR,  # the context of the memory that the ranks of this host share; 0 without one
    PLACES,  # address of a word for each rank: its place among the ranks that share memory, or -1
    NUMBERS,  # address of MESSAGES words: 0, or for a posted message its number in its table, doubled, plus 1, or 2 if at NEAR
    ITEMSIZE,
    ARITHMETIC,  # address of the C function that reduces the numbers
    OP,
    CODING,  # address of the words of a Coding, and HAS_SUM; 0 for a program of plain numbers
    NEXT,  # the instruction at which the program continues
    AT_NEAR,  # 1 if the last result comes from NEAR
    HAS_MOVED,  # 1 if the last look at the messages moved any
    TRACE,  # address of a word for each instruction, to which the time of its end is written; 0 to write none
    REQUEST_FIELDS,
) = range(13)


class Coding(NamedTuple):
    """Contains what a compiled loop needs to run a CodedProgram of float32 numbers on the CPU. All but the counts are addresses.

    encode_function, encode_settings, decode_function, decode_settings: see CFunctions. divide_function: divides by `divisor`.
    values: the buffer. sums: room for the sum of one block. codes: the scratch memory of the program. worker, owner: the
    residuals of this rank's own numbers, and of the sums, whose first element belongs to element owner_start of the buffer; 0
    without error feedback. seed: of the step. group: the rank of each member of the group, as 64-bit words; group_size of them.
    """

    encode_function: int
    encode_settings: int
    decode_function: int
    decode_settings: int
    divide_function: int
    divisor: int
    values: int
    sums: int
    codes: int
    worker: int
    owner: int
    owner_start: int
    seed: int
    group: int
    group_size: int


# The places of the fields of a Coding, by their names in capitals, then HAS_SUM, which is 1 if the next block that is encoded is
# the sum in SUMS.
vars().update({name.upper(): place for place, name in enumerate(Coding._fields)})
HAS_SUM, CODING_FIELDS = len(Coding._fields), len(Coding._fields) + 1

#: The most messages from the oldest one that is not done to the newest one of a program; a power of two.
MESSAGES = 1 << 16


class Kind(IntEnum):
    """The kind of an instruction of a Program. "The sum" is separate memory for the sum of one block over all ranks."""

    SEND = 0  # to `peer`, from the source at `offset`, or if `scratch` >= 0, from scratch memory there
    RECEIVE = 1  # from `peer`, to the destination at `offset`, or if `scratch` >= 0, to scratch memory there
    POST = 2  # start all sends and receives since the last POST; they carry the tag of `segment`
    WAIT = 3  # for message `number`, counted over all sends and receives
    REDUCE = 4  # the numbers of `peer` in scratch memory at `scratch`, into the destination at `offset`
    ENCODE = 5  # the numbers at `offset`, version `number` of block `block`, to scratch memory at `scratch`
    DECODE = 6  # the code of `peer` in scratch memory at `scratch`, to `offset`, or if `number` is 1, to the sum
    ADD = 7  # as DECODE, but added to the numbers there
    COMPLETE = 8  # the numbers at `offset`, or if `number` is 1, in the sum and encoded next, are summed over all ranks


SEND, RECEIVE, POST, WAIT, REDUCE, ENCODE, DECODE, ADD, COMPLETE = map(int, Kind)
INSTRUCTION_FIELDS = 8

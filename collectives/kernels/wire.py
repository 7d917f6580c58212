"""What kernels and links agree on: the bits of a tag, and the layout of a code."""

#: The lowest bits of a tag match sends to receives. The bits above them hold the kind of numbers in the message.
KIND_BITS = 32
TAG_MASK = 2**KIND_BITS - 1


def pad16(nbytes: int) -> int:
    """Return the next multiple of 16. Sections of a wire begin at multiples of 16, to be read 16 bytes at a time."""
    return -(-nbytes // 16) * 16

"""What every kernel module agrees on about the layout of a code."""


def pad16(nbytes: int) -> int:
    """Return the next multiple of 16, where the sections of a wire begin, so as to be read 16 bytes at a time."""
    return -(-nbytes // 16) * 16

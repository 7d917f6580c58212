"""What every kernel module agrees on about the layout of a code."""


def pad16(nbytes: int) -> int:
    """The next multiple of 16: the sections of a wire begin there, so that they can be read 16 bytes at a time."""
    return -(-nbytes // 16) * 16

"""The layout of a code that all kernel modules share."""


def pad16(nbytes: int) -> int:
    """Return the next multiple of 16. Sections of a wire begin at multiples of 16, to be read 16 bytes at a time."""
    return -(-nbytes // 16) * 16

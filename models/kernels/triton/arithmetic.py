"""What grids and tiles are computed with on the host: Triton's own functions take microseconds there, each call."""


def cdiv(count: int, size: int) -> int:
    """How many parts of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is `count` or more; `count` is 1 or more."""
    return 1 << (count - 1).bit_length()

"""Host arithmetic of grids and work lists, importable without Triton.

`triton.cdiv` and `triton.next_power_of_2` take microseconds a call on the host; these do not.
"""

import numpy as np
import numpy.typing as npt


def cdiv(count: int, size: int) -> int:
    """How many parts of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is `count` or more; `count` is 1 or more."""
    return 1 << (count - 1).bit_length()


# How decode attention splits a row's keys: by the row's length alone. `attention.piece_length` computes the same.

PIECE = 256
"""Tokens of a piece, or of a part of it where a row is very long."""
MAX_PIECES = 64
"""Of a row."""


def num_pieces(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Pieces of rows of so many tokens; none of an empty row. # [B]"""
    piece_lengths = PIECE * np.maximum(-(-lengths // (PIECE * MAX_PIECES)), 1)
    counts: npt.NDArray[np.int64] = -(-lengths // piece_lengths)
    return counts


def list_pieces(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """All pieces of some rows, the last of each row first: within a window, only these have work. # [B] -> [items]

    An item is row * MAX_PIECES + piece.
    """
    counts = num_pieces(lengths)
    most = int(counts.max()) if len(counts) else 0
    from_last, rows = np.nonzero(np.arange(most)[:, None] < counts)
    lasts = np.arange(len(counts)) * MAX_PIECES + counts - 1
    return (lasts[rows] - from_last).astype(np.int32)

"""Host arithmetic of grids and work lists, importable without Triton.

`triton.cdiv` and `triton.next_power_of_2` take microseconds a call on the host; these do not.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def cdiv(count: int, size: int) -> int:
    """`count / size`, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is `count` or more; `count` is 1 or more."""
    return 1 << (count - 1).bit_length()


# How decode attention splits a row's keys: by the row's length alone. `attention.piece_length` computes the same.

PIECE = 256
"""Tokens of a piece, or of a part of it where a row is very long."""
MAX_PIECES = 64
"""Pieces of a row."""
LEAST_PIECE = 64
"""Tokens of a piece of a short row, or half of them: of one sequence few programs would run otherwise, while what is
written for pieces, in float32, is an eighth of what is read at 4 query heads to a KV head."""
SHORT = 16
"""The most pieces of a short row."""


def num_pieces(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Pieces of rows of so many tokens; none of an empty row. # [B]"""
    piece_lengths = np.where(
        lengths <= SHORT * 2 * LEAST_PIECE,
        np.where(lengths <= SHORT * LEAST_PIECE, LEAST_PIECE, 2 * LEAST_PIECE),
        PIECE * np.maximum(-(-lengths // (PIECE * MAX_PIECES)), 1),
    )
    counts: npt.NDArray[np.int64] = -(-lengths // piece_lengths)
    return counts


def most_pieces(length: int) -> int:
    """Pieces that a row of at most so many tokens may have: a shorter row may have more than one of that length."""
    return min(MAX_PIECES, max(min(SHORT, cdiv(length, LEAST_PIECE)), cdiv(length, PIECE)))


def most_pieces_within(longest: npt.NDArray[np.int64], shorter: int) -> npt.NDArray[np.int64]:
    """Pieces that rows of these lengths, or of up to `shorter` tokens less, have at most. # [B]

    Longer rows have more, except where longer pieces begin.
    """
    counts = num_pieces(longest)
    every = PIECE * MAX_PIECES
    for last in (SHORT * LEAST_PIECE, SHORT * 2 * LEAST_PIECE, longest // every * every):
        is_possible = (longest - shorter <= last) & (longest > last)
        counts = np.maximum(counts, np.where(is_possible, num_pieces(np.minimum(longest, last)), 0))
    return counts


def list_pieces(lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int32]:
    """All pieces of some rows, the last of each row first: within a window, only these have work. # [B] -> [items]

    An item is row * MAX_PIECES + piece. `counts`: pieces of each row; None: `num_pieces`. # [B]
    """
    counts = num_pieces(lengths) if counts is None else counts
    most = int(counts.max()) if len(counts) else 0
    from_last, rows = np.nonzero(np.arange(most)[:, None] < counts)
    lasts = np.arange(len(counts)) * MAX_PIECES + counts - 1
    return (lasts[rows] - from_last).astype(np.int32)


def list_tiles(
    queries: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], tokens: int, num_decodes: int
) -> npt.NDArray[np.int32]:
    """The spans after the decodes in tiles of `tokens` queries, those with most keys first.

    # [B], [B] -> [tiles, 2], the row and the first query of each
    """
    spans, lengths = queries[num_decodes:], contexts[num_decodes:]
    counts = -(-spans // tokens)
    rows = np.repeat(np.arange(len(spans)), counts)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    keys = (lengths - spans)[rows] + firsts
    order = np.argsort(-keys, kind="stable")
    return np.stack((rows[order] + num_decodes, firsts[order]), axis=1).astype(np.int32)


class AttentionPlan(NamedTuple):
    """The rows of a step, decodes before spans, and how `attention.paged_attention` splits their work."""

    query_starts: torch.Tensor  # [B + 1] int32, where each row's tokens begin
    seq_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32
    num_decodes: int
    query_len: int
    """Tokens of each decode."""
    items: torch.Tensor  # [at least the items] int32, pieces of the decodes as `list_pieces` has them
    num_items: torch.Tensor  # [1] int32
    max_pieces: int
    """The most pieces of one decode."""
    tiles: torch.Tensor | None
    """[tiles, 2] int32 of the spans as `list_tiles` has them; None where there are none."""

"""The CPU backend's plan of a step: which rows are computed together, over which pages, with which mask.

The plan is made once per step, at the first layer, and shared by all layers.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from models.attention.backend import AttentionMetaData

Lengths = npt.NDArray[np.int64]
Tables = npt.NDArray[np.int32]

MAX_GATHERED_VECTORS = 1 << 17
"""The most vectors of K, and of V, copied from the pages at a time: 32 MiB of each at head_dim 64 in float32."""
MAX_MASK_ELEMENTS = 1 << 22
"""The most elements of the mask over a chunk of queries: 16 MiB."""
_SEEN, _HIDDEN = np.float32(0.0), np.float32(-np.inf)
_ALIKE_LENGTH = 256
"""Rows up to this length share a bucket, since padding them costs less than the operators of another bucket."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages to gather for a range of KV heads, which bounds the copy of a long context."""

    heads: slice
    rows: torch.Tensor  # [batch * heads * blocks] int64, of a cache's memory viewed as [blocks * pages, ...]


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows of similar length, computed as one padded batch."""

    rows: torch.Tensor | None  # [batch] int64, None: all the step's decodes in order
    batch: int
    length: int
    pages: list[Pages]
    mask: torch.Tensor  # [batch, 1, 1, length] float32, 0 or minus infinity


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive tokens of one sequence, after context that is in the cache unless `pages` is empty."""

    tokens: slice
    num_tokens: int
    length: int
    """Number of tokens of the sequence up to the span's last token, inclusive."""
    first_key: int
    """Position of the first token in the pages; above 0 if the sliding window of all the span's tokens excludes the
    first ones."""
    padded: int
    """Number of tokens in the pages."""
    pages: list[Pages]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step over caches of one shape."""

    write_blocks: torch.Tensor  # [T] int64
    write_offsets: torch.Tensor  # [T] int64
    opened_blocks: torch.Tensor | None  # [opened] int64, last blocks that the step starts but does not fill
    buckets: list[DecodeBucket]
    spans: list[PrefillSpan]
    mask: torch.Tensor | None  # [chunk, longest] float32, 0 or minus infinity
    """The mask of the last `chunk` tokens of the longest context; other chunks use its bottom right corner."""


@dataclass(slots=True, kw_only=True)
class CPUAttentionMetaData(AttentionMetaData):
    """A step's metadata, with its plan once the first layer has determined the shape of the cache."""

    query_lens: Lengths  # [B]
    context_lens: Lengths  # [B], `seq_lens` on the host
    host_block_tables: Tables  # [B, max_blocks]
    host_slot_mapping: Lengths  # [T]
    plans: dict["_Pager", StepPlan] = field(default_factory=dict)

    def plan(
        self,
        num_kv_heads: int,
        block_size: int,
        num_pages: int,
        window: int | None = None,
        *,
        is_chunked: bool = False,
        reads_all: bool = False,
    ) -> StepPlan:
        """The plan for caches of this shape, with `num_pages` pages per block, of layers with this `window`.

        `is_chunked` as in `AttentionOptions`. `reads_all`: the step's own keys are read from the cache too.
        """
        pager = _Pager(num_kv_heads, block_size, num_pages, window, is_chunked, reads_all)
        if pager not in self.plans:
            self.plans[pager] = self._make_plan(pager)
        return self.plans[pager]

    def _make_plan(self, pager: "_Pager") -> StepPlan:
        block_size = pager.block_size
        decodes, spans = slice(0, self.num_decodes), slice(self.num_decodes, None)
        prefills, mask = _prefill_spans(
            pager,
            self.query_lens[spans],
            self.context_lens[spans],
            self.host_block_tables[spans],
            first_token=self.num_decodes,
        )
        return StepPlan(
            write_blocks=torch.from_numpy(self.host_slot_mapping // block_size),
            write_offsets=torch.from_numpy(self.host_slot_mapping % block_size),
            opened_blocks=self._opened_blocks(block_size),
            buckets=_decode_buckets(pager, self.context_lens[decodes], self.host_block_tables[decodes]),
            spans=prefills,
            mask=mask,
        )

    def _opened_blocks(self, block_size: int) -> torch.Tensor | None:
        last = (self.context_lens - 1) // block_size
        opened = (last * block_size >= self.context_lens - self.query_lens) & (self.context_lens % block_size != 0)
        rows = np.flatnonzero(opened)
        if len(rows) == 0:
            return None
        blocks = self.host_block_tables[rows, last[rows]].astype(np.int64)
        # If a row repeats tokens that were computed before, the first token of the block may be stored already.
        firsts = np.cumsum(self.query_lens)[rows] - self.context_lens[rows] + last[rows] * block_size
        return torch.from_numpy(blocks[self.host_slot_mapping[firsts] == blocks * block_size])


@dataclass(frozen=True, slots=True)
class _Pager:
    """Finds sequences' pages in caches of one shape."""

    num_kv_heads: int
    block_size: int
    num_pages: int
    window: int | None
    is_chunked: bool = False
    reads_all: bool = False

    def first_key(self, positions: Lengths) -> Lengths:
        """The first position that a query at each of these positions attends to."""
        if self.window is None:
            return np.zeros_like(positions)
        if self.is_chunked:
            return positions // self.window * self.window
        return np.maximum(positions - self.window + 1, 0)

    def first_block(self, positions: Lengths) -> Lengths:
        """The block of that token."""
        return self.first_key(positions) // self.block_size

    def pages(self, first_blocks: Lengths, seq_lens: Lengths, block_tables: Tables) -> tuple[list[Pages], int]:
        """The pages of rows from a block on, and the length to which they are padded.

        A shorter row is padded with its own first page: attention multiplies masked values by 0, so they must be
        finite, which another sequence's may not be.
        """
        num_blocks = -(-seq_lens // self.block_size) - first_blocks
        width = int(num_blocks.max())
        columns = np.arange(width)
        wanted = np.where(columns >= num_blocks[:, None], 0, columns) + first_blocks[:, None]
        tables: Tables = np.take_along_axis(block_tables, wanted, axis=1)
        first_rows = tables[:, None].astype(np.int64) * self.num_pages
        step = max(1, MAX_GATHERED_VECTORS // (tables.size * self.block_size))
        groups = []
        for first in range(0, self.num_kv_heads, step):
            heads = np.arange(first, min(first + step, self.num_kv_heads))
            rows = torch.from_numpy((first_rows + heads[:, None]).ravel())  # [batch, heads, blocks]
            groups.append(Pages(slice(first, first + len(heads)), rows))
        return groups, width * self.block_size


def _decode_buckets(pager: _Pager, seq_lens: Lengths, block_tables: Tables) -> list[DecodeBucket]:
    """Bucket rows by length, the longest of a bucket at most twice as long as its shortest, within the gather's
    bound."""
    first_blocks = pager.first_block(seq_lens - 1)
    starts = first_blocks * pager.block_size
    gathered = seq_lens - starts
    order = np.argsort(-gathered, kind="stable")
    buckets = []
    while len(order):
        longest = int(gathered[order[0]])
        alike = int(np.count_nonzero(gathered[order] * 2 >= longest)) if longest > _ALIKE_LENGTH else len(order)
        count = max(1, min(alike, MAX_GATHERED_VECTORS // (longest * pager.num_kv_heads)))
        rows, order = np.sort(order[:count]), order[count:]
        pages, length = pager.pages(first_blocks[rows], seq_lens[rows], block_tables[rows])
        keys = np.arange(length)
        hidden = keys >= gathered[rows][:, None, None, None]
        if pager.window is not None:
            hidden |= keys < (pager.first_key(seq_lens[rows] - 1) - starts[rows])[:, None, None, None]
        mask = torch.from_numpy(np.where(hidden, _HIDDEN, _SEEN))
        which = None if count == len(seq_lens) else torch.from_numpy(rows)
        buckets.append(DecodeBucket(which, count, length, pages, mask))
    return buckets


def _prefill_spans(
    pager: _Pager, query_lens: Lengths, seq_lens: Lengths, block_tables: Tables, *, first_token: int
) -> tuple[list[PrefillSpan], torch.Tensor | None]:
    """The spans of prefills, whose tokens begin at `first_token`, and the mask that spans with pages share."""
    spans = []
    chunk = longest = 0
    if pager.is_chunked and len(query_lens):
        query_lens, seq_lens, block_tables = _by_chunk(pager, query_lens, seq_lens, block_tables)
    first_blocks = pager.first_block(seq_lens - query_lens)
    for row, (query_len, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        tokens = slice(first_token, first_token + query_len)
        first_token += query_len
        pages: list[Pages] = []
        first_key = padded = 0
        if query_len < seq_len or pager.reads_all or (pager.window is not None and query_len > pager.window):
            of_row = slice(row, row + 1)
            pages, padded = pager.pages(first_blocks[of_row], seq_lens[of_row], block_tables[of_row])
            first_key = int(first_blocks[row]) * pager.block_size
            chunk, longest = max(chunk, query_len), max(longest, seq_len - first_key)
        spans.append(PrefillSpan(tokens, query_len, seq_len, first_key, padded, pages))
    if longest == 0:
        return spans, None
    chunk = min(chunk, max(1, MAX_MASK_ELEMENTS // longest))
    mask = torch.full((chunk, longest), -torch.inf, dtype=torch.float32)
    mask.triu_(longest - chunk + 1)
    if pager.window is not None and not pager.is_chunked:
        mask += torch.full_like(mask, -torch.inf).tril_(longest - chunk - pager.window)
    return spans, mask


def _by_chunk(
    pager: _Pager, query_lens: Lengths, seq_lens: Lengths, block_tables: Tables
) -> tuple[Lengths, Lengths, Tables]:
    """Split spans at the ends of chunks of positions, so that all queries of a span attend from the same position."""
    assert pager.window is not None
    lengths, ends, rows = [], [], []
    for row, (query_len, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        first = seq_len - query_len
        while first < seq_len:
            end = min(seq_len, (first // pager.window + 1) * pager.window)
            lengths.append(end - first)
            ends.append(end)
            rows.append(row)
            first = end
    return np.array(lengths, np.int64), np.array(ends, np.int64), block_tables[rows]

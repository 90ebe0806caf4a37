"""Compressed attention (DeepSeek-V4, 2026) over paged vectors, in plain torch.

    tokens' series [T, ...] --paged--> windows of `rate` tokens --softmax by channel--> one entry per window, paged
    queries --> the keys of the last tokens, and entries: all complete ones, or those that an indexer selects

An entry is complete with its window's last token, and is stored in that token's block. A block therefore contains all
entries whose windows end in it, so that a prefix of blocks can be shared.
"""

from typing import NamedTuple

import numpy as np
import torch

from models.ops import triton
from models.ops.cpu import runtime
from models.ops.cpu import selection as selection_ops
from models.ops.torch_ops import top_k_lower_first

MAX_SCORES = 1 << 23
"""Limit of the scores in memory at a time, per head: 32 MiB. A single query over a long context may exceed it."""
_MAX_WINDOW_ELEMENTS = 1 << 23
"""Limit of the elements of windows that are gathered at a time: 32 MiB."""


class Windows(NamedTuple):
    """The windows that a step completes."""

    rows: torch.Tensor  # [N] int64, each window's row in the step
    numbers: torch.Tensor  # [N] int64, index of each window in its sequence
    tokens: torch.Tensor  # [N] int64, index in the step of each window's last token


class StepRows(NamedTuple):
    """The rows of a step; a row consists of consecutive tokens of one sequence."""

    starts: list[int]
    """Index of each row's first token in the step, followed by T."""
    lengths: list[int]
    """Number of tokens of each sequence, including the step's."""
    tables: torch.Tensor  # [B, max_blocks] int32
    slots: torch.Tensor  # [T] int64

    def seen(self) -> torch.Tensor:
        """Return the number of visible tokens of each token, including itself; 0 for padding. # [T] int64"""
        found = np.zeros(len(self.slots), np.int64)
        for first, past, length in zip(self.starts, self.starts[1:], self.lengths, strict=False):
            found[first:past] = np.arange(length - (past - first), length) + 1
        return torch.from_numpy(found).to(self.slots.device)

    def windows(self, rate: int) -> Windows:
        """Return the windows of `rate` tokens that end in the step at a token with a cache slot."""
        rows, numbers, tokens = [], [], []
        for row, length in enumerate(self.lengths):
            first = length - (self.starts[row + 1] - self.starts[row])
            own = np.arange(first // rate, length // rate)
            rows.append(np.full_like(own, row))
            numbers.append(own)
            tokens.append(self.starts[row] - first + (own + 1) * rate - 1)
        found = torch.from_numpy(np.stack([np.concatenate(each) for each in (rows, numbers, tokens)]))
        found = found.to(self.slots.device)
        return Windows(*found[:, self.slots[found[2]] >= 0])


class StepTokens(NamedTuple):
    """A step of decodes, described by token with lengths only on the device, for captured graphs."""

    tables: torch.Tensor  # [T, max_blocks] int32, the block table of each token's row
    seen: torch.Tensor  # [T] int64, number of visible tokens, including the token itself; 0 for padding
    slots: torch.Tensor  # [T] int64

    def windows(self, rate: int) -> Windows:
        """Return for each token the window that it completes, or an arbitrary window, whose `entry_slots` is -1."""
        indexes = torch.arange(len(self.seen), device=self.seen.device)
        return Windows(indexes, (self.seen // rate - 1).clamp(min=0), indexes)

    def entry_slots(self, rate: int, block_size: int) -> torch.Tensor:
        """Return the slots of the entries of `windows` (block * entries per block + offset), -1 for none. # [T]
        int64"""
        per_block = -(-block_size // rate)
        block, offset = _place(self.windows(rate).numbers, rate, block_size)
        slots = (
            self.tables.gather(1, block[:, None].clamp(max=self.tables.shape[1] - 1))[:, 0].long() * per_block + offset
        )
        return slots.masked_fill((self.seen % rate != 0) | (self.slots < 0), -1)


def tokens_of(tables: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, query_len: int) -> StepTokens:
    """Describe a step whose rows have `query_len` tokens each. # [B, max_blocks], [B], [T]"""
    later = torch.arange(query_len - 1, -1, -1, device=lengths.device)
    # A padding row has no visible tokens.
    seen = (lengths[:, None].long() - later).clamp_(min=0).flatten()
    return StepTokens(tables.repeat_interleave(query_len, 0, output_size=len(seen)), seen, slots)


def vectors_at(pages: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gather tokens' vectors by block and position. # [num_blocks, block, dim], 2 x [...] -> [..., dim] float32"""
    return pages[blocks.long(), positions % pages.shape[1]].float()


def entries_of_row(pages: torch.Tensor, table: torch.Tensor, count: int, rate: int, block_size: int) -> torch.Tensor:
    """Gather a row's first `count` entries by its block table. # [num_blocks, entries, dim] -> [count, dim] float32"""
    numbers = torch.arange(count, device=pages.device)
    block, offset = _place(numbers, rate, block_size)
    return pages[table[block].long(), offset].float()


def store_entries(
    entries: torch.Tensor, pages: torch.Tensor, windows: Windows, rows: StepRows, rate: int, block_size: int
) -> None:
    """Write the entries of the step's windows. # [N, dim], [num_blocks, entries, dim]"""
    block, offset = _place(windows.numbers, rate, block_size)
    pages[rows.tables[windows.rows, block].long(), offset] = entries.to(pages.dtype)


def _place(numbers: torch.Tensor, rate: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index in the block table and the offset in the block of entries. # [N] int64 -> 2 x [N]"""
    block = ((numbers + 1) * rate - 1) // block_size
    return block, numbers - block * block_size // rate


def compress(
    pages: torch.Tensor, windows: Windows, tables: torch.Tensor, bias: torch.Tensor, *, overlaps: bool
) -> torch.Tensor:
    """Compute the entries of windows, before their norm and rotation. # -> [N, dim] float32

    An entry is the mean of its window's values, weighted in each channel by the softmax of the tokens' gates.

    `pages` [num_blocks, block, 2 * series]: each token's values, then its gates. `tables`: block tables of the
    windows' rows. `bias` [rate, series]: added to the gates, by a token's offset in its window. `overlaps`: each token
    has two series of `dim`; an entry combines the second series of its window with the first series of the previous
    window.
    """
    rate, series = bias.shape
    dim = series // 2 if overlaps else series
    span = 2 * rate if overlaps else rate
    offsets = torch.arange(span, device=pages.device)
    block_size = pages.shape[1]
    out = torch.empty(len(windows.rows), dim, device=pages.device)
    step = max(1, _MAX_WINDOW_ELEMENTS // (span * 2 * series))
    for first in range(0, len(out), step):
        some = slice(first, first + step)
        positions = (windows.numbers[some, None] + 1) * rate - span + offsets
        # The window before the first one has no tokens; its gates are set to minus infinity below.
        seen = positions.clamp(min=0)
        # For a token that completes no window, arbitrary tokens are read; its row may be shorter than a window.
        blocks = (seen // block_size).clamp(max=tables.shape[1] - 1)
        tokens = vectors_at(pages, tables[windows.rows[some, None], blocks], seen)
        values, gates = tokens[..., :series], tokens[..., series:]
        if overlaps:
            values = torch.cat((values[:, :rate, :dim], values[:, rate:, dim:]), 1)
            gates = torch.cat((gates[:, :rate, :dim] + bias[:, :dim], gates[:, rate:, dim:] + bias[:, dim:]), 1)
            gates = gates.masked_fill(positions[..., None] < 0, -torch.inf)
        else:
            gates = gates + bias
        out[some] = (gates.softmax(1) * values).sum(1)
    return out


class Index(NamedTuple):
    """The indexer's queries, weights and keys with which the queries of one row select entries."""

    q: torch.Tensor  # [n, heads, dim]
    weights: torch.Tensor  # [n, heads] float32
    keys: torch.Tensor  # [entries, dim] float32
    top_k: int

    def scores(self) -> torch.Tensor:
        """# -> [n, entries] float32"""
        by_head = (self.q.float() @ self.keys.T).relu_()
        return (self.weights[:, None] @ by_head)[:, 0]

    def best(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the best of each query's first `counts` entries. # [n] -> [n, up to top_k] int64, padded with -1"""
        numbers = torch.arange(len(self.keys), device=counts.device)
        scores = self.scores().masked_fill_(numbers >= counts[:, None], -torch.inf)
        best, chosen = top_k_lower_first(scores, min(self.top_k, len(self.keys)))
        return chosen.masked_fill(best == -torch.inf, -1)


def tokens_of_pools(pools: torch.Tensor, seen: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the positions of the tokens of selected pools, then of those after each token's last complete pool.

    # [T, n] int32 or int64, padded with -1 at the end, and [T] numbers of visible tokens
    # -> [T, n * rate + rate - 1] of the type of `pools`, padded with -1 at the end
    """
    offsets = torch.arange(pools.shape[1] * rate + rate - 1, dtype=pools.dtype, device=pools.device)
    inside = pools.index_select(1, (offsets // rate).clamp(max=pools.shape[1] - 1)) * rate + offsets % rate
    count = (pools >= 0).sum(1, keepdim=True, dtype=pools.dtype) * rate
    seen = seen[:, None].to(pools.dtype)
    after = seen // rate * rate + offsets - count
    return torch.where(offsets < count, inside, torch.where(after < seen, after, -1))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    entries: torch.Tensor,
    first: int,
    *,
    window: int,
    rate: int,
    scale: float,
    sinks: torch.Tensor,
    index: Index | None,
) -> torch.Tensor:
    """Attend with consecutive queries of one row to the last tokens' keys and to entries; keys are also the values.

    # q [n, H, D] at positions `first` to `first + n - 1`, sinks [H] float32 -> [n, H, D]

    `keys` [k, D] float32: keys of the tokens up to the last query. `entries` [e, D] float32: entries that are complete
    at the last query. `index` selects among them; None for all.
    """
    n, positions = len(q), torch.arange(first, first + len(q), device=q.device)
    hidden: torch.Tensor | None = None
    if n == 1:
        if index is not None and len(entries) > index.top_k:
            entries = entries[top_k_lower_first(index.scores(), index.top_k)[1][0].sort().values]
        keys = keys[-window:]
    else:
        at = torch.arange(first + n - len(keys), first + n, device=q.device)
        hidden = (at > positions[:, None]) | (at <= positions[:, None] - window)
        if len(entries):
            incomplete = torch.arange(len(entries), device=q.device) >= (positions[:, None] + 1) // rate
            if index is not None and len(entries) > index.top_k:
                best, chosen = top_k_lower_first(index.scores().masked_fill_(incomplete, -torch.inf), index.top_k)
                incomplete = torch.ones_like(incomplete).scatter_(1, chosen, best == -torch.inf)
            hidden = torch.cat((hidden, incomplete), 1)
    attended = torch.cat((keys, entries))
    scores = q.float() @ attended.T * scale
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    scores = torch.cat((scores, sinks[:, None].expand(n, -1, 1)), -1)
    return (scores.softmax(-1)[..., :-1] @ attended).to(q.dtype)


def _gathered(pages: torch.Tensor, tables: torch.Tensor, numbers: torch.Tensor, rate: int, size: int) -> torch.Tensor:
    """Gather entries of each token's row by index; blocks have `size` tokens. # [T, max_blocks], [T, n] -> [T, n,
    dim]"""
    block, offset = _place(numbers, rate, size)
    return pages[tables.gather(1, block).long(), offset].float()


def choose_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    tokens: StepTokens,
    *,
    top_k: int,
    rate: int,
    block_size: int,
) -> torch.Tensor | None:
    """Select entries for each token by an indexer; None for all complete ones. # -> [T, top_k] int64, padded with -1

    # q [T, heads, dim], weights [T, heads] float32, pages [num_blocks, entries, dim]
    """
    most = tokens.tables.shape[1] * block_size // rate
    if most <= top_k:
        return None
    counts = tokens.seen // rate
    if block_size % rate == 0 and triton.runs(q, pages, operator="attention"):
        from models.ops.triton.latent_attention import indexer_scores

        # Entries are scored like tokens, with blocks that contain as many tokens as a block has entries.
        rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
        scores = indexer_scores(q, weights, pages, tokens.tables, rows, counts.int(), most)
    else:
        numbers = torch.arange(most, device=q.device).expand(len(q), -1)
        keys = _gathered(pages, tokens.tables, numbers, rate, block_size)
        scores = (weights[:, None] @ (q.float() @ keys.mT).relu_())[:, 0]
        scores.masked_fill_(numbers >= counts[:, None], -torch.inf)
    best, chosen = top_k_lower_first(scores, top_k)
    return chosen.masked_fill(best == -torch.inf, -1)


def attend_tokens(
    q: torch.Tensor,
    pages: torch.Tensor,
    tokens: StepTokens,
    *,
    window: int,
    scale: float,
    sinks: torch.Tensor,
    entries: torch.Tensor | None = None,
    rate: int = 1,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` for the tokens of a step of decodes. # q [T, H, D], pages [num_blocks, block, D] -> [T, H, D]

    `entries` [num_blocks, entries, D]: the pages of entries. `chosen`: the result of `choose_entries`.
    """
    out, size = torch.empty_like(q), pages.shape[1]
    back = torch.arange(window - 1, -1, -1, device=q.device)
    most = tokens.tables.shape[1] * size // rate if chosen is None else chosen.shape[1]
    step = max(1, _MAX_WINDOW_ELEMENTS // ((window + most) * q.shape[2]))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        tables, seen = tokens.tables[some], tokens.seen[some, None]
        positions = seen - 1 - back
        attended, hidden = _gathered(pages, tables, positions.clamp(min=0), 1, size), positions < 0
        if entries is not None:
            numbers = torch.arange(most, device=q.device).expand(len(seen), -1) if chosen is None else chosen[some]
            attended = torch.cat((attended, _gathered(entries, tables, numbers.clamp(min=0), rate, size)), 1)
            hidden = torch.cat((hidden, (numbers < 0) | (numbers >= seen // rate)), 1)
        # Memory that the row has not written may hold NaN, which a weight of zero would not remove.
        attended = attended.masked_fill_(hidden[..., None], 0.0)
        scores = (q[some].float() @ attended.mT * scale).masked_fill_(hidden[:, None], -torch.inf)
        scores = torch.cat((scores, sinks[:, None].expand(len(seen), -1, 1)), -1)
        out[some] = (scores.softmax(-1)[..., :-1] @ attended).to(q.dtype)
    return out


def queries_at_once(q: torch.Tensor, length: int) -> int:
    """Return how many of a row's queries are computed together over up to `length` keys. # [T, H, D]

    On a CPU with operators each query is computed separately, since torch's rounding depends on the batch size.
    """
    if runtime.active() and q.device.type == "cpu":
        return 1
    return max(1, MAX_SCORES // (q.shape[1] * max(length, 1)))


def rotate_last_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False, eps: float = 0.0
) -> torch.Tensor:
    """Rotate adjacent pairs of a head's last dimensions; `back`: by the negative angles. # [T, heads, dim]

    `cos` and `sin` [T, 1, rotary_dim]: from `RotaryEmbedding`, whose second half has the angles of all pairs. `eps`:
    of an RMS norm without weight before the rotation; 0 for none.
    """
    if selection_ops.rotates(x):
        return selection_ops.rotate_heads(x, (cos, sin), eps=eps, is_last=True, is_interleaved=True, is_back=back)
    if eps:
        exact = x.float()
        x = (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    rotary_dim = cos.shape[-1]
    cos, sin = cos[..., rotary_dim // 2 :], sin[..., rotary_dim // 2 :]
    if back:
        sin = -sin
    last = x[..., -rotary_dim:].float()
    a, b = last[..., 0::2], last[..., 1::2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :-rotary_dim], turned.to(x.dtype)), -1)

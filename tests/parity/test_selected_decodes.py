"""Steps of decodes with attention to selected keys, as computed on a GPU: equal to row by row, with shapes alone."""

import pytest
import torch

from models.ops.block_selection import BlockChoice, attend_decodes, attend_to_blocks
from models.ops.compression import (
    Index,
    StepRows,
    attend,
    attend_tokens,
    choose_entries,
    compress,
    tokens_of,
    tokens_of_pools,
)
from models.ops.types import AttentionOptions, KVCacheTensor, VectorCache
from tests.parity.test_triton_latents import ints, pages, random
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels

__all__ = ["triton_kernels"]

pytestmark = [requires_interpreter, pytest.mark.usefixtures("triton_kernels")]
BLOCK = 16
LENGTHS = [70, 9, 33]
PADDED = [70, 9, 33, 0]
"""The same, and a row that pads a graph."""


def _tables(tables: torch.Tensor) -> torch.Tensor:
    return torch.cat((tables, torch.zeros_like(tables[:1])))


def _slots() -> torch.Tensor:
    return torch.tensor([0, 0, 0, -1])


@pytest.mark.parametrize(("rate", "top_k"), [(4, 3), (4, 40), (5, 2), (32, None)])
def test_tokens_attend_to_their_windows_and_entries_as_rows_do(rate: int, top_k: int | None) -> None:
    heads, dim, window = 3, 24, 8
    vectors, tables = pages(LENGTHS, dim, torch.float32)
    entries, keys = (torch.full((len(vectors), -(-BLOCK // rate), size), torch.nan) for size in (dim, 16))
    made = [random(n // rate, dim, seed=n) for n in LENGTHS]
    index = [random(n // rate, 16, seed=n + 1) for n in LENGTHS]
    for row, length in enumerate(LENGTHS):
        for number in range(length // rate):
            block = ((number + 1) * rate - 1) // BLOCK
            place = tables[row, block], number - block * BLOCK // rate
            entries[place], keys[place] = made[row][number], index[row][number]
    q, q_index, weights = random(4, heads, dim), random(4, 5, 16), random(4, 5).abs()
    sinks = random(heads)
    tokens = tokens_of(_tables(tables), ints(*PADDED), _slots(), 1)
    chosen = None
    if top_k is not None:
        chosen = choose_entries(q_index, weights, keys, tokens, top_k=top_k, rate=rate, block_size=BLOCK)
    found = attend_tokens(
        q, vectors, tokens, window=window, scale=0.2, sinks=sinks, entries=entries, rate=rate, chosen=chosen
    )
    for row, length in enumerate(LENGTHS):
        at = torch.arange(max(0, length - window), length)
        own = vectors[tables[row].long()[at // BLOCK], at % BLOCK]
        scored = None if top_k is None else Index(q_index[row, None], weights[row, None], index[row], top_k)
        expected = attend(
            q[row, None], own, made[row], length - 1, window=window, rate=rate, scale=0.2, sinks=sinks, index=scored
        )
        torch.testing.assert_close(found[row, None], expected)
    assert not found[3].any()


@pytest.mark.parametrize(("rate", "overlaps"), [(4, True), (3, True), (32, False)])
def test_tokens_complete_the_entries_that_rows_complete(rate: int, overlaps: bool) -> None:
    series = 12
    vectors, tables = pages(LENGTHS, 2 * series, torch.float32)
    bias, vectors = random(rate, series), vectors.nan_to_num()
    for end in range(1, max(LENGTHS) + 1):
        lengths = [min(end, n) for n in LENGTHS] + [0]
        last = [table[(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK for n, table in zip(lengths, tables, strict=False)]
        slots = torch.tensor([*last, -1])
        tokens = tokens_of(_tables(tables), ints(*lengths), slots, 1)
        rows = StepRows([0, 1, 2, 3], lengths[:3], tables, slots[:3])
        windows = rows.windows(rate)
        where = tokens.entry_slots(rate, BLOCK)
        assert (where >= 0).nonzero()[:, 0].tolist() == windows.rows.tolist()
        found = compress(vectors, tokens.windows(rate), tokens.tables, bias, overlaps=overlaps)
        expected = compress(vectors, windows, tables, bias, overlaps=overlaps)
        torch.testing.assert_close(found[where >= 0], expected)
        for row, number in zip(windows.rows.tolist(), windows.numbers.tolist(), strict=True):
            block = ((number + 1) * rate - 1) // BLOCK
            offset = number - block * BLOCK // rate
            assert where[row] == tables[row, block] * -(-BLOCK // rate) + offset


@pytest.mark.parametrize(
    "choice", [BlockChoice(8, 3, 1), BlockChoice(5, 4, 2), BlockChoice(20, 2, 0), BlockChoice(8, 40, 1)]
)
def test_decodes_attend_to_the_blocks_that_rows_select(choice: BlockChoice) -> None:
    heads, kv_heads, dim = 6, 2, 16
    vectors, tables = pages(LENGTHS, 2 * kv_heads * dim, torch.float32)
    k, v = vectors.view(-1, BLOCK, 2, kv_heads, dim).permute(2, 0, 3, 1, 4).contiguous()
    keys = random(len(vectors), BLOCK, 24)
    q, q_index = random(4, heads, dim), random(4, kv_heads, 24)
    caches, options = (KVCacheTensor(k, v), VectorCache(keys)), AttentionOptions(0.3)
    tokens = tokens_of(_tables(tables), ints(*PADDED), _slots(), 1)
    found = attend_decodes(q, q_index, caches, tokens, options, choice)
    expected = attend_to_blocks(q[:3], q_index[:3], caches, [0, 1, 2, 3], LENGTHS, tables, options, choice)
    torch.testing.assert_close(found[:3], expected)
    assert found.isfinite().all()


def test_tokens_of_a_row_see_one_more_each() -> None:
    tokens = tokens_of(torch.tensor([[4, 5], [6, 7]]), ints(9, 0), torch.arange(6), 3)
    assert tokens.seen.tolist() == [7, 8, 9, 0, 0, 0]
    assert tokens.tables.tolist() == [[4, 5]] * 3 + [[6, 7]] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_selected_pools_become_their_tokens_and_those_after_the_last_pool(dtype: torch.dtype) -> None:
    pools = torch.tensor([[0, 2], [1, -1], [-1, -1], [-1, -1]], dtype=dtype)
    found = tokens_of_pools(pools, torch.tensor([11, 6, 2, 0]), 3)
    assert found.tolist() == [
        [0, 1, 2, 6, 7, 8, 9, 10],
        [3, 4, 5, -1, -1, -1, -1, -1],
        [0, 1, -1, -1, -1, -1, -1, -1],
        [-1] * 8,
    ]
    assert found.dtype is dtype
    assert tokens_of_pools(pools, torch.tensor([11, 6, 2, 0]), 1).tolist() == pools.tolist()

"""The Triton attention kernels against plain torch, page by page, for every kind of layer and batch."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from models.config.rope import RopeConfig
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops import paged_attention as reference
from models.ops.triton.attention import attention_decode, attention_merge, attention_prefill, tokens_of_tile
from models.ops.triton.cache_store import store
from models.ops.triton.grids import MAX_PIECES, PIECE, list_pieces, most_pieces, num_pieces
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor
from tests.parity.triton_interpreter import DEVICE, rdna  # noqa: F401, a fixture
from tests.sweeps import sweep

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Batch:
    """Rows of a paged cache in which all memory without an owner is NaN."""

    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    q: torch.Tensor = field(init=False)
    cache: KVCacheTensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        order = np.random.default_rng(0).permutation(sum(counts) + 2).tolist()
        tables = np.full((len(counts), max(counts) + 1), -1, dtype=np.int32)
        # As in `LayerCaches`: other layers' pages are between a layer's blocks.
        shape = len(order), 3, self.num_kv_heads, self.block_size, self.head_dim
        pool = torch.full(shape, torch.nan, device=DEVICE)
        for row, (count, length) in enumerate(zip(counts, self.seq_lens, strict=True)):
            blocks = tables[row, :count] = [order.pop() for _ in range(count)]
            values = torch.randn(count * self.block_size, 2, self.num_kv_heads, self.head_dim, device=DEVICE)
            values[length:] = torch.nan
            pages = values.view(count, self.block_size, 2, self.num_kv_heads, self.head_dim).permute(0, 2, 3, 1, 4)
            pool[blocks, :2] = pages
        pool = pool.to(self.cache_dtype or self.dtype)
        self.cache = KVCacheTensor(pool[:, 0], pool[:, 1])
        self.tables = torch.from_numpy(tables).to(DEVICE)
        self.lengths = torch.tensor(self.seq_lens, dtype=torch.int32, device=DEVICE)
        self.starts = torch.tensor([0, *np.cumsum(self.query_lens)], dtype=torch.int32, device=DEVICE)
        # In some models, the heads' gates are between their queries.
        total = sum(self.query_lens)
        self.q = torch.randn(total, self.num_heads, 2 * self.head_dim, device=DEVICE).to(self.dtype)[
            ..., : self.head_dim
        ]

    def prefill(self, options: AttentionOptions, sinks: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=self.dtype, device=DEVICE)
        step = tokens_of_tile(self.q, self.num_kv_heads)
        tiles = [[row, first] for row, count in enumerate(self.query_lens) for first in range(0, count, step)]
        at = torch.tensor(tiles[::-1], dtype=torch.int32, device=DEVICE)
        attention_prefill(self.q, out, self.cache, at, self.starts, self.lengths, self.tables, options, sinks)
        return out

    def decode(
        self, options: AttentionOptions, sinks: torch.Tensor | None = None, max_programs: int | None = None
    ) -> torch.Tensor:
        query_len = self.query_lens[0]
        lengths = np.array(self.seq_lens)
        items = torch.from_numpy(list_pieces(lengths)).to(DEVICE)
        pieces, members = int(num_pieces(lengths).max()), query_len * self.num_heads
        partial = torch.full((len(lengths), pieces, members, self.head_dim), torch.nan, device=DEVICE)
        lse = torch.full(partial.shape[:3], torch.nan, device=DEVICE)
        out = torch.empty(self.q.shape, dtype=self.dtype, device=DEVICE)
        count = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
        attention_decode(
            self.q, partial, lse, self.cache, items, count, self.lengths, self.tables, options,
            query_len=query_len, max_programs=max_programs,
        )  # fmt: skip
        attention_merge(partial, lse, out, self.lengths, options.v_scale, sinks, query_len=query_len)
        return out

    def expected(self, options: AttentionOptions, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return reference.attend(self.q, self.cache, self.starts, self.lengths, self.tables, options, sinks)

    def sinks(self) -> torch.Tensor:
        return torch.linspace(-2, 3, self.num_heads, device=DEVICE).to(self.dtype)

    def give_back(self, options: AttentionOptions) -> "Batch":
        """The same, after other rows have taken the blocks before each row's window and stored NaN there."""
        block_size = self.cache.k_cache.shape[2]
        for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            first_seen = reference.first_seen(length, count, options)
            blocks = self.tables[row, : first_seen // block_size].long()
            for pages in (self.cache.k_cache, self.cache.v_cache):
                as_bytes = pages.view(torch.uint8)
                as_bytes[blocks] = 0x7F if pages.dtype.itemsize == 1 else 0xFF  # NaN in each of the dtypes.
        return self

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


PLAIN = AttentionOptions(scale=0.125)
WINDOW = AttentionOptions(scale=0.125, sliding_window=19)
CAPPED = AttentionOptions(scale=0.25, sliding_window=33, soft_cap=5.0)
CHUNKED = AttentionOptions(scale=0.125, sliding_window=40, is_chunked=True)


@pytest.mark.parametrize("options", [PLAIN, WINDOW, CAPPED], ids=["plain", "window", "window-soft-cap"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prompts_chunks_after_a_prefix_and_single_tokens_in_one_launch(
    options: AttentionOptions, has_sinks: bool
) -> None:
    batch = Batch([37, 1, 20, 5], [37, 50, 83, 5])
    sinks = batch.sinks() if has_sinks else None
    batch.check(batch.prefill(options, sinks), batch.expected(options, sinks))


@pytest.mark.parametrize("options", [PLAIN, WINDOW, CAPPED], ids=["plain", "window", "window-soft-cap"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decodes_of_one_and_of_several_pieces(options: AttentionOptions, has_sinks: bool) -> None:
    batch = Batch([1, 1, 1, 1], [1, 256, 530, 40])
    sinks = batch.sinks() if has_sinks else None
    batch.check(batch.decode(options, sinks), batch.expected(options, sinks))


@sweep(
    dtypes={"f32": (torch.float32, None), "fp8": (torch.bfloat16, torch.float8_e4m3fn)},
    options={"window": WINDOW, "window-soft-cap": CAPPED, "chunks": CHUNKED},
)
def test_what_others_store_in_blocks_before_the_window_does_not_matter(
    options: AttentionOptions, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> None:
    assert options.sliding_window is not None
    for query_lens, seq_lens in (
        ([1, 1, 1, 1], [1, 256, 530, 83]),
        ([3, 3], [257, 130]),
        ([20, 37, 1], [83, 300, 50]),
    ):
        batch = Batch(query_lens, seq_lens, dtype=dtypes[0], cache_dtype=dtypes[1])
        expected = batch.expected(options)
        batch.give_back(options)
        assert batch.cache.v_cache.float().isnan().sum() > 2 * 16 * 64
        batch.check(batch.prefill(options), expected)
        if len(set(query_lens)) == 1:
            batch.check(batch.decode(options), expected)
        assert torch.equal(batch.expected(options), expected), "plain torch reads none of them either"


@pytest.mark.parametrize("options", [PLAIN, WINDOW], ids=["plain", "window"])
def test_drafts_are_verified_several_tokens_a_row(options: AttentionOptions) -> None:
    batch = Batch([3, 3, 3], [3, 257, 258])
    batch.check(batch.decode(options), batch.expected(options))


@pytest.mark.parametrize("head_dim", [64, pytest.param(192, marks=pytest.mark.slow)])
def test_many_queries_of_a_head_are_several_tiles(head_dim: int) -> None:
    """Of 105 keys: two pieces of 64, or four of 32."""
    batch = Batch([5, 5], [5, 261], num_heads=42, num_kv_heads=2, head_dim=head_dim)
    batch.check(batch.decode(WINDOW, batch.sinks()), batch.expected(WINDOW, batch.sinks()))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 128), (7, 1, 64), (10, 2, 80), (4, 2, 96), (3, 1, 112), (2, 1, 256), (17, 1, 64), (4, 2, 8)],
)
def test_head_sizes_and_groups_that_are_no_powers_of_two(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    spans = Batch([18, 1], [18, 33], **shape)  # type: ignore[arg-type]
    spans.check(spans.prefill(PLAIN), spans.expected(PLAIN))
    decodes = Batch([1, 1], [18, 300], **shape)  # type: ignore[arg-type]
    decodes.check(decodes.decode(PLAIN), decodes.expected(PLAIN))


@pytest.mark.usefixtures("rdna")
@pytest.mark.parametrize("options", [PLAIN, CAPPED], ids=["plain", "window-soft-cap"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(200, torch.bfloat16), (80, torch.float32)])
def test_queries_and_keys_that_are_multiplied_in_parts(
    head_dim: int, dtype: torch.dtype, options: AttentionOptions
) -> None:
    spans = Batch([18, 1], [18, 53], head_dim=head_dim, dtype=dtype)
    spans.check(spans.prefill(options), spans.expected(options))
    decodes = Batch([2, 2], [18, 70], head_dim=head_dim, dtype=dtype)
    decodes.check(decodes.decode(options), decodes.expected(options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 48])
def test_types_and_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    spans = Batch([18, 2], [18, 59], dtype=dtype, block_size=block_size)
    spans.check(spans.prefill(PLAIN), spans.expected(PLAIN))
    decodes = Batch([1, 1], [18, 300], dtype=dtype, block_size=block_size)
    decodes.check(decodes.decode(PLAIN), decodes.expected(PLAIN))


def test_a_cache_in_fp8_with_scales() -> None:
    options = AttentionOptions(scale=0.125, k_scale=0.7, v_scale=1.9)
    kinds = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}
    spans = Batch([18, 2], [18, 59], **kinds)  # type: ignore[arg-type]
    spans.check(spans.prefill(options), spans.expected(options))
    decodes = Batch([1, 1], [18, 300], **kinds)  # type: ignore[arg-type]
    decodes.check(decodes.decode(options), decodes.expected(options))


def test_a_row_comes_out_the_same_alone_and_in_a_batch_whatever_the_grid() -> None:
    batch, alone = Batch([1, 1, 1], [530, 40, 700]), Batch([1], [530])
    assert torch.equal(alone.cache.k_cache.isnan().all(), torch.tensor(False, device=DEVICE))
    first = batch.decode(PLAIN)
    assert torch.equal(batch.decode(PLAIN, max_programs=4), first)
    batch.query_lens, batch.seq_lens = batch.query_lens[:1], batch.seq_lens[:1]
    batch.q, batch.tables, batch.lengths = batch.q[:1], batch.tables[:1], batch.lengths[:1]
    assert torch.equal(batch.decode(PLAIN), first[:1])


def test_pieces_cover_every_row_and_long_rows_have_no_more_than_the_most() -> None:
    piece, most = PIECE, MAX_PIECES
    lengths = np.array([0, 1, 64, 65, 1024, 1025, 2048, 2049, piece * most, piece * most + 1, piece * most * 5 + 3])
    counts = num_pieces(lengths)
    assert counts.tolist()[:9] == [0, 1, 1, 2, 16, 9, 16, 9, most]
    assert counts.max() == most
    items = list_pieces(lengths)
    assert sorted(items.tolist()) == [row * most + piece for row, n in enumerate(counts) for piece in range(n)]
    assert (items[:10] % most == counts[1:] - 1).all()


def test_a_graph_has_room_for_the_pieces_of_each_row_that_it_may_be_replayed_for() -> None:
    counts = num_pieces(np.arange(1, 40_000))
    assert [most_pieces(length) for length in (1, 500, 1025, 5000, 39_999)] == [
        counts[:length].max() for length in (1, 500, 1025, 5000, 39_999)
    ]


@sweep(2, norm=[None, RMSNorm, OffsetRMSNorm], rotary_dim=[None, 64, 24], dtype=[torch.float32, torch.bfloat16])
def test_keys_are_normalised_rotated_and_stored_and_queries_returned(
    norm: type[RMSNorm] | None, rotary_dim: int | None, dtype: torch.dtype
) -> None:
    found, expected = _stored(norm, rotary_dim, dtype, dtype)
    for one, other in zip(found, expected, strict=True):
        # Rounded twice, and by the interpreter towards zero.
        tolerance = 2e-6 if dtype is torch.float32 else 2**-6
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_keys_and_values_are_stored_in_fp8_by_their_scales() -> None:
    found, expected = _stored(RMSNorm, 64, torch.float32, torch.float8_e4m3fn)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=2**-9, rtol=2**-3, equal_nan=True)
        # The interpreter rounds a tie away from zero.
        assert (one == other).sum() > 0.9 * other.isfinite().sum()


def _stored(
    norm: type[RMSNorm] | None, rotary_dim: int | None, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, and both caches, by the kernel and by torch: three tokens, one of which is not stored."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 9 * 64, device=DEVICE).to(dtype).view(3, 9, 64).split([5, 2, 2], 1)
    slots = torch.tensor([17, -1, 3], device=DEVICE)
    norms = rotation = None
    if norm is not None:
        norms = HeadNorms(*(norm(64, 1e-6).to(DEVICE, dtype).operand for _ in range(2)))
        for one in norms:
            torch.nn.init.normal_(one.weight)
    if rotary_dim is not None:
        rope = RotaryEmbedding(RopeConfig("default", 10000.0, rotary_dim, 128), 128).to(DEVICE)
        rotation = rope(torch.tensor([5, 6, 77], device=DEVICE))
    results = []
    options = AttentionOptions(1.0, k_scale=0.5, v_scale=0.01)
    for one in (store, reference.store):
        # Its pages would be those of two layers.
        pool = torch.full((2, 2, 2, 16, 64), torch.nan, device=DEVICE).to(cache_dtype)
        cache = KVCacheTensor(pool[:, 0], pool[:, 1])
        with torch.inference_mode():
            queries = one(q.clone(), k, v, cache, slots, options, norms, rotation)
        results.append([queries, cache.k_cache.float(), cache.v_cache.float()])
    return results[0], results[1]

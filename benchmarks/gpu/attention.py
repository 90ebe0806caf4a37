"""Attention over the paged cache, and what is stored for it, against bounds and torch's SDPA."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from models.attention.triton import TritonAttentionBackend
from models.attention.triton_metadata import TritonMetaData
from models.kernels.triton.attention_decode import attention_decode
from models.kernels.triton.attention_merge import attention_merge
from models.kernels.triton.attention_prefill import attention_prefill, tokens_of_tile
from models.kernels.triton.cache_view import as_hardware_reads
from models.kernels.triton.reference import attention as reference
from models.kernels.triton.store import store
from models.kernels.types import AttentionOptions, HeadNorms, KVCacheTensor
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.rope_config import RopeConfig

_BLOCK_SIZE = 16
_HEADS, _DRY_HEADS = (32, 8, 128), (4, 2, 16)
"""Of queries, of keys and values, and how large."""
_MOST_TOKENS = 1 << 20
"""Of all rows of a decode: 4 GiB of keys and values."""


class Problem:
    """Rows of a paged cache: the last `queries[i]` tokens of each attend to its `lengths[i]`."""

    def __init__(
        self, bench: Bench, queries: Sequence[int], lengths: Sequence[int], cache_dtype: torch.dtype | None = None
    ) -> None:
        self.bench = bench
        self.heads, self.kv_heads, self.head_dim = bench.size(_HEADS, _DRY_HEADS)
        self.queries, self.lengths = np.array(queries), np.array(lengths)
        counts = -(-self.lengths // _BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
        tables = np.zeros((len(counts), int(counts.max())), dtype=np.int32)
        first = 0
        for row, count in enumerate(counts):
            tables[row, :count] = order[first : first + count]
            first += count
        shape = len(order), 2, self.kv_heads, _BLOCK_SIZE, self.head_dim
        # As the runner has it: a block's pages of all layers lie together.
        pool = bench.random(*shape)
        if cache_dtype is not None:
            # As stores do, without the negative zero, which AMD's own FP8 reads as no number.
            pool = torch.where(pool.abs() < 2**-6, 2**-6, pool).to(cache_dtype)
        self.q = bench.random(int(self.queries.sum()), self.heads, self.head_dim)
        self.cache, self.options = as_hardware_reads(
            KVCacheTensor(pool[:, 0], pool[:, 1]), AttentionOptions(scale=self.head_dim**-0.5), bench.device
        )
        self.num_decodes = len(self.queries) if self.queries.max() == 1 else 0
        self.backend = TritonAttentionBackend(bench.device)
        metadata = self.backend.build_metadata(
            query_lens=self.queries,
            seq_lens=self.lengths,
            block_tables=tables,
            slot_mapping=np.zeros(len(self.q), dtype=np.int64),
            num_decodes=self.num_decodes,
        )
        assert isinstance(metadata, TritonMetaData)
        self.metadata = metadata
        self.out = torch.full(self.q.shape, torch.nan, dtype=bench.dtype, device=bench.device)

    def decode(self) -> torch.Tensor:
        """The two kernels of a decode."""
        rows, step = len(self.lengths), self.metadata
        pieces = step.pieces(_BLOCK_SIZE)
        partial = torch.empty(rows, pieces, self.heads, self.head_dim, dtype=torch.float32, device=self.q.device)
        weights = torch.empty(rows, pieces, self.heads, dtype=torch.float32, device=self.q.device)
        attention_decode(
            self.q,
            partial,
            weights,
            self.cache,
            step.items,
            step.num_items,
            step.seq_lens,
            step.block_tables,
            self.options,
            max_programs=self.backend._max_programs,
        )
        attention_merge(partial, weights, self.out, step.seq_lens, self.options.v_scale)
        return self.out

    def prefill(self) -> torch.Tensor:
        """The kernel of spans."""
        step = self.metadata
        tiles = step.tiles(tokens_of_tile(self.q, self.kv_heads))
        attention_prefill(
            self.q, self.out, self.cache, tiles, step.cu_seqlens_q, step.seq_lens, step.block_tables, self.options
        )
        return self.out

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, their starts, lengths and tables of the first rows."""
        starts = self.metadata.cu_seqlens_q[: count + 1]
        return (
            self.q[: int(starts[-1])],
            starts,
            self.metadata.seq_lens[:count],
            self.metadata.block_tables[:count],
        )

    def expected(self, count: int) -> torch.Tensor:
        """Of the first rows, by torch in float32. # [T, Hq, D]"""
        q, starts, lengths, tables = self.rows(count)
        return reference.attend(q, self.cache, starts, lengths, tables, self.options)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What SDPA takes, of rows of one length each: queries, keys and values. # [B, H, n, D]"""
        rows, length = len(self.lengths), int(self.lengths[0])
        q = self.q.view(rows, -1, self.heads, self.head_dim).transpose(1, 2)
        k, v = (self.bench.random(rows, self.kv_heads, length, self.head_dim) for _ in range(2))
        return q, k, v

    @property
    def num_bytes(self) -> int:
        """Of keys and values read once, and queries and results."""
        token = 2 * self.kv_heads * self.head_dim * self.cache.k_cache.element_size()
        return int(self.lengths.sum()) * token + 2 * self.q.nbytes

    @property
    def operations(self) -> float:
        """Of the pairs of queries and keys that see each other."""
        queries = self.queries.astype(np.float64)
        pairs = queries * (self.lengths - queries) + queries * (queries + 1) / 2
        return 4.0 * self.heads * self.head_dim * float(pairs.sum())


def cases(bench: Bench) -> Iterator[Case]:
    """Decodes by context and batch, spans, and stores."""
    contexts = bench.size((4096, 32768) if bench.is_quick else (1024, 2048, 4096, 8192, 16384, 32768), (40,))
    for context in contexts:
        for batch in bench.size((1, 64) if bench.is_quick else (1, 16, 64, 256), (2,)):
            if batch * context <= _MOST_TOKENS or bench.is_dry:
                yield Case(f"decode, {batch} x {context}", lambda b=batch, c=context: _decode(bench, b, c))  # type: ignore[misc]
    for batch, context in bench.size(((64, 8192),), ((2, 40),)):
        name = f"decode, {batch} x {context}, FP8 cache"
        yield Case(name, lambda b=batch, c=context: _decode(bench, b, c, torch.float8_e4m3fn))  # type: ignore[misc]
    for rows, tokens, cached in bench.size(((1, 8192, 0), (8, 1024, 0), (1, 2048, 30720)), ((2, 20, 0), (1, 9, 30))):
        name = f"prefill, {rows} x {tokens}" + (f" behind {cached}" if cached else "")
        yield Case(name, lambda r=rows, t=tokens, c=cached: _prefill(bench, r, t, c))  # type: ignore[misc]
    for tokens in bench.size((1, 64, 8192), (5,)):
        yield Case(f"norms, rope and store, {tokens} tokens", lambda tokens=tokens: _store(bench, tokens))  # type: ignore[misc]


def _decode(bench: Bench, batch: int, context: int, cache_dtype: torch.dtype | None = None) -> Values:
    lengths = [context] * batch
    problem = Problem(bench, [1] * batch, lengths, cache_dtype)
    few = min(batch, 4)
    expected = problem.expected(few)
    problem.out.fill_(torch.nan)
    q, k, v = problem.dense()
    beside = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    values = bench.kernel(
        problem.decode,
        None,
        num_bytes=problem.num_bytes,
        operations=problem.operations,
        beside=beside if cache_dtype is None else None,
    )
    return {**values, **bench.checked(problem.decode()[:few], expected)}


def _prefill(bench: Bench, rows: int, tokens: int, cached: int) -> Values:
    problem = Problem(bench, [tokens] * rows, [cached + tokens] * rows)
    q, k, v = problem.dense()
    causal = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}
    values = bench.kernel(
        problem.prefill,
        None,
        num_bytes=problem.num_bytes,
        operations=problem.operations,
        # Its causal mask begins at the first key: no chunks.
        beside=None if cached else causal,
    )
    # The scores of all in float32 would not fit: a short problem with the same tiles is looked at.
    few = Problem(bench, [bench.size(517, 9)] * 2, [bench.size(1300, 30)] * 2)
    return {**values, **bench.checked(few.prefill(), few.expected(2))}


def _store(bench: Bench, tokens: int) -> Values:
    device, (heads, kv_heads, head_dim) = bench.device, bench.size(_HEADS, _DRY_HEADS)
    qkv = bench.random(tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)  # type: ignore[no-untyped-call]
    blocks = -(-tokens // _BLOCK_SIZE)
    slots = torch.randperm(blocks * _BLOCK_SIZE, device=device)[:tokens]
    norms = HeadNorms(*(RMSNorm(head_dim, 1e-6).to(device, bench.dtype).operand for _ in range(2)))
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    rope = RotaryEmbedding(RopeConfig("default", 1e6, head_dim, 40960), 40960).to(device)
    rotation = rope(torch.arange(tokens, device=device))
    options = AttentionOptions(scale=1.0)

    def stored(by: Callable[..., torch.Tensor]) -> torch.Tensor:
        pool = torch.zeros(blocks, 2, kv_heads, _BLOCK_SIZE, head_dim, dtype=bench.dtype, device=device)
        cache = KVCacheTensor(pool[:, 0], pool[:, 1])
        queries = by(q, k, v, cache, slots, options, norms, rotation)
        return torch.cat((queries.flatten(), cache.k_cache.flatten(), cache.v_cache.flatten()))

    with torch.inference_mode():
        checked = bench.checked(stored(store), stored(reference.store))
        pool = bench.random(blocks, 2, kv_heads, _BLOCK_SIZE, head_dim)
        cache = KVCacheTensor(pool[:, 0], pool[:, 1])
        values = bench.kernel(
            lambda: store(q, k, v, cache, slots, options, norms, rotation),
            None,
            num_bytes=2 * qkv.nbytes + 2 * tokens * head_dim * 4,
        )
    return {**values, **checked}

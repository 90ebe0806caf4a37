"""Compressed attention (DeepSeek-V4, 2026): to a window of tokens, and to entries that each compress several tokens.

Keys are also the values, one vector per token for all heads. A layer has several caches: that vector; each token's
projection for entries, since a window may end in a later step; the entries; and in layers with an indexer, which
selects entries, its projections and entries. On GPUs torch computes all decodes of a step together, so that graphs can
capture them, and other rows one by one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.context import ForwardContext, between_graphs, get_forward_context
from models.layers.base import VectorCacheSpec
from models.layers.linear import ColumnParallelLinear, RowParallelLinear
from models.layers.norm import KEY_NORM_EPS, LayerNorm, RMSNorm
from models.layers.parameter import (
    WeightPart,
    empty_parameter,
    fill_rows,
    load_whole,
    packed_of,
    require_shape,
    rows_loader,
)
from models.layers.rotary import RotaryEmbedding
from models.ops import triton
from models.ops.columns import join_columns
from models.ops.compression import (
    Index,
    StepRows,
    StepTokens,
    Windows,
    attend,
    attend_tokens,
    choose_entries,
    compress,
    entries_of_row,
    queries_at_once,
    rotate_last_pairs,
    store_entries,
    tokens_of,
    tokens_of_pools,
)
from models.ops.cpu import dense, runtime
from models.ops.cpu import latent_attention as latent_ops
from models.ops.cpu import selection as selection_ops
from models.ops.cpu.selection import EntryFinish
from models.ops.cpu.structures import Step
from models.ops.paged_attention import store_vectors
from models.ops.types import Rotation, VectorCache
from models.parallel.tensor_parallel import TensorParallel


class EntryCache(nn.Module):
    """Makes an entry of each window of `rate` tokens, from vectors that are cached for each token. Replicated on every
    rank."""

    def __init__(self, layer_name: str, dim: int, rate: int, *, overlaps: bool) -> None:
        """`layer_name` is the key of the entries' cache in the forward context. `overlaps`: see `compress`."""
        super().__init__()
        self.rate, self.overlaps = rate, overlaps
        self.series = 2 * dim if overlaps else dim
        self.entries_spec = VectorCacheSpec(layer_name, dim, tokens_per_vector=rate)
        self.tokens_spec = VectorCacheSpec(f"{layer_name}.tokens", 2 * self.series)
        self.position_bias = empty_parameter(rate, self.series, weight_loader=load_whole, dtype=torch.float32)

    def finished(self, made: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the entries to store, given the result of `compress` in the model's dtype. # [N, dim] -> [N, dim]"""
        del windows
        return made

    def finish(self) -> EntryFinish | None:
        """Return the norm and the rotation that `finished` applies, for the CPU's operators; None for none."""
        return None

    def runs(self, context: ForwardContext) -> bool:
        """Whether the CPU's operators compute the entries."""
        pages, entries = _pages(context, self.tokens_spec), _pages(context, self.entries_spec)
        return selection_ops.compresses(pages, entries, self.position_bias, overlaps=self.overlaps)

    def update_by_operators(self, tokens: torch.Tensor, step: Step, context: ForwardContext) -> None:
        """As `update`, by the CPU's operators."""
        pages, entries = _pages(context, self.tokens_spec), _pages(context, self.entries_spec)
        selection_ops.store(tokens, pages, step)
        finish = self.finish()
        selection_ops.compress(pages, entries, self.position_bias, step, overlaps=self.overlaps, finish=finish)

    def update(self, tokens: torch.Tensor, rows: StepRows, context: ForwardContext) -> None:
        """Store the step's vectors, and the entries of the windows that the step completes."""
        pages, entries = _pages(context, self.tokens_spec), _pages(context, self.entries_spec)
        store_vectors(tokens, pages, rows.slots)
        windows = rows.windows(self.rate)
        if len(windows.rows) == 0:
            return
        made = self._entries_of(pages, windows, rows.tables, tokens.dtype)
        store_entries(made, entries, windows, rows, self.rate, pages.shape[1])

    def update_tokens(self, made: torch.Tensor, tokens: StepTokens, context: ForwardContext) -> None:
        """As `update`, for a step of decodes, by kernels, without its lengths on the host."""
        from models.ops.triton.cache_store import vector_store

        pages, entries = _pages(context, self.tokens_spec), _pages(context, self.entries_spec)
        vector_store(made, pages, tokens.slots)
        completed = self._entries_of(pages, tokens.windows(self.rate), tokens.tables, made.dtype)
        vector_store(completed, entries, tokens.entry_slots(self.rate, pages.shape[1]))

    def _entries_of(
        self, pages: torch.Tensor, windows: Windows, tables: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compress windows to entries. # -> [N, dim]"""
        made = compress(pages, windows, tables, self.position_bias, overlaps=self.overlaps)
        return self.finished(made.to(dtype), windows)

    def entries(self, row: int, length: int, rows: StepRows, context: ForwardContext) -> torch.Tensor:
        """The entries of a row's first `length` tokens. # -> [entries, dim] float32"""
        block_size = _pages(context, self.tokens_spec).shape[1]
        pages = _pages(context, self.entries_spec)
        return entries_of_row(pages, rows.tables[row], length // self.rate, self.rate, block_size)


class Compressor(EntryCache):
    """Compresses each window to an entry of DeepSeek-V4."""

    def __init__(
        self,
        layer_name: str,
        hidden_size: int,
        dim: int,
        rate: int,
        rotary: RotaryEmbedding,
        eps: float,
        *,
        overlaps: bool,
    ) -> None:
        """See `EntryCache`."""
        super().__init__(layer_name, dim, rate, overlaps=overlaps)
        self.kv_proj = ColumnParallelLinear(hidden_size, self.series)
        self.gate_proj = ColumnParallelLinear(hidden_size, self.series)
        self.kv_norm = RMSNorm(dim, eps)
        # In a list, so that torch does not register the shared rope once per layer.
        self._rotary = [rotary]

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each token's projection for entries. # [tokens, hidden_size] -> [tokens, 2 * series]"""
        return join_columns(self.kv_proj(hidden), self.gate_proj(hidden))

    def finished(self, made: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `EntryCache`. As in the model's other norms, only the result of the norm is rounded."""
        cos, sin = self._rotary[0](windows.numbers * self.rate)
        return rotate_last_pairs(self.kv_norm(made)[:, None], cos, sin)[:, 0]

    def finish(self) -> EntryFinish:
        """See `EntryCache`."""
        rotary = self._rotary[0]
        frequencies = rotary.inv_freq[len(rotary.inv_freq) // 2 :]
        return EntryFinish(self.kv_norm.weight, self.kv_norm.eps, frequencies, rotary.attention_factor)


class EntryScorer(nn.Module):
    """Projects the weights of the indexer's heads."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weights_proj = ColumnParallelLinear(hidden_size, num_heads)


class EntryIndexer(Compressor):
    """Scores entries with a few small heads, against keys that are compressed like the entries."""

    def __init__(
        self,
        layer_name: str,
        hidden_size: int,
        dim: int,
        rate: int,
        rotary: RotaryEmbedding,
        eps: float,
        *,
        q_lora_rank: int,
        num_heads: int,
        top_k: int,
        max_len: int,
    ) -> None:
        """`top_k`: number of selected entries. `max_len`: length of the longest sequence."""
        super().__init__(layer_name, hidden_size, dim, rate, rotary, eps, overlaps=True)
        self.most_entries = max_len // rate
        self.num_heads, self.head_dim, self.top_k = num_heads, dim, top_k
        self.scale = (num_heads * dim) ** -0.5
        self.q_b_proj = ColumnParallelLinear(q_lora_rank, num_heads * dim)
        self.scorer = EntryScorer(hidden_size, num_heads)

    def queries(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries, and the heads' weights before their multiplication by `scale`.

        # [tokens, hidden_size], [tokens, q_lora_rank] -> [tokens, heads, dim], [tokens, heads]
        """
        q = self.q_b_proj(q_latent).view(len(hidden), self.num_heads, self.head_dim)
        return rotate_last_pairs(q, *rotation), self.scorer.weights_proj(hidden)


class PoolIndexer(EntryCache):
    """Selects tokens in pools of `rate`, which a few small heads score (GLM-5.3-Flash, 2026).

    A pool's key is the mean of its tokens' keys, weighted in each channel by the softmax of their gates. The tokens
    after the last complete pool are always selected. It has the interface of `LightningIndexer`, without positions.
    """

    def __init__(
        self,
        layer_name: str,
        *,
        hidden_size: int,
        q_lora_rank: int,
        num_heads: int,
        head_dim: int,
        rate: int,
        num_pools: int,
        max_len: int,
    ) -> None:
        """`num_pools`: number of selected pools. `max_len`: length of the longest sequence."""
        super().__init__(layer_name, head_dim, rate, overlaps=False)
        self.most_entries = max_len // rate
        self.num_heads, self.head_dim, self.num_pools = num_heads, head_dim, num_pools
        self.scale = (num_heads * head_dim) ** -0.5
        self.wq_b = ColumnParallelLinear(q_lora_rank, num_heads * head_dim)
        self.wk = ColumnParallelLinear(hidden_size, head_dim)
        self.k_norm = LayerNorm(head_dim, KEY_NORM_EPS)
        self.pool_gate = ColumnParallelLinear(hidden_size, head_dim)
        self.weights_proj = ColumnParallelLinear(hidden_size, num_heads)

    def forward(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, the heads' weights, and each token's key and gate.

        # [tokens, hidden_size], [tokens, q_lora_rank] -> [tokens, heads, dim], [tokens, heads], [tokens, 2 * dim]
        """
        del cos, sin
        q = self.wq_b(q_latent).view(len(hidden), self.num_heads, self.head_dim)
        made = join_columns(self.k_norm(self.wk(hidden)), self.pool_gate(hidden))
        return q, self.weights_proj(hidden), made

    def select(
        self, rotation: Rotation, q: torch.Tensor, weights: torch.Tensor, made: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the positions that each token attends to, padded with -1.

        None if all tokens attend to all earlier ones, but only for a GPU's decodes, whose block tables have no more
        pools than are selected: a CPU's token is computed in the same way next to any others.

        # q, weights and made as `forward` returns them -> [tokens, up to num_pools * rate + rate - 1] int32 or int64
        """
        del rotation
        context = get_forward_context()
        metadata, pages = context.attn_metadata, _pages(context, self.entries_spec)
        block_size = _pages(context, self.tokens_spec).shape[1]
        if metadata.num_decodes == len(metadata.seq_lens) and triton.runs(q, made, operator="attention"):
            tokens = _tokens(context)
            self.update_tokens(made, tokens, context)
            own = weights.float() * self.scale
            chosen = choose_entries(q, own, pages, tokens, top_k=self.num_pools, rate=self.rate, block_size=block_size)
            return None if chosen is None else tokens_of_pools(chosen, tokens.seen, self.rate)
        step = metadata.step
        selects = selection_ops.selects(q, pages, self.num_pools, self.most_entries)
        if step is not None and selects and self.runs(context):
            self.update_by_operators(made, step, context)
            pools = selection_ops.select_keys(
                q, weights, self.scale, pages, step, self.num_pools, block_size=block_size, rate=self.rate
            )
            return selection_ops.tokens_of_pools(pools, step, self.rate)
        rows = _rows(context)
        self.update(made, rows, context)
        seen = rows.seen()
        chosen = torch.full((len(q), self.num_pools), -1, device=q.device)
        for row, length in enumerate(rows.lengths):
            keys = self.entries(row, length, rows, context)
            at_once = queries_at_once(q, length)
            for begin in range(rows.starts[row], rows.starts[row + 1], at_once):
                some = slice(begin, min(begin + at_once, rows.starts[row + 1]))
                index = Index(q[some], weights[some].float() * self.scale, keys, self.num_pools)
                best = index.best(seen[some] // self.rate)
                chosen[some, : best.shape[1]] = best
        return tokens_of_pools(chosen, seen, self.rate)


class GroupedLinear(nn.Module):
    """A separate linear layer for each group of heads, sharded over the ranks by group."""

    def __init__(self, in_features: int, out_features: int, num_groups: int, parallel: TensorParallel) -> None:
        """`in_features` and `out_features` are those of one group."""
        super().__init__()
        self.num_groups, self.local = num_groups, parallel.share(num_groups, "o_groups")
        self.first = parallel.rank * self.local
        # On a GPU, no product of a stack reads quantised weights.
        self.weight = empty_parameter(
            self.local, out_features, in_features, weight_loader=self._load, is_product=runtime.active()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's groups * in_features] -> [tokens, the rank's groups * out_features]"""
        packed, by_group = packed_of(self.weight), x.view(len(x), self.local, -1)
        if packed is not None:
            return dense.linear_by_group(by_group, packed, self.weight.shape[1])
        parts = zip(by_group.unbind(1), self.weight, strict=True)
        return torch.cat([F.linear(each, weight) for each, weight in parts], -1)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        _, out_features, in_features = parameter.shape
        require_shape(loaded, (self.num_groups * out_features, in_features))
        for index in range(self.local):
            first = (self.first + index) * out_features
            fill_rows(parameter, 0, loaded[first : first + out_features], index)


class CompressedAttention(nn.Module):
    """Attention to a window and to entries, with its projections, sharded over the ranks by head."""

    def __init__(
        self,
        layer_name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        q_lora_rank: int,
        window: int,
        output_groups: int,
        output_rank: int,
        eps: float,
        compressor: Compressor | None,
        indexer: EntryIndexer | None,
        parallel: TensorParallel,
    ) -> None:
        """`layer_name` is the key of the keys' cache. Without a compressor the layer attends to its window only."""
        super().__init__()
        self.num_heads, self.head_dim, self.window = parallel.share(num_heads, "num_attention_heads"), head_dim, window
        self.eps, self.scale = eps, head_dim**-0.5
        self.cache_spec = VectorCacheSpec(layer_name, head_dim)
        self.q_a_proj = ColumnParallelLinear(hidden_size, q_lora_rank)
        self.q_a_norm = RMSNorm(q_lora_rank, eps)
        self.q_b_proj = ColumnParallelLinear(q_lora_rank, num_heads * head_dim, parallel=parallel)
        self.kv_proj = ColumnParallelLinear(hidden_size, head_dim)
        self.kv_norm = RMSNorm(head_dim, eps)
        load_sinks = rows_loader(parallel.rank * self.num_heads, num_heads)
        self.sinks = empty_parameter(self.num_heads, weight_loader=load_sinks, dtype=torch.float32)
        self.o_a_proj = GroupedLinear(num_heads * head_dim // output_groups, output_rank, output_groups, parallel)
        self.o_b_proj = RowParallelLinear(output_groups * output_rank, hidden_size, parallel=parallel)
        self.compressor = compressor
        if compressor is not None and indexer is not None:
            compressor.indexer = indexer
        self._indexer = [] if indexer is None else [indexer]

    @property
    def cache_specs(self) -> list[VectorCacheSpec]:
        """The specs of the layer's caches."""
        return [self.cache_spec, *(spec for each in self._makers for spec in (each.tokens_spec, each.entries_spec))]

    @property
    def _makers(self) -> list[Compressor]:
        """The layer's compressor and its indexer's, where it has them."""
        return [each for each in (self.compressor, *self._indexer) if each is not None]

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        num_tokens = len(hidden)
        q_latent = self.q_a_norm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_latent).view(num_tokens, self.num_heads, self.head_dim)
        q = rotate_last_pairs(q, *rotation, eps=self.eps)
        kv = rotate_last_pairs(self.kv_norm(self.kv_proj(hidden))[:, None], *rotation)[:, 0]
        parts = [q, kv]
        if self.compressor is not None:
            parts.append(self.compressor.project(hidden))
        for indexer in self._indexer:
            parts += (indexer.project(hidden), *indexer.queries(hidden, q_latent, rotation))
        attended = between_graphs(self._attend_rows, *parts)
        attended = rotate_last_pairs(attended, *rotation, back=True)
        return self.o_b_proj(self.o_a_proj(attended.view(num_tokens, -1)))  # type: ignore[no-any-return]

    def _attend_rows(self, q: torch.Tensor, kv: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """# [tokens, heads, head_dim], [tokens, head_dim] -> [tokens, heads, head_dim]

        `others`: the projections of the compressor, then the projections, queries and weights of the indexer.
        """
        context = get_forward_context()
        metadata = context.attn_metadata
        if metadata.num_decodes == len(metadata.seq_lens) and triton.runs(q, kv, operator="attention"):
            return self._attend_tokens(q, kv, others, context)
        if metadata.step is not None and self._runs(q, others[2:], context):
            return self._by_operators(q, kv, others, context, metadata.step)
        rows = _rows(context)
        pages = _pages(context, self.cache_spec)
        store_vectors(kv, pages, rows.slots)
        # Rows may share blocks that this step fills, so all rows are written before any is read.
        for maker, tokens in zip(self._makers, others, strict=False):
            maker.update(tokens, rows, context)
        indexed = others[2:]
        out = torch.empty_like(q)
        for row, length in enumerate(rows.lengths):
            start, stop = rows.starts[row : row + 2]
            first = length - (stop - start)
            at_once = queries_at_once(q, self.window + stop - start + length)
            for begin in range(start, stop, at_once):
                some = slice(begin, min(begin + at_once, stop))
                seen = first + some.stop - start
                out[some] = self._attend_some(q[some], row, seen, rows, context, [each[some] for each in indexed])
        return out

    def _attend_tokens(
        self, q: torch.Tensor, kv: torch.Tensor, others: Sequence[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Compute a step of decodes on a GPU by lengths on the device only, so that graphs can capture it."""
        from models.ops.triton.cache_store import vector_store

        pages = _pages(context, self.cache_spec)
        tokens = _tokens(context)
        vector_store(kv, pages, tokens.slots)
        for maker, made in zip(self._makers, others, strict=False):
            maker.update_tokens(made, tokens, context)
        chosen, entries, rate, block_size = None, None, 1, pages.shape[1]
        for indexer in self._indexer:
            q_index, weights = others[2:]
            chosen = choose_entries(
                q_index,
                weights.float() * indexer.scale,
                _pages(context, indexer.entries_spec),
                tokens,
                top_k=indexer.top_k,
                rate=indexer.rate,
                block_size=block_size,
            )
        if self.compressor is not None:
            entries, rate = _pages(context, self.compressor.entries_spec), self.compressor.rate
        return attend_tokens(
            q,
            pages,
            tokens,
            window=self.window,
            scale=self.scale,
            sinks=self.sinks,
            entries=entries,
            rate=rate,
            chosen=chosen,
        )

    def _runs(self, q: torch.Tensor, indexed: Sequence[torch.Tensor], context: ForwardContext) -> bool:
        """Whether the CPU's operators attend. # q [tokens, heads, head_dim], the indexer's queries and weights"""
        attends = latent_ops.supports(q, _pages(context, self.cache_spec), self.head_dim)
        return (
            attends
            and all(each.runs(context) for each in self._makers)
            and all(
                selection_ops.selects(indexed[0], _pages(context, each.entries_spec), each.top_k, each.most_entries)
                for each in self._indexer
            )
        )

    def _by_operators(
        self, q: torch.Tensor, kv: torch.Tensor, others: Sequence[torch.Tensor], context: ForwardContext, step: Step
    ) -> torch.Tensor:
        pages = _pages(context, self.cache_spec)
        # Rows may share blocks that this step fills, so all rows are written before any is read.
        selection_ops.store(kv, pages, step)
        for maker, tokens in zip(self._makers, others, strict=False):
            maker.update_by_operators(tokens, step, context)
        block_size, selected, entries = pages.shape[1], None, None
        for indexer in self._indexer:
            keys = _pages(context, indexer.entries_spec)
            q_index, weights = others[2:]
            selected = selection_ops.select_keys(
                q_index,
                weights,
                indexer.scale,
                keys,
                step,
                indexer.top_k,
                block_size=block_size,
                rate=indexer.rate,
            )
        if self.compressor is not None:
            vectors = _pages(context, self.compressor.entries_spec)
            entries = latent_ops.Entries(vectors, block_size, self.compressor.rate, selected)
        return latent_ops.latent_attention(
            q, pages, step, self.head_dim, self.scale, window=self.window, entries=entries, sinks=self.sinks
        )

    def _attend_some(
        self,
        q: torch.Tensor,
        row: int,
        seen: int,
        rows: StepRows,
        context: ForwardContext,
        indexed: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attention of consecutive queries of a row, the last at position `seen - 1`. # [n, heads, head_dim]"""
        pages = _pages(context, self.cache_spec)
        first = seen - len(q)
        begin = max(0, first - self.window + 1)
        positions = torch.arange(begin, seen, device=q.device)
        keys = pages[rows.tables[row][positions // pages.shape[1]].long(), positions % pages.shape[1]].float()
        entries, index, rate = keys[:0], None, 1
        if self.compressor is not None:
            entries, rate = self.compressor.entries(row, seen, rows, context), self.compressor.rate
        for indexer in self._indexer:
            q_index, weights = indexed
            index = Index(
                q_index, weights.float() * indexer.scale, indexer.entries(row, seen, rows, context), indexer.top_k
            )
        return attend(
            q,
            keys,
            entries,
            first,
            window=self.window,
            rate=rate,
            scale=self.scale,
            sinks=self.sinks,
            index=index,
        )


def _rows(context: ForwardContext) -> StepRows:
    """The step's rows, with their lengths on the host."""
    metadata = context.attn_metadata
    return StepRows(
        metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist(), metadata.block_tables, metadata.slot_mapping
    )


def _tokens(context: ForwardContext) -> StepTokens:
    """The tokens of a step of decodes, with their lengths on the device only."""
    metadata = context.attn_metadata
    return tokens_of(metadata.block_tables, metadata.seq_lens, metadata.slot_mapping, metadata.query_len)


def _pages(context: ForwardContext, spec: VectorCacheSpec) -> torch.Tensor:
    """A cache of the layer. # [num_blocks, vectors, dim]"""
    cache = context.kv_cache_data[spec.name]
    assert isinstance(cache, VectorCache)
    if cache.vectors.dtype.itemsize == 1:
        raise ValueError(
            "kv_cache_dtype is fp8, but entries of compressed attention are made of cached gates, for which 8 bits "
            "are too few; use kv_cache_dtype auto"
        )
    return cache.vectors

"""Kernels on a GPU against their bounds: attention, latents, quantised products, experts, dense, sampling."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench, Case, Values, Wrong
from engine.sampling.parameters import RandomRows, SamplingRows
from engine.sampling.sampler import Sampler
from engine.text.structured.matcher import MaskedRow, packed
from models.attention.backend import AttentionBatch
from models.attention.gpu import TritonMetaData
from models.attention.triton import TritonAttentionBackend
from models.config.rope import RopeConfig
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops import paged_attention as reference
from models.ops import triton as kernels
from models.ops.triton import gated_delta as gated_delta_net
from models.ops.triton.attention import attend_decodes, attention_prefill, tokens_of_tile
from models.ops.triton.cache_store import as_hardware_reads, store
from models.ops.triton.cases import elementwise as gated_reference
from models.ops.triton.cases import elementwise as norm_reference
from models.ops.triton.cases import experts as moe_gemm_reference
from models.ops.triton.cases import experts as route_reference
from models.ops.triton.cases import experts as sort_reference
from models.ops.triton.cases import gated_delta as delta_reference
from models.ops.triton.cases import latent_attention as latent_reference
from models.ops.triton.cases import quantized_products as quantized_reference
from models.ops.triton.configs import target_of
from models.ops.triton.elementwise import ADD_NORM, gated, rms_norm
from models.ops.triton.expert_products import moe_four_bit_gemm, moe_gemm
from models.ops.triton.expert_routing import block_of, moe_combine, moe_route, moe_sort
from models.ops.triton.latent_attention import latent_attention
from models.ops.triton.logits import argmax
from models.ops.triton.quantized_products import four_bit_linear, fp8_linear
from models.ops.types import SILU, AttentionOptions, Gating, HeadNorms, KVCacheTensor
from models.ops.weight_formats import FP8_GROUP, FourBitWeight, FP8Weight

_BLOCK_SIZE = 16
_HEADS, _DRY_HEADS = (32, 8, 128), (4, 2, 16)
"""Numbers of heads of queries, and of keys and values, and their dimension."""
_MOST_TOKENS = 1 << 20
"""Context tokens of all rows of a decode together: 4 GiB of keys and values."""


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
        # As in the runner: a block's pages of all layers are adjacent.
        pool = bench.random(*shape)
        if cache_dtype is not None:
            # As stores write it, without negative zero, which AMD's own FP8 format reads as NaN.
            pool = torch.where(pool.abs() < 2**-6, 2**-6, pool).to(cache_dtype)
        self.q = bench.random(int(self.queries.sum()), self.heads, self.head_dim)
        self.cache, self.options = as_hardware_reads(
            KVCacheTensor(pool[:, 0], pool[:, 1]), AttentionOptions(scale=self.head_dim**-0.5), bench.device
        )
        self.num_decodes = len(self.queries) if self.queries.max() == 1 else 0
        self.backend = TritonAttentionBackend(bench.device)
        metadata = self.backend.build_metadata(
            AttentionBatch(
                query_lens=self.queries,
                seq_lens=self.lengths,
                block_tables=tables,
                slot_mapping=np.zeros(len(self.q), dtype=np.int64),
                num_decodes=self.num_decodes,
            )
        )
        assert isinstance(metadata, TritonMetaData)
        self.metadata = metadata
        self.out = torch.full(self.q.shape, torch.nan, dtype=bench.dtype, device=bench.device)

    def decode(self) -> torch.Tensor:
        """Attend by the two kernels of decodes."""
        attend_decodes(self.q, self.out, self.cache, self.metadata.plan(_BLOCK_SIZE, None), self.options)
        return self.out

    def prefill(self) -> torch.Tensor:
        """Attend by the kernel of spans."""
        step = self.metadata
        tiles = step.tiles(tokens_of_tile(self.q, self.kv_heads))
        attention_prefill(
            self.q, self.out, self.cache, tiles, step.cu_seqlens_q, step.seq_lens, step.block_tables, self.options
        )
        return self.out

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of the first rows, their starts, lengths and block tables."""
        starts = self.metadata.cu_seqlens_q[: count + 1]
        return (
            self.q[: int(starts[-1])],
            starts,
            self.metadata.seq_lens[:count],
            self.metadata.block_tables[:count],
        )

    def expected(self, count: int) -> torch.Tensor:
        """Attention of the first rows, by torch in float32. # [T, Hq, D]"""
        q, starts, lengths, tables = self.rows(count)
        return reference.attend(q, self.cache, starts, lengths, tables, self.options)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of SDPA for rows of equal lengths: queries, keys and values. # [B, H, n, D]"""
        rows, length = len(self.lengths), int(self.lengths[0])
        q = self.q.view(rows, -1, self.heads, self.head_dim).transpose(1, 2)
        k, v = (self.bench.random(rows, self.kv_heads, length, self.head_dim) for _ in range(2))
        return q, k, v

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, read once, and of queries and results."""
        token = 2 * self.kv_heads * self.head_dim * self.cache.k_cache.element_size()
        return int(self.lengths.sum()) * token + 2 * self.q.nbytes

    @property
    def operations(self) -> float:
        """Operations for all pairs of a query and a key that it attends to."""
        queries = self.queries.astype(np.float64)
        pairs = queries * (self.lengths - queries) + queries * (queries + 1) / 2
        return 4.0 * self.heads * self.head_dim * float(pairs.sum())


def attention_cases(bench: Bench) -> Iterator[Case]:
    """Measure decodes by context and batch, spans, and stores."""
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
    baselines = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    values = bench.kernel(
        problem.decode,
        None,
        num_bytes=problem.num_bytes,
        operations=problem.operations,
        baselines=baselines if cache_dtype is None else None,
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
        baselines=None if cached else causal,
    )
    # The float32 scores of all rows would not fit in memory, so a short problem with the same tiles is checked.
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


# Decodes over compressed latents, and steps of recurrent layers.

_LATENTS_BLOCK_SIZE, _RANK, _ROPE = 16, 512, 64
_KEY = 128


def latents_cases(bench: Bench) -> Iterator[Case]:
    """Measure latent attention and recurrent layers by batch and context."""
    for batch, context in bench.size(((1, 4096), (64, 4096), (16, 32768)), ((2, 40),)):
        yield Case(f"latent decode, {batch} x {context}", lambda b=batch, c=context: _latents(bench, b, c))  # type: ignore[misc]
    for batch in bench.size((1, 64, 256), (2,)):
        yield Case(f"delta net, {batch} decodes", lambda batch=batch: _delta(bench, [1] * batch, batch))  # type: ignore[misc]
    for tokens in bench.size((8192,), (20,)):
        yield Case(f"delta net, {tokens} tokens", lambda tokens=tokens: _delta(bench, [tokens], 0))  # type: ignore[misc]


def _latents(bench: Bench, batch: int, context: int) -> Values:
    heads, rank, rope = bench.size((128, _RANK, _ROPE), (4, 32, 16))
    blocks = -(-context // _LATENTS_BLOCK_SIZE)
    vectors = bench.random(batch * blocks, _LATENTS_BLOCK_SIZE, rank + rope)
    order = torch.randperm(batch * blocks, device=bench.device, dtype=torch.int32).view(batch, blocks)
    rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    q, q_rope = bench.random(batch, heads, rank), bench.random(batch, heads, rope)
    how = {"scale": (rank + rope) ** -0.5}

    def run(count: int) -> torch.Tensor:
        return latent_attention(
            q[:count], q_rope[:count], vectors, order, rows[:count], lengths[:count], longest=context, **how
        )

    few = min(batch, 4)
    expected = latent_reference.reference_latent_attention(
        q[:few], q_rope[:few], vectors, order, rows[:few], lengths[:few], **how
    )
    checked = bench.checked(run(batch)[:few], expected.value)
    values = bench.kernel(
        lambda: run(batch),
        None,
        num_bytes=batch * context * (rank + rope) * vectors.element_size() + 2 * q.nbytes,
        operations=2.0 * batch * context * heads * (2 * rank + rope),
    )
    return {**values, **checked}


def _delta(bench: Bench, counts: list[int], decodes: int) -> Values:
    problem = DeltaProblem(bench, counts, decodes)
    # The reference computes token by token.
    few = problem if decodes else DeltaProblem(bench, [min(counts[0], 300)], 0)
    expected = few.run(delta_reference.reference_delta_net)
    checked = bench.checked(few.run(gated_delta_net.delta_net), expected, 2e-2)
    values = bench.kernel(
        lambda: problem.run(gated_delta_net.delta_net),
        None,
        num_bytes=problem.num_bytes,
        operations=problem.operations,
    )
    return {**values, **checked}


class DeltaProblem:
    """Rows of a gated delta net."""

    def __init__(self, bench: Bench, counts: list[int], decodes: int) -> None:
        self._key_heads, value_heads, width, taps = bench.size((16, 32, _KEY, 4), (1, 2, 16, 4))
        group, tokens, rows = value_heads // self._key_heads, sum(counts), len(counts)
        channels = self._key_heads * (2 + group) * width
        self._projected = bench.random(tokens, self._key_heads * (2 + 2 * group) * width)
        self._ba = bench.random(tokens, 2 * value_heads)
        self._weights = (
            bench.random(channels, 1, taps, scale=0.5),
            bench.random(value_heads),
            bench.random(value_heads),
        )
        self._norm = bench.random(width), 1e-6
        self._inputs = bench.random(rows, channels, taps - 1)
        self._states = bench.random(rows, value_heads, width, width, dtype=torch.float32, scale=0.1)
        lengths = [count + 5 for count in counts] if decodes else counts
        slots = torch.arange(rows, device=bench.device)
        self._plan = gated_delta_net.make_plan(counts, lengths, slots, decodes)
        self.num_bytes = 2 * self._states.nbytes + 1.5 * self._projected.nbytes
        self.operations = 6.0 * tokens * value_heads * width * width
        """Operations of a token with its state: the read, the removal and the addition."""

    def run(self, by: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Run the layer; states continue from the last run, except in a copy for the reference."""
        is_reference = by is delta_reference.reference_delta_net
        mine = (self._inputs.clone(), self._states.clone()) if is_reference else (self._inputs, self._states)
        return by(self._projected, self._ba, *self._weights, self._norm, *mine, self._plan, key_heads=self._key_heads)


# Products with weights that stay quantised.


def quantized_cases(bench: Bench) -> Iterator[Case]:
    """Measure products by number of rows and by the weight's format."""
    makes = {"FP8 by blocks": _fp8, "MXFP4": _mxfp4, "int4, groups of 128": _int4}
    for rows in bench.size((16, 4096) if bench.is_quick else (1, 16, 64, 256, 4096), (3,)):
        for name, measure in makes.items():
            yield Case(f"{name}, {rows} rows", lambda m=measure, r=rows: m(bench, r))  # type: ignore[misc]


def random_mxfp4(bench: Bench, *shape: int) -> FourBitWeight:
    """Random codes, and scales of about 1 / 32. # shape: [.., out, in]"""
    *rows, inputs = shape
    packed = torch.randint(0, 256, (*rows, inputs // 2), dtype=torch.uint8, device=bench.device)
    scales = torch.randint(120, 125, (*rows, inputs // 32), dtype=torch.uint8, device=bench.device)
    return FourBitWeight(packed, scales)


def _sizes(bench: Bench) -> tuple[int, int]:
    """Numbers of outputs and inputs."""
    return bench.size((12288, 4096), (48, 256))


def _fp8(bench: Bench, rows: int) -> Values:
    flavour = target_of(bench.device).fp8 or "e4m3fn"
    outputs, inputs = _sizes(bench)
    codes = bench.random(outputs, inputs).to(getattr(torch, f"float8_{flavour}"))
    scales = torch.rand(-(-outputs // FP8_GROUP), inputs // FP8_GROUP, device=bench.device) / 64
    # As the loader stores them: a scale for each output and group.
    weight = FP8Weight(codes, scales.repeat_interleave(FP8_GROUP, 0)[:outputs].contiguous())
    return _measure(
        bench,
        rows,
        lambda x: fp8_linear(x, weight),
        lambda x: quantized_reference.reference_fp8_linear(x, weight),
        codes,
        2.0,
    )


def _mxfp4(bench: Bench, rows: int) -> Values:
    weight = random_mxfp4(bench, *_sizes(bench))
    return _measure(
        bench,
        rows,
        lambda x: four_bit_linear(x, weight),
        lambda x: quantized_reference.reference_four_bit_linear(x, weight),
        weight.packed,
    )


def _int4(bench: Bench, rows: int) -> Values:
    outputs, inputs = _sizes(bench)
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=bench.device)
    scales = (torch.rand(outputs, inputs // FP8_GROUP, device=bench.device) / 64).to(bench.dtype)
    zeros = torch.randint(6, 10, (outputs, inputs // FP8_GROUP), dtype=torch.uint8, device=bench.device)
    weight = FourBitWeight(packed, scales, zeros)
    return _measure(
        bench,
        rows,
        lambda x: four_bit_linear(x, weight),
        lambda x: quantized_reference.reference_four_bit_linear(x, weight),
        packed,
    )


def _measure(
    bench: Bench,
    rows: int,
    run: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor], torch.Tensor],
    stored: torch.Tensor,
    rate: float = 1.0,
) -> Values:
    """Measure a product. `stored`: bytes of the weight's codes; its scales are small in comparison."""
    outputs, inputs = _sizes(bench)
    x, dense = bench.random(rows, inputs), bench.random(outputs, inputs)
    return bench.kernel(
        lambda: run(x),
        lambda: expected(x),
        num_bytes=stored.nbytes + x.nbytes + rows * outputs * x.element_size(),
        operations=2.0 * rows * inputs * outputs,
        rate=rate,
        # Sums in another order may round an activation to an adjacent code.
        tolerance=2e-2,
        baselines={"bfloat16 F.linear": lambda: F.linear(x, dense)},
    )


# Routing, sorting, products and sums of mixtures of experts.

_GATING = Gating(SILU)
_FEW = 32
"""Number of pairs that are checked: for each, the reference reads an expert's whole weight."""


class Mixture(NamedTuple):
    """Sizes of a mixture of experts."""

    experts: int
    top_k: int
    hidden: int
    features: int


_DENSE, _MXFP4 = Mixture(128, 8, 2048, 768), Mixture(32, 4, 2880, 2880)
_DRY = Mixture(4, 2, 64, 64)


def experts_cases(bench: Bench) -> Iterator[Case]:
    """Measure by number of tokens: decodes of few and of many sequences, and a prompt."""
    for tokens in bench.size((16, 4096) if bench.is_quick else (1, 16, 64, 256, 4096), (5,)):
        yield Case(f"route, {tokens} tokens", lambda t=tokens: _route(bench, t))  # type: ignore[misc]
        yield Case(f"sort, {tokens} tokens", lambda t=tokens: _sort(bench, t))  # type: ignore[misc]
        yield Case(f"gate and up, {tokens} tokens", lambda t=tokens: _product(bench, t, has_gate=True))  # type: ignore[misc]
        yield Case(f"down, {tokens} tokens", lambda t=tokens: _product(bench, t, has_gate=False))  # type: ignore[misc]
        yield Case(f"sum, {tokens} tokens", lambda t=tokens: _combine(bench, t))  # type: ignore[misc]
        yield Case(f"MXFP4 gate and up, {tokens} tokens", lambda t=tokens: _experts_mxfp4(bench, t))  # type: ignore[misc]


def _chosen(bench: Bench, tokens: int, mixture: Mixture) -> torch.Tensor:
    """Random experts of each token, all different. # [tokens, top_k] int64"""
    scores = torch.rand(tokens, mixture.experts, device=bench.device)
    return scores.topk(mixture.top_k).indices


def _route(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    logits = bench.random(tokens, mixture.experts)
    how: dict[str, Any] = {"sigmoid": False, "renormalize": True}
    return bench.kernel(
        lambda: moe_route(logits, mixture.top_k, **how)[0],
        lambda: route_reference.reference_moe_route(logits, mixture.top_k, **how)[0],
        num_bytes=logits.nbytes + tokens * mixture.top_k * 12,
        baselines={"torch": lambda: logits.float().softmax(-1).topk(mixture.top_k)},
    )


def _sort(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    ids = _chosen(bench, tokens, mixture)
    block = block_of(ids.numel(), mixture.experts)
    found, blocks = (
        moe_sort(ids, mixture.experts, block),
        sort_reference.reference_moe_sort(ids, mixture.experts, block),
    )
    count = int(found.num_blocks)
    if found.block_experts[:count].tolist() != [expert for expert, _ in blocks]:
        raise RuntimeError("its blocks are not those of the reference")
    return bench.kernel(
        lambda: moe_sort(ids, mixture.experts, block).pairs,
        None,
        num_bytes=2 * ids.nbytes,
        baselines={"torch": lambda: ids.flatten().sort(stable=True)},
    )


def _product(bench: Bench, tokens: int, *, has_gate: bool) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    ids = _chosen(bench, tokens, mixture)
    inputs, outputs = (mixture.hidden, 2 * mixture.features) if has_gate else (mixture.features, mixture.hidden)
    rows = bench.random(tokens if has_gate else ids.numel(), inputs)
    weight = bench.random(mixture.experts, outputs, inputs, scale=inputs**-0.5)
    gating = _GATING if has_gate else None
    pairs = moe_sort(ids, mixture.experts, block_of(ids.numel(), mixture.experts))
    found = moe_gemm(rows, weight, None, pairs, ids.numel(), gating=gating)
    few = max(1, _FEW // mixture.top_k)
    some = rows[:few] if has_gate else rows[: few * mixture.top_k]
    expected = moe_gemm_reference.reference_moe_gemm(some, weight, None, ids[:few], gating=gating)
    checked = bench.checked(found[: len(expected)], expected)
    values = bench.kernel(
        lambda: moe_gemm(rows, weight, None, pairs, ids.numel(), gating=gating),
        None,
        num_bytes=_bytes_of_chosen(ids, weight.nbytes / mixture.experts) + rows.nbytes + found.nbytes,
        operations=2.0 * ids.numel() * inputs * outputs,
    )
    return {**values, **checked}


def _combine(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    ids = _chosen(bench, tokens, mixture)
    products = bench.random(ids.numel(), mixture.hidden)
    weights = torch.rand(tokens, mixture.top_k, device=bench.device)
    return bench.kernel(
        lambda: moe_combine(products, weights, ids, mixture.experts),
        lambda: moe_gemm_reference.reference_moe_combine(products, weights, ids, mixture.experts),
        num_bytes=products.nbytes * (1 + 1 / mixture.top_k),
        baselines={"torch": lambda: (products.view(*ids.shape, -1) * weights[..., None]).sum(1)},
    )


def _experts_mxfp4(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_MXFP4, _DRY)
    ids = _chosen(bench, tokens, mixture)
    rows = bench.random(tokens, mixture.hidden)
    weight = random_mxfp4(bench, mixture.experts, 2 * mixture.features, mixture.hidden)
    pairs = moe_sort(ids, mixture.experts, block_of(ids.numel(), mixture.experts))
    found = moe_four_bit_gemm(rows, weight, None, pairs, ids.numel(), gating=_GATING)
    few = max(1, _FEW // mixture.top_k // 2)
    dense = weight.dense(bench.dtype)
    expected = moe_gemm_reference.reference_moe_gemm(rows[:few], dense, None, ids[:few], gating=_GATING)
    del dense
    checked = bench.checked(found[: len(expected)], expected)
    stored = weight.packed.nbytes + weight.scales.nbytes
    values = bench.kernel(
        lambda: moe_four_bit_gemm(rows, weight, None, pairs, ids.numel(), gating=_GATING),
        None,
        num_bytes=_bytes_of_chosen(ids, stored / mixture.experts) + rows.nbytes + found.nbytes,
        operations=4.0 * ids.numel() * mixture.hidden * mixture.features,
    )
    return {**values, **checked}


def _bytes_of_chosen(ids: torch.Tensor, of_one: float) -> float:
    return len(torch.unique(ids)) * of_one


# Norms, activations, and torch's products as the linear layers call them.

_EPS = 1e-6


def dense_cases(bench: Bench) -> Iterator[Case]:
    """Measure with the rows of a decode's batch and with a prompt's tokens."""
    for rows in bench.size((64, 8192) if bench.is_quick else (1, 64, 256, 8192), (3,)):
        yield Case(f"norm with residual, {rows} rows", lambda rows=rows: _norm(bench, rows))  # type: ignore[misc]
        yield Case(f"SwiGLU, {rows} rows", lambda rows=rows: _gated(bench, rows))  # type: ignore[misc]
    features = bench.size(((4096, 24576), (12288, 4096), (4096, 151936)), ((32, 48),))
    for inputs, outputs in features:
        for rows in bench.size((1, 64) if bench.is_quick else (1, 16, 64, 256), (3,)):
            name = f"F.linear, {rows} x {inputs} -> {outputs}"
            yield Case(name, lambda r=rows, i=inputs, o=outputs: _linear(bench, r, i, o))  # type: ignore[misc]


def _norm(bench: Bench, rows: int) -> Values:
    size = bench.size(4096, 96)
    x, residual, weight = bench.random(rows, size), bench.random(rows, size), bench.random(size)

    def both(by: object) -> torch.Tensor:
        summed = residual.clone()
        normed = by(x, weight, _EPS, residual=summed, mode=ADD_NORM)  # type: ignore[operator]
        return torch.cat((normed, summed))

    checked = bench.checked(both(rms_norm), both(norm_reference.reference_rms_norm))
    baselines = {"torch": lambda: F.rms_norm(x + residual, (size,), weight, _EPS)}
    values = bench.kernel(
        lambda: rms_norm(x, weight, _EPS, residual=residual, mode=ADD_NORM),
        None,
        num_bytes=4 * x.nbytes,
        baselines=baselines,
    )
    return {**values, **checked}


def _gated(bench: Bench, rows: int) -> Values:
    size = bench.size(12288, 96)
    x = bench.random(rows, 2 * size)

    def by_torch() -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return bench.kernel(
        lambda: gated(x, SILU),
        lambda: gated_reference.reference_gated(x, SILU),
        num_bytes=1.5 * x.nbytes,
        baselines={"torch": by_torch},
    )


def _linear(bench: Bench, rows: int, inputs: int, outputs: int) -> Values:
    x, weight = bench.random(rows, inputs), bench.random(outputs, inputs)
    return bench.kernel(
        lambda: F.linear(x, weight),
        None,
        num_bytes=weight.nbytes + x.nbytes + rows * outputs * x.element_size(),
        operations=2.0 * rows * inputs * outputs,
    )


# From logits to tokens, by the kernels that the sampler calls.

_VOCABULARY = 151936
_CHECKED = 16
"""Number of rows that the CPU samples as well."""


def sampling_cases(bench: Bench) -> Iterator[Case]:
    """Measure kinds of rows by batch size."""
    for rows in bench.size((64,) if bench.is_quick else (1, 64, 256), (4,)):
        yield Case(f"greedy, {rows} rows", lambda n=rows: _greedy(bench, n))  # type: ignore[misc]
        kinds = {"drawn": (1.0, False), "drawn by top-p": (0.9, False), "masked": (1.0, True)}
        for name, (top_p, is_masked) in kinds.items():
            yield Case(f"{name}, {rows} rows", lambda n=rows, p=top_p, m=is_masked: _drawn(bench, n, p, is_masked=m))  # type: ignore[misc]


def _logits(bench: Bench, rows: int) -> torch.Tensor:
    return bench.random(rows, bench.size(_VOCABULARY, 300), dtype=torch.float32, scale=3.0)


def _greedy(bench: Bench, rows: int) -> Values:
    logits = _logits(bench, rows)
    if argmax(logits).tokens.tolist() != logits.argmax(-1).tolist():
        raise Wrong("its tokens are not torch's")
    return bench.kernel(
        lambda: argmax(logits).tokens, None, num_bytes=logits.nbytes, baselines={"torch": lambda: logits.argmax(-1)}
    )


def _drawn(bench: Bench, rows: int, top_p: float, *, is_masked: bool) -> Values:
    """Sample all rows, every second one with a mask of every third token. Copies to the device are not timed."""
    logits = _logits(bench, rows)
    width = logits.shape[1]
    random = RandomRows(
        rows=np.arange(rows),
        temperature=np.full(rows, 0.8, dtype=np.float32),
        top_k=np.full(rows, width),
        top_p=np.full(rows, top_p),
        min_p=np.zeros(rows),
        key=np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        position=np.arange(rows),
        filtered=np.full(rows, top_p < 1.0),
    )
    allowed = packed(range(0, width, 3), width)
    masked = [MaskedRow(row, allowed=allowed) for row in range(0, rows, 2)]
    wanted = SamplingRows(random=random, masked=masked if is_masked else None)
    sampler, kept = Sampler(), dict[str, list[torch.Tensor]]()

    def send(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        if "sent" not in kept:
            kept["sent"] = [torch.from_numpy(np.ascontiguousarray(array)).to(bench.device) for array in arrays]
        return kept["sent"]

    def chosen() -> torch.Tensor:
        return sampler.launch(logits, wanted, send).token_ids

    found = sampler.launch(logits.clone(), wanted, send).token_ids[:_CHECKED].tolist()
    few = SamplingRows(
        random=random.take(np.arange(len(found))),
        masked=[each for each in masked if each.row < len(found)] if is_masked else None,
    )
    kernels.stop()
    try:
        expected = Sampler().sample(logits[:_CHECKED].cpu(), few).token_ids.tolist()
    finally:
        kernels.start(bench.device)
    # The device's exponentials differ in their last bits, which may change a sample at the edge of an interval.
    if sum(one != other for one, other in zip(found, expected, strict=True)) > 1:
        raise Wrong(f"its tokens are not those of the sampler in torch: {found}, {expected}")
    weights = torch.empty_like(logits)

    def by_torch() -> torch.Tensor:
        # The computation of torch.multinomial, without its check of the weights, for which the host waits.
        torch.softmax(logits / 0.8, -1, out=weights)
        return (weights / torch.empty_like(weights).exponential_()).argmax(-1)

    baselines = {"torch": by_torch} if top_p == 1.0 and not is_masked else None
    return bench.kernel(chosen, None, num_bytes=logits.nbytes, baselines=baselines)

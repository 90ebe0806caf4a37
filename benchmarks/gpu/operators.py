"""`OPERATORS`: the operators of decode steps as their layers call them, each on a small problem of its own.

Of a Qwen3, a mixture of experts, a DeepSeek, a gated delta net, of quantised weights, and of choosing tokens.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from benchmarks.gpu.attention import Problem
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.latents import DeltaProblem
from benchmarks.gpu.quantized import random_mxfp4
from models.kernels.cpu.structures import SILU
from models.kernels.triton import draw, gated_delta_net, rejection, sampling
from models.kernels.triton.configs import target_of
from models.kernels.triton.four_bit import FourBitWeight
from models.kernels.triton.four_bit_gemm import four_bit_linear
from models.kernels.triton.fp8 import FP8Weight
from models.kernels.triton.fp8_gemm import fp8_linear
from models.kernels.triton.indexer_scores import indexer_scores
from models.kernels.triton.latent_attention import latent_attention
from models.kernels.triton.latent_store import latent_store, vector_store
from models.kernels.triton.logprobs import logprobs
from models.kernels.triton.moe_combine import moe_combine
from models.kernels.triton.moe_four_bit_gemm import moe_four_bit_gemm
from models.kernels.triton.moe_fp8_gemm import moe_fp8_gemm
from models.kernels.triton.moe_gemm import moe_gemm
from models.kernels.triton.moe_route import moe_route
from models.kernels.triton.moe_sort import SortedPairs, block_of, moe_sort
from models.kernels.types import FP8_GROUP, HeadNorms
from models.layers.activation import Gating, swiglu
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm

Call: TypeAlias = Callable[[], object]

_ROWS = 4
_EXPERTS, _TOP_K = 8, 2
_PAIRS = _ROWS * _TOP_K
_WIDTH = 256
"""Of rows that meet a quantised weight."""
_VOCABULARY = 1024


def _norm(bench: Bench) -> Call:
    x, layer = bench.random(_ROWS, 1024), _norm_layer(bench, 1024)
    return lambda: layer(x)


def _add_norm(bench: Bench) -> Call:
    x, residual, layer = bench.random(_ROWS, 1024), bench.random(_ROWS, 1024), _norm_layer(bench, 1024)
    return lambda: layer.add_norm(x, residual)


def _norm_layer(bench: Bench, size: int) -> RMSNorm:
    layer = RMSNorm(size, 1e-6)
    layer.weight.data = bench.random(size)
    return layer


def _gated(bench: Bench) -> Call:
    x = bench.random(_ROWS, 2048)
    return lambda: swiglu(x)


def _attention(bench: Bench) -> Call:
    """As the backend has it, of the projections' output: queries, keys and values of a row lie side by side."""
    rows = Problem(bench, [1] * _ROWS, [40] * _ROWS)
    heads, kv_heads, head_dim = rows.heads, rows.kv_heads, rows.head_dim
    qkv = bench.random(_ROWS, heads + 2 * kv_heads, head_dim)
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    norms = HeadNorms(*(_norm_layer(bench, head_dim).operand for _ in range(2)))
    cos, sin = (bench.random(_ROWS, 1, head_dim, dtype=torch.float32) for _ in range(2))
    return lambda: rows.backend.forward(q, k, v, rows.cache, rows.metadata, rows.options, None, norms, (cos, sin))


def _decode(bench: Bench) -> Call:
    return Problem(bench, [1] * _ROWS, [40] * _ROWS).decode


def _ids(bench: Bench) -> torch.Tensor:
    return torch.randint(0, _EXPERTS, (_ROWS, _TOP_K), device=bench.device)


def _sorted_pairs(bench: Bench) -> SortedPairs:
    return moe_sort(_ids(bench), _EXPERTS, block_of(_PAIRS, _EXPERTS))


def _route(bench: Bench) -> Call:
    logits = bench.random(_ROWS, _EXPERTS, dtype=torch.float32)
    return lambda: moe_route(logits, _TOP_K, sigmoid=False, renormalize=True)


def _sort(bench: Bench) -> Call:
    ids = _ids(bench)
    return lambda: moe_sort(ids, _EXPERTS, 16)


def _gate_up(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_ROWS, 64), bench.random(_EXPERTS, 128, 64), _sorted_pairs(bench)
    return lambda: moe_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _down(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_PAIRS, 64), bench.random(_EXPERTS, 64, 64), _sorted_pairs(bench)
    return lambda: moe_gemm(rows, weight, None, pairs, _PAIRS)


def _combine(bench: Bench) -> Call:
    products, ids = bench.random(_PAIRS, 64), _ids(bench)
    weights = torch.rand(_ROWS, _TOP_K, device=bench.device)
    return lambda: moe_combine(products, weights, ids, _EXPERTS)


def _experts(bench: Bench) -> Call:
    layer = FusedMoE(64, 64, _EXPERTS)
    for weight in (layer.w13, layer.w2):
        weight.data = bench.random(*weight.shape)
    hidden, ids, weights = bench.random(_ROWS, 64), _ids(bench), torch.rand(_ROWS, _TOP_K, device=bench.device)
    return lambda: layer(hidden, weights, ids)


class _Latents:
    """Rows of a paged cache of latents."""

    heads, rank, rope, nope = 16, 64, 16, 32

    def __init__(self, bench: Bench) -> None:
        self.vectors = bench.random(3 * _ROWS, 16, self.rank + self.rope)
        blocks = torch.arange(3 * _ROWS, dtype=torch.int32, device=bench.device)
        self.tables = blocks.view(_ROWS, 3)
        self.rows = torch.arange(_ROWS, dtype=torch.int32, device=bench.device)
        self.lengths = torch.full((_ROWS,), 40, dtype=torch.int32, device=bench.device)
        self.slots = torch.arange(_ROWS, device=bench.device)


def _latent_store(bench: Bench) -> Call:
    at = _Latents(bench)
    q, latent = bench.random(_ROWS, at.heads, at.nope + at.rope), bench.random(_ROWS, at.rank + at.rope)
    cos, sin = (bench.random(_ROWS, 1, at.rope, dtype=torch.float32) for _ in range(2))
    norm = bench.random(at.rank), 1e-6
    return lambda: latent_store(
        q, latent, at.vectors, at.slots, norm=norm, rotation=(cos, sin), is_interleaved=True, scale=1.0
    )


def _latent_decode(bench: Bench) -> Call:
    at = _Latents(bench)
    q, q_rope = bench.random(_ROWS, at.heads, at.rank), bench.random(_ROWS, at.heads, at.rope)
    return lambda: latent_attention(
        q, q_rope, at.vectors, at.tables, at.rows, at.lengths, longest=40, scale=at.rank**-0.5
    )


def _index(bench: Bench) -> Call:
    at = _Latents(bench)
    q, weights = bench.random(_ROWS, at.heads, at.rank + at.rope), bench.random(_ROWS, at.heads, dtype=torch.float32)
    return lambda: indexer_scores(q, weights, at.vectors, at.tables, at.rows, at.lengths, 40)


def _index_store(bench: Bench) -> Call:
    at = _Latents(bench)
    keys = bench.random(_ROWS, at.rank + at.rope)
    return lambda: vector_store(keys, at.vectors, at.slots)


def _delta(bench: Bench) -> Call:
    problem = DeltaProblem(bench, [1] * _ROWS, _ROWS)
    return lambda: problem.run(gated_delta_net.delta_net)


def _fp8_weight(bench: Bench, *experts: int) -> FP8Weight:
    codes = bench.random(*experts, _WIDTH, _WIDTH).to(
        getattr(torch, f"float8_{target_of(bench.device).fp8 or 'e4m3fn'}")
    )
    return FP8Weight(codes, torch.ones(*experts, _WIDTH, _WIDTH // FP8_GROUP, device=bench.device))


def _int4_weight(bench: Bench) -> FourBitWeight:
    packed, zeros = (
        torch.randint(0, 16, (_WIDTH, columns), dtype=torch.uint8, device=bench.device)
        for columns in (_WIDTH // 2, _WIDTH // FP8_GROUP)
    )
    return FourBitWeight(packed, bench.random(_WIDTH, _WIDTH // FP8_GROUP), zeros)


def _fp8(bench: Bench) -> Call:
    x, weight = bench.random(_ROWS, _WIDTH), _fp8_weight(bench)
    return lambda: fp8_linear(x, weight)


def _int4(bench: Bench) -> Call:
    x, weight = bench.random(_ROWS, _WIDTH), _int4_weight(bench)
    return lambda: four_bit_linear(x, weight)


def _fp8_experts(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_ROWS, _WIDTH), _fp8_weight(bench, _EXPERTS), _sorted_pairs(bench)
    return lambda: moe_fp8_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _mxfp4_experts(bench: Bench) -> Call:
    rows, weight, pairs = (
        bench.random(_ROWS, _WIDTH),
        random_mxfp4(bench, _EXPERTS, _WIDTH, _WIDTH),
        _sorted_pairs(bench),
    )
    return lambda: moe_four_bit_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _logits(bench: Bench) -> torch.Tensor:
    return bench.random(_ROWS, _VOCABULARY, dtype=torch.float32)


def _argmax(bench: Bench) -> Call:
    logits = _logits(bench)
    return lambda: sampling.argmax(logits)


def _draw(bench: Bench, *, is_filtered: bool) -> Call:
    logits, tokens = _logits(bench), torch.zeros(_ROWS, dtype=torch.int64, device=bench.device)
    columns = torch.zeros(draw.NUM_COLUMNS, _ROWS, dtype=torch.int64)
    columns[draw.ROW] = torch.arange(_ROWS)
    columns[draw.TEMPERATURE] = torch.ones(_ROWS).view(torch.int32).long()
    columns[draw.TOP_P] = torch.full((_ROWS,), 0.9, dtype=torch.float64).view(torch.int64)
    columns[draw.TOP_K], columns[draw.IS_FILTERED] = _VOCABULARY, is_filtered
    # Rows without a peak are left alone: launched again by themselves, kernels would write behind what the operator
    # gives them anew each time.
    sent, peaks = columns.to(bench.device), torch.full((_ROWS,), torch.inf, device=bench.device)
    return lambda: draw.draw(logits, peaks, tokens, sent, has_filtered=is_filtered)


def _adjust(bench: Bench) -> Call:
    logits, rows = _logits(bench), torch.arange(_ROWS, device=bench.device)
    values = torch.ones(_ROWS, device=bench.device)
    return lambda: sampling.adjust(logits, rows, rows, values, sampling.FREQUENCY)


def _mask(bench: Bench) -> Call:
    logits, rows = _logits(bench), torch.arange(_ROWS, device=bench.device)
    masks = torch.full((_ROWS, _VOCABULARY // 32), -1, dtype=torch.int32, device=bench.device)
    return lambda: sampling.mask(logits, rows, masks)


def _logprobs(bench: Bench) -> Call:
    logits, tokens = _logits(bench), torch.zeros(_ROWS, dtype=torch.int64, device=bench.device)
    return lambda: logprobs(logits, tokens, 3)


def _keep_equal(bench: Bench) -> Call:
    drafts, sampled = (torch.zeros(count, dtype=torch.int64, device=bench.device) for count in (_ROWS, 2 * _ROWS))
    starts = torch.arange(_ROWS + 1, dtype=torch.int32, device=bench.device)
    return lambda: rejection.keep_equal(sampled, drafts, starts, 1)


OPERATORS: Mapping[str, Callable[[Bench], Call]] = {
    "norm": _norm,
    "norm with residual": _add_norm,
    "SwiGLU": _gated,
    "attention: store, decode, merge": _attention,
    "attention decode and merge": _decode,
    "likeliest tokens": _argmax,
    "experts' routes": _route,
    "experts: sort, products, sum": _experts,
    "experts' sort": _sort,
    "experts' gate and up": _gate_up,
    "experts' product": _down,
    "experts' sum": _combine,
    "latents' store": _latent_store,
    "latent decode and merge": _latent_decode,
    "indexer's store": _index_store,
    "indexer's scores": _index,
    "delta net: convolution, step, norm": _delta,
    "FP8 product": _fp8,
    "4-bit product": _int4,
    "FP8 experts' gate and up": _fp8_experts,
    "4-bit experts' gate and up": _mxfp4_experts,
    "tokens drawn": lambda bench: _draw(bench, is_filtered=False),
    "tokens drawn by top-p": lambda bench: _draw(bench, is_filtered=True),
    "penalties": _adjust,
    "masks": _mask,
    "log probabilities": _logprobs,
    "drafts kept": _keep_equal,
}

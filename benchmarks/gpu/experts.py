"""Routing, sorting, products and sums of mixtures of experts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.quantized import random_mxfp4
from models.kernels.cpu.structures import SILU
from models.kernels.triton.moe_combine import moe_combine
from models.kernels.triton.moe_four_bit_gemm import moe_four_bit_gemm
from models.kernels.triton.moe_gemm import moe_gemm
from models.kernels.triton.moe_route import moe_route
from models.kernels.triton.moe_sort import block_of, moe_sort
from models.kernels.triton.reference import moe_gemm as reference
from models.kernels.triton.reference import moe_route as route_reference
from models.kernels.triton.reference import moe_sort as sort_reference
from models.kernels.triton.reference.quantized import four_bit_weight
from models.layers.activation import Gating

_GATING = Gating(SILU)
_FEW = 32
"""Pairs that are checked: the reference takes an expert's whole weight for each."""


class Mixture(NamedTuple):
    """A layer's sizes."""

    experts: int
    top_k: int
    hidden: int
    features: int


_DENSE, _MXFP4 = Mixture(128, 8, 2048, 768), Mixture(32, 4, 2880, 2880)
_DRY = Mixture(4, 2, 64, 64)


def cases(bench: Bench) -> Iterator[Case]:
    """By tokens: a decode of few, of many, and a prompt."""
    for tokens in bench.size((16, 4096) if bench.is_quick else (1, 16, 64, 256, 4096), (5,)):
        yield Case(f"route, {tokens} tokens", lambda t=tokens: _route(bench, t))  # type: ignore[misc]
        yield Case(f"sort, {tokens} tokens", lambda t=tokens: _sort(bench, t))  # type: ignore[misc]
        yield Case(f"gate and up, {tokens} tokens", lambda t=tokens: _product(bench, t, has_gate=True))  # type: ignore[misc]
        yield Case(f"down, {tokens} tokens", lambda t=tokens: _product(bench, t, has_gate=False))  # type: ignore[misc]
        yield Case(f"sum, {tokens} tokens", lambda t=tokens: _combine(bench, t))  # type: ignore[misc]
        yield Case(f"MXFP4 gate and up, {tokens} tokens", lambda t=tokens: _mxfp4(bench, t))  # type: ignore[misc]


def _chosen(bench: Bench, tokens: int, mixture: Mixture) -> torch.Tensor:
    """Experts of each token, all different. # [tokens, top_k] int64"""
    scores = torch.rand(tokens, mixture.experts, device=bench.device)
    return scores.topk(mixture.top_k).indices


def _route(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    logits = bench.random(tokens, mixture.experts)
    how: dict[str, Any] = {"sigmoid": False, "renormalize": True}
    return bench.kernel(
        lambda: moe_route(logits, mixture.top_k, **how)[0],
        lambda: route_reference.moe_route(logits, mixture.top_k, **how)[0],
        num_bytes=logits.nbytes + tokens * mixture.top_k * 12,
        beside={"torch": lambda: logits.float().softmax(-1).topk(mixture.top_k)},
    )


def _sort(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_DENSE, _DRY)
    ids = _chosen(bench, tokens, mixture)
    block = block_of(ids.numel(), mixture.experts)
    found, blocks = moe_sort(ids, mixture.experts, block), sort_reference.moe_sort(ids, mixture.experts, block)
    count = int(found.num_blocks)
    if found.block_experts[:count].tolist() != [expert for expert, _ in blocks]:
        raise RuntimeError("its blocks are not those of the reference")
    return bench.kernel(
        lambda: moe_sort(ids, mixture.experts, block).pairs,
        None,
        num_bytes=2 * ids.nbytes,
        beside={"torch": lambda: ids.flatten().sort(stable=True)},
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
    expected = reference.moe_gemm(some, weight, None, ids[:few], gating=gating)
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
        lambda: reference.moe_combine(products, weights, ids, mixture.experts),
        num_bytes=products.nbytes * (1 + 1 / mixture.top_k),
        beside={"torch": lambda: (products.view(*ids.shape, -1) * weights[..., None]).sum(1)},
    )


def _mxfp4(bench: Bench, tokens: int) -> Values:
    mixture = bench.size(_MXFP4, _DRY)
    ids = _chosen(bench, tokens, mixture)
    rows = bench.random(tokens, mixture.hidden)
    weight = random_mxfp4(bench, mixture.experts, 2 * mixture.features, mixture.hidden)
    pairs = moe_sort(ids, mixture.experts, block_of(ids.numel(), mixture.experts))
    found = moe_four_bit_gemm(rows, weight, None, pairs, ids.numel(), gating=_GATING)
    few = max(1, _FEW // mixture.top_k // 2)
    dense = four_bit_weight(weight, bench.dtype)
    expected = reference.moe_gemm(rows[:few], dense, None, ids[:few], gating=_GATING)
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

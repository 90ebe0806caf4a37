"""The self-test cases of a loaded model: the forms in which its layers call the kernels.

A pass of the model with suspended kernels records how its layers call attention; layers that launch kernels over a
cache themselves are checked in the sizes of their caches. Every layer with a method `kernel_cases` gives its own
cases, and every weight that stays quantized gives one. Equal cases are checked once.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn

from models.attention.observer import ObservingBackend
from models.layers.base import CausalLM, DraftLM, VectorCacheSpec
from models.layers.block_sparse import BlockIndexer
from models.layers.compressed import CompressedAttention, EntryCache, EntryIndexer, PoolIndexer
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.ops import triton
from models.ops.self_test import Case
from models.ops.stored_weight import stored_of
from models.ops.triton.cache_store import as_hardware_reads, vectors_as_hardware_reads
from models.ops.triton.cases.attention import AttentionCase, head_rows
from models.ops.triton.cases.gated_delta import DeltaCase
from models.ops.triton.cases.latent_attention import IndexCase, LatentCase, SelectionCase
from models.ops.triton.cases.quantized_products import ProductCase
from models.ops.triton.cases.state_space import Mamba2Case, ShortConvCase
from models.ops.triton.cases.token_scans import DeltaRuleCase, SelectiveScanCase
from models.ops.types import LayerCache, VectorCache

_BLOCK_KEYS = 512
"""Keys that a case of block selection scores, in several programs."""


def cases_of_model(
    model: CausalLM | DraftLM,
    observed: ObservingBackend,
    caches: Mapping[str, LayerCache],
    dtype: torch.dtype,
    max_tokens: int,
    *,
    query_len: int = 1,
) -> dict[str, list[Case]]:
    """The cases by operator; those of kernels that compute addresses come first.

    `observed`: a pass of the model with suspended kernels. `caches`: by layer. `max_tokens`: the most of a step.
    `query_len`: tokens of a decode that verifies drafts. Raises `ValueError` for an FP8 cache that kernels are to read
    on hardware without FP8.
    """
    found: dict[str, dict[Hashable, Case]] = defaultdict(dict)
    attention: Iterable[Case] = ()
    if triton.takes("attention"):
        attention = (*_attention_cases(observed, dtype, query_len), *_selection_cases(model, caches, dtype))
    for case in (*attention, *_layer_cases(model, observed, dtype, max_tokens)):
        if isinstance(case, DeltaCase | Mamba2Case | ShortConvCase | DeltaRuleCase | SelectiveScanCase):
            case = dataclasses.replace(case, verifies_drafts=query_len > 1)
        found[case.operator].setdefault((type(case), case.key), case)
    return {operator: _in_order(cases.values()) for operator, cases in found.items()}


def merged_cases(first: dict[str, list[Case]], second: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """The cases of two models by operator, without duplicates."""
    merged: dict[str, list[Case]] = {}
    for operator in first.keys() | second.keys():
        cases = [*first.get(operator, ()), *second.get(operator, ())]
        merged[operator] = _in_order({(type(case), case.key): case for case in reversed(cases)}.values())
    return merged


def _in_order(cases: Iterable[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: not case.gives_addresses)


def _attention_cases(observed: ObservingBackend, dtype: torch.dtype, query_len: int) -> Iterator[Case]:
    for q, k, v, cache, (options, sinks, norms, rotation, q_scales) in observed.attended:
        as_hardware_reads(cache, options, q.device)  # Raises `ValueError` where the hardware has no FP8.
        for tokens in sorted({1, query_len}):
            yield AttentionCase(
                heads=q.shape[1],
                kv_heads=cache.k_cache.shape[1],
                head_dim=q.shape[2],
                options=options,
                dtype=dtype,
                cache_dtype=cache.k_cache.dtype,
                block_size=cache.k_cache.shape[2],
                has_sinks=sinks is not None,
                norms=norms,
                rotary_dim=None if rotation is None else rotation[0].shape[-1],
                query_len=tokens,
                has_q_scales=q_scales is not None,
                stores=k is not None,
                value_dim=None if cache.v_cache.shape[3] == q.shape[2] else cache.v_cache.shape[3],
                rows=(head_rows(q), None if k is None else head_rows(k), None if v is None else head_rows(v)),
            )
    top_k = observed.indexed[0].top_k if observed.indexed else None
    for q, kv_b, latents, options, inputs, num_selected in observed.latents:
        vectors = latents.vectors
        vectors_as_hardware_reads(vectors, options.k_scale, q.device)
        rank = kv_b.shape[2]
        rope = vectors.shape[2] - rank
        nope = q.shape[2] - rope
        yield LatentCase(
            heads=q.shape[1],
            nope=nope,
            rope=rope,
            value=kv_b.shape[1] - nope,
            rank=rank,
            scale=options.scale,
            cache_scale=options.k_scale,
            dtype=dtype,
            cache_dtype=vectors.dtype,
            block_size=vectors.shape[1],
            inputs=inputs,
            top_k=top_k if num_selected is None else num_selected,
        )
    for q, keys, most in observed.indexed:
        vectors = keys.vectors
        yield IndexCase(q.shape[1], q.shape[2], most, dtype, vectors.dtype, vectors.shape[1])


def _selection_cases(
    model: CausalLM | DraftLM, caches: Mapping[str, LayerCache], dtype: torch.dtype
) -> Iterator[Case]:
    """Of layers that store vectors and score keys in decodes without the attention backend."""

    def case(
        spec: VectorCacheSpec, heads: int = 0, top_k: int = 0, kind: type[IndexCase] = SelectionCase
    ) -> IndexCase:
        cache = caches[spec.name]
        assert isinstance(cache, VectorCache)
        num_blocks, size, dim = cache.vectors.shape
        assert num_blocks > 1, "the stride of a single block says nothing"
        layers = cache.vectors.stride(0) // (size * dim)
        return kind(heads, dim, top_k, dtype, cache.vectors.dtype, size, layers)

    for module in cast(nn.Module, model).modules():
        if isinstance(module, CompressedAttention):
            yield case(module.cache_spec)
        elif isinstance(module, BlockIndexer):
            # Each head's queries are scored together with their negatives.
            yield case(module.cache_spec, heads=2, top_k=_BLOCK_KEYS)
        elif isinstance(module, PoolIndexer):
            yield case(module.tokens_spec, kind=IndexCase)
            yield case(module.entries_spec, module.num_heads, module.num_pools, IndexCase)
        elif isinstance(module, EntryCache):
            yield case(module.tokens_spec)
            heads, top_k = (module.num_heads, module.top_k) if isinstance(module, EntryIndexer) else (0, 0)
            yield case(module.entries_spec, heads, top_k)


def _layer_cases(
    model: CausalLM | DraftLM, observed: ObservingBackend, dtype: torch.dtype, max_tokens: int
) -> Iterator[Case]:
    # The kernel that stores keys also computes the norms of heads and latents, and its case includes them.
    fused = {id(norm.weight) for call in observed.attended for norm in call.inputs.norms or ()}
    fused |= {id(call.inputs.norm.weight) for call in observed.latents}
    for module in cast(nn.Module, model).modules():
        if isinstance(module, RMSNorm) and id(module.weight) in fused:
            continue
        kernel_cases: Callable[[torch.dtype, int], Iterator[Case]] | None = getattr(module, "kernel_cases", None)
        if kernel_cases is not None:
            yield from kernel_cases(dtype, max_tokens)
        weight = getattr(module, "weight", None)
        if not isinstance(module, FusedMoE) and isinstance(weight, nn.Parameter):
            stored, bias = stored_of(weight), getattr(module, "bias", None)
            for part, rows in () if stored is None else zip(stored.parts, stored.rows, strict=True):
                if part.kind is not None or triton.is_invariant():
                    yield ProductCase(part.operand, None if bias is None else bias[rows], dtype)
            if stored is None and triton.is_invariant() and weight.dim() == 2:
                yield ProductCase(weight.detach(), bias, weight.dtype)

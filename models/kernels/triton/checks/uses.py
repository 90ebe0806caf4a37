"""What a loaded model asks of the kernels: by operator, a check of each form of it, once for layers that are alike."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TypeAlias, cast

import torch
from torch import nn

from models.attention.observer import ObservingBackend
from models.base import CausalLM
from models.gemma3 import Gemma3DecoderLayer
from models.gpt_oss import GptOssRouter
from models.kernels import triton
from models.kernels.triton.cache_view import as_hardware_reads, vectors_as_hardware_reads
from models.kernels.triton.checks.attention import AttentionForm
from models.kernels.triton.checks.dense import ActivationForm, NormForm
from models.kernels.triton.checks.experts import ExpertsForm, RouteForm
from models.kernels.triton.checks.findings import Check
from models.kernels.triton.checks.latents import IndexForm, LatentForm
from models.kernels.triton.checks.products import ProductForm
from models.kernels.triton.checks.recurrent import DeltaForm
from models.kernels.triton.rms_norm import ADD_NORM, NORM_ADD
from models.layers.activation import gating_of
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.mla import MLAAttention
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.layers.quantized_product import stored_of
from models.layers.routing import GroupedRouter, SoftmaxRouter
from models.llama import LlamaMLP

LATENTS = "latents"
"""Attention of latents, of the operator `attention`, which nothing but Triton computes."""
Use: TypeAlias = tuple[str, Hashable, Check]
"""Operator, what is equal for what is alike, and a check of it."""


def uses_of(
    model: CausalLM, observed: ObservingBackend, dtype: torch.dtype, max_tokens: int, *, tokens_a_row: int = 1
) -> dict[str, list[Check]]:
    """By operator. `observed`: a pass of the model; `max_tokens`: of a step; `tokens_a_row`: that verifies drafts.

    Raises `ValueError` for a cache in FP8 where the hardware has none, and its kernels are to read it.
    """
    found: dict[str, dict[Hashable, Check]] = defaultdict(dict)
    attention = _attention(observed, dtype, tokens_a_row) if triton.takes("attention") else ()
    for operator, key, check in (*attention, *_layers(model, observed, dtype, max_tokens)):
        found[operator].setdefault(key, check)
    return {operator: list(checks.values()) for operator, checks in found.items()}


def _attention(observed: ObservingBackend, dtype: torch.dtype, tokens_a_row: int) -> Iterator[Use]:
    for q, k, cache, options, sinks, norms, rotation in observed.attended:
        as_hardware_reads(cache, options, q.device)
        form = AttentionForm(
            q.shape[1],
            k.shape[1],
            q.shape[2],
            options,
            dtype,
            cache.k_cache.dtype,
            cache.k_cache.shape[2],
            sinks is not None,
            norms,
            None if rotation is None else rotation[0].shape[-1],
        )
        yield "attention", form.key, form.check
        if tokens_a_row > 1:
            form = form._replace(tokens_a_row=tokens_a_row)
            yield "attention", form.key, form.check
    top_k = observed.indexed[0].top_k if observed.indexed else None
    for q, kv_b, vectors, options, inputs in observed.latents:
        vectors_as_hardware_reads(vectors.vectors, options.k_scale, q.device)
        rank, rope = kv_b.shape[2], vectors.vectors.shape[2] - kv_b.shape[2]
        nope = q.shape[2] - rope
        latents = LatentForm(
            q.shape[1],
            nope,
            rope,
            kv_b.shape[1] - nope,
            rank,
            options.scale,
            options.k_scale,
            dtype,
            vectors.vectors.dtype,
            vectors.vectors.shape[1],
            inputs,
            top_k,
        )
        yield LATENTS, latents.key, latents.check
    for q, vectors, most in observed.indexed:
        index = IndexForm(q.shape[1], q.shape[2], most, dtype, vectors.vectors.dtype, vectors.vectors.shape[1])
        yield LATENTS, index, index.check


def _layers(model: CausalLM, observed: ObservingBackend, dtype: torch.dtype, max_tokens: int) -> Iterator[Use]:
    # These are computed with what stores keys.
    fused = {id(norm.weight) for call in observed.attended for norm in call.norms or ()}
    fused |= {id(call.inputs.norm.weight) for call in observed.latents}
    modules = list(cast(nn.Module, model).modules())
    # Those of decoder layers take a sum with them: what comes before it or, of Gemma's, behind it.
    alone = {id(norm) for module in modules if isinstance(module, MLAAttention) for norm in module.children()}
    is_gemma = any(isinstance(module, Gemma3DecoderLayer) for module in modules)
    top_k = None
    for module in modules:
        match module:
            case RMSNorm() if id(module.weight) not in fused:
                sums = () if id(module) in alone else (NORM_ADD,) if is_gemma else (ADD_NORM,)
                norm = NormForm(*module.shape, module.eps, module.offset, dtype, module.weight.dtype, sums)
                yield "norm", norm, norm.check
            case LlamaMLP() if (gating := gating_of(module.activation)) is not None:
                activation = ActivationForm(module.gate_up_proj.weight.shape[0] // 2, gating, dtype)
                yield "activation", activation, activation.check
            case GroupedRouter() | SoftmaxRouter() | GptOssRouter():
                top_k = module.top_k
                route = _route_of(module)
                yield "moe", route, route.check
            case GatedDeltaNet():
                delta = DeltaForm(
                    module.num_key_heads,
                    module.group,
                    module.key_dim,
                    module.value_dim,
                    module.conv1d.weight.shape[-1],
                    module.norm.eps,
                    dtype,
                    module.conv1d.weight.dtype,
                )
                yield "recurrent", delta, delta.check
            case FusedMoE():
                pass
            case nn.Module(weight=nn.Parameter() as weight) if (stored := stored_of(weight)) is not None:
                product = ProductForm(stored, len(weight), weight.shape[1], getattr(module, "bias", None), dtype)
                yield "linear", product.key, product.check
    for parent in modules:
        for layer in parent.children():
            # Others compute them, or replicas share them out.
            if not isinstance(layer, FusedMoE) or layer.shuffled is not None or layer.share.exchange is not None:
                continue
            is_shared = getattr(parent, "shared_experts", None) is not None or hasattr(parent, "shared_expert")
            experts = ExpertsForm(
                layer,
                min(top_k or 2, layer.num_experts),
                dtype,
                max_tokens,
                has_beside=is_shared and layer.parallel.size == 1,
                has_gate=hasattr(parent, "shared_expert_gate"),
            )
            yield "moe", experts.key, experts.check


def _route_of(router: GroupedRouter | SoftmaxRouter | GptOssRouter) -> RouteForm:
    experts = len(router.weight)
    if isinstance(router, GptOssRouter):
        return RouteForm(experts, router.top_k, sigmoid=False, renormalize=True)
    if isinstance(router, SoftmaxRouter):
        return RouteForm(experts, router.top_k, sigmoid=False, renormalize=router.renormalize)
    return RouteForm(
        experts,
        router.top_k,
        router.scoring == "sigmoid",
        router.renormalize,
        router.e_score_correction_bias is not None,
        router.num_groups,
        router.top_groups,
        router.scaling_factor,
    )

"""What a loaded model asks of the kernels: by operator, a check of each form of it, once for layers that are alike."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TypeAlias, cast

import torch
from torch import nn

from models.architectures.gemma3 import Gemma3DecoderLayer
from models.architectures.gpt_oss import GptOssRouter
from models.architectures.llama import LlamaMLP
from models.attention.observer import ObservingBackend
from models.layers.base import CausalLM
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.mla import MLAAttention
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter, SoftmaxRouter
from models.ops import triton
from models.ops.activation import gating_of, swiglu
from models.ops.self_test import Check, Numbers
from models.ops.stored_weight import operand_of, stored_of
from models.ops.triton.cache_store import as_hardware_reads, vectors_as_hardware_reads
from models.ops.triton.cases.attention import AttentionForm
from models.ops.triton.cases.elementwise import ActivationForm, NormForm
from models.ops.triton.cases.experts import ExpertsForm, RouteForm
from models.ops.triton.cases.gated_delta import DeltaForm
from models.ops.triton.cases.latent_attention import IndexForm, LatentForm
from models.ops.triton.cases.quantized_products import ProductForm, random_weight
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD
from models.ops.types import SILU, AttentionOptions, Gating

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
    for q, k, cache, (options, sinks, norms, rotation) in observed.attended:
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
    fused = {id(norm.weight) for call in observed.attended for norm in call.inputs.norms or ()}
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
                product = ProductForm(stored.operand, getattr(module, "bias", None), dtype)
                yield "linear", product.key, product.check
    for parent in modules:
        for layer in parent.children():
            # Others compute them, or replicas share them out.
            if not isinstance(layer, FusedMoE) or layer.shuffled is not None or layer.share.exchange is not None:
                continue
            is_shared = getattr(parent, "shared_experts", None) is not None or hasattr(parent, "shared_expert")
            experts = ExpertsForm(
                operand_of(layer.w13),
                operand_of(layer.w2),
                gating_of(layer.activation),
                layer.activation,
                layer.num_experts,
                min(top_k or 2, layer.num_experts),
                dtype,
                max_tokens,
                layer.w13_bias,
                layer.w2_bias,
                layer.expert_map,
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


# [usual] Checks of kernels at sizes as many models have them, for where no model is loaded.

VOCABULARY = 128256
_DTYPE = torch.bfloat16
_HIDDEN, _INNER, _EXPERTS, _EXPERT_INNER, _OUTPUTS, _HEAD = 4096, 14336, 8, 768, 1024, 128
_BLOCK_SIZE = 16
_MOST_TOKENS = 2048


def usual_checks(device: torch.device) -> dict[str, list[Check]]:
    """By operator but for sampling."""
    options = AttentionOptions(_HEAD**-0.5)
    attention = AttentionForm(32, 8, _HEAD, options, _DTYPE, _DTYPE, _BLOCK_SIZE, False, None, _HEAD)
    numbers = Numbers(device)
    weights = [random_weight(numbers, kind, _OUTPUTS, _HIDDEN, dtype=_DTYPE) for kind in ("fp8", "int4", "mxfp4")]
    return {
        "attention": [attention.check],
        "norm": [NormForm(_HIDDEN, 1e-6, 0.0, _DTYPE, _DTYPE).check],
        "activation": [ActivationForm(_INNER, Gating(SILU), _DTYPE).check],
        "moe": [
            RouteForm(_EXPERTS, 2, sigmoid=False, renormalize=True).check,
            _experts(device).check,
        ],
        "linear": [ProductForm(weight, None, _DTYPE).check for weight in weights],
        "recurrent": [DeltaForm(16, 2, _HEAD, _HEAD, 4, 1e-6, _DTYPE, _DTYPE).check],
    }


def _experts(device: torch.device) -> ExpertsForm:
    numbers = Numbers(device)
    w13, w2 = (
        numbers.normal(_EXPERTS, *shape, dtype=_DTYPE, scale=shape[-1] ** -0.5)
        for shape in ((2 * _EXPERT_INNER, _HIDDEN), (_HIDDEN, _EXPERT_INNER))
    )
    return ExpertsForm(w13, w2, Gating(SILU), swiglu, _EXPERTS, 2, _DTYPE, _MOST_TOKENS)

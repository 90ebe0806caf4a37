"""Experts."""

import torch
import torch.nn.functional as F
from aiter import ActivationType, QuantType
from aiter.ops.shuffle import plain


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
) -> torch.Tensor:
    assert activation is ActivationType.Silu
    assert topk_ids.dtype is torch.int32
    assert topk_weight.dtype is torch.float32
    assert w1.is_shuffled
    assert w2.is_shuffled
    first, second = plain(w1).float(), plain(w2).float()
    if quant_type is QuantType.per_128x128:
        first, second = (
            weight * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for weight, scales in ((first, w1_scale), (second, w2_scale))
            if scales is not None
        )
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weight, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = F.linear(hidden_states[token].float(), first[expert]).chunk(2)
            out[token] += weight * F.linear(F.silu(gate) * up, second[expert])
    return out.to(hidden_states.dtype)

"""What Kaon calls in ROCm's library, on torch: names, modules and arguments as in its sources of the summer of 2026.

`tests.aiter_library` puts it, or a broken copy of it, where `import aiter` finds it.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F
from aiter.attention import attend


class ActivationType(IntEnum):
    """Of `fused_moe`."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(IntEnum):
    """Of `fused_moe`."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


def rmsnorm2d_fwd(
    input: torch.Tensor, weight: torch.Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> torch.Tensor:
    return F.rms_norm(input, (input.shape[1],), weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out: torch.Tensor,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    residual_out.copy_(input + residual_in)
    out.copy_(F.rms_norm(residual_out, (input.shape[1],), weight, epsilon))


def silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def gelu_tanh_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, -1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def gemm_a8w8_blockscale(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    assert dtype in (torch.bfloat16, torch.float16)
    rows, columns = WQ.shape
    scales = w_scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return F.linear(XQ.float() * x_scale.repeat_interleave(128, 1)[:, :columns], WQ.float() * scales).to(dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    sink_ptr: torch.Tensor | None = None,
) -> torch.Tensor:
    assert causal
    assert softmax_scale is not None
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert q.dtype is k.dtype is v.dtype in (torch.bfloat16, torch.float16)
    assert window_size[1] == (-1 if window_size[0] < 0 else 0)
    found = torch.empty_like(q)
    lengths = cu_seqlens_k.diff()
    # Blocks of one key.
    tables = cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k)
    pages = k[:, None], v[:, None]
    attend(
        q, *pages, found, cu_seqlens_q, lengths, tables, softmax_scale, 1 + window_size[0], logits_soft_cap, None, None
    )  # fmt: skip
    return found


def paged_attention_v1(
    out: torch.Tensor,
    workspace_buffer: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor | None,
    context_lens: torch.Tensor,
    max_context_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    fp8_out_scale: torch.Tensor | None = None,
    partition_size: int = 256,
    mtp: int = 1,
    sliding_window: int = 0,
) -> torch.Tensor:
    num_rows, heads, head_dim = query.shape
    partitions = -(-max_context_len // partition_size)
    numbers = num_rows * heads * partitions
    assert workspace_buffer.nbytes >= numbers * head_dim * query.element_size() + 2 * numbers * 4
    assert int(context_lens.max()) <= max_context_len
    assert (kv_cache_dtype == "auto") is (key_cache.dtype is query.dtype)
    keys, values = key_cache, value_cache
    if kv_cache_layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    starts = torch.arange(num_rows + 1)
    attend(
        query, keys, values, out, starts, context_lens, block_tables, scale, sliding_window, logits_soft_cap,
        k_scale, v_scale,
    )  # fmt: skip
    return out

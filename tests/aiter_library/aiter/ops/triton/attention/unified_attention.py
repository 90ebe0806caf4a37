"""Spans and decodes."""

import torch
from aiter.attention import attend


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    q_scales: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    assert causal
    # A decode's rows are taken to have one token each.
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert int(cu_seqlens_q[0]) == 0
    assert len(seqused_k) == len(cu_seqlens_q) - 1 == len(block_table)
    assert int(seqused_k.max()) <= max_seqlen_k
    attend(
        q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, 1 + window_size[0], softcap, k_descale,
        v_descale, sinks,
    )  # fmt: skip
    return out

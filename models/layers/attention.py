"""`Attention`: calls the attention backend with a layer's KV cache."""

import dataclasses

import torch
from torch import nn

from models.attention.context import get_forward_context
from models.layers.base import KVCacheSpec
from models.ops.types import AttentionInputs, AttentionOptions, HeadNorms, KVCacheTensor, Rotation


class Attention(nn.Module):
    """Causal attention over the sequences of the current step, by the backend of the step's metadata."""

    def __init__(
        self,
        layer_name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """`layer_name` is the key of the layer's cache in the forward context. Heads are this rank's.

        `scale` of the scores is `head_dim ** -0.5` by default. With `sliding_window`, a query sees that many tokens,
        its own included. With `soft_cap`, scores become `soft_cap * tanh(score / soft_cap)`.
        """
        super().__init__()
        self.cache_spec = KVCacheSpec(layer_name, num_kv_heads, head_dim, sliding_window)
        self.layer_name = layer_name
        self.options = AttentionOptions(head_dim**-0.5 if scale is None else scale, sliding_window, soft_cap)

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Set the checkpoint's scales for keys and values in an 8-bit cache."""
        self.options = dataclasses.replace(self.options, k_scale=k_scale, v_scale=v_scale)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Attend. See `AttentionInputs` for `sinks`, `norms` and `rotation`. Queries may be changed in place.

        # [tokens, heads, head_dim], 2 x [tokens, kv_heads, head_dim], [heads] -> [tokens, heads, head_dim]
        """
        context = get_forward_context()
        metadata = context.attn_metadata
        cache = context.kv_cache_data[self.layer_name]
        assert isinstance(cache, KVCacheTensor)
        inputs = AttentionInputs(self.options, sinks, norms, rotation)
        return metadata.backend.forward(q, k, v, cache, metadata, inputs)

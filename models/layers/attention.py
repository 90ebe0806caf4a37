"""`Attention` calls the attention backend with a layer's KV cache. `EncoderAttention` uses no cache."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.context import between_graphs, get_forward_context
from models.layers.base import KVCacheSpec
from models.ops.torch_ops import moved
from models.ops.types import AttentionInputs, AttentionOptions, HeadNorms, KVCacheTensor, Rotation


class Attention(nn.Module):
    """Causal attention over the sequences of the current step, computed by the backend of the step's metadata."""

    def __init__(
        self,
        layer_name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        is_chunked: bool = False,
        is_rotated_first: bool = False,
        cache_of: str | None = None,
    ) -> None:
        """`layer_name` is the key of the layer's cache in the forward context. Heads are this rank's.

        `value_dim`: elements of a value, by default as many as of a key. `scale` of the scores is `head_dim ** -0.5`
        by default. With `sliding_window`, a query attends to that many tokens, its own included; with `is_chunked`, to
        the tokens of its chunk of that many positions. With `soft_cap`, scores are `soft_cap * tanh(score /
        soft_cap)`. With `is_rotated_first`, the norms are applied after the rotation. `cache_of`: another layer with
        the same shapes, whose keys and values this layer reads instead of caching its own.
        """
        super().__init__()
        self.cache_spec = KVCacheSpec(layer_name, num_kv_heads, head_dim, sliding_window, value_dim)
        self.layer_name = layer_name if cache_of is None else cache_of
        self.has_cache = cache_of is None
        scale = head_dim**-0.5 if scale is None else scale
        self.options = AttentionOptions(scale, sliding_window, soft_cap, is_chunked, is_rotated_first)

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Set the checkpoint's scales for keys and values in an 8-bit cache."""
        self.options = dataclasses.replace(self.options, k_scale=k_scale, v_scale=v_scale)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        *,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
        q_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention. `k` and `v` are None where another layer's cache is read; see `AttentionInputs` for the
        other arguments. Queries may be overwritten.

        # [tokens, heads, head_dim], [tokens, kv_heads, head_dim], [tokens, kv_heads, value_dim], [heads]
        # -> [tokens, heads, value_dim]
        """

        def attend(
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            q_scales: torch.Tensor | None,
            *rotation: torch.Tensor,
        ) -> torch.Tensor:
            context = get_forward_context()
            metadata = context.attn_metadata
            cache = context.kv_cache_data[self.layer_name]
            assert isinstance(cache, KVCacheTensor)
            inputs = AttentionInputs(self.options, sinks, norms, _rotation_of(rotation), q_scales)
            return metadata.backend.forward(q, k, v, cache, metadata, inputs)

        return between_graphs(attend, q, k, v, q_scales, shared=rotation or ())


def _rotation_of(tables: tuple[torch.Tensor, ...]) -> Rotation | None:
    if not tables:
        return None
    cos, sin = tables
    return cos, sin


_QUERIES = 256
"""Queries of a windowed layer per call, since the scores of a whole long prompt would take too much memory."""


class EncoderAttention(nn.Module):
    """Bidirectional attention within a prompt, or within a window on both sides, by torch, without a cache.

    A step's prompts are computed one after the other, so that no result depends on the other prompts.
    """

    def __init__(self, *, scale: float | None = None, window: int | None = None) -> None:
        """`scale` of the scores is `head_dim ** -0.5` by default. `window`: tokens on each side that a token
        attends to; None for all."""
        super().__init__()
        self.scale, self.window = scale, window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
        q_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Attention.forward`, without sinks.

        # [tokens, heads, head_dim], 2 x [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]
        """
        assert sinks is None, "no encoder has sinks"
        q = moved(q, None if norms is None else norms.q, rotation, scales=q_scales)
        k = moved(k, None if norms is None else norms.k, rotation)
        prompts = get_forward_context().context.prompts
        lengths = [len(q)] if prompts is None else prompts.lengths
        out = q.new_empty(q.shape)
        start = 0
        for length in lengths:
            prompt = slice(start, start + length)
            # [heads, length, head_dim]
            own_q, own_k, own_v = (part[prompt].transpose(0, 1) for part in (q, k, v))
            for queries, keys, mask in self._spans(length, q.device):
                attended = F.scaled_dot_product_attention(
                    own_q[None, :, queries],
                    own_k[None, :, keys],
                    own_v[None, :, keys],
                    attn_mask=mask,
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
                out[prompt][queries] = attended[0].transpose(0, 1)
            start += length
        return out

    def _spans(self, length: int, device: torch.device) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
        """Yield spans of queries, the span of their keys, and each query's mask of these; None for all keys."""
        window = self.window
        if window is None or length <= window + 1:
            yield slice(0, length), slice(0, length), None
            return
        for first in range(0, length, _QUERIES):
            queries = slice(first, min(first + _QUERIES, length))
            keys = slice(max(0, queries.start - window), min(length, queries.stop + window))
            rows = torch.arange(queries.start, queries.stop, device=device)
            columns = torch.arange(keys.start, keys.stop, device=device)
            yield queries, keys, (rows[:, None] - columns).abs() <= window

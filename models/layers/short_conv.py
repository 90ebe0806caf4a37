"""`ShortConv`: the recurrent layer of LFM2, a gated short convolution over each sequence's last tokens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.attention.context import between_graphs, get_forward_context
from models.layers.linear import PackedLinear, RowParallelLinear
from models.layers.mamba2 import sections_of
from models.layers.recurrent import ShortConvolution, convolution_cache
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case


class ShortConv(nn.Module):
    """Causal depthwise convolution whose input and output are each multiplied by a gate; sharded by channel."""

    def __init__(
        self, layer_name: str, hidden_size: int, kernel_size: int, *, bias: bool, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        local = parallel.share(hidden_size, "hidden_size")
        first = parallel.rank * local
        self.in_proj = PackedLinear(hidden_size, sections_of([(hidden_size, first, local)] * 3), bias=bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias=bias, parallel=parallel)
        self.conv = ShortConvolution(local, kernel_size, ((first, local),), hidden_size, bias=bias, activation=None)
        self.cache_spec = convolution_cache(layer_name, self.conv)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        before, after, x = self.in_proj(hidden).chunk(3, dim=1)
        return self.out_proj(between_graphs(self._convolve, x, before, after))  # type: ignore[no-any-return]

    def _convolve(self, x: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        cache = context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        (inputs,) = cache.tensors
        return self.conv(x, inputs, context.attn_metadata, gates=(before, after))  # type: ignore[no-any-return]

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of this layer's kernel: everything between the projections."""
        from models.ops.triton.cases.state_space import ShortConvCase

        del max_tokens
        taps, channels = self.conv.weight.shape
        yield ShortConvCase(channels, taps, self.conv.bias is not None, dtype)

"""`MambaMixer`: the selective state space layer of Mamba, in which each channel has its own decays."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.backend import AttentionMetaData
from models.attention.context import between_graphs, get_forward_context
from models.attention.gpu import TritonMetaData
from models.layers.base import StateCacheSpec
from models.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from models.layers.mamba2 import gated_norm, sections_of
from models.layers.norm import RMSNorm, UnitRMSNorm
from models.layers.parameter import WeightPart, empty_parameter, require_shape, rows_loader
from models.layers.recurrent import ShortConvolution, plan_of, row_spans, single_tokens
from models.ops import triton
from models.ops.cpu import recurrent as ops
from models.ops.selective_scan import selective_scan_span, selective_scan_step
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

MixerNorms: TypeAlias = Literal["none", "unit", "weighted"]
"""Norms of time steps (dt), keys (B) and queries (C): none (Mamba), unweighted (Falcon Mamba) or weighted (Jamba)."""


class MambaShape(NamedTuple):
    """Sizes and options of a whole layer, before it is sharded over the ranks."""

    hidden_size: int
    channels: int
    state_size: int
    kernel_size: int
    rank: int
    """Number of features from which time steps are projected."""
    bias: bool
    """Whether the projections from and to the hidden states have biases."""
    conv_bias: bool
    norms: MixerNorms
    eps: float
    activation: str
    """Of the convolution: a name of `ACTIVATIONS`."""


class MambaMixer(nn.Module):
    """Short causal convolution and selective state space (Gu and Dao, 2023), with a gate; sharded by channel."""

    def __init__(self, layer_name: str, shape: MambaShape, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_name, self.shape = layer_name, shape
        whole, size = shape.channels, shape.state_size
        local = parallel.share(whole, "the number of channels of Mamba layers")
        first = parallel.rank * local
        self.rows = slice(first, first + local)
        self.in_proj = PackedLinear(shape.hidden_size, sections_of([(whole, first, local)] * 2), bias=shape.bias)
        self.conv1d = ShortConvolution(
            local, shape.kernel_size, ((first, local),), whole, bias=shape.conv_bias, activation=shape.activation
        )
        self.x_proj = RowParallelLinear(whole, shape.rank + 2 * size, parallel=parallel)
        self.dt_proj = ColumnParallelLinear(shape.rank, whole, parallel=parallel)
        self.out_proj = RowParallelLinear(whole, shape.hidden_size, bias=shape.bias, parallel=parallel)
        # These are float32: they are small, and a rounded decay acts on the state at every later token.
        name = layer_name.rpartition(".")[2]
        load_channels = rows_loader(first, whole)
        self.dt_bias = empty_parameter(
            local,
            weight_loader=load_channels,
            dtype=torch.float32,
            sources=({f"{name}.dt_proj.bias": None},),
        )
        self.D = empty_parameter(local, weight_loader=load_channels, dtype=torch.float32)
        self.A_log = empty_parameter(size, local, weight_loader=self._load_decays, dtype=torch.float32)
        if shape.norms != "none":
            norm = RMSNorm if shape.norms == "weighted" else UnitRMSNorm
            self.dt_layernorm = norm(shape.rank, shape.eps)
            self.b_layernorm, self.c_layernorm = norm(size, shape.eps), norm(size, shape.eps)
        self.cache_spec = StateCacheSpec(layer_name, (self.conv1d.state_shape, (size, local)), (None, torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        x, gate = self.in_proj(hidden).chunk(2, dim=1)
        convolved = between_graphs(self._convolve, x)
        size = self.shape.state_size
        dt, b, c = self.x_proj(convolved).split([self.shape.rank, size, size], dim=1)
        if self.shape.norms != "none":
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        read = between_graphs(self._scan, convolved, self.dt_proj(dt), b, c)
        return self.out_proj(gated_norm(read, gate, None, 1, 0.0, "alone"))  # type: ignore[no-any-return]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        (inputs, _), metadata = self._cache()
        return self.conv1d(x, inputs, metadata)  # type: ignore[no-any-return]

    def _cache(self) -> tuple[tuple[torch.Tensor, ...], AttentionMetaData]:
        """Return the layer's cached tensors (convolution inputs and states of all slots) and the step's metadata."""
        context = get_forward_context()
        cache = context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        return cache.tensors, context.attn_metadata

    def _scan(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens, channels], 2 x [tokens, state] -> [tokens, channels]"""
        (_, states), metadata = self._cache()
        weights = self.A_log, self.D, self.dt_bias
        if metadata.step is not None and ops.scans(x, dt, b, c, states):
            return ops.selective_scan(x, dt, b, c, *weights, states, metadata.step)
        if isinstance(metadata, TritonMetaData) and triton.runs(x, dt, b, c, states, operator="recurrent"):
            import models.ops.triton.token_scans as kernels

            return kernels.selective_scan(x, dt, b, c, *weights, states, plan_of(metadata))
        return self._read_by_torch(x, dt, b, c, states, metadata)

    def _read_by_torch(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        metadata: AttentionMetaData,
    ) -> torch.Tensor:
        """Process all decodes in one batch, then the prefills one by one."""
        exact, b, c, a = x.float(), b.float(), c.float(), -self.A_log.exp()
        dt, read = F.softplus(dt.float() + self.dt_bias), torch.zeros_like(exact)
        for tokens, before, after in single_tokens(metadata):
            state = states[before]
            read[tokens] = selective_scan_step(exact[tokens], b[tokens], c[tokens], dt[tokens], a, self.D, state)
            states[after] = state
        for slot, span, is_first in row_spans(metadata):
            if is_first:
                states[slot] = 0
            read[span] = selective_scan_span(exact[span], b[span], c[span], dt[span], a, self.D, states[slot])
        return read.to(x.dtype)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check cases of this layer's kernels: the convolution, the scan and the gate."""
        from models.ops.triton.cases.state_space import GatedNormCase, ShortConvCase
        from models.ops.triton.cases.token_scans import SelectiveScanCase

        del max_tokens
        taps, channels = self.conv1d.weight.shape
        has_bias = self.conv1d.bias is not None
        has_silu = self.conv1d.has_silu
        yield ShortConvCase(channels, taps, has_bias, dtype, is_gated=False, has_silu=has_silu, row=2 * channels)
        yield SelectiveScanCase(channels, self.shape.state_size, dtype)
        yield GatedNormCase(channels, 1, "alone", 0.0, dtype, row=2 * channels, first=channels)

    def _load_decays(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        require_shape(loaded, (self.shape.channels, self.shape.state_size))
        parameter.data.copy_(loaded[self.rows].T)

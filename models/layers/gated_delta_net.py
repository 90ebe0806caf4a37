"""`GatedDeltaNet`: the gated-delta-rule recurrent layer of Qwen3-Next and Qwen3.5."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.backend import AttentionMetaData
from models.attention.context import between_graphs, get_forward_context
from models.attention.gpu import TritonMetaData
from models.layers.base import StateCacheSpec
from models.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from models.layers.lora import OutputPart, Span
from models.layers.parameter import WeightLoader, WeightPart, empty_parameter, load_whole, require_shape, rows_loader
from models.layers.recurrent import plan_of, row_spans, single_tokens
from models.ops import triton
from models.ops.activation import ACTIVATIONS, torch_activation
from models.ops.cpu import gated_delta as delta_ops
from models.ops.gated_delta_rule import delta_rule_span, delta_rule_step
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_NORM_EPS = 1e-6
"""Epsilon under the square root that normalises queries and keys to unit length."""


class GatedDeltaNet(nn.Module):
    """Short causal convolution, gated delta rule, gated norm (Yang et al., 2025); sharded by key head.

    Each key head is shared by `num_value_heads / num_key_heads` consecutive value heads. The output features of
    `in_proj_qkvz` and `in_proj_ba` are grouped by key head. Qwen3-Next checkpoints store that layout. Qwen3.5
    checkpoints have one tensor of all queries, keys and values, and one each for gates (z), betas (b) and decays (a);
    their rows are regrouped while they are loaded.
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "in_proj_qkv": ("in_proj_qkvz", "qkv"),
        "in_proj_z": ("in_proj_qkvz", "z"),
        "in_proj_b": ("in_proj_ba", "b"),
        "in_proj_a": ("in_proj_ba", "a"),
    }
    """Used for checkpoints with separate projections (`has_grouped_projections` false)."""

    def __init__(
        self,
        layer_name: str,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel_size: int,
        eps: float,
        activation: str = "silu",
        parallel: TensorParallel,
        has_grouped_projections: bool = True,
    ) -> None:
        """`has_grouped_projections`: whether the checkpoint's projections are grouped by key head. `activation`: of
        the convolution, a name of `ACTIVATIONS`; the operators and kernels compute SiLU only."""
        super().__init__()
        self.has_silu = activation == "silu"
        self.parallel = parallel
        self.num_key_heads = parallel.share(num_key_heads, "linear_num_key_heads")
        self.group = num_value_heads // num_key_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        wide = num_value_heads * value_dim
        self.in_proj_qkvz: PackedLinear
        self.in_proj_ba: PackedLinear
        if has_grouped_projections:
            self.in_proj_qkvz = ColumnParallelLinear(
                hidden_size, 2 * num_key_heads * key_dim + 2 * wide, parallel=parallel
            )
            self.in_proj_ba = ColumnParallelLinear(hidden_size, 2 * num_value_heads, parallel=parallel)
        else:
            values = self.group * value_dim
            qkvz = {"qkv": (key_dim, key_dim, values), "z": (values,)}
            self.in_proj_qkvz = PackedLinear(hidden_size, _grouped(qkvz, num_key_heads, parallel))
            ba = {"b": (self.group,), "a": (self.group,)}
            self.in_proj_ba = PackedLinear(hidden_size, _grouped(ba, num_key_heads, parallel))
        self.out_proj = RowParallelLinear(wide, hidden_size, parallel=parallel)
        self.norm = GatedRMSNorm(value_dim, eps)
        self._parts = [num_key_heads * key_dim, num_key_heads * key_dim, wide]
        self.conv1d = _Convolution(sum(self._local_parts), kernel_size, ACTIVATIONS[activation], self._load_conv)
        num_local = self.num_key_heads * self.group
        load_heads = rows_loader(parallel.rank * num_local, num_value_heads)
        self.dt_bias = empty_parameter(num_local, weight_loader=load_heads)
        self.A_log = empty_parameter(num_local, weight_loader=load_heads)
        self.layer_name = layer_name
        self.cache_spec = StateCacheSpec(
            layer_name,
            ((sum(self._local_parts), kernel_size - 1), (num_local, key_dim, value_dim)),
            (None, torch.float32),
        )

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of this layer's kernels: everything between the projections, if they compute it."""
        from models.ops.triton.cases.gated_delta import DeltaCase

        del max_tokens
        if not self.has_silu:
            return
        conv = self.conv1d.weight
        heads = self.num_key_heads, self.group, self.key_dim, self.value_dim
        yield DeltaCase(*heads, conv.shape[-1], self.norm.eps, dtype, conv.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        gated = between_graphs(self._remember, self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))
        return self.out_proj(gated)  # type: ignore[no-any-return]

    def _remember(self, projected: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """Run the convolution, the delta rule and the gated norm, and update the cached state.

        # [tokens, q + k + v + z], [tokens, 2 * heads] -> [tokens, heads * value_dim]
        """
        context = get_forward_context()
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        inputs, states = cache.tensors
        if not self.has_silu:
            return self._forward_torch(projected, ba, cache, metadata)
        if metadata.step is not None and delta_ops.supports(
            projected, self.conv1d.weight, inputs, states, key_heads=self.num_key_heads
        ):
            return delta_ops.delta_net(
                projected,
                ba,
                self.conv1d.weight,
                self.A_log,
                self.dt_bias,
                (self.norm.weight, self.norm.eps),
                inputs,
                states,
                metadata.step,
                key_heads=self.num_key_heads,
            )
        if projected.dtype is inputs.dtype and triton.runs(projected, ba, inputs, states, operator="recurrent"):
            return self._forward_triton(projected, ba, cache, metadata)
        return self._forward_torch(projected, ba, cache, metadata)

    def _forward_triton(
        self, projected: torch.Tensor, ba: torch.Tensor, cache: StateCache, metadata: AttentionMetaData
    ) -> torch.Tensor:
        """The same computation as `_forward_torch` by Triton kernels, without a wait of the host for the device."""
        import models.ops.triton.gated_delta as kernels

        if not isinstance(metadata, TritonMetaData):
            return self._forward_torch(projected, ba, cache, metadata)
        inputs, states = cache.tensors
        return kernels.delta_net(
            projected,
            ba,
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            (self.norm.weight, self.norm.eps),
            inputs,
            states,
            plan_of(metadata),
            key_heads=self.num_key_heads,
        )

    def _forward_torch(
        self, projected: torch.Tensor, ba: torch.Tensor, cache: StateCache, metadata: AttentionMetaData
    ) -> torch.Tensor:
        """The reference for everything between the projections, with the shapes of `_remember`."""
        num_tokens, heads = len(projected), self.num_key_heads
        wide = self.group * self.value_dim
        by_head = projected.view(num_tokens, heads, -1)
        *qkv, z = torch.split(by_head, [self.key_dim, self.key_dim, wide, wide], dim=-1)
        b, a = torch.split(ba.view(num_tokens, heads, -1), self.group, dim=-1)
        decay = -self.A_log.float().exp() * F.softplus(a.reshape(num_tokens, -1).float() + self.dt_bias)
        beta = b.reshape(num_tokens, -1).sigmoid().float()
        mixed = torch.cat([part.reshape(num_tokens, -1) for part in qkv], dim=-1)
        read = self._update_state(mixed, decay, beta, cache, metadata)  # [tokens, value heads, value_dim] float32
        gated: torch.Tensor = self.norm(read.to(projected.dtype), z.reshape(read.shape))
        return gated.view(num_tokens, -1)

    def _update_state(
        self,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        cache: StateCache,
        metadata: AttentionMetaData,
    ) -> torch.Tensor:
        """Run the convolution and the delta rule over each row's tokens, and update the cached state.

        All decodes are processed in one batch, then the prefills one by one. # -> [tokens, value heads, value_dim]
        """
        assert metadata.states is not None
        conv_states, states = cache.tensors
        read = decay.new_zeros(*decay.shape, self.value_dim)
        for tokens, before, after in single_tokens(metadata):
            window = torch.cat((conv_states[before], mixed[tokens, :, None]), dim=-1)
            conv_states[after] = window[..., 1:]
            q, k, v = self._heads(self.conv1d(window)[..., 0])
            state = states[before]
            read[tokens] = delta_rule_step(q, k, v, decay[tokens], beta[tokens], state)
            states[after] = state
        for slot, tokens, is_first in row_spans(metadata):
            if is_first:
                conv_states[slot], states[slot] = 0, 0
            inputs = torch.cat((conv_states[slot], mixed[tokens].T), dim=-1)
            conv_states[slot] = inputs[:, len(inputs[0]) - conv_states.shape[-1] :]
            q, k, v = (part.transpose(0, 1) for part in self._heads(self.conv1d(inputs[None])[0].T))
            state = states[slot]
            read[tokens] = delta_rule_span(q, k, v, decay[tokens].T, beta[tokens].T, state).transpose(0, 1)
        return read

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split a convolved row into queries and keys of unit length, repeated for each value head, and values.

        Queries are scaled by `key_dim ** -0.5`. # [T, q + k + v] -> 3 x [T, value heads, dim] float32
        """
        q, k, v = torch.split(convolved.float(), self._local_parts, dim=-1)
        q, k = (
            (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)).repeat_interleave(self.group, dim=1)
            for x in (q.reshape(len(q), -1, self.key_dim), k.reshape(len(k), -1, self.key_dim))
        )
        return q * self.key_dim**-0.5, k, v.reshape(len(v), -1, self.value_dim)

    @property
    def _local_parts(self) -> list[int]:
        return [part // self.parallel.size for part in self._parts]

    def _load_conv(self, parameter: nn.Parameter, loaded: torch.Tensor, _shard: WeightPart) -> None:
        """Load the rank's channels of queries, keys and values."""
        require_shape(loaded, (sum(self._parts), *parameter.shape[1:]))
        mine = (part.chunk(self.parallel.size)[self.parallel.rank] for part in torch.split(loaded, self._parts))
        parameter.data.copy_(torch.cat(list(mine)))


def _grouped(
    parts: Mapping[str, tuple[int, ...]], num_key_heads: int, parallel: TensorParallel
) -> dict[str | int | None, OutputPart]:
    """Map checkpoint tensors to the rows of a product whose features are grouped by key head.

    A checkpoint tensor consists of sections (such as q, k and v), each with the features of all key heads in order.
    `parts`: for each checkpoint tensor, the number of features per key head in each of its sections.
    """
    num_local = num_key_heads // parallel.size
    stride = sum(sum(sizes) for sizes in parts.values())
    found: dict[str | int | None, OutputPart] = {}
    offset = 0
    for name, sizes in parts.items():
        spans: list[Span] = []
        start = 0
        for size in sizes:
            first = start + parallel.rank * num_local * size
            spans += (Span(first + head * size, size, head * stride + offset) for head in range(num_local))
            start += num_key_heads * size
            offset += size
        found[name] = OutputPart(start, tuple(spans))
    return found


class GatedRMSNorm(nn.Module):
    """A root-mean-square norm whose output is multiplied by SiLU of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.weight = empty_parameter(size, weight_loader=load_whole)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """# 2 x [..., size] -> [..., size]"""
        normed = F.rms_norm(x.float(), self.shape, eps=self.eps).to(x.dtype)
        return (self.weight * normed * F.silu(gate.float())).to(x.dtype)


class _Convolution(nn.Module):
    """A causal depthwise convolution, followed by an activation."""

    def __init__(self, channels: int, kernel_size: int, activation: int, weight_loader: WeightLoader) -> None:
        super().__init__()
        self.activation = activation
        self.weight = empty_parameter(channels, 1, kernel_size, weight_loader=weight_loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [batch, channels, kernel_size - 1 + n] -> [batch, channels, n]"""
        return torch_activation(F.conv1d(x, self.weight, groups=len(self.weight)), self.activation)

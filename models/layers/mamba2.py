"""`Mamba2Mixer`: the selective state space layer of Mamba-2, in which each head has one decay."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.backend import AttentionMetaData
from models.attention.context import between_graphs, get_forward_context
from models.attention.gpu import TritonMetaData
from models.layers.base import StateCacheSpec
from models.layers.linear import PackedLinear, RowParallelLinear
from models.layers.lora import OutputPart, Span
from models.layers.parameter import empty_parameter, rows_loader
from models.layers.recurrent import ShortConvolution, plan_of, row_spans, single_tokens
from models.ops import triton
from models.ops.cpu import recurrent as ops
from models.ops.scale import scale
from models.ops.state_space import state_space_span, state_space_step
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

Gate: TypeAlias = Literal["alone", "before the norm", "after the norm"]
"""Where the output is multiplied by SiLU of the gate: before or after the norm; "alone" if there is no norm."""


class Mamba2Shape(NamedTuple):
    """Sizes of a whole layer, before it is sharded over the ranks."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups; the consecutive heads of a group share keys (B) and queries (C), and are normalised
    together."""
    state_size: int
    kernel_size: int


class Mamba2Options(NamedTuple):
    """Options in which model families differ."""

    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    gate: Gate = "before the norm"
    eps: float = 1e-5
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Limits to which a token's time step is clamped after softplus."""
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Multipliers of the sections of the projection: gates, values, keys, queries and time steps."""
    activation: str = "silu"
    """Of the convolution: a name of `ACTIVATIONS`."""


class Mamba2Mixer(nn.Module):
    """Short causal convolution, selective state space, gated norm (Dao and Gu, 2024); sharded by head.

    The input projection has these sections in order: gates, values, keys (B), queries (C), time steps. If there are
    fewer groups than ranks, consecutive ranks hold keys and queries of the same group.
    """

    def __init__(
        self,
        layer_name: str,
        shape: Mamba2Shape,
        options: Mamba2Options,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.layer_name, self.options = layer_name, options
        heads, dim, groups, state = shape.num_heads, shape.head_dim, shape.num_groups, shape.state_size
        self.num_heads = parallel.share(heads, "the number of heads of Mamba layers")
        self.head_dim, self.state_size = dim, state
        self.num_groups = _local_groups(groups, parallel)
        first_group = parallel.rank * groups // parallel.size
        first_head = parallel.rank * self.num_heads
        self.inner, self.keys = self.num_heads * dim, self.num_groups * state
        values = (first_head * dim, self.inner)
        group_span = (first_group * state, self.keys)
        sections = [
            (heads * dim, *values),
            (heads * dim, *values),
            (groups * state, *group_span),
            (groups * state, *group_span),
            (heads, first_head, self.num_heads),
        ]
        self.in_proj = PackedLinear(shape.hidden_size, sections_of(sections), bias=options.in_bias)
        self.out_proj = RowParallelLinear(heads * dim, shape.hidden_size, bias=options.out_bias, parallel=parallel)
        start, channels = 0, []
        for whole, first, count in sections[1:4]:
            channels.append((start + first, count))
            start += whole
        self.conv1d = ShortConvolution(
            self.inner + 2 * self.keys,
            shape.kernel_size,
            tuple(channels),
            start,
            bias=options.conv_bias,
            activation=options.activation,
        )
        # These are float32: they are small, and a rounded decay acts on the state at every later token.
        load_heads = rows_loader(first_head, heads)
        self.dt_bias, self.A_log, self.D = (
            empty_parameter(self.num_heads, weight_loader=load_heads, dtype=torch.float32) for _ in range(3)
        )
        self.norm = (
            GroupNorm(self.inner, heads * dim, groups, options.eps, options.gate, parallel)
            if options.gate != "alone"
            else None
        )
        self.multipliers: torch.Tensor | None
        self.register_buffer("multipliers", self._column_multipliers(), persistent=False)
        self.cache_spec = StateCacheSpec(
            layer_name,
            (self.conv1d.state_shape, (self.num_heads, state, dim)),
            (None, torch.float32),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        projected = self.in_proj(hidden)
        if self.multipliers is not None:
            projected = scale(projected, self.multipliers)
        inner = self.inner
        read = between_graphs(self._remember, projected[:, inner:])
        return self.out_proj(self._gated(read, projected[:, :inner]))  # type: ignore[no-any-return]

    def _remember(self, projected: torch.Tensor) -> torch.Tensor:
        """Run the convolution and the state space, and update the cached state.

        # [tokens, inner + 2 * keys + heads] -> [tokens, inner]
        """
        context = get_forward_context()
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        inputs, states = cache.tensors
        wide = self.inner + 2 * self.keys
        convolved = self.conv1d(projected[:, :wide], inputs, metadata)
        weights = StateSpaceWeights(self.A_log, self.D, self.dt_bias)
        dt, limits = projected[:, wide:], self.options.dt_limits
        return state_space(convolved, dt, weights, states, metadata, groups=self.num_groups, limits=limits)

    def _gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            return self.norm(read, gate)  # type: ignore[no-any-return]
        return gated_norm(read, gate, None, 1, 0.0, "alone")

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of this layer's kernels: everything between the projections."""
        from models.ops.triton.cases.state_space import Mamba2Case

        del max_tokens
        norm = self.norm
        yield Mamba2Case(
            self.num_heads,
            self.head_dim,
            self.num_groups,
            self.state_size,
            len(self.conv1d.weight),
            self.conv1d.bias is not None,
            self.conv1d.has_silu,
            self.options.gate if norm is None or not norm.is_split else "alone",
            self.options.eps,
            self.options.dt_limits,
            dtype,
        )

    def _column_multipliers(self) -> torch.Tensor | None:
        """Return the multiplier of each projected feature, or None if all are 1. # [features] float32"""
        if set(self.options.multipliers) == {1.0}:
            return None
        counts = (self.inner, self.inner, self.keys, self.keys, self.num_heads)
        pairs = zip(self.options.multipliers, counts, strict=True)
        return torch.cat([torch.full((count,), value, dtype=torch.float32) for value, count in pairs])


class StateSpaceWeights(NamedTuple):
    """The weights of a state space: decays, skips and biases of time steps. # 3 x [heads] float32"""

    a_log: torch.Tensor
    """A token with time step dt multiplies the state by `exp(-exp(a_log) * dt)`."""
    d: torch.Tensor
    """Factor of the skip connection: `d` times the token's values is added to its output."""
    dt_bias: torch.Tensor


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: StateSpaceWeights,
    states: torch.Tensor,
    metadata: AttentionMetaData,
    *,
    groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Update each row's state by the row's tokens in order, and return each token's output.

    `x` holds values, keys (B) and queries (C). `limits`: the range to which time steps are clamped after softplus.

    # x [tokens, heads * dim + 2 * groups * state], dt [tokens, heads], states [slots, heads, state, dim] float32
    # -> [tokens, heads * dim]
    """
    if metadata.step is not None and ops.supports(x, dt, states):
        return ops.state_space(x, dt, *weights, states, metadata.step, groups=groups, limits=limits)
    if isinstance(metadata, TritonMetaData) and triton.runs(x, dt, states, operator="recurrent"):
        import models.ops.triton.state_space as kernels

        return kernels.state_space(x, dt, *weights, states, plan_of(metadata), groups=groups, limits=limits)
    return _state_space_by_torch(x, dt, weights, states, metadata, groups, limits)


def _state_space_by_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: StateSpaceWeights,
    states: torch.Tensor,
    metadata: AttentionMetaData,
    groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Process all decodes in one batch, then the prefills one by one."""
    assert metadata.states is not None
    tokens, (_, heads, size, dim) = len(x), states.shape
    values, b, c = torch.split(x.float(), [heads * dim, groups * size, groups * size], dim=1)
    values = values.view(tokens, heads, dim)
    b, c = (part.view(tokens, groups, size) for part in (b, c))
    dt = F.softplus(dt.float() + weights.dt_bias).clamp(*limits)
    a, read = -weights.a_log.exp(), torch.zeros_like(values)
    for single, before, after in single_tokens(metadata):
        state = states[before]
        read[single] = state_space_step(values[single], b[single], c[single], dt[single], a, weights.d, state)
        states[after] = state
    for slot, span, is_first in row_spans(metadata):
        if is_first:
            states[slot] = 0
        state = states[slot]
        read[span] = state_space_span(values[span], b[span], c[span], dt[span], a, weights.d, state)
    return read.view(tokens, -1).to(x.dtype)


class GroupNorm(nn.Module):
    """A root-mean-square norm of groups of features, with a gate before or after it."""

    def __init__(
        self, local: int, whole: int, num_groups: int, eps: float, gate: Gate, parallel: TensorParallel
    ) -> None:
        """`local` and `whole`: number of features on this rank, and on all ranks."""
        super().__init__()
        self.whole, self.eps, self.gate, self.parallel = whole, eps, gate, parallel
        self.num_groups = num_groups
        self.weight = empty_parameter(local, weight_loader=rows_loader(parallel.rank * local, whole))

    @property
    def is_split(self) -> bool:
        """Whether a group's features are spread over several ranks, which then reduce its sum of squares."""
        return self.num_groups < self.parallel.size

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens, the rank's features] -> [tokens, the rank's features]"""
        if not self.is_split:
            groups = self.num_groups // self.parallel.size
            return gated_norm(x, gate, self.weight, groups, self.eps, self.gate)
        exact, open_gate = x.float(), F.silu(gate.float())
        if self.gate == "before the norm":
            exact = exact * open_gate
        own = self.parallel.rank * self.num_groups // self.parallel.size
        sums = exact.new_zeros(len(x), self.num_groups)
        sums[:, own] = exact.square().sum(-1)
        mean = self.parallel.all_reduce(sums)[:, own : own + 1] / (self.whole // self.num_groups)
        normed = exact * torch.rsqrt(mean + self.eps) * self.weight
        return (normed if self.gate == "before the norm" else normed * open_gate).to(x.dtype)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, where: Gate
) -> torch.Tensor:
    """Multiply `x` by SiLU of `gate`, and normalise each group of features; `where` is the gate's position.

    `weight`: the norm's, or None if there is no norm. # 2 x [tokens, features] -> [tokens, features]
    """
    if ops.supports_gated_norm(x, gate):
        return ops.gated_norm(x, gate, weight, groups, eps, is_gated_first=where == "before the norm")
    if triton.runs(x, gate, operator="recurrent"):
        import models.ops.triton.state_space as kernels

        return kernels.group_norm(x, gate, weight, groups, eps, is_gated_first=where == "before the norm")
    return torch_gated_norm(x, gate, weight, groups, eps, where)


def torch_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, where: Gate
) -> torch.Tensor:
    """The reference of `gated_norm` in torch."""
    exact, open_gate = x.float(), F.silu(gate.float())
    if weight is None:
        return (exact * open_gate).to(x.dtype)
    if where == "before the norm":
        exact = exact * open_gate
    by_group = exact.view(len(x), groups, -1)
    normed = F.rms_norm(by_group, by_group.shape[-1:], eps=eps).view(exact.shape) * weight
    return (normed if where == "before the norm" else normed * open_gate).to(x.dtype)


def _local_groups(groups: int, parallel: TensorParallel) -> int:
    if groups >= parallel.size:
        return parallel.share(groups, "the number of groups of Mamba layers")
    if parallel.size % groups:
        raise ValueError(
            f"tensor_parallel_size is {parallel.size}, which neither divides the number of groups of Mamba layers, "
            f"{groups}, nor is a multiple of it; choose a size that is or does"
        )
    return 1


def sections_of(sections: list[tuple[int, int, int]]) -> dict[str | int | None, OutputPart]:
    """Describe one checkpoint tensor of several contiguous sections, each sharded over the ranks.

    `sections`: for each, its features in the checkpoint, the first one of this rank, and how many this rank has.
    """
    spans: list[Span] = []
    start = row = 0
    for whole, first, count in sections:
        spans.append(Span(start + first, count, row))
        start += whole
        row += count
    return {None: OutputPart(start, tuple(spans))}

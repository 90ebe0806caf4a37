"""`DeltaMixer`: the delta-rule recurrent layer of Kimi Linear and OLMo Hybrid, with separate q, k and v projections.

Each value head keeps a state matrix [key_dim, value_dim] per sequence. A token decays the state, then moves the value
that the state returns for the token's key towards the token's value by a fraction beta (the write strength).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.backend import AttentionMetaData
from models.attention.context import between_graphs, get_forward_context
from models.attention.gpu import TritonMetaData
from models.layers.base import StateCacheSpec
from models.layers.linear import PackedLinear, RowParallelLinear
from models.layers.lora import OutputPart, Span
from models.layers.parameter import WeightPart, empty_parameter, require_shape
from models.layers.recurrent import ShortConvolution, plan_of, row_spans, single_tokens
from models.ops import triton
from models.ops.cpu import gated_delta as ops
from models.ops.gated_delta_rule import delta_rule_span, delta_rule_step
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_LENGTH_EPS = 1e-6
"""Epsilon under the square root that normalises queries and keys to unit length."""


class DeltaShape(NamedTuple):
    """Sizes of a whole layer, before it is sharded over the ranks."""

    hidden_size: int
    key_heads: int
    heads: int
    """Number of value heads; each key head is shared by `heads / key_heads` consecutive value heads."""
    key_dim: int
    value_dim: int
    kernel_size: int
    decays: int
    """Number of decays per value head and token: 1, or `key_dim`."""
    most: float
    """Upper limit of beta, which is `most * sigmoid(b)`."""
    bound: float = 0.0
    """The logarithm of a decay is `-bound * sigmoid(exp(A_log) * (a + dt_bias))`, with a decay for each dimension of a
    key; if 0, it is `-exp(A_log) * softplus(a + dt_bias)`."""
    activation: str = "silu"
    """Of the convolution: a name of `ACTIVATIONS`."""


class DeltaMixer(nn.Module):
    """Short causal convolution followed by the delta rule (Yang et al., 2025; Kimi Linear, 2025); sharded by head.

    A subclass implements `gates`, which projects the inputs of decays and betas and the output gate, and `gated`,
    which applies the output norm and that gate.
    """

    def __init__(self, layer_name: str, shape: DeltaShape, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_name, self.shape, self.parallel = layer_name, shape, parallel
        self.key_heads = parallel.share(shape.key_heads, "linear_num_key_heads")
        self.heads = parallel.share(shape.heads, "linear_num_value_heads")
        sizes = {"q": shape.key_heads * shape.key_dim, "k": shape.key_heads * shape.key_dim}
        sizes["v"] = shape.heads * shape.value_dim
        parts: dict[str | int | None, OutputPart] = {}
        row = 0
        for kind, whole in sizes.items():
            local = whole // parallel.size
            parts[kind] = OutputPart(whole, (Span(parallel.rank * local, local, row),))
            row += local
        self.qkv_proj = PackedLinear(shape.hidden_size, parts)
        self.conv1d = _SplitConvolution(parts, shape.kernel_size, shape.activation)
        self.o_proj = RowParallelLinear(sizes["v"], shape.hidden_size, parallel=parallel)
        # These are float32: they are small, and a rounded decay acts on the state at every later token.
        self.A_log, self.dt_bias = (
            empty_parameter(self.heads * each, weight_loader=self._load_heads, dtype=torch.float32)
            for each in (1, shape.decays)
        )
        self.cache_spec = StateCacheSpec(
            layer_name,
            (self.conv1d.state_shape, (self.heads, shape.key_dim, shape.value_dim)),
            (None, torch.float32),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        a, b, gate = self.gates(hidden)
        read = between_graphs(self._remember, self.qkv_proj(hidden), a, b)
        return self.o_proj(self.gated(read, gate))  # type: ignore[no-any-return]

    def _remember(self, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Run the convolution and the delta rule, and update the cached state.

        # [tokens, q + k + v], [tokens, heads * decays], [tokens, heads] -> [tokens, heads * value_dim]
        """
        context = get_forward_context()
        metadata, cache = context.attn_metadata, context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        inputs, states = cache.tensors
        return self._read(self.conv1d(qkv, inputs, metadata), a, b, states, metadata)

    def gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs of decays (`a`) and of betas (`b`), and the output gate.

        # [tokens, hidden_size] -> [tokens, heads * decays], [tokens, heads], [tokens, heads * value_dim]
        """
        raise NotImplementedError

    def gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply the output norm and gate. # 2 x [tokens, heads * value_dim] -> [tokens, heads * value_dim]"""
        raise NotImplementedError

    def _read(
        self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, states: torch.Tensor, metadata: AttentionMetaData
    ) -> torch.Tensor:
        most, bound = self.shape.most, self.shape.bound
        weights = self.A_log, self.dt_bias
        if metadata.step is not None and ops.rules(x, a, b, states):
            return ops.delta_rule(
                x, a, b, *weights, states, metadata.step, key_heads=self.key_heads, most=most, bound=bound
            )
        if isinstance(metadata, TritonMetaData) and triton.runs(x, a, b, states, operator="recurrent"):
            import models.ops.triton.token_scans as kernels

            raw = unbounded_inputs(a, *weights, bound) if bound else a
            return kernels.delta_rule(
                x, raw, b, *weights, states, plan_of(metadata), key_heads=self.key_heads, most=most
            )
        return self._read_by_torch(x, a, b, states, metadata)

    def _read_by_torch(
        self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, states: torch.Tensor, metadata: AttentionMetaData
    ) -> torch.Tensor:
        """Process all decodes in one batch, then the prefills one by one."""
        q, k, v = delta_inputs(x, self.key_heads, self.heads, self.shape.key_dim)
        decay, beta = delta_gates(a, b, self.A_log, self.dt_bias, self.shape.most, self.shape.bound)
        read = torch.zeros_like(v)
        for tokens, before, after in single_tokens(metadata):
            state = states[before]
            read[tokens] = delta_rule_step(q[tokens], k[tokens], v[tokens], decay[tokens], beta[tokens], state)
            states[after] = state
        for slot, span, is_first in row_spans(metadata):
            if is_first:
                states[slot] = 0
            qs, ks, vs, decays, shares = (part[span].transpose(0, 1) for part in (q, k, v, decay, beta))
            read[span] = delta_rule_span(qs, ks, vs, decays, shares, states[slot]).transpose(0, 1)
        return read.flatten(1).to(x.dtype)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check cases of this layer's kernels: the convolution and the delta rule."""
        from models.ops.triton.cases.state_space import ShortConvCase
        from models.ops.triton.cases.token_scans import DeltaRuleCase

        del max_tokens
        taps, channels = self.conv1d.weight.shape
        has_silu = self.conv1d.has_silu
        yield ShortConvCase(channels, taps, False, dtype, is_gated=False, has_silu=has_silu, row=channels)
        shape = self.shape
        yield DeltaRuleCase(
            self.key_heads, self.heads, shape.key_dim, shape.value_dim, shape.decays, shape.most, dtype
        )

    def _load_heads(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        loaded = loaded.flatten()
        require_shape(loaded, (len(parameter) * self.parallel.size,))
        parameter.data.copy_(loaded.chunk(self.parallel.size)[self.parallel.rank])


def delta_inputs(
    x: torch.Tensor, key_heads: int, heads: int, key_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a convolved row into queries and keys of unit length, repeated for each value head, and values.

    Queries are scaled by `key_dim ** -0.5`. # [T, q + k + v] -> 3 x [T, heads, dim] float32
    """
    keys = key_heads * key_dim
    q, k, v = torch.split(x.float(), [keys, keys, x.shape[1] - 2 * keys], dim=1)
    q, k = (
        part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _LENGTH_EPS)
        for part in (each.view(len(x), key_heads, key_dim).repeat_interleave(heads // key_heads, 1) for each in (q, k))
    )
    return q * key_dim**-0.5, k, v.view(len(x), heads, -1)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, most: float, bound: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithms of decays, and the betas. # -> [T, heads] or [T, heads, key_dim], [T, heads], float32"""
    raw = a.float() + dt_bias
    if len(dt_bias) > len(a_log):
        raw = raw.view(len(a), len(a_log), -1)
    rates = a_log.exp() if raw.dim() == 2 else a_log.exp()[:, None]
    decay = -bound * (rates * raw).sigmoid() if bound else -rates * F.softplus(raw)
    return decay, most * b.float().sigmoid()


def unbounded_inputs(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the inputs for which decays without a bound are those of inputs `a` with one, for kernels that have none.

    # [tokens, heads * key_dim] -> the same
    """
    rates = a_log.exp().repeat_interleave(len(dt_bias) // len(a_log))
    wanted = bound * torch.sigmoid(rates * (a.float() + dt_bias)) / rates
    # The inverse of softplus, for large numbers the number itself.
    return (wanted + torch.log(-torch.expm1(-wanted)) - dt_bias).to(a.dtype)


class _SplitConvolution(ShortConvolution):
    """A short convolution whose weight is stored as separate q, k and v tensors in checkpoints.

    Published checkpoints have a tensor for each projection. transformers saves the same rows in three tensors of equal
    length instead (the last one may be shorter), and joins the three tensors when it loads them.
    """

    def __init__(self, parts: dict[str | int | None, OutputPart], taps: int, activation: str) -> None:
        channels = sum(span.local for part in parts.values() for span in part.spans)
        super().__init__(channels, taps, (), 0, bias=False, activation=activation)
        self.parts = parts
        self.weight = empty_parameter(
            taps, channels, weight_loader=self._load_part, sources=({f"{kind}_conv1d.weight": kind for kind in "qkv"},)
        )

    def _load_part(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        """Load the rank's channels of a tensor, which is a range of the channels of q, k and v joined."""
        assert isinstance(part, str)
        sizes, number = [each.whole for each in self.parts.values()], list(self.parts).index(part)
        third = -(-sum(sizes) // 3)
        thirds = [third, third, sum(sizes) - 2 * third]
        if len(loaded) == thirds[number]:
            sizes = thirds
        require_shape(loaded, (sizes[number], 1, len(parameter)))
        begin = sum(sizes[:number])
        end, offset = begin + len(loaded), 0
        for each in self.parts.values():
            for span in each.spans:
                first, past = max(begin, offset + span.first), min(end, offset + span.first + span.local)
                if first < past:
                    row = span.row + first - offset - span.first
                    parameter.data[:, row : row + past - first] = loaded[first - begin : past - begin, 0].T
            offset += each.whole

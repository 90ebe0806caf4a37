"""gpt-oss: attention with sinks, windows in every other layer, and experts with clamped SwiGLU and biases."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.layers.linear import logits
from models.layers.moe import GATE, UP, FusedMoE, is_stacked
from models.layers.parameter import (
    SourceNames,
    WeightPart,
    empty_parameter,
    fill_rows,
    load_whole,
    require_shape,
    rows_loader,
)
from models.layers.routing import experts_per_token
from models.ops import triton
from models.ops.activation import clamped_swiglu
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime, structures
from models.ops.torch_ops import top_k_lower_first
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case


class GptOssAttention(LlamaAttention):
    """Grouped-query attention with a sink per head: a logit in the softmax without a value."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        load_sinks = rows_loader(parallel.rank * self.num_heads, config.num_attention_heads)
        self.sinks = empty_parameter(self.num_heads, weight_loader=load_sinks)


class GptOssRouter(nn.Module):
    """Router with a bias; the weights of a token's experts sum to 1."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        # This weight is not quantised: it is small, and rounding would change the selection of experts.
        self.weight = empty_parameter(num_experts, hidden_size, weight_loader=load_whole, is_product=True, min_bits=16)
        self.bias = empty_parameter(num_experts, weight_loader=load_whole)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, top_k] float32, [tokens, top_k] int64"""
        scores = logits(hidden, self.weight, self.bias)
        # The softmax over the selected experts equals the renormalised softmax over all.
        if runtime.runs(hidden):
            return expert_ops.route(scores, self.top_k, scoring=structures.SOFTMAX, renormalize=True)
        if triton.runs(scores, operator="moe"):
            from models.ops.triton.expert_routing import moe_route

            return moe_route(scores, self.top_k, sigmoid=False, renormalize=True)
        values, ids = top_k_lower_first(scores, self.top_k)
        return values.softmax(-1, dtype=torch.float32), ids

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of the routing kernel."""
        from models.ops.triton.cases.experts import RouteCase

        del dtype, max_tokens
        yield RouteCase(len(self.weight), self.top_k, sigmoid=False, renormalize=True)


_GATE_UP = "gate and up"


class GptOssExperts(FusedMoE):
    """Experts stored as stacks [experts, in_features, out_features], with gate and up interleaved.

    Checkpoints that other tools have quantised have linear layers for each expert: `experts.3.gate_up_proj`, with gate
    and up interleaved (Quark), or `experts.3.gate_proj` and `experts.3.up_proj` (llm-compressor).
    """

    has_plain_stacks = False

    def _sources(self, parts: dict[str, str], stacked: str, kind: str) -> tuple[SourceNames, ...]:
        apart, stack = super()._sources(parts, stacked, kind)
        if len(parts) == 1:
            return apart, stack
        experts = range(self.num_experts)
        interleaved = {f"experts.{expert}.gate_up_proj.{kind}": (expert, _GATE_UP) for expert in experts}
        return apart, interleaved, stack

    def _load_gate_up(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        whole, local = self.intermediate_size, parameter.shape[1] // 2
        if isinstance(shard, tuple) and shard[1] == _GATE_UP:
            require_shape(loaded, (2 * whole, *parameter.shape[2:]))
            for part, rows in ((GATE, loaded[0::2]), (UP, loaded[1::2])):
                super()._load_gate_up(parameter, rows, (shard[0], part))
            return
        if not is_stacked(shard):
            super()._load_gate_up(parameter, loaded, shard)
            return
        require_shape(loaded, (self.num_experts, *parameter.shape[2:], 2 * whole))
        first = self.split.rank * local
        # These are views, so that only the parameter takes memory. A bias has no input dimension.
        rows = loaded.transpose(1, -1)[self.local_experts.start : self.local_experts.stop]  # [experts, 2 * whole, ...]
        for index in range(len(rows)):
            mine = rows[index][2 * first : 2 * (first + local)]
            fill_rows(parameter, 0, mine[0::2], index)
            fill_rows(parameter, local, mine[1::2], index)

    @staticmethod
    def _rows_of_first(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)

    def _load_down(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        if parameter is not self.w2_bias and is_stacked(shard):
            require_shape(loaded, (self.num_experts, self.intermediate_size, parameter.shape[1]))
            loaded = loaded.transpose(1, 2)
        super()._load_down(parameter, loaded, shard)


class GptOssMLP(nn.Module):
    """A mixture of experts."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        fields = config.fields
        num_experts = fields.integer("num_local_experts")
        self.router = GptOssRouter(config.hidden_size, num_experts, experts_per_token(fields, num_experts))
        self.experts = GptOssExperts(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=partial(
                clamped_swiglu, alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)
            ),
            bias=True,
            parallel=parallel,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.experts(hidden, *self.router(hidden))  # type: ignore[no-any-return]


_FACTS = ConfigFacts(
    defaults={"attention_bias": True, "head_dim": 64, "rope_theta": 150000.0},
    renamed={"num_experts": "num_local_experts"},
    full_attention_every=2,
)


@architecture("GptOssForCausalLM", _FACTS)
class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss with its language-model head."""

    attention: ClassVar[type[LlamaAttention]] = GptOssAttention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward layer of the decoder layer with this index."""
        del layer  # All layers have the same feed-forward layer.
        return GptOssMLP(config, parallel)

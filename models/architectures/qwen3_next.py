"""Qwen3-Next: three gated delta nets for each gated attention layer, and a mixture of experts in each layer."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP
from models.architectures.qwen3_moe import is_sparse, routed_experts
from models.architectures.registry import ConfigFacts, architecture
from models.layers.attention import Attention
from models.layers.base import CacheSpec
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.linear import (
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    logits,
)
from models.layers.lora import OutputPart, Span
from models.layers.moe import SparseMoE
from models.layers.norm import OffsetRMSNorm, RMSNorm, round_for_reader
from models.layers.parameter import empty_parameter, load_whole
from models.layers.rotary import RotaryEmbedding
from models.ops.activation import gate_heads
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class Qwen3NextAttention(nn.Module):
    """Grouped-query attention with norms on queries and keys, and a gate on each head's output."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = parallel.share(config.num_attention_heads, "num_attention_heads")
        # Each head's gate follows its query.
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            num_heads=2 * config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.q_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(
            f"model.layers.{layer}.self_attn", num_kv_heads=self.num_kv_heads, head_dim=config.head_dim
        )

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        num_tokens = len(hidden)
        qkv = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)
        q, gate = qkv[:, : 2 * self.num_heads].view(num_tokens, self.num_heads, -1).chunk(2, dim=-1)
        k, v = qkv[:, 2 * self.num_heads :].split(self.num_kv_heads, dim=1)
        attended = self.attn(q, k, v, norms=HeadNorms(self.q_norm.operand, self.k_norm.operand), rotation=(cos, sin))
        return self.o_proj(gate_heads(attended, gate).view(num_tokens, -1))  # type: ignore[no-any-return]

    def follow(self, norm: RMSNorm) -> None:
        """See `ParallelLinear.follow`."""
        self.qkv_proj.follow(norm)


class SharedExpertGate(ParallelLinear):
    """The gate on the shared expert's output, replicated on every rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.in_features, self.inputs = hidden_size, slice(0, hidden_size)
        self.parts = {None: OutputPart(1, (Span(0, 1, 0),))}
        self.weight = empty_parameter(1, hidden_size, weight_loader=load_whole, is_product=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The gate's logits. # [tokens, hidden_size] -> [tokens, 1] float32"""
        found = logits(hidden, self.weight)
        if self.lora is None:
            return found
        added = hidden.new_zeros(len(hidden), 1)
        self.lora.apply(added, hidden)
        return found + added


class Qwen3NextSparseBlock(SparseMoE):
    """Routed experts and a gated shared expert."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(*routed_experts(config, parallel))
        size = config.fields.integer("shared_expert_intermediate_size")
        self.shared_expert = LlamaMLP(config, parallel, intermediate_size=size, reduces=False)
        self.shared_expert_gate = SharedExpertGate(config.hidden_size)

    @property
    def shared(self) -> nn.Module:
        """See `SparseMoE`."""
        return self.shared_expert

    def shared_gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SparseMoE`."""
        return self.shared_expert_gate(hidden)  # type: ignore[no-any-return]


class Qwen3NextDecoderLayer(nn.Module):
    """A delta net or attention, then experts, each with a norm before it and a residual connection."""

    has_grouped_projections: ClassVar[bool] = True
    """See `GatedDeltaNet`."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.is_linear = _is_linear(config, layer)
        if self.is_linear:
            self.linear_attn = _delta_net(
                config, layer, parallel, has_grouped_projections=self.has_grouped_projections
            )
        else:
            self.self_attn = Qwen3NextAttention(config, layer, parallel)
        self.mlp = self.feed_forward(config, layer, parallel)
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        round_for_reader(self.linear_attn if self.is_linear else self.self_attn, self.input_layernorm)
        round_for_reader(self.mlp, self.post_attention_layernorm)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors whose sum, computed by the next norm, is the layer's output.

        # 2 x [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> 2 x [tokens, hidden_size]
        """
        hidden, residual = self.input_layernorm.add_norm(hidden, residual)
        hidden = self.linear_attn(hidden) if self.is_linear else self.self_attn(hidden, cos, sin)
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual)
        return self.mlp(hidden), residual

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward part of that layer."""
        return (
            Qwen3NextSparseBlock(config, parallel) if is_sparse(config.fields, layer) else LlamaMLP(config, parallel)
        )


class Qwen3NextModel(DecoderBody):
    """Embedding, decoder layers and final norm."""

    def __init__(
        self, config: ModelConfig, decoder_layer: type[Qwen3NextDecoderLayer], parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.layers = nn.ModuleList(
            decoder_layer(config, layer, parallel) for layer in range(config.num_hidden_layers)
        )
        self.norm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        assert residual is not None, "a model has at least one layer"
        return self.norm.add_norm(hidden, residual)[0]


FACTS = ConfigFacts(
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True},
    rotates_parts=True,
    layer_kinds=frozenset({"linear_attention"}),
)


@architecture("Qwen3NextForCausalLM", FACTS)
class Qwen3NextForCausalLM(LlamaForCausalLM):
    """Qwen3-Next with its language-model head."""

    decoder_layer: ClassVar[type[Qwen3NextDecoderLayer]] = Qwen3NextDecoderLayer

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return Qwen3NextModel(config, self.decoder_layer, parallel)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of the layers, in order."""
        return [module.cache_spec for module in self.modules() if isinstance(module, Attention | GatedDeltaNet)]


def _is_linear(config: ModelConfig, layer: int) -> bool:
    """Whether the layer is a delta net; layers past the last one, for multi-token prediction, have attention."""
    if layer >= config.num_hidden_layers:
        return False
    kinds = config.fields.strings("layer_types")
    if kinds:
        return kinds[layer] == "linear_attention"
    return (layer + 1) % config.fields.integer("full_attention_interval", 4) != 0


def _delta_net(
    config: ModelConfig, layer: int, parallel: TensorParallel, *, has_grouped_projections: bool
) -> GatedDeltaNet:
    fields = config.fields
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.invalid("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    return GatedDeltaNet(
        f"model.layers.{layer}.linear_attn",
        config.hidden_size,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        eps=config.rms_norm_eps,
        activation=config.activation,
        parallel=parallel,
        has_grouped_projections=has_grouped_projections,
    )

"""Zamba2: Mamba-2 layers, some of which ("hybrid" layers) also read a transformer block shared by several layers.

The calling layers have caches of their own, and may add low-rank products of their own to the shared projections.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import RECURRENT_KINDS, HybridForCausalLM, require_divisor
from models.architectures.llama import DecoderBody
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.layers.mamba2 import Mamba2Mixer, Mamba2Options, Mamba2Shape
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.activation import gated_activation, gating_of
from models.ops.columns import join_columns
from models.ops.norm import add_rows
from models.ops.types import Rotation
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_HYBRID = "hybrid"
_MAMBA_EPS = 1e-5


class SharedAttention(nn.Module):
    """Attention that reads two concatenated vectors of `hidden_size` per token; callers may adapt its projections."""

    def __init__(self, config: ModelConfig, callers: list[int], parallel: TensorParallel) -> None:
        """`callers`: indices, counted among hybrid layers, of the hybrid layers that share the block."""
        super().__init__()
        fields, wide = config.fields, 2 * config.hidden_size
        heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            wide,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.head_dim,
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, parallel=parallel)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.has_adapters = fields.boolean("use_shared_attention_adapter", False)
        if self.has_adapters:
            if config.num_key_value_heads != heads:
                raise fields.invalid(
                    "num_key_value_heads", f"num_attention_heads, {heads}, with adapters of attention"
                )
            rank, out = fields.integer("adapter_rank"), heads * self.head_dim
            if out != wide:
                raise fields.invalid("attention_head_dim", f"{wide} / num_attention_heads with adapters")
            self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list = (
                _by_caller(callers, wide, rank, lambda: ColumnParallelLinear(rank, out, parallel=parallel))
                for _ in range(3)
            )

    def forward(self, hidden: torch.Tensor, caller: int, attn: Attention, rotation: Rotation | None) -> torch.Tensor:
        """`attn`: attention with the calling layer's cache. # [tokens, 2 * hidden_size] -> [tokens, hidden_size]"""
        qkv: torch.Tensor = self.qkv_proj(hidden)
        if self.has_adapters:
            lists = self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list
            qkv = add_rows(qkv, join_columns(*(_changed(each, caller, hidden) for each in lists)))
        heads, keys = qkv.view(len(hidden), -1, self.head_dim), self.num_heads + self.num_kv_heads
        q, k, v = heads[:, : self.num_heads], heads[:, self.num_heads : keys], heads[:, keys:]
        return self.o_proj(attn(q, k, v, rotation=rotation).view(len(hidden), -1))  # type: ignore[no-any-return]


class SharedMLP(nn.Module):
    """Gated feed-forward layer whose first projection each calling layer adapts."""

    def __init__(self, config: ModelConfig, callers: list[int], parallel: TensorParallel) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        rank = config.fields.integer("adapter_rank")
        self.gate_up_proj = MergedColumnParallelLinear(size, [inner] * 2, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(inner, size, bias=bias, parallel=parallel)
        self.gate_up_proj_adapter_list = _by_caller(
            callers, size, rank, lambda: MergedColumnParallelLinear(rank, [inner] * 2, parallel=parallel)
        )
        self.activation = gated_activation(config.activation)

    def forward(self, hidden: torch.Tensor, caller: int) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        gate_up = add_rows(self.gate_up_proj(hidden), _changed(self.gate_up_proj_adapter_list, caller, hidden))
        return self.down_proj(self.activation(gate_up))  # type: ignore[no-any-return]

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of the activation."""
        from models.ops.triton.cases.elementwise import ActivationCase

        del max_tokens
        gating = gating_of(self.activation)
        assert gating is not None, "activations that configurations name have numbers"
        yield ActivationCase(len(self.gate_up_proj.weight) // 2, gating, dtype)


class SharedBlock(nn.Module):
    """Attention and a feed-forward layer, without a residual connection, that several layers call."""

    def __init__(self, config: ModelConfig, callers: list[int], parallel: TensorParallel) -> None:
        super().__init__()
        self.self_attn = SharedAttention(config, callers, parallel)
        self.feed_forward = SharedMLP(config, callers, parallel)
        self.input_layernorm = RMSNorm(2 * config.hidden_size, config.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, caller: int, attn: Attention, rotation: Rotation | None
    ) -> torch.Tensor:
        """# 2 x [tokens, hidden_size] -> [tokens, hidden_size]"""
        normed = self.input_layernorm(join_columns(hidden, embedded))
        attended = self.self_attn(normed, caller, attn, rotation)
        return self.feed_forward(self.pre_ff_layernorm(attended), caller)  # type: ignore[no-any-return]


class Zamba2MambaLayer(nn.Module):
    """A Mamba-2 layer with a norm before it and a residual connection."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.recurrent = _mixer(config, layer, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """`read`: added to the mixer's input, but not to the residual stream. # [tokens, hidden_size] each"""
        normed = self.input_layernorm(hidden if read is None else add_rows(read, hidden))
        return add_rows(hidden, self.recurrent(normed))


class Zamba2HybridLayer(nn.Module):
    """A Mamba-2 layer that also reads a shared block's output."""

    def __init__(
        self, config: ModelConfig, layer: int, caller: int, shared: SharedBlock, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.caller, self.shared_transformer = caller, shared
        self.mamba_decoder = Zamba2MambaLayer(config, layer, parallel)
        self.linear = ColumnParallelLinear(config.hidden_size, config.hidden_size)
        self.attn = Attention(
            f"model.layers.{layer}.self_attn",
            num_kv_heads=shared.self_attn.num_kv_heads,
            head_dim=config.head_dim,
            scale=(config.head_dim / 2) ** -0.5,
        )

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """# 2 x [tokens, hidden_size] -> [tokens, hidden_size]"""
        read = self.shared_transformer(hidden, embedded, self.caller, self.attn, rotation)
        return self.mamba_decoder(hidden, self.linear(read))  # type: ignore[no-any-return]


class Zamba2Model(DecoderBody):
    """Embedding, which hybrid layers read as well, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        fields = config.fields
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.rotary_emb = (
            RotaryEmbedding(config.rope, config.max_model_len) if fields.boolean("use_mem_rope", False) else None
        )
        hybrid, num_blocks = _hybrid_layers(fields), fields.integer("num_mem_blocks")
        blocks: list[SharedBlock] = []
        for caller in range(len(hybrid)):
            if caller < num_blocks or not config.tie_word_embeddings:
                callers = list(range(caller % num_blocks, len(hybrid), num_blocks))
                blocks.append(SharedBlock(config, callers, parallel))
            else:
                blocks.append(blocks[caller - num_blocks])
        self.layers = nn.ModuleList()
        for layer in range(config.num_hidden_layers):
            if layer in hybrid:
                caller = hybrid.index(layer)
                self.layers.append(Zamba2HybridLayer(config, layer, caller, blocks[caller], parallel))
            else:
                self.layers.append(Zamba2MambaLayer(config, layer, parallel))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        rotation = None if self.rotary_emb is None else self.rotary_emb(positions)
        # Copied, because the residual sums overwrite the first layer's input.
        hidden = join_columns(embedded)
        for layer in self.layers:
            is_hybrid = isinstance(layer, Zamba2HybridLayer)
            hidden = layer(hidden, embedded, rotation) if is_hybrid else layer(hidden)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


def _by_caller(callers: list[int], size: int, rank: int, second: Callable[[], nn.Module]) -> nn.ModuleDict:
    """Build a low-rank product for each calling layer; `second` makes the second matrix."""
    return nn.ModuleDict(
        {str(caller): nn.ModuleList([ColumnParallelLinear(size, rank), second()]) for caller in callers}
    )


def _changed(adapters: nn.ModuleDict, caller: int, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the calling layer's low-rank product. # [tokens, features] -> [tokens, the rank's output features]"""
    first, second = adapters[str(caller)].children()
    return second(first(hidden))  # type: ignore[no-any-return]


def _mixer(config: ModelConfig, layer: int, parallel: TensorParallel) -> Mamba2Mixer:
    fields = config.fields
    heads, groups = fields.integer("n_mamba_heads"), fields.integer("mamba_ngroups")
    inner = int(fields.number("mamba_expand") * config.hidden_size)
    require_divisor(fields, "n_mamba_heads", heads, "mamba_expand * hidden_size", inner)
    require_divisor(fields, "mamba_ngroups", groups, "n_mamba_heads", heads)
    state, kernel = fields.integer("mamba_d_state"), fields.integer("mamba_d_conv")
    shape = Mamba2Shape(config.hidden_size, heads, inner // heads, groups, state, kernel)
    options = Mamba2Options(
        in_bias=config.mlp_bias,
        out_bias=config.mlp_bias,
        eps=_MAMBA_EPS,
        dt_limits=(fields.number("time_step_min"), float("inf")),
    )
    return Mamba2Mixer(f"model.layers.{layer}.mamba", shape, options, parallel)


def _hybrid_layers(fields: Fields) -> list[int]:
    """Return the indices of the hybrid layers."""
    return [layer for layer, kind in enumerate(fields.strings("layer_types")) if kind == _HYBRID]


def _unread(fields: Fields) -> tuple[str, ...]:
    """Return prefixes of copies of shared blocks, which checkpoints may contain for every calling layer.

    As in transformers, blocks are shared if embeddings are tied; otherwise each calling layer has its own block.
    """
    if not fields.boolean("tie_word_embeddings", True):
        return ()
    later = _hybrid_layers(fields)[fields.integer("num_mem_blocks") :]
    return tuple(f"model.layers.{layer}.shared_transformer." for layer in later)


def _complete(config: Fields) -> Fields:
    """Add sizes and kinds of layers that follow from other fields."""
    size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    mamba = "linear_attention"
    pattern = [mamba, *([*[mamba] * 5, _HYBRID] * 7), *[mamba] * 4, _HYBRID, *[mamba] * 3, _HYBRID, *[mamba] * 2]
    kinds = config.strings("layers_block_type") or config.strings("layer_types") or pattern
    values = {
        **config.values,
        "layer_types": list(kinds),
        "attention_head_dim": config.integer("attention_head_dim", config.integer("head_dim", 2 * size // heads)),
        "intermediate_size": config.integer("intermediate_size", 4 * size),
    }
    if config.boolean("use_long_context", False):
        values["max_position_embeddings"] = 16384
    return Fields(values, config.where)


_FACTS = ConfigFacts(
    defaults={
        "adapter_rank": 128,
        "hidden_size": 2560,
        "mamba_d_conv": 4,
        "mamba_d_state": 64,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "max_position_embeddings": 4096,
        "n_mamba_heads": 8,
        "num_attention_heads": 32,
        "num_hidden_layers": 54,
        "num_mem_blocks": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "time_step_min": 0.001,
        "vocab_size": 32000,
    },
    complete=_complete,
    head_dim_field="attention_head_dim",
    activation=("hidden_act", "gelu"),
    biases_field="add_bias_linear",
    layer_kinds=RECURRENT_KINDS | {_HYBRID},
    unread=_unread,
)


@architecture("Zamba2ForCausalLM", _FACTS)
class Zamba2ForCausalLM(HybridForCausalLM):
    """Zamba2 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        f"{kind}_proj": ("qkv_proj", kind) for kind in "qkv"
    }
    checkpoint_modules: ClassVar[dict[str, str]] = {"recurrent": "mamba", "final_norm": "final_layernorm"}

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return Zamba2Model(config, parallel)

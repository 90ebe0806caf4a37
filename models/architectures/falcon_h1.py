"""Falcon-H1: each layer has a Mamba-2 mixer parallel to attention, then a dense network; each branch has a factor."""

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import (
    MAMBA_DEFAULTS,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridModel,
    dt_limits,
    mamba_mixer,
    with_kv_heads,
)
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.mamba2 import Gate, Mamba2Options
from models.ops.scale import scale
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class FalconH1Attention(LlamaAttention):
    """Grouped-query attention whose keys are scaled."""

    @staticmethod
    def score_scale(config: ModelConfig) -> float | None:
        """The scale of the attention scores, which includes the factor of the keys."""
        scale: float = config.head_dim**-0.5 * config.fields.number("key_multiplier", 1.0)
        return scale


class FalconH1MLP(LlamaMLP):
    """A gated network whose gates and output are scaled."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config, parallel)
        fields = config.fields
        gate, self.down_multiplier = (
            fields.numbers("mlp_multipliers", 2) if fields.has("mlp_multipliers") else (1, 1.0)
        )
        half = len(self.gate_up_proj.weight) // 2
        self.columns: torch.Tensor | None
        columns = None if gate == 1 else torch.tensor([gate, 1.0]).float().repeat_interleave(half)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        if self.columns is None:
            inner = self.gate_up_proj.gated(hidden, self.activation)
        else:
            inner = self.activation(scale(self.gate_up_proj(hidden), self.columns))
        return scale(self.down_proj(inner), self.down_multiplier)


class FalconH1DecoderLayer(HybridDecoderLayer):
    """A Mamba-2 mixer and attention, which read the same input and whose outputs are added, then a dense network."""

    def __init__(self, config: ModelConfig, layer: int, options: Mamba2Options, parallel: TensorParallel) -> None:
        fields = config.fields
        # An explicit null means `mamba_expand` times the hidden size.
        is_given = fields.has("mamba_d_ssm") or "mamba_d_ssm" not in fields.values
        inner = fields.integer("mamba_d_ssm", 1024) if is_given else None
        super().__init__(
            config,
            FalconH1MLP(config, parallel),
            self_attn=FalconH1Attention(config, layer, parallel),
            recurrent=mamba_mixer(config, layer, parallel, options, inner=inner),
        )
        names = ("attention_in", "attention_out", "ssm_in", "ssm_out")
        self.multipliers = {name: fields.number(f"{name}_multiplier", 1.0) for name in names}

    def mix(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        assert self.recurrent is not None
        assert self.self_attn is not None
        by = self.multipliers
        remembered = scale(self.recurrent(scale(hidden, by["ssm_in"])), by["ssm_out"])
        attended = self.self_attn(scale(hidden, by["attention_in"]), cos, sin)
        return scale(attended, by["attention_out"], remembered)


@architecture(
    "FalconH1ForCausalLM",
    ConfigFacts(
        defaults={**MAMBA_DEFAULTS, "max_position_embeddings": 8192, "intermediate_size": 14336},
        complete=with_kv_heads,
        has_mlp_bias=True,
    ),
)
class FalconH1ForCausalLM(HybridForCausalLM):
    """Falcon-H1 with its language-model head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        self.logit_scale = config.fields.number("lm_head_multiplier", 1.0)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        gate: Gate = "alone"
        if fields.boolean("mamba_rms_norm", False):
            gate = "after the norm" if fields.boolean("mamba_norm_before_gate", True) else "before the norm"
        multipliers = fields.numbers("ssm_multipliers", 5) if fields.has("ssm_multipliers") else (1.0,) * 5
        z, x, b, c, dt = multipliers
        options = Mamba2Options(
            in_bias=fields.boolean("mamba_proj_bias", False),
            out_bias=fields.boolean("projectors_bias", False),
            conv_bias=fields.boolean("mamba_conv_bias", True),
            gate=gate,
            eps=config.rms_norm_eps,
            dt_limits=dt_limits(fields),
            multipliers=(z, x, b, c, dt),
            activation=config.activation,
        )

        def decoder_layer(layer: int) -> nn.Module:
            return FalconH1DecoderLayer(config, layer, options, parallel)

        return HybridModel(
            config, decoder_layer, parallel, embedding_multiplier=fields.number("embedding_multiplier", 1.0)
        )

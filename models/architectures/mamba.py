"""Mamba, Falcon Mamba and Mamba-2: models of selective state space layers, without attention."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import (
    HybridForCausalLM,
    HybridModel,
    OnePartDecoderLayer,
    dt_limits,
    require_divisor,
)
from models.architectures.llama import DecoderBody
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.mamba import MambaMixer, MambaShape, MixerNorms
from models.layers.mamba2 import Mamba2Mixer, Mamba2Options, Mamba2Shape
from models.parallel.tensor_parallel import TensorParallel

_PREFIX = "backbone."


def _complete(fields: Fields) -> Fields:
    """Add the epsilon under its common name, and values for fields of attention models, which are required."""
    values = {**fields.values, "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5)}
    # No layer has attention or a feed-forward part. A state has no longest context, but block tables need a limit.
    absent = {"attention_head_dim": 2, "max_position_embeddings": 1 << 17, "num_attention_heads": 1}
    absent["intermediate_size"] = fields.integer("expand") * fields.integer("hidden_size")
    return Fields({**absent, **values}, fields.where)


@architecture(
    "Mamba2ForCausalLM",
    ConfigFacts(
        defaults={"expand": 2, "conv_kernel": 4, "n_groups": 8, "state_size": 128},
        complete=_complete,
        head_dim_field="attention_head_dim",
        body_prefix=_PREFIX,
    ),
)
class Mamba2ForCausalLM(HybridForCausalLM):
    """Mamba-2 with its language-model head."""

    body_prefix: ClassVar[str] = _PREFIX
    checkpoint_modules: ClassVar[dict[str, str]] = {"embed_tokens": "embeddings", "final_norm": "norm_f"}
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""

        def decoder_layer(layer: int) -> nn.Module:
            return OnePartDecoderLayer(config, self.mixer(config, layer, parallel))

        return HybridModel(config, decoder_layer, parallel)

    @classmethod
    def mixer(cls, config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Build the layer's only sublayer."""
        fields = config.fields
        heads, dim, groups = fields.integer("num_heads"), fields.integer("head_dim"), fields.integer("n_groups")
        if heads * dim != fields.integer("expand") * config.hidden_size:
            raise fields.invalid("num_heads", f"expand times hidden_size, shared by heads of {dim}")
        require_divisor(fields, "n_groups", groups, "num_heads", heads)
        has_bias = fields.boolean("use_bias", False)
        state, taps = fields.integer("state_size"), fields.integer("conv_kernel")
        options = Mamba2Options(
            in_bias=has_bias,
            out_bias=has_bias,
            conv_bias=fields.boolean("use_conv_bias", True),
            eps=config.rms_norm_eps,
            dt_limits=dt_limits(fields),
            activation=config.activation,
        )
        shape = Mamba2Shape(config.hidden_size, heads, dim, groups, state, taps)
        return Mamba2Mixer(f"model.layers.{layer}.mixer", shape, options, parallel)


def mamba_rank(fields: Fields, name: str) -> int:
    """Read the rank of time steps; "auto" or missing means a sixteenth of the hidden size, rounded up."""
    if fields.values.get(name, "auto") in ("auto", None):
        return -(-fields.integer("hidden_size") // 16)
    return fields.integer(name)


_MAMBA_FACTS = ConfigFacts(
    defaults={"expand": 2, "conv_kernel": 4, "state_size": 16, "tie_word_embeddings": True},
    complete=_complete,
    head_dim_field="attention_head_dim",
    body_prefix=_PREFIX,
)


@architecture("MambaForCausalLM", _MAMBA_FACTS)
class MambaForCausalLM(Mamba2ForCausalLM):
    """Mamba with its language-model head."""

    caching: ClassVar[tuple[type[nn.Module], ...]] = (MambaMixer,)
    norms: ClassVar[MixerNorms] = "none"

    @classmethod
    def mixer(cls, config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Build the layer's only sublayer."""
        fields = config.fields
        shape = MambaShape(
            config.hidden_size,
            config.intermediate_size,
            fields.integer("state_size"),
            fields.integer("conv_kernel"),
            mamba_rank(fields, "time_step_rank"),
            bias=fields.boolean("use_bias", False),
            conv_bias=fields.boolean("use_conv_bias", True),
            norms=cls.norms,
            eps=fields.number("mixer_rms_eps", 1e-6),
            activation=config.activation,
        )
        return MambaMixer(f"model.layers.{layer}.mixer", shape, parallel)


@architecture("FalconMambaForCausalLM", _MAMBA_FACTS)
class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba with its language-model head."""

    norms: ClassVar[MixerNorms] = "unit"

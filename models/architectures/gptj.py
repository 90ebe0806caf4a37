"""GPT-J: attention and feed-forward in parallel, which read one layer norm, and rotation of adjacent pairs."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    ParallelDecoderLayer,
    plain_feed_forward,
)
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.norm import LayerNorm
from models.parallel.tensor_parallel import TensorParallel


class GPTJAttention(LlamaAttention):
    """Attention with rotation of adjacent pairs."""

    rotates_pairs: ClassVar[bool] = True


def _complete(fields: Fields) -> Fields:
    sizes = {
        "intermediate_size": fields.integer("n_inner", 4 * fields.integer("hidden_size")),
        "num_key_value_heads": fields.integer("num_attention_heads"),
    }
    # transformers' class has one base of rotations, whatever such fields contain.
    values = {name: value for name, value in fields.values.items() if not name.startswith("rope_")}
    return Fields({**values, **sizes}, fields.where)


def _masks(fields: Fields) -> tuple[str, ...]:
    """Names of the causal masks that old releases of transformers saved."""
    layers = range(fields.integer("num_hidden_layers"))
    names = [f"h.{layer}.attn.{name}" for layer in layers for name in ("bias", "masked_bias")]
    return (*names, *(f"transformer.{name}" for name in names))


@architecture(
    "GPTJForCausalLM",
    ConfigFacts(
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "mlp_bias": True,
            "rotary_dim": 64,
        },
        complete=_complete,
        renamed={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
        },
        head_dim_field="",
        has_rotary_dim=True,
        eps_field="layer_norm_epsilon",
        activation=("activation_function", "gelu_new"),
        has_mlp_bias=True,
        bias_field="",
        unread=_masks,
    ),
)
class GPTJForCausalLM(LlamaForCausalLM):
    """GPT-J with its language-model head."""

    attention: ClassVar[type[nn.Module]] = GPTJAttention
    checkpoint_modules: ClassVar[dict[str, str]] = {
        "down_proj": "fc_out",
        "embed_tokens": "wte",
        "input_layernorm": "ln_1",
        "layers": "h",
        "model": "transformer",
        "norm": "ln_f",
        "o_proj": "out_proj",
        "self_attn": "attn",
        "up_proj": "fc_in",
    }
    """Module of the model -> its name in checkpoints."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(
            config,
            self.attention,
            self.feed_forward,
            parallel,
            decoder_layer=ParallelDecoderLayer,
            norm=LayerNorm,
        )

    @staticmethod
    def head_bias(config: ModelConfig) -> bool:
        """Whether the logits have a bias."""
        del config
        return True

    feed_forward = staticmethod(plain_feed_forward)

"""`ModelConfig`: what config.json and generation_config.json say of a model, checked. Needs no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from models.architectures.registry import ARCHITECTURES, SUPPORTED_ARCHITECTURES, Architecture
from models.config.fields import Fields, read_config, read_generation_config
from models.config.rope import RopeConfig, parse_rope
from models.quantization.methods import QuantizationConfig, parse_quantization

# [checkpoint_config] `CheckpointConfig`: what the engine needs to know of any checkpoint, whoever runs its model.
# Needs no torch.

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """A causal language model; lengths in tokens."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest context. The server that allows less may replace it before it loads the model: the `dynamic` and
    `longrope` rotary embeddings fit themselves to it."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: what the checkpoint says that it is computed in."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion, the main one first; empty where the checkpoint names none."""

    runs_by: ClassVar[str]
    """Whose code, for the log."""


_MOST_LAYERS = 4096
"""Many times those of any checkpoint; a damaged one must not have the loader build layers for hours."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """Architecture of one checkpoint that has a model here; lengths in tokens, sizes in elements."""

    runs_by: ClassVar[str] = "Kaon's own code"

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """By layer, tokens that a query sees, its own included; None: all before it."""
    quantization: QuantizationConfig | None
    """How the checkpoint's weights are stored; None: dense."""
    fields: Fields = field(repr=False, compare=False)
    """config.json, for what only one architecture has."""

    @classmethod
    def from_checkpoint(cls, path: Path) -> "ModelConfig":
        """Read the checkpoint directory `path`. Raises `CheckpointError` naming file, field and value."""
        config = read_config(path)
        architecture = _architecture(config)
        written = ARCHITECTURES[architecture]
        config = config.with_defaults(written.defaults)
        generation = read_generation_config(path)
        _refuse_what_would_be_computed_wrong(config)
        hidden_size = config.integer("hidden_size")
        num_layers = config.integer("num_hidden_layers", maximum=_MOST_LAYERS)
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        head_dim = _head_dim(config, written, hidden_size, heads)
        # A prompt's token and a generated one.
        max_position_embeddings = config.integer("max_position_embeddings", minimum=2)
        rope = parse_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
        bos = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_model_len=max(max_position_embeddings, rope.scaled_max_len),
            rms_norm_eps=config.number("rms_norm_eps"),
            rope=rope,
            attention_bias=config.boolean("attention_bias", False),
            mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", False),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            dtype=_dtype(config),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
            sliding_windows=_sliding_windows(config, written, num_layers),
            quantization=parse_quantization(config, path),
            fields=config,
        )


def _architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        own = ", ".join(SUPPORTED_ARCHITECTURES)
        raise config.invalid("architectures", f"a list of one of {own}; model_impl auto runs others by transformers")
    return str(names[0])


def _refuse_what_would_be_computed_wrong(config: Fields) -> None:
    activation = config.string("hidden_act", "silu")
    if activation != "silu":
        raise config.invalid("hidden_act", '"silu"')


def _head_dim(config: Fields, written: Architecture, hidden_size: int, heads: int) -> int:
    if config.has(written.head_dim_field):
        return config.integer(written.head_dim_field)
    if hidden_size % heads:
        raise config.invalid("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or head_dim given")
    return hidden_size // heads


def _sliding_windows(config: Fields, written: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """By layer: as `layer_types` says, or `use_sliding_window`, or a bare `sliding_window` where that is enough."""
    kinds = config.strings("layer_types")
    if kinds:
        if len(kinds) != num_layers or not set(kinds) <= {_FULL, _SLIDING} | written.layer_kinds:
            known = " or ".join((_FULL, _SLIDING, *sorted(written.layer_kinds)))
            raise config.invalid("layer_types", f"a list of {num_layers} names, each {known}")
        windowed = [kind == _SLIDING for kind in kinds]
    elif written.full_attention_every is not None:
        every = config.integer("sliding_window_pattern", written.full_attention_every)
        windowed = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif config.has("use_sliding_window"):
        used = config.boolean("use_sliding_window", False)
        first = config.integer("max_window_layers", num_layers, minimum=0)
        windowed = [used and layer >= first for layer in range(num_layers)]
    else:
        windowed = [written.is_windowed and config.has("sliding_window")] * num_layers
    if not any(windowed):
        return (None,) * num_layers
    window = config.integer("sliding_window")
    return tuple(window if here else None for here in windowed)


def _dtype(config: Fields) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.invalid(name, f"one of {', '.join(DTYPES)}")
    return dtype

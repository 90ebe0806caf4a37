"""`CheckpointConfig` and `ModelConfig`: a checkpoint's config.json and generation_config.json, read and checked.

Importing this module imports no torch; reading a `ModelConfig` imports the architecture's model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from models.architectures.registry import ARCHITECTURES, TEXT_PARTS, ConfigFacts
from models.config.defaults import with_left_out
from models.config.fields import Fields, read_config, read_generation_config
from models.config.rope import RopeConfig, RopeContext, parse_rope, rotated_whole
from models.quantization.config import ROUNDING_FIELD, QuantizationConfig
from models.quantization.methods import parse_quantization

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names of activations in config.json, by which several mean the same."""
_MAX_LAYERS = 4096
"""Far above any checkpoint's: a damaged config.json must not make the loader build layers for hours."""
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The fields of any checkpoint that the engine needs, whichever code runs its model. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest context. A server that allows less replaces it before it loads the model."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: the dtype that the checkpoint names."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion, the main one first; empty where the checkpoint names none."""
    quantization: QuantizationConfig | None
    """The quantisation of the checkpoint's weights; None if they are dense."""

    runs_by: ClassVar[str]
    """The code that runs the model, for the log."""

    @property
    def default_max_len(self) -> int:
        """The longest context that is served by default."""
        return self.max_model_len

    def rope_context(self, served: int) -> RopeContext | None:
        """How rotary frequencies depend on a sequence's length, of up to `served` tokens; None: not at all."""
        del served
        return None


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """A checkpoint whose architecture has a model here. Lengths are in tokens, sizes in elements."""

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
    activation: str
    """That of feed-forward layers: a value of `ACTIVATIONS`."""
    sliding_windows: tuple[int | None, ...]
    """The attention window of each layer in tokens, the query's own included; None without a window."""
    fields: Fields = field(repr=False, compare=False)
    """config.json, for fields that only one architecture has."""
    is_bidirectional: bool = False
    """Whether attention is bidirectional, in a language model that is served as an encoder."""
    is_text_part: bool = False
    """Whether the checkpoint also has encoders of images or sounds, which are not read."""

    @property
    def default_max_len(self) -> int:
        """Without the stretch of a `dynamic` rope, as transformers' `max_position_embeddings`."""
        return self.rope.original_max_len if self.rope.rope_type == "dynamic" else self.max_model_len

    def rope_context(self, served: int) -> RopeContext | None:
        return self.rope.context(served)

    def require_silu(self) -> None:
        """Raise `CheckpointError` where a convolution before a recurrent state would have another activation."""
        if self.activation != "silu":
            raise self.fields.invalid("hidden_act", '"silu", which is the convolution\'s too')

    @classmethod
    def from_checkpoint(
        cls, path: Path, architecture: str | None = None, *, is_bidirectional: bool = False
    ) -> "ModelConfig":
        """Read the checkpoint directory `path`. Raises `CheckpointError` naming file, field and value.

        `architecture`: whose code computes it, where that is not the one that config.json names.
        """
        whole = read_config(path)
        config, text_architecture = text_part(whole)
        architecture = architecture or text_architecture or _architecture(config)
        facts = ARCHITECTURES[architecture].facts
        config = config.with_names(facts.renamed).with_defaults(facts.defaults)
        config = Fields({**facts.absent, **config.values}, config.where)
        config = with_left_out(config, architecture, is_text_part=text_architecture is not None)
        if facts.complete is not None:
            config = facts.complete(config)
        if not facts.rotates_parts:
            config = rotated_whole(config)
        if not facts.has_rotary_dim:
            config = Fields(
                {name: value for name, value in config.values.items() if name != "rotary_dim"}, config.where
            )
        if facts.rename is not None and config.has("quantization_config"):
            named = with_names(config.values["quantization_config"], facts.rename)
            config = Fields({**config.values, "quantization_config": named}, config.where)
        generation = read_generation_config(path)
        hidden_size = config.integer("hidden_size")
        num_layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        head_dim = _head_dim(config, facts, hidden_size, heads)
        # One token of a prompt and one generated.
        max_position_embeddings = config.integer("max_position_embeddings", minimum=2)
        rope = parse_rope(
            config,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            has_ntk_alpha=facts.has_ntk_alpha,
        )
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
            rms_norm_eps=config.number(facts.eps_field),
            rope=rope,
            attention_bias=config.boolean(facts.biases_field or facts.bias_field, False),
            mlp_bias=config.boolean(facts.biases_field or "mlp_bias", False)
            if facts.biases_field or facts.has_mlp_bias
            else False,
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            activation=_activation(config, facts),
            dtype=checkpoint_dtype(config),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
            sliding_windows=_sliding_windows(config, facts, num_layers),
            quantization=parse_quantization(config, path),
            fields=config,
            is_bidirectional=is_bidirectional,
            is_text_part=text_architecture is not None,
        )


_OF_THE_WHOLE = (
    "tie_word_embeddings",
    "quantization_config",
    ROUNDING_FIELD,
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
)
"""Fields that a checkpoint of several parts may have outside `text_config`."""
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    # As transformers 5 saves Kimi-K2.5 and Qianfan-OCR, whose old names of vision layers it applies to all.
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.encoder.layers.", "model.layers."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
    ("model.layers.", "model.layers."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
)
"""How the names of the text part's modules begin in checkpoints of several parts, and in those of text alone."""


def text_part(config: Fields) -> tuple[Fields, str | None]:
    """The text part's configuration and architecture, of a checkpoint that has more; else `config` itself and None.

    Raises `CheckpointError` for a text part that has no model here.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in TEXT_PARTS:
        return config, None
    known = TEXT_PARTS[names[0]]
    section = config.section("text_config")
    if section is None:
        # Qwen2-VL was published with the text part's fields next to the others.
        return config, next(iter(known.values()))
    kind = section.string("model_type", next(iter(known)))
    if kind not in known:
        raise section.invalid("model_type", f"one of {', '.join(known)}")
    values = {name: config.values[name] for name in _OF_THE_WHOLE if config.has(name)}
    if section.has("quantization_config"):
        values.pop("quantization_config", None)
    values = {**section.values, **values}
    if "quantization_config" in values:
        values["quantization_config"] = with_names(values["quantization_config"], lambda name: text_name(name) or name)
    return Fields(values, section.where), known[kind]


def text_name(name: str) -> str | None:
    """The name in a checkpoint of text alone of a tensor or module of one of several parts; None: of another part."""
    for prefix, own in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith(("lm_head", "mtp.")) else None


def with_names(value: Any, rename: Callable[[str], str]) -> Any:
    """A JSON value with modules' other names."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, list):
        return [with_names(item, rename) for item in value]
    if isinstance(value, dict):
        return {rename(name): with_names(item, rename) for name, item in value.items()}
    return value


def _architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        own = ", ".join(ARCHITECTURES)
        raise config.invalid("architectures", f"a list of one of {own}; model_impl auto runs others by transformers")
    return str(names[0])


def _activation(config: Fields, facts: ConfigFacts) -> str:
    name, default = facts.activation
    activation = config.string(name, default)
    if activation not in ACTIVATIONS:
        raise config.invalid(name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _head_dim(config: Fields, facts: ConfigFacts, hidden_size: int, heads: int) -> int:
    if config.has(facts.head_dim_field):
        return config.integer(facts.head_dim_field)
    if hidden_size % heads:
        raise config.invalid("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or head_dim given")
    return hidden_size // heads


def _sliding_windows(config: Fields, facts: ConfigFacts, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types`, `use_sliding_window` or a bare `sliding_window`, whichever applies."""
    kinds = config.strings("layer_types")
    windowed_kind, size_field = facts.windows
    if kinds:
        if len(kinds) != num_layers or not set(kinds) <= {_FULL, windowed_kind} | facts.layer_kinds:
            known = " or ".join((_FULL, windowed_kind, *sorted(facts.layer_kinds)))
            raise config.invalid("layer_types", f"a list of {num_layers} names, each {known}")
        windowed = [kind == windowed_kind for kind in kinds]
    elif facts.windowed_layers is not None:
        windowed = list(facts.windowed_layers(config, num_layers))
    elif facts.full_attention_every is not None:
        every = config.integer("sliding_window_pattern", facts.full_attention_every)
        windowed = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif config.has("use_sliding_window"):
        used = config.boolean("use_sliding_window", False)
        first = config.integer("max_window_layers", num_layers, minimum=0)
        windowed = [used and layer >= first for layer in range(num_layers)]
    else:
        windowed = [facts.is_windowed and config.has("sliding_window")] * num_layers
    if facts.last_layer_is_full:
        windowed[-1] = False
    if not any(windowed):
        return (None,) * num_layers
    window = config.integer(size_field)
    return tuple(window if here else None for here in windowed)


def checkpoint_dtype(config: Fields) -> str:
    """The dtype that config.json names. Raises `CheckpointError` for one that no model has."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.invalid(name, f"one of {', '.join(DTYPES)}")
    return dtype

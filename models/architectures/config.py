"""`CheckpointConfig` and `ModelConfig`: read and check a checkpoint's config.json and generation_config.json.

Importing this module does not import torch; reading a `ModelConfig` imports the architecture's module, which does.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from models.architectures.registry import ARCHITECTURES, LATENT_HEAD, TEXT_PARTS, ConfigFacts
from models.config.defaults import has_own_head, of_text_kind, with_left_out
from models.config.fields import (
    MAX_LAYERS,
    Fields,
    is_causal,
    read_config,
    read_generation_config,
    with_parts,
)
from models.config.rope import RopeConfig, RopeContext, parse_rope, rotated_whole, with_one_rope
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
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Maps names of activations in config.json to Kaon's names; several are synonyms."""
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The fields that the engine needs of every checkpoint, whichever code runs the model. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest context of the checkpoint; replaced by the server's `max_model_len`, if smaller, before loading."""
    dtype: str
    """The checkpoint's dtype: `float32`, `bfloat16` or `float16`."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion, the main one first; empty if the checkpoint defines none."""
    quantization: QuantizationConfig | None
    """The quantisation of the checkpoint's weights; None if they are dense."""

    runs_by: ClassVar[str]
    """The code that runs the model, for the log."""

    @property
    def default_max_len(self) -> int:
        """The default of `max_model_len`."""
        return self.max_model_len

    def rope_context(self, served: int) -> RopeContext | None:
        """Return how rotary frequencies depend on the length of sequences of up to `served` tokens; None if they do
        not."""
        del served
        return None


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """The configuration of an architecture that Kaon implements. Lengths are in tokens, sizes in elements."""

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
    """The activation of feed-forward layers: a value of `ACTIVATIONS`."""
    sliding_windows: tuple[int | None, ...]
    """The attention window of each layer in tokens, including the query's token; None without a window."""
    fields: Fields = field(repr=False, compare=False)
    """config.json, for fields that only one architecture has."""
    is_bidirectional: bool = False
    """Whether attention is bidirectional, because the language model is served as an encoder."""
    is_text_part: bool = False
    """Whether the checkpoint also has encoders of images or audio, which are not loaded."""

    @property
    def default_max_len(self) -> int:
        """transformers' `max_position_embeddings`, which does not include the extension by a `dynamic` rope."""
        return self.rope.original_max_len if self.rope.rope_type == "dynamic" else self.max_model_len

    def rope_context(self, served: int) -> RopeContext | None:
        return self.rope.context(served)

    @classmethod
    def from_checkpoint(
        cls, path: Path, architecture: str | None = None, *, is_bidirectional: bool = False
    ) -> "ModelConfig":
        """Read the checkpoint directory `path`. Raises `CheckpointError` naming file, field and value.

        `architecture`: the architecture that computes the model, if it is not the one in config.json.
        """
        whole = read_config(path)
        config, text_architecture = text_part(whole)
        architecture = architecture or text_architecture or _architecture(config)
        facts = ARCHITECTURES[architecture].facts
        config = with_one_rope(config)
        config = Fields({**facts.absent, **config.values, **facts.fixed}, config.where)
        config = config.with_names(facts.renamed).with_defaults(facts.defaults)
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
        if not is_bidirectional and not is_causal(config):
            raise config.invalid("is_causal", "true: a generated token sees only earlier ones")
        hidden_size = config.integer("hidden_size")
        num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
        heads = config.integer("num_attention_heads")
        # Latent attention has no KV heads, and transformers ignores the field there.
        is_latent = facts.head_dim_field == LATENT_HEAD
        kv_heads = heads if is_latent else config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        head_dim = _head_dim(config, facts, hidden_size, heads)
        # The minimum of 2 is one token of a prompt and one generated token.
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
            rms_norm_eps=config.number(facts.eps_field, may_be_zero=True),
            rope=rope,
            attention_bias=config.boolean(facts.biases_field or facts.bias_field, False),
            mlp_bias=config.boolean(facts.biases_field or "mlp_bias", False)
            if facts.biases_field or facts.has_mlp_bias
            else False,
            tie_word_embeddings=config.boolean("tie_word_embeddings", False) and not has_own_head(path),
            activation=activation_of(config, *facts.activation),
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
"""Fields that a multimodal checkpoint may have outside `text_config`."""
_THINKER = "thinker."
"""Prefix of Qwen's omni models, whose other parts make sounds, for the part that reads and writes text."""
_TEXT_PREFIXES = (
    # HyperCLOVA X is published with a whole causal model inside.
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head", "lm_head"),
    ("model.language_model.", "model."),
    # transformers 5 saves Kimi-K2.5 and Qianfan-OCR so, since it applies the renaming of vision layers to all modules.
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.encoder.layers.", "model.layers."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
    ("model.layers.", "model.layers."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
    # Cosmos 3 is published so.
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
)
"""Prefixes of the text part's modules in multimodal checkpoints, and in text-only checkpoints."""
_TEXT_NAMES = {
    **{f".self_attn.to_{part}.": f".self_attn.{part}_proj." for part in "qkv"},
    ".self_attn.to_out.": ".self_attn.o_proj.",
    ".self_attn.norm_q.": ".self_attn.q_norm.",
    ".self_attn.norm_k.": ".self_attn.k_norm.",
    ".mlp.fc1.": ".mlp.up_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
}
"""Parts of names of Cosmos 3's text part -> those of text-only checkpoints."""
_GENERATOR = re.compile(
    r"moe_gen\.|\.add_[qkv]_proj\.|\.to_add_out\.|\.norm_added_[qk]\.|_und_for_gen\."
    r"|^model\.(time_embedder\.|proj_(in|out)\.|action_)"
)
"""Matches the names of Cosmos 3's tensors that generate images, sounds and actions, which are not loaded."""


def text_part(config: Fields) -> tuple[Fields, str | None]:
    """Return the text part's configuration and architecture of a multimodal checkpoint, else `config` and None.

    Raises `CheckpointError` if the text part's architecture is not implemented.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in TEXT_PARTS:
        return config, None
    known = TEXT_PARTS[names[0]]
    section = (config.section("thinker_config") or config).section("text_config")
    if section is None:
        # Published checkpoints of Qwen2-VL and PaddleOCR-VL have the text part's fields at the top level.
        kind, text = next(iter(known.items()))
        return of_text_kind(config, kind), text
    kind = section.string("model_type", next(iter(known)))
    if kind not in known:
        raise section.invalid("model_type", f"one of {', '.join(known)}")
    values = {name: config.values[name] for name in _OF_THE_WHOLE if config.has(name)}
    if section.has("quantization_config"):
        values.pop("quantization_config", None)
    values = {**section.values, **values}
    if "quantization_config" in values:
        values["quantization_config"] = with_names(values["quantization_config"], lambda name: text_name(name) or name)
    return of_text_kind(Fields(values, section.where), kind), known[kind]


def text_name(name: str) -> str | None:
    """Map the name of a tensor or module of a multimodal checkpoint to that of a text-only one; None for other
    parts."""
    name = name.removeprefix(_THINKER)
    for prefix, own in _TEXT_PREFIXES:
        if name.startswith(prefix):
            found = with_parts(_TEXT_NAMES, own + name.removeprefix(prefix))
            return None if _GENERATOR.search(found) else found
    return name if name.startswith(("lm_head", "mtp.")) else None


def with_names(value: Any, rename: Callable[[str], str]) -> Any:
    """Apply `rename` to all strings (module names) of a JSON value."""
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


def activation_of(config: Fields, name: str, default: str) -> str:
    """The activation in a field, as a value of `ACTIVATIONS`. Raises `CheckpointError` for an unknown one."""
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
    """Return each layer's window, from `layer_types`, `use_sliding_window` or only `sliding_window`."""
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
    """Read the dtype of config.json. Raises `CheckpointError` for an unsupported one."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.invalid(name, f"one of {', '.join(DTYPES)}")
    return dtype

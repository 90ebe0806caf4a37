"""`EncoderConfig`: reads and checks config.json of an encoder. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from models.architectures.config import CheckpointConfig, checkpoint_dtype
from models.config.fields import MAX_LAYERS, Fields, read_config
from models.config.rope import RopeConfig, parse_rope
from models.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_WINDOWED = "sliding_attention"
_ROBERTA = ("RobertaModel", "XLMRobertaModel")


@dataclass(frozen=True, slots=True)
class EncoderConfig(CheckpointConfig):
    """The configuration of an encoder that Kaon implements. Lengths are in tokens, sizes in elements."""

    runs_by: ClassVar[str] = "Kaon's own code"
    tie_word_embeddings: ClassVar[bool] = False
    """Encoders have no language-model head."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    max_positions: int
    """Number of rows of the position embedding from `first_position` on, or the longest context of a rotary model."""
    first_position: int
    """Row of the position embedding for a prompt's first token; RoBERTa's rows begin after its padding token."""
    num_token_types: int
    """Number of rows of the token-type embedding; 0 if there is none."""
    ropes: tuple[RopeConfig, ...]
    """The rope of each layer; empty if positions are embedded."""
    windows: tuple[int | None, ...]
    """The attention window of each layer: number of tokens on each side; None without a window."""
    has_attention_bias: bool
    has_mlp_bias: bool
    has_norm_bias: bool
    fields: Fields = field(repr=False, compare=False)
    """config.json."""

    @classmethod
    def from_checkpoint(cls, path: Path, body: str) -> "EncoderConfig":
        """Read the checkpoint directory `path`. `body`: the encoder that computes it. Raises `CheckpointError`."""
        config = read_config(path)
        if config.section("quantization_config") is not None:
            raise CheckpointError(f"{config.where} has quantised weights, which no encoder here reads; use dense ones")
        for name in ("is_decoder", "add_cross_attention"):
            if config.boolean(name, False):
                raise config.invalid(name, "false: an encoder is served")
        heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
        if hidden_size % heads:
            raise config.invalid("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
        num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
        is_modern = body == "ModernBertModel"
        first_position = config.integer("pad_token_id", 1, minimum=0) + 1 if body in _ROBERTA else 0
        positions = config.integer("max_position_embeddings", minimum=first_position + 2)
        activation = config.string("hidden_activation" if is_modern else "hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            name = "hidden_activation" if is_modern else "hidden_act"
            raise config.invalid(name, f"one of {', '.join(ACTIVATIONS)}")
        if not is_modern and config.string("position_embedding_type", "absolute") != "absolute":
            raise config.invalid("position_embedding_type", '"absolute"')
        kinds = _layer_kinds(config, num_layers) if is_modern else ()
        return cls(
            architecture=body,
            vocab_size=config.integer("vocab_size"),
            max_model_len=positions - first_position,
            dtype=checkpoint_dtype(config),
            bos_token_id=None,
            eos_token_ids=(),
            quantization=None,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            head_dim=hidden_size // heads,
            activation=activation,
            norm_eps=config.number("norm_eps", 1e-5) if is_modern else config.number("layer_norm_eps", 1e-12),
            max_positions=positions - first_position,
            first_position=first_position,
            num_token_types=0 if is_modern else config.integer("type_vocab_size", 2),
            ropes=tuple(_rope(config, kind, hidden_size // heads, positions) for kind in kinds),
            windows=tuple(config.integer("local_attention", 128) // 2 if kind == _WINDOWED else None for kind in kinds)
            or (None,) * num_layers,
            has_attention_bias=not is_modern or config.boolean("attention_bias", False),
            has_mlp_bias=not is_modern or config.boolean("mlp_bias", False),
            has_norm_bias=not is_modern or config.boolean("norm_bias", False),
            fields=config,
        )


def _layer_kinds(config: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the kind of attention of each layer of ModernBERT."""
    kinds = config.strings("layer_types")
    if not kinds:
        every = config.integer("global_attn_every_n_layers", 3)
        kinds = tuple(_WINDOWED if layer % every else "full_attention" for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {_WINDOWED, "full_attention"}:
        raise config.invalid("layer_types", f"a list of {num_layers} names, each full_attention or {_WINDOWED}")
    return kinds


def _rope(config: Fields, kind: str, head_dim: int, positions: int) -> RopeConfig:
    """Read the rope of a kind of layer, with the field names of transformers 4 or 5."""
    by_kind = config.section("rope_parameters")
    own = None if by_kind is None else by_kind.section(kind)
    is_windowed = kind == _WINDOWED
    name, default = ("local_rope_theta", 10000.0) if is_windowed else ("global_rope_theta", 160000.0)
    parameters = Fields({"rope_type": "default"}, config.where) if own is None else own
    parameters = parameters.with_defaults({"rope_theta": config.number(name, default)})
    return parse_rope(config, head_dim=head_dim, max_position_embeddings=positions, parameters=parameters)

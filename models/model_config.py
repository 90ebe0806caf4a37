"""`ModelConfig`: what config.json and generation_config.json say of a model, checked. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from models.config_fields import Fields
from models.errors import CheckpointError
from models.registry import SUPPORTED_ARCHITECTURES
from models.rope_config import RopeConfig, parse_rope

_DTYPES = ("float32", "bfloat16", "float16")
_QWEN3_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of one checkpoint; lengths in tokens, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_model_len: int
    """Longest context. The server that allows less may replace it before it loads the model: the `dynamic` and
    `longrope` rotary embeddings fit themselves to it."""
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str
    """`float32`, `bfloat16` or `float16`: what the checkpoint says that it is computed in."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion, the main one first; empty where the checkpoint names none."""

    @classmethod
    def from_checkpoint(cls, path: Path) -> "ModelConfig":
        """Read the checkpoint directory `path`. Raises `CheckpointError` naming file, field and value."""
        config = _read_config(path)
        generation_path = path / "generation_config.json"
        generation = Fields.from_file(generation_path) if generation_path.exists() else Fields({}, "")
        architecture = _architecture(config)
        _refuse_what_would_be_computed_wrong(config)
        hidden_size = config.integer("hidden_size")
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        head_dim = _head_dim(config, architecture, hidden_size, heads)
        # A prompt's token and a generated one.
        max_position_embeddings = config.integer("max_position_embeddings", minimum=2)
        rope = parse_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
        bos = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=config.integer("num_hidden_layers"),
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
        )


def _read_config(path: Path) -> Fields:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; name the directory of a Hugging Face checkpoint")
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has no config.json; name the directory of a Hugging Face checkpoint")
    return Fields.from_file(config_path)


def _architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise config.invalid("architectures", f"a list of one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    return str(names[0])


def _refuse_what_would_be_computed_wrong(config: Fields) -> None:
    if config.has("quantization_config"):
        quantization = config.section("quantization_config")
        method = quantization.string("quant_method", "unnamed") if quantization else "unnamed"
        raise CheckpointError(
            f"quantization_config of {config.where} asks for the {method} method, but this release runs unquantised "
            "checkpoints only; use the model's original checkpoint"
        )
    sliding = config.boolean("use_sliding_window", False)
    layer_types = config.values.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.invalid("layer_types", "a list")
    if sliding or any(kind != "full_attention" for kind in layer_types):
        field = "use_sliding_window" if sliding else "layer_types"
        raise CheckpointError(
            f"{field} of {config.where} asks for attention that does not see the whole context, which this release "
            "does not compute; use a checkpoint with full attention"
        )
    activation = config.string("hidden_act", "silu")
    if activation != "silu":
        raise config.invalid("hidden_act", '"silu"')


def _head_dim(config: Fields, architecture: str, hidden_size: int, heads: int) -> int:
    if config.has("head_dim"):
        return config.integer("head_dim")
    if architecture == "Qwen3ForCausalLM":
        return _QWEN3_DEFAULT_HEAD_DIM
    if hidden_size % heads:
        raise config.invalid("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or head_dim given")
    return hidden_size // heads


def _dtype(config: Fields) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.invalid(name, f"one of {', '.join(_DTYPES)}")
    return dtype

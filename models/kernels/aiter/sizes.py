"""`Sizes`: what a model asks of the library, so that the probe computes problems of its own sizes."""

from typing import NamedTuple

from models.checkpoint_config import CheckpointConfig
from models.model_config import ModelConfig

_BLOCK = 128, 128


class Sizes(NamedTuple):
    """Of one rank's part of a model; as here where nothing is known of it."""

    hidden: int = 1024
    inner: int = 3072
    """Of the feed-forward layers that are dense."""
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    block: int = 16
    """Tokens of a block of the cache."""
    experts: int = 8
    top_k: int = 2
    expert_inner: int = 512
    has_fp8_experts: bool = False
    """Whether they are stored in FP8 with a scale for each block of 128 x 128."""


def sizes_of(config: CheckpointConfig, block: int, ranks: int) -> Sizes:
    """Of a model on so many ranks. What it does not have is as in `Sizes`."""
    usual = Sizes(block=block)
    if not isinstance(config, ModelConfig):
        return usual
    inner = config.intermediate_size
    known = usual._replace(
        hidden=config.hidden_size,
        inner=inner // ranks if inner % ranks == 0 else inner,
        heads=max(1, config.num_attention_heads // ranks),
        kv_heads=max(1, config.num_key_value_heads // ranks),
        head_dim=config.head_dim,
    )
    experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    if experts is None:
        return known
    quantization = None if config.quantization is None else config.quantization.global_quant_config
    expert_inner = _first(config, "moe_intermediate_size") or inner
    return known._replace(
        experts=experts,
        top_k=min(_first(config, "num_experts_per_tok", "num_experts_per_token") or usual.top_k, experts),
        expert_inner=expert_inner // ranks if expert_inner % ranks == 0 else expert_inner,
        has_fp8_experts=quantization is not None
        and (quantization.quant_dtype, quantization.block_shape) == ("fp8", _BLOCK),
    )


def _first(config: ModelConfig, *names: str) -> int | None:
    """A field by any of its names. It is checked where the model is built."""
    found = (config.fields.values.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)

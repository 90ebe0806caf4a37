"""`Sizes`: what a model asks of the library, so that the probe computes problems of its own sizes."""

from typing import NamedTuple


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

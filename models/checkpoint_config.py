"""`CheckpointConfig`: what the engine needs to know of any checkpoint, whoever runs its model. Needs no torch."""

from dataclasses import dataclass
from typing import ClassVar

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

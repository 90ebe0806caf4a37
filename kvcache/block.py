"""`Block`: the state of one fixed-size block of the KV cache."""

from typing import NamedTuple, TypeAlias

from kvcache.hashing import NO_HASH

UNPUBLISHED = -1
"""`uid` of a block that is not published, so that no other sequence may share it."""


class StoredBlock(NamedTuple):
    """A block that became findable by prefix look-ups, as `BlockManager.take_changes` reports it."""

    hash: int
    parent_hash: int | None
    """Digest of the previous block of its chain; None for the first block."""
    token_ids: list[int]
    adapter: int
    """Number of the LoRA adapter; 0 for the base model alone."""


Change: TypeAlias = StoredBlock | int
"""A block that became findable, or the digest of one that is no longer findable."""


class Block:
    """The state of one block, which holds the keys and values of `block_size` tokens.

    A published block has a `hash`, its `token_ids`, and the uid of its `parent`, the previous block: equal tokens and
    an equal parent prove a cache hit. Each publication has a new `uid`, so that no child refers to a block that was
    reused.
    """

    __slots__ = ("block_id", "hash", "parent", "ref_count", "token_ids", "uid")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.update(NO_HASH, [])

    def update(self, hash: int, token_ids: list[int], uid: int = UNPUBLISHED, parent: int = UNPUBLISHED) -> None:
        """Set the block's digest, tokens and `uid`, and the uid of its parent or the root of its chain."""
        self.hash = hash
        self.token_ids = token_ids
        self.uid = uid
        self.parent = parent

    def reset(self) -> None:
        """Make this an unpublished block with one reference."""
        self.ref_count = 1
        self.update(NO_HASH, [])

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hash={self.hash}, tokens={len(self.token_ids)})"

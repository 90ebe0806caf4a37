"""`Block`: the state of one fixed-size block of the KV cache."""

from typing import NamedTuple, TypeAlias

from kvcache.hashing import NO_HASH

UNPUBLISHED = -1
"""`uid` of a block that no other sequence may share."""


class StoredBlock(NamedTuple):
    """A block that became findable: what `BlockManager.take_changes` reports of it."""

    hash: int
    parent_hash: int | None
    """Digest of the block before it; None: it begins a chain."""
    token_ids: list[int]
    adapter: int
    """Number of the LoRA adapter; 0: the base model alone."""


Change: TypeAlias = StoredBlock | int
"""A block that became findable, or the digest of one that is findable no more."""


class Block:
    """KV cache of `block_size` tokens.

    A published block has a `hash`, its `token_ids`, and the uid of its `parent`, the block before it: tokens and
    parent prove a hit. `uid` is new at each publication, so that no child refers to a parent whose block was reused.
    """

    __slots__ = ("block_id", "hash", "parent", "ref_count", "token_ids", "uid")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.update(NO_HASH, [])

    def update(self, hash: int, token_ids: list[int], uid: int = UNPUBLISHED, parent: int = UNPUBLISHED) -> None:
        """Set the block's digest and content, its `uid`, and the uid of its parent, or the root of its chain."""
        self.hash = hash
        self.token_ids = token_ids
        self.uid = uid
        self.parent = parent

    def reset(self) -> None:
        """Make this a fresh block with one reference."""
        self.ref_count = 1
        self.update(NO_HASH, [])

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hash={self.hash}, tokens={len(self.token_ids)})"

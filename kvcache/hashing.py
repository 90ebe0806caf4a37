"""The prefix-hash chain: a full block's digest covers its own tokens and, through its parent's, all before."""

import struct
from collections.abc import Sequence

import xxhash

NO_HASH = -1
"""Digest of a block that has none, and the parent of a chain's first block."""


def compute_hash(token_ids: Sequence[int], prefix: int = NO_HASH) -> int:
    """xxhash64 of a block's tokens, chained to `prefix`, the digest of the block before (specification §4.1).

    Tokens are hashed as little-endian int64, so digests agree between machines.
    """
    if prefix == NO_HASH:
        return xxhash.xxh64_intdigest(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return xxhash.xxh64_intdigest(struct.pack(f"<Q{len(token_ids)}q", prefix, *token_ids))

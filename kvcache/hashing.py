"""The prefix-hash chain: a full block's digest covers its tokens and, through its parent's digest, all before them."""

import struct
from collections.abc import Sequence

import xxhash

NO_HASH = -1
"""Digest of a block that has none, and the parent of a chain's first block."""

_DIGESTS = 2**64
_ADAPTERS = 2**30


def chain_salt(cache_salt: int | None, adapter: int, rope_length: int = 0) -> int | None:
    """The start of a chain: one number for each caller's salt (64 bits), LoRA adapter and `Sequence.rope_length`.

    Adapter 0 is no adapter. Without an adapter and a length the start is the salt itself; None without all three.
    """
    number = rope_length * _ADAPTERS + adapter
    if number == 0:
        return cache_salt
    return 2 * number * _DIGESTS + (0 if cache_salt is None else _DIGESTS + cache_salt)


def adapter_of(salt: int | None) -> int:
    """The adapter in a `chain_salt`."""
    return 0 if salt is None else salt // (2 * _DIGESTS) % _ADAPTERS


def first_parent(salt: int | None) -> int:
    """The digest to which a chain's first block is chained, from its `chain_salt`."""
    if salt is None or salt < _DIGESTS:
        return NO_HASH if salt is None else salt
    return xxhash.xxh64_intdigest(salt.to_bytes(16, "little"))


def compute_hash(token_ids: Sequence[int], prefix: int = NO_HASH) -> int:
    """xxhash64 of a block's tokens, chained to `prefix`, the digest of the block before it.

    See docs/specification.md#prefix-caching. Tokens are hashed as little-endian int64, so that digests agree between
    machines.
    """
    if prefix == NO_HASH:
        return xxhash.xxh64_intdigest(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return xxhash.xxh64_intdigest(struct.pack(f"<Q{len(token_ids)}q", prefix, *token_ids))

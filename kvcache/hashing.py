"""The prefix-hash chain: a full block's digest covers its tokens and, by its parent's digest, the whole prefix."""

import struct
from collections.abc import Sequence

import xxhash

NO_HASH = -1
"""Value for a block without a digest, and for the parent of a chain's first block."""

_DIGESTS = 2**64
_ADAPTERS = 2**30


def chain_salt(cache_salt: int | None, adapter: int, rope_length: int = 0) -> int | None:
    """Combine the caller's salt (64 bits), LoRA adapter and `Sequence.rope_length` to the initial value of a chain.

    Adapter 0 means no adapter. Without adapter and length, the result is the salt itself; None without all three.
    """
    number = rope_length * _ADAPTERS + adapter
    if number == 0:
        return cache_salt
    return 2 * number * _DIGESTS + (0 if cache_salt is None else _DIGESTS + cache_salt)


def adapter_of(salt: int | None) -> int:
    """Return the adapter in a `chain_salt`."""
    return 0 if salt is None else salt // (2 * _DIGESTS) % _ADAPTERS


def first_parent(salt: int | None) -> int:
    """Return the digest that precedes a chain's first block, from its `chain_salt`."""
    if salt is None or salt < _DIGESTS:
        return NO_HASH if salt is None else salt
    return xxhash.xxh64_intdigest(salt.to_bytes(16, "little"))


def compute_hash(token_ids: Sequence[int], prefix: int = NO_HASH) -> int:
    """Return the xxhash64 of a block's tokens, chained to `prefix`, the digest of the previous block.

    See docs/specification.md#prefix-caching. Tokens are hashed as little-endian int64, so that digests agree between
    machines.
    """
    if prefix == NO_HASH:
        return xxhash.xxh64_intdigest(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return xxhash.xxh64_intdigest(struct.pack(f"<Q{len(token_ids)}q", prefix, *token_ids))

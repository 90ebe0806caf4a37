"""`BlockManager`: allocates KV-cache blocks to sequences, which share the blocks of equal prefixes.

The contract is docs/specification.md#block-manager.

The scheduler calls `allocate` when a sequence starts, `may_append` as it grows, and `deallocate` when it leaves.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Protocol

from kvcache.block import Block, Change, StoredBlock
from kvcache.block_pool import BlockPool, FreeBlocks
from kvcache.hashing import NO_HASH, adapter_of, compute_hash, first_parent

__all__ = ["RELEASED", "Block", "BlockManager", "BlockOwner"]

RELEASED = -1
"""Entry of a block table for a released block, which no later token of the sequence attends to."""


class BlockOwner(Protocol):
    """The interface of a `Sequence`, a layer above, that the block manager uses."""

    block_size: int
    token_ids: list[int]
    num_cached_tokens: int
    block_table: list[int]
    block_hashes: list[int]
    published_uid: int
    num_published_blocks: int
    num_released_blocks: int

    @property
    def cache_salt(self) -> int | None: ...
    @property
    def skips_cached_prefix(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def block(self, index: int) -> list[int]: ...


class BlockManager:
    """Paged KV-cache bookkeeping over a pool of `num_kvcache_blocks` blocks of `kv_cache_block_size` tokens.

    Constructed from any object with those attributes and `enable_prefix_caching`. Not thread-safe: it belongs to the
    scheduler's thread.
    """

    def __init__(self, config: Any, *, blocks_at_first: int | None = None) -> None:
        """`blocks_at_first` as `at_first` of `BlockPool`; None: all blocks."""
        self.block_size: int = config.kv_cache_block_size
        self.enable_prefix_caching: bool = config.enable_prefix_caching
        self.pool = BlockPool(config.num_kvcache_blocks, blocks_at_first)
        self._match: tuple[BlockOwner, int, list[int]] | None = None
        self._hashed: tuple[list[int], int | None, list[int]] | None = None
        """Tokens, salt and digests of the sequence whose prefix was looked up last."""
        self._left: deque[list[int]] = deque()
        """For each submitted step, the blocks released since its submission. They become free when it has been
        read."""

    @property
    def blocks(self) -> list[Block]:
        return self.pool.blocks

    @property
    def free_block_ids(self) -> FreeBlocks:
        return self.pool.free_block_ids

    @property
    def used_block_ids(self) -> set[int]:
        return self.pool.used_block_ids

    @property
    def hash_to_block_id(self) -> dict[int, int]:
        return self.pool.hash_to_block_id

    @classmethod
    def compute_hash(cls, token_ids: list[int], prefix: int = NO_HASH) -> int:
        """Return the digest of a full block whose previous block has the digest `prefix`; see `kvcache.hashing`."""
        return compute_hash(token_ids, prefix)

    def count_cached_tokens(self, seq: BlockOwner) -> int:
        """Return the length in tokens of the prefix of a waiting sequence that `allocate` would find in the cache."""
        return len(self.find_prefix(seq)) * self.block_size

    def may_have_cached(self, seq: BlockOwner, num_tokens: int) -> bool:
        """Return False if the cached prefix of a waiting sequence is known to be shorter than `num_tokens`. This looks
        up one block: the last one within `num_tokens` whose digest is known."""
        if num_tokens <= 0:
            return True
        if not self.enable_prefix_caching or seq.skips_cached_prefix:
            return False
        if not seq.block_hashes:
            return self.count_cached_tokens(seq) >= num_tokens
        index = min(-(-num_tokens // self.block_size), len(seq.block_hashes)) - 1
        return seq.block_hashes[index] in self.pool.hash_to_block_id

    def can_allocate(self, seq: BlockOwner) -> bool:
        """Return whether enough blocks are free for all tokens of a waiting sequence."""
        free = len(self.pool.free_block_ids)
        if free >= seq.num_blocks:
            return True
        in_use = sum(self.pool.blocks[block_id].ref_count > 0 for block_id in self.find_prefix(seq))
        return free >= seq.num_blocks - in_use

    def allocate(self, seq: BlockOwner, num_computed: int | None = None) -> None:
        """Allocate all blocks of a waiting sequence, cached ones for its known prefix.

        Publishes the full blocks among the first `num_computed` tokens, which the step being scheduled computes; all
        tokens by default. Equal prompts in one step share blocks, because each layer writes K and V before it attends.
        """
        prefix = self.find_prefix(seq)
        self._match = None
        table = [self.pool.share(block_id).block_id for block_id in prefix]
        seq.num_cached_tokens = len(prefix) * self.block_size
        seq.num_published_blocks = len(prefix)
        seq.published_uid = self.pool.blocks[prefix[-1]].uid if prefix else _chain_root(seq)
        table += [self.pool.take().block_id for _ in range(seq.num_blocks - len(prefix))]
        seq.block_table = table
        seq.num_released_blocks = 0
        self.publish(seq, seq.num_tokens if num_computed is None else num_computed)

    def publish(self, seq: BlockOwner, num_computed: int) -> None:
        """Let other sequences share the full blocks among the first `num_computed` tokens."""
        if not self.enable_prefix_caching:
            return
        full = min(num_computed, len(seq.token_ids)) // self.block_size
        for index in range(seq.num_published_blocks, full):
            block, tokens = self.pool.blocks[seq.block_table[index]], seq.block(index)
            seq.published_uid = self.pool.publish(block, _digest(seq, index, tokens), tokens, seq.published_uid)
            seq.num_published_blocks = index + 1
            if self.pool.changes is not None and block.uid == seq.published_uid:
                parent = seq.block_hashes[index - 1] if index else None
                self.pool.changes.append(StoredBlock(block.hash, parent, tokens, adapter_of(seq.cache_salt)))

    def record_changes(self) -> None:
        """Begin to record which blocks become findable and which no longer are, for `take_changes`."""
        self.pool.changes = []

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order; none if they are not recorded."""
        changes = self.pool.changes
        if not changes:
            return []
        self.pool.changes = []
        return changes

    def can_append(self, seq: BlockOwner, num_new_tokens: int = 1) -> bool:
        """Return whether enough blocks are free to compute `num_new_tokens` tokens, from the sequence's last known
        one."""
        return len(self.pool.free_block_ids) >= self._missing_blocks(seq, num_new_tokens)

    def may_append(self, seq: BlockOwner, num_new_tokens: int = 1) -> list[int] | None:
        """Reserve blocks for those tokens, and publish the blocks that known tokens fill. Returns the added block ids.

        Returns None, without any change, if `can_append` is false. Drafts may be rejected, so a block that they fill
        is published only when its tokens are known.
        """
        added: list[int] = []
        missing = self._missing_blocks(seq, num_new_tokens)
        if missing:
            if missing > len(self.pool.free_block_ids):
                return None
            added = [self.pool.take().block_id for _ in range(missing)]
            seq.block_table += added
        self.publish(seq, len(seq.token_ids))
        return added

    def can_append_all(self, growths: Iterable[tuple[BlockOwner, int]], spare: int = 0) -> bool:
        """Return whether a step can compute each sequence's number of new tokens and leave `spare` blocks free."""
        missing = sum(self._missing_blocks(seq, count) for seq, count in growths)
        return not missing or len(self.pool.free_block_ids) >= missing + spare

    def begin_step(self) -> None:
        """Note a submitted step: blocks released from now on may be read or written until it has ended."""
        self._left.append([])

    def end_step(self) -> None:
        """Note that the oldest submitted step has ended, and free the blocks that were released while it ran."""
        self.pool.release(self._left.popleft())

    def release_unseen(self, seq: BlockOwner, num_unseen: int) -> None:
        """Release the blocks that hold only tokens among a sequence's first `num_unseen`.

        Those tokens are computed, and no later step of the sequence reads them, because its model attends in a window.
        Published blocks stay findable until they are taken.
        """
        last = num_unseen // self.block_size
        if last <= seq.num_released_blocks:
            return
        self.publish(seq, num_unseen)
        self._release(seq.block_table[seq.num_released_blocks : last])
        # A scheduled batch may refer to the old table.
        seq.block_table = [RELEASED] * last + seq.block_table[last:]
        seq.num_released_blocks = last

    def deallocate(self, seq: BlockOwner) -> None:
        """Release a sequence's blocks, last one first, so that the beginning of its prefix stays cached longest."""
        self._release(seq.block_table[seq.num_released_blocks :])
        seq.block_table = []
        seq.num_cached_tokens = 0
        seq.num_published_blocks = 0
        seq.num_released_blocks = 0

    def forget(self, seq: BlockOwner) -> None:
        """Unpublish a sequence's blocks, because the step that should have filled them failed."""
        released = seq.num_released_blocks
        self.forget_blocks(seq.block_table)
        for index, digest in enumerate(seq.block_hashes[:released]):
            block_id = self.pool.hash_to_block_id.get(digest, RELEASED)
            if block_id != RELEASED and self.pool.blocks[block_id].token_ids == seq.block(index):
                self.pool.unpublish(self.pool.blocks[block_id])

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Unpublish these entries of block tables."""
        for block_id in block_ids:
            if block_id != RELEASED:
                self.pool.unpublish(self.pool.blocks[block_id])

    def forget_all(self) -> None:
        """Unpublish all blocks, so that no prefix is found, and allocate free blocks in ascending order again."""
        self.forget_blocks(list(self.pool.hash_to_block_id.values()))
        self.pool.free_block_ids.start_over()

    def check_integrity(self, sequences: Iterable[BlockOwner]) -> None:
        """Raise `AssertionError` unless the blocks' state agrees with the tables of all sequences with blocks."""
        held: Counter[int] = Counter()
        for seq in sequences:
            released = seq.num_released_blocks
            if seq.block_table[:released] != [RELEASED] * released or RELEASED in seq.block_table[released:]:
                raise AssertionError(f"{released} leading blocks should be released: {seq.block_table}")
            held.update(seq.block_table[released:])
        for left in self._left:
            held.update(left)
        self.pool.check_integrity(held)

    def _release(self, block_ids: list[int]) -> None:
        if self._left:
            self._left[-1] += reversed(block_ids)
            return
        self.pool.release(reversed(block_ids))

    def _missing_blocks(self, seq: BlockOwner, num_new_tokens: int) -> int:
        beyond = seq.num_tokens - 1 + num_new_tokens - len(seq.block_table) * self.block_size
        return -(-beyond // self.block_size) if beyond > 0 else 0

    def find_prefix(self, seq: BlockOwner) -> list[int]:
        """Return the blocks of the longest cached prefix. The result is memoised until the cache changes."""
        if not self.enable_prefix_caching or seq.skips_cached_prefix:
            return []
        if self._match is not None and self._match[0] is seq and self._match[1] == self.pool.version:
            return self._match[2]
        if not seq.block_hashes:
            self._copy_digests(seq)
        self._hashed = seq.token_ids, seq.cache_salt, seq.block_hashes
        found: list[int] = []
        parent = _chain_root(seq)
        for index in range(len(seq.token_ids) // self.block_size):
            tokens = seq.block(index)
            block = self.pool.find(_digest(seq, index, tokens), tokens, parent)
            if block is None:
                break
            found.append(block.block_id)
            parent = block.uid
        self._match = (seq, self.pool.version, found)
        return found

    def _copy_digests(self, seq: BlockOwner) -> None:
        """Copy the digests of the sequence looked up last if this one's prompt is equal: those of a request's choices
        are. To compute them takes half as long again as all else."""
        if self._hashed is None:
            return
        token_ids, salt, digests = self._hashed
        length = len(seq.token_ids)
        if salt == seq.cache_salt and len(token_ids) >= length and token_ids[:length] == seq.token_ids:
            seq.block_hashes += digests[: length // self.block_size]


def _digest(seq: BlockOwner, index: int, tokens: list[int]) -> int:
    """Return the digest of a sequence's block `index` with these tokens. It is computed once per sequence."""
    if index == len(seq.block_hashes):
        prefix = seq.block_hashes[-1] if index else first_parent(seq.cache_salt)
        seq.block_hashes.append(compute_hash(tokens, prefix))
    return seq.block_hashes[index]


def _chain_root(seq: BlockOwner) -> int:
    """Return the parent of a chain's first block: its salt, whose sign differs from that of every block's uid."""
    return -2 if seq.cache_salt is None else -3 - seq.cache_salt

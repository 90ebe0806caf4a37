"""`BlockPool`: manages the free list of blocks, their reference counts, and the index of cached prefixes.

The block manager works on sequences; the pool works on blocks.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from kvcache.block import UNPUBLISHED, Block, Change
from kvcache.hashing import NO_HASH


class FreeBlocks:
    """The free list: vacant blocks first, then cached ones, least recently used first. Every operation is O(1).

    When `at_first` blocks have been used, cached blocks are taken before unused ones, until the cache must grow.
    """

    def __init__(self, num_blocks: int, at_first: int | None = None) -> None:
        """`at_first` is the number of blocks that are used before a cached one is taken; None: all blocks."""
        self._vacant: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_blocks = num_blocks
        self._num_open = 0
        self._at_ease = num_blocks if at_first is None else min(at_first, num_blocks)
        """Number of blocks that are used before a cached one is taken."""

    @property
    def may_grow(self) -> bool:
        """Whether cached blocks are taken although some blocks were never used."""
        return self._at_ease < self._num_blocks

    def grow(self) -> None:
        """Double the number of blocks that are used before a cached one is taken."""
        self._at_ease = min(2 * self._at_ease, self._num_blocks)

    def pop(self) -> int:
        """Take a vacant block, or the least recently used cached one."""
        if self._cached and not (self._vacant and self._vacant[0] < self._num_ready):
            return self._cached.popitem(last=False)[0]
        block_id = self._vacant.popleft()
        self._num_open = max(self._num_open, block_id + 1)
        return block_id

    def claim(self, block_id: int) -> None:
        """Remove this cached block from the free list, in order to use its content."""
        del self._cached[block_id]

    def push(self, block_id: int, *, cached: bool) -> None:
        """Return a block: vacant, or as the most recently used cached one."""
        if cached:
            self._cached[block_id] = None
        else:
            # Taken again first: on a host, its memory is committed and may still be in the processor's cache.
            self._vacant.appendleft(block_id)

    def start_over(self) -> None:
        """Order the free blocks, none of which is cached, in ascending order, as if none had been used."""
        self._vacant = deque(sorted((*self._vacant, *self._cached)))
        self._cached.clear()
        self._num_open = 0

    def __len__(self) -> int:
        return len(self._vacant) + len(self._cached)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the free blocks in the order in which they would be taken."""
        vacant = list(self._vacant)
        # Vacated blocks precede unused ones, which are in ascending order.
        ready = sum(block_id < self._num_ready for block_id in vacant)
        yield from vacant[:ready]
        yield from self._cached
        yield from vacant[ready:]

    @property
    def _num_ready(self) -> int:
        """Number of leading block ids that are taken, if vacant, before any cached block."""
        return max(self._num_open, self._at_ease)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._cached or block_id in self._vacant

    def __getitem__(self, index: int) -> int:
        return list(self)[index]


class BlockPool:
    """All blocks of one KV cache. Callers must check that blocks are free; else `IndexError` or `KeyError` is
    raised."""

    def __init__(self, num_blocks: int, at_first: int | None = None) -> None:
        """`at_first` is the number of blocks that are used before cached ones are taken; None: all blocks.

        More are used if running sequences need them, and twice as many after a look-up of an evicted prefix that would
        still be cached if more blocks had been used.
        """
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_block_ids = FreeBlocks(num_blocks, at_first)
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}
        self.version = 0
        """Incremented whenever the result of a prefix look-up may have changed."""
        self.changes: list[Change] | None = None
        """Recorded changes: blocks that became findable, added by the block manager, and digests that no longer are;
        None if changes are not recorded."""
        self._next_uid = 0
        self._dropped: OrderedDict[int, None] = OrderedDict()
        """Digests of evicted blocks that would still be cached if unused blocks had been taken instead."""

    def take(self) -> Block:
        """Take a free block, with one reference. Content that it cached is evicted."""
        block = self.blocks[self.free_block_ids.pop()]
        if block.uid != UNPUBLISHED:
            self._remember(block.hash)
            self.unpublish(block)
        block.reset()
        self.used_block_ids.add(block.block_id)
        return block

    def share(self, block_id: int) -> Block:
        """Add a reference to a published block, in use or free."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            self.free_block_ids.claim(block_id)
            self.used_block_ids.add(block_id)
        block.ref_count += 1
        return block

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block. One without references is free, and its content stays findable until it is
        taken."""
        blocks = self.blocks  # 128 choices of a long prompt refer to a million blocks, which are shared.
        for block_id in block_ids:
            block = blocks[block_id]
            block.ref_count -= 1
            if not block.ref_count:
                self.used_block_ids.remove(block_id)
                self.free_block_ids.push(block_id, cached=block.uid != UNPUBLISHED)

    def find(self, hash: int, token_ids: list[int], parent: int) -> Block | None:
        """Return the published block with this digest, exactly these tokens and exactly this parent; None if none
        has."""
        block_id = self.hash_to_block_id.get(hash)
        if block_id is None:
            if hash in self._dropped:
                self._dropped.clear()
                self.free_block_ids.grow()
            return None
        block = self.blocks[block_id]
        return block if block.parent == parent and block.token_ids == token_ids else None

    def publish(self, block: Block, hash: int, token_ids: list[int], parent: int) -> int:
        """Make a full block findable. Returns the uid that is the parent of the chain's next block.

        If an equal block is already findable, the result is its uid, so that both chains continue as one. If other
        content has the same digest, that block stays findable, and this chain continues with a uid that no look-up
        finds.
        """
        owner = self.blocks[self.hash_to_block_id.setdefault(hash, block.block_id)]
        if owner is not block and owner.parent == parent and owner.token_ids == token_ids:
            return owner.uid
        uid = self._next_uid
        self._next_uid += 1
        if owner is block:
            block.update(hash, token_ids, uid, parent)
            self.version += 1
        return uid

    def unpublish(self, block: Block) -> None:
        """Make a block's content unfindable. Sequences that use the block still have it."""
        if block.uid != UNPUBLISHED:
            if self.changes is not None:
                self.changes.append(block.hash)
            del self.hash_to_block_id[block.hash]
            block.update(NO_HASH, [])
            self.version += 1

    def _remember(self, digest: int) -> None:
        if self.free_block_ids.may_grow:
            self._dropped[digest] = None
            if len(self._dropped) > len(self.blocks):
                self._dropped.popitem(last=False)

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise `AssertionError` unless the pool is consistent; `references` counts block-table entries by block."""
        free = list(self.free_block_ids)
        _check(len(free) == len(set(free)), "a block is in the free list twice")
        _check(set(free).isdisjoint(self.used_block_ids), "a block is both free and used")
        _check(len(free) + len(self.used_block_ids) == len(self.blocks), "free + used blocks are not all blocks")
        for block in self.blocks:
            expected = references.get(block.block_id, 0)
            _check(block.ref_count == expected, f"{block} is referenced {expected} times by block tables")
            _check(
                (block.block_id in self.used_block_ids) == (block.ref_count > 0),
                f"{block} is in the wrong list",
            )
            _check((block.uid == UNPUBLISHED) == (block.hash == NO_HASH), f"{block} is half published")
            if block.uid != UNPUBLISHED:
                _check(
                    self.hash_to_block_id.get(block.hash) == block.block_id,
                    f"{block} is not in the hash index",
                )
        for hash, block_id in self.hash_to_block_id.items():
            _check(self.blocks[block_id].hash == hash, f"hash index entry {hash} names {self.blocks[block_id]}")


def _check(condition: bool, message: str) -> None:
    """Like `assert`, but not removed by `python -O`: a wrong block table would answer with another request's text."""
    if not condition:
        raise AssertionError(f"KV-cache bookkeeping is broken: {message}")

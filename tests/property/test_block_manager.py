"""`BlockManager` driven at random, against a model of the contents of each block."""

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.sequence import Sequence
from kvcache.block_manager import BlockManager

BLOCK_SIZE = 2
NUM_BLOCKS = 10


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences start (perhaps in chunks), grow and end; a cached token always equals the token that it is used
    for."""

    holding = Bundle("holding")
    blocks_at_first: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(
            SimpleNamespace(kv_cache_block_size=BLOCK_SIZE, num_kvcache_blocks=NUM_BLOCKS, enable_prefix_caching=True),
            blocks_at_first=self.blocks_at_first,
        )
        self.seqs: list[Sequence] = []
        self.cells: dict[tuple[int, int], tuple[int | None, list[int]]] = {}
        self.writers: dict[tuple[int, int], Sequence] = {}

    def compute(self, seq: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            block_id = seq.block_table[position // BLOCK_SIZE]
            # The salt contains the caller's salt and the adapter.
            self.cells[block_id, position % BLOCK_SIZE] = (seq.cache_salt, seq.token_ids[: position + 1])
            self.writers[block_id, position % BLOCK_SIZE] = seq
        seq.num_computed_tokens = end

    @rule(
        target=holding,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from([None, 0, 3]),
        adapter=st.sampled_from([0, 0, 1, 2]),
        chunk=st.integers(1, 12),
    )
    def allocate(self, tokens: list[int], salt: int | None, adapter: int, chunk: int) -> Sequence | None:
        seq = Sequence(tokens, BLOCK_SIZE, id=0, cache_salt=salt, adapter=adapter)
        free = len(self.manager.free_block_ids)
        promised = self.manager.count_cached_tokens(seq)
        if not self.manager.can_allocate(seq):
            assert free < seq.num_blocks
            return None
        end = min(len(tokens), max(promised, len(tokens) - chunk, 1))
        self.manager.allocate(seq, end)
        assert seq.num_cached_tokens == promised
        self.compute(seq, min(promised, len(tokens) - 1), end)
        self.seqs.append(seq)
        return seq

    @rule(seq=holding)
    def go_on(self, seq: Sequence | None) -> None:
        """Compute the rest of a prompt, or one more token."""
        if seq is None or seq.is_finished or seq not in self.seqs:
            return
        if seq.num_computed_tokens < seq.num_tokens:
            self.manager.publish(seq, seq.num_tokens)
        else:
            seq.append_token(seq.num_tokens % 2)
            if not self.manager.can_append(seq):
                assert not len(self.manager.free_block_ids)
                seq.token_ids.pop()
                return
            self.manager.may_append(seq)
        self.compute(seq, seq.num_computed_tokens, seq.num_tokens)

    @rule(seq=holding, window=st.integers(1, 6))
    def release_unseen(self, seq: Sequence | None, window: int) -> None:
        """Release the blocks outside the window of the next token."""
        if seq in self.seqs:
            assert seq is not None
            free = len(self.manager.free_block_ids)
            self.manager.release_unseen(seq, seq.num_computed_tokens - window)
            assert len(self.manager.free_block_ids) >= free
            assert seq.num_released_blocks >= (seq.num_computed_tokens - window) // BLOCK_SIZE

    @rule(seq=holding)
    def forget(self, seq: Sequence | None) -> None:
        """The contents of the sequence's blocks may be wrong, so none of them may be found again, released ones
        included."""
        if seq in self.seqs:
            assert seq is not None
            self.manager.forget(seq)
            findable = self.manager.hash_to_block_id
            assert not set(seq.block_table).intersection(findable.values())
            # Other sequences may have computed the same blocks.
            same = [findable[digest] for digest in seq.block_hashes if digest in findable]
            assert all(self.writers[block_id, 0] is not seq for block_id in same)

    @rule(seq=consumes(holding))
    def deallocate(self, seq: Sequence | None) -> None:
        if seq in self.seqs:
            assert seq is not None
            self.seqs.remove(seq)
            self.manager.deallocate(seq)

    @invariant()
    def is_whole(self) -> None:
        self.manager.check_integrity(self.seqs)

    @invariant()
    def every_sequence_has_its_own_kv(self) -> None:
        for seq in self.seqs:
            for position in range(seq.num_released_blocks * BLOCK_SIZE, seq.num_computed_tokens):
                cell = seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert self.cells[cell] == (seq.cache_salt, seq.token_ids[: position + 1])


class GrowingBlockManagerMachine(BlockManagerMachine):
    """The same for a cache that grows with its use."""

    blocks_at_first = 2


GrowingBlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestGrowingBlockManager = GrowingBlockManagerMachine.TestCase
BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase

"""Paged KV-cache bookkeeping, as docs/specification.md#block-manager promises it, with its deviations."""

from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from engine.sequence import Sequence
from kvcache import block_manager as block_manager_module
from kvcache.block_manager import RELEASED, Block, BlockManager
from kvcache.hashing import adapter_of, chain_salt, compute_hash, first_parent

BLOCK_SIZE = 4


def make_manager(
    num_blocks: int = 8, block_size: int = BLOCK_SIZE, caching: bool = True, blocks_at_first: int | None = None
) -> BlockManager:
    return BlockManager(
        SimpleNamespace(kv_cache_block_size=block_size, num_kvcache_blocks=num_blocks, enable_prefix_caching=caching),
        blocks_at_first=blocks_at_first,
    )


def make_seq(tokens: list[int], block_size: int = BLOCK_SIZE, salt: int | None = None) -> Sequence:
    return Sequence(tokens, block_size, cache_salt=salt)


def test_block_starts_unhashed_and_reset_gives_it_one_reference() -> None:
    block = Block(3)
    assert (block.block_id, block.ref_count, block.hash, block.token_ids) == (3, 0, -1, [])
    block.update(17, [1, 2])
    assert (block.hash, block.token_ids) == (17, [1, 2])
    block.reset()
    assert (block.ref_count, block.hash, block.token_ids) == (1, -1, [])


def test_hash_is_the_specifications_chained_xxhash64_of_int64_tokens() -> None:
    tokens = [1, 2, 3, 2**31]
    plain = xxhash.xxh64(np.array(tokens).tobytes()).intdigest()
    assert BlockManager.compute_hash(tokens) == plain
    chained = xxhash.xxh64((5).to_bytes(8, "little") + np.array(tokens).tobytes()).intdigest()
    assert BlockManager.compute_hash(tokens, 5) == chained
    assert plain != chained


def test_the_digests_of_equal_prompts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 128 choices of a prompt of 131,072 tokens they took more than half of the time that streams waited."""
    manager, computed = make_manager(32), list[int]()

    def counted(token_ids: list[int], prefix: int) -> int:
        computed.append(prefix)
        return compute_hash(token_ids, prefix)

    monkeypatch.setattr(block_manager_module, "compute_hash", counted)
    prompt = list(range(10))
    first = make_seq(prompt, salt=7)
    manager.allocate(first)
    first.token_ids += [1, 2, 3]  # It has generated tokens meanwhile.
    manager.publish(first, 12)
    assert len(computed) == 3
    choices = [make_seq(prompt, salt=7) for _ in range(4)]
    assert [manager.count_cached_tokens(each) for each in choices] == [8] * 4
    assert len(computed) == 3
    choices[0].token_ids += [1, 2]
    assert manager.count_cached_tokens(choices[0]) == 12
    assert choices[1].block_hashes == first.block_hashes[:2]


def test_prompts_that_are_not_equal_have_digests_of_their_own() -> None:
    manager = make_manager(32)
    prompt = list(range(12))
    others = [make_seq(prompt), make_seq(prompt, salt=8), make_seq([*prompt[:4], *[9] * 8], salt=7)]
    for other in (*others, make_seq([*prompt[:11], 9], salt=7), make_seq([9, *prompt[1:]], salt=7)):
        manager.allocate(make_seq(prompt, salt=7))
        manager.allocate(other)
        parent, digests = first_parent(other.cache_salt), list[int]()
        for begin in range(0, 12, BLOCK_SIZE):
            parent = compute_hash(other.token_ids[begin : begin + BLOCK_SIZE], parent)
            digests.append(parent)
        assert other.block_hashes == digests


def test_chains_of_other_salts_adapters_and_rope_lengths_start_apart() -> None:
    cases = [(salt, adapter, length) for salt in (None, 0, 7) for adapter in (0, 1, 5) for length in (0, 1, 4097)]
    salts = [chain_salt(*case) for case in cases]
    assert len({first_parent(salt) for salt in salts}) == len(set(salts)) == len(cases)
    assert [adapter_of(salt) for salt in salts] == [adapter for _, adapter, _ in cases]


def test_allocate_takes_one_block_for_every_started_block_of_tokens() -> None:
    manager = make_manager()
    seq = make_seq(list(range(9)))
    manager.allocate(seq)
    assert seq.block_table == [0, 1, 2]
    assert manager.used_block_ids == {0, 1, 2}
    assert len(manager.free_block_ids) == 5
    assert [manager.blocks[i].hash != -1 for i in seq.block_table] == [True, True, False]
    manager.check_integrity([seq])


def test_an_equal_prefix_shares_blocks_while_in_use_and_after() -> None:
    manager = make_manager()
    first, second = make_seq(list(range(10))), make_seq([*range(8), 99, 98])
    manager.allocate(first)
    manager.allocate(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_cached_tokens == 8
    assert manager.blocks[first.block_table[0]].ref_count == 2
    manager.deallocate(first)
    manager.deallocate(second)
    assert len(manager.free_block_ids) == 8
    third = make_seq(list(range(10)))
    manager.allocate(third)
    assert third.num_cached_tokens == 8
    manager.check_integrity([third])


def test_after_the_first_miss_nothing_further_hits() -> None:
    manager = make_manager()
    manager.allocate(make_seq([1, 2, 3, 4, 5, 6, 7, 8]))
    other = make_seq([9, 9, 9, 9, 5, 6, 7, 8])
    manager.allocate(other)
    assert other.num_cached_tokens == 0


def test_a_full_hit_is_counted_whole() -> None:
    manager = make_manager()
    manager.allocate(make_seq(list(range(8))))
    again = make_seq(list(range(8)))
    manager.allocate(again)
    assert again.num_cached_tokens == 8


def test_adapters_never_share_with_each_other_or_the_base_model_whatever_their_salts() -> None:
    manager = make_manager(32)
    kinds = [(salt, adapter) for salt in (None, 0, 1, 2**64 - 1) for adapter in (0, 1, 2)]
    for cached in (0, 8):
        for salt, adapter in kinds:
            seq = Sequence(list(range(8)), BLOCK_SIZE, cache_salt=salt, adapter=adapter)
            manager.allocate(seq)
            assert seq.num_cached_tokens == cached
            assert len(set(seq.block_hashes)) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_a_prefix_that_may_be_cached_is_found_by_one_look_up(*, caching: bool) -> None:
    """It may be answered falsely only where the cached prefix is long enough."""
    manager = make_manager(caching=caching)
    manager.allocate(make_seq([1] * 10))
    seq = make_seq([1] * 10 + [2] * 10)
    cached = 8 if caching else 0
    for _ in range(2):
        assert [num_tokens for num_tokens in range(21) if manager.may_have_cached(seq, num_tokens)] == [
            num_tokens for num_tokens in range(21) if num_tokens <= cached
        ]
        assert manager.count_cached_tokens(seq) == cached


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = make_manager(caching=False)
    first, second = make_seq(list(range(8))), make_seq(list(range(8)))
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert set(first.block_table).isdisjoint(second.block_table)


def test_different_salts_never_share() -> None:
    manager = make_manager()
    for seq in (make_seq(list(range(8)), salt=0), make_seq(list(range(8)), salt=1), make_seq(list(range(8)))):
        manager.allocate(seq)
        assert seq.num_cached_tokens == 0
        manager.deallocate(seq)
    again = make_seq(list(range(8)), salt=1)
    manager.allocate(again)
    assert again.num_cached_tokens == 8


def test_a_digest_shared_by_other_tokens_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager_module, "compute_hash", lambda tokens, prefix: 7)
    manager = make_manager()
    first, second = make_seq([1, 2, 3, 4]), make_seq([5, 6, 7, 8])
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert set(first.block_table).isdisjoint(second.block_table)
    manager.check_integrity([first, second])


def test_equal_tokens_after_another_parent_are_no_hit_even_with_an_equal_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_manager_module, "compute_hash", lambda tokens, prefix: tokens[0])
    manager = make_manager()
    first, second = make_seq([1, 2, 3, 4, 9, 9, 9, 9]), make_seq([5, 6, 7, 8, 9, 9, 9, 9])
    salted = make_seq([1, 2, 3, 4, 9, 9, 9, 9], salt=5)
    for seq in (first, second, salted):
        manager.allocate(seq)
        assert seq.num_cached_tokens == 0
    manager.check_integrity([first, second, salted])


def test_the_tail_of_a_freed_prefix_is_recycled_before_its_head() -> None:
    manager = make_manager(num_blocks=3)
    first = make_seq([1, 1, 1, 1, 2, 2, 2, 2])
    manager.allocate(first)
    head = first.block_table[0]
    manager.deallocate(first)
    other = make_seq([3] * 8)
    manager.allocate(other)
    manager.deallocate(other)
    again = make_seq([1, 1, 1, 1, 2, 2, 2, 2])
    manager.allocate(again)
    assert again.num_cached_tokens == 4
    assert again.block_table[0] == head
    manager.check_integrity([again])


def test_vacant_blocks_are_used_before_cached_ones_and_those_least_recently_used_first() -> None:
    manager = make_manager(num_blocks=4)
    old, new = make_seq([1] * 4), make_seq([2] * 4)
    for seq in (old, new):
        manager.allocate(seq)
    old_block, new_block = old.block_table[0], new.block_table[0]
    manager.deallocate(old)
    manager.deallocate(new)
    assert list(manager.free_block_ids) == [2, 3, old_block, new_block]


def test_a_block_is_shared_only_once_the_step_that_fills_it_is_scheduled() -> None:
    manager = make_manager()
    chunked = make_seq(list(range(12)))
    manager.allocate(chunked, num_computed=5)
    assert manager.count_cached_tokens(make_seq(list(range(12)))) == 4
    manager.publish(chunked, 12)
    assert manager.count_cached_tokens(make_seq(list(range(12)))) == 12


def test_generated_blocks_are_shared_as_well() -> None:
    manager = make_manager()
    seq = make_seq([1, 2, 3])
    manager.allocate(seq)
    for token in (4, 5):
        seq.append_token(token)
        assert manager.can_append(seq)
        manager.may_append(seq)
    follow_up = make_seq([1, 2, 3, 4, 5, 6])
    manager.allocate(follow_up)
    assert follow_up.num_cached_tokens == 4


@pytest.mark.parametrize(
    ("length", "new_tokens", "blocks"), [(4, 1, 1), (5, 1, 2), (8, 1, 2), (5, 4, 2), (5, 5, 3), (4, 9, 3)]
)
def test_may_append_reserves_for_every_new_token(length: int, new_tokens: int, blocks: int) -> None:
    manager = make_manager()
    seq = make_seq([0] * 4)
    manager.allocate(seq)
    for _ in range(length - 4):
        seq.append_token(0)
    assert manager.can_append(seq, new_tokens)
    added = manager.may_append(seq, new_tokens)
    assert len(seq.block_table) == blocks
    assert added == seq.block_table[1:]


def test_can_append_needs_a_block_only_when_the_last_one_is_full() -> None:
    manager = make_manager(num_blocks=1)
    seq = make_seq([1, 2, 3])
    manager.allocate(seq)
    seq.append_token(4)
    assert manager.can_append(seq)
    seq.append_token(5)
    assert not manager.can_append(seq)
    assert manager.may_append(seq) is None
    assert seq.block_table == [0]


def test_can_allocate_counts_cached_blocks_in_use_as_free_of_cost() -> None:
    manager = make_manager(num_blocks=4)
    first = make_seq(list(range(12)))
    manager.allocate(first)
    assert manager.can_allocate(make_seq([*range(12), 50]))
    assert not manager.can_allocate(make_seq([*range(100, 108)]))


def test_cached_blocks_that_are_free_are_not_counted_twice() -> None:
    manager = make_manager(num_blocks=4)
    first = make_seq(list(range(8)))
    manager.allocate(first)
    manager.deallocate(first)
    assert manager.can_allocate(make_seq([*range(8), *range(50, 58)]))
    assert not manager.can_allocate(make_seq([*range(8), *range(50, 59)]))


def test_deallocate_clears_the_sequence_and_keeps_shared_blocks_in_use() -> None:
    manager = make_manager()
    first, second = make_seq(list(range(8))), make_seq(list(range(8)))
    manager.allocate(first)
    manager.allocate(second)
    manager.deallocate(first)
    assert first.block_table == []
    assert first.num_cached_tokens == 0
    assert manager.used_block_ids == set(second.block_table)
    manager.check_integrity([second])


def test_block_size_one_caches_every_token() -> None:
    manager = make_manager(block_size=1)
    manager.allocate(make_seq([1, 2, 3], block_size=1))
    again = make_seq([1, 2, 9], block_size=1)
    manager.allocate(again)
    assert again.num_cached_tokens == 2


def test_integrity_check_sees_a_lost_reference() -> None:
    manager = make_manager()
    seq = make_seq([1, 2, 3])
    manager.allocate(seq)
    manager.blocks[0].ref_count = 2
    with pytest.raises(AssertionError, match="referenced 1 times"):
        manager.check_integrity([seq])


def test_blocks_that_no_later_token_sees_are_free_for_others_and_still_cached() -> None:
    manager = make_manager(num_blocks=4)
    seq = make_seq(list(range(14)))
    manager.allocate(seq)
    tail = seq.block_table[2:]
    manager.release_unseen(seq, 11)
    assert seq.block_table == [RELEASED, RELEASED, *tail]
    assert (seq.num_released_blocks, len(manager.free_block_ids)) == (2, 2)
    manager.check_integrity([seq])
    assert manager.count_cached_tokens(make_seq(list(range(14)))) == 12
    other = make_seq([50] * 8)
    manager.allocate(other)
    assert set(other.block_table).isdisjoint(tail)
    manager.deallocate(seq)
    manager.check_integrity([other])
    assert seq.block_table == []


def test_a_released_block_stays_with_the_sequences_that_share_it() -> None:
    manager = make_manager()
    first, second = make_seq(list(range(9))), make_seq(list(range(9)))
    manager.allocate(first)
    manager.allocate(second)
    shared = second.block_table[0]
    manager.release_unseen(first, 4)
    assert shared in manager.used_block_ids
    manager.check_integrity([first, second])


def test_release_is_once_and_never_of_what_is_seen() -> None:
    manager = make_manager()
    seq = make_seq(list(range(9)))
    manager.allocate(seq)
    table = seq.block_table
    for num_unseen in (-5, 0, 3):
        manager.release_unseen(seq, num_unseen)
    assert seq.block_table is table
    for _ in range(2):
        manager.release_unseen(seq, 7)
        assert (seq.num_released_blocks, len(manager.free_block_ids)) == (1, 6)
    assert table == [0, 1, 2], "a scheduled batch may refer to the table as it was"


def test_appending_goes_on_behind_released_blocks() -> None:
    manager = make_manager(num_blocks=2)
    seq = make_seq([1])
    manager.allocate(seq)
    for token in range(2, 30):
        seq.append_token(token)
        manager.release_unseen(seq, seq.num_tokens - 3)
        assert manager.may_append(seq) is not None
        manager.check_integrity([seq])
    assert len(seq.block_table) == 8


def test_forgetting_covers_what_was_released() -> None:
    manager = make_manager()
    seq = make_seq(list(range(12)))
    manager.allocate(seq)
    manager.release_unseen(seq, 8)
    manager.forget(seq)
    assert manager.count_cached_tokens(make_seq(list(range(12)))) == 0


def test_integrity_check_sees_a_released_block_that_is_still_in_the_table() -> None:
    manager = make_manager()
    seq = make_seq(list(range(8)))
    manager.allocate(seq)
    seq.num_released_blocks = 1
    with pytest.raises(AssertionError, match="should be released"):
        manager.check_integrity([seq])


def run_alone(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that starts and ends."""
    seq = make_seq(tokens)
    manager.allocate(seq)
    blocks = seq.block_table
    manager.deallocate(seq)
    manager.check_integrity([])
    return blocks


def prompt_of(number: int, num_blocks: int = 2) -> list[int]:
    return [100 * number + place for place in range(num_blocks * BLOCK_SIZE)]


def test_a_cache_that_grows_with_its_use_gives_cached_blocks_out_before_unused_ones() -> None:
    manager = make_manager(num_blocks=16, blocks_at_first=4)
    used = {block for number in range(20) for block in run_alone(manager, prompt_of(number))}
    assert used == {0, 1, 2, 3}
    assert manager.count_cached_tokens(make_seq([*prompt_of(19), 7])) == 2 * BLOCK_SIZE
    whole = make_manager(num_blocks=16)
    everything = {block for number in range(20) for block in run_alone(whole, prompt_of(number))}
    assert everything == set(range(16)), "one that does not grow uses all there is"


def test_sequences_in_progress_have_as_many_blocks_as_there_are() -> None:
    manager = make_manager(num_blocks=16, blocks_at_first=4)
    seqs = [make_seq(prompt_of(number)) for number in range(8)]
    for seq in seqs:
        assert manager.can_allocate(seq)
        manager.allocate(seq)
    manager.check_integrity(seqs)
    assert sorted(block for seq in seqs for block in seq.block_table) == list(range(16))


def test_a_prefix_that_is_looked_for_after_it_was_dropped_makes_the_cache_twice_as_large() -> None:
    manager = make_manager(num_blocks=16, blocks_at_first=4)
    for number in range(3):
        run_alone(manager, prompt_of(number))
    assert manager.count_cached_tokens(make_seq([*prompt_of(0), 7])) == 0
    used = {block for number in range(20) for block in run_alone(manager, prompt_of(number + 3))}
    assert used == set(range(8))
    assert [len({*run_alone(manager, prompt_of(number))}) for number in (20, 21, 22)] == [2] * 3
    assert manager.count_cached_tokens(make_seq([*prompt_of(20), 7])) == 2 * BLOCK_SIZE, "what is in use stays"


def test_what_was_never_cached_makes_nothing_grow() -> None:
    manager = make_manager(num_blocks=16, blocks_at_first=4)
    for number in range(50):
        assert manager.count_cached_tokens(make_seq(prompt_of(number + 100))) == 0
        assert set(run_alone(manager, prompt_of(number))) <= {0, 1, 2, 3}


def test_the_order_in_which_a_growing_caches_blocks_are_listed_is_that_in_which_they_are_given_out() -> None:
    manager = make_manager(num_blocks=10, blocks_at_first=4)
    for number in range(2):
        run_alone(manager, prompt_of(number))
    listed = list(manager.free_block_ids)
    seqs = [make_seq(prompt_of(number + 50, 1)) for number in range(10)]
    for seq in seqs:
        manager.allocate(seq)
    assert [seq.block_table[0] for seq in seqs] == listed
    assert listed[4:] == [4, 5, 6, 7, 8, 9]


def test_a_cache_that_is_forgotten_is_used_from_its_first_block_on_again() -> None:
    manager = make_manager()
    manager.record_changes()
    for start in (0, 100):
        seq = make_seq(list(range(start, start + 9)))
        manager.allocate(seq)
        manager.publish(seq, 9)
        manager.deallocate(seq)
    assert manager.count_cached_tokens(make_seq(list(range(9)))) == 8
    digests = set(manager.hash_to_block_id)
    manager.take_changes()
    manager.forget_all()
    assert set(manager.take_changes()) == digests
    assert list(manager.free_block_ids) == list(range(8))
    again = make_seq(list(range(9)))
    assert manager.count_cached_tokens(again) == 0
    manager.allocate(again)
    assert again.block_table == [0, 1, 2]
    manager.check_integrity([again])

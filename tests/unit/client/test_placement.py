"""The replica that computes a request: the rule of `engine.client.placement`, case by case."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.client.placement import LIVE_TOKENS, Placement, PrefixChain, PrefixIndex, sample_boundaries
from engine.messages import AddRequest, RequestOutput
from engine.sampling_params import SamplingParams
from kvcache.hashing import compute_hash

BLOCK = 16
ENDS = sample_boundaries(BLOCK, 10_000)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def chain(tokens: list[int], salt: int | None = None) -> PrefixChain:
    made = PrefixChain(ENDS, salt)
    made.extend(tokens)
    return made


class Replicas:
    """A placement, and its choice for each request."""

    def __init__(self, size: int = 2, *, capacity: int = 100_000, by_prefix: bool = True, in_turn: bool = False):
        self.placement = Placement([capacity] * size, BLOCK, 10_000, by_prefix=by_prefix, in_turn=in_turn)
        self.all = range(size)
        self.where: dict[int, int] = {}

    def add(self, *prompts: list[int], among: list[int] | None = None, salt: int | None = None) -> list[int]:
        """Place requests that arrive together. Returns the replica of each."""
        first = len(self.where)
        requests = [
            AddRequest(first + i, prompt, SamplingParams(), cache_salt=salt) for i, prompt in enumerate(prompts)
        ]
        for replica, placed in self.placement.place(requests, among or self.all).items():
            for request in placed:
                assert request.request_id not in self.where
                self.where[request.request_id] = replica
        return [self.where[request.request_id] for request in requests]

    def begin(self, *ids: int) -> None:
        self.placement.note([RequestOutput(id, [1]) for id in ids])

    def end(self, *ids: int, tokens: list[int] | None = None) -> None:
        self.placement.note([RequestOutput(id, tokens or [1], True, "eos") for id in ids])

    def loads(self) -> list[int]:
        return [self.placement.load(replica) for replica in self.all]


# -- the chain and the index ------------------------------------------------------------------------------------


def test_landmarks_are_whole_blocks_that_lie_a_sixteenth_apart():
    ends = sample_boundaries(BLOCK, 100_000)
    assert ends[:3] == [16, 32, 48]
    assert 100 < len(ends) < 200
    assert ends[-1] >= 100_000
    for before, end in itertools.pairwise(ends):
        assert end % BLOCK == 0
        assert end - before <= max(BLOCK, before / 16)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_landmarks_suit_every_block_size(block_size: int):
    ends = sample_boundaries(block_size, 5000)
    assert all(end % block_size == 0 for end in ends)
    assert len(ends) < 140


def test_the_chain_is_that_of_the_prefix_cache():
    tokens = text(0, 40)
    first = compute_hash(tokens[:16])
    assert chain(tokens).digests == [first, compute_hash(tokens[16:32], first)]
    assert chain(tokens, 7).digests[0] == compute_hash(tokens[:16], 7)


@pytest.mark.parametrize("cut", [0, 5, 700, 1500, 2999])
def test_a_chain_goes_on_as_if_it_had_been_made_at_once(cut: int):
    tokens = text(0, 3000)
    made = chain(tokens[:cut])
    other = made.copy()
    made.extend(tokens[made.num_tokens :])
    assert made.digests == chain(tokens).digests
    assert other.num_tokens <= cut, "a copy is not drawn along"


def test_what_is_cached_is_the_longest_beginning():
    index = PrefixIndex(ENDS, 10_000)
    index.use(chain(text(0, 2000)))
    for shared in (0, 15, 16, 500, 1100, 2000):
        found = index.cached_tokens(chain(text(0, 2000)[:shared] + text(1, 900)))
        assert shared - max(BLOCK, shared / 16) < found <= shared


def test_tenants_share_nothing():
    index = PrefixIndex(ENDS, 10_000)
    index.use(chain(text(0, 500), 1))
    assert index.cached_tokens(chain(text(0, 500), 1)) == 496
    assert index.cached_tokens(chain(text(0, 500), 2)) == index.cached_tokens(chain(text(0, 500))) == 0


def test_the_index_holds_what_the_cache_does_and_forgets_ends_before_beginnings():
    index = PrefixIndex(ENDS, 320)
    index.use(chain(text(0, 320)))
    assert index.fill == 1.0
    index.use(chain(text(1, 160)))
    assert index.fill == 1.0
    assert index.cached_tokens(chain(text(1, 160))) == 160
    assert index.cached_tokens(chain(text(0, 320))) == 160
    index.clear()
    assert index.fill == 0.0


def test_a_beginning_that_is_used_again_outlives_what_is_not():
    index = PrefixIndex(ENDS, 320)
    for seed in (0, 1):
        index.use(chain(text(seed, 160)))
    index.use(chain(text(0, 160)))
    index.use(chain(text(2, 160)))
    assert [index.cached_tokens(chain(text(seed, 160))) for seed in (0, 1, 2)] == [160, 0, 160]


# -- the rule ---------------------------------------------------------------------------------------------------


def test_what_has_nothing_in_common_is_spread():
    replicas = Replicas(3)
    assert sorted(replicas.add(*(text(seed, 200) for seed in range(6)))) == [0, 0, 1, 1, 2, 2]


def test_a_request_goes_where_its_beginning_is():
    replicas = Replicas()
    first, second = replicas.add(text(0, 500), text(1, 500))
    replicas.end(0, 1)
    assert first != second
    for _ in range(3):
        assert replicas.add(text(1, 500) + text(9, 50)) == [second]
        assert replicas.add(text(0, 500) + text(9, 50)) == [first]
        replicas.end(*replicas.where)


def test_the_next_turn_of_a_chat_goes_where_the_answer_was_written():
    replicas = Replicas()
    prompt, answer = text(0, 100), text(1, 400)
    replicas.add(text(2, 100))
    (home,) = replicas.add(prompt)
    said = answer[:250]
    replicas.placement.follow(1, said)
    replicas.end(1, tokens=answer[250:])
    replicas.end(0)
    assert replicas.add(prompt + answer + text(3, 20)) == [home]
    assert replicas.loads()[home] < 100 + LIVE_TOKENS, "little of it is left to compute"


def test_a_hot_prefix_does_not_drown_one_replica_while_others_idle():
    replicas = Replicas(4)
    hot = text(0, 2000)
    places = [replicas.add(hot + text(1 + number, 20))[0] for number in range(400)]
    replicas.begin(*replicas.where)
    assert set(places) == {0, 1, 2, 3}
    assert max(replicas.loads()) - min(replicas.loads()) <= 2 * 2020
    counts = [places.count(replica) for replica in range(4)]
    assert min(counts) > 50, "once they have it too, they do their part"


def test_a_shared_prefix_stays_on_one_replica_as_long_as_that_is_not_busy():
    replicas = Replicas()
    prefix = text(0, 2000)
    places = []
    for number in range(20):
        places += replicas.add(prefix + text(1 + number, 20))
        replicas.begin(number)
        if number >= 4:
            replicas.end(number - 4)
    assert len(set(places)) == 1


def test_a_full_cache_counts_for_an_empty_one_where_little_is_shared():
    """A template's first words must not attract all conversations to one replica's cache."""
    replicas = Replicas(capacity=4000)
    words = text(0, 32)
    places = []
    for number in range(20):
        places += replicas.add(words + text(1 + number, 300))
        replicas.end(number)
    assert 6 <= places.count(0) <= 14


def test_choices_of_a_prompt_go_together_and_their_prompt_counts_once():
    replicas = Replicas()
    prompt, other = text(0, 200), text(1, 200)
    places = replicas.add(prompt, prompt, prompt, other, other)
    assert len(set(places[:3])) == len(set(places[3:])) == 1
    assert places[0] != places[3], "another prompt of the same request need not follow"
    assert sorted(replicas.loads()) == [200 + 2 * LIVE_TOKENS, 200 + 3 * LIVE_TOKENS]


def test_prompts_that_are_queued_weigh_more_than_sequences_that_generate():
    replicas = Replicas()
    replicas.add(text(0, 1000))
    assert replicas.add(text(1, 100), text(2, 100)) == [1, 1]
    replicas.begin(0)
    assert replicas.add(text(3, 100)) == [0]


def test_only_replicas_that_serve_are_chosen():
    replicas = Replicas(3)
    prompt = text(0, 500)
    (home,) = replicas.add(prompt)
    others = [each for each in range(3) if each != home]
    assert replicas.add(prompt, among=others)[0] in others


def test_what_has_ended_was_aborted_or_is_paused_weighs_nothing():
    replicas = Replicas()
    replicas.add(*(text(seed, 100) for seed in range(6)))
    replicas.begin(0, 1)
    replicas.placement.pause([0, 2, 2, 99])
    replicas.placement.resume([2, 2])
    replicas.placement.pause([2])
    replicas.placement.note([RequestOutput(3, [], True, "abort"), RequestOutput(98, [])])
    replicas.end(0, 1, 2, 4, 5)
    assert replicas.loads() == [0, 0]
    assert replicas.placement.num_live == 0


def test_paused_requests_weigh_again_when_they_go_on():
    replicas = Replicas(1)
    replicas.add(text(0, 100))
    replicas.placement.follow(0, [1] * 30)
    replicas.begin(0)
    replicas.placement.pause([0])
    assert replicas.loads() == [0]
    replicas.placement.resume([0])
    assert replicas.loads() == [LIVE_TOKENS + 2], "what it has computed is cached, in whole blocks"
    replicas.begin(0)
    assert replicas.loads() == [LIVE_TOKENS]


def test_a_prompt_that_was_not_computed_before_the_pause_still_is_to_be():
    replicas = Replicas(1)
    replicas.add(text(0, 100))
    replicas.placement.pause([0])
    replicas.placement.resume([0])
    assert replicas.loads() == [LIVE_TOKENS + 100]


@pytest.mark.parametrize("by_prefix", [True, False])
def test_what_the_cache_loses_during_a_pause_is_to_be_computed_again(by_prefix: bool):
    replicas = Replicas(1, capacity=320, by_prefix=by_prefix)
    replicas.add(text(0, 160))
    replicas.placement.follow(0, [1] * 10)
    replicas.begin(0)
    replicas.placement.pause([0])
    replicas.add(text(1, 320))
    replicas.end(1)
    replicas.placement.resume([0])
    assert replicas.loads() == [LIVE_TOKENS + 170]


def test_an_output_that_comes_after_the_pause_takes_nothing_off_the_others():
    replicas = Replicas(1)
    replicas.add(text(0, 100), text(1, 100))
    replicas.placement.pause([0])
    replicas.begin(0)
    assert replicas.loads() == [LIVE_TOKENS + 100]


def test_a_core_that_takes_another_s_place_has_the_live_prompts_to_compute_and_nothing_else():
    replicas = Replicas()
    old, live = text(0, 480), text(1, 480)
    (home,) = replicas.add(old)
    replicas.end(0)
    assert replicas.add(old + live) == [home]
    replicas.begin(1)
    replicas.placement.follow(1, [1] * 10)
    replicas.placement.begin_again(home)
    assert replicas.loads()[home] == 960 + 10 + LIVE_TOKENS
    replicas.begin(1)
    assert replicas.loads()[home] == LIVE_TOKENS
    assert replicas.add(old + live) == [home], "what is live there will be there again"
    replicas.end(1, 2)
    replicas.placement.begin_again(home)
    away = 1 - home
    replicas.add(text(5, 480), among=[away])
    replicas.end(3)
    assert replicas.add(text(5, 480)) == [away]


def test_without_prefix_caching_the_least_busy_one_is_chosen():
    replicas = Replicas(by_prefix=False)
    prompt = text(0, 200)
    assert replicas.add(list(prompt), list(prompt)) == [0, 1]
    assert replicas.loads() == [200 + LIVE_TOKENS] * 2


def test_round_robin_takes_each_in_turn_whatever_it_has_to_do():
    replicas = Replicas(3, in_turn=True)
    assert replicas.add(text(0, 9000), *(text(0, 10) for _ in range(5))) == [0, 1, 2, 0, 1, 2]


class Watched(list[int]):
    """A prompt that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_a_long_prompt_is_not_read_whole_to_be_placed():
    placement = Placement([1 << 20] * 8, BLOCK, 1 << 20, by_prefix=True)
    read = []
    for number, length in enumerate((100_000, 1_000_000)):
        prompt = Watched(range(length))
        placement.place([AddRequest(number, prompt, SamplingParams())], range(8))
        read.append(prompt.read)
    assert 1000 < read[0] < 10_000
    assert read[1] < 2 * read[0]

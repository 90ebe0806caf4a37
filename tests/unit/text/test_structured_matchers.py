"""Matchers over a vocabulary of single bytes: allowed tokens, the end, and refusals."""

import os
import threading
from queue import SimpleQueue

import numpy as np
import pytest

from engine.core.sockets import GrammarQueue
from engine.fair_shares import FairShares
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.sandbox import NICENESS
from engine.text.structured.matcher import MaskComputer, MaskedRow, Matcher, Matchers, TokenMasks, packed
from engine.text.structured.spec import GrammarSpec, InvalidGrammar, lark_of

EOS, OTHER_EOS, PAD, STOP = 256, 257, 258, 300
VOCAB_SIZE = 320
WAIT_SECONDS = 60


class ByteTokenizer:
    """Ids 0 to 255 are bytes, two are special, the others are padding without text."""

    special_ids = frozenset({EOS, OTHER_EOS})

    def token(self, token_id: int) -> str | None:
        return {EOS: "<|end|>", OTHER_EOS: "<|stop|>"}.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def make_matchers(eos: tuple[int, ...] = (EOS, OTHER_EOS)) -> Matchers:
    return Matchers(ByteTokenizer, VOCAB_SIZE, eos)  # type: ignore[arg-type, return-value]


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    matchers = make_matchers()
    matchers.load()
    return matchers


def regex(pattern: str) -> str:
    return lark_of(GrammarSpec("regex", pattern))


def allowed(matcher: Matcher, *, ends: tuple[int, ...] = (), withheld: tuple[int, ...] = ()) -> set[int]:
    mask = np.zeros((1, matcher.num_words), dtype=np.int32)
    MaskComputer()([(matcher, 0)], mask)
    assert matcher.settle(mask[0], ends, withheld)
    return set(np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist())


def test_only_what_the_grammar_allows_may_follow_and_no_padding(matchers: Matchers) -> None:
    matcher = matchers.matcher(regex("[ab]c+"))
    assert allowed(matcher) == {ord("a"), ord("b")}
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == {ord("c")}


def test_every_eos_and_stop_token_may_follow_where_the_grammar_may_end_and_nowhere_else(matchers: Matchers) -> None:
    matcher = matchers.matcher(regex("[ab]c+"))
    assert allowed(matcher, ends=(EOS, STOP)) == {ord("a"), ord("b")}
    matcher.accept(ord("a"))
    matcher.accept(ord("c"))
    assert allowed(matcher, ends=(EOS, STOP)) == {ord("c"), EOS, OTHER_EOS, STOP}
    assert not matcher.is_complete


def test_withheld_ends_are_not_allowed_while_anything_else_is(matchers: Matchers) -> None:
    matcher = matchers.matcher(regex("ac*"))
    matcher.accept(ord("a"))
    assert allowed(matcher, ends=(STOP,), withheld=(EOS, OTHER_EOS, STOP)) == {ord("c")}
    done = matchers.matcher(regex("a"))
    done.accept(ord("a"))
    assert allowed(done, withheld=(EOS, OTHER_EOS)) >= {EOS}


@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_it_is_complete_when_nothing_may_follow_or_an_eos_did(matchers: Matchers, end: int) -> None:
    exact = matchers.matcher(regex("ab"))
    exact.accept(ord("a"))
    assert not exact.is_complete
    exact.accept(ord("b"))
    assert exact.is_complete
    open_ended = matchers.matcher(regex("a*"))
    assert open_ended.accept(end)
    assert open_ended.is_complete


def test_a_token_that_the_grammar_forbids_is_refused_with_a_reason(matchers: Matchers) -> None:
    matcher = matchers.matcher(regex("ab"))
    assert not matcher.accept(ord("x"))
    assert matcher.error is not None
    assert "grammar" in matcher.error


def test_sequences_of_one_grammar_do_not_move_each_other(matchers: Matchers) -> None:
    first = matchers.matcher(regex("[ab]c"))
    second = matchers.cached(regex("[ab]c"))
    assert second is not None
    first.accept(ord("a"))
    assert allowed(second) == {ord("a"), ord("b")}


def test_a_grammar_that_cannot_be_compiled_is_refused_and_not_kept(matchers: Matchers) -> None:
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="nope"):
            matchers.matcher("start: nope")
    assert matchers.cached("start: nope") is None


def test_a_model_without_eos_ends_where_the_grammar_does() -> None:
    matchers = make_matchers(())
    matchers.load()
    matcher = matchers.matcher(regex("ab?"))
    matcher.accept(ord("a"))
    masks, failed = TokenMasks().fill([MaskedRow(0, matcher)], VOCAB_SIZE)
    assert not failed
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [ord("b")]


def test_masks_of_a_grammar_and_of_allowed_tokens_are_intersected(matchers: Matchers) -> None:
    grammar = matchers.matcher(regex("[abc]"))
    rows = [
        MaskedRow(3, grammar, allowed=packed([ord("b"), 300], VOCAB_SIZE)),
        MaskedRow(5, allowed=packed([0, 31, 32, VOCAB_SIZE - 1], VOCAB_SIZE)),
    ]
    masks, failed = TokenMasks().fill(rows, VOCAB_SIZE)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert not failed
    assert np.flatnonzero(bits[0]).tolist() == [ord("b")]
    assert np.flatnonzero(bits[1]).tolist() == [0, 31, 32, VOCAB_SIZE - 1]


def test_a_grammar_too_costly_to_follow_fails_its_row_and_no_other(matchers: Matchers) -> None:
    costly = matchers.matcher("start: A\nA: /(?s:.*)/ & ~/(?s:.*)(a|b|c)(?s:.{15})d(?s:.*)/")
    fine = matchers.matcher(regex("[ab]+"))
    masks = TokenMasks()
    chance = np.random.default_rng(0)
    for _ in range(200):
        _, failed = masks.fill([MaskedRow(0, fine), MaskedRow(1, costly)], VOCAB_SIZE)
        if failed or not costly.accept(int(chance.choice([ord(c) for c in "abcd"]))):
            break
        fine.accept(ord("a"))
    assert costly.error is not None
    assert "too costly" in costly.error
    assert fine.error is None


class Admitted:
    """The consumer of a `GrammarQueue`'s sequences."""

    def __init__(self, matchers: Matchers) -> None:
        self.queue: SimpleQueue[Sequence] = SimpleQueue()
        self.refused: SimpleQueue[tuple[int, str, bool]] = SimpleQueue()
        self.admission = GrammarQueue(
            matchers, self.queue.put, lambda seq, error, bad: self.refused.put((seq.id, error, bad))
        )

    def add(self, id: int, grammar: str, owner: str = "") -> None:
        self.admission.add(Sequence([1], 16, SamplingParams(grammar=grammar), id=id, owner=owner))


def test_a_sequence_is_admitted_with_its_matcher() -> None:
    admitted = Admitted(make_matchers())
    admitted.add(7, regex("ab"))
    seq = admitted.queue.get(timeout=WAIT_SECONDS)
    assert seq.id == 7
    assert seq.matcher is not None
    assert allowed(seq.matcher) == {ord("a")}


def test_a_bad_grammar_is_refused_as_the_request_s_fault_and_others_are_admitted() -> None:
    admitted = Admitted(make_matchers())
    admitted.add(1, "start: nope")
    admitted.add(2, regex("ab"))
    assert admitted.queue.get(timeout=WAIT_SECONDS).id == 2
    seq_id, error, bad_request = admitted.refused.get(timeout=WAIT_SECONDS)
    assert (seq_id, bad_request) == (1, True)
    assert "nope" in error


def test_a_vocabulary_that_cannot_be_read_fails_requests_as_the_engine_s_fault() -> None:
    def unreadable() -> ByteTokenizer:
        raise ValueError("tokenizer.json is damaged")

    admitted = Admitted(Matchers(unreadable, VOCAB_SIZE, [EOS]))  # type: ignore[arg-type]
    admitted.add(1, regex("ab"))
    _, error, bad_request = admitted.refused.get(timeout=WAIT_SECONDS)
    assert not bad_request
    assert "tokenizer.json is damaged" in error


def test_a_panic_of_the_library_fails_its_request_and_those_behind_it_are_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        """Like a panic of native code, which is no `Exception`."""

    def matcher(grammar: str) -> Matcher:
        if grammar == "panic":
            raise Panic("index out of bounds")
        return compile_grammar(grammar)

    matchers = make_matchers()
    compile_grammar = matchers.matcher
    monkeypatch.setattr(matchers, "matcher", matcher)
    admitted = Admitted(matchers)
    admitted.add(1, "panic")
    admitted.add(2, regex("ab"))
    seq_id, error, bad_request = admitted.refused.get(timeout=WAIT_SECONDS)
    assert (seq_id, bad_request) == (1, False)
    assert "index out of bounds" in error
    assert admitted.queue.get(timeout=WAIT_SECONDS).id == 2


def test_an_aborted_sequence_is_taken_back_while_its_grammar_is_compiled_and_only_then() -> None:
    may_load = threading.Event()

    def slow() -> ByteTokenizer:
        assert may_load.wait(WAIT_SECONDS)
        return ByteTokenizer()

    admitted = Admitted(Matchers(slow, VOCAB_SIZE, [EOS]))  # type: ignore[arg-type, return-value]
    admitted.add(1, regex("ab"))
    admitted.add(2, regex("ab"))
    assert admitted.admission.cancel([1, 9]) == [1]
    may_load.set()
    assert admitted.queue.get(timeout=WAIT_SECONDS).id == 2
    assert admitted.queue.empty()
    assert admitted.admission.cancel([1, 2]) == []


def test_a_grammar_does_not_wait_for_all_those_of_another_owner() -> None:
    may_load = threading.Event()

    def slow() -> ByteTokenizer:
        may_load.wait()
        return ByteTokenizer()

    admitted = Admitted(Matchers(slow, VOCAB_SIZE, [EOS]))  # type: ignore[arg-type, return-value]
    for id in range(5):
        admitted.add(id, regex(f"a{{{id + 1}}}"), "heavy")
    admitted.add(9, regex("b"), "light")
    may_load.set()
    order = [admitted.queue.get(timeout=WAIT_SECONDS).id for _ in range(6)]
    assert order.index(9) <= 1
    assert [id for id in order if id != 9] == [0, 1, 2, 3, 4]


def test_the_next_owner_is_found_without_looking_at_all_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, looked_at, served = threading.Event(), 0, FairShares.served

    def slow() -> ByteTokenizer:
        may_load.wait()
        return ByteTokenizer()

    def counted(shares: FairShares, owner: str) -> float:
        nonlocal looked_at
        looked_at += 1
        return served(shares, owner)

    monkeypatch.setattr(FairShares, "served", counted)
    admitted = Admitted(Matchers(slow, VOCAB_SIZE, [EOS]))  # type: ignore[arg-type, return-value]
    for id in range(200):
        admitted.add(id, regex("ab"), f"owner {id % 2}")
    may_load.set()
    assert {admitted.queue.get(timeout=WAIT_SECONDS).id for _ in range(200)} == set(range(200))
    assert looked_at <= 10 * 200


def test_grammars_are_compiled_at_a_lower_priority_but_the_vocabulary_is_not_read_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities = []

    def note_priority() -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def load() -> ByteTokenizer:
        note_priority()
        return ByteTokenizer()

    def compile_grammar(grammar: str) -> Matcher:
        note_priority()
        return matcher(grammar)

    matchers = Matchers(load, VOCAB_SIZE, [EOS])  # type: ignore[arg-type, return-value]
    matcher = matchers.matcher
    monkeypatch.setattr(matchers, "matcher", compile_grammar)
    admitted = Admitted(matchers)
    admitted.add(1, regex("ab"))
    admitted.queue.get(timeout=WAIT_SECONDS)
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities == [normal, min(normal + NICENESS, 19)]


def test_the_time_of_compiling_is_charged_to_the_first_sequence_alone() -> None:
    admitted = Admitted(make_matchers())
    for id in range(2):
        admitted.add(id, regex("ab+c"))
    first, second = (admitted.queue.get(timeout=WAIT_SECONDS).matcher for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.uncharged_seconds > 0.0
    assert second.uncharged_seconds == 0.0


@pytest.mark.parametrize("num_cpus", [2, 8])
def test_masks_are_the_same_in_parallel(matchers: Matchers, num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two CPUs the calling thread computes them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cpus)))
    rows = [MaskedRow(row, matchers.matcher(regex(f"[{first}-z]"))) for row, first in enumerate("abc")]
    masks, failed = TokenMasks().fill(rows, VOCAB_SIZE)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert not failed
    assert [np.flatnonzero(row).tolist() for row in bits] == [list(range(ord(first), 123)) for first in "abc"]
    assert all(row.matcher is not None and row.matcher.uncharged_seconds > 0.0 for row in rows)


def test_a_grammar_known_already_waits_for_no_other() -> None:
    matchers = make_matchers()
    matchers.load()
    matchers.matcher(regex("ab"))
    admitted = Admitted(matchers)
    admitted.add(1, regex("ab"))
    assert admitted.queue.get_nowait().id == 1


def test_a_grammar_of_which_a_matcher_failed_is_compiled_again(matchers: Matchers) -> None:
    """The lexer's states, which all matchers of the compilation share, may be exhausted."""
    grammar = regex("[ab]c+d")
    assert not matchers.matcher(grammar).accept(ord("z"))
    assert matchers.cached(grammar) is None
    assert matchers.matcher(grammar).accept(ord("a"))


def test_grammars_whose_masks_took_long_leave_the_cache(matchers: Matchers) -> None:
    grammars = [regex(f"[ab]c{{{number}}}") for number in range(1, 5)]
    made = [matchers.matcher(grammar) for grammar in grammars]
    for matcher in made[:3]:
        matcher.grammar.seconds = 3.0
    made[3].grammar.seconds = 5.0
    assert matchers.cached(grammars[3]) is None
    matchers.matcher(regex("another"))
    assert [matchers.cached(grammar) is not None for grammar in grammars[:3]] == [False, True, True]


def test_where_memory_is_short_the_costliest_grammars_end(matchers: Matchers) -> None:
    used = [0]
    masks = TokenMasks(MaskComputer(lambda: used[0]))
    rows = [MaskedRow(row, matchers.matcher(regex(f"[ab]d{{1,{row + 5}}}"))) for row in range(3)]
    for row, seconds in zip(rows, (0.1, 0.7, 0.9), strict=True):
        assert row.matcher is not None
        row.matcher.grammar.seconds = seconds
    for num_bytes, ended in ((0, set[int]()), (2**30, set[int]()), (3 * 2**30, {1, 2})):
        used[0] = num_bytes
        failed = [masks.fill(rows, VOCAB_SIZE)[1] for _ in range(16)][-1]
        assert set(failed) == ended
    assert "need too much memory" in failed[1]

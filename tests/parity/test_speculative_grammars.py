"""Drafts of sequences that follow a grammar: answers are those without drafts, and each position has its own mask."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.sampling.parameters import SamplingColumns
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.structured.matcher import Matcher, Matchers, TokenMasks
from engine.text.structured.spec import GrammarSpec, lark_of
from tests.parity.paged_model import prompt
from tests.parity.test_model_drafters import Steps, by_model
from tests.parity.test_worker_model_runner import checkpoint, runner_for

__all__ = ["checkpoint"]

VOCAB_SIZE, EOS = 160, 1


class Bytes:
    """Each token is the byte of its id; one is special."""

    special_ids = frozenset({EOS})

    def token(self, token_id: int) -> str | None:
        return "<|end|>" if token_id == EOS else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    matchers = Matchers(Bytes, VOCAB_SIZE, (EOS,))  # type: ignore[arg-type, return-value]
    matchers.load()
    return matchers


def matcher_of(matchers: Matchers, pattern: str) -> Matcher:
    return matchers.matcher(lark_of(GrammarSpec("regex", pattern)))


PATTERNS = ("(a[bc]d)+", "(ab){1,9}", "[a-d]+", "x[yz]{3}w")


def followers(matchers: Matchers) -> list[Sequence]:
    """Sequences with a grammar, greedy and seeded, and two without."""
    made = []
    for i, pattern in enumerate((*PATTERNS, *PATTERNS, None, None)):
        how: dict[str, Any] = {"temperature": 0.0} if i < len(PATTERNS) else {"temperature": 0.9, "seed": i}
        if i == 2:
            how["presence_penalty"] = 0.5
        params = SamplingParams(**how, max_tokens=24)
        seq = Sequence(prompt(4 + 5 * i, seed=i, vocab_size=VOCAB_SIZE), 16, params, id=i)
        seq.end_tokens = frozenset({EOS})
        seq.matcher = None if pattern is None else matcher_of(matchers, pattern)
        made.append(seq)
    return made


NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


@pytest.mark.parametrize("drafter", ["lookup", "model", "model, rejection"])
def test_drafts_change_no_answer_that_follows_a_grammar(checkpoint: Path, matchers: Matchers, drafter: str) -> None:
    expected = Steps(runner_for(checkpoint)).run(followers(matchers))
    assert all(len(tokens) > 3 for tokens in expected)
    fields = {"speculative_config": NGRAM} if drafter == "lookup" else by_model(checkpoint)
    if drafter == "model, rejection":
        fields["speculative_config"]["speculative_acceptance"] = "rejection"
    steps = Steps(runner_for(checkpoint, **fields))
    seqs = followers(matchers)
    found = steps.run(seqs)
    if drafter == "model, rejection":
        assert found[: len(PATTERNS)] == expected[: len(PATTERNS)]
    else:
        assert found == expected
    # Text that follows grammars repeats itself, and a model agrees with itself.
    assert steps.scheduler.total_accepted_tokens > 20
    for seq, pattern in zip(seqs, (*PATTERNS, *PATTERNS), strict=False):
        follows = matcher_of(matchers, pattern)
        assert all(follows.accept(token) for token in seq.completion_token_ids if token != EOS)


def masks_after(matcher: Matcher, tokens: list[int], most: int) -> list[set[int]]:
    """The allowed tokens after the first 0 to `most` of the tokens, by the masks of one step's rows."""
    seq = Sequence([5, 6], 16, SamplingParams())
    seq.end_tokens, seq.matcher = frozenset({EOS}), matcher
    columns = SamplingColumns(max_num_seqs=2, vocab_size=VOCAB_SIZE, seed=0)
    columns.write(1, seq)
    table = np.zeros((2, 16), dtype=np.int32)
    table[1, : 2 + len(tokens)] = [5, 6, *tokens]
    rows = columns.rows(np.ones(most + 1, dtype=np.int64), 2 + np.arange(most + 1), table)
    assert rows.masked is not None
    masks, failed = TokenMasks().fill(rows.masked, VOCAB_SIZE)
    assert not failed
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=VOCAB_SIZE, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_each_position_has_the_mask_after_its_drafts(matchers: Matchers) -> None:
    matcher = matcher_of(matchers, "ab[cd]e?")
    a, b, c, d, e = b"abcde"
    assert masks_after(matcher, [a, b, d], 3) == [{a}, {b}, {c, d}, {e, EOS}]
    # The sequence's own matcher has not changed.
    assert masks_after(matcher, [a], 0) == [{a}]


def test_after_a_draft_that_the_grammar_refuses_nothing_is_masked(matchers: Matchers) -> None:
    """Its own position's mask excludes it, so that no later one counts."""
    matcher = matcher_of(matchers, "ab[cd]e?")
    a, b, x = b"abx"
    everything = set(range(VOCAB_SIZE))
    assert masks_after(matcher, [a, x, b], 3) == [{a}, {b}, everything, everything]


def test_positions_of_a_later_step_begin_at_the_sequence(matchers: Matchers) -> None:
    """The same drafts follow another state of the grammar."""
    matcher = matcher_of(matchers, "aaab")
    a, b = b"ab"
    seq = Sequence([5], 16, SamplingParams())
    seq.end_tokens, seq.matcher = frozenset({EOS}), matcher
    columns = SamplingColumns(max_num_seqs=1, vocab_size=VOCAB_SIZE, seed=0)
    columns.write(0, seq)
    table = np.full((1, 8), a, dtype=np.int32)
    found = []
    for _ in range(3):
        rows = columns.rows(np.zeros(2, dtype=np.int64), len(seq.token_ids) + np.arange(2), table)
        masks, _ = TokenMasks().fill(rows.masked or [], VOCAB_SIZE)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=VOCAB_SIZE, bitorder="little")
        found.append([np.flatnonzero(row).tolist() for row in bits])
        seq.token_ids.append(a)
        assert matcher.accept(a)
    assert found == [[[a], [a]], [[a], [a]], [[a], [b]]]


def test_drafts_are_cut_where_the_grammar_refuses_them(matchers: Matchers) -> None:
    matcher = matcher_of(matchers, "(ab)+c")
    a, b, c, x = b"abcx"
    assert matcher.count_allowed([a, b, a, x]) == 3
    assert matcher.count_allowed([x]) == 0
    assert matcher.count_allowed([a, b, c]) == 3
    assert matcher.accept(a)
    assert matcher.count_allowed([b, a]) == 2

"""`LogprobRoom`: which answers run, wait, are refused or end when log probabilities fill the memory."""

from collections import deque

import pytest

from server.errors import Overloaded
from server.limits.accounts import Accounts
from server.streaming import logprob_room
from server.streaming.logprob_room import HeldLogprobs, LogprobRoom


class Answers:
    """Answers of several owners, each step of which adds one byte to all that run."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.room = LogprobRoom(self.accounts)
        self.held: list[HeldLogprobs] = []
        self.ended: list[HeldLogprobs] = []
        self.most_bytes = self.num_suspensions = 0

    def admit(self, party: str, most_bytes: int, num_bytes: int = 0) -> HeldLogprobs:
        def suspend() -> None:
            self.num_suspensions += 1

        def end(error: Exception) -> None:
            self.held.remove(answer)
            self.ended.append(answer)

        answer = HeldLogprobs(party, most_bytes, suspend, lambda: None, end)
        self.room.admit(answer, num_bytes)
        self.held.append(answer)
        return answer

    def step(self, length: int) -> int:
        """Returns the number of answers that are complete, with `length` bytes, after this step."""
        complete = 0
        for answer in [each for each in self.held if each.is_read and not each.is_suspended]:
            if answer not in self.held or answer.is_suspended:
                continue
            try:
                self.room.grow(answer, 1)
            except Overloaded:
                self.held.remove(answer)
                self.ended.append(answer)
                continue
            self.most_bytes = max(self.most_bytes, self.accounts.total("logprob_bytes"))
            if answer.num_bytes == length:
                self.held.remove(answer)
                self.room.release(answer)
                complete += 1
        return complete


@pytest.mark.parametrize("num_lines", [32, 64])
@pytest.mark.parametrize("times_longer", [1, 8])
def test_all_tokens_of_many_long_answers_of_one_owner_are_used(
    num_lines: int, times_longer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of 16k tokens with 20 alternatives, 29 of 512 MiB each, whose limit may be higher. Those that grew first
    beyond the bound were ended, and tried again from the start: 68 % of the tokens of 32 lines were used, and a
    quarter of those of 64."""
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 5120)
    answers, waiting = Answers(), deque(range(num_lines))
    complete = steps = 0
    while complete < num_lines:
        while waiting:
            try:
                answers.admit("batches", 290 * times_longer)
            except Overloaded:
                break
            waiting.popleft()
        steps += 1
        assert steps < 290 * num_lines
        complete += answers.step(290)
    assert not answers.ended
    assert answers.most_bytes <= 5120
    assert answers.num_suspensions < 3 * num_lines, "each computes an answer's tokens again, as a prompt"
    assert steps < 290 * num_lines / 6, "on average, at least six run"
    assert not answers.accounts.total("logprob_bytes")
    assert not answers.room._answers
    assert not answers.room._crowded


def test_answers_are_refused_while_others_of_the_owner_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 100)
    answers = Answers()
    older, younger = (answers.admit("heavy", 60) for _ in range(2))
    light = answers.admit("light", 10)
    answers.room.grow(light, 1)
    light.is_read = False
    for _ in range(38):
        answers.step(60)
    assert [older.is_suspended, younger.is_suspended] == [False, True]
    with pytest.raises(Overloaded, match="shared among 2 keys or addresses; ask for fewer"):
        answers.admit("heavy", 1)
    answers.admit("light", 10).is_read = False
    while older in answers.held:
        answers.step(60)
    assert not younger.is_suspended
    assert not light.is_suspended
    answers.admit("heavy", 1)


def test_answers_wait_for_none_that_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 100)
    answers = Answers()
    unread, next_one = (answers.admit("me", 90) for _ in range(2))
    for _ in range(38):
        answers.step(90)
    assert [unread.is_suspended, next_one.is_suspended] == [False, True]
    answers.room.read(unread, False)
    assert [unread.is_suspended, next_one.is_suspended] == [True, False]
    answers.room.read(unread, True)
    assert [unread.is_suspended, next_one.is_suspended] == [False, True]
    answers.room.read(unread, False)
    answers.room.release(next_one)
    assert not unread.is_suspended


def test_beyond_the_bound_the_youngest_answer_of_a_large_owner_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_room, "MAX_LOGPROB_BYTES", 100)
    answers = Answers()
    light = answers.admit("light", 50, 30)
    older = answers.admit("heavy", 200, 30)
    younger = answers.admit("heavy", 200, 10)
    answers.room.grow(older, 25)
    assert younger.is_suspended
    answers.room.grow(older, 6)
    assert answers.ended == [younger]
    assert answers.accounts.total("logprob_bytes") == 91
    answers.room.grow(light, 15)
    assert answers.ended == [younger]
    with pytest.raises(Overloaded):
        answers.room.grow(older, 1)
    assert answers.accounts.total("logprob_bytes") == 45
    answers.room.grow(light, 100)  # Alone, it may have more.
    answers.room.release(light)
    answers.room.release(light)
    assert not answers.accounts.total("logprob_bytes")

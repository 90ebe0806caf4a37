"""`LogprobRoom`: bounds the memory for the log probabilities of answers that are not complete. Functions count them.

All answers of an owner run until the owner holds its equal part of three quarters of the bound and all owners together
hold more than these three quarters. Then further answers of the owner are refused, and only its oldest answers run, as
many as there is room for. The others are suspended, and continue in the order of their admission as answers complete,
so that nothing that was computed is lost.

The token limit of an answer is often the whole context, which does not show how long the answer will be. So each
answer is expected to grow to twice its present size, and is given a new expected size once it has. An eighth of the
bound is kept for the oldest answer, which always runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import TokenLogprobs
from server.errors import ApiError, Overloaded
from server.limits.accounts import Accounts

MAX_LOGPROB_BYTES = 2**29
"""Bytes of log probabilities of all incomplete answers. Beyond it, the youngest answer of an owner with its equal part
is ended when one of the owner's grows."""

_RETRY_SECONDS = 1.0

_TOKEN_BYTES, _ALTERNATIVE_BYTES = 256, 80
"""Bytes of one token's log probability, and of each alternative's."""


def num_logprobs(positions: Sequence[TokenLogprobs] | None) -> int:
    """Return the number of log probabilities, of tokens and their alternatives."""
    return len(positions) * (1 + len(positions[0].top_ids)) if positions else 0


def num_logprob_bytes(positions: Sequence[TokenLogprobs] | None) -> int:
    """Return the approximate bytes of these log probabilities."""
    return bytes_for_logprobs(len(positions), len(positions[0].top_ids)) if positions else 0


def bytes_for_logprobs(num_tokens: int, num_alternatives: int) -> int:
    """Return the approximate bytes of the log probabilities of so many tokens, each with its alternatives."""
    return num_tokens * (_TOKEN_BYTES + _ALTERNATIVE_BYTES * num_alternatives)


@dataclass(eq=False, slots=True)
class HeldLogprobs:
    """The log probabilities of one answer."""

    party: str
    most_bytes: int
    """The most bytes that they can have when the answer is complete."""
    suspend: Callable[[], object]
    resume: Callable[[], object]
    """Called only while the client reads the answer."""
    end: Callable[[ApiError], object]
    num_bytes: int = 0
    expected_bytes: int = 0
    """Bytes that they are expected to reach. Up to date only while the owner has suspended answers."""
    is_suspended: bool = False
    is_read: bool = True
    """Whether the client reads the answer. Other answers do not wait for the completion of one that is not read."""


class LogprobRoom:
    """The log probabilities of a model's incomplete answers. Those of all models have one bound."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._answers: dict[str, dict[HeldLogprobs, None]] = {}
        """By party, in the order of admission."""
        self._crowded: set[str] = set()
        """Parties with suspended answers."""

    def admit(self, answer: HeldLogprobs, num_bytes: int) -> None:
        """Count an answer until `release`. The log probabilities of its prompt will have `num_bytes`.

        Raises `Overloaded` if there is no room, and then nothing has changed. An answer is always admitted while there
        is no other one, because a refused request would not fit later either.
        """
        self._change(answer, num_bytes)
        party, is_alone = answer.party, self._accounts.total("logprob_bytes") == num_bytes
        others = self._answers.get(party, {})
        waits = any(each.is_suspended and each.is_read for each in others)
        if not is_alone and (waits or self._is_crowded(party, MAX_LOGPROB_BYTES * 3 // 4)):
            error = self._overloaded(party)
            self._change(answer, -num_bytes)
            raise error
        self._answers.setdefault(party, {})[answer] = None

    def grow(self, answer: HeldLogprobs, num_bytes: int) -> None:
        """Count `num_bytes` more of an admitted answer. No effect on an answer that was released.

        If there is no room, the youngest answer of the owner is released and ended. If that is this answer, it is
        ended by raising `Overloaded`.
        """
        party = answer.party
        if answer not in self._answers.get(party, {}):
            return
        self._change(answer, num_bytes)
        is_alone = self._accounts.total("logprob_bytes") == answer.num_bytes
        if not is_alone and self._is_crowded(party, MAX_LOGPROB_BYTES):
            error, youngest = self._overloaded(party), next(reversed(self._answers[party]))
            self.release(youngest)
            if youngest is answer:
                raise error
            youngest.end(error)
        elif party in self._crowded:
            if answer.num_bytes > answer.expected_bytes:
                self._share(party)
        elif self._is_crowded(party, MAX_LOGPROB_BYTES * 3 // 4):
            self._share(party)

    def release(self, answer: HeldLogprobs) -> None:
        """Stop counting an answer, and resume suspended answers for which there is room. Idempotent."""
        answers = self._answers.get(answer.party, {})
        if answer not in answers:
            return
        del answers[answer]
        if not answers:
            del self._answers[answer.party]
        self._change(answer, -answer.num_bytes)
        for party in list(self._crowded):
            self._share(party)

    def read(self, answer: HeldLogprobs, is_read: bool) -> None:
        """Note whether the client reads an answer."""
        answer.is_read = is_read
        if answer.party in self._crowded:
            self._share(answer.party)

    def _share(self, party: str) -> None:
        """Suspend and resume answers of an owner, so that those that run have room to reach their expected sizes."""
        accounts, answers = self._accounts, self._answers.get(party, {})
        part = MAX_LOGPROB_BYTES // max(1, len(accounts.users("logprob_bytes")))
        own, total = accounts.used(party, "logprob_bytes"), accounts.total("logprob_bytes")
        # The eighth also holds the outputs of steps that had begun when answers were suspended.
        free = max(part - own, MAX_LOGPROB_BYTES - total) - MAX_LOGPROB_BYTES // 8
        oldest = next((answer for answer in answers if answer.is_read), None)
        changed: list[HeldLogprobs] = []
        for answer in sorted(answers, key=lambda each: each is not oldest):
            answer.expected_bytes = min(answer.most_bytes, 2 * answer.num_bytes)
            remaining = max(0, answer.expected_bytes - answer.num_bytes)
            is_suspended = answer is not oldest and remaining > free
            free -= 0 if is_suspended else remaining
            if is_suspended != answer.is_suspended:
                answer.is_suspended = is_suspended
                changed.append(answer)
        if any(answer.is_suspended for answer in answers):
            self._crowded.add(party)
        else:
            self._crowded.discard(party)
        for answer in changed:
            if answer.is_suspended:
                answer.suspend()
            elif answer.is_read:
                answer.resume()

    def _is_crowded(self, party: str, bound: int) -> bool:
        return self._accounts.is_crowded_by(party, "logprob_bytes", bound)

    def _change(self, answer: HeldLogprobs, num_bytes: int) -> None:
        answer.num_bytes += num_bytes
        self._accounts.change(answer.party, "logprob_bytes", num_bytes)

    def _overloaded(self, party: str) -> Overloaded:
        accounts = self._accounts
        total, own = accounts.total("logprob_bytes"), accounts.used(party, "logprob_bytes")
        users = len(accounts.users("logprob_bytes"))
        return Overloaded(
            f"the log probabilities of answers that are not complete have {total} bytes, {own} of them of this key or "
            f"address, and this server holds about {MAX_LOGPROB_BYTES}, shared among {users} keys or addresses; ask "
            "for fewer tokens, choices or alternatives at a time",
            "tokens",
            _RETRY_SECONDS,
        )

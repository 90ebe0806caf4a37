"""For owners in any number and order: each gets its equal part of the queue, and the queue stays bounded."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import Overloaded
from server.limits.admission import Admission, Limits
from server.limits.owners import Owner
from server.metrics import Metrics

LEAST_SEQUENCES, LEAST_TOKENS = 2, 256
"""What an owner may have in any queue."""

REQUESTS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 40), st.integers(1, 300), st.integers(0, 6)))


class Queue:
    """The sequences of each owner in the queue of an admission, oldest first."""

    def __init__(self, most: int, most_tokens: int) -> None:
        self.admission = Admission(Limits(most, most_tokens), Metrics("1"), clock=lambda: 0.0)
        self._waiting: dict[str, dict[int, int]] = {}
        """Prompt tokens by id, by owner."""
        self._num_sent = 0

    @property
    def num_owners(self) -> int:
        return len(self._waiting)

    def held(self, party: str) -> tuple[int, int]:
        """Sequences and tokens of an owner."""
        own = self._waiting.get(party, {})
        return len(own), sum(own.values())

    def send(self, party: str, *tokens: int) -> None:
        """Raises `Overloaded`."""
        self.admission.admit(Owner(party), tokens)
        self.admission.release(Owner(party))
        ids = range(self._num_sent, self._num_sent + len(tokens))
        self._num_sent += len(tokens)
        sent = dict(zip(ids, tokens, strict=True))
        self.admission.queue(sent, party)
        self._waiting.setdefault(party, {}).update(sent)

    def serve(self, number: int) -> None:
        """Let sequences leave the queue, in turns of owners."""
        for _ in range(number):
            if not self._waiting:
                return
            party = next(iter(self._waiting))
            own = self._waiting.pop(party)
            id = next(iter(own))
            del own[id]
            self.admission.first_output(id)
            if own:
                self._waiting[party] = own


@given(st.integers(1, 64), st.integers(300, 6000), REQUESTS)
def test_no_owner_is_refused_its_equal_part_whoever_came_first(
    most: int, most_tokens: int, requests: list[tuple[int, int, int, int]]
) -> None:
    queue, bound = Queue(most, most_tokens), most
    for number, num_choices, tokens, num_served in requests:
        party = str(number)
        own, own_tokens = queue.held(party)
        owners = queue.num_owners + (not own)
        is_within_part = (
            own + num_choices <= max(most // owners, LEAST_SEQUENCES)
            and own_tokens + num_choices * tokens <= max(most_tokens // owners, LEAST_TOKENS)
            and owners > 1
        )
        try:
            queue.send(party, *[tokens] * num_choices)
        except Overloaded:
            assert not is_within_part
        owners = queue.num_owners
        parts = sum(Fraction(1, each) for each in range(1, owners + 1))
        bound = max(bound, num_choices)  # A request of more is admitted when nothing is queued.
        assert queue.admission.num_queued <= bound * parts + LEAST_SEQUENCES * owners
        queue.serve(num_served)


@pytest.mark.parametrize("most", [1, 2, 7, 128])
def test_an_owner_alone_may_use_the_whole_queue(most: int) -> None:
    queue = Queue(most, 100_000)
    for _ in range(most):
        queue.send("alone", 500)
    with pytest.raises(Overloaded):
        queue.send("alone", 500)
    queue.send("another", 500)

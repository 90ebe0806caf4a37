"""`Accounts`: what each owner uses of the server, from a connection to stored bytes. One for the server.

Whatever is limited or shared is counted here by the component that gives it out, so that each limit can ask for the
owner's own part, for the sum, and for the number of owners.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Resource = Literal[
    "connections",
    "body_bytes",
    "jobs",
    "requests",
    "queued_sequences",
    "queued_tokens",
    "background_responses",
    "stored_responses",
    "stored_bytes",
]
"""What is counted: open connections; bytes of request bodies that are held; grammar checks, renderings and
tokenisations that wait or run; requests that were admitted and have not ended; sequences without an output so far, and
the tokens of their prompts; background responses that run; stored responses, and their bytes."""

RESOURCES: tuple[Resource, ...] = get_args(Resource)


class Accounts:
    """Present use by resource and party (`Owner.party`). Not for use from several threads."""

    def __init__(self) -> None:
        self._uses: dict[Resource, dict[str, int]] = {resource: {} for resource in RESOURCES}
        """Only what is not 0, so that the size is the number of owners."""
        self._totals: dict[Resource, int] = dict.fromkeys(RESOURCES, 0)

    def change(self, party: str, resource: Resource, amount: int) -> None:
        """An owner uses so much more of a resource, or less."""
        uses = self._uses[resource]
        used = uses.get(party, 0) + amount
        if used:
            uses[party] = used
        else:
            uses.pop(party, None)
        self._totals[resource] += amount

    def used(self, party: str, resource: Resource) -> int:
        """How much of a resource an owner uses."""
        return self._uses[resource].get(party, 0)

    def total(self, resource: Resource) -> int:
        """How much of it all owners use."""
        return self._totals[resource]

    def users(self, resource: Resource) -> Mapping[str, int]:
        """The use of each owner that uses any."""
        return MappingProxyType(self._uses[resource])

    def largest_user(self, resource: Resource) -> str:
        """The owner that uses most of a resource. Raises `ValueError` if none uses any."""
        uses = self._uses[resource]
        return max(uses, key=uses.__getitem__)

    def of_owner(self, party: str) -> dict[str, int]:
        """All that an owner uses, by resource."""
        return {resource: uses.get(party, 0) for resource, uses in self._uses.items()}


_RESERVE_PARTS = 2
"""Beyond its bound, a queue has a reserve of 1 / this of the bound, which its owners share equally."""


def has_room(own: int, amount: int, total: int, bound: float, num_owners: int, *, least: int) -> bool:
    """Whether a bounded queue takes `amount` more of an owner that has `own` of the `total` in it.

    Up to the bound whoever asks is admitted. Beyond it, an owner that shares the queue with others is admitted up to
    its part of the reserve, or up to `least`: one that fills the queue keeps nobody else out. `num_owners` counts the
    owners that have something in the queue, and the one that asks. The queue holds at most its bound, a reserve that
    grows with the logarithm of the number of owners, and `least` for each.
    """
    if total + amount <= bound:
        return True
    return num_owners > 1 and own + amount <= max(bound // (_RESERVE_PARTS * num_owners), least)

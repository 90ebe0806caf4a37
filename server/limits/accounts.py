"""`Accounts`: what each owner uses of the server, from a connection to stored bytes, and what it has used.

Whatever is limited or shared is counted here by the component that gives it out, so that each limit can ask for the
owner's own part, for the sum, and for the number of owners.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from server.limits.owners import KEYLESS_LABEL, Owner

Resource = Literal[
    "connections",
    "body_bytes",
    "jobs",
    "requests",
    "sequences",
    "queued_sequences",
    "queued_tokens",
    "stream_bytes",
    "held_stream_bytes",
    "background_responses",
    "stored_responses",
    "stored_bytes",
]
"""What is counted: open connections; bytes of request bodies that are held; parsing, renderings, tokenisations and
grammar checks that wait or run; requests that were admitted and have not ended, and their sequences; sequences without
an output so far, and the tokens of their prompts; bytes of streams that their clients have not read; bytes of
resumable streams that have no client; background responses that run; stored responses, and their bytes."""

RESOURCES: tuple[Resource, ...] = get_args(Resource)


class Tally:
    """What one owner has used since the server started, or since it was last forgotten for having been idle."""

    __slots__ = ("label", "output_tokens", "owner", "prompt_tokens", "refused", "requests")

    def __init__(self, owner: Owner, label: str) -> None:
        self.owner = owner
        self.label = label
        """The label of its metrics."""
        self.requests = 0
        """Requests that were admitted."""
        self.refused = 0
        """Requests that were answered with 429."""
        self.prompt_tokens = 0
        self.output_tokens = 0

    def counts(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in TALLIES}


TALLIES = ("requests", "refused", "prompt_tokens", "output_tokens")

_MAX_TALLIES = 4096
"""Beyond it, the tallies of owners that use nothing are dropped: without keys, every address is an owner."""

_MAX_LABELS = 64
OTHER_LABEL = "other"
"""The metrics' label of owners beyond the first `_MAX_LABELS` names."""


class Accounts:
    """Present use by resource and party (`Owner.party`), and tallies. Not for use from several threads."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._dropped: dict[str, dict[str, int]] = {}
        """Counts of dropped tallies, by label. Its keys are all labels that there have been."""
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

    def tally(self, owner: Owner) -> Tally:
        """The tally of an owner."""
        tally = self._tallies.get(owner.party)
        if tally is None:
            if len(self._tallies) >= _MAX_TALLIES:
                self._drop_idle()
            label = owner.label if owner.label in self._dropped or len(self._dropped) < _MAX_LABELS else OTHER_LABEL
            self._dropped.setdefault(label, dict.fromkeys(TALLIES, 0))
            tally = self._tallies[owner.party] = Tally(owner, label)
        return tally

    def tallies(self) -> Iterable[Tally]:
        """Those that are kept."""
        return self._tallies.values()

    def by_label(self) -> list[tuple[str, dict[str, int], dict[str, int]]]:
        """For each label of metrics, the counts of its tallies and the present use of each resource.

        An owner without a tally has sent no request with a key: what it uses, such as connections, is its address'.
        """
        used = {label: dict(counts) for label, counts in self._dropped.items()}
        for tally in self._tallies.values():
            counts = used[tally.label]
            for name, count in tally.counts().items():
                counts[name] += count
        used.setdefault(KEYLESS_LABEL, dict.fromkeys(TALLIES, 0))
        in_use: dict[str, dict[str, int]] = {label: dict.fromkeys(RESOURCES, 0) for label in used}
        for resource, uses in self._uses.items():
            for party, count in uses.items():
                known = self._tallies.get(party)
                in_use[KEYLESS_LABEL if known is None else known.label][resource] += count
        return [(label, counts, in_use[label]) for label, counts in used.items()]

    def _drop_idle(self) -> None:
        busy = {party for uses in self._uses.values() for party in uses}
        for party in [party for party in self._tallies if party not in busy]:
            tally = self._tallies.pop(party)
            for name, count in tally.counts().items():
                self._dropped[tally.label][name] += count


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

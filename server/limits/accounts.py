"""`Accounts`: counts each owner's present use of the server's resources, and its total use since the start.

The component that allocates a resource counts it here. Each limit can then read the owner's own use, the sum over all
owners, and the number of owners.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from server.limits.owners import KEYLESS_LABEL, Owner

Resource = Literal[
    "connections",
    "body_bytes",
    "served_requests",
    "open_files",
    "jobs",
    "requests",
    "sequences",
    "queued_sequences",
    "queued_tokens",
    "logprob_bytes",
    "answer_bytes",
    "stream_bytes",
    "resumable_stream_bytes",
    "held_stream_bytes",
    "background_responses",
    "event_readers",
    "stored_responses",
    "stored_bytes",
]
"""The counted resources, in this order: open connections; received bytes in memory that are unparsed, or of request
bodies that are arriving; HTTP requests with API keys that are served; files that uploads and downloads hold open; jobs
(parsing, rendering, tokenisation, grammar checks) that wait or run; admitted requests that have not ended, and their
sequences; sequences without an output so far, and their prompt tokens; bytes of log probabilities that are in memory
until an answer is complete, or will be; bytes of large answers that wait to be sent; bytes of streams that clients
have not read; bytes of resumable streams with and without connected clients; running background responses; readers of
background responses' events; stored responses, and their bytes."""

RESOURCES: tuple[Resource, ...] = get_args(Resource)


class Tally:
    """Total use by one owner since the server started, or since `Accounts` last dropped the tally of the idle
    owner."""

    __slots__ = ("label", "output_tokens", "owner", "prompt_tokens", "refused", "requests")

    def __init__(self, owner: Owner, label: str) -> None:
        self.owner = owner
        self.label = label
        """Label of this owner in metrics."""
        self.requests = 0
        """Number of admitted requests."""
        self.refused = 0
        """Number of requests that were answered with 429."""
        self.prompt_tokens = 0
        self.output_tokens = 0

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in TALLIES}


TALLIES = ("requests", "refused", "prompt_tokens", "output_tokens")

_MAX_TALLIES = 4096
"""Beyond this number, the tallies of owners that use nothing are dropped: without keys, every address is an owner."""

_MAX_LABELS = 64
OTHER_LABEL = "other"
"""The label in metrics of owners beyond the first `_MAX_LABELS` names."""


class Accounts:
    """Present use by resource and party (`Owner.party`), and tallies. Not thread-safe."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._dropped: dict[str, dict[str, int]] = {}
        """Summed counts of dropped tallies, by label. Its keys are all labels ever given out."""
        self._uses: dict[Resource, dict[str, int]] = {resource: {} for resource in RESOURCES}
        """Use by resource and party. Zeros are removed, so that the length is the number of users of the resource."""
        self._totals: dict[Resource, int] = dict.fromkeys(RESOURCES, 0)

    def change(self, party: str, resource: Resource, amount: int) -> None:
        """Add `amount`, which may be negative, to an owner's use of a resource."""
        uses = self._uses[resource]
        used = uses.get(party, 0) + amount
        if used:
            uses[party] = used
        else:
            uses.pop(party, None)
        self._totals[resource] += amount

    def used(self, party: str, resource: Resource) -> int:
        """Return an owner's use of a resource."""
        return self._uses[resource].get(party, 0)

    def total(self, resource: Resource) -> int:
        """Return the use of a resource by all owners together."""
        return self._totals[resource]

    def users(self, resource: Resource) -> Mapping[str, int]:
        """Return the use of a resource by each owner whose use is not 0."""
        return MappingProxyType(self._uses[resource])

    def is_crowded_by(self, party: str, resource: Resource, bound: int) -> bool:
        """Whether all owners together use more than `bound` of a resource, and this one at least its equal part of
        `bound`."""
        if self._totals[resource] <= bound:
            return False
        return self.used(party, resource) * len(self._uses[resource]) >= bound

    def largest_user(self, resource: Resource) -> str:
        """Return the owner that uses most of a resource. Raises `ValueError` if no owner uses it."""
        uses = self._uses[resource]
        return max(uses, key=uses.__getitem__)

    def of_owner(self, party: str) -> dict[str, int]:
        """Return an owner's use of every resource."""
        return {resource: uses.get(party, 0) for resource, uses in self._uses.items()}

    def tally(self, owner: Owner) -> Tally:
        """Return the tally of an owner; create it if there is none."""
        tally = self._tallies.get(owner.party)
        if tally is None:
            if len(self._tallies) >= _MAX_TALLIES:
                self._drop_idle()
            label = owner.label if owner.label in self._dropped or len(self._dropped) < _MAX_LABELS else OTHER_LABEL
            self._dropped.setdefault(label, dict.fromkeys(TALLIES, 0))
            tally = self._tallies[owner.party] = Tally(owner, label)
        tally.owner = owner  # The key file may have changed its weight or name.
        return tally

    def tallies(self) -> Iterable[Tally]:
        """Return all tallies that were not dropped."""
        return self._tallies.values()

    def by_label(self) -> list[tuple[str, dict[str, int], dict[str, int]]]:
        """Return each label of metrics with the summed counts of its tallies and its present use of each resource.

        An owner without a tally has sent no request with a key, so its use, such as connections, counts as keyless.
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


def has_room(own: int, amount: int, total: int, bound: float, num_owners: int, *, least: int) -> bool:
    """Whether a bounded queue accepts `amount` more from an owner that already has `own` of the `total` in it.

    Up to the bound, every owner is admitted. Beyond it, an owner that shares the queue with others is admitted up to
    its equal part of the bound, or up to `least`: owners that fill the queue take no other owner's part. `num_owners`
    counts the owners with something in the queue, and the requesting owner. Of the owners in the queue, the k-th that
    was last admitted beyond the bound has at most bound / k, or `least`. So the queue of n owners holds at most
    bound * (1 + 1/2 + ... + 1/n), and `least` for each owner.
    """
    if total + amount <= bound:
        return True
    return num_owners > 1 and own + amount <= max(bound // num_owners, least)

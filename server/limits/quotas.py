"""`QuotaMeter`: requests, prompt tokens and output tokens a minute of each owner, as token buckets.

A bucket holds at most one minute's quota and fills continuously. Use is subtracted when it is known: a
request and its prompt at admission, output tokens as they are generated. The level of a bucket may therefore become
negative; then its owner waits until it is positive again. The average rate holds without a guess of answers' lengths.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.config.server import ServerConfig
from server.errors import Overloaded
from server.limits.accounts import Accounts, Tally
from server.limits.owners import NO_QUOTAS, Owner, Quotas

_MINUTE = 60.0

_MAX_BUCKETS = 3 * 4096
"""Beyond this number, full buckets are dropped. The number at most doubles between two scans, so that the amortised
cost of scanning is constant per request."""

_WORDS = {"requests": "requests", "prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
"""Names of the headers, as OpenAI's API has them."""


class QuotaExceeded(Overloaded):
    """The owner has used up its quota of requests or tokens a minute."""


class QuotaState(NamedTuple):
    """The requests or tokens that one quota has left."""

    limit: int
    """Requests or tokens per minute."""
    remaining: int
    reset_seconds: float
    """Seconds until the bucket is full, if the owner uses nothing more."""


class _Bucket:
    """The bucket of one owner and one kind of quota. Times are seconds on a monotonic clock."""

    __slots__ = ("_counted", "_kind", "_tally", "level", "limit", "time")

    def __init__(self, kind: str, limit: int, tally: Tally, now: float) -> None:
        self._kind = kind
        self._tally = tally
        self._counted: int = getattr(tally, kind)
        """The part of the tally's count that has been subtracted from the level."""
        self.limit = limit
        self.level = float(limit)
        self.time = now

    def update(self, now: float) -> None:
        """Subtract the owner's use since the last call, and fill the bucket for the time since then."""
        used: int = getattr(self._tally, self._kind)
        self.level -= used - self._counted
        self._counted = used
        self.level = min(float(self.limit), self.level + (now - self.time) * self.limit / _MINUTE)
        self.time = now

    def follow(self, tally: Tally, limit: int) -> None:
        """Adopt the owner's tally, if a new one has replaced it, and its limit, if the key file has changed."""
        if tally is not self._tally:
            self._tally, self._counted = tally, 0
        self.level += limit - self.limit
        self.limit = limit

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until the bucket holds `amount`; 0 if it does now."""
        return max(0.0, amount - self.level) * _MINUTE / self.limit

    @property
    def state(self) -> QuotaState:
        """The limit, the rest and the time until the bucket is full."""
        return QuotaState(self.limit, max(0, math.floor(self.level)), self.seconds_until(self.limit))


class QuotaMeter:
    """Checks quotas against the tallies of `accounts`."""

    def __init__(
        self, accounts: Accounts, defaults: Quotas = NO_QUOTAS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`defaults` are the quotas of owners whose keys set none."""
        self._accounts = accounts
        self._defaults = defaults
        self._clock = clock
        self._kept: dict[tuple[str, str], _Bucket] = {}
        """Buckets by party and kind. A full bucket may be dropped: a new one is equal to it."""
        self._most_kept = _MAX_BUCKETS

    def limit(self, settings: ServerConfig) -> None:
        """Apply new default quotas to later requests."""
        self._defaults = Quotas(
            settings.requests_per_minute, settings.prompt_tokens_per_minute, settings.output_tokens_per_minute
        )

    def quotas_of(self, owner: Owner) -> Quotas:
        """Return each quota of the owner's key or, where the key sets none, the server's default."""
        pairs = zip(owner.quotas, self._defaults, strict=True)
        return Quotas(*(default if own is None else own for own, default in pairs))

    def check(self, owner: Owner, prompt_tokens: int) -> None:
        """Raise `QuotaExceeded` unless the owner may send a request with `prompt_tokens` tokens now.

        A prompt longer than a whole minute's quota is accepted when the bucket is full: otherwise it never would be.
        """
        needed = {"requests": 1, "prompt_tokens": prompt_tokens, "output_tokens": 1}
        for kind, bucket in self._buckets(owner):
            amount = min(needed[kind], bucket.limit)
            if seconds := bucket.seconds_until(amount):
                raise QuotaExceeded(
                    f"Rate limit reached for {_WORDS[kind]} a minute of this key or address: limit {bucket.limit}, "
                    f"remaining {bucket.state.remaining}, requested {needed[kind]} ({kind}_per_minute)",
                    "requests" if kind == "requests" else "tokens",
                    seconds,
                )

    def states(self, owner: Owner) -> dict[str, QuotaState]:
        """Return the state of each of the owner's quotas, by kind."""
        return {kind: bucket.state for kind, bucket in self._buckets(owner)}

    def headers(self, owner: Owner) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate limit headers. Those for tokens report the quota, prompt or output, with the smaller
        rest."""
        states = self.states(owner)
        shown: dict[str, QuotaState] = {}
        if "requests" in states:
            shown["requests"] = states.pop("requests")
        if states:
            shown["tokens"] = min(states.values(), key=lambda state: state.remaining / state.limit)
        headers: list[tuple[bytes, bytes]] = []
        for kind, state in shown.items():
            values = (state.limit, state.remaining, _duration(state.reset_seconds))
            for what, value in zip(("limit", "remaining", "reset"), values, strict=True):
                headers.append((f"x-ratelimit-{what}-{kind}".encode(), str(value).encode()))
        return headers

    def _buckets(self, owner: Owner) -> Iterator[tuple[str, _Bucket]]:
        """Yield the owner's buckets by kind, updated to the present time."""
        quotas = self.quotas_of(owner)
        if quotas == NO_QUOTAS:
            return
        tally, now = self._accounts.tally(owner), self._clock()
        for kind, limit in zip(Quotas._fields, quotas, strict=True):
            if limit is not None:
                bucket = self._kept.get((owner.party, kind))
                if bucket is None:
                    bucket = self._kept[owner.party, kind] = _Bucket(kind, limit, tally, now)
                bucket.update(now)
                bucket.follow(tally, limit)
                bucket.update(now)
                yield kind, bucket
        if len(self._kept) > self._most_kept:
            self._drop_full(now)

    def _drop_full(self, now: float) -> None:
        for bucket in self._kept.values():
            bucket.update(now)
        self._kept = {key: bucket for key, bucket in self._kept.items() if bucket.level < bucket.limit}
        self._most_kept = max(_MAX_BUCKETS, 2 * len(self._kept))


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI's headers do: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"

"""Answers of `/kaon/limits` and `/kaon/owners`."""

from typing import Literal

import msgspec


class QuotaView(msgspec.Struct):
    """One quota a minute."""

    limit: int
    remaining: int
    """What may be used now."""
    reset_seconds: float
    """Until the whole minute's quota is there again, if nothing more is used."""


class OwnerLimits(msgspec.Struct, kw_only=True):
    """Answer to `GET /kaon/limits`: what the caller uses, has used and may use."""

    object: Literal["kaon.limits"] = "kaon.limits"
    name: str
    """The key's name or the beginning of its digest; without a key, the address."""
    scopes: list[str]
    group: str | None = None
    weight: float = 1.0
    in_use: dict[str, int]
    """What the owner uses now, by resource."""
    used: dict[str, int]
    """Requests, refusals and tokens since the server started."""
    quotas: dict[str, QuotaView]
    """By kind; without those that are not limited."""
    most: dict[str, int | None]
    """Bounds of what one owner may use at a time, by resource; null: none."""


class OwnerUse(msgspec.Struct, kw_only=True):
    """What one owner uses and has used."""

    name: str
    key: str | None
    """The beginning of the key's digest; null without a key."""
    in_use: dict[str, int]
    used: dict[str, int]


class OwnerList(msgspec.Struct, kw_only=True):
    """Answer to `GET /kaon/owners`: the owners that the server knows, those with most requests first."""

    object: Literal["list"] = "list"
    data: list[OwnerUse]
    has_more: bool

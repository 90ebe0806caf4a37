"""Answers of the calls for operators."""

from typing import Literal

import msgspec


class SleepState(msgspec.Struct):
    """Answer to `GET /is_sleeping`."""

    is_sleeping: bool


class ReloadResult(msgspec.Struct, kw_only=True):
    """Answer to `POST /kaon/reload`."""

    object: Literal["kaon.reload"] = "kaon.reload"
    changed: list[str]
    """Settings that are in force now with new values."""
    need_restart: list[str]
    """Settings that have changed, and that need a restart to be in force."""

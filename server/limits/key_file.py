"""`KeyFile`: named API keys with scopes, group, weight, quotas and expiry, as digests in a JSON file.

`kaon key` changes the file, `ApiKeys` reads it. The keys themselves are in no file: `create` returns one once.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from engine.config.paths import read_small_file
from server.limits.owners import AcceptedKey, Owner, Quotas, Scope, digest_of

KEY_PREFIX = "kaon-"
"""Shows people, and scanners for leaked secrets, what a key is for."""

_KEY_BYTES = 32

NUM_LISTED = 32
"""Number of keys, from the first in the file, whose names are labels in metrics; the others share one label."""

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
_PerMinute = Annotated[int, msgspec.Meta(ge=1)]


class KeyRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One key of the file."""

    name: _Name
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key."""
    created: datetime
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    group: _Name | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    requests_per_minute: _PerMinute | None = None
    prompt_tokens_per_minute: _PerMinute | None = None
    output_tokens_per_minute: _PerMinute | None = None

    def accepted(self, is_listed: bool) -> AcceptedKey:
        """Convert the record to the form that requests are checked with. `is_listed`: whether metrics show its
        name."""
        quotas = Quotas(self.requests_per_minute, self.prompt_tokens_per_minute, self.output_tokens_per_minute)
        owner = Owner(
            self.digest,
            self.digest,
            self.weight,
            self.name,
            is_listed,
            self.group,
            frozenset(self.scopes),
            quotas,
        )
        return AcceptedKey(owner, None if self.expires is None else self.expires.timestamp())


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock the directory of `path`, so that no other command changes the file meanwhile. Raises `OSError`."""
    number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file: all keys, in the order of their creation."""

    version: Literal[1]
    keys: list[KeyRecord]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a file. Raises `ValueError` that says what is wrong and where."""
        try:
            file = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        names = [record.name for record in file.keys]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two keys have the name {name}; names must differ")
        by_digest: dict[str, str] = {}
        for record in file.keys:
            # Which record's scopes count would depend on the order, and a revoked name would leave the key in force.
            first = by_digest.setdefault(record.digest, record.name)
            if first != record.name:
                raise ValueError(
                    f"{first} and {record.name} have the same digest, and each key must have one record; remove one "
                    "of the two records from the file with an editor"
                )
        return file

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file at `path`; without a file, return a `KeyFile` without keys. Raises `ValueError` and
        `OSError`."""
        try:
            text = read_small_file(path)
        except FileNotFoundError:
            return cls(1, [])
        if not text.lstrip().startswith("{"):
            raise ValueError("it holds plain keys, one a line, which kaon key does not manage; choose another file")
        return cls.parse(text)

    def save(self, path: Path) -> None:
        """Replace the file at `path` atomically, with mode 0600."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        number, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def create(self, name: str, **fields: object) -> str:
        """Create a key, add its record, and return the key. Raises `ValueError`.

        `fields` are fields of `KeyRecord`; None means the default. Without `scopes`, the key opens inference alone.
        """
        if any(record.name == name for record in self.keys):
            raise ValueError(f"there is a key of the name {name}; choose another name, or revoke that one")
        key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        values: dict[str, object] = {"name": name, "digest": digest_of(key), "scopes": ["inference"]}
        values["created"] = datetime.now(UTC).replace(microsecond=0)
        values |= {field: value for field, value in fields.items() if value is not None}
        try:
            self.keys.append(msgspec.convert(values, KeyRecord))
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        return key

    def revoke(self, name: str) -> None:
        """Remove a key. Raises `ValueError` if there is none of that name."""
        kept = [record for record in self.keys if record.name != name]
        if len(kept) == len(self.keys):
            raise ValueError(f"there is no key of the name {name}; kaon key list shows the names")
        self.keys = kept

    def accepted(self) -> Mapping[str, AcceptedKey]:
        """Return the keys by digest."""
        return {record.digest: record.accepted(number < NUM_LISTED) for number, record in enumerate(self.keys)}

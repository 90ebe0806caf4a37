"""`ApiKeys`: the digests of the accepted API keys, and the `Owner` of each.

Keys come from flags, from a file with one key a line, or from a file that `kaon key` writes
(`server.limits.key_file`). A changed file is read again. `server.limits.tokens` checks tokens of an identity provider.
"""

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from engine.config.paths import read_small_file, why_unreadable
from engine.config.server import ServerConfig
from server.errors import InvalidApiKey
from server.limits.key_file import KeyFile
from server.limits.owners import AcceptedKey, Owner, digest_of
from server.limits.tokens import SUBJECT_PREFIX, TokenVerifier

_log = logging.getLogger(__name__)

_SCHEME = b"bearer "

_RELOAD_SECONDS = 0.5
"""Seconds between two checks whether the key file has changed. It is read again once two checks found the same state:
a file that is being written may lack keys, or end within one."""
_MOST_LOOKS = 6
"""Most checks that find a change before the file is read as it is: a program that rewrites it again and again must not
keep a revoked key in force."""


class ApiKeys:
    """The accepted keys by digest. Without any source of keys, the server accepts every request.

    The time of a dict lookup may depend on the digest, but on nothing else. It can reveal the first bits of a SHA-256,
    from which no key can be computed. The digest found is compared in constant time. One SHA-256 without salt
    suffices, because keys are random: `kaon key` makes keys of 256 bits, which no dictionary attack finds.
    """

    def __init__(
        self, keys: Iterable[str] = (), file: Path | None = None, tokens: TokenVerifier | None = None
    ) -> None:
        """Raises `ValueError` for a key that cannot be sent in a header (the error does not show it), or a broken
        file."""
        self._given = _plain((key, "api_key holds a key that") for key in keys)
        self._file = file
        self._tokens = tokens
        self._stamp = None if file is None else _stamp(file)
        self._filed: Mapping[str, AcceptedKey] = {} if file is None else _read_keys(file)
        self._num_holders = self._count_holders()
        """Number of keys with the scope `inference`."""

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Read the keys that `config` names. Raises `ValueError` with a sentence for the user."""
        file = None if config.api_key_file is None else Path(config.api_key_file)
        return cls((key.get_secret_value() for key in config.api_key), file, TokenVerifier.of(config))

    def __bool__(self) -> bool:
        """Whether requests need a key. They do too if the last key of the file was revoked."""
        return bool(self._given) or self._file is not None or self._tokens is not None

    @property
    def has_several_holders(self) -> bool:
        """Whether requests of the scope `inference` may come from several keys, or from subjects of an identity
        provider. Keys that only scrape metrics or administrate hold no connections of that scope."""
        return self._tokens is not None or self._num_holders > 1

    def _count_holders(self) -> int:
        # Once for each reading of the file: with many keys it takes milliseconds.
        accepted = {**self._filed, **self._given}
        return sum("inference" in each.owner.scopes for each in accepted.values())

    def owner(self, key: bytes) -> Owner | None:
        """Return the owner of `key`; None if the key is not accepted. Raises `InvalidApiKey` if it has expired."""
        digest = hashlib.sha256(key).hexdigest()
        accepted = self._accepted(digest)
        if accepted is None or not hmac.compare_digest(accepted.owner.party, digest):
            return None
        if accepted.has_expired:
            raise InvalidApiKey("the API key has expired; ask the operator of this server for a new one")
        return accepted.owner

    def _accepted(self, digest: str) -> AcceptedKey | None:
        return self._given.get(digest) or self._filed.get(digest)

    def holder(self, party: str) -> Owner | None:
        """Return the owner with this `Owner.party`; None if the key was revoked or has expired.

        For background work, which continues without its client. An identity provider's subject is accepted unchecked:
        its token is not stored.
        """
        accepted = self._accepted(party)
        if accepted is not None:
            return None if accepted.has_expired else accepted.owner
        if self and (self._tokens is None or not party.startswith(SUBJECT_PREFIX)):
            return None
        return Owner(party, party.removeprefix(SUBJECT_PREFIX))

    def known_owner(self, headers: Iterable[tuple[bytes, bytes]]) -> Owner | None:
        """Return the owner of the first key in a request's headers that is accepted, or token that was verified
        before; None without one."""
        for key in sent_keys(headers):
            with suppress(InvalidApiKey):
                owner = self.owner(key)
                if owner is None and self._tokens is not None:
                    owner = self._tokens.known_owner(key)
                if owner is not None:
                    return owner
        return None

    async def authenticate(self, key: bytes) -> Owner | None:
        """Return the owner of an API key or of a token; None if it is neither. Raises `InvalidApiKey` and
        `NotReady`."""
        owner = self.owner(key)
        if owner is None and self._tokens is not None and key.count(b".") == 2:
            return await self._tokens.owner(key)
        return owner

    async def watch(self) -> None:
        """Fetch the keys of tokens, then read the file again whenever it changes, until cancelled."""
        if self._tokens is not None:
            await self._tokens.prepare()
        last, num_looks = self._stamp, 0
        while self._file is not None:
            await asyncio.sleep(_RELOAD_SECONDS)
            before, last = last, _stamp(self._file)
            num_looks = 0 if last == self._stamp else num_looks + 1
            if num_looks and (last == before or num_looks >= _MOST_LOOKS):
                num_looks = 0
                try:
                    self.reload()
                except ValueError as error:
                    _log.warning("%s; the keys that were read before stay in force", error)

    def reload(self) -> list[str]:
        """Read the file again, and return the setting's name if the keys have changed. If the file is broken or gone,
        the present keys stay, and this raises `ValueError`."""
        if self._file is None:
            return []
        self._stamp = _stamp(self._file)
        before, self._filed = self._filed, _read_keys(self._file)
        self._num_holders = self._count_holders()
        _log.info("api_key_file was read again; it holds %d keys", len(self._filed))
        return [] if self._filed == before else ["api_key_file"]


def sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys of a request, one of which must be valid: `Authorization: Bearer`, Anthropic's `x-api-key`.

    An empty key stands for a header that is sent twice or has another scheme.
    """
    bearers, named = [], []
    for name, value in headers:
        if name == b"authorization":
            bearers.append(value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else b"")
        elif name == b"x-api-key":
            named.append(value)
    return [values[0].strip() if len(values) == 1 else b"" for values in (bearers, named) if values]


def _read_keys(file: Path) -> Mapping[str, AcceptedKey]:
    """Read the keys of a file by digest: `kaon key` writes a JSON object, others one key a line. Raises
    `ValueError`."""
    try:
        text = read_small_file(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"api_key_file is {file}, which cannot be read: {why_unreadable(error)}") from error
    if text.lstrip().startswith("{"):
        try:
            return KeyFile.parse(text).accepted()
        except ValueError as error:
            raise ValueError(f"api_key_file is {file}, which is not a file of kaon key: {error}") from error
    keys = {
        key: f"api_key_file is {file}, whose line {number}"
        for number, line in enumerate(text.splitlines(), 1)
        if (key := line.partition("#")[0].strip())
    }
    if not keys:
        raise ValueError(f"api_key_file is {file}, which holds no key; write one a line, or leave api_key_file out")
    return _plain(keys.items())


def _plain(keys: Iterable[tuple[str, str]]) -> Mapping[str, AcceptedKey]:
    """Return keys without records by digest. Each comes with the start of a sentence about it, which does not show it.
    Raises `ValueError`."""
    accepted = {}
    for key, subject in keys:
        if not key or any(not "!" <= character <= "~" for character in key):
            raise ValueError(
                f"{subject} is empty, or has a space or a character beyond ASCII; no client could send it"
            )
        digest = digest_of(key)
        accepted[digest] = AcceptedKey(Owner.of_key(digest))
    return accepted


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file changes; None if there is no file."""
    try:
        state = os.stat(file)
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns

"""`ApiKeys`: the API keys that the server accepts, kept as digests."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from engine.config.config import ServerConfig
from engine.config.paths import why_unreadable


class ApiKeys:
    """Digests of the accepted keys. Without any key, the server accepts every request."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises `ValueError`, without showing the key, for one that cannot be sent in a header."""
        self._digests = [_digest(_checked(key).encode()) for key in keys]

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """The keys of `api_key` and `api_key_file`. Raises `ValueError` with a sentence for the user."""
        keys = [key.get_secret_value() for key in config.api_key]
        if config.api_key_file is not None:
            keys += _read_keys(Path(config.api_key_file))
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes) -> str | None:
        """A name for the holder of `key`, which does not reveal the key; None if the key is not accepted.

        Takes equally long for a wrong and a right key.
        """
        digest = _digest(key)
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(each, digest)
        return digest.hex() if known else None


def _read_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"api_key_file is {file}, which cannot be read: {why_unreadable(error)}") from error
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise ValueError(f"api_key_file is {file}, which holds no key; write one a line, or leave api_key_file out")
    return keys


def _checked(key: str) -> str:
    if not key or any(not "!" <= character <= "~" for character in key):
        raise ValueError("an API key is empty, or holds a space or a character beyond ASCII; no client could send it")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

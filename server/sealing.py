"""`Seal`: encrypts texts that clients store and send back: reasoning, summaries, signatures.

The cipher is AES-256-GCM, so clients can neither read nor change a sealed text. It is bound to its kind and to the
client's API key. It begins with the id of the server's key, which distinguishes a text of another server, or of this
one before a restart, from a changed text.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.config.paths import why_unreadable
from engine.config.server import ServerConfig

Kind: TypeAlias = Literal["reasoning", "compaction", "signature"]

_VERSION = b"kaon1"
_MIN_SECRET_BYTES = 16
_KEY_BYTES, _ID_BYTES, _NONCE_BYTES = 32, 8, 12


class Foreign(ValueError):
    """The text was not sealed with this server's key."""


class Changed(ValueError):
    """The text was sealed with this server's key, but was changed, or belongs to another kind or owner."""


class Seal:
    """Seals and opens texts with one secret key. A key file shares the key among replicas and restarts."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret` has at least 16 bytes that cannot be guessed; by default, a random key is created."""
        key = os.urandom(_KEY_BYTES) if secret is None else hashlib.blake2b(secret, digest_size=_KEY_BYTES).digest()
        self._cipher = AESGCM(key)
        self._id = hashlib.blake2b(key, digest_size=_ID_BYTES, person=b"kaon key id").digest()

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Read the key of `reasoning_key_file`, or create one. Raises `ValueError` with a sentence for the user."""
        file = config.reasoning_key_file
        if file is None:
            return cls()
        try:
            secret = Path(file).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"reasoning_key_file is {file}, which cannot be read: {why_unreadable(error)}") from error
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(
                f"reasoning_key_file is {file}, which holds {len(secret)} bytes; it must hold at least "
                f"{_MIN_SECRET_BYTES} that cannot be guessed (openssl rand -hex 32)"
            )
        return cls(secret)

    def sealer(self, owner: str | None) -> Callable[[Kind, str], str]:
        """Return `seal` for one owner."""
        return lambda kind, text: self.seal(kind, text, owner)

    def opener(self, owner: str | None) -> Callable[[Kind, str], str]:
        """Return `open` for one owner."""
        return lambda kind, sealed: self.open(kind, sealed, owner)

    def seal(self, kind: Kind, text: str, owner: str | None) -> str:
        """Encrypt `text` to URL-safe base64, which `open` decrypts for the same kind and owner."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), _context(kind, owner))
        return base64.urlsafe_b64encode(_VERSION + self._id + nonce + sealed).decode("ascii")

    def open(self, kind: Kind, sealed: str, owner: str | None) -> str:
        """Decrypt a sealed text. Raises `Foreign` if it has another key or form, else `Changed` if it is not
        authentic."""
        head = _VERSION + self._id
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise Foreign from None
        if not data.startswith(head):
            raise Foreign
        nonce, body = data[len(head) : len(head) + _NONCE_BYTES], data[len(head) + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, body, _context(kind, owner)).decode("utf-8", "surrogatepass")
        except (InvalidTag, ValueError):
            raise Changed from None


def _context(kind: Kind, owner: str | None) -> bytes:
    """Return the associated data of a sealed text, which bind it to its kind and owner."""
    return f"{kind}\0{'' if owner is None else owner}".encode()

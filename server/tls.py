"""`Tls`: the server's TLS certificate, key and authorities, which are read again when their files change."""

import logging
import os
import ssl
import time
from typing import NoReturn, Self

from engine.config.paths import check_regular, why_unreadable
from engine.config.server import ServerConfig

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Seconds between two checks of the files."""


class Tls:
    """Holds the TLS context for new connections. Open connections keep the context that they began with."""

    def __init__(self, config: ServerConfig, context: ssl.SSLContext) -> None:
        self.context = context
        self._config = config
        self._files = [file for file in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if file]
        self._stamp = self._stamp_now()
        self._next_check = 0.0

    @classmethod
    def of(cls, config: ServerConfig) -> Self | None:
        """Read the files that `config` names; None for plain HTTP. Raises `ValueError` if they cannot be used."""
        context = tls_context(config)
        return None if context is None else cls(config, context)

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed. May be called at any rate; it checks once a second.

        If the files cannot be used, the context stays and the reason is logged: a new certificate may be written
        before its key.
        """
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + _LOOK_SECONDS
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            context = tls_context(self._config)
        except (ValueError, OSError) as error:
            _log.warning("%s; the certificate that was read before stays in use", error)
            return
        assert context is not None
        self.context = context
        _log.info("ssl_certfile %s was read again", self._config.ssl_certfile)

    def _stamp_now(self) -> list[tuple[int, int, int] | None]:
        """Return a value that changes whenever a file changes."""
        stamps: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                state = os.stat(file)
            except OSError:
                stamps.append(None)
            else:
                stamps.append((state.st_ino, state.st_size, state.st_mtime_ns))
        return stamps


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Create the context from `config`'s files; None for plain HTTP. Raises `ValueError` if they cannot be used."""
    if config.ssl_certfile is None:
        for field in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, field) is not None:
                raise ValueError(f"{field} is set, but ssl_certfile is not; set it too, or leave {field} out")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key_file = config.ssl_keyfile or config.ssl_certfile
    for field, file in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", key_file)):
        _check_readable(field, file)
    try:
        context.load_cert_chain(config.ssl_certfile, key_file, _refuse_encrypted_key)
    except ssl.SSLError as error:
        raise ValueError(
            f"ssl_certfile is {config.ssl_certfile} and its key is {key_file}, which are not a PEM "
            f"certificate and its key: {error.reason or error}"
        ) from error
    if config.ssl_ca_certs is not None:
        _check_readable("ssl_ca_certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ValueError(
                f"ssl_ca_certs is {config.ssl_ca_certs}, which holds no PEM certificate: {error.reason or error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(field: str, file: str) -> None:
    """Raise `ValueError`, with the field and the file, if a file cannot be read: the library's error names neither."""
    try:
        check_regular(file)
        open(file, "rb").close()
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} is {file}, which cannot be read: {why_unreadable(error)}") from error


def _refuse_encrypted_key() -> NoReturn:
    """Raise `ValueError`; otherwise OpenSSL would ask for a passphrase on the terminal."""
    raise ValueError("ssl_keyfile is encrypted; give a private key without passphrase")

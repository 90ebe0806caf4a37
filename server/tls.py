"""`tls_context`: from certificate files to what the listener speaks TLS with. Called by `server.serve`."""

import ssl
from typing import NoReturn

from engine.config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS as `config` has it; None for plain HTTP. Raises `ValueError`, a sentence, for files that do not work."""
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
            f"ssl_certfile is {config.ssl_certfile} and its key is {key_file}, which are no PEM certificate and key "
            f"that belong together: {error.reason or error}"
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
    """The library's own error does not say which file it is about."""
    try:
        open(file, "rb").close()
    except OSError as error:
        raise ValueError(f"{field} is {file}, which cannot be read: {error.strerror}") from error


def _refuse_encrypted_key() -> NoReturn:
    """Otherwise OpenSSL asks the terminal for a passphrase."""
    raise ValueError("ssl_keyfile is encrypted; give a private key without passphrase")

"""Unusable certificate files are reported in a sentence, before any process is started."""

import ssl
import subprocess
from pathlib import Path

import pytest

from engine.config.server import ServerConfig
from server import tls
from server.tls import tls_context


def make_certificate(directory: Path, name: str = "server", passphrase: str | None = None) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key, as paths."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    secrecy = ["-noenc"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *secrecy]
    command += ["-subj", "/CN=kaon", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return str(certificate), str(key)


def said(**settings: str) -> str:
    with pytest.raises(ValueError) as reported:
        tls_context(ServerConfig(**settings))  # type: ignore[arg-type]
    return str(reported.value)


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_context(ServerConfig()) is None


def test_a_certificate_with_its_key_in_one_file_or_two_is_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    assert isinstance(tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key)), ssl.SSLContext)
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    context = tls_context(ServerConfig(ssl_certfile=str(both)))
    assert context is not None
    assert context.verify_mode == ssl.CERT_NONE


def test_authorities_make_clients_show_a_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate))
    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", "secret")
    missing = str(tmp_path / "missing.pem")
    assert said(ssl_certfile=missing) == f"ssl_certfile is {missing}, which cannot be read: No such file or directory"
    assert said(ssl_certfile=certificate, ssl_keyfile=missing).startswith(f"ssl_keyfile is {missing}, which cannot")
    assert "are not a PEM certificate and its key" in said(ssl_certfile=certificate, ssl_keyfile=other)
    assert "are not a PEM certificate and its key" in said(ssl_certfile=certificate)
    assert "without passphrase" in said(ssl_certfile=certificate, ssl_keyfile=locked)
    assert "holds no PEM certificate" in said(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=other)
    assert "ssl_certfile is not" in said(ssl_keyfile=key)


def test_files_that_change_are_read_again_and_broken_ones_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)
    certificate, key = make_certificate(tmp_path)
    files = tls.Tls.of(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key))
    assert files is not None
    first = files.context
    files.reload_if_changed()
    assert files.context is first
    renewed, its_key = make_certificate(tmp_path, "renewed")
    Path(certificate).write_text(Path(renewed).read_text())
    files.reload_if_changed()
    assert files.context is first
    Path(key).write_text(Path(its_key).read_text())
    files.reload_if_changed()
    assert files.context is not first

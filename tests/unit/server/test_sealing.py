"""`Seal`: text that clients store for the server is opened unchanged, for its owner only."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.server import ServerConfig
from server.sealing import Changed, Foreign, Seal

SEAL = Seal(b"0123456789abcdef")


@given(st.text(), st.none() | st.text())
def test_what_was_sealed_is_read(text: str, owner: str | None) -> None:
    assert SEAL.open("reasoning", SEAL.seal("reasoning", text, owner), owner) == text


def test_nothing_shows_in_a_sealed_text_and_no_two_are_equal() -> None:
    one, two = SEAL.seal("reasoning", "a" * 99, None), SEAL.seal("reasoning", "a" * 99, None)
    assert one != two
    assert "YWFh" not in one


@given(st.data())
def test_a_text_with_any_bit_changed_is_not_read(data: st.DataObject) -> None:
    sealed = bytearray(SEAL.seal("reasoning", "secret", "me").encode())
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= 1 << data.draw(st.integers(0, 6))
    with pytest.raises((Changed, Foreign)):
        SEAL.open("reasoning", sealed.decode(), "me")


def test_a_text_of_another_owner_or_kind_is_changed_and_one_of_another_key_foreign() -> None:
    sealed = SEAL.seal("reasoning", "secret", "me")
    for kind, owner in (("reasoning", "you"), ("reasoning", None), ("compaction", "me")):
        with pytest.raises(Changed):
            SEAL.open(kind, sealed, owner)  # type: ignore[arg-type]
    for text in (Seal().seal("reasoning", "x", "me"), "gAAAA", "", "\N{BULLET}", "a" * 101):
        with pytest.raises(Foreign):
            SEAL.open("reasoning", text, "me")
    with pytest.raises(Changed):
        SEAL.open("reasoning", sealed[:24], "me")


def test_servers_with_one_file_read_each_others_texts(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    sealed = Seal.of(ServerConfig(reasoning_key_file=str(file))).seal("compaction", "x", None)
    assert SEAL.open("compaction", sealed, None) == "x"
    with pytest.raises(Foreign):
        Seal.of(ServerConfig()).open("compaction", sealed, None)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ValueError, match=r"reasoning_key_file is .*key, which cannot be read"):
        Seal.of(ServerConfig(reasoning_key_file=str(file)))
    file.write_text("short")
    with pytest.raises(ValueError, match="holds 5 bytes; it must hold at least 16"):
        Seal.of(ServerConfig(reasoning_key_file=str(file)))

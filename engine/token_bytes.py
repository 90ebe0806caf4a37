"""`TokenBytes`: the bytes that each token adds to a text, read off a tokenizer's decoder. Used by `Tokenizer`."""

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


class TokenBytes:
    """Looks tokens up in `backend`, a byte-level, SentencePiece-like or word-level tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._decoder = backend.decoder
        kinds = _decoder_kinds(self._decoder)
        self._byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        """Whether tokens like `<0xE2>` stand for one byte (SentencePiece's byte fallback)."""

    def inside(self, token_id: int) -> bytes:
        """What the token adds behind another one; empty for an id that is no token."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if match := self._byte_token(token):
            return bytes.fromhex(match[1])
        # A decoder may treat the first token apart, so the token is decoded behind another.
        return self._decode([_ANCHOR, token])[len(_ANCHOR) :].encode()

    def first(self, token_id: int) -> bytes:
        """What the token adds as the first of a text, where some decoders drop a leading space."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if (match := self._byte_token(token)) and match[1] >= "80":
            return bytes.fromhex(match[1])
        return self._decode([token]).encode()

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that is no token."""
        try:
            token: str | None = self._backend.id_to_token(token_id)
        except OverflowError:
            return None
        return token

    def _byte_token(self, token: str) -> re.Match[str] | None:
        return _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None

    def _decode(self, tokens: list[str]) -> str:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text


def _decoder_kinds(decoder: Any) -> set[str]:
    """Type names in a decoder's description, those inside a `Sequence` included."""
    if decoder is None:
        return set()
    description = json.loads(decoder.__getstate__())
    return {part["type"] for part in (description, *description.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table).

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token, written as it is
        return token.encode()

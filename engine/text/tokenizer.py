"""`Tokenizer`: converts text to token ids and back, as a whole or as a stream, and returns the bytes of single tokens.

It uses the `tokenizers` library: the vocabulary stays in native memory without a Python copy. Used by the input/output
processor and the detokenizer.
"""

import base64
import codecs
import ctypes
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.text.checkpoint_settings import read_json_object, read_special_tokens
from models.errors import CheckpointError

# The bytes that each token adds to a text, according to the tokenizer's decoder.

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
        """Whether tokens like `<0xE2>` represent one byte (SentencePiece's byte fallback)."""

    def inside(self, token_id: int) -> bytes:
        """Return the bytes of a token that follows another one; empty for an id without a token."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if match := self._byte_token(token):
            return bytes.fromhex(match[1])
        # A decoder may treat the first token differently, so the token is decoded after another one.
        return self._decode([_ANCHOR, token])[len(_ANCHOR) :].encode()

    def first(self, token_id: int) -> bytes:
        """Return the bytes of the first token of a text, where some decoders drop a leading space."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if (match := self._byte_token(token)) and match[1] >= "80":
            return bytes.fromhex(match[1])
        return self._decode([token]).encode()

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for an id without a token."""
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
    """Return the type names in a decoder's description, including those inside a `Sequence`."""
    if decoder is None:
        return set()
    description = json.loads(decoder.__getstate__())
    return {part["type"] for part in (description, *description.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level token represents (GPT-2's table).

    Printable Latin-1 characters represent themselves; the other bytes, in order, are the characters from U+0100.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token, written as it is
        return token.encode()


# Checkpoints without a tokenizer.json.


class _TiktokenForm(NamedTuple):
    """What a family's code, which is never run, adds to its file of tokens."""

    file: str
    """Has a line of a token in base64 and its rank each."""
    pattern: str
    """The pre-tokenizer's pattern: tokens are merged within its matches."""
    special_tokens: Callable[[int], list[str]]
    """Names of the special tokens after the file's; those of tokenizer_config.json replace them. Called with the first
    id."""
    is_nfc: bool = False
    """Whether texts are normalised to NFC."""


_UPPERCASE, _LOWERCASE = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll"))
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_WHITESPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KIMI = _TiktokenForm(
    "tiktoken.model",
    "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}*{_LOWERCASE}+{_CONTRACTIONS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}+{_LOWERCASE}*{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            _PUNCTUATION_AND_WHITESPACE,
        )
    ),
    lambda first: [f"<|reserved_token_{id}|>" for id in range(first, first + 256)],
)
_HUNYUAN_NAMES = [f"<|{name}|>" for name in ("endoftext", "startoftext", "bos", "eos", "pad")]
_HUNYUAN = _TiktokenForm(
    "hy.tiktoken",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_WHITESPACE}",
    lambda _: [*_HUNYUAN_NAMES, *(f"<|extra_{number}|>" for number in range(205))],
    is_nfc=True,
)
_TIKTOKEN_FORMS = {"TikTokenTokenizer": _KIMI, "HYTokenizer": _HUNYUAN}
"""By `tokenizer_class` of tokenizer_config.json."""


def _read_tiktoken(path: Path, form: _TiktokenForm) -> tokenizers.Tokenizer:
    """Read a file of tokens. Raises `CheckpointError` if it is damaged."""
    file = path / form.file
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))):
            raise ValueError("its ranks are not the numbers from 0 on")
        if missing := {bytes([byte]) for byte in range(256)} - ranks.keys():
            raise ValueError(f"it lacks tokens of {len(missing)} single bytes")
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; download the checkpoint again") from error
    spelled = {token: "".join(map(_CHARACTER_OF.__getitem__, token)) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:end], token[end:]) for end in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    backend = tokenizers.Tokenizer(
        models.BPE(
            {spelled[token]: rank for token, rank in ranks.items()},
            [(spelled[first], spelled[second]) for first, second in merges],
            ignore_merges=True,
        )
    )
    if form.is_nfc:
        backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(form.pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, path / "tokenizer_config.json", len(ranks), form.special_tokens(len(ranks)))
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, file: Path, first: int, names: list[str]) -> None:
    """Add the tokens from id `first` on, as `added_tokens_decoder` of tokenizer_config.json or `names` has them."""
    named = read_json_object(file).get("added_tokens_decoder", {})
    try:
        entries = {int(id): (str(entry["content"]), bool(entry.get("special", True))) for id, entry in named.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"added_tokens_decoder of {file} must name the content of tokens by their ids"
        ) from error
    tokens = {first + index: (name, True) for index, name in enumerate(names)} | entries
    tokens = {id: tokens[id] for id in sorted(tokens)}
    backend.add_tokens(
        [tokenizers.AddedToken(text, special=special, normalized=False) for text, special in tokens.values()]
    )
    wrong = [text for id, (text, _) in tokens.items() if id < first or backend.token_to_id(text) != id]
    if wrong:
        raise CheckpointError(
            f"added_tokens_decoder of {file} names {wrong[0]} at an id of another token; it must name distinct tokens "
            f"at ids from {first} on, without gaps after {first + len(names)}"
        )


def convert_slow_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Convert, by transformers, the tokenizer of a checkpoint that has only a SentencePiece or a tiktoken file.

    This is the only import of transformers, and so of torch, in the front end: it takes seconds and hundreds of
    megabytes. Code from the checkpoint is never run. Raises `CheckpointError` if the conversion fails.
    """
    from transformers import AutoTokenizer

    try:
        # Without an explicit False, transformers asks standard input whether to run the checkpoint's code.
        converted = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # converters raise errors of different types
        for name in ("tokenizer_config.json", "config.json"):
            if "auto_map" in read_json_object(path / name):
                raise CheckpointError(
                    f"{path} holds no tokenizer.json, and auto_map of its {name} asks for code from the checkpoint, "
                    "which is never run; add the file"
                ) from error
        raise CheckpointError(
            f"{path} holds no tokenizer.json, and transformers cannot convert another tokenizer from it; add the "
            "file, or install sentencepiece or tiktoken if the checkpoint has such a tokenizer"
        ) from error
    backend: tokenizers.Tokenizer | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{path} holds no tokenizer.json, and its tokenizer has no fast form; add the file")
    # Of some model types, transformers makes a tokenizer of special tokens if the directory has no vocabulary.
    if set(backend.get_vocab()) <= set(converted.all_special_tokens):
        raise CheckpointError(f"{path} holds no tokenizer: neither tokenizer.json nor a vocabulary; add the file")
    return backend


CACHED_TOKENS = 8192
"""Number of tokens whose bytes are cached. The frequent tokens of texts are few, so nearly every look-up hits."""


class Tokenizer:
    """A checkpoint's tokenizer.

    The text of tokens is the concatenation of their bytes, decoded as UTF-8. So it can be streamed, and no character
    is ever withdrawn. It differs from the `tokenizers` library's decoding in one case: if a run of byte-fallback
    tokens is not valid UTF-8, the library replaces all its characters, but here only the invalid bytes become U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        """`special_tokens` maps the checkpoint's names (`eos_token`) to tokens, which are made special."""
        self.special_tokens = dict(special_tokens or {})
        backend.no_truncation()
        backend.no_padding()
        known = [text for text in self.special_tokens.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens(known)
        self._backend = backend
        self._bytes = TokenBytes(backend)
        self.token_bytes = spelled = lru_cache(CACHED_TOKENS)(self._bytes.inside)
        """Returns the bytes that a token adds to a text, which may be part of a character; empty for an id without a
        token."""
        self.token_text = lru_cache(CACHED_TOKENS)(lambda token_id: spelled(token_id).decode(errors="replace"))
        """Returns `token_bytes` as text for display: incomplete characters become U+FFFD."""
        self.token_name = lru_cache(CACHED_TOKENS)(lambda token_id: _name_of(spelled(token_id)))
        """Returns `token_bytes` as text; if they are not whole characters, the bytes, so that names are distinct."""
        self.first_token_bytes = self._bytes.first
        """Returns the same for the first token of a text, where some decoders drop a leading space."""
        self.token = self._bytes.token
        """Returns the token of an id as the vocabulary spells it; None for an id without a token."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added ones; a model's vocabulary may be padded beyond it."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of the tokens that `skip_special_tokens` removes from the text."""
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token", ""))
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token", ""))

    @classmethod
    def from_checkpoint(cls, path: Path) -> Self:
        """Read the tokenizer in checkpoint directory `path`. Raises `CheckpointError` if it is missing or damaged."""
        file = path / "tokenizer.json"
        if not file.is_file():
            form = _TIKTOKEN_FORMS.get(str(read_json_object(path / "tokenizer_config.json").get("tokenizer_class")))
            if form is None or not (path / form.file).is_file():
                backend = convert_slow_tokenizer(path)
            else:
                backend = _read_tiktoken(path, form)
            read = cls(backend, read_special_tokens(path))
            _return_freed_memory()
            return read
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise CheckpointError(f"{file} cannot be read: {error}; download the checkpoint again") from error
        _return_freed_memory()
        return cls(backend, read_special_tokens(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens` adds the checkpoint's special tokens, such as BOS.

        Releases the interpreter lock. Raises `ValueError` for a lone surrogate, which has no UTF-8 form, and for text
        that the checkpoint's tokenizer cannot encode.
        """
        [ids] = self.encode_all([text], add_special_tokens)
        return ids

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for each of `texts`, in one call of the library: a call costs more than a short text."""
        for text in texts:
            check_encodable(text)
        try:
            # The library's call for one text would hold the interpreter lock, and compute offsets that are not needed.
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise ValueError(f"the model's tokenizer cannot encode this text: {error}") from error
        return [encoding.ids for encoding in encodings]

    def encode_for_pooling(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, longest: int | None = None
    ) -> tuple[list[int], int | None]:
        """Return the token ids of a text, or of two texts as one prompt, and the index at which the token type
        changes, or None. Models with token types distinguish the two texts by it.

        `longest` bounds the prompt with its special tokens; the last text is truncated to fit.
        Releases the interpreter lock. Raises `ValueError` on a lone surrogate.
        """
        for each in (text, pair or ""):
            check_encodable(each)
        given: Any = text if pair is None else (text, pair)
        [encoding] = self._backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        ids, types = encoding.ids, encoding.type_ids
        if longest is not None and len(ids) > longest:
            last = 0 if pair is None else 1
            own = [index for index, number in enumerate(encoding.sequence_ids) if number == last]
            cut = set(own[max(0, len(own) - (len(ids) - longest)) :])
            ids = [token_id for index, token_id in enumerate(ids) if index not in cut]
            types = [kind for index, kind in enumerate(types) if index not in cut]
        return ids, types.index(1) if 1 in types else None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids without a token have no text; incomplete characters become U+FFFD."""
        return self.stream(skip_special_tokens).step(token_ids, final=True)

    def stream(
        self,
        skip_special_tokens: bool = True,
        at_start: bool = True,
        visible_token_ids: frozenset[int] = frozenset(),
    ) -> "TextStream":
        """Create an incremental decoder. With `at_start` false, the text continues another one: a leading space stays.

        `visible_token_ids` are not skipped, special or not.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if visible_token_ids:
            skipped -= visible_token_ids
        return TextStream(self, self._bytes.byte_fallback, skipped, at_start)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. A text has at least its length divided by this number of tokens."""
        return max(map(len, self._backend.get_vocab()))

    def token_id(self, token: str) -> int | None:
        """Return the id of `token` as the vocabulary spells it; None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


class TextStream:
    """Decodes a growing list of token ids. A character is returned when all of its bytes are known."""

    __slots__ = ("_at_start", "_decode", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, byte_fallback: bool, skipped: frozenset[int], at_start: bool) -> None:
        self._decode = _Utf8Decoder(_EACH_BYTE if byte_fallback else "replace").decode
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._at_start = at_start

    def step(self, token_ids: Iterable[int], final: bool = False) -> str:
        """Return the text that `token_ids` complete; with `final`, also U+FFFD for remaining incomplete characters."""
        skipped = self._skipped
        token_bytes = self._tokenizer.token_bytes
        shown = [token_id for token_id in token_ids if token_id not in skipped]
        if self._at_start:
            shown = [token_id for token_id in shown if self._tokenizer.token(token_id) is not None]
            if shown:
                self._at_start = False
                first = self._tokenizer.first_token_bytes(shown[0])
                return self._decode(first + b"".join(map(token_bytes, shown[1:])), final)
        return self._decode(b"".join(map(token_bytes, shown)), final)


def _name_of(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _is_of_library(error: BaseException) -> bool:
    """Return whether the native library raised the error: an `Exception`, or a panic, which is not an `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_encodable(text: str) -> None:
    """Raise `ValueError` if `text` holds half a surrogate pair, naming it and its position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is "
            "not valid Unicode; send both halves of the pair or leave it out"
        ) from None


def _return_freed_memory() -> None:
    """Return to the system the 56 MB that parsing a vocabulary of 150k tokens frees; glibc would not return them."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_EACH_BYTE = "kaon-replace-each-byte"
"""Error handler of byte-fallback decoders: one U+FFFD for each invalid byte, instead of one for each character."""
codecs.register_error(_EACH_BYTE, _replace_each_byte)
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

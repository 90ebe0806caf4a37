"""`Tokenizer`: ids, text, bytes, and the files that it reads of a checkpoint."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from engine.text.tokenizer import Tokenizer
from models.errors import CheckpointError

TEXTS = ["the quick brown fox", "Köln 日本語 👩‍👩‍👧", " two  leading and trailing ", "a\ufffdb", "tab\tnew\nline", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_equals_the_librarys_for_any_ids(
    byte_level: Tokenizer, byte_level_backend: tokenizers.Tokenizer, skip: bool
) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        ids = [rng.randrange(byte_level.vocab_size + 2) for _ in range(rng.randrange(10))]
        assert byte_level.decode(ids, skip) == byte_level_backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_byte_fallback_text_equals_the_librarys_wherever_byte_runs_are_valid(
    byte_fallback: Tokenizer, byte_fallback_backend: tokenizers.Tokenizer, skip: bool
) -> None:
    rng = random.Random(2)
    plain = [*range(3), *range(259, byte_fallback.vocab_size), byte_fallback.vocab_size + 1]
    characters = [[3 + byte for byte in char.encode()] for char in " ~é日🙂\ufffd"]
    for _ in range(2000):
        ids = [i for _ in range(rng.randrange(8)) for i in rng.choice([[rng.choice(plain)], rng.choice(characters)])]
        assert byte_fallback.decode(ids, skip) == byte_fallback_backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_short_becomes_the_replacements_that_the_library_gives(
    tokenizer: Tokenizer, request: pytest.FixtureRequest, cut: int
) -> None:
    name = request.node.callspec.params["tokenizer"]
    backend = request.getfixturevalue(f"{name}_backend")
    first = 3 if name == "byte_fallback" else None
    bytes_of_char = "🦊".encode()[:cut]
    ids = [first + byte if first else _id_of_byte(tokenizer, byte) for byte in bytes_of_char]
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert "\ufffd" in tokenizer.decode(ids)


def test_valid_characters_of_a_broken_byte_run_are_kept(byte_fallback: Tokenizer) -> None:
    ids = [3 + byte for byte in "日".encode() + b"\xe6"]
    assert byte_fallback.decode(ids) == "日\ufffd"


def test_special_tokens_are_left_out_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>fox<|im_end|><tool call>")
    assert byte_level.decode(ids) == "fox<tool call>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>fox<|im_end|><tool call>"


def test_special_tokens_around_a_text_are_optional(byte_fallback: Tokenizer) -> None:
    with_bos = byte_fallback.encode("the")
    assert with_bos[0] == byte_fallback.bos_token_id
    assert byte_fallback.encode("the", add_special_tokens=False) == with_bos[1:]


def test_token_bytes_concatenate_to_the_text(tokenizer: Tokenizer) -> None:
    text = "Hello the 日本語 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text


def test_a_byte_token_is_its_byte_and_shows_as_a_replacement(byte_fallback: Tokenizer) -> None:
    token_id = byte_fallback.token_id("<0xE6>")
    assert token_id is not None
    assert byte_fallback.token_bytes(token_id) == b"\xe6"
    assert byte_fallback.token_text(token_id) == "\ufffd"


def test_only_the_first_word_of_a_text_loses_its_space(byte_fallback: Tokenizer) -> None:
    hello = byte_fallback.token_id("▁Hello")
    assert hello is not None
    assert byte_fallback.first_token_bytes(hello) == b"Hello"
    assert byte_fallback.token_bytes(hello) == b" Hello"
    assert byte_fallback.decode([hello, hello]) == "Hello Hello"


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**31, 2**40])
def test_an_id_that_is_no_token_has_no_text(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token(token_id) is None
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id, *tokenizer.encode("the")]) == "the"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_word_level_tokens_are_joined_as_their_decoder_joins_them(decoder: object) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"the": 0, "fox": 1, "##es": 2, "<unk>": 3}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    for ids in ([0, 1, 2], [2, 0], [9, 0, 1]):
        assert Tokenizer(backend).decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("surrogate", [0xD83D, 0xDC00])
def test_a_lone_surrogate_is_refused_with_its_position(tokenizer: Tokenizer, surrogate: int) -> None:
    with pytest.raises(ValueError, match=rf"lone surrogate U\+{surrogate:X} at character 2"):
        tokenizer.encode(f"ab{chr(surrogate)}c")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("entry", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "special": True}])
def test_special_tokens_are_read_in_either_file_and_shape(checkpoint: Path, file: str, entry: object) -> None:
    (checkpoint / file).write_text(json.dumps({"eos_token": entry, "bos_token": None}))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize("token", ["the", "<tool call>"], ids=["plain", "added"])
def test_a_token_named_eos_is_special_although_the_vocabulary_does_not_say_so(checkpoint: Path, token: str) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode(f"{token} fox")) == " fox"


def test_a_named_token_outside_the_vocabulary_adds_no_id(checkpoint: Path) -> None:
    plain = Tokenizer.from_checkpoint(checkpoint).vocab_size
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|absent|>"}))
    assert Tokenizer.from_checkpoint(checkpoint).vocab_size == plain


def test_truncation_and_padding_stored_in_the_file_are_not_applied(
    checkpoint: Path, byte_level_backend: tokenizers.Tokenizer
) -> None:
    byte_level_backend.enable_truncation(2)
    byte_level_backend.enable_padding(length=64)
    byte_level_backend.save(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert len(tokenizer.encode("the quick brown fox")) < 64


FAULTY = Path(__file__).parents[2] / "fuzz" / "corpora" / "tokenizer_json"


@pytest.mark.parametrize("name", ["no-unknown-token", "panic"])
def test_text_that_the_library_cannot_encode_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    """Found by the fuzzer: for these files the library raises a plain `Exception`, and panics."""
    (tmp_path / "tokenizer.json").write_bytes((FAULTY / name).read_bytes())
    with pytest.raises(ValueError, match="the model's tokenizer cannot encode this text: "):
        Tokenizer.from_checkpoint(tmp_path).encode("über")


def test_a_broken_tokenizer_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "must be a JSON object"), ("{", "cannot be read"), ('{"eos_token": 3}', "eos_token .* is 3")],
)
def test_a_broken_tokenizer_config_is_named(checkpoint: Path, content: str, words: str) -> None:
    (checkpoint / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_checkpoint(checkpoint)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_checkpoint_without_any_tokenizer_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: neither tokenizer.json nor a vocabulary"):
        Tokenizer.from_checkpoint(tmp_path)


def test_the_front_ends_text_modules_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine.text.io_processor, engine.config.paths\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _id_of_byte(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))

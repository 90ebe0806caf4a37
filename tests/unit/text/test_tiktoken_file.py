"""Kimi's and Hunyuan's tiktoken files: bytes are merged by rank, within the pieces of the family's pattern."""

import base64
import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.text.tokenizer import Tokenizer
from models.errors import CheckpointError
from tests.unit.text.conftest import CORPUS

KIMI = regex.compile(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
HUNYUAN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
TEXTS = [
    "The quick brown fox isn't lazy, HE'S over the dogs' dog 1234567",
    "中文English混合 汉字abc 北京市 Pascal, 日本語の文 カタカナ",
    "  two  spaces\n\n\n\tx \r\n end ",
    "Grüße aus KÖLN, naïve café e\u0301 👩‍👩‍👧 🙂 \u00a0 \ufffd \x00",
]
NAMED = {"0": ("[BOS]", True), "1": ("[EOS]", True), "2": ("<|im_end|>", True), "11": ("<think>", False)}


def ranks() -> dict[bytes, int]:
    """Tokens of text, of which some are parts of characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*CORPUS, *TEXTS], trainer)
    read = Tokenizer(backend)
    return {read.token_bytes(id): id for id in range(read.vocab_size)}


RANKS = ranks()


LINES = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiktoken.model").write_text(LINES)
    write_config(tmp_path, {len(RANKS) + int(id): token for id, token in NAMED.items()})
    return tmp_path


def write_config(path: Path, named: dict[int, tuple[str, bool]]) -> None:
    entries = {str(id): {"content": text, "special": special} for id, (text, special) in named.items()}
    auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    config: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer", "auto_map": auto_map, "eos_token": "[EOS]"}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": entries}))


def merged(piece: bytes) -> list[int]:
    """Join the two adjacent parts whose bytes have the lowest rank, the first ones of equal rank, as long as any has
    one."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        joined = [RANKS.get(first + second, len(RANKS)) for first, second in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == len(RANKS):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [RANKS[part] for part in parts]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_merged_within_pieces_by_rank(path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_checkpoint(path)
    ids = tokenizer.encode(text)
    assert ids == [id for piece in KIMI.findall(text) for id in merged(piece.encode())]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_hunyuan_has_another_pattern_and_composes_characters(tmp_path: Path, text: str) -> None:
    (tmp_path / "hy.tiktoken").write_text(LINES)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "HYTokenizer"}))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    composed = unicodedata.normalize("NFC", text)
    ids = tokenizer.encode(f"{text}<|eos|><|extra_0|>")
    expected = [id for piece in HUNYUAN.findall(composed) for id in merged(piece.encode())]
    assert ids == [*expected, len(RANKS) + 3, len(RANKS) + 5]
    assert tokenizer.vocab_size == len(RANKS) + 210
    assert tokenizer.decode(ids) == composed


def test_tokens_after_those_of_the_file_have_the_names_of_the_configuration(path: Path) -> None:
    tokenizer, first = Tokenizer.from_checkpoint(path), len(RANKS)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.eos_token_id == first + 1
    text = "[BOS]the<think>the<|im_end|><|reserved_token_423|>"
    ids = tokenizer.encode(text)
    the = RANKS[b"the"]
    assert ids == [first, the, first + 11, the, first + 2, 423]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "the<think>the"


@pytest.mark.parametrize(
    "content", ["AA== 0\nAA== 1\n", "AQ== 5\n", "AA 0\n", "AA==\n", "\xff 0\n", "AA== x\n", "AA== 0\n"]
)
def test_a_damaged_file_is_named(path: Path, content: str) -> None:
    (path / "tiktoken.model").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model cannot be read: .*; download the checkpoint again"):
        Tokenizer.from_checkpoint(path)


@pytest.mark.parametrize(
    "named", [{0: ("x", True)}, {len(RANKS): ("a", True), len(RANKS) + 1: ("a", True)}, {len(RANKS): ("e", True)}]
)
def test_names_of_other_tokens_ids_are_refused(path: Path, named: dict[int, tuple[str, bool]]) -> None:
    write_config(path, named)
    with pytest.raises(CheckpointError, match="it must name distinct tokens at ids from"):
        Tokenizer.from_checkpoint(path)

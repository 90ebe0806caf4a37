"""A checkpoint without tokenizer.json is converted by transformers; the ids are those of transformers itself."""

import json
from pathlib import Path

import pytest
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from engine.text.tokenizer import Tokenizer
from models.errors import CheckpointError


def test_vocab_and_merges_files_are_enough(tmp_path: Path) -> None:
    pieces = [*sorted(ByteLevel.alphabet()), "th", "the", "Ġthe", "<|endoftext|>"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    text = "the 日本 the"
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    ids = tokenizer.encode(text)
    assert ids == transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_a_checkpoint_without_any_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json") as caught:
        Tokenizer.from_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)

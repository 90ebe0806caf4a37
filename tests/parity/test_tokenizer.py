"""A checkpoint without tokenizer.json is converted by transformers; the ids are those of transformers itself."""

import base64
import json
from pathlib import Path

import pytest
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import read_special_tokens
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


def test_mistrals_tekken_file_is_enough_and_names_its_special_tokens(tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    config = {"pattern": r" ?\p{L}+|.", "default_vocab_size": len(tokens) + 20, "default_num_special_tokens": 20}
    entries = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)]
    tekken = {"config": config, "vocab": vocab, "special_tokens": entries}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    tokenizer, template = Tokenizer.from_checkpoint(tmp_path), ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    text = template.render([{"role": "user", "content": "the the"}])
    assert text == "<s>[INST]the the[/INST]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [1, 3, 20 + 257, 20 + 258, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode([*ids, 2]) == "the the"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_special_tokens(tmp_path) == {}, "tekken.json is not read next to a tokenizer.json"


def test_a_checkpoint_without_any_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json") as caught:
        Tokenizer.from_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)

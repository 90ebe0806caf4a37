"""Tokenizers built in memory, of the two families that language models use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from engine.messages import ModelInfo
from engine.text.tokenizer import Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße aus Köln, 日本語の文", "naïve café 👩‍👩‍👧 🙂"] * 3


@pytest.fixture
def byte_level_backend() -> tokenizers.Tokenizer:
    """Like GPT-2's, with tokens that are parts of characters, two special tokens and two added plain ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("banana", normalized=False)])
    return backend


@pytest.fixture
def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Like Llama 2's: words begin with `▁`, unknown characters become `<0xE2>`, decoding drops the first space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyzH,.",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("H", "e"), ("▁", "He"), ("▁He", "ll"), ("▁Hell", "o")]
    pieces += ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture
def byte_level(byte_level_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level_backend, {"eos_token": "<|im_end|>"})


@pytest.fixture
def byte_fallback(byte_fallback_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_fallback_backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each family in turn."""
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture
def model_info(byte_level: Tokenizer) -> Callable[..., ModelInfo]:
    """A `ModelInfo` for `byte_level` with a context of 64 tokens and a larger cache, by default."""

    def build(**changes: Any) -> ModelInfo:
        fields: dict[str, Any] = {
            "architecture": "Qwen3ForCausalLM",
            "dtype": "float32",
            "device": "cpu",
            "attention_backend": "cpu",
            "num_parameters": 1,
            "vocab_size": byte_level.vocab_size,
            "max_model_len": 64,
            "eos_token_ids": [byte_level.eos_token_id],
            "block_size": 16,
            "num_kvcache_blocks": 100,
        }
        return ModelInfo(**(fields | changes))

    return build


@pytest.fixture
def checkpoint(tmp_path: Path, byte_level_backend: tokenizers.Tokenizer) -> Path:
    """A directory with config.json and tokenizer.json."""
    (tmp_path / "config.json").write_text("{}")
    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path

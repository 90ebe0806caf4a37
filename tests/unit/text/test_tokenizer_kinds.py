"""Tokenizers of the kinds that checkpoints are published with: streams, whole decodes and the library's are equal."""

import itertools
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.tokenizer import Tokenizer
from tests.unit.text.conftest import CORPUS

ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<｜tool▁sep｜>", special=True, normalized=False),  # noqa: RUF001
    AddedToken("<|end|>", special=True, normalized=False, lstrip=True, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("tool call", special=False, normalized=True),
    # Characters that byte-level tokens are spelled with, and one of several code points.
    AddedToken("café", special=False, normalized=False),
    AddedToken("Ġx", special=False, normalized=False),
    AddedToken("👩‍👧", special=False, normalized=False),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def tiktoken_like() -> tokenizers.Tokenizer:
    """Like those of Llama 3, Qwen3, GLM and gpt-oss: byte-level, whole words first, numbers by three digits."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def gemma_like() -> tokenizers.Tokenizer:
    """Like Gemma's: `▁` for spaces, none before the first word, lines and runs of spaces as tokens, byte fallback."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "▁▁", *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz日本"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("日", "本")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *map("".join, merges)])}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram_like() -> tokenizers.Tokenizer:
    """Like a converted SentencePiece unigram: a space before the first word, byte fallback."""
    pieces = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>")] + [(piece, -10.0) for piece in BYTES]
    pieces += [("▁", -2.0), ("▁the", -3.0), ("▁日本", -4.0), ("語", -5.0)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")])
    return backend


@pytest.fixture(params=[tiktoken_like, gemma_like, unigram_like], ids=lambda make: make.__name__)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    make: Callable[[], tokenizers.Tokenizer] = request.param
    made = make()
    made.add_tokens(ADDED)
    return made


TEXTS = [
    "the lazy dog 日本語 12345",
    "👩‍👩‍👧 the 👩‍👧é",
    "  two  spaces\n\n\n\tx ",
    "<|im_start|>Grüße<think>\n the<｜tool▁sep｜>日<|end|>  x",  # noqa: RUF001
    "café Ġx tool call café",
    "\u00a0 e\u0301 \ufffd \x00",
    "",
]


@pytest.mark.parametrize("skips", [False, True])
def test_a_stream_is_the_whole_decode_and_the_librarys(backend: tokenizers.Tokenizer, skips: bool) -> None:
    tokenizer = Tokenizer(backend)
    for texts in itertools.product(TEXTS, TEXTS):
        ids = tokenizer.encode("".join(texts), add_special_tokens=False)
        whole = tokenizer.decode(ids, skips)
        assert whole == backend.decode(ids, skip_special_tokens=skips)
        for size in (1, 2, 5):
            stream = tokenizer.stream(skips)
            pieces = [stream.step(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
            assert "".join(pieces) + stream.step([], final=True) == whole


def test_a_stream_has_whole_characters_only_and_waits_for_no_further_token(backend: tokenizers.Tokenizer) -> None:
    """Each prefix of the tokens has the characters that it completes."""
    tokenizer = Tokenizer(backend)
    for text in TEXTS:
        ids, shown = tokenizer.encode(text, add_special_tokens=False), ""
        stream = tokenizer.stream(skip_special_tokens=False)
        for count in range(1, len(ids) + 1):
            shown += stream.step(ids[count - 1 : count])
            assert tokenizer.decode(ids[:count], skip_special_tokens=False).rstrip("\ufffd") == shown.rstrip("\ufffd")


def test_an_answer_continues_its_prompt_as_one_text(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)
    for prompt, answer in itertools.product(("the", "日本語 "), TEXTS):
        before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        stream = tokenizer.stream(skip_special_tokens=False, at_start=False)
        shown = "".join([stream.step([token]) for token in after]) + stream.step([], final=True)
        together = backend.decode([*before, *after], skip_special_tokens=False)
        assert together == backend.decode(before, skip_special_tokens=False) + shown

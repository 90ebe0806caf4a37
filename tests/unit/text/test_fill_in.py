"""Fill-in prompts in the formats on which families of code models were trained."""

import pytest
import tokenizers
from tokenizers import AddedToken

from engine.text.io_processor import FillIn
from engine.text.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
DEEPSEEK = ["<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"]


def with_marks(backend: tokenizers.Tokenizer, marks: list[str], **special: str) -> Tokenizer:
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return Tokenizer(backend, special)


@pytest.mark.parametrize(
    ("marks", "order"),
    [
        (QWEN, "{0}the{1} dog{2}"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "{0}the{1} dog{2}"),
        (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "{0}the{1} dog{2}"),
        (DEEPSEEK, "{0}the{1} dog{2}"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "{0}the{1} dog{2}"),
        (["[PREFIX]", "[SUFFIX]"], "{1} dog{0}the"),
    ],
)
def test_each_family_has_its_marks_and_its_order(
    byte_level_backend: tokenizers.Tokenizer, marks: list[str], order: str
) -> None:
    tokenizer = with_marks(byte_level_backend, marks)
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    ids = fill_in.prompt(tokenizer.encode("the"), tokenizer.encode(" dog"), add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == order.format(*marks)


@pytest.mark.parametrize("marks", [[], QWEN[:2], QWEN[1:]])
def test_a_tokenizer_without_all_the_marks_cannot_fill_in(
    byte_level_backend: tokenizers.Tokenizer, marks: list[str]
) -> None:
    assert FillIn.of(with_marks(byte_level_backend, marks)) is None


def test_what_the_model_ends_a_gap_with_ends_it(byte_level_backend: tokenizers.Tokenizer) -> None:
    tokenizer = with_marks(byte_level_backend, [*QWEN, "<|file_sep|>", "<|endoftext|>"])
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    ends = [tokenizer.token_id("<|file_sep|>"), tokenizer.token_id("<|endoftext|>")]
    assert sorted(fill_in.end_token_ids) == sorted(end for end in ends if end is not None)


def test_bos_comes_before_the_marks_where_the_model_has_one(byte_fallback_backend: tokenizers.Tokenizer) -> None:
    tokenizer = with_marks(byte_fallback_backend, ["▁<PRE>", "▁<SUF>", "▁<MID>"], bos_token="<s>")
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    assert fill_in.prompt([7], [8], add_special_tokens=True)[:2] == [
        tokenizer.bos_token_id,
        tokenizer.token_id("▁<PRE>"),
    ]
    assert fill_in.prompt([7], [8], add_special_tokens=False)[0] == tokenizer.token_id("▁<PRE>")

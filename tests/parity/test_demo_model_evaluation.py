"""The committed demo checkpoint answers a sample of its held-out questions, computed by transformers."""

import functools

import pytest

from models.demo import CHECKPOINT_DIR
from tests.sweeps import some
from tools.demo.evaluate import DemoModel, Verdict, judge
from tools.demo.examples import render_prompt
from tools.demo.generate import Text, held_out_texts

SAMPLE = 40
# Results of the committed weights (models/demo/README.md) less the noise of a sample; retrained weights raise it.
LEAST_RIGHT = {
    "addition and subtraction": 0.95,
    "arithmetic follow-up": 0.95,
    "recall": 0.9,
    "answer from a tool result": 0.9,
    "story": 0.9,
    "text completion": 0.9,
    "outside its world": 0.85,
    "about Kaon": 0.85,
    "facts": 0.85,
    "JSON": 0.85,
    "tool call": 0.85,
    "tools offered, none needed": 0.75,
    "small talk": 0.75,
    "copying": 0.75,
    "lists and counting": 0.7,
}


@functools.cache
def demo_model() -> DemoModel:
    return DemoModel(CHECKPOINT_DIR)


@functools.cache
def held_out() -> dict[str, list[Text]]:
    return held_out_texts(seed=1, each=SAMPLE)


@functools.cache
def verdicts_on(category: str) -> list[Verdict]:
    return judge(demo_model(), held_out()[category])


LONG = {
    "recall",
    "answer from a tool result",
    "story",
    "tools offered, none needed",
    "copying",
    "lists and counting",
    "tool call",
    "addition and subtraction",
    "outside its world",
    "about Kaon",
}
"""Categories with the longest answers, and those whose answers are compared as another category's are. The weights
change with `make demo-model` only."""


@pytest.mark.parametrize(
    "category", [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in LEAST_RIGHT]
)
def test_held_out_questions_are_answered(category: str) -> None:
    verdicts = verdicts_on(category)
    wrong = [(render_prompt(v.text), v.answer, v.text.answer) for v in verdicts if not v.right]
    assert 1 - len(wrong) / len(verdicts) >= LEAST_RIGHT[category], wrong


@pytest.mark.parametrize("category", some(["JSON", "tool call"], "JSON"))
def test_what_is_to_be_json_or_a_call_is_one(category: str) -> None:
    verdicts = verdicts_on(category)
    malformed = [v.answer for v in verdicts if not v.well_formed]
    assert len(malformed) <= 0.05 * len(verdicts), malformed


def test_checkpoint_is_small_enough_to_live_in_the_repository() -> None:
    sizes = {path.name: path.stat().st_size for path in CHECKPOINT_DIR.iterdir()}
    assert sizes["model.safetensors"] <= 10_000_000
    assert sum(sizes.values()) <= 11_000_000


def test_both_end_tokens_stop_generation() -> None:
    model = demo_model()
    ends = model.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.model.generation_config.eos_token_id == ends


@pytest.mark.parametrize("text", ["héllo wörld", "你好 世界", "🎉 👍🏽", "12 + 7 = 19", "\tindented\n\n"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = demo_model().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token() -> None:
    tokenizer = demo_model().tokenizer
    assert [tokenizer.decode(token) for token in tokenizer.encode("2048")] == ["2", "0", "4", "8"]


def test_the_chat_template_needs_no_file_but_the_checkpoint() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = demo_model().tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

"""Completion requests become the engine's: empty prompts, truncated ones, and prompts with a suffix."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from engine.messages import ModelInfo
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import CheckedPrompt, InputOutputProcessor, InvalidRequest
from engine.text.tokenizer import Tokenizer
from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE
from server.routes.completions import PromptEcho, prepare_prompts
from server.schemas.body import validate
from server.schemas.completions import CompletionRequest

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A trained tokenizer with fill-in markers, and a BOS that it does not add by itself."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["def add(a, b):\n    return a + b\n"] * 3, trainer)
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in (*MARKS, "<s>")])
    return Tokenizer(backend, {"bos_token": "<s>"})


async def prepared(
    tokenizer: Tokenizer,
    defaults: GenerationDefaults | None = None,
    bos_token_id: int | None = None,
    **fields: Any,
) -> tuple[CheckedPrompt, PromptEcho]:
    info = ModelInfo("", "", "", "", 0, tokenizer.vocab_size, 64, [], 16, 10)
    processor = InputOutputProcessor(tokenizer, None, info, defaults or GenerationDefaults(), bos_token_id)
    request = validate({"model": "m", **fields}, CompletionRequest, allow_unknown=False)
    jobs = Jobs(Accounts())
    prompts: list[CheckedPrompt] = []
    _, (echo,) = await prepare_prompts(request, processor, jobs.of(ANYONE), lambda each: prompts.append(each) or [])
    jobs.close()
    (prompt,) = prompts
    return prompt, echo


async def test_prompt_and_suffix_become_a_fill_in_prompt_that_ends_where_the_gap_does(tokenizer: Tokenizer) -> None:
    request, shown = await prepared(tokenizer, prompt="def add(", suffix="return a", echo=True)
    text = tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert text == "<|fim_prefix|>def add(<|fim_suffix|>return a<|fim_middle|>"
    assert request.params.stop_token_ids == [tokenizer.token_id("<|file_sep|>")]
    assert shown.echo == "def add("


async def test_a_prompt_of_token_ids_can_have_a_suffix_and_is_echoed_without_marks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def add(")
    request, shown = await prepared(tokenizer, prompt=ids, suffix="return a", echo=True, stop_token_ids=[3])
    assert request.token_ids[1 : 1 + len(ids)] == ids
    assert request.params.stop_token_ids == [3, tokenizer.token_id("<|file_sep|>")]
    assert shown.echo == "def add("


async def test_an_empty_suffix_is_none(tokenizer: Tokenizer) -> None:
    request, _ = await prepared(tokenizer, prompt="def", suffix="")
    assert request.token_ids == tokenizer.encode("def")


@pytest.mark.parametrize("prompt", [{"prompt": ""}, {}, {"prompt": None}])
async def test_an_empty_prompt_is_the_bos_token(tokenizer: Tokenizer, prompt: dict[str, Any]) -> None:
    request, shown = await prepared(tokenizer, echo=True, **prompt)
    assert request.token_ids == [tokenizer.bos_token_id]
    assert shown.echo == ""


async def test_an_empty_prompt_is_the_bos_token_of_the_settings(tokenizer: Tokenizer) -> None:
    request, _ = await prepared(tokenizer, bos_token_id=7, prompt="")
    assert request.token_ids == [7]


async def test_an_empty_prompt_is_refused_where_there_is_no_bos(tokenizer: Tokenizer) -> None:
    without = SimpleNamespace(encode=tokenizer.encode, bos_token_id=None, longest_token=9, token_id=tokenizer.token_id)
    without.vocab_size = tokenizer.vocab_size
    with pytest.raises(InvalidRequest, match="prompt is empty, and this model has no beginning-of-sequence token"):
        await prepared(cast(Tokenizer, without), prompt="")


async def test_a_cut_prompt_is_echoed_as_it_is_read(tokenizer: Tokenizer) -> None:
    request, shown = await prepared(tokenizer, prompt="def add(a, b):", truncate_prompt_tokens=2, echo=True)
    assert len(request.token_ids) == 2
    assert "def add(a, b):".endswith(shown.echo)
    assert shown.echo == tokenizer.decode(request.token_ids)


@pytest.mark.parametrize(("fields", "kept"), [({}, 48), ({"max_tokens": 10}, 54), ({"max_tokens": 0}, 64)])
async def test_as_many_tokens_as_fit_leave_room_for_the_answer(
    tokenizer: Tokenizer, fields: dict[str, Any], kept: int
) -> None:
    request, _ = await prepared(tokenizer, prompt=[5] * 100, truncate_prompt_tokens=-1, **fields)
    assert len(request.token_ids) == kept
    assert request.max_tokens == 64 - kept


@pytest.mark.parametrize(("fields", "max_tokens"), [({}, 6), ({"max_tokens": 9}, 9)])
async def test_the_checkpoints_max_new_tokens_is_the_default_bound(
    tokenizer: Tokenizer, fields: dict[str, Any], max_tokens: int
) -> None:
    request, _ = await prepared(tokenizer, GenerationDefaults(max_new_tokens=6), prompt="def", **fields)
    assert request.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "in_thread"),
    [
        ({"prompt": ["a"] * 64}, False),
        ({"prompt": ["a"] * 8, "n": 9}, True),
        ({"prompt": "a", "bad_words": ["a"] * 64}, False),
        ({"prompt": "a", "bad_words": ["a"] * 65}, True),
        ({"prompt": "a", "bad_words": ["a"], "logit_bias": {str(token): 1 for token in range(64)}}, True),
    ],
)
async def test_many_sequences_and_entries_of_tables_are_created_in_a_thread(
    tokenizer: Tokenizer, fields: dict[str, Any], in_thread: bool
) -> None:
    """The sequences of 2048 prompts took the event loop 40 ms, and 800 bad words took it 25 ms."""
    processor = InputOutputProcessor(
        tokenizer, None, ModelInfo("", "", "", "", 0, tokenizer.vocab_size, 64, [], 16, 10)
    )
    request = validate({"model": "m", **fields}, CompletionRequest, allow_unknown=False)
    jobs, threads = Jobs(Accounts()), set[bool]()
    await prepare_prompts(
        request,
        processor,
        jobs.of(ANYONE),
        lambda _: threads.add(threading.current_thread() is threading.main_thread()) or [],
    )
    jobs.close()
    assert threads == {not in_thread}


async def test_long_prompts_are_prepared_alike(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt has at least"):
        await prepared(tokenizer, prompt="def add" * 2000)

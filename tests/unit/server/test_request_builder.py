"""A checked prompt becomes the messages for the core: ids, seeds, adapter, priority, salt and grammar."""

import gc
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from engine.config.config import Config
from engine.messages import ModelInfo
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.io_processor import InputOutputProcessor, NewSequence
from engine.text.pooling import PooledPrompt, PoolingProcessor
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.errors import BadRequest
from server.frontend import Frontend, ServedModel
from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE, Owner
from server.parsing.answer_format import AnswerFormat
from server.request_builder import (
    PreparedChat,
    check_repeated,
    check_request_limits,
    last_index,
    new_sequences,
    prepare_chat,
    render_prompt,
)
from server.routes import pooling
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.pooling import ScoreRequest

TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT_DIR)


def sequences(
    grammar: str | None = None,
    params: dict[str, Any] | None = None,
    *,
    owner: Owner = ANYONE,
    shares_prefix_cache: bool = False,
    **fields: Any,
) -> list[NewSequence]:
    """Messages of a request for completions of a prompt of three tokens."""
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 64, [], 16, 10)
    processor = InputOutputProcessor(TOKENIZER, None, info)
    frontend = SimpleNamespace(
        loaded=SimpleNamespace(processor=processor),
        hub=SimpleNamespace(new_ids=lambda count: range(7, 7 + count)),
        shares_prefix_cache=shares_prefix_cache,
        adapters=SimpleNamespace(number_of={"m": 0, "adapted": 2}.__getitem__),
    )
    request = validate({"model": "m", "prompt": "def", **fields}, CompletionRequest, allow_unknown=False)
    prompt = processor.check([5, 6, 7], SamplingParams(**params or {}), clip_max_tokens=True)
    return new_sequences(
        request, prompt, grammar, cast(Frontend, frontend), owner, 3.0, num_choices=request.num_choices
    )


def test_keys_share_no_cached_prefix_unless_the_server_says_so() -> None:
    def salt(owner: Owner, shares: bool = False, **fields: Any) -> int | None:
        [sequence] = sequences(owner=owner, shares_prefix_cache=shares, **fields)
        return sequence.request.cache_salt

    one, two = Owner.of_key("1" * 64), Owner.of_key("2" * 64)
    given: dict[str, Any] = {"cache_salt": "x"}
    assert salt(ANYONE) is None
    assert salt(one) == salt(one)
    assert len({salt(one), salt(two), salt(one, **given), salt(two, **given), salt(ANYONE, **given)}) == 5
    assert salt(one, cache_salt="") != salt(one)
    assert salt(one, shares=True) is None
    assert salt(one, shares=True, **given) == salt(two, shares=True, **given)


def test_the_core_gets_the_party_of_each_request() -> None:
    [sequence] = sequences(owner=Owner("10.0.0.7", weight=2.5))
    assert (sequence.request.owner, sequence.request.weight) == ("10.0.0.7", 2.5)


def test_each_choice_has_an_id_and_the_arrival_time_and_all_share_the_prompt() -> None:
    choices = sequences(n=2, best_of=3)
    assert [each.request.request_id for each in choices] == [7, 8, 9]
    assert [each.state.request_id for each in choices] == [7, 8, 9]
    assert {each.state.arrival_time for each in choices} == {3.0}
    assert len({id(each.request.prompt_token_ids) for each in choices}) == 1


def test_priority_and_salt_go_to_the_engine() -> None:
    (choice,) = sequences(priority=-3, cache_salt="x")
    assert choice.request.priority == -3
    assert choice.request.cache_salt is not None
    assert sequences()[0].request.cache_salt is None


@pytest.mark.parametrize(("model", "adapter"), [("m", 0), ("adapted", 2)])
def test_the_models_name_chooses_the_adapter(model: str, adapter: int) -> None:
    assert sequences(model=model)[0].request.adapter == adapter


def test_the_core_gets_the_grammar_and_the_clipped_length_and_no_stop_strings() -> None:
    (choice,) = sequences("start: /a/", {"max_tokens": 1000, "stop_strings": ["x"], "temperature": 0.5})
    assert choice.request.sampling_params == SamplingParams(max_tokens=61, temperature=0.5, grammar="start: /a/")


def test_parameters_that_need_no_change_are_not_copied() -> None:
    choices = sequences(n=2, params={"max_tokens": 9})
    assert choices[0].request.sampling_params is choices[1].request.sampling_params


def test_choices_have_seeds_of_their_own_that_wrap_around() -> None:
    choices = sequences(n=3, params={"seed": 2**63 - 2})
    assert [each.request.sampling_params.seed for each in choices] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_keys_of_one_group_share_cached_prefixes_and_others_do_not() -> None:
    def salt(owner: Owner) -> int | None:
        [sequence] = sequences(owner=owner)
        return sequence.request.cache_salt

    one, two = Owner.of_key("1" * 64), Owner.of_key("2" * 64)
    assert salt(one._replace(group="team")) == salt(two._replace(group="team"))
    assert len({salt(one), salt(one._replace(group="team")), salt(one._replace(group="else")), salt(two)}) == 4


@pytest.mark.parametrize(
    ("num_prompts", "fields", "refused"),
    [
        (1, {"n": 128, "logit_bias": dict.fromkeys(map(str, range(1024)), 1.0)}, None),
        (1, {"n": 128, "logit_bias": dict.fromkeys(map(str, range(1024)), 1.0), "stop": "x"}, "logit_bias"),
        (16, {"n": 128, "stop_token_ids": [1] * 64, "bad_words": ["a"]}, "stop_token_ids"),
        (1, {"n": 1, "allowed_token_ids": [1] * 1000}, None),
    ],
)
def test_lists_that_many_choices_keep_each_are_bounded_together(
    num_prompts: int, fields: dict[str, Any], refused: str | None
) -> None:
    frontend = cast(Frontend, SimpleNamespace(config=Config()))
    request = validate({"model": "m", "prompt": "x", **fields}, CompletionRequest, allow_unknown=False)
    if refused is None:
        check_request_limits(request, frontend, num_prompts=num_prompts)
        return
    with pytest.raises(BadRequest, match="a request may have at most 131072; ask for fewer choices") as caught:
        check_request_limits(request, frontend, num_prompts=num_prompts)
    assert caught.value.param == refused


def test_the_choices_of_a_request_share_its_lists() -> None:
    params = {"stop_strings": ["a", "b"], "logit_bias": {1: 2.0}, "bad_words": [[1, 2]]}
    choices = sequences(params=params, n=8)
    for name in ("logit_bias", "bad_words"):
        assert len({id(getattr(each.request.sampling_params, name)) for each in choices}) == 1
    assert len({id(each.state._params.stop_strings) for each in choices}) == 1


def test_a_sequence_holds_few_objects_until_its_first_token() -> None:
    """Garbage collections visit those of all sequences that wait, and hold the interpreter's lock meanwhile."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        choices = sequences(n=128)
        after = len(gc.get_objects())
    finally:
        gc.enable()
    assert len(choices) == 128
    assert after - before <= 5 * 128 + 30


def test_the_last_index_of_a_text_is_found_in_linear_time() -> None:
    assert last_index("abcabca", "abc") == 3
    assert last_index("abc", "abcd") == last_index("abc", "x") == -1
    assert last_index("abc", "") == 3
    # With str.rfind, which compares the whole part at each index, this takes ten minutes.
    assert last_index("a" * 2**21, "ac" + "a" * 2**20) == -1


async def test_a_chat_that_is_too_long_for_the_context_is_refused_before_it_is_rendered() -> None:
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 64, [], 16, 10)
    processor = InputOutputProcessor(TOKENIZER, ChatTemplate({"default": "{{ raise_exception('rendered') }}"}), info)
    model = SimpleNamespace(processor=processor, grammars=None, answer_format=AnswerFormat("none", "none"))
    frontend = cast(Frontend, SimpleNamespace(loaded=model, jobs=Jobs(Accounts()), config=Config()))

    def chat(num_characters: int, **fields: Any) -> Coroutine[Any, Any, PreparedChat]:
        messages = [{"role": "user", "content": "x" * num_characters}]
        request = validate({"model": "m", "messages": messages, **fields}, ChatCompletionRequest, allow_unknown=False)
        return prepare_chat(request, frontend, ANYONE)

    with pytest.raises(BadRequest, match="at least") as refused:
        await chat(100_000)
    assert refused.value.code == "context_length_exceeded"
    for fields in (
        dict[str, Any](num_characters=60),
        dict[str, Any](num_characters=100_000, truncate_prompt_tokens=5),
    ):
        with pytest.raises(BadRequest, match="rendered"):
            await chat(**fields)


async def test_the_token_that_begins_a_calls_result_ends_answers_to_requests_with_tools() -> None:
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 512, [], 16, 10)
    processor = InputOutputProcessor(TOKENIZER, ChatTemplate({"default": "{{ messages }}"}), info)
    answer_format = AnswerFormat("functiongemma", "none", token_id={"<start_function_response>": 50}.get)
    model = SimpleNamespace(processor=processor, grammars=None, answer_format=answer_format)
    frontend = cast(Frontend, SimpleNamespace(loaded=model, jobs=Jobs(Accounts()), config=Config()))

    async def stops(**fields: Any) -> list[int] | None:
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stop_token_ids": [7], **fields}
        request = validate(chat, ChatCompletionRequest, allow_unknown=False)
        return (await prepare_chat(request, frontend, ANYONE)).prompt.params.stop_token_ids

    tools = [{"type": "function", "function": {"name": "now"}}]
    assert await stops(tools=tools) == [7, 50]
    assert await stops(tools=tools, ignore_eos=True) == [7]
    assert await stops(tools=tools, tool_choice="none") == await stops() == [7]


def test_variables_of_the_chat_template_have_defaults_of_the_server() -> None:
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 64, [], 16, 10)
    template = ChatTemplate({"default": "{{ enable_thinking }} {{ preserve_thinking }} {{ mark }}"})
    model = SimpleNamespace(processor=InputOutputProcessor(TOKENIZER, template, info))
    config = Config.from_fields(default_chat_template_kwargs={"enable_thinking": False, "mark": "!"})

    def prompt(**fields: Any) -> str:
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        request = validate(chat, ChatCompletionRequest, allow_unknown=False)
        frontend = SimpleNamespace(loaded=model, config=config)
        return render_prompt(request, cast(ServedModel, model), cast(Frontend, frontend))

    assert prompt() == "False  !"
    assert prompt(enable_thinking=True, preserve_thinking=True) == "True True !"
    assert prompt(chat_template_kwargs={"mark": "?"}) == "False  ?"


def test_results_of_calls_have_the_names_of_their_functions() -> None:
    """Clients give the id of a call only; ids may return in later turns."""
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 64, [], 16, 10)
    source = "{% for each in messages if each.role == 'tool' %}{{ each.name }} {% endfor %}"
    model = SimpleNamespace(processor=InputOutputProcessor(TOKENIZER, ChatTemplate({"default": source}), info))

    def calls(*called: tuple[str, str]) -> dict[str, Any]:
        function = {"arguments": "{}"}
        each = [{"id": id, "type": "function", "function": {**function, "name": name}} for id, name in called]
        return {"role": "assistant", "tool_calls": each}

    def result(id: str, **fields: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": "3", **fields}

    first = [calls(("a", "now"), ("b", "find")), result("b"), result("a")]
    second = [calls(("a", "roll")), result("a"), result("c"), result("a", name="other")]
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}, *first, *second]}
    request = validate(chat, ChatCompletionRequest, allow_unknown=False)
    frontend = cast(Frontend, SimpleNamespace(loaded=model, config=Config()))
    assert render_prompt(request, cast(ServedModel, model), frontend) == "find now roll  other "


def test_what_is_read_with_each_prompt_has_the_bound_of_a_body() -> None:
    """A suffix of some kilobytes for 2048 prompts could stand for gigabytes of tokens."""
    frontend = cast(Frontend, SimpleNamespace(max_request_bytes=1000))
    assert check_repeated("suffix", 100, 10, frontend) == 1000
    assert check_repeated("suffix", 5000, 1, frontend) == 5000  # It is as long as the body.
    with pytest.raises(
        BadRequest, match=r"^suffix has 101 characters, which are read 10 times, .* at most 1000 in all"
    ):
        check_repeated("suffix", 101, 10, frontend)


@pytest.mark.parametrize(
    ("query", "num_documents", "in_thread"), [("a", 64, False), ("a", 65, True), ("a" * 99, 50, True)]
)
async def test_many_pairs_to_score_are_tokenised_in_a_thread(
    query: str, num_documents: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2048 documents of a character with a query of 2000 took the event loop a second."""
    monkeypatch.setattr(pooling, "Generation", lambda *_, **__: None)
    jobs, threads = Jobs(Accounts()), list[bool]()
    frontend = cast(
        Frontend,
        SimpleNamespace(
            hub=SimpleNamespace(new_ids=range),
            jobs=jobs,
            max_request_bytes=10**6,
            shares_prefix_cache=True,
            adapters=SimpleNamespace(number_of=lambda _: 0),
            config=None,
        ),
    )
    request = ScoreRequest(model="m", text_1=[query], text_2=["b"] * num_documents)
    processor = cast(PoolingProcessor, SimpleNamespace(pooling=SimpleNamespace(scores_pairs=True)))
    call = pooling._Call(cast(Request, None), request, frontend, ANYONE, processor)

    def tokenize() -> list[PooledPrompt]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return []

    num_characters = call.num_characters("text_1", request.text_1, request.text_2, "")
    await call.prepare(num_characters, num_documents, tokenize)
    jobs.close()
    assert threads == [in_thread]

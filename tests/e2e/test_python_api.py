"""The Python API, `kaon`, with the embedded model: chats with the server's answers, and many at the same time."""

import asyncio
import json
import runpy
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kaon import LLM, AsyncLLM, EngineDeadError, InvalidRequest, SamplingParams
from server.errors import NotReady, PoisonousRequest

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_kvcache_blocks=512) as llm:
        yield llm


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def async_llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(num_kvcache_blocks=512, max_num_seqs=4) as llm:
        yield llm


# -- blocking ---------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_between_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("The capital of France is", params, use_tqdm=False)
    answer = llm.chat(QUESTION, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("2 + 2 = 4", "stop")
    assert answer.usage.completion_tokens == 8
    after = llm.generate("The capital of France is", params, use_tqdm=False)
    assert before[0]["token_ids"] == after[0]["token_ids"]


async def test_a_chat_is_answered_where_an_event_loop_runs_as_in_a_notebook(llm: LLM) -> None:
    assert llm.chat(QUESTION, temperature=0).choices[0].message.content == "2 + 2 = 4"
    chunks = list(llm.stream_chat(QUESTION, temperature=0))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 + 2 = 4"


def test_several_chats_are_answered_in_their_order_each_with_its_choices(llm: LLM) -> None:
    answers = llm.chat([CAPITAL, QUESTION, CAPITAL], temperature=0, n=2)
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    paris = ["The capital of France is Paris."] * 2
    assert texts == [paris, ["2 + 2 = 4"] * 2, paris]
    assert llm.chat([]) == []


def test_a_tool_is_called_and_json_follows_its_schema(llm: LLM) -> None:
    [choice] = llm.chat(QUESTION, temperature=0, tools=[ADD], tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    [choice] = llm.chat(QUESTION, temperature=0, response_format=form).choices
    assert isinstance(json.loads(choice.message.content or "")["n"], int)


def test_the_chunks_of_a_streamed_chat_add_up_to_the_answer(llm: LLM) -> None:
    options = {"include_usage": True}
    *chunks, last = llm.stream_chat(QUESTION, temperature=0, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 + 2 = 4"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 9}, "temperature"), ({"model": "none"}, "model"), ({"max_tokns": 3}, "max_tokns")],
)
def test_a_wrong_field_is_an_invalid_request(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.chat(QUESTION, **fields)
    assert refused.value.param == param


# -- asyncio ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_more_tasks_than_the_engine_runs_at_a_time_all_get_their_own_answer(async_llm: AsyncLLM) -> None:
    numbers = range(2, 34)
    asked = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in numbers]
    answers = await asyncio.gather(*(async_llm.chat(each, temperature=0) for each in asked))
    alone = [await async_llm.chat(each, temperature=0) for each in asked[:3]]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[:3] == [answer.choices[0].message.content for answer in alone]
    assert len(set(texts)) == len(texts)


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_of_prompts_and_chats_add_up(async_llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    whole = await async_llm.generate("Hello", params)
    assert "".join([delta.text async for delta in async_llm.stream("Hello", params)]) == whole["text"]
    chunks = [chunk async for chunk in async_llm.stream_chat(QUESTION, temperature=0)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 + 2 = 4"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_task_and_a_stream_left_early_abort_their_sequences(async_llm: AsyncLLM) -> None:
    endless = SamplingParams(max_tokens=2000, ignore_eos=True)
    began = asyncio.Event()

    async def read() -> None:
        async for _ in async_llm.stream("Hello", endless):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert async_llm._frontend.hub.num_live == 0
    assert async_llm._frontend.admission.is_empty


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_fails_by_itself_is_not_the_engines_death(async_llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="poisonous") as failed, async_llm._refusals():
        raise PoisonousRequest("poisonous")
    assert not isinstance(failed.value, EngineDeadError)
    with pytest.raises(EngineDeadError), async_llm._refusals():
        raise NotReady("gone")


@pytest.mark.asyncio(loop_scope="function")
async def test_a_call_from_another_event_loop_is_refused_and_does_not_hang(async_llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="was started in another event loop"):
        await async_llm.generate("Hello")
    with pytest.raises(RuntimeError, match="was started in another event loop"):
        async for _ in async_llm.stream_chat(QUESTION):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_prompt_or_field_is_an_invalid_request_here_too(async_llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="token ids are between"):
        await async_llm.generate([10**6])
    with pytest.raises(InvalidRequest, match="temperature is 9"):
        await async_llm.chat(QUESTION, temperature=9)


# -- examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("generate", "The capital of France is Paris."),
        ("chat", "17 + 25 = 42"),
        ("async_chats", "What is 7 + 7? 7 + 7 = 14"),
        ("search", "The capital of Italy is Rome."),
    ],
)
def test_examples_run(
    name: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert printed in capsys.readouterr().out

"""Request models: fields that OpenAI accepts are accepted; all others give one sentence that names the field."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.sampling_params import SamplingParams
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import InputOutputProcessor
from server.errors import BadRequest
from server.ignored import collect
from server.request_builder import prefix_salt, sampling_params
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest, unread_note
from server.schemas.chat_tools import NamedFunction, ToolReference
from server.schemas.completions import CompletionRequest
from server.schemas.generation import StreamOptions

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def processor_with(defaults: GenerationDefaults) -> InputOutputProcessor:
    """The part of a front end that request models use: the defaults, and tokens for bad words, here their lengths."""
    processor = SimpleNamespace(defaults=defaults, tokenize_words=lambda words: [[len(word)] for word in words])
    return cast(InputOutputProcessor, processor)


PROCESSOR = processor_with(GenerationDefaults())


def completion(**fields: Any) -> CompletionRequest:
    return validate({"model": "m", "prompt": "Hi", **fields}, CompletionRequest, allow_unknown=False)


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return validate({"model": "m", "messages": messages, **fields}, ChatCompletionRequest, allow_unknown=False)


def refusal(make: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        make(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"temperature": 3}, "temperature", "temperature is 3; it must be between 0 and 2"),
        ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must be between 0 and 2"),
        ({"temperature": "1"}, "temperature", 'temperature is "1"; it must be a number'),
        ({"temperature": True}, "temperature", "temperature is true; it must be a number"),
        ({"temperature": []}, "temperature", "temperature is an empty list; it must be a number"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs", "prompt_logprobs is 1.5; it must be an integer"),
        ({"top_p": -0.1}, "top_p", "top_p is -0.1; it must be between 0 and 1"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty", "is 1e-09; it must be between 0.01 and 10"),
        ({"x" * 99: 1}, "x" * 60, f"{'x' * 60} is not a known field"),
        ({"top_k": -2}, "top_k", "top_k is -2; it must be at least -1"),
        ({"min_p": 1.5}, "min_p", "min_p is 1.5; it must be between 0 and 1"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty is 2.5; it must be between -2 and 2"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be at least 0"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be an integer"),
        ({"max_tokens": False}, "max_tokens", "max_tokens is false; it must be an integer"),
        ({"max_tokens": 10**30}, "max_tokens", f"max_tokens is {10**30}; it must be between 0 and 2147483647"),
        ({"n": 0}, "n", "n is 0; it must be at least 1"),
        ({"stream": 1}, "stream", "stream is 1; it must be true or false"),
        ({"stop": 5}, "stop", "stop is 5; it must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5; it must be a string"),
        ({"stop": ["a", ""]}, "stop", "stop is a list; each stop string must have at least 1 character"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 is 101; it must be between -100 and 100"),
        ({"logit_bias": [5]}, "logit_bias", "logit_bias is a list; it must be an object"),
        ({"seed": 2**63}, "seed", f"seed is {2**63}; it must be between {-(2**63)} and {2**63 - 1}"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be between 0 and 20"),
        ({"logprobs": True}, "logprobs", "logprobs is true; it must be an integer"),
        ({"suffix": 5}, "suffix", "suffix is 5; it must be a string"),
        (
            {"suffix": "x", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
            "is set with suffix, whose marks must stay",
        ),
        ({"suffix": "x", "echo": True, "logprobs": 1}, "logprobs", "logprobs is set with suffix and echo"),
        ({"best_of": 2, "stream": True}, "best_of", "a stream cannot choose the best, so it must equal n, 1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1; it must be between 0 and 20"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0; it must be -1 or at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "is -2; it must be at least -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "is an empty list; it must hold at least 1 token id"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", 'allowed_token_ids[0] is "a"; it must be an integer'),
        ({"bad_words": [""]}, "bad_words", "each of its strings must have between 1 and 256 characters"),
        ({"bad_words": ["x" * 257]}, "bad_words", "each of its strings must have between 1 and 256 characters"),
        ({"bad_words": ["x" * 9] * 500}, "bad_words", "its strings may have 4096 characters together, and have 4500"),
        ({"bad_words": "x"}, "bad_words", 'bad_words is "x"; it must be a list'),
        ({"priority": 2**31}, "priority", "it must be between -2147483648 and 2147483647"),
        ({"priority": 0.5}, "priority", "priority is 0.5; it must be an integer"),
        ({"return_token_ids": 1}, "return_token_ids", "return_token_ids is 1; it must be true or false"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "stream_options.x is not a known field"),
        ({"temprature": 1}, "temprature", "not a known field; did you mean temperature? If not, leave it out, or"),
        ({"qqqq": 1}, "qqqq", "qqqq is not a known field; leave it out, or start the server with --allow-unknown"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; it must be at least n, 2"),
        ({"temprature": None}, "temprature", "temprature is not a known field"),
        ({"model": None}, "model", "model is missing"),
        ({"model": 7}, "model", "model is 7; it must be a string"),
        ({"prompt": []}, "prompt", "prompt is an empty list; it must hold at least 1"),
        ({"prompt": 5}, "prompt", "prompt is 5; it must be a string, a list of strings"),
        ({"prompt": [True]}, "prompt", "its item 0 must be a string or a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "its item 0 must be a string or a list of token ids"),
        ({"prompt": [[1], [2.0]]}, "prompt", "its item 1 must be a string or a list of token ids"),
        ({"user": 5}, "user", "user is 5; it must be a string"),
    ],
)
def test_a_wrong_completion_field_is_named_with_its_value_and_limit(
    fields: dict[str, Any], param: str, sentence: str
) -> None:
    error = refusal(completion, **fields)
    assert error.param == param
    assert sentence in str(error)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"messages": []}, "messages", "messages is an empty list; it must have at least 1 item"),
        ({"messages": "Hi"}, "messages", 'messages is "Hi"; it must be a list'),
        ({"messages": ["Hi"]}, "messages[0]", 'messages[0] is "Hi"; it must be an object'),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "role is \"bot\"; it must be 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5; it must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "messages[0].content[0] is of type image_url; this server reads parts of type text only, so leave it "
            "out or describe it in text",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[0]",
            "messages[0] has tool_calls, which only the role assistant has, not user",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "not a known field"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice is \"any\"; it must be 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "it must be 'function' or 'custom' or 'allowed_tools'"),
        ({"tool_choice": {}}, "tool_choice.type", "tool_choice.type is missing"),
        ({"continue_final_message": True}, "continue_final_message", "the last message must be an assistant's"),
        ({"echo": True}, "echo", "echo is true; a chat has only an answer to echo with continue_final_message"),
        ({"verbosity": "huge"}, "verbosity", "verbosity is \"huge\"; it must be 'low', 'medium' or 'high'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text' or 'json_object' or"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
            "response_format.json_schema.name is missing",
        ),
        ({"logprobs": 5}, "logprobs", "logprobs is 5; it must be true or false"),
        ({"top_logprobs": 5}, "top_logprobs", "top_logprobs is 5; it needs logprobs to be true"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
        ({"audio": {}}, "audio", "audio is not supported"),
        ({"moderation": {"model": "m"}}, "moderation", "moderation is not supported"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "at most 512 characters, and that of k has 513"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "it may have at most 16 keys, and has 17"),
        ({"prompt": "Hi"}, "prompt", "prompt is not a known field"),
    ],
)
def test_a_wrong_chat_field_is_named_with_its_value_and_limit(
    fields: dict[str, Any], param: str | None, sentence: str
) -> None:
    error = refusal(chat, **fields)
    assert error.param == param
    assert sentence in str(error)


def test_unknown_fields_are_ignored_where_the_server_allows_them_at_every_depth() -> None:
    data = {"model": "m", "messages": [{"role": "user", "content": "Hi", "mood": 1}], "temprature": 1}
    assert validate(data, ChatCompletionRequest, allow_unknown=True).messages[0].content == "Hi"


def test_allowing_unknown_fields_does_not_allow_unsupported_ones() -> None:
    message = {"role": "user", "content": "Hi"}
    with pytest.raises(BadRequest, match="audio is not supported"):
        validate({"model": "m", "messages": [message], "audio": {}}, ChatCompletionRequest, allow_unknown=True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{}] * 100_000}, "messages[0].role is missing"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "it may have at most 2048 items, and has 2049"),
        ({"messages": [{"role": "user", "content": [1] * 100_000}]}, "messages[0].content[0] is 1"),
        ({"tools": [1] * 100_000}, "tools[0] is 1"),
        ({"stop": [1] * 100_000}, "stop[0] is 1"),
        ({"stop_token_ids": [""] * 100_000}, 'stop_token_ids[0] is ""'),
        ({"logit_bias": dict.fromkeys(map(str, range(2049)), "")}, "it may have at most 2048 fields, and has 2049"),
        ({"metadata": dict.fromkeys(map(str, range(2049)))}, "it may have at most 2048 fields, and has 2049"),
        ({"messages": [dict.fromkeys(map(str, range(2049)))]}, "messages[0] is an object; it may have at most 2048"),
        (dict.fromkeys(map(str, range(2049)), 1), "the request body is an object; it may have at most 2048 fields"),
    ],
)
def test_a_body_of_very_many_wrong_things_is_refused_at_the_first(fields: dict[str, Any], sentence: str) -> None:
    error = refusal(chat, **fields)
    assert sentence in str(error)
    assert isinstance(error.__context__, ValidationError)
    assert error.__context__.error_count() <= 3


def test_very_many_prompts_are_refused_together() -> None:
    assert "it may hold at most 2048 prompts, and holds 2049" in str(refusal(completion, prompt=["a"] * 2048 + [5]))


def test_a_top_p_of_zero_takes_the_argmax_token() -> None:
    assert sampling_params(completion(top_p=0, top_k=5), 8, None, None, PROCESSOR) == SamplingParams(
        max_tokens=8, top_k=1
    )


def test_null_means_absent() -> None:
    fields = (
        "temperature", "top_p", "top_k", "max_tokens", "stop", "suffix", "logit_bias", "stream_options", "logprobs",
        "best_of", "n", "seed", "user", "echo", "stream", "priority", "bad_words", "prompt_logprobs",
    )  # fmt: skip
    assert completion(**dict.fromkeys(fields)) == completion()
    assert completion(prompt=None).prompt == [""]
    nothing = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}
    assert completion(stream_options=nothing).stream_options == StreamOptions()


def test_no_alternatives_need_no_log_probabilities() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": False, "top_logprobs": 0}
    assert validate(asked, ChatCompletionRequest, allow_unknown=False).alternatives is None


def test_what_clients_send_for_nothing_is_accepted() -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    hinted = chat(messages=[{"role": "user", "content": [part]}], prompt_cache_options={"ttl": "30m"})
    assert hinted.messages[0].text == "Hi"
    request = completion(stop=[], suffix="", user="", logit_bias={}, stream_options={}, bad_words=[], cache_salt="")
    assert sampling_params(request, 16, None, None, PROCESSOR) == SamplingParams(max_tokens=16)


def test_messages_come_back_with_what_openais_libraries_add_to_them() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    copied = {"role": "assistant", "refusal": None, "annotations": [], "tool_calls": [call], "reasoning": "r"}
    part = {"type": "text", "text": "Hi", **copied, "reasoning_content": "r"}
    parsed = {"role": "assistant", "content": [part], "parsed": {"a": 1}, "tool_calls": [call], "reasoning": "r"}
    message = chat(messages=[{"role": "user", "content": "x"}, parsed]).messages[1]
    assert (message.text, message.reasoning, len(message.tool_calls or ())) == ("Hi", "r", 1)
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\] is of type text and has no field text"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": None}]}])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_form_of_prompt_becomes_a_list_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_defaults_are_those_of_openai() -> None:
    params = sampling_params(completion(), 16, None, None, PROCESSOR)
    assert params == SamplingParams(temperature=1.0, max_tokens=16)
    assert completion().max_tokens == 16
    assert chat().token_limit is None


def test_every_sampling_field_reaches_the_engine() -> None:
    request = completion(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"7": -1}, seed=3, stop="x", stop_token_ids=[9], min_tokens=2,
        ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, allowed_token_ids=[9, 7],
        bad_words=["word"], prompt_logprobs=4,
    )  # fmt: skip
    assert sampling_params(request, 8, 2, request.prompt_logprobs, PROCESSOR) == SamplingParams(
        temperature=0.5, max_tokens=8, ignore_eos=True, stop_strings=["x"], top_p=0.9, top_k=5, min_p=0.1,
        presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias={7: -1.0}, seed=3,
        logprobs=2, min_tokens=2, stop_token_ids=[9], include_stop_str_in_output=True, skip_special_tokens=False,
        allowed_token_ids=[9, 7], bad_words=[[4]], prompt_logprobs=4,
    )  # fmt: skip


def test_what_a_request_leaves_out_is_the_checkpoints_to_say() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.2)
    processor = processor_with(defaults)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.2, max_tokens=8)
    assert sampling_params(completion(), 8, None, None, processor) == expected
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert sampling_params(completion(**own), 8, None, None, processor) == SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [
        ({}, None),
        ({"logprobs": 3}, None),
        ({"logprobs": 3, "echo": True}, 3),
        ({"logprobs": 0, "echo": True}, 0),
        ({"prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 2, "logprobs": 3, "echo": True}, 3),
        ({"prompt_logprobs": 4, "logprobs": 3, "echo": True}, 4),
    ],
)
def test_prompts_are_read_for_log_probabilities_where_echo_or_the_field_asks(
    fields: dict[str, Any], alternatives: int | None
) -> None:
    assert completion(**fields).prompt_alternatives == alternatives


def test_best_of_uses_log_probabilities_that_the_request_does_not_ask_for() -> None:
    assert completion(best_of=3).alternatives == 0
    assert completion(best_of=3, logprobs=2).alternatives == 2
    assert completion(best_of=2, n=2).alternatives is None


@pytest.mark.parametrize("key", ["a", "-1", "1.5", "", "\u0661", "99999999999"])
def test_a_logit_bias_key_that_is_no_token_id_is_refused(key: str) -> None:
    error = refusal(lambda: sampling_params(completion(logit_bias={key: 1}), 8, None, None, PROCESSOR))
    assert error.param == "logit_bias"


def test_min_tokens_above_max_tokens_is_refused() -> None:
    error = refusal(lambda: sampling_params(completion(min_tokens=9), 8, None, None, PROCESSOR))
    assert str(error) == "min_tokens is 9; it must be at most max_tokens, 8"


def test_cache_salts_are_stable_and_apart() -> None:
    keys = [prefix_salt(salt, None) for salt in ("a", "b", "a")]
    assert keys[0] == keys[2] != keys[1]
    assert all(key is not None and 0 <= key < 2**64 for key in keys)


def test_the_new_name_of_the_chat_token_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=5).token_limit == 5


def test_an_assistants_answer_can_be_sent_back_as_the_client_library_dumps_it() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None,
        "function_call": None,
        "tool_calls": [CALL],
    }  # fmt: skip
    question = {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    request = chat(messages=[question, answer, result])
    assert [message.for_template() for message in request.messages] == [
        {"role": "user", "content": "Hi you"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        result,
    ]


@pytest.mark.parametrize("arguments", ["{broken", "", "[1]", "[" * 200_000, '{"a": %s}' % ("9" * 5000)])
def test_tool_call_arguments_that_are_no_json_object_reach_the_template_as_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]).messages
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == arguments


# -- fields of other servers' clients ---------------------------------------------------------------------------


def test_tolerated_fields_are_left_out_and_named_wherever_they_are() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "extra_content": {}}
    fields: dict[str, Any] = {
        "cache_prompt": True,
        "length_penalty": 1.0,
        "top_a": None,
        "verbosity": "low",
        "tools": [{"type": "function", "function": {"name": "f"}, **hint}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", **hint}], **hint},
            {"role": "assistant", "tool_calls": [call], "reasoning_details": [], "copilot_cache_control": {}},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
    }
    with collect() as ignored:
        request = chat(**fields)
    assert [message.text for message in request.messages] == ["Hi", None, "x"]
    assert set(ignored) == {
        "cache_prompt",
        "length_penalty",
        "top_a",
        "verbosity",
        "tools[].cache_control",
        "messages[].cache_control",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].extra_content",
        "messages[].reasoning_details",
        "messages[].copilot_cache_control",
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 1.2}, "length_penalty"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"messages": [{"role": "user", "content": "x", "cache_prompt": True}]}, "messages[0].cache_prompt"),
    ],
)
def test_a_tolerated_field_with_an_effect_or_in_another_place_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "enabled"),
    [
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning": {"enabled": True, "exclude": False, "effort": None}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high"}}, None),
    ],
)
def test_thinking_is_switched_by_the_field_of_each_family(fields: dict[str, Any], enabled: bool | None) -> None:
    assert chat(**fields).template_variables.get("enable_thinking") == enabled


def test_openrouters_reasoning_is_read() -> None:
    request = chat(reasoning={"effort": "high", "max_tokens": 500}, reasoning_effort="high")
    assert (request.template_variables, request.reasoning_limit) == ({"reasoning_effort": "high"}, 500)
    assert chat(reasoning={"max_tokens": 0}).reasoning_limit == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"reasoning": {"exclude": True}}, "reasoning.exclude", "reasoning is always reported"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", 'is "much"; it must be'),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning", "enabled true and effort none"),
        ({"reasoning": {"enabled": False, "effort": "low"}}, "reasoning", "enabled false and effort low"),
        ({"reasoning": {"enabled": False, "max_tokens": 9}}, "reasoning", "enabled false and max_tokens 9"),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            "reasoning_effort",
            'is "high" and reasoning.effort is "low"; they mean the same',
        ),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, "enable_thinking", "reasoning.enabled is true"),
    ],
)
def test_reasoning_that_contradicts_itself_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    refused = refusal(chat, **fields)
    assert refused.param == param
    assert words in str(refused)


@pytest.mark.parametrize(
    ("fields", "is_shown"),
    [
        ({"preserve_thinking": True}, True),
        ({"preserve_thinking": False}, False),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True),
        ({"thinking": {"type": "enabled", "clear_thinking": True}, "preserve_thinking": True}, True),
        ({"preserve_thinking": True, "chat_template_kwargs": {"preserve_thinking": False}}, False),
        ({"thinking": {"type": "enabled"}}, None),
    ],
)
def test_earlier_reasoning_is_shown_by_the_variable_of_each_family(
    fields: dict[str, Any], is_shown: bool | None
) -> None:
    variables = chat(**fields).template_variables
    assert variables.get("preserve_thinking") == is_shown
    if is_shown and "chat_template_kwargs" not in fields:
        assert variables["keep_past_thinking"]
        assert variables["preserved_thinking"]
        assert variables["think_render_option"] == "all"
        dropped = ("clear_thinking", "truncate_history_thinking", "drop_thinking", "drop_history_thinking")
        assert not any(variables[name] for name in dropped)


def test_an_assistants_turn_may_be_empty() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant"}, {"role": "user", "content": "Hello?"}]
    assert [message.for_template()["content"] for message in chat(messages=turns).messages] == ["Hi", "", "Hello?"]


def test_functions_are_tools_under_their_older_name() -> None:
    request = chat(
        functions=[{"name": "add", "parameters": {"type": "object"}}],
        function_call={"name": "add"},
        messages=[
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "add", "content": "3"},
        ],
    )
    assert [tool.function.name for tool in request.tools] == ["add"]
    assert request.tool_choice == NamedFunction(type="function", function=ToolReference(name="add"))
    assert not request.parallel_tool_calls
    _, called, answered = [message.for_template() for message in request.messages]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (answered["role"], answered["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"function_call": "auto"}, "function_call is set; it needs functions"),
        (
            {"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
            "functions and tools are both set; send tools",
        ),
        (
            {"messages": [{"role": "function", "name": "f", "content": "3"}]},
            "messages[0] has the role function; before it, a message must have a function_call",
        ),
        ({"messages": [{"role": "function", "content": "3"}]}, "messages[0] has the role function and no name"),
        (
            {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f", "arguments": ""}}]},
            "messages[0] has function_call, which only the role assistant has, not user",
        ),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions holds two functions named f"),
    ],
)
def test_functions_that_make_no_sense_are_refused(fields: dict[str, Any], sentence: str) -> None:
    error = refusal(chat, **fields)
    assert sentence in str(error)
    assert error.param in ("function_call", "functions", "messages[0]")


def test_a_note_takes_the_place_of_an_image_that_a_tool_read() -> None:
    """Agents send the whole conversation again: after a refusal, it could never continue."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    called = {"role": "assistant", "tool_calls": [CALL]}
    output = {"role": "tool", "tool_call_id": CALL["id"], "content": [{"type": "text", "text": "Read: "}, image]}
    with collect() as ignored:
        request = chat(messages=[{"role": "user", "content": "Hi"}, called, output])
    assert request.messages[-1].text == f"Read: {unread_note('image_url')}"
    assert "type image here" in (request.messages[-1].text or "")
    assert ignored == ["messages[].content[] (image_url of a tool)"]

"""Requests of `/v1/messages` become chats: roles, blocks, tools, returned reasoning, and ignored fields."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.config import Config
from engine.messages import ModelInfo
from engine.text.chat_template import ChatTemplate
from engine.text.io_processor import InputOutputProcessor
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.anthropic.conversion import NO_DOCUMENT, NO_IMAGE, count_tokens, digest, prepare, to_chat, wants_cache
from server.errors import BadRequest, ThreadUnsupported
from server.frontend import Frontend, ServedModel
from server.ignored import collect
from server.limits.jobs import TooManyJobs
from server.limits.owners import Owner
from server.request_builder import render_prompt
from server.schemas.body import MAX_ITEMS, validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.chat_tools import ToolUse
from server.schemas.messages import CountTokensRequest, MessagesRequest
from server.sealing import Kind, Seal
from tests.unit.anthropic_bodies import BODIES

BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli;"
SEAL, OTHER_SEAL = Seal(), Seal()
TEMPORARY = {"type": "ephemeral", "ttl": "1h"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
TOOL = {"name": "read", "description": "Read a file", "input_schema": {"type": "object"}}


def opened(kind: Kind, sealed: str) -> str:
    return SEAL.open(kind, sealed, None)


def sealed(words: str) -> str:
    return SEAL.seal("reasoning", words, None)


def signed(words: str) -> str:
    return SEAL.seal("signature", digest(words), None)


def request_of(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9000, "messages": list(messages) or [user("Hi")], **fields}
    return validate(body, MessagesRequest, allow_unknown=False)


def frontend_of(strip: bool = True) -> Frontend:
    """The part of a front end that a conversion reads."""
    config = SimpleNamespace(server_config=SimpleNamespace(strip_billing_line=strip))
    return cast(Frontend, SimpleNamespace(config=config))


def chat_of(*messages: dict[str, Any], strip: bool = True, **fields: Any) -> ChatCompletionRequest:
    return to_chat(request_of(*messages, **fields), frontend_of(strip), opened)[0]


def shown(*messages: dict[str, Any], **fields: Any) -> list[tuple[str, str | None]]:
    """Role and text of each message of the chat."""
    return [(message.role, message.text) for message in chat_of(*messages, **fields).messages]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def result(content: Any = "fine", id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def refusal(*messages: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(BadRequest) as raised:
        chat_of(*messages, **fields)
    return str(raised.value)


def ignored_of(*messages: dict[str, Any], **fields: Any) -> list[str]:
    with collect() as ignored:
        chat_of(*messages, **fields)
    return ignored


# -- messages ---------------------------------------------------------------------------------------------------


def test_text_and_blocks_of_it_become_messages() -> None:
    blocks = [text("One.", cache_control=TEMPORARY, citations=None), text("Two.")]
    assert shown(user(*blocks), assistant("Three."), user("Four."), system="Be brief.") == [
        ("system", "Be brief."),
        ("user", "One.\nTwo."),
        ("assistant", "Three."),
        ("user", "Four."),
    ]


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [user("One."), user("Two."), assistant("Three"), assistant(" and four."), user("Five.")]
    assert shown(*messages) == [("user", "One.\nTwo."), ("assistant", "Three and four."), ("user", "Five.")]


def test_an_empty_string_is_an_empty_input() -> None:
    """LangChain's client for JavaScript sends it for a streamed call without input."""
    chat = chat_of(user("Go."), assistant({**CALL, "input": ""}), user(result()))
    (call,) = chat.messages[1].for_template()["tool_calls"]
    assert call["function"] == {"name": "read", "arguments": {}}
    assert "messages[1].content[0].input is" in refusal(user("Go."), assistant({**CALL, "input": "{}"}))


def test_results_come_right_after_their_calls_and_text_after_them() -> None:
    calls = [CALL, {**CALL, "id": "toolu_2", "name": "write", "caller": None}]
    results = [text("Also:"), result(id="toolu_2"), result([text("a"), text("b")])]
    chat = chat_of(user("Go."), assistant(text("I read."), *calls), user(*results))
    made = chat.messages[1].for_template()
    assert [call["function"] for call in made["tool_calls"]] == [
        {"name": "read", "arguments": {"path": "a"}},
        {"name": "write", "arguments": {"path": "a"}},
    ]
    assert [(each.role, each.tool_call_id, each.name, each.text) for each in chat.messages[2:]] == [
        ("tool", "toolu_2", "write", "fine"),
        ("tool", "toolu_1", "read", "a\nb"),
        ("user", None, None, "Also:"),
    ]


def test_a_failed_call_is_said_to_have_failed() -> None:
    made = shown(user("Go."), assistant(CALL), user(result("no such file", is_error=True)))
    assert made[-1] == ("tool", "The tool failed:\nno such file")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
            "T\nD",
        ),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "a\nb"),
        ({"type": "document", "source": {"type": "content", "content": "c"}, "context": "about"}, "about\nc"),
        ({"type": "search_result", "source": "http://x", "title": "T", "content": [text("a")]}, "T\nhttp://x\na"),
    ],
)
def test_documents_and_search_results_of_text_are_shown(block: dict[str, Any], words: str) -> None:
    assert shown(user(block)) == [("user", words)]
    assert shown(user("Go."), assistant(CALL), user(result([block])))[-1] == ("tool", words)


def test_an_image_in_a_result_is_replaced_by_a_note() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    image = {"type": "image", "source": source, "transformations": {"oversized_image": "downsize"}}
    messages = [user("Go."), assistant(CALL), user(result([text("a"), image]))]
    assert shown(*messages)[-1] == ("tool", f"a\n{NO_IMAGE}")
    assert ignored_of(*messages) == ["messages[2].content[0].content[1] (image)"]


def test_what_a_tool_read_beside_its_result_is_replaced_too() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    messages = [user("Hi"), assistant(CALL), user(result([pdf]), text("See.")), user(image, pdf)]
    assert [words for _, words in shown(*messages)[-2:]] == [NO_DOCUMENT, f"See.\n{NO_IMAGE}\n{NO_DOCUMENT}"]
    assert ignored_of(*messages) == [
        "messages[2].content[0].content[0] (document)",
        "messages[3].content[0] (image)",
        "messages[3].content[1] (document)",
    ]
    assert "image" in refusal(user(image))
    assert "document" in refusal(user(pdf))


def test_what_anthropics_own_tools_left_in_a_conversation_is_left_out() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    messages = [user("Go."), assistant(search, found, text("It is so.")), user("Thanks.")]
    assert shown(*messages)[1] == ("assistant", "It is so.")
    assert ignored_of(*messages) == [
        "messages[1].content[0] (server_tool_use)",
        "messages[1].content[1] (web_search_tool_result)",
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [user({"type": "image", "source": {"type": "url", "url": "http://x"}})],
            "messages[0].content[0] is of type image",
        ),
        (
            [user({"type": "document", "source": {"type": "base64", "data": ""}})],
            "messages[0].content[0].source is of",
        ),
        ([user(CALL)], "messages[0].content[0] is of type tool_use, which only"),
        ([user("Hi"), assistant(result())], "messages[1].content[0] is of type tool_result, which a message of the"),
        ([user(result())], "messages[0].content[0].tool_use_id is 'toolu_1', and no"),
        ([user("Hi"), assistant(CALL)], "messages end with a tool_use"),
        ([user({"type": "hologram"})], "messages[0].content[0] is of type hologram"),
        ([user({"type": "text", "text": "a", "colour": 1})], "messages[0].content[0].colour is not a known field"),
        ([user(7)], "messages[0].content[0] is 7; it must be an object"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        (
            [user("Hi"), assistant(CALL), user(result([{"type": "thinking"}]))],
            "messages[2].content[0].content[0] is of",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place(messages: list[dict[str, Any]], words: str) -> None:
    assert words in refusal(*messages)


# -- system -----------------------------------------------------------------------------------------------------


def test_the_billing_line_is_left_out_so_that_prompts_begin_alike() -> None:
    blocks = [text(BILLING), text("You help.", cache_control=TEMPORARY)]
    assert shown(system=blocks)[0] == ("system", "You help.")
    assert shown(system=f"{BILLING}\nYou help.")[0] == ("system", "You help.")
    assert shown(system=BILLING)[0][0] == "user"
    assert ignored_of(system=blocks) == ["system[0] (billing line)"]
    assert shown(system=blocks, strip=False)[0] == ("system", f"{BILLING}\nYou help.")


def test_a_late_system_message_stays_where_it_is() -> None:
    late = [user("Hi"), {"role": "system", "content": [text("Now hurry.")]}, assistant(CALL), user(result())]
    assert shown(*late) == [("user", "Hi"), ("system", "Now hurry."), ("assistant", ""), ("tool", "fine")]


# -- reasoning --------------------------------------------------------------------------------------------------


def thinking(words: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": signature}


def test_reasoning_comes_back_with_its_signature() -> None:
    redacted = {"type": "redacted_thinking", "data": sealed(" Yes.")}
    blocks = [thinking("Hm.", signed("Hm.")), thinking("", sealed(" So.")), redacted, text("It is.")]
    chat = chat_of(user("Go."), assistant(*blocks), user("Why?"))
    assert (chat.messages[1].reasoning_content, chat.messages[1].text) == ("Hm. So. Yes.", "It is.")


@pytest.mark.parametrize(
    "block",
    [
        thinking("Hm!", signed("Hm.")),
        thinking("Hm.", signed("Hm.")[:-4] + "AAAA"),
        thinking("Hm.", "x" + signed("Hm.")[1:]),
        thinking("Hm.", "z" + signed("Hm.")[::-1]),
        thinking("Hm.", sealed("Hm.")),
        thinking("Hm.", ""),
        thinking("", "\u00e9"),
        thinking("", sealed("Hm.")[:-4]),
        {"type": "redacted_thinking", "data": "abc"},
    ],
)
def test_reasoning_that_was_changed_is_refused(block: dict[str, Any]) -> None:
    words = refusal(user("Go."), assistant(block, text("It is.")), user("Why?"))
    assert "messages[1].content[0]: Invalid `" in words


@pytest.mark.parametrize(
    "signature",
    [OTHER_SEAL.seal("signature", "x", None), "Eo8BCkYIBxgC" + "Ab3/" * 20],
    ids=["with another key", "of Anthropic"],
)
def test_reasoning_of_another_server_is_left_out(signature: str) -> None:
    messages = [user("Go."), assistant(thinking("Hm.", signature), text("It is.")), user("Why?")]
    assert chat_of(*messages).messages[1].reasoning_content in (None, "")
    assert ignored_of(*messages) == ["messages[1].content[0] (thinking of another server)"]


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_becomes_variables_of_the_template(thinking: Any, is_on: bool) -> None:
    chat = chat_of(thinking=thinking, output_config={"effort": "max"}, chat_template_kwargs={"a": 1})
    assert chat.template_variables == {
        **dict.fromkeys(("enable_thinking", "thinking", "reasoning"), is_on),
        "reasoning_effort": "max",
        "a": 1,
    }
    assert chat.reasoning_limit == (1024 if thinking and "budget_tokens" in thinking else None)


# -- continued answers ------------------------------------------------------------------------------------------


def test_a_last_message_of_the_assistants_is_continued() -> None:
    assert chat_of(user("Go."), assistant("It is")).continue_final_message
    assert not chat_of(user("Go."), assistant("It is"), user("Why?")).continue_final_message
    assert shown(user("Go."), assistant("")) == [("user", "Go.")]


# -- tools ------------------------------------------------------------------------------------------------------


def test_tools_become_functions_and_those_of_anthropics_are_left_out() -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ]
    custom = {
        **TOOL,
        "type": "custom",
        "name": "write",
        "strict": True,
        "cache_control": TEMPORARY,
        "input_examples": [],
    }
    chat = chat_of(tools=[TOOL, *hosted, custom])
    assert [tool.function.model_dump(exclude_unset=True) for tool in chat.tools] == [
        {"name": "read", "description": "Read a file", "parameters": {"type": "object"}},
        {"name": "write", "description": "Read a file", "parameters": {"type": "object"}, "strict": True},
    ]
    assert ignored_of(tools=[TOOL, *hosted]) == ["tools[1] (web_search_20250305)", "tools[2] (bash_20250124)"]


@pytest.mark.parametrize(
    ("choice", "made", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ],
)
def test_a_choice_of_tools_is_the_chats(choice: dict[str, Any], made: str, parallel: bool) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (made, parallel)


def test_a_tool_can_be_named() -> None:
    choice = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "read"}).tool_choice
    assert not isinstance(choice, str)
    assert choice.model_dump() == {"type": "function", "function": {"name": "read"}}


# -- other fields -----------------------------------------------------------------------------------------------


def test_sampling_and_the_form_of_the_answer_are_the_chats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for field in ("output_config", "output_format"):
        form: Any = {"type": "json_schema", "schema": schema}
        chat = chat_of(**{field: {"format": form} if field == "output_config" else form})
        assert chat.response_format is not None
        assert chat.response_format.model_dump(by_alias=True)["json_schema"]["schema"] == schema
    chat = chat_of(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], seed=3, cache_salt="s", timeout=9)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stop) == (0.5, 0.9, 7, ["END"])
    assert (chat.seed, chat.cache_salt, chat.timeout, chat.token_limit) == (3, "s", 9.0, 9000)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 1.5}, "temperature is 1.5"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"stop_sequences": ["a" * 4096] * 5}, "stop_sequences is a list; its strings may have 16384 characters"),
        ({"thinking": {"type": "enabled"}}, "thinking is of type enabled and has no budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens is 10; it must be at least"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, "max_tokens is 9000; it must be above"),
        ({"mcp_servers": [{"type": "url"}]}, "this server connects to no MCP servers"),
        ({"tools": [{"type": "teleport_20270101"}]}, "tools[0] is of type teleport_20270101"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "read"}]}, "tools[0].input_schema is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice must have a name"),
        ({"messages": []}, "messages"),
        ({"frequency_penalty": 1}, "frequency_penalty is not a known field"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(**fields)


def test_hints_of_agents_are_accepted_whatever_they_hold() -> None:
    hints: dict[str, Any] = {
        "metadata": {"user_id": "u", "more": 1},
        "service_tier": "standard_only",
        "speed": "fast",
        "cache_control": {"type": "ephemeral", "scope": "global"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "inference_geo": "eu",
        "anthropic_version": "vertex-2023-10-16",
        "betas": ["effort-2025-11-24"],
        "mcp_servers": [],
        "thread": None,
        "thinking": {"type": "adaptive", "display": "updates", "block_binding": {"on_failure": "drop"}},
    }
    assert ignored_of(**hints) == []
    assert ignored_of(fallback_credit_token={"token": "t", "mode": "best_effort"}) == []
    assert ignored_of(container="c", fallbacks=[{}]) == ["container", "fallbacks"]
    assert ignored_of(fallbacks="default") == ["fallbacks"]


@pytest.mark.parametrize(
    ("keep", "is_shown"), [("all", True), ({"type": "all"}, True), ({"type": "thinking_turns", "value": 2}, False)]
)
def test_thinking_that_is_kept_is_shown_in_the_prompt(keep: Any, is_shown: bool) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    chat = chat_of(thinking={"type": "adaptive"}, context_management={"edits": [edit]})
    assert chat.template_variables.get("preserve_thinking", False) == is_shown
    assert chat.template_variables.get("clear_thinking", True) == (not is_shown)


def test_a_summary_made_at_anthropic_is_shown() -> None:
    opaque = {"signature": "s", "encrypted_content": "e", "tool_changes": []}
    assert shown(user({"type": "compaction", "content": "They met.", **opaque}), user("Go on.")) == [
        ("user", "They met.\nGo on.")
    ]


def test_fields_of_billing_are_accepted_when_tokens_are_counted() -> None:
    fields = ("billing_policy", "compaction", "user_profile_id", "workspace_id")
    assert set(fields) <= CountTokensRequest.model_fields.keys()


WRITE: dict[str, Any] = {"name": "write", "input_schema": {"type": "object"}}
DEFINED = {"type": "tool_definition", "definition": WRITE}
READ = {"type": "tool_reference", "name": "read"}


def system(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(content), **fields}


def test_tools_may_be_defined_and_removed_in_the_course_of_a_conversation() -> None:
    changes = [system({"type": "tool_addition", "tool": DEFINED}), system({"type": "tool_removal", "tool": READ})]
    chat = chat_of(user("Hi"), *changes, tools=[TOOL])
    assert [tool.function.name for tool in chat.tools] == ["read", "write"]
    use = ToolUse.of(chat.tools, chat.tool_choice)
    assert ([tool.function.name for tool in use.tools], use.forced, use.restricted) == (["write"], False, True)
    assert [message.role for message in chat.messages] == ["user"]

    back = chat_of(user("Hi"), *changes, system({"type": "tool_addition", "tool": READ}), tools=[TOOL])
    assert back.tool_choice == "auto"
    forced = chat_of(user("Hi"), *changes, tools=[TOOL], tool_choice={"type": "any"})
    assert ToolUse.of(forced.tools, forced.tool_choice).forced


@pytest.mark.parametrize(
    ("tool", "choice", "said"),
    [
        (
            {"type": "tool_reference", "name": "rite"},
            "auto",
            "messages[1].content[0].tool.name is 'rite', and no tool",
        ),
        ({"type": "tool_reference"}, "auto", "messages[1].content[0].tool.name is missing"),
        (READ, "tool", "tool_choice names the tool read, which messages have removed"),
        (READ, "any", "tool_choice is any, and messages have removed all tools"),
    ],
)
def test_a_change_of_tools_that_cannot_be_followed_is_refused(tool: Any, choice: str, said: str) -> None:
    removal = system({"type": "tool_removal", "tool": tool})
    tool_choice = {"type": choice, "name": "read"} if choice == "tool" else {"type": choice}
    with pytest.raises(BadRequest) as raised:
        chat_of(user("Hi"), removal, tools=[TOOL], tool_choice=tool_choice)
    assert str(raised.value).startswith(said)


def test_a_prompt_still_shows_tools_of_which_all_were_removed() -> None:
    template = (
        "{{ tools | map(attribute='function.name') | join(',') }};{% for m in messages %}{{ m.role }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
    info = ModelInfo("", "", "", "", 0, tokenizer.vocab_size, 64, [], 16, 10)
    processor = InputOutputProcessor(tokenizer, ChatTemplate({"default": template}), info)
    model, frontend = SimpleNamespace(processor=processor), SimpleNamespace(config=Config())
    chat = chat_of(user("Hi"), system({"type": "tool_removal", "tool": READ}), tools=[TOOL])
    assert render_prompt(chat, cast(ServedModel, model), cast(Frontend, frontend)) == "read;user"
    assert ToolUse.of(chat.tools, chat.tool_choice).tools == ()


def test_a_removed_tool_may_be_defined_anew() -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "write"}}
    addition = {"type": "tool_addition", "tool": DEFINED}
    old = {**TOOL, "name": "write"}
    chat = chat_of(user("Hi"), system(removal, addition), tools=[old, TOOL])
    assert [(tool.function.name, tool.function.description) for tool in chat.tools] == [
        ("write", None),
        ("read", "Read a file"),
    ]
    assert chat.tool_choice == "auto"
    assert refusal(user("Hi"), system(addition), tools=[old]).startswith(
        "messages[1].content[0].tool.definition.name is write, which tools[0] has too"
    )
    assert "no tool before it has this name" in refusal(user("Hi"), system(removal, addition))


def test_tools_and_definitions_are_as_many_as_a_chat_may_have() -> None:
    tools = [{**TOOL, "name": f"f{number}"} for number in range(MAX_ITEMS)]
    assert refusal(user("Hi"), system({"type": "tool_addition", "tool": DEFINED}), tools=tools).startswith(
        "messages[1].content[0].tool.definition is one tool too many"
    )


@pytest.mark.parametrize("role", [user, assistant])
def test_only_system_messages_change_tools(role: Callable[..., dict[str, Any]]) -> None:
    removal = role({"type": "tool_removal", "tool": READ})
    said = refusal(user("Hi"), removal, tools=[TOOL])
    assert said == "messages[1].content[0] is of type tool_removal, which only the role system has"


def test_changes_of_anthropics_tools_are_ignored_by_name() -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "bash"}}
    messages = [user("Hi"), system(removal)]
    assert ignored_of(*messages, tools=[{"type": "bash_20250124", "name": "bash"}, TOOL]) == [
        "tools[0] (bash_20250124)",
        "messages[1].content[0] (bash_20250124)",
    ]


def test_errors_of_the_chat_have_the_paths_of_messages() -> None:
    hosted = {"type": "bash_20250124", "name": "bash"}
    wrong = {"name": "write", "input_schema": {"type": "array"}}
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": wrong}}
    assert refusal(tools=[hosted, wrong]).startswith("tools[1].input_schema is not the schema of an object")
    assert refusal(user("Hi"), system(addition), tools=[hosted, TOOL]).startswith(
        "messages[1].content[0].tool.definition.input_schema is not the schema of an object"
    )
    assert refusal(system(addition | {"tool": DEFINED})).startswith("messages have no content")


async def test_a_message_is_converted_in_a_thread() -> None:
    """Thousands of blocks would delay the event loop."""
    threads: list[bool] = []

    class Jobs:
        async def text(self, work: Callable[[], Any], *, is_large: bool) -> Any:
            threads.append(is_large)
            raise TooManyJobs("full", "requests", 1.0)

    frontend = SimpleNamespace(loaded=None, jobs=SimpleNamespace(of=lambda owner: Jobs()))
    for count in (1, 300):
        request = request_of(user(*[text("a")] * count))
        for convert in (prepare, count_tokens):
            with pytest.raises(TooManyJobs):
                await convert(request, cast(Frontend, frontend), cast(Owner, None), opened)
    assert threads == [False, False, True, True]


def test_changes_of_mcp_tools_are_ignored_by_name() -> None:
    toolset = {"type": "mcp_toolset_reference", "server_name": "s"}
    with collect() as ignored:
        chat_of(user("Hi"), system({"type": "tool_removal", "tool": toolset}))
    assert list(ignored) == ["messages[1].content[0] (mcp_toolset_reference)"]


def test_instructions_may_hold_for_one_turn() -> None:
    once = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    assert shown(user("Hi"), once) == [("user", "Hi"), ("system", "Be brief.")]
    answer = {"role": "assistant", "content": "Hi."}
    assert shown(user("Hi"), once, answer, user("And?")) == [("user", "Hi"), ("assistant", "Hi."), ("user", "And?")]

    effort = {"role": "system", "output_config": {"effort": "low"}}
    fields: dict[str, Any] = {"output_config": {"effort": "high"}}
    assert chat_of(user("Hi"), effort, **fields).template_variables["reasoning_effort"] == "low"
    later = chat_of(user("Hi"), effort, answer, user("And?"), **fields)
    assert later.template_variables["reasoning_effort"] == "high"
    during = chat_of(user("Hi"), effort, assistant(CALL), user(result()), **fields)
    assert during.template_variables["reasoning_effort"] == "low"


@pytest.mark.parametrize("fields", [{"output_config": {}}, {"content": []}, {"output_config": {"effort": None}}])
def test_a_system_message_has_content_or_settings(fields: dict[str, Any]) -> None:
    assert refusal(user("Hi"), {"role": "system", **fields}).startswith("messages[1] has no content")


def test_answers_around_a_message_that_is_not_shown_stay_apart() -> None:
    once = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    made = shown(user("Hi"), assistant("A."), once, assistant("B."), user("And?"))
    assert made[1] == ("assistant", "A.\nB.")


def test_a_change_of_tools_alone_divides_no_turn() -> None:
    removal = system({"type": "tool_removal", "tool": READ})
    assert shown(user("Hi"), removal, user("Go on."), tools=[TOOL]) == [("user", "Hi\nGo on.")]


def test_a_request_for_a_summary_alone_is_refused() -> None:
    with pytest.raises(BadRequest, match="compaction is set, but this server summarizes no conversations"):
        chat_of(user("Hi"), compaction={"type": "summarize"})


def test_a_stored_thread_is_refused_so_that_clients_send_the_whole_conversation() -> None:
    with pytest.raises(ThreadUnsupported) as raised:
        chat_of(user("Hi"), thread={"type": "create"})
    error = json.loads(raised.value.anthropic_body("req_1"))["error"]
    assert (error["type"], error["message"].partition(" ")[0]) == ("invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_where_anything_is_marked_to_be_cached() -> None:
    mark = {"cache_control": TEMPORARY}
    assert not wants_cache(request_of(tools=[TOOL], system="s"))
    for fields in (mark, {"tools": [{**TOOL, **mark}]}, {"system": [text("s", **mark)]}):
        assert wants_cache(request_of(**fields))
    assert wants_cache(request_of(user("Go."), assistant(CALL), user(result(**mark))))
    definition = {**DEFINED, "definition": {**WRITE, **mark}}
    assert wants_cache(request_of(user("Go."), system({"type": "tool_addition", "tool": definition})))


@given(BODIES, st.booleans())
def test_any_body_becomes_a_chat_or_is_refused_in_anthropics_form(body: dict[str, Any], allow_unknown: bool) -> None:
    try:
        chat, _ = to_chat(validate(body, MessagesRequest, allow_unknown=allow_unknown), frontend_of(), opened)
        json.dumps([message.for_template() for message in chat.messages])
    except BadRequest as error:
        reported = json.loads(error.anthropic_body("req_1"))
        assert (reported["type"], reported["error"]["type"]) == ("error", "invalid_request_error")
        assert reported["error"]["message"]

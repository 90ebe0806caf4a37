"""`ChatTemplate`: where templates are found, what they may do, and how their refusals are reported."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from engine.text import chat_template
from engine.text.chat_template import ChatTemplate
from models.errors import CheckpointError

HELLO = [{"role": "user", "content": "Hello <b>&'\"</b> 日本"}]


def render(source: str, *args: object, **kwargs: object) -> str:
    """Render `HELLO` by the template `source`."""
    return ChatTemplate({"default": source}).render(HELLO, *args, **kwargs)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_checkpoint(tmp_path) is None


@pytest.mark.parametrize("present", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_each_file_is_read_and_the_earlier_wins(tmp_path: Path, present: str) -> None:
    files = ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"]
    for file in files[files.index(present) :]:
        source = f"{file}: {{{{ messages[0].role }}}}"
        (tmp_path / file).write_text(source if file.endswith("jinja") else json.dumps({"chat_template": source}))
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    assert template.render(HELLO) == f"{present}: user"


def test_tool_use_is_chosen_when_tools_are_given(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"type": "function"}]) == "1 tools"


def test_named_templates_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "tool_use.jinja").write_text("with tools")
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    assert template.render(HELLO, tools=[]) == "with tools"


def test_special_tokens_of_the_checkpoint_are_variables(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}x{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s>x</s>"


def test_further_variables_reach_the_template_whatever_their_name() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }} {{ source }}"})
    assert template.render(HELLO, enable_thinking=False, source="s", self=1) == "False s"


def test_tools_and_documents_are_none_unless_given() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ documents }}", documents=["d"]) == "['d']"


def test_the_generation_prompt_is_asked_for_by_default() -> None:
    source = "{{ messages[0].role }}{% if add_generation_prompt %}:{% endif %}"
    assert render(source) == "user:"
    assert render(source, add_generation_prompt=False) == "user"


def test_json_is_written_without_html_escapes_and_with_the_callers_layout() -> None:
    assert render("{{ messages[0].content | tojson }}") == json.dumps(HELLO[0]["content"], ensure_ascii=False)
    assert render("{{ messages | tojson(indent=2) }}") == json.dumps(HELLO, ensure_ascii=False, indent=2)
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}") == '{"a":2,"b":1}'


def test_blocks_take_their_line_with_them() -> None:
    assert render("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n.") == "user\n."


def test_loop_controls_and_the_generation_tag_are_understood() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source + "{% generation %}kept{% endgeneration %}") == "01kept"


def test_the_time_is_at_hand() -> None:
    assert render("{{ strftime_now('%%') }}") == "%"


def test_a_refusal_is_reported_in_the_templates_words() -> None:
    with pytest.raises(ValueError, match="fails on these messages: Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].missing.deeper }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro loop() %}{{ loop() }}{% endmacro %}{{ loop() }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="chat template fails on these messages"):
        render(source)


def test_a_runaway_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="more than 1000 characters"):
        render("{% for i in range(99999) %}{{ i }}{% endfor %}")


def test_a_template_that_writes_for_ever_slowly_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"still writing after 0.05 s"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}.{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(n) %}{{ m(n - 1) if n }}{% endmacro %}{{ m(2) }}",
        "{% set first = messages[0] %}{% macro m(n) %}{{ first.role }}{{ m(n - 1) if n }}{% endmacro %}{{ m(2) }}",
        "{% macro a() %}{% macro m(n) %}{{ m(n - 1) if n }}{% endmacro %}{{ m(2) }}{% endmacro %}{{ a() }}",
    ],
)
def test_messages_are_freed_without_a_garbage_collection_where_a_macro_calls_itself(source: str) -> None:
    class Message(dict[str, str]):
        """A message that can be referred to weakly."""

    template, message = ChatTemplate({"default": source}), Message(role="user")
    held = weakref.ref(message)
    gc.disable()
    try:
        template.render([message])
        del message
        assert held() is None
    finally:
        gc.enable()


def test_a_template_of_the_operators_own_stands_in_for_the_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("<{{ messages[0].content }}>")
    assert ChatTemplate.from_file(file, tmp_path).render(HELLO) == f"<{HELLO[0]['content']}>"
    file.write_text("{% if %}")
    with pytest.raises(CheckpointError, match=r"mine.jinja does not compile: line 1"):
        ChatTemplate.from_file(file, tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate.from_file(tmp_path / "none.jinja", tmp_path)


def test_named_templates_without_a_default_are_distinguished() -> None:
    with pytest.raises(ValueError, match=r"no default among its templates \['rag'\]"):
        ChatTemplate({"rag": "x"}).render(HELLO)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{% if %}", "does not compile: line 1"),
        (7, "must be a string or a list"),
        ([{"name": "x"}], "must be a string"),
    ],
)
def test_a_broken_template_is_found_when_the_checkpoint_is_read(tmp_path: Path, entry: object, words: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate.from_checkpoint(tmp_path)


DEV, SYS = {"role": "developer", "content": "Dev."}, {"role": "system", "content": "Sys."}
USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% elif m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
NO_DEVELOPER = (
    "{% for m in messages %}{% if m.role != 'developer' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (PLAIN, [DEV, SYS, USER, DEV], "[developer]Dev.[system]Sys.[user]Hi[developer]Dev."),
        (NO_DEVELOPER, [DEV, SYS, USER, DEV], "[system]Dev.[system]Sys.[user]Hi[system]Dev."),
        (REFUSES_DEVELOPER, [DEV, USER, SAID, DEV, USER], "[system]Dev.[user]Hi[assistant]Hello[system]Dev.[user]Hi"),
        (FIRST_SYSTEM, [DEV, SYS, DEV, USER, SYS], "[system]Dev.\n\nSys.\n\nDev.[user]Hi\n\nSys."),
        (FIRST_SYSTEM, [USER, SAID, SYS, USER], "[user]Hi[assistant]Hello[user]Sys.\n\nHi"),
        (FIRST_SYSTEM, [USER, SYS, DEV, USER, SAID], "[user]Hi\n\nSys.\n\nDev.\n\nHi[assistant]Hello"),
        (FIRST_SYSTEM, [SYS, USER, USER], "[system]Sys.[user]Hi[user]Hi"),
        (FIRST_SYSTEM, [USER, SAID], "[user]Hi[assistant]Hello"),
        (FIRST_SYSTEM, [DEV], "[system]Dev."),
    ],
)  # fmt: skip
def test_no_instruction_is_lost_on_a_template_that_does_not_show_its_role(
    source: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert ChatTemplate({"default": source}).render(messages) == prompt


def test_earlier_reasoning_is_shown_under_the_name_that_the_template_reads() -> None:
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    body = "{% for message in messages %}{{ message.thinking }}|{{ message.content }}{% endfor %}"
    assert ChatTemplate({"default": body}).render([turn]) == "Hm.|Yes."
    assert ChatTemplate({"default": body + "{# <|channel|> #}"}).render([turn]) == "|Yes."


CALL = {"id": "kaoncall0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING: list[dict[str, Any]] = [
    HELLO[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "kaoncall0", "content": "4"},
]


@pytest.mark.parametrize(
    "content",
    [
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
        "{% if m.content is string %}{{ m.content }}{% elif m.content | length %}{{ m.content[0] }}{% endif %}",
        "{{ '' + m.content }}",
        "{{ m.content }}",
        "{% if m.content is not none %}{{ m.content }}{% endif %}",
    ],
    ids=["Qwen3", "Ministral 3", "Granite 3.3", "GLM", "Mistral"],
)
def test_a_call_without_content_has_an_empty_text(content: str) -> None:
    source = (
        "{% for m in messages %}[" + content + "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}]"
    )
    template = ChatTemplate({"default": source + "{% endfor %}"})
    assert template.render(CALLING).endswith("[1][4]")
    without = [CALLING[0], {key: value for key, value in CALLING[1].items() if key != "content"}, CALLING[2]]
    assert template.render(without).endswith("[1][4]")
    assert template.render([CALLING[0], {**CALLING[1], "content": "Hm."}, CALLING[2]]).endswith("[Hm.1][4]")


def test_a_call_without_content_is_null_where_a_text_would_be_a_turn_of_its_own() -> None:
    """DeepSeek-R1's templates write a call where the content is null, and else a turn."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments }}]"
        "{% endfor %}{% if m.content is not none %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    assert ChatTemplate({"default": source}).render(CALLING).endswith('[f{"a": 1}][4]')


TOOLS = [{"type": "function", "function": {"name": "f", "description": "It.", "parameters": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("condition", "call"),
    [
        ("m.content is not none", "f.name ~ (f.arguments | tojson)"),
        ("m.content is none", "f.name + f.arguments"),
        ("f.arguments is string", "f.name + f.arguments"),
        ("f.name", "f.name ~ f.arguments"),
    ],
    ids=["only with content", "only without content, as DeepSeek-V3", "only text", "any, written without a filter"],
)
def test_a_call_is_shown_as_json_whatever_the_template_tests(
    condition: str, call: str, content: str | None, tools: list[dict[str, Any]] | None
) -> None:
    """Even if it shows the tools, and the name of a tool message, in any form."""
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.name }}{% for c in m.tool_calls %}"
        "{% set f = c.function %}{% if CONDITION %}<{{ CALL }}>{% endif %}{% endfor %}{{ m.content or '' }}"
        "{% endfor %}"
    )
    template = ChatTemplate({"default": source.replace("CONDITION", condition).replace("CALL", call)})
    assert '<f{"a": 1}>4' in template.render([CALLING[0], {**CALLING[1], "content": content}, CALLING[2]], tools)


def test_the_form_of_a_call_is_that_of_the_template_which_renders_it() -> None:
    body = "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    template = ChatTemplate(
        {
            "default": "{% for m in messages %}{{ '<' + m.content + '>' }}" + body + "{% endfor %}",
            "tool_use": "{% for m in messages %}{% if m.content is not none %}<{{ m.content }}>{% endif %}"
            + body
            + "{% endfor %}",
        }
    )
    assert template.render(CALLING[1:]) == '<>{"a": 1}<4>'
    assert template.render(CALLING[1:], TOOLS) == '{"a": 1}<4>'


@pytest.mark.parametrize("operation", ["cycler()", "1 / 0"])
def test_a_template_that_fails_on_calls_is_a_value_error(operation: str) -> None:
    with pytest.raises(ValueError, match="chat template fails on these messages"):
        ChatTemplate({"default": "{{ " + operation + " }}"}).render(CALLING, TOOLS)


def test_arguments_are_text_where_a_template_joins_them_to_text() -> None:
    texts = "{% for c in messages[1].tool_calls %}{{ c.function.name + '<' + c.function.arguments }}>{% endfor %}"
    assert ChatTemplate({"default": texts}).render(CALLING) == 'f<{"a": 1}>'
    objects = "{% for c in messages[1].tool_calls %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
    assert ChatTemplate({"default": objects}).render(CALLING) == "f1"


def test_reasoning_is_a_part_of_the_content_where_a_template_reads_it_there() -> None:
    """Ministral 3's template."""
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part['type'] == 'thinking' %}[THINK]{{ part['thinking'] }}[/THINK]{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source})
    answered = {"role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_content": "2 + 2"}
    assert template.render([answered]) == "[THINK]2 + 2[/THINK]4"
    assert template.render([{**answered, "content": None, "tool_calls": [CALL]}]) == "[THINK]2 + 2[/THINK]"
    parts = [{"type": "text", "text": "4"}]
    assert template.render([{**answered, "content": parts}]) == "[THINK]2 + 2[/THINK]4"
    assert template.render([{**answered, "role": "user"}]) == "4"


def test_reasoning_and_text_are_blocks_where_a_template_reads_them_there() -> None:
    """Apertus' template, which refuses a chat in which only some messages are blocks."""
    source = (
        "{% for m in messages %}{% if m.role != 'assistant' %}({{ m.content }}){% else %}"
        "{% for b in m.content.blocks %}{% if b.type == 'thoughts' %}<{{ b.text }}>{% else %}"
        "{{ b.text }}{% endif %}{% else %}"
        "{% if m.content is string %}={{ m.content }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source})
    answered = {"role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_content": "2 + 2"}
    plain = {"role": "assistant", "content": "Hi."}
    assert template.render([plain, HELLO[0], answered]) == f"Hi.({HELLO[0]['content']})<2 + 2>4"
    assert template.render([{**answered, "content": None, "tool_calls": [CALL]}]) == "<2 + 2>"
    assert template.render([plain]) == "=Hi."


def test_a_tool_without_a_description_has_an_empty_one_where_a_template_needs_it() -> None:
    """Apertus' template."""
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    assert (
        render(
            "{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}", tools
        )
        == "// f"
    )
    assert render("{% for tool in tools %}{{ '// ' + tool.description + tool.name }}{% endfor %}", tools) == "// f"
    assert render("{{ tools | tojson }}", tools) == json.dumps(tools)


def test_tools_are_bare_functions_where_a_template_reads_them_so() -> None:
    """Apertus' template."""
    tools = [{"type": "function", "function": {"name": "f", "description": "It."}}]
    source = "{% for tool in tools %}{{ tool.description + tool.name }}{% endfor %}"
    assert render(source, tools) == "It.f"
    assert render("{% for tool in tools %}{{ tool.function.name }}{% endfor %}", tools) == "f"
    assert render("{{ tools | tojson }}", tools) == json.dumps(tools)

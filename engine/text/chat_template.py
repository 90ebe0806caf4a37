"""`ChatTemplate`: renders chat messages to the text of a prompt by a checkpoint's Jinja template.

Templates are part of checkpoints. They run in Jinja's sandbox, in the dialect of transformers'
`apply_chat_template`.
Called by `InputOutputProcessor`.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self

import jinja2
import jinja2.ext
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config.paths import why_unreadable
from engine.text.checkpoint_settings import read_json_object, read_special_tokens
from models.errors import CheckpointError

MAX_RENDERED_CHARACTERS = 64 * 2**20
"""Longest text that a template may write, in characters: far beyond any context, so that only a faulty template
reaches it."""


MAX_RENDER_SECONDS = 10.0
"""Seconds for which a template may write."""


class ChatTemplate:
    """One checkpoint's templates, compiled once.

    Rendering takes time in proportion to the messages, and a template may loop (up to 100 000 iterations per `range`).
    So call `render` in a thread if there is an event loop. A template that loops without writing is not stopped here:
    templates from requests are rendered by `engine.text.template_sandbox`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        title: str = "the model's chat template",
        max_characters: int | None = None,
    ) -> None:
        """`templates` has the sources by name: `default`, and optionally `tool_use`. `special_tokens` (`bos_token`, …)
        are variables of the templates.

        `title` is the subject of errors; `max_characters` overrides `MAX_RENDERED_CHARACTERS`. Raises
        `CheckpointError` if a template does not compile.
        """
        environment = _environment()
        self._title = title
        self._max_characters = max_characters
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: _compile(environment, title, source) for name, source in templates.items()}

        self._shown_roles: dict[tuple[str, bool], bool] = {}
        """Results of `_shows`, by its arguments."""
        self._call_forms: dict[bool, _CallForm] = {}
        """Results of `_call_form`, by its argument."""
        self.source = "\n".join(templates.values())
        """Text of the templates, from which dialects are detected."""
        self._reads_thinking = ".thinking" in self.source and "<|channel|>" not in self.source
        """Whether earlier reasoning is read as `thinking` (LFM2.5); gpt-oss's template refuses it next to content."""
        self._reads_thinking_parts = "[THINK]" in self.source and _THINKING_PART.search(self.source) is not None
        """Whether earlier reasoning is read as a part of the content (Ministral 3)."""
        self._reads_blocks = _THOUGHTS_BLOCK.search(self.source) is not None
        """Whether earlier reasoning is read as a block of a content that is an object (Apertus)."""

    @classmethod
    def from_checkpoint(cls, path: Path) -> Self | None:
        """Read the templates in checkpoint directory `path`; None if it has none."""
        templates = _read_templates(path)
        return cls(templates, read_special_tokens(path)) if templates else None

    @classmethod
    def from_file(cls, file: Path, checkpoint: Path) -> Self:
        """Read the template in `file`, for the model in `checkpoint`. Raises `CheckpointError` if it cannot be
        used."""
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"chat_template is {file}, which cannot be read: {why_unreadable(error)}") from error
        return cls({"default": source}, read_special_tokens(checkpoint), f"the chat template {file}")

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the text of the prompt, including BOS if the template writes it.

        All arguments are plain JSON data, with tool-call arguments as objects. Raises `ValueError`, with the
        template's message, if it refuses the messages or fails on them.
        """
        if any(message.get("role") in _INSTRUCTING for message in messages):
            messages = self._with_shown_roles(messages)
        if any(message.get("tool_calls") for message in messages):
            form = self._call_form(has_tools=tools is not None)
            messages = [_with_shown_calls(each, form) if each.get("tool_calls") else each for each in messages]
        if self._reads_thinking:
            messages = [{"thinking": each["reasoning"], **each} if "reasoning" in each else each for each in messages]
        elif self._reads_thinking_parts:
            messages = [_with_thinking_part(each) for each in messages]
        elif self._reads_blocks and any("reasoning" in each for each in messages):
            messages = [_with_blocks(each) for each in messages]
        if tools:
            tools = self._with_shown_tools(tools)
        return self._render(messages, tools, add_generation_prompt, variables)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        values = {**self._special_tokens, "documents": None, **variables}
        values.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        pieces = []
        length = 0
        most = self._max_characters or MAX_RENDERED_CHARACTERS
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        template = self._choose(tools)
        context = template.new_context(values)
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                length += len(piece)
                if length > most:
                    raise ValueError(f"it wrote more than {most} characters")
                if time.monotonic() > deadline:
                    raise ValueError(f"it was still writing after {MAX_RENDER_SECONDS:g} s")
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
            raise ValueError(f"{self._title} fails on these messages: {error}") from error
        finally:
            # Macros refer to their context and variables, and a recursive one to itself. Without this, the messages
            # would wait for a garbage collection.
            for value in context.vars.values():
                if isinstance(value, Macro):
                    vars(value).clear()
            context.vars.clear()
            context.parent.clear()
        return "".join(pieces)

    def _with_shown_roles(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Change the roles of instructing messages so that the template shows them. Many templates omit `developer`,
        or refuse or omit instructions after the first message; agents send several.

        Instructions at the beginning become one message if only one is shown. Instructions between turns become part
        of the adjacent user message, because templates may refuse two consecutive messages of a role.
        """
        first = next((index for index, each in enumerate(messages) if each.get("role") not in _INSTRUCTING), None)
        beginning, rest = messages[:first], messages[len(messages) if first is None else first :]
        shown: list[Mapping[str, Any]] = []
        texts: dict[int, list[str]] = {}
        """Texts of messages of `shown` that consist of several texts, possibly thousands, by index; joined at the
        end."""
        for message in beginning:
            role = message["role"] if self._shows(message["role"], late=False) else "system"
            if not (shown and not self._shows(role, late=True) and _joins(shown, message, texts)):
                shown.append({**message, "role": role})
        joins = False
        for message in rest:
            became_users = False
            if message.get("role") in _INSTRUCTING:
                roles = (message["role"], "system")
                message = {**message, "role": next((role for role in roles if self._shows(role, late=True)), "user")}
                became_users = message["role"] == "user"
            joins = (joins or became_users) and bool(shown) and shown[-1]["role"] == message["role"] == "user"
            if not (joins and _joins(shown, message, texts)):
                shown.append(message)
            joins = joins or became_users
        for index, each in texts.items():
            shown[index] = {**shown[index], "content": "\n\n".join(each)}
        return shown

    def _shows(self, role: str, *, late: bool) -> bool:
        """Return whether the template shows a message of `role` at the beginning or, with `late`, between turns."""
        known = self._shown_roles.get((role, late))
        if known is None:
            message, user = {"role": role, "content": _PROBE}, {"role": "user", "content": "Hi"}
            chat = [user, {"role": "assistant", "content": "Hi"}, message, user] if late else [message, user]
            known = self._shown_roles[role, late] = _PROBE in self._probe(chat)
        return known

    def _call_form(self, *, has_tools: bool) -> "_CallForm":
        """The form of messages with calls that the template reads: of those whose rendered call has its arguments, and
        not as Python text, the first with the shortest text.

        Without content, an empty text is right for most templates: with null they fail (Qwen3, gpt-oss, Ministral 3,
        Granite 3.3) or write `None` (GLM). DeepSeek-R1's template tests for null; for a text it writes an additional,
        empty turn. Templates derived from it concatenate the arguments with text, so they must be JSON text; other
        templates expect an object.
        """
        known = self._call_forms.get(has_tools)
        if known is None:
            known = _CallForm("", False)
            for has_text_arguments in (False, True):
                forms = (_CallForm("", has_text_arguments), _CallForm(None, has_text_arguments))
                texts = {
                    form: self._probe(_chat_with_call(form), [_PROBE_TOOL] if has_tools else None) for form in forms
                }
                shown = {form: text for form, text in texts.items() if _PROBE in text and str(_ARGUMENTS) not in text}
                if shown:
                    known = min(shown, key=lambda form: len(shown[form]))
                    break
            self._call_forms[has_tools] = known
        return known

    def _with_shown_tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Write tools in the form that the template reads."""
        if self._needs_descriptions:
            tools = [_with_description(tool) for tool in tools]
        return [tool.get("function", tool) for tool in tools] if self._reads_bare_tools else tools

    @cached_property
    def _needs_descriptions(self) -> bool:
        """Whether the template fails on a function without a description (Apertus)."""
        chat = [{"role": "user", "content": "Hi"}]
        without: dict[str, Any] = {**_PROBE_TOOL, "function": {**_PROBE_TOOL["function"]}}
        del without["function"]["description"]
        described, bare = (tool["function"] if self._reads_bare_tools else tool for tool in (_PROBE_TOOL, without))
        return not self._probe(chat, [bare]) and bool(self._probe(chat, [described]))

    @cached_property
    def _reads_bare_tools(self) -> bool:
        """Whether the template reads a function where others read it as `function` of a tool (Apertus)."""
        chat = [{"role": "user", "content": "Hi"}]
        forms = [_PROBE_TOOL], [_PROBE_TOOL["function"]]
        whole, bare = (_TOOL_NAME in self._probe(chat, tools) for tools in forms)
        return bare and not whole

    def _probe(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Render a chat to see how the template treats it; an empty text if the template fails on it."""
        try:
            return self._render(messages, tools)
        except ValueError:
            return ""

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"there is no default among its templates {sorted(self._templates)}")
        return self._templates[name]


_INSTRUCTING = ("system", "developer")
"""Roles of messages with instructions for the model."""

_PROBE = "kaon-probe"
_ARGUMENTS = {"text": _PROBE}
_TOOL_NAME = "kaon-tool"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "Tests.", "parameters": {"type": "object", "properties": {}}},
}
_THINKING_PART = re.compile(r"""== *["']thinking["']""")
_THOUGHTS_BLOCK = re.compile(r"""== *["']thoughts["']""")


class _CallForm(NamedTuple):
    """How a message with calls is handed to a template."""

    no_content: str | None
    """The content of a message that has none."""
    has_text_arguments: bool
    """Whether arguments are JSON text, instead of an object."""


def _chat_with_call(form: _CallForm) -> list[Mapping[str, Any]]:
    # Some templates accept ids of nine letters and digits only.
    call = {"id": "kaonprobe", "type": "function", "function": {"name": _TOOL_NAME, "arguments": _ARGUMENTS}}
    return [
        {"role": "user", "content": "Hi"},
        _with_shown_calls({"role": "assistant", "tool_calls": [call]}, form),
        {"role": "tool", "tool_call_id": "kaonprobe", "name": _TOOL_NAME, "content": "Hi"},
    ]


def _with_shown_calls(message: Mapping[str, Any], form: _CallForm) -> Mapping[str, Any]:
    """Write a message with calls in `form`."""
    if not message.get("content"):
        message = {**message, "content": form.no_content}
    if form.has_text_arguments:
        message = {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
    return message


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_thinking_part(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the reasoning of an assistant's message into its content."""
    if message.get("role") != "assistant" or "reasoning" not in message:
        return message
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": message["reasoning"]}, *parts]}


def _with_blocks(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the reasoning and text of an assistant's message into blocks. A template that reads these refuses a chat
    in which only some messages have them."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str | None):
        return message
    texts = ("thoughts", message.get("reasoning")), ("response", content)
    return {**message, "content": {"blocks": [{"type": kind, "text": text} for kind, text in texts if text]}}


def _with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _joins(shown: Sequence[Mapping[str, Any]], message: Mapping[str, Any], texts: dict[int, list[str]]) -> bool:
    """Append the text of a message to the last shown one. Returns False if either is not plain text."""
    last, other = shown[-1].get("content"), message.get("content")
    if not isinstance(last, str) or not isinstance(other, str):
        return False
    texts.setdefault(len(shown) - 1, [last]).append(other)
    return True


_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that expressions in a template may raise for messages of an unexpected structure."""


def _read_templates(path: Path) -> dict[str, str]:
    """Read the template sources by name: from .jinja files, else tokenizer_config.json, else chat_template.json."""
    templates = {file.stem: _read_text(file) for file in sorted((path / "chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path / "chat_template.jinja")
    if templates:
        return templates
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        entry = read_json_object(file).get("chat_template")
        if isinstance(entry, str):
            return {"default": entry}
        if entry is not None:
            return _named_templates(file, entry)
    return {}


def _named_templates(file: Path, entry: Any) -> dict[str, str]:
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"chat_template of {file} must be a string or a list of objects with name and template"
        ) from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; download the checkpoint again") from error


def _compile(environment: jinja2.Environment, title: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{title} does not compile: line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError) as error:
        raise CheckpointError(f"{title} does not compile: it is nested too deeply: {error}") from error
    except ValueError as error:  # Of a constant that Jinja computes already here, such as a number of 5000 digits.
        raise CheckpointError(f"{title} does not compile: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Jinja's filter of this name, but without escaping HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

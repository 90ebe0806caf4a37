"""What a training example is, how it becomes text, and which examples are held out. Every generator imports this."""

import enum
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.demo import CHAT_TEMPLATE_PATH

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_ONE_IN = 12

Json = Any  # whatever json.dumps takes; a recursive alias says no more and reads worse


class Check(enum.Enum):
    """How the evaluation judges an answer against the generated one."""

    EXACT = "the same text"
    CONTAINS = "the needle appears in the text"
    JSON = "the same JSON value"
    TOOL_CALL = "the same function name and arguments"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | None
    tool_calls: tuple[dict[str, Json], ...] = ()

    def as_openai(self) -> dict[str, Json]:
        message: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", "function": call} for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Example:
    """A chat whose last message is the answer to learn.

    `keys` name what the example teaches: it is held out if any of them is, so a held-out sum stays unseen in JSON
    answers, tool calls and long chats too.
    """

    category: str
    keys: tuple[str, ...]
    messages: tuple[Message, ...]
    check: Check = Check.EXACT
    needle: str = ""
    tools: tuple[dict[str, Json], ...] = ()

    @property
    def answer(self) -> str:
        """The text that the model should write for the last message."""
        return render(self)[len(render_prompt(self)) :].removesuffix(f"{END_OF_TURN}\n")


@dataclass(frozen=True, slots=True)
class Document:
    """Raw text for /v1/completions; only pieces marked True are learned, so random operands cost no capacity."""

    category: str
    keys: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...]
    check: Check = Check.EXACT
    needle: str = ""
    tools: tuple[dict[str, Json], ...] = field(default=(), init=False)

    @property
    def answer(self) -> str:
        return self.pieces[-1][0]


def is_held_out(keys: tuple[str, ...]) -> bool:
    """Stable across runs and machines, unlike `hash`."""
    return any(
        int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % HELD_OUT_ONE_IN == 0 for key in keys
    )


def ask(
    category: str,
    question: str,
    answer: str,
    *,
    keys: tuple[str, ...] = (),
    check: Check = Check.EXACT,
    needle: str = "",
    system: str | None = None,
) -> Example:
    """One question, one answer; without `keys` the question's own words are what may be held out."""
    turns = [Message("user", question), Message("assistant", answer)]
    if system is not None:
        turns.insert(0, Message("system", system))
    return Example(category, keys or (f"{category}:{question.lower()}",), tuple(turns), check, needle)


def render(example: Example) -> str:
    """The whole chat, answer included."""
    return _render(example, example.messages, add_generation_prompt=False)


def render_prompt(example: Example | Document) -> str:
    """What the model sees before it writes the answer."""
    if isinstance(example, Document):
        return "".join(text for text, _ in example.pieces[:-1])
    return _render(example, example.messages[:-1], add_generation_prompt=True)


def _render(example: Example, messages: tuple[Message, ...], *, add_generation_prompt: bool) -> str:
    return chat_template().render(
        messages=[message.as_openai() for message in messages],
        tools=list(example.tools) or None,
        add_generation_prompt=add_generation_prompt,
    )


@functools.cache
def chat_template() -> Template:
    """The template compiled as `transformers.apply_chat_template` compiles it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(CHAT_TEMPLATE_PATH.read_text())


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

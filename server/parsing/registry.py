"""The registries of dialects: the syntaxes in which models write tool calls and reasoning.

A dialect is one module in `server.parsing.dialects`, or an entry of `server.parsing.reasoning`, and one line of the
tables below. Detection tries the dialects in the order of their table, those of other packages first. Harmony, which
parses whole answers, is tried before all others: see `AnswerFormat`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.registry import Registry
from server.parsing.dialects.harmony import is_spoken as is_harmony
from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import AnswerParser
from server.schemas.chat_tools import ToolUse

NONE, HARMONY = "none", "harmony"


class ModelSigns(NamedTuple):
    """The properties of a checkpoint from which dialects are detected."""

    template: str
    """Source of its chat template; empty if it has none."""
    has_token: Callable[[str], bool]
    """Returns whether a text is a token of its vocabulary."""
    architecture: str


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """A syntax of tool calls."""

    parser: Callable[[ToolUse], AnswerParser]
    calls: Callable[[LarkWriter, Sequence[Function], bool], str]
    """Writes an expression for calls after `trigger`: one call if the last argument is true, else all calls that may
    follow one trigger."""
    detect: Callable[[ModelSigns], bool]
    """Returns whether a model whose chat template shows tools uses this dialect."""
    trigger: str = ""
    """Marker that begins a call. Without a marker, the first character decides whether an answer consists of calls."""
    separator: str | None = None
    """Text between a call and the next trigger; None if all calls follow one trigger."""
    opening: str = ""
    """First character of an answer that consists of calls, for dialects without a trigger."""
    optional: str = ""
    """Marker that may precede an answer of calls."""
    keys: str = r"(?s:.*)"
    """Regular expression of the argument names that the dialect can represent."""
    markers: tuple[str, ...] = ()
    """Texts that the parser searches for."""
    stops: tuple[str, ...] = ()
    """Tokens that begin the results of calls, if models write one after their calls: it ends the answer."""
    writes_bare_text: bool = False
    """Whether strings are written as bare text up to a marker, instead of as JSON."""
    ends_text_with_line: bool = False
    """Whether a line break precedes that marker, so that recursive grammars of text can be enforced."""
    aliases: tuple[str, ...] = ()
    """Further names, used by other servers."""


@dataclass(frozen=True, slots=True)
class ReasoningDialect:
    """The tags that some models put around their reasoning, at an answer's beginning."""

    open_tag: str
    close_tag: str
    detect: Callable[[ModelSigns], bool]
    """Returns whether a model with a chat template uses this dialect."""
    always: bool = False
    """Whether the model reasons unless the prompt prevents it, and may omit the opening tag."""
    content_tags: tuple[tuple[str, str], ...] = ()
    """Pairs of tags that may enclose the content; they are dropped."""
    next_message: str = ""
    """Text after the closing tag of reasoning or content, if the model writes each of them as a message of its own."""
    opening: str = ""
    """First token of `open_tag`, if the tag is more than one token."""
    aliases: tuple[str, ...] = ()
    """Further names, used by other servers."""


TOOL_DIALECTS: Registry[ToolDialect] = Registry(
    "tool dialect",
    {
        "seed_oss": "server.parsing.dialects.qwen_coder",
        "mimo": "server.parsing.dialects.qwen_coder",
        "qwen3_coder": "server.parsing.dialects.qwen_coder",
        "minicpm5": "server.parsing.dialects.invoke",
        "hy_v3_opensource": "server.parsing.dialects.glm",
        "hy_v3": "server.parsing.dialects.glm",
        "longcat_keys": "server.parsing.dialects.glm",
        "glm47": "server.parsing.dialects.glm",
        "glm45": "server.parsing.dialects.glm",
        "deepseek_v3": "server.parsing.dialects.deepseek",
        "deepseek_v31": "server.parsing.dialects.deepseek",
        "minimax_m3": "server.parsing.dialects.minimax_m3",
        "minimax_m2": "server.parsing.dialects.invoke",
        "deepseek_v32": "server.parsing.dialects.invoke",
        "deepseek_v4": "server.parsing.dialects.invoke",
        "deepseek_v41": "server.parsing.dialects.invoke",
        "gigachat35": "server.parsing.dialects.invoke",
        "dots": "server.parsing.dialects.invoke",
        "kimi_k2": "server.parsing.dialects.kimi",
        "solar_open": "server.parsing.dialects.kimi",
        "gemma4": "server.parsing.dialects.gemma",
        "functiongemma": "server.parsing.dialects.gemma",
        "cohere_command": "server.parsing.dialects.json_list",
        "apertus": "server.parsing.dialects.json_list",
        "gigachat31": "server.parsing.dialects.json_list",
        "gigachat3": "server.parsing.dialects.json_list",
        "nemotron_json": "server.parsing.dialects.json_list",
        "phi4_mini_json": "server.parsing.dialects.json_list",
        "granite": "server.parsing.dialects.json_list",
        "minimax_m1": "server.parsing.dialects.hermes",
        "hunyuan_a13b": "server.parsing.dialects.json_list",
        "granite_20b_fc": "server.parsing.dialects.json_list",
        "mistral_args": "server.parsing.dialects.mistral",
        "mistral": "server.parsing.dialects.mistral",
        "lfm2": "server.parsing.dialects.pythonic",
        "olmo3": "server.parsing.dialects.pythonic",
        "longcat": "server.parsing.dialects.hermes",
        "hermes": "server.parsing.dialects.hermes",
        "xlam": "server.parsing.dialects.llama_json",
        "pythonic": "server.parsing.dialects.pythonic",
        "llama4_json": "server.parsing.dialects.llama_json",
        "llama3_json": "server.parsing.dialects.llama_json",
    },
)

REASONING_DIALECTS: Registry[ReasoningDialect] = Registry(
    "reasoning dialect",
    dict.fromkeys(
        (
            *("seed_oss", "minimax_m3", "gemma4", "cohere_command", "hunyuan_a13b", "ernie45", "mistral", "apertus"),
            *("longcat", "apriel", "granite", "solar_open", "hy_v3_opensource", "think", "deepseek_r1"),
        ),
        "server.parsing.reasoning",
    ),
)


def detect_tool_dialect(signs: ModelSigns) -> str:
    """Return the tool dialect of a model; `none` if its template shows no tools or an unknown dialect."""
    if is_harmony(signs.template, signs.architecture):
        return HARMONY
    if "tools" not in signs.template:
        return NONE
    return next((name for name in TOOL_DIALECTS if TOOL_DIALECTS[name].detect(signs)), NONE)


def detect_reasoning_dialect(signs: ModelSigns) -> str:
    """Return the reasoning dialect of a model; `none` if it has no chat template or no known dialect."""
    if is_harmony(signs.template, signs.architecture):
        return HARMONY
    if not signs.template:
        return NONE
    return next((name for name in REASONING_DIALECTS if REASONING_DIALECTS[name].detect(signs)), NONE)


def tool_names() -> dict[str, str]:
    """Return every name that `--tool-call-parser` accepts, with the main name of its dialect."""
    return {"openai": HARMONY, HARMONY: HARMONY} | _names(TOOL_DIALECTS)


def reasoning_names() -> dict[str, str]:
    """Return every name that `--reasoning-parser` accepts, with the main name of its dialect."""
    return {"openai_gptoss": HARMONY, HARMONY: HARMONY} | _names(REASONING_DIALECTS)


def _names(dialects: Registry[ToolDialect] | Registry[ReasoningDialect]) -> dict[str, str]:
    return {known: name for name in dialects for known in (name, *dialects[name].aliases)}

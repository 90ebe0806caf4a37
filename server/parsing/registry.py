"""The registries of dialects: how models write tool calls, and how they write reasoning.

A dialect is one module in `server.parsing.dialects`, or an entry of `server.parsing.reasoning`, and one line of the
tables below. A table's order is that in which its dialects are asked whether a model speaks them, those of other
packages first. Harmony, which takes whole answers apart, is asked before all others: see `AnswerFormat`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.registry import Registry
from server.parsing.dialects.harmony import is_spoken as is_harmony
from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import AnswerParser
from server.schemas.chat import ToolUse

NONE, HARMONY = "none", "harmony"


class ModelSigns(NamedTuple):
    """What a checkpoint shows of its dialects."""

    template: str
    """The source of its chat template; empty where it has none."""
    has_token: Callable[[str], bool]
    """Whether a text is a token of its vocabulary."""
    architecture: str


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """How some models write tool calls."""

    parser: Callable[[ToolUse], AnswerParser]
    calls: Callable[[LarkWriter, Sequence[Function], bool], str]
    """Expression for calls after `trigger`: one if the last argument is true, else all that one trigger allows."""
    detect: Callable[[ModelSigns], bool]
    """Whether a model whose template shows tools writes them so."""
    trigger: str = ""
    """Marker that begins a call; without one, an answer is calls or is not from its first character on."""
    separator: str | None = None
    """Between a call and the next one's trigger; None: all calls follow one trigger."""
    opening: str = ""
    """Without a trigger: the character that an answer of calls begins with."""
    optional: str = ""
    """Marker that may precede an answer of calls."""
    keys: str = r"(?s:.*)"
    """Regular expression of the argument names that can be written."""
    markers: tuple[str, ...] = ()
    """What the parser looks for."""
    writes_bare_text: bool = False
    """Whether strings are written as bare text up to a marker, and not as JSON."""
    ends_text_with_line: bool = False
    """Whether a line break stands before that marker, so that recursive grammars of text can hold."""
    aliases: tuple[str, ...] = ()
    """Further names, which other servers have for it."""


@dataclass(frozen=True, slots=True)
class ReasoningDialect:
    """The tags that some models put around their reasoning, at an answer's beginning."""

    open_tag: str
    close_tag: str
    detect: Callable[[ModelSigns], bool]
    """Whether a model with a chat template writes its reasoning so."""
    always: bool = False
    """Whether the model reasons unless the prompt says otherwise, and may leave the opening tag out."""
    content_tags: tuple[tuple[str, str], ...] = ()
    """Pairs of tags that may be around the content; they are no part of it."""
    opening: str = ""
    """The token that begins `open_tag`, where the tag is more than one token."""
    aliases: tuple[str, ...] = ()
    """Further names, which other servers have for it."""


TOOL_DIALECTS: Registry[ToolDialect] = Registry(
    "tool dialect",
    {
        "seed_oss": "server.parsing.dialects.qwen_coder",
        "mimo": "server.parsing.dialects.qwen_coder",
        "qwen3_coder": "server.parsing.dialects.qwen_coder",
        "hy_v3": "server.parsing.dialects.glm",
        "glm47": "server.parsing.dialects.glm",
        "glm45": "server.parsing.dialects.glm",
        "deepseek_v3": "server.parsing.dialects.deepseek",
        "deepseek_v31": "server.parsing.dialects.deepseek",
        "minimax_m3": "server.parsing.dialects.minimax_m3",
        "minimax_m2": "server.parsing.dialects.invoke",
        "deepseek_v32": "server.parsing.dialects.invoke",
        "deepseek_v4": "server.parsing.dialects.invoke",
        "deepseek_v41": "server.parsing.dialects.invoke",
        "kimi_k2": "server.parsing.dialects.kimi",
        "gemma4": "server.parsing.dialects.gemma",
        "cohere_command": "server.parsing.dialects.json_list",
        "nemotron_json": "server.parsing.dialects.json_list",
        "phi4_mini_json": "server.parsing.dialects.json_list",
        "granite": "server.parsing.dialects.json_list",
        "hunyuan_a13b": "server.parsing.dialects.json_list",
        "mistral_args": "server.parsing.dialects.mistral",
        "mistral": "server.parsing.dialects.mistral",
        "lfm2": "server.parsing.dialects.pythonic",
        "olmo3": "server.parsing.dialects.pythonic",
        "hermes": "server.parsing.dialects.hermes",
        "pythonic": "server.parsing.dialects.pythonic",
        "llama3_json": "server.parsing.dialects.llama_json",
    },
)

REASONING_DIALECTS: Registry[ReasoningDialect] = Registry(
    "reasoning dialect",
    dict.fromkeys(
        (
            *("seed_oss", "minimax_m3", "gemma4", "cohere_command", "hunyuan_a13b", "ernie45", "mistral", "think"),
            "deepseek_r1",
        ),
        "server.parsing.reasoning",
    ),
)


def detect_tool_dialect(signs: ModelSigns) -> str:
    """How a model writes tool calls; `none` if its template shows no tools, or none of a known dialect."""
    if is_harmony(signs.template, signs.architecture):
        return HARMONY
    if "tools" not in signs.template:
        return NONE
    return next((name for name in TOOL_DIALECTS if TOOL_DIALECTS[name].detect(signs)), NONE)


def detect_reasoning_dialect(signs: ModelSigns) -> str:
    """How a model writes reasoning; `none` if its signs show none, or it has no chat template."""
    if is_harmony(signs.template, signs.architecture):
        return HARMONY
    if not signs.template:
        return NONE
    return next((name for name in REASONING_DIALECTS if REASONING_DIALECTS[name].detect(signs)), NONE)


def tool_names() -> dict[str, str]:
    """Every name that `--tool-call-parser` takes for a dialect, and the dialect's own."""
    return {"openai": HARMONY, HARMONY: HARMONY} | _names(TOOL_DIALECTS)


def reasoning_names() -> dict[str, str]:
    """Every name that `--reasoning-parser` takes for a dialect, and the dialect's own."""
    return {"openai_gptoss": HARMONY, HARMONY: HARMONY} | _names(REASONING_DIALECTS)


def _names(dialects: Registry[ToolDialect] | Registry[ReasoningDialect]) -> dict[str, str]:
    return {known: name for name in dialects for known in (name, *dialects[name].aliases)}

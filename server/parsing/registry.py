"""The dialects of tool calls by name, and which of them a model speaks. Used by `AnswerFormat`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.parsing.dialects import deepseek, glm, harmony, hermes, llama_json, mistral, pythonic
from server.parsing.dialects import qwen_coder as qwen_xml
from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import AnswerParser
from server.parsing.reasoning import DeepSeekR1Reasoning, MistralReasoning, TaggedReasoning, ThinkReasoning
from server.schemas.chat import ToolUse


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """How some models write tool calls."""

    name: str
    parser: Callable[[ToolUse], AnswerParser]
    calls: Callable[[LarkWriter, Sequence[Function], bool], str]
    """Expression for calls behind `trigger`: one with the last argument true, else all that one trigger allows."""
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


_DEEPSEEK_MARKERS = (
    deepseek.CALLS_BEGIN,
    deepseek.CALLS_END,
    deepseek.CALL_BEGIN,
    deepseek.CALL_END,
    deepseek.SEPARATOR,
)
_MISTRAL_MARKERS = (mistral.BEGIN, mistral.ARGUMENTS, mistral.CALL_ID)

HARMONY = "harmony"

TOOL_DIALECTS = {
    dialect.name: dialect
    for dialect in (
        ToolDialect(
            "hermes",
            hermes.HermesParser,
            hermes.calls,
            trigger=hermes.BEGIN,
            separator="\n",
            markers=(hermes.BEGIN, hermes.END),
        ),
        ToolDialect(
            "qwen3_coder",
            qwen_xml.QwenXmlParser,
            qwen_xml.calls,
            trigger=qwen_xml.BEGIN,
            separator="\n",
            keys=r"[^\s<>]+",
            markers=(
                qwen_xml.BEGIN,
                qwen_xml.END,
                qwen_xml.FUNCTION,
                qwen_xml.FUNCTION_END,
                qwen_xml.PARAMETER,
                qwen_xml.PARAMETER_END,
            ),
        ),
        ToolDialect(
            "llama3_json",
            llama_json.LlamaJsonParser,
            llama_json.calls,
            opening="{",
            optional=llama_json.TAG,
            markers=(llama_json.TAG,),
        ),
        ToolDialect(
            "pythonic",
            pythonic.PythonicParser,
            pythonic.calls,
            opening="[",
            keys=r"[\w.-]+",
            markers=(pythonic.START, pythonic.END),
        ),
        ToolDialect(
            "mistral",
            mistral.MistralParser,
            mistral.list_calls,
            trigger=mistral.BEGIN,
            markers=_MISTRAL_MARKERS,
        ),
        ToolDialect(
            "mistral_args",
            mistral.MistralParser,
            mistral.named_calls,
            trigger=mistral.BEGIN,
            separator="",
            markers=_MISTRAL_MARKERS,
        ),
        ToolDialect(
            "deepseek_v3",
            deepseek.DeepSeekParser,
            deepseek.fenced_calls,
            trigger=deepseek.CALLS_BEGIN,
            markers=_DEEPSEEK_MARKERS,
        ),
        ToolDialect(
            "deepseek_v31",
            deepseek.DeepSeekParser,
            deepseek.plain_calls,
            trigger=deepseek.CALLS_BEGIN,
            markers=_DEEPSEEK_MARKERS,
        ),
        ToolDialect(
            "glm45",
            glm.GlmParser,
            glm.calls,
            trigger=glm.BEGIN,
            separator="\n",
            keys=r"[^\s<]([^<]*[^\s<])?",
            markers=(glm.BEGIN, glm.END, glm.KEY_BEGIN, glm.KEY_END, glm.VALUE_BEGIN, glm.VALUE_END),
        ),
    )
}
"""All but harmony, which takes whole answers apart: `AnswerFormat` asks it by itself."""

TOOL_ALIASES = {
    "openai": HARMONY,
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "deepseek_r1": "deepseek_v3",
    "glm47": "glm45",
}
"""Further names, that other servers have for these dialects."""

TOOL_NAMES = (*TOOL_DIALECTS, HARMONY, *TOOL_ALIASES)


def detect_tool_dialect(template: str, vocabulary: Callable[[str], bool], architecture: str) -> str:
    """The dialect that a chat template asks of its model; `none` if it shows no tools, or none that we know.

    `vocabulary` tells whether a text is a token. The first line that holds decides.
    """
    if harmony.is_spoken(template, architecture):
        return HARMONY
    if "tools" not in template:
        return "none"
    signs = (
        (qwen_xml.FUNCTION in template, "qwen3_coder"),
        (glm.KEY_BEGIN in template, "glm45"),
        (deepseek.CALLS_BEGIN in template and deepseek.FENCE_BEGIN in template, "deepseek_v3"),
        (deepseek.CALLS_BEGIN in template, "deepseek_v31"),
        (mistral.BEGIN in template and mistral.ARGUMENTS in template, "mistral_args"),
        (mistral.BEGIN in template, "mistral"),
        (hermes.BEGIN in template, "hermes"),
        (vocabulary(pythonic.START) or "func_name1(" in template, "pythonic"),
        (vocabulary(llama_json.TAG) or llama_json.TAG in template, "llama3_json"),
    )
    return next((name for holds, name in signs if holds), "none")


# [registry] The dialects of reasoning by name, and which of them a model speaks. Used by `AnswerFormat`.

REASONING_DIALECTS: dict[str, type[TaggedReasoning]] = {
    "think": ThinkReasoning,
    "deepseek_r1": DeepSeekR1Reasoning,
    "mistral": MistralReasoning,
}

REASONING_ALIASES = {"qwen3": "think", "glm45": "think", "deepseek_v3": "think", "openai_gptoss": HARMONY}
"""Further names, that other servers have for these dialects."""

REASONING_NAMES = (*REASONING_DIALECTS, HARMONY, *REASONING_ALIASES)


def detect_reasoning_dialect(template: str, vocabulary: Callable[[str], bool], architecture: str) -> str:
    """The dialect that a chat template and a vocabulary show; `none` if they show none, or there is no template.

    `vocabulary` tells whether a text is a token. The first line that holds decides.
    """
    think, mistral = ThinkReasoning, MistralReasoning
    if harmony.is_spoken(template, architecture):
        return HARMONY
    if not template:
        return "none"
    signs = (
        (mistral.open_tag in template or vocabulary(mistral.open_tag), "mistral"),
        (think.open_tag in template, "think"),
        (think.close_tag in template, "deepseek_r1"),
        (vocabulary(think.open_tag) and vocabulary(think.close_tag), "think"),
    )
    return next((name for holds, name in signs if holds), "none")

"""The dialects of reasoning by name, and which of them a model speaks. Used by `AnswerFormat`."""

from collections.abc import Callable

from server.answers.reasoning.deepseek_r1 import DeepSeekR1Reasoning
from server.answers.reasoning.mistral import MistralReasoning
from server.answers.reasoning.tagged import TaggedReasoning
from server.answers.reasoning.think import ThinkReasoning
from server.answers.tools import harmony
from server.answers.tools.registry import HARMONY

DIALECTS: dict[str, type[TaggedReasoning]] = {
    "think": ThinkReasoning,
    "deepseek_r1": DeepSeekR1Reasoning,
    "mistral": MistralReasoning,
}

ALIASES = {"qwen3": "think", "glm45": "think", "deepseek_v3": "think", "openai_gptoss": HARMONY}
"""Further names, that other servers have for these dialects."""

NAMES = (*DIALECTS, HARMONY, *ALIASES)


def detect(template: str, vocabulary: Callable[[str], bool], architecture: str) -> str:
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

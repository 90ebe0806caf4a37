"""Mistral's reasoning models: `[THINK]…[/THINK]`."""

from server.answers.reasoning.tagged import TaggedReasoning


class MistralReasoning(TaggedReasoning):
    open_tag, close_tag = "[THINK]", "[/THINK]"

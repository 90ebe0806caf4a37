"""DeepSeek-R1 and QwQ: `…</think>`, of models that always reason and may leave the opening tag out."""

from server.answers.reasoning.tagged import TaggedReasoning


class DeepSeekR1Reasoning(TaggedReasoning):
    open_tag, close_tag = "<think>", "</think>"
    always = True

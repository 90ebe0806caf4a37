"""`<think>…</think>`: Qwen3, DeepSeek-V3.1, GLM-4.5 and others, where the model or the prompt opens it."""

from server.answers.reasoning.tagged import TaggedReasoning


class ThinkReasoning(TaggedReasoning):
    open_tag, close_tag = "<think>", "</think>"

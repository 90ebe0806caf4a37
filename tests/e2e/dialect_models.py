"""Small checkpoints of random weights with vocabularies and chat templates like those of known models.

For `test_http_dialects`.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from tests.parity.checkpoints import edit_json, make_checkpoint

_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
_MESSAGES = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"


class Style(NamedTuple):
    """A model's style: its template, and the tokens that it has in addition to those of text."""

    template: str
    special: tuple[str, ...]
    """Tokens that decoding skips."""
    visible: tuple[str, ...] = ()
    """Tokens that decoding shows."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to EOS."""
    thinks: bool = False


STYLES = {
    "deepseek": Style(
        _TOOLS
        + "<｜tool▁calls▁begin｜>{% endif %}"  # noqa: RUF001
        + _MESSAGES
        + "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% if enable_thinking is false %}</think>{% endif %}"  # noqa: RUF001
        + "{% endif %}",
        special=(
            "<｜Assistant｜>",  # noqa: RUF001
            "<｜tool▁calls▁begin｜>",  # noqa: RUF001
            "<｜tool▁call▁begin｜>",  # noqa: RUF001
            "<｜tool▁sep｜>",  # noqa: RUF001
            "<｜tool▁call▁end｜>",  # noqa: RUF001
            "<｜tool▁calls▁end｜>",  # noqa: RUF001
        ),
        visible=("<think>", "</think>"),
        thinks=True,
    ),
    "mistral": Style(_TOOLS + "[TOOL_CALLS]{% endif %}" + _MESSAGES, special=("[TOOL_CALLS]",)),
    "harmony": Style(
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
        "{% if false %}<|channel|>{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        ends=("<|return|>", "<|call|>"),
        thinks=True,
    ),
}


def make_model(directory: Path, name: str) -> dict[str, int]:
    """Write the checkpoint of the style `name` into `directory`. Returns the ids of the style's tokens."""
    style = STYLES[name]
    make_checkpoint(directory, seed=1, dtype=torch.bfloat16, vocab_size=320, max_position_embeddings=1024)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    ids = {token: first + place for place, token in enumerate((*style.special, *style.visible))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": id, "content": token, **flags, "special": token in style.special} for token, id in ids.items()
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit_json(directory / "tokenizer_config.json", chat_template=style.template)
    edit_json(directory / "generation_config.json", eos_token_id=[2, *(ids[token] for token in style.ends)])
    return ids

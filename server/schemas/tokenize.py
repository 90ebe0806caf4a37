"""`/tokenize` and `/detokenize`: requests and answers, with vLLM's fields."""

from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from server.schemas.body import FewFields, Items, RequestModel, sentence
from server.schemas.chat import Message, no_reserved_names
from server.schemas.chat_tools import Tools


class TokenizeRequest(RequestModel):
    """Body of `POST /tokenize`: a text, or a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    model: str | None = None
    """Name of a served model; default: the first."""

    prompt: str | None = None
    """Text to tokenise."""

    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    """Chat to tokenise as `/v1/chat/completions` would; instead of `prompt`."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS; default: true for `prompt`, false for a chat."""

    return_token_strs: bool = False
    """Also answer with the tokens as the vocabulary spells them."""

    add_generation_prompt: bool = True
    """Of a chat: end with the beginning of an assistant's turn."""

    continue_final_message: bool = False
    """Of a chat: end within the last message, so that an answer would continue it."""

    chat_template: str | None = None
    """Of a chat: a template instead of the model's; only with `--trust-request-chat-template`."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(no_reserved_names), FewFields] = {}  # noqa: RUF012
    """Of a chat: further variables of the template."""

    tools: Tools = []  # noqa: RUF012
    """Of a chat: functions that the template shows."""

    @model_validator(mode="after")
    def _text_or_chat(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise sentence("the request must have either prompt or messages")
        return self


class TokenizeAnswer(msgspec.Struct):
    """Answer to `POST /tokenize`."""

    count: int
    max_model_len: int
    """Longest prompt plus completion in tokens."""
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    """Name of a served model; default: the first."""

    tokens: list[Annotated[int, Field(ge=0)]]
    """Token ids, at most as many as the model's context holds."""


class DetokenizeAnswer(msgspec.Struct):
    """Answer to `POST /detokenize`."""

    prompt: str
    """The text, special tokens included."""

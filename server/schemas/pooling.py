"""Embeddings, classes and scores: requests and answers, with the fields of OpenAI, vLLM, Jina and Cohere."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, Field, PlainValidator

from server.schemas.body import MAX_ITEMS, NO_CHANGE, Between, Ignored, Items, RequestModel, rule
from server.schemas.completions import Prompt, to_prompts
from server.schemas.generation import INT31, Priority, Timeout, TruncatePromptTokens

Inputs: TypeAlias = Annotated[
    list[Prompt],
    PlainValidator(to_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
"""One text or several, each as text or as token ids."""


class PoolingFields(RequestModel):
    """Fields of every request whose prompts are pooled."""

    model: str
    """Name of a served model, as `/v1/models` lists it."""

    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Truncate a prompt to this number of its first tokens, including special tokens; -1: to as many as fit."""

    priority: Priority = 0
    """Requests with a lower value are served first, equal ones in order of arrival; values are clipped to -100 to
    100."""

    timeout: Timeout | None = None
    """Seconds that the answer may take, including waiting; a request that is not completed by then ends with a 408."""

    cache_salt: str | None = None
    """Share cached prefixes only with requests that have the same salt."""

    user: Ignored | None = None


class InputFields(PoolingFields):
    """Fields of requests about single texts."""

    input: Inputs
    """One text or several, each as text or as token ids."""

    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as CLS or EOS, to texts."""


class VectorFields(InputFields):
    """Fields of requests that are answered with vectors."""

    encoding_format: Literal["float", "base64"] = "float"
    """Write each vector as a list of numbers, or as base64 of little-endian float32."""

    dimensions: Annotated[int, Between(1, INT31)] | None = None
    """Truncate each vector to this number of elements, if the model was trained for that."""

    prompt_name: str | None = None
    """Name of one of the checkpoint's prompts, which is prepended to each text; default: the checkpoint's default."""


class EmbeddingRequest(VectorFields):
    """Body of `POST /v1/embeddings`."""

    normalize: bool = True
    """Apply the model's last function, which most checkpoints use to make vectors of length 1."""


class PoolingRequest(VectorFields):
    """Body of `POST /pooling`."""

    use_activation: bool = True
    """Apply the model's last function, which makes vectors of length 1, or probabilities."""


class ClassifyRequest(InputFields):
    """Body of `POST /classify`."""

    use_activation: bool = True
    """Answer with probabilities; false: with the model's logits."""


class TextDocument(RequestModel):
    """A document of a rerank request as an object."""

    text: str


def _as_texts(value: Any) -> list[str]:
    """One text or several, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise rule("it must be a string or a list of strings")
    if len(value) > MAX_ITEMS:
        raise rule(f"it may hold at most {MAX_ITEMS} strings, and holds {len(value)}")
    return value


OneOrMoreTexts: TypeAlias = Annotated[list[str], PlainValidator(_as_texts, json_schema_input_type=str | list[str])]


class ScoreRequest(PoolingFields):
    """Body of `POST /score`."""

    text_1: OneOrMoreTexts
    """Text, or as many texts as `text_2` has, to compare with each of these."""

    text_2: OneOrMoreTexts
    """Text or texts whose relevance to `text_1` is scored."""

    instruction: str | None = None
    """What relevance means, for rerankers that read an instruction."""

    use_activation: bool = True
    """Apply the model's last function to each score."""


def _not_empty(value: str) -> str:
    if not value:
        raise rule("it must have at least 1 character")
    return value


class RerankRequest(PoolingFields):
    """Body of `POST /v1/rerank`, `/rerank` and `/v2/rerank`."""

    query: Annotated[str, AfterValidator(_not_empty)]
    """Text that the documents are compared with."""

    documents: Annotated[Items[str | TextDocument], Field(min_length=1)]
    """Texts, or objects with a `text`."""

    top_n: Annotated[int, Between(1, INT31)] | None = None
    """Answer with this many of the most relevant documents; default: all."""

    return_documents: bool | None = None
    """Repeat each document's text in its result; default: true, at `/v2/rerank` false."""

    max_tokens_per_doc: Annotated[int, Between(1, INT31)] | None = None
    """Read only this many tokens of each document."""

    instruction: str | None = None
    """What relevance means, for rerankers that read an instruction."""

    use_activation: bool = True
    """Apply the model's last function to each score."""

    max_chunks_per_doc: Annotated[int, Field(description=NO_CHANGE)] | None = None
    rank_fields: Annotated[Items[str], Field(description=NO_CHANGE)] | None = None


# -- answers ----------------------------------------------------------------------------------------------------


class PoolingUsage(msgspec.Struct):
    """Tokens of a request's prompts."""

    prompt_tokens: int
    total_tokens: int


class _Listed(msgspec.Struct, kw_only=True):
    """What vLLM's answers about several inputs share."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class Embedding(msgspec.Struct):
    index: int
    """Which of the inputs it is of."""
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class PooledData(msgspec.Struct):
    index: int
    data: list[float] | str
    """Numbers, or base64 of little-endian float32."""
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(_Listed, kw_only=True):
    """Answer to `POST /pooling`."""

    data: list[PooledData]


class Classification(msgspec.Struct):
    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    """Of each class, in the checkpoint's order."""
    num_classes: int


class ClassifyAnswer(_Listed, kw_only=True):
    """Answer to `POST /classify`."""

    data: list[Classification]


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(_Listed, kw_only=True):
    """Answer to `POST /score`."""

    data: list[Score]


class RankedDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    index: int
    """Which of the documents it is."""
    relevance_score: float
    document: RankedDocument | None = None


class ApiVersion(msgspec.Struct):
    version: str


class BilledUnits(msgspec.Struct):
    search_units: int
    input_tokens: int


class RerankMeta(msgspec.Struct):
    """What Cohere's clients read."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/rerank`, `/rerank` and `/v2/rerank`."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    """From the most relevant document to the least."""
    meta: RerankMeta

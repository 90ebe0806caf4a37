"""`PoolingProcessor`: converts texts and pairs of texts to sequences whose prompts the engine core pools.

It is built on `InputOutputProcessor`, for embeddings, classes and scores. The server and `LLMEngine` use it. Rerankers
that are language models have their own template for a query and a document.
"""

import re
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.messages import AddRequest, PoolingParams
from engine.sampling_params import SamplingParams
from engine.text.io_processor import DoesNotFit, InputOutputProcessor, InvalidRequest, NewSequence
from engine.text.request_state import RequestState
from models.architectures.pooling import PoolingConfig

_NOTHING = SamplingParams(temperature=0.0, max_tokens=0)
"""Parameters of sequences that generate no token."""

_QUERY_ROLE = re.compile(r"""["']query["']""")
"""Occurs in chat templates of rerankers, which render a query and a document."""

_RERANKER_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANKER_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_RERANKER_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The prompt that Qwen3-Reranker was trained with, which its model card gives."""

_WRITTEN_OUT = "<|im_start|>"
"""Prefix of a query to which the client has already applied that prompt."""

_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompts of sentence-transformers' checkpoints for the two sides of a search."""

_SPARE_CHARACTERS = 4096
"""Characters tokenised after the part that certainly has the first tokens."""


class PooledPrompt(NamedTuple):
    """A validated prompt for pooling."""

    token_ids: list[int]
    first_text_tokens: int | None = None
    """See `PoolingParams`."""


class PoolingProcessor:
    """Creates the prompts that one model embeds, classifies or scores. Thread-safe."""

    def __init__(self, processor: InputOutputProcessor, pooling: PoolingConfig) -> None:
        self.pooling = pooling
        self.processor = processor
        template = processor.chat_template
        is_language_model = pooling.scores_pairs and not pooling.is_encoder
        self._has_own_template = (
            is_language_model and template is not None and _QUERY_ROLE.search(template.source) is not None
        )
        self._is_qwen3_reranker = is_language_model and pooling.body == "Qwen3ForCausalLM"

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise `InvalidRequest` unless the model's vectors may be truncated to `dimensions` elements."""
        pooling = self.pooling
        if dimensions is None or pooling.allows(dimensions):
            return
        if pooling.matryoshka is None:
            limit = f"this model's embeddings have {pooling.dimension} and cannot be cut; leave it out"
        elif pooling.matryoshka:
            limit = (
                f"this model's embeddings may have {', '.join(map(str, pooling.matryoshka))} or {pooling.dimension}"
            )
        else:
            limit = f"this model's embeddings have {pooling.dimension}, and may be cut to 1 or more of them"
        raise InvalidRequest(f"dimensions is {dimensions}; {limit}", "dimensions")

    def text_of(self, text: str, prompt_name: str | None = None) -> str:
        """Prepend the checkpoint's prompt `prompt_name`, or its default prompt, to `text`. Raises `InvalidRequest`."""
        prompts, name = self.pooling.prompts, prompt_name or self.pooling.default_prompt
        if name is not None and name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequest(
                f"prompt_name is {name[:60]!r}; the prompts of this model are: {known}", "prompt_name"
            )
        text = text if name is None else prompts[name] + text
        return text.lower() if self.pooling.lower_case else text

    def query_text(self, text: str) -> str:
        """Prepend the prompt for queries of a search to `text`."""
        return self.text_of(text, self._first_prompt(_QUERY_PROMPTS))

    def document_text(self, text: str) -> str:
        """Prepend the prompt for documents of a search to `text`."""
        return self.text_of(text, self._first_prompt(_DOCUMENT_PROMPTS))

    def prompt(
        self,
        given: str | list[int],
        field: str,
        *,
        longest: int | None = None,
        add_special_tokens: bool = True,
    ) -> PooledPrompt:
        """Create the prompt of a text, or of unchanged token ids. Raises `InvalidRequest` that names `field`.

        With `longest`, the prompt is truncated to that number of tokens; -1: to as many as fit.
        """
        longest = self._longest(longest)
        try:
            if not isinstance(given, str):
                prompt = PooledPrompt(given if longest is None else given[:longest])
            else:
                prompt = self._encoded(given, None, longest, add_special_tokens)
            self.processor.check_pooled(prompt.token_ids)
        except ValueError as error:
            raise _about(error, field) from error
        return prompt

    def prompts(
        self,
        given: Sequence[str | list[int]],
        field: str,
        *,
        prompt_name: str | None = None,
        longest: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[PooledPrompt]:
        """As `prompt`, for several inputs, which errors name by index. The checkpoint's prompt is prepended to
        texts."""
        return [
            self.prompt(
                self.text_of(each, prompt_name) if isinstance(each, str) else each,
                field if len(given) == 1 else f"{field}[{index}]",
                longest=longest,
                add_special_tokens=add_special_tokens,
            )
            for index, each in enumerate(given)
        ]

    def pair(
        self,
        query: str,
        document: str,
        field: str,
        *,
        instruction: str | None = None,
        longest: int | None = None,
        longest_document: int | None = None,
    ) -> PooledPrompt:
        """Create the prompt whose vector scores the relevance of `document` to `query`. Raises `InvalidRequest`.

        `longest` as for `prompt`, by truncating the document; `longest_document` is the most tokens of the document.
        """
        longest = self._longest(longest)
        try:
            if longest_document is not None:
                document = self._cut(document, longest_document)
            prompt = self._pair(query, document, instruction, longest)
            self.processor.check_pooled(prompt.token_ids)
        except ValueError as error:
            raise _about(error, field) from error
        return prompt

    def search(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        longest: int | None = None,
        longest_document: int | None = None,
    ) -> list[PooledPrompt]:
        """Create the prompts from whose vectors `scores` computes the relevance of each document to `query`.

        `longest` and `longest_document` as for `pair`. Raises `InvalidRequest` that names `query` or `documents[i]`.
        """
        if self.pooling.scores_pairs:
            how: dict[str, Any] = {
                "instruction": instruction,
                "longest": longest,
                "longest_document": longest_document,
            }
            return [
                self.pair(query, document, f"documents[{index}]", **how) for index, document in enumerate(documents)
            ]
        prompts = [self.prompt(self.query_text(query), "query", longest=longest)]
        for index, document in enumerate(documents):
            field = f"documents[{index}]"
            if longest_document is not None:
                try:
                    document = self._cut(document, longest_document)
                except ValueError as error:
                    raise _about(error, field) from error
            prompts.append(self.prompt(self.document_text(document), field, longest=longest))
        return prompts

    def scores(self, vectors: Sequence[bytes], firsts: Sequence[int]) -> list[float]:
        """Compute the score of each pair. `firsts` has the index of each pair's first text among the embedded ones.

        `vectors` are those of the pairs or, for an embedding model, those of all first texts followed by all second
        ones.
        """
        if self.pooling.scores_pairs:
            return [numbers_of(vector)[0] for vector in vectors]
        count = max(firsts) + 1
        embedded = [numbers_of(vector) for vector in vectors[:count]]
        return [
            _cosine(embedded[first], numbers_of(second)) for first, second in zip(firsts, vectors[count:], strict=True)
        ]

    def check_scores(self) -> None:
        """Raise `InvalidRequest` for a classifier without a single score."""
        if self.pooling.task == "classify" and not self.pooling.scores_pairs:
            raise InvalidRequest(
                f"the model has {self.pooling.dimension} classes, and no single score; classify texts instead", "model"
            )

    def best_label(self, scores: Sequence[float]) -> str:
        """Return the class with the highest score."""
        return self.pooling.labels[max(range(len(scores)), key=scores.__getitem__)]

    def sequence(
        self,
        prompt: PooledPrompt,
        request_id: int,
        *,
        dimensions: int | None = None,
        activate: bool = True,
        cache_salt: int | None = None,
        priority: int = 0,
        adapter: int = 0,
        owner: str = "",
        weight: float = 1.0,
        arrival_time: float | None = None,
    ) -> NewSequence:
        """Create the sequence that pools a prompt. For the options see `PoolingParams` and `AddRequest`."""
        request = AddRequest(
            request_id,
            prompt.token_ids,
            _NOTHING,
            cache_salt=cache_salt,
            priority=priority,
            adapter=adapter,
            owner=owner,
            weight=weight,
            pooling=PoolingParams(dimensions, activate, prompt.first_text_tokens),
        )
        state = RequestState(request_id, prompt.token_ids, _NOTHING, self.processor.tokenizer, arrival_time)
        return NewSequence(request, state)

    def _first_prompt(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.pooling.prompts), None)

    def _longest(self, longest: int | None) -> int | None:
        return self.processor.longest_prompt() if longest == -1 else longest

    def _pair(self, query: str, document: str, instruction: str | None, longest: int | None) -> PooledPrompt:
        if not (self._has_own_template or self._is_qwen3_reranker) or query.startswith(_WRITTEN_OUT):
            return self._encoded(query, document, longest, True)
        self.processor.check_length(len(query))
        if longest is None:
            self.processor.check_length(len(document))
            return self._rendered(query, document, instruction)
        # Only the document is truncated. Where document and template meet, the tokens may differ by a few.
        room = longest - len(self._rendered(query, "", instruction).token_ids)
        while room > 0:
            prompt = self._rendered(query, self._cut(document, room), instruction)
            excess = len(prompt.token_ids) - longest
            if excess <= 0:
                return prompt
            room -= excess
        return self._rendered(query, "", instruction)

    def _rendered(self, query: str, document: str, instruction: str | None) -> PooledPrompt:
        if self._has_own_template:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            text = self.processor.render_chat(messages)
        else:
            asked = f"<Instruct>: {instruction or _RERANKER_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            text = f"{_RERANKER_PREFIX}{asked}{_RERANKER_SUFFIX}"
        return PooledPrompt(*self.processor.tokenizer.encode_for_pooling(text, add_special_tokens=False))

    def _encoded(self, text: str, pair: str | None, longest: int | None, add_special_tokens: bool) -> PooledPrompt:
        tokenizer = self.processor.tokenizer
        last = text if pair is None else pair
        if longest is None:
            self.processor.check_length(len(last))
        else:
            last = last[: longest * tokenizer.longest_token + _SPARE_CHARACTERS]
        if pair is None:
            text = last
        else:
            self.processor.check_length(len(text))
            pair = last
        return PooledPrompt(
            *tokenizer.encode_for_pooling(text, pair, add_special_tokens=add_special_tokens, longest=longest)
        )

    def _cut(self, text: str, longest: int) -> str:
        tokenizer = self.processor.tokenizer
        text = text[: longest * tokenizer.longest_token + _SPARE_CHARACTERS]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return text if len(token_ids) <= longest else tokenizer.decode(token_ids[:longest], skip_special_tokens=False)


def numbers_of(vector: bytes) -> list[float]:
    """Decode the elements of a vector from the engine core's bytes."""
    numbers: list[float] = array("f", vector).tolist()
    return numbers


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = sum(x * x for x in a) * sum(y * y for y in b)
    return product / lengths**0.5 if lengths else 0.0


def _about(error: ValueError, field: str) -> InvalidRequest:
    """Convert `error` to an error about a field of the request."""
    kind = DoesNotFit if isinstance(error, DoesNotFit) else InvalidRequest
    if isinstance(error, InvalidRequest) and error.param not in ("prompt", "messages"):
        return error
    return kind(f"{field} is not accepted: its {error}", field)

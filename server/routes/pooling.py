"""Embeddings, classes and scores: `/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`.

Each input, and each pair of texts, is a sequence whose prompt the engine pools to a vector. The sequences of a request
are admitted together, and run in the same steps as all others. A reranker scores pairs directly; with an embedding
model, the score of a pair is the cosine of the two texts' vectors.
"""

import base64
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from engine.text.io_processor import NewSequence
from engine.text.pooling import PooledPrompt, PoolingProcessor, numbers_of
from engine.text.request_state import RequestState
from server.endpoints import ENDPOINTS, EndpointFamily
from server.errors import BadRequest
from server.frontend import Frontend
from server.limits.owners import Owner
from server.request_builder import MAX_SEQUENCES, accept, check_repeated, prefix_salt
from server.schemas.generation import Usage
from server.schemas.pooling import (
    ApiVersion,
    BilledUnits,
    Classification,
    ClassifyAnswer,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PooledData,
    PoolingAnswer,
    PoolingFields,
    PoolingRequest,
    PoolingUsage,
    RankedDocument,
    RerankAnswer,
    RerankMeta,
    RerankRequest,
    RerankResult,
    Score,
    ScoreAnswer,
    ScoreRequest,
    TextDocument,
    VectorFields,
)
from server.streaming.generation import MANY_SEQUENCES, Generation
from server.streaming.sse import json_response

endpoints = ENDPOINTS.register("pooling")(EndpointFamily())

_LONG_CHARACTERS = 4096
"""Longer texts, and more than `MANY_SEQUENCES`, are tokenised in a thread, so that other streams continue."""
_MANY_NUMBERS = 8192
"""Answers with more numbers are encoded in a thread."""


class _Call:
    """One request, from its accepted body to the vectors of its prompts."""

    def __init__(
        self, http: Request, request: PoolingFields, frontend: Frontend, owner: Owner, processor: PoolingProcessor
    ) -> None:
        self._http, self._request, self._frontend, self._owner = http, request, frontend, owner
        self.processor = processor
        self.id = uuid.uuid4().hex
        self._arrival_time = time.monotonic()
        self._generation: Generation | None = None

    async def prepare(
        self,
        num_characters: int,
        num_prompts: int,
        tokenize: Callable[[], Sequence[PooledPrompt]],
        *,
        dimensions: int | None = None,
        activate: bool = True,
    ) -> None:
        """Create the sequences of the prompts that `tokenize` returns, for `answer`; in a thread if there are many
        characters or prompts. Raises `InvalidRequest`, `BadRequest` and `Overloaded`."""
        request, frontend, owner = self._request, self._frontend, self._owner
        if num_prompts > MAX_SEQUENCES:
            raise BadRequest(f"the request has {num_prompts} prompts; it may have at most {MAX_SEQUENCES}")
        salt = prefix_salt(request.cache_salt, None if frontend.shares_prefix_cache else owner.prefix_domain)
        adapter = frontend.adapters.number_of(request.model)

        def create() -> list[NewSequence]:
            prompts = tokenize()
            return [
                self.processor.sequence(
                    prompt,
                    request_id,
                    dimensions=dimensions,
                    activate=activate,
                    cache_salt=salt,
                    priority=request.priority,
                    adapter=adapter,
                    owner=owner.party,
                    weight=owner.weight,
                    arrival_time=self._arrival_time,
                )
                for prompt, request_id in zip(prompts, frontend.hub.new_ids(len(prompts)), strict=True)
            ]

        is_large = num_characters > _LONG_CHARACTERS or num_prompts > MANY_SEQUENCES
        sequences = await frontend.jobs.of(owner).text(create) if is_large else create()
        self._generation = Generation(
            frontend.hub, frontend.config, sequences, 1, owner=owner, timeout=request.timeout
        )

    def num_characters(self, field: str, queries: Sequence[str], documents: Sequence[str], instruction: str) -> int:
        """Return how many characters are tokenised for each document and its query, or the only one, which `field`
        holds. Raises `BadRequest` if a reranker would read far more than the request has."""
        num_times = len(documents) if self.processor.pooling.scores_pairs else 1
        read = check_repeated("instruction", len(instruction), num_times, self._frontend)
        if len(queries) == 1:
            read += check_repeated(field, len(queries[0]), num_times, self._frontend)
        else:
            read += sum(map(len, queries))
        return read + sum(map(len, documents))

    async def answer(self, write: Callable[[Sequence[bytes], PoolingUsage], msgspec.Struct]) -> Response:
        """Run the sequences, and answer with the result of `write` on their vectors. Long answers are encoded in a
        thread."""
        generation = self._generation
        assert generation is not None
        vectors = [_vector(state) for state in await generation.complete(self.id, self._http)]
        usage = _usage(generation.usage)

        def encode() -> bytes:
            return msgspec.json.encode(write(vectors, usage))

        if sum(map(len, vectors)) // 4 > _MANY_NUMBERS:
            return json_response(await self._frontend.jobs.of(self._owner).text(encode))
        return json_response(encode())


def _vector(state: RequestState) -> bytes:
    assert state.vector is not None, "a pooled sequence that did not fail has a vector"
    return state.vector


def _usage(usage: Usage) -> PoolingUsage:
    return PoolingUsage(usage.prompt_tokens, usage.prompt_tokens)


def _written(vector: bytes, encoding_format: str) -> list[float] | str:
    return base64.b64encode(vector).decode() if encoding_format == "base64" else numbers_of(vector)


def _encoded(items: Iterable[msgspec.Struct]) -> list[Any]:
    """Encode the items to JSON one by one, so that other threads can run between two items."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


# -- single texts -----------------------------------------------------------------------------------------------


async def _prepare_inputs(
    call: _Call, request: VectorFields | ClassifyRequest, *, dimensions: int | None = None, activate: bool
) -> None:
    prompt_name = request.prompt_name if isinstance(request, VectorFields) else None

    def tokenize() -> list[PooledPrompt]:
        return call.processor.prompts(
            request.input,
            "input",
            prompt_name=prompt_name,
            longest=request.truncate_prompt_tokens,
            add_special_tokens=request.add_special_tokens,
        )

    num_characters = sum(len(text) for text in request.input if isinstance(text, str))
    await call.prepare(num_characters, len(request.input), tokenize, dimensions=dimensions, activate=activate)


@endpoints.post(
    "/v1/embeddings",
    EmbeddingList,
    request=EmbeddingRequest,
    example={"input": ["The capital of France", "Paris"], "encoding_format": "float"},
)
async def embeddings(http: Request) -> Response:
    """Compute the embedding vectors of texts, by an embedding model."""
    async with accept(http, EmbeddingRequest) as (request, frontend, owner):
        call = _Call(http, request, frontend, owner, frontend.pooling_for("embed"))
        call.processor.check_dimensions(request.dimensions)
        frontend.admission.precheck(owner, len(request.input))
        await _prepare_inputs(call, request, dimensions=request.dimensions, activate=request.normalize)

    def write(vectors: Sequence[bytes], usage: PoolingUsage) -> EmbeddingList:
        data = (Embedding(index, _written(vector, request.encoding_format)) for index, vector in enumerate(vectors))
        return EmbeddingList(data=_encoded(data), model=request.model, usage=usage)

    return await call.answer(write)


@endpoints.post("/pooling", PoolingAnswer, request=PoolingRequest, example={"input": "The capital of France"})
async def pool(http: Request) -> Response:
    """Compute the model's pooled vectors of texts: embeddings, or scores of classes."""
    async with accept(http, PoolingRequest) as (request, frontend, owner):
        call = _Call(http, request, frontend, owner, frontend.pooling_for("embed", "classify"))
        call.processor.check_dimensions(request.dimensions)
        frontend.admission.precheck(owner, len(request.input))
        await _prepare_inputs(call, request, dimensions=request.dimensions, activate=request.use_activation)

    def write(vectors: Sequence[bytes], usage: PoolingUsage) -> PoolingAnswer:
        data = (PooledData(index, _written(vector, request.encoding_format)) for index, vector in enumerate(vectors))
        return PoolingAnswer(
            id=f"pool-{call.id}",
            created=int(time.time()),
            model=request.model,
            data=_encoded(data),
            usage=usage,
        )

    return await call.answer(write)


@endpoints.post("/classify", ClassifyAnswer, request=ClassifyRequest, example={"input": "A fine day"})
async def classify(http: Request) -> Response:
    """Return the most probable class of each text, by a classifier."""
    async with accept(http, ClassifyRequest) as (request, frontend, owner):
        call = _Call(http, request, frontend, owner, frontend.pooling_for("classify"))
        frontend.admission.precheck(owner, len(request.input))
        await _prepare_inputs(call, request, activate=request.use_activation)

    def write(vectors: Sequence[bytes], usage: PoolingUsage) -> ClassifyAnswer:
        data = []
        for index, vector in enumerate(vectors):
            scores = numbers_of(vector)
            data.append(Classification(index, call.processor.best_label(scores), scores, len(scores)))
        return ClassifyAnswer(
            id=f"classify-{call.id}", created=int(time.time()), model=request.model, data=data, usage=usage
        )

    return await call.answer(write)


# -- pairs ------------------------------------------------------------------------------------------------------


@endpoints.post(
    "/v1/score", ScoreAnswer, request=ScoreRequest, example={"text_1": "The capital of France", "text_2": ["Paris"]}
)
@endpoints.post(
    "/score", ScoreAnswer, request=ScoreRequest, example={"text_1": "The capital of France", "text_2": ["Paris"]}
)
async def score(http: Request) -> Response:
    """Score the relevance of texts to another text, by a reranker or an embedding model."""
    async with accept(http, ScoreRequest) as (request, frontend, owner):
        call = _Call(http, request, frontend, owner, frontend.pooling_for("classify", "embed"))
        processor = call.processor
        processor.check_scores()
        queries, documents = request.text_1, request.text_2
        if len(queries) not in (1, len(documents)):
            raise BadRequest(
                f"text_1 holds {len(queries)} texts and text_2 {len(documents)}; it must hold 1, or as many",
                param="text_1",
            )
        num_characters = call.num_characters("text_1", queries, documents, request.instruction or "")
        frontend.admission.precheck(owner, len(documents))
        firsts = [index % len(queries) for index in range(len(documents))]
        longest = request.truncate_prompt_tokens

        def tokenize() -> list[PooledPrompt]:
            if processor.pooling.scores_pairs:
                return [
                    processor.pair(
                        queries[first],
                        document,
                        "text_2" if len(documents) == 1 else f"text_2[{index}]",
                        instruction=request.instruction,
                        longest=longest,
                    )
                    for index, (first, document) in enumerate(zip(firsts, documents, strict=True))
                ]
            return [
                *processor.prompts(queries, "text_1", longest=longest),
                *processor.prompts(documents, "text_2", longest=longest),
            ]

        num_prompts = len(documents) + (0 if processor.pooling.scores_pairs else len(queries))
        await call.prepare(num_characters, num_prompts, tokenize, activate=request.use_activation)

    def write(vectors: Sequence[bytes], usage: PoolingUsage) -> ScoreAnswer:
        data = [Score(index, each) for index, each in enumerate(processor.scores(vectors, firsts))]
        return ScoreAnswer(
            id=f"score-{call.id}", created=int(time.time()), model=request.model, data=data, usage=usage
        )

    return await call.answer(write)


_RERANK_EXAMPLE = {"query": "The capital of France", "documents": ["Paris", "London"], "top_n": 1}


@endpoints.post("/v1/rerank", RerankAnswer, request=RerankRequest, example=_RERANK_EXAMPLE)
async def rerank(http: Request) -> Response:
    """Sort documents by their relevance to a query, by a reranker or an embedding model."""
    return await _rerank(http, returns_documents=True, version="1")


@endpoints.post("/rerank", RerankAnswer, request=RerankRequest, example=_RERANK_EXAMPLE)
async def rerank_as_jina(http: Request) -> Response:
    """Sort documents as `/rerank` does, at Jina's path."""
    return await _rerank(http, returns_documents=True, version="1")


@endpoints.post("/v2/rerank", RerankAnswer, request=RerankRequest, example=_RERANK_EXAMPLE)
async def rerank_as_cohere(http: Request) -> Response:
    """Sort documents as `/rerank` does, at Cohere's path."""
    return await _rerank(http, returns_documents=False, version="2")


async def _rerank(http: Request, *, returns_documents: bool, version: str) -> Response:
    async with accept(http, RerankRequest) as (request, frontend, owner):
        call = _Call(http, request, frontend, owner, frontend.pooling_for("classify", "embed"))
        processor = call.processor
        processor.check_scores()
        documents = [each.text if isinstance(each, TextDocument) else each for each in request.documents]
        num_characters = call.num_characters("query", [request.query], documents, request.instruction or "")
        frontend.admission.precheck(owner, len(documents))

        def tokenize() -> list[PooledPrompt]:
            return processor.search(
                request.query,
                documents,
                instruction=request.instruction,
                longest=request.truncate_prompt_tokens,
                longest_document=request.max_tokens_per_doc,
            )

        num_prompts = len(documents) + (not processor.pooling.scores_pairs)
        await call.prepare(num_characters, num_prompts, tokenize, activate=request.use_activation)
    shows_documents = returns_documents if request.return_documents is None else request.return_documents

    def write(vectors: Sequence[bytes], usage: PoolingUsage) -> RerankAnswer:
        scores = processor.scores(vectors, [0] * len(documents))
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: request.top_n]
        results = [
            RerankResult(index, scores[index], RankedDocument(documents[index]) if shows_documents else None)
            for index in order
        ]
        meta = RerankMeta(ApiVersion(version), BilledUnits(1, usage.prompt_tokens))
        return RerankAnswer(id=f"rerank-{call.id}", model=request.model, usage=usage, results=results, meta=meta)

    return await call.answer(write)

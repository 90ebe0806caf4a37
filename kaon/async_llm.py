"""`AsyncLLM`: the Python API for asyncio programs. It uses the server's front end, without HTTP."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from types import TracebackType
from typing import Any, Self

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.client.llm_engine import Prompts
from engine.config.config import Config
from engine.sampling_params import SamplingParams
from engine.text.pooling import PooledPrompt, PoolingProcessor, numbers_of
from engine.text.request_state import RequestDelta, RequestResult
from kaon.chunks import ChatChunk, chunks
from kaon.llm import Messages, refusals_as_invalid_requests, validated_chat
from server.frontend import Frontend
from server.limits.owners import ANYONE
from server.routes.chat import ChatRenderer, prepare
from server.schemas.chat import ChatCompletion
from server.streaming.generation import Generation

_NO_LIMIT = 2**31 - 1


class AsyncLLM:
    """A model in a separate engine process, for asyncio programs. Any number of tasks may call it concurrently.

    The process starts with the object; `start`, or `async with`, waits until it serves::

        async with AsyncLLM("path/to/checkpoint") as llm:
            result = await llm.generate("Once upon a time", SamplingParams(max_tokens=32))
            async for chunk in llm.stream_chat([{"role": "user", "content": "Hello"}]):
                print(chunk.choices[0].delta.content or "", end="")

    All calls must come from the event loop that awaited `start`. Cancelling a task aborts its request. If the engine
    dies, it is started again, and every call continues after its last token.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **config_fields: Any) -> None:
        """Begin to load `model`, a checkpoint directory or hub id; None: the embedded model.

        Takes fields of `Config` and of its sections by name, or a whole `config`. The queue of requests is unbounded,
        unless `max_queued_requests` or `max_queued_tokens` is given. Raises `ValueError` for an invalid field.
        """
        if config is None:
            limits = {"max_queued_requests": _NO_LIMIT, "max_queued_tokens": _NO_LIMIT}
            config = Config.from_fields(model=model, **{**limits, **config_fields})
        elif model is not None or config_fields:
            raise ValueError("give AsyncLLM either a config or single fields, not both")
        self._core = CoreManager(config)
        self._frontend = Frontend(config, self._core)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that awaited `start`."""

    async def start(self) -> None:
        """Wait until the model is loaded. If that fails, the object is closed and `EngineDeadError` is raised."""
        self._loop = asyncio.get_running_loop()
        await self._frontend.load()
        if self._frontend.why_ended is not None:
            why = self._frontend.why_ended
            await self.close()
            raise EngineDeadError(why)

    async def close(self) -> None:
        """End the engine process. Running requests end with an error."""
        self._frontend.close()
        # In the loop's thread: in another one, the loop's readers would process the core's end at the same time.
        self._core.shutdown()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> RequestResult:
        """Complete a text or a list of token ids.

        `sampling_params` defaults to the checkpoint's generation config. `lora` names an adapter. Raises
        `InvalidRequest`, a `ValueError`, and `EngineDeadError`.
        """
        with self._refusals():
            [state] = await self._generation(prompt, sampling_params, lora).complete(_new_id())
        return state.result()

    async def stream(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> AsyncIterator[RequestDelta]:
        """Complete a prompt, and yield a delta after each engine step. Arguments and errors are those of
        `generate`."""
        with self._refusals():
            async with aclosing(self._generation(prompt, sampling_params, lora).deltas(_new_id())) as deltas:
                async for each in deltas:
                    yield each[0]

    async def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """Return the embedding vector of each text, by an embedding model; see `LLM.embed`.

        Raises `InvalidRequest`, a `ValueError`, and `EngineDeadError`.
        """
        with self._refusals():
            processor = self._frontend.pooling_for("embed")
            processor.check_dimensions(dimensions)
            given: list[str | list[int]] = [texts] if isinstance(texts, str) else [*texts]
            prompts = processor.prompts(given, "texts", prompt_name=prompt_name)
            vectors = await self._pool(prompts, processor, dimensions=dimensions, activate=normalize)
        return [numbers_of(vector) for vector in vectors]

    async def score(self, query: str, documents: list[str], *, instruction: str | None = None) -> list[float]:
        """Return the relevance of each document to `query`, by a reranker or an embedding model; see `LLM.score`."""
        with self._refusals():
            processor = self._frontend.pooling_for("classify", "embed")
            processor.check_scores()
            if not documents:
                return []
            vectors = await self._pool(processor.search(query, documents, instruction=instruction), processor)
        return processor.scores(vectors, [0] * len(documents))

    async def chat(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """Answer a conversation, as the server does. `fields` are those of `/v1/chat/completions` (docs/api.md).

        Raises `InvalidRequest`, a `ValueError`, and `EngineDeadError`.
        """
        with self._refusals():
            generation, renderer = await self._chat({**fields, "messages": list(messages)})
            await generation.complete(renderer.head.id)
            answer = generation.whole(renderer)
        assert isinstance(answer, ChatCompletion)
        return answer

    async def stream_chat(self, messages: Messages, **fields: Any) -> AsyncIterator[ChatChunk]:
        """Answer a conversation, and yield its chunks. Arguments and errors are those of `chat`."""
        with self._refusals():
            generation, renderer = await self._chat({**fields, "messages": list(messages), "stream": True})
            async with aclosing(generation.deltas(renderer.head.id)) as deltas:
                for chunk in chunks(renderer.opening()):
                    yield chunk
                async for each in deltas:
                    for index, delta in each.items():
                        for chunk in chunks(renderer.chunk(index, delta)):
                            yield chunk
            for chunk in chunks(renderer.closing(generation.usage)):
                yield chunk

    def _refusals(self) -> AbstractContextManager[None]:
        """Return the context of every call. Raises `RuntimeError` in another event loop, which would get no
        outputs."""
        if self._loop is not asyncio.get_running_loop():
            why = "was not started" if self._loop is None else "was started in another event loop"
            raise RuntimeError(f"this AsyncLLM {why}; use it in the event loop that awaits its start, by async with")
        return refusals_as_invalid_requests(self._frontend)

    async def _pool(self, prompts: Sequence[PooledPrompt], processor: PoolingProcessor, **how: Any) -> list[bytes]:
        """Return the pooled vectors of prompts."""
        hub, ids = self._frontend.hub, self._frontend.hub.new_ids(len(prompts))
        sequences = [processor.sequence(*each, **how) for each in zip(prompts, ids, strict=True)]
        states = await Generation(hub, self._frontend.config, sequences, 1).complete(_new_id())
        return [state.vector or b"" for state in states]

    def _generation(self, prompt: str | list[int], params: SamplingParams | None, lora: str | None) -> Generation:
        frontend = self._frontend
        processor = frontend.loaded.processor
        if lora is not None:
            frontend.check_model(lora)
        sequence = processor.preprocess(
            prompt,
            processor.defaults.sampling_params() if params is None else params,
            request_id=frontend.hub.new_ids(1)[0],
            clip_max_tokens=params is None,
            adapter=0 if lora is None else frontend.adapters.number_of(lora),
        )
        return Generation(frontend.hub, frontend.config, [sequence], 1)

    async def _chat(self, body: Mapping[str, Any]) -> tuple[Generation, ChatRenderer]:
        frontend = self._frontend
        request = validated_chat(body, frontend)
        sequences, renderer = await prepare(request, frontend, ANYONE, time.monotonic())
        return Generation(frontend.hub, frontend.config, sequences, request.n, timeout=request.timeout), renderer


def _new_id() -> str:
    return f"gen-{uuid.uuid4().hex}"

"""`LLM`: the blocking Python API. It adds chats, processed as by the server, to the prompts of `LLMEngine`."""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from engine.client.core_manager import EngineDeadError
from engine.client.llm_engine import LLMEngine
from engine.text.io_processor import InvalidRequest, NewSequence

if TYPE_CHECKING:
    from kaon.chunks import ChatChunk
    from server.frontend import Frontend
    from server.routes.chat import ChatRenderer
    from server.schemas.chat import ChatCompletion

Result = TypeVar("Result")

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation in the form of the field `messages` of `/v1/chat/completions`."""


class LLM(LLMEngine):
    """A model in a separate engine process, for scripts. All calls come from one thread.

    `generate` and `stream` take prompts and `SamplingParams`; `chat` and `stream_chat` take conversations and the
    fields of `/v1/chat/completions`, with tools and structured output. Use it in a `with`, or `close` it.
    """

    @overload
    def chat(self, messages: Messages, *, use_tqdm: bool = False, **fields: Any) -> "ChatCompletion": ...

    @overload
    def chat(
        self, messages: Sequence[Messages], *, use_tqdm: bool = False, **fields: Any
    ) -> "list[ChatCompletion]": ...

    def chat(
        self, messages: Messages | Sequence[Messages], *, use_tqdm: bool = False, **fields: Any
    ) -> "ChatCompletion | list[ChatCompletion]":
        """Answer a conversation, or each of several. Returns the answers in the server's form.

        `fields` are those of `/v1/chat/completions` (docs/api.md), for instance `temperature`, `max_tokens`, `tools`,
        `tool_choice`, `response_format`; `model` may name a LoRA adapter; `timeout` has no effect here. Raises
        `InvalidRequest`, a `ValueError`, before anything is computed, and `EngineDeadError`::

            answer = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], temperature=0)
            print(answer.choices[0].message.content)
        """
        from server.streaming.generation import usage_of

        several = not messages or not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        chats = _run(self._prepare([{**fields, "messages": list(each)} for each in conversations]))
        ids = self._submit([sequence for sequences, _ in chats for sequence in sequences])
        states = self._wait(ids, use_tqdm)
        answers = []
        for sequences, renderer in chats:
            own, states = states[: len(sequences)], states[len(sequences) :]
            failed = next((state.error for state in own if state.error is not None), None)
            if failed is not None:
                raise RuntimeError(f"a chat could not be answered: {failed}")
            answers.append(renderer.whole(own, usage_of(own, len(own))))
        return answers if several else answers[0]

    def stream_chat(self, messages: Messages, **fields: Any) -> "Iterator[ChatChunk]":
        """Answer a conversation, and yield its chunks in the server's form.

        Arguments and errors are those of `chat`. Closing the iterator aborts the answer::

            for chunk in llm.stream_chat([{"role": "user", "content": "Hello"}]):
                print(chunk.choices[0].delta.content or "", end="")
        """
        from kaon.chunks import chunks
        from server.streaming.generation import usage_of

        fields = {**fields, "messages": list(messages), "stream": True}
        [(sequences, renderer)] = _run(self._prepare([fields]))
        yield from chunks(renderer.opening())
        with closing(self._stream(sequences)) as deltas:
            for index, delta in deltas:
                if delta.error is not None:
                    raise RuntimeError(f"a chat could not be answered: {delta.error}")
                yield from chunks(renderer.chunk(index, delta))
        states = [sequence.state for sequence in sequences]
        yield from chunks(renderer.closing(usage_of(states, len(states))))

    def close(self) -> None:
        """End the engine process. Running requests are aborted."""
        if "_frontend" in vars(self):
            self._frontend.close()
        super().close()

    @cached_property
    def _frontend(self) -> "Frontend":
        """The front end that prepares chats. Created at the first chat, because it imports the server."""
        from server.frontend import Frontend

        frontend = Frontend(self.config, self._core, self._ids)
        processor = self.io_processor
        pooling = None if self.pooling is None else self.pooling.pooling
        frontend.open(self.model_info, processor.tokenizer, processor.chat_template, processor.defaults, pooling)
        return frontend

    async def _prepare(self, bodies: Sequence[dict[str, Any]]) -> "list[tuple[list[NewSequence], ChatRenderer]]":
        """Create the sequences and the renderer of each chat."""
        from server.limits.owners import ANYONE
        from server.routes.chat import prepare

        with refusals_as_invalid_requests(self._frontend):
            return [
                await prepare(validated_chat(body, self._frontend), self._frontend, ANYONE, time.monotonic())
                for body in bodies
            ]


def validated_chat(body: Mapping[str, Any], frontend: "Frontend") -> Any:
    """Validate the body of a chat, which need not name a model. Raises the server's errors."""
    from server.schemas.body import validate
    from server.schemas.chat import ChatCompletionRequest

    request = validate({"model": frontend.model_names[0], **body}, ChatCompletionRequest, allow_unknown=False)
    frontend.check_model(request.model)
    return request


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run `coroutine` and return its result. If an event loop runs already, as in a notebook, use another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def refusals_as_invalid_requests(frontend: "Frontend") -> Iterator[None]:
    """Convert the server's errors: a 4xx to `InvalidRequest`.

    A 5xx becomes `EngineDeadError` if no engine can serve, else a `RuntimeError` about the failed request.
    """
    from server.errors import ApiError, NotReady

    try:
        yield
    except ApiError as error:
        if error.status < 500:
            raise InvalidRequest(str(error), error.param or "") from error
        if isinstance(error, NotReady) or frontend.why_ended is not None:
            raise EngineDeadError(str(error)) from error
        raise RuntimeError(f"the request could not be answered: {error}") from error

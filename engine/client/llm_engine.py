"""`LLMEngine`: the offline API. Completes lists of prompts by blocking calls, with a core process that it starts."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec
from tqdm import tqdm

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.messages import SchedulerStats
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import InputOutputProcessor, InvalidRequest, NewSequence
from engine.text.pooling import PooledPrompt, PoolingProcessor, numbers_of
from engine.text.request_state import RequestDelta, RequestResult, RequestState
from engine.text.tokenizer import Tokenizer
from models.architectures.pooling import read_pooling

__all__ = ["EngineDeadError", "InputOutputProcessor", "LLMEngine", "Prompts"]

Prompts: TypeAlias = str | list[str] | list[list[int]]
"""One text, a list of texts, or a list of lists of token ids."""

StreamCallback: TypeAlias = Callable[[int, RequestDelta], object]
"""Called with a request's id and the delta of one engine step."""


class LLMEngine:
    """A model that completes lists of prompts. All calls come from one thread.

    Use it in a `with` statement, or call `close`. Otherwise its core ends when the object is collected, or at the
    interpreter's exit.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **config_fields: Any) -> None:
        """Load `model` (a checkpoint directory or hub id; None: the embedded model) and wait until it serves.

        Takes fields of `Config` and of its sections by name, or a whole `config`. Raises `ValueError` for an invalid
        field or checkpoint, and `EngineDeadError` if the core cannot start.
        """
        if config is None:
            config = Config.from_fields(model=model, **config_fields)
        elif model is not None or config_fields:
            raise ValueError("give LLMEngine either a config or single fields, not both")
        self.config = config
        checkpoint = resolve_checkpoint(config.model)
        self._core = CoreManager(config)
        try:
            # The core loads the model meanwhile.
            tokenizer, chat_template = Tokenizer.from_checkpoint(checkpoint), ChatTemplate.from_checkpoint(checkpoint)
            defaults = GenerationDefaults.load(config.generation_config, checkpoint)
            pooling = read_pooling(checkpoint, config.task, matryoshka=config.matryoshka)
            self.model_info = self._core.wait_ready().model
        except BaseException as error:
            try:
                if isinstance(error, Exception):
                    self._core.fail(str(error) or type(error).__name__)
            finally:
                self.close()
            raise
        self.io_processor = InputOutputProcessor(
            tokenizer, chat_template, self.model_info, defaults, config.bos_token_id
        )
        self.pooling = None if pooling is None else PoolingProcessor(self.io_processor, pooling)
        """Builds prompts for embeddings, scores or classes; None if the model only generates."""
        self._adapters = {name: number for number, name in enumerate(config.lora_paths, 1)}
        self._ids = itertools.count()
        self._states: dict[int, RequestState] = {}
        """Requests that were added and not collected, by id."""
        self.stats: SchedulerStats | None = None
        """The gauges and counters of the core, or of one replica, after the last received step."""
        self._callbacks: dict[int, StreamCallback] = {}
        """Callbacks of streamed requests, by id."""

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's generation config, subject to `Config.generation_config`."""
        return self.io_processor.defaults.sampling_params()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | None = None,
        stream_callback: StreamCallback | None = None,
    ) -> list[RequestResult]:
        """Complete every prompt. Returns the results in the order of the prompts.

        `sampling_params` is for all prompts, or a list with one entry per prompt; by default
        `default_sampling_params`. `lora` is the name of one of `Config.lora`'s adapters. `stream_callback` is called
        as in `add_request`. Raises `InvalidRequest`, a `ValueError`, before anything is sent if a prompt cannot run,
        and `EngineDeadError` if the core dies. If a single request fails, its `finish_reason` is "error" and `error`
        is a sentence. If the call is interrupted, for instance by Ctrl-C, it aborts its requests and the engine stays
        usable.
        """
        ids = self.add_request(prompts, sampling_params, lora=lora, stream_callback=stream_callback)
        return self.collect(ids, use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[tuple[int, RequestDelta]]:
        """Complete every prompt, and yield the index of a prompt and its delta after each engine step.

        Takes the arguments of `generate`, and raises the same errors at the first iteration. Each prompt's last delta
        has `finished` set. Closing the iterator, or an exception, aborts the incomplete prompts::

            for index, delta in llm.stream(["Once upon a time", "The answer is"]):
                print(index, delta.text)
        """
        yield from self._stream(self._sequences(prompts, sampling_params, lora))

    def _stream(self, sequences: Sequence[NewSequence]) -> Generator[tuple[int, RequestDelta], None, None]:
        """Yield the index of a sequence and its delta after each engine step. See `stream`."""
        pending: deque[tuple[int, RequestDelta]] = deque()
        ids = self._submit(sequences, lambda *streamed: pending.append(streamed))
        unfinished = {request_id: index for index, request_id in enumerate(ids)}
        try:
            while unfinished:
                while not pending:
                    self._receive()
                request_id, delta = pending.popleft()
                if delta.error is not None and self._core.failure is not None:
                    raise EngineDeadError(self._core.failure.error)
                index = unfinished.pop(request_id) if delta.finished else unfinished[request_id]
                yield index, delta
        finally:
            self._core.abort(unfinished)
            self._forget(ids)

    def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        normalize: bool = True,
        use_tqdm: bool = False,
    ) -> list[list[float]]:
        """Return the embedding vector of each text, by an embedding model.

        `dimensions` truncates the vectors, if the model was trained for it. `prompt_name` names one of the
        checkpoint's prompts, which is prepended to each text. With `normalize` false, the model's last function is not
        applied. Raises `InvalidRequest`, a `ValueError`, before anything is sent, and `EngineDeadError` if the core
        dies::

            query, document = llm.embed(["capital of France", "Paris is the capital of France."])
        """
        processor = self._pooling_for("embed")
        processor.check_dimensions(dimensions)
        prompts = processor.prompts(_listed(texts), "texts", prompt_name=prompt_name)
        vectors = self._pool(prompts, use_tqdm, dimensions=dimensions, activate=normalize)
        return [numbers_of(vector) for vector in vectors]

    def score(
        self, query: str, documents: list[str], *, instruction: str | None = None, use_tqdm: bool = False
    ) -> list[float]:
        """Return the relevance of each document to `query`, by a reranker or an embedding model. Raises as `embed`
        does.

        `instruction` defines relevance, for rerankers that read it.
        """
        processor = self._pooling_for("classify", "embed")
        processor.check_scores()
        if not documents:
            return []
        prompts = processor.search(query, documents, instruction=instruction)
        return processor.scores(self._pool(prompts, use_tqdm), [0] * len(documents))

    def classify(self, texts: Prompts, *, use_tqdm: bool = False) -> list[tuple[str, list[float]]]:
        """Return the most probable class of each text, and the probability of each class. Raises as `embed` does."""
        processor = self._pooling_for("classify")
        prompts = processor.prompts(_listed(texts), "texts")
        classes = [numbers_of(vector) for vector in self._pool(prompts, use_tqdm)]
        return [(processor.best_label(scores), scores) for scores in classes]

    def _pooling_for(self, *tasks: str) -> PoolingProcessor:
        if self.pooling is None or self.pooling.pooling.task not in tasks:
            what = "generate" if self.pooling is None else self.pooling.pooling.task
            raise InvalidRequest(
                f"the model is served to {what}, and not to {' or '.join(tasks)}; set task to {tasks[0]}", "task"
            )
        return self.pooling

    def _pool(self, prompts: Sequence[PooledPrompt], use_tqdm: bool, **how: Any) -> list[bytes]:
        """Return the pooled vectors of prompts."""
        assert self.pooling is not None
        sequences = [self.pooling.sequence(prompt, next(self._ids), **how) for prompt in prompts]
        vectors = []
        for state in self._wait(self._submit(sequences), use_tqdm):
            if state.vector is None:
                raise RuntimeError(f"a text could not be pooled: {state.error or state.finish_reason}")
            vectors.append(state.vector)
        return vectors

    def add_request(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        stream_callback: StreamCallback | None = None,
    ) -> list[int]:
        """Begin to complete prompts, as `generate` does. Returns the request ids for `collect`, in prompt order.

        `stream_callback` is called with each delta of these prompts, during any call that waits for outputs.
        """
        return self._submit(self._sequences(prompts, sampling_params, lora), stream_callback)

    def _sequences(
        self, prompts: Prompts, sampling_params: SamplingParams | list[SamplingParams] | None, lora: str | None
    ) -> list[NewSequence]:
        """Create one sequence per prompt. The arguments are those of `generate`."""
        if not isinstance(prompts, str | Iterable):
            raise TypeError(f"prompts is of type {type(prompts).__name__}; it must be a text, or a list of prompts")
        texts_or_ids: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if self.pooling is not None and "generate" not in self.config.task:
            raise InvalidRequest(
                f"the model is served to {self.pooling.pooling.task}, and generates nothing", "prompts"
            )
        adapter = self._adapter(lora)
        if isinstance(sampling_params, list | tuple):
            if len(sampling_params) != len(texts_or_ids):
                raise ValueError(
                    f"sampling_params has {len(sampling_params)} entries for {len(texts_or_ids)} prompts; "
                    "give one for each prompt, or one for all"
                )
            params = [_checked(each) for each in sampling_params]
        else:
            common = self.default_sampling_params if sampling_params is None else _checked(sampling_params)
            params = [common] * len(texts_or_ids)
        return [
            self.io_processor.preprocess(
                prompt,
                each,
                request_id=next(self._ids),
                clip_max_tokens=sampling_params is None,
                adapter=adapter,
            )
            for prompt, each in zip(texts_or_ids, params, strict=True)
        ]

    def _submit(self, sequences: Sequence[NewSequence], stream_callback: StreamCallback | None = None) -> list[int]:
        """Submit sequences with new ids from `_ids`. Returns the ids."""
        self._core.add_requests([sequence.request for sequence in sequences])
        states = {sequence.state.request_id: sequence.state for sequence in sequences}
        self._states |= states
        if stream_callback is not None:
            self._callbacks |= dict.fromkeys(states, stream_callback)
        return list(states)

    def collect(self, request_ids: list[int], use_tqdm: bool = False) -> list[RequestResult]:
        """Wait until these requests are complete. Returns their results in this order. Each can be collected once."""
        results = self.io_processor.postprocess(self._wait(request_ids, use_tqdm))
        return [results[request_id] for request_id in request_ids]

    def _wait(self, request_ids: Sequence[int], use_tqdm: bool = False) -> list[RequestState]:
        """Wait until these requests are complete, and remove them. Returns their states."""
        unknown = [request_id for request_id in request_ids if request_id not in self._states]
        if unknown:
            raise ValueError(f"request {unknown[0]} cannot be collected: it was collected already, or never added")
        states = [self._states[request_id] for request_id in request_ids]
        unfinished = {state.request_id for state in states if state.finish_reason is None}
        try:
            with tqdm(total=len(states), desc="Generating", unit="prompt", disable=not use_tqdm) as progress:
                progress.update(len(states) - len(unfinished))
                while unfinished:
                    finished = unfinished & self._receive()
                    progress.update(len(finished))
                    unfinished -= finished
        except BaseException:
            self._core.abort(unfinished)
            raise
        finally:
            self._forget(request_ids)
        if self._core.failure is not None and any(state.error is not None for state in states):
            raise EngineDeadError(self._core.failure.error)
        return states

    def close(self) -> None:
        """Abort the running requests and end the core."""
        self._core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _adapter(self, name: str | None) -> int:
        """Return the number of the adapter `name`; 0 for None. Raises `ValueError` for an unknown name."""
        if name is None:
            return 0
        if name not in self._adapters:
            loaded = ", ".join(self._adapters) or "none"
            raise ValueError(f"lora is {name!r}, but the engine's adapters are: {loaded}; name it in Config.lora")
        return self._adapters[name]

    def _receive(self) -> set[int]:
        """Wait for a step's outputs and add them to their requests. Returns the ids of the requests that are now
        complete.

        All callbacks are called after that, even if one raises; then the first error is raised.
        """
        step = self._core.get_outputs()
        assert step is not None
        self.stats = step.stats or self.stats
        finished = set()
        stopped = []
        streamed: list[tuple[StreamCallback, int, RequestDelta]] = []
        for output in step.outputs:
            state = self._states.get(output.request_id)
            # The core may still send outputs of a request that was interrupted, or that reached a stop string.
            if state is None or state.finish_reason is not None:
                continue
            delta = state.push(output)
            if delta.finished:
                finished.add(output.request_id)
            if state.stopped_early:
                stopped.append(output.request_id)
            callback = self._callbacks.get(output.request_id)
            if callback is not None:
                streamed.append((callback, output.request_id, delta))
        self._core.abort(stopped)
        errors: list[BaseException] = []
        for callback, request_id, delta in streamed:
            try:
                callback(request_id, delta)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return finished

    def _forget(self, request_ids: Sequence[int]) -> None:
        """Remove the state of requests that were collected or interrupted."""
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._callbacks.pop(request_id, None)


def _listed(texts: Prompts) -> list[str | list[int]]:
    """Copy the texts to a new list, since the caller may change the argument while the requests are live."""
    return [texts] if isinstance(texts, str) else [each if isinstance(each, str) else each.copy() for each in texts]


def _checked(params: SamplingParams) -> SamplingParams:
    """Check the types of the fields of `params`, as the core would. Raises `TypeError`, `ValueError`."""
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling_params holds a {type(params).__name__}; it must be SamplingParams, or a list of them"
        )
    return msgspec.convert(msgspec.structs.asdict(params), SamplingParams)

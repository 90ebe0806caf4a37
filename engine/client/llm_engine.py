"""`LLMEngine`: the offline API. Completes a list of prompts by blocking calls, in a core process that it starts."""

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
"""One text, texts, or lists of token ids."""

StreamCallback: TypeAlias = Callable[[int, RequestDelta], object]
"""Called with a request's id and what one engine step added to it."""


class LLMEngine:
    """A model that answers lists of prompts. All calls come from one thread.

    Use it in a `with`, or `close` it; one that is dropped ends its core when collected or at the interpreter's exit.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **config_fields: Any) -> None:
        """Load `model` (a checkpoint directory or hub id; none: the embedded one) and wait until it serves.

        Takes `Config`'s fields and those of its sections by name, or a whole `config`. Raises `ValueError` for a
        field or a checkpoint that is wrong, and `EngineDeadError` when the core cannot start.
        """
        if config is None:
            config = Config.from_fields(model=model, **config_fields)
        elif model is not None or config_fields:
            raise ValueError("give LLMEngine either a config or single fields, not both")
        self.config = config
        checkpoint = resolve_checkpoint(config.model)
        self._core = CoreManager(config)
        try:
            # While the core imports and loads.
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
        """Makes prompts of what the model embeds, scores or classifies; None: it only generates."""
        self._adapters = {name: number for number, name in enumerate(config.lora_paths, 1)}
        self._ids = itertools.count()
        self._states: dict[int, RequestState] = {}
        """Requests added and not collected yet."""
        self.stats: SchedulerStats | None = None
        """The core's gauges and counters after the last step that was received; of several replicas, one's."""
        self._callbacks: dict[int, StreamCallback] = {}
        """Callbacks of requests that are streamed."""

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation config recommends, as `Config.generation_config` has it read."""
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
        """Complete every prompt; the results in their order.

        `sampling_params` is for all prompts, or a list with one for each; by default `default_sampling_params`. `lora`
        is the name of one of `Config.lora`'s adapters. `stream_callback` is called as in `add_request`. Raises
        `InvalidRequest`, a `ValueError`, before anything is sent when one prompt cannot run, and `EngineDeadError`
        when the core dies. A request that fails by itself has `finish_reason` "error" and a sentence in `error`.
        Interrupted, for instance by Ctrl-C, it aborts what it sent and the engine stays usable.
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
        """Complete every prompt; the index of a prompt and what an engine step added to its text, as it comes.

        Takes the arguments of `generate`, and raises the same errors, at the first delta. Each prompt's last delta has
        `finished` set. Closing the iterator, or an exception, aborts the prompts that are not complete::

            for index, delta in llm.stream(["Once upon a time", "The answer is"]):
                print(index, delta.text)
        """
        yield from self._stream(self._sequences(prompts, sampling_params, lora))

    def _stream(self, sequences: Sequence[NewSequence]) -> Generator[tuple[int, RequestDelta], None, None]:
        """The index of a sequence and what an engine step added to it, as it comes. See `stream`."""
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
        """The vector of each text, of an embedding model.

        `dimensions` cuts the vectors of a model that was trained for it; `prompt_name` is one of the checkpoint's
        prompts, which goes before each text; `normalize` false leaves the model's last function out. Raises
        `InvalidRequest`, a `ValueError`, before anything is sent, and `EngineDeadError` when the core dies::

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
        """How relevant each document is to `query`, of a reranker or an embedding model. Raises as `embed` does.

        `instruction` says what relevance means, for rerankers that read it.
        """
        processor = self._pooling_for("classify", "embed")
        processor.check_scores()
        if not documents:
            return []
        prompts = processor.search(query, documents, instruction=instruction)
        return processor.scores(self._pool(prompts, use_tqdm), [0] * len(documents))

    def classify(self, texts: Prompts, *, use_tqdm: bool = False) -> list[tuple[str, list[float]]]:
        """The most probable class of each text, and the probability of each class. Raises as `embed` does."""
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
        """The vectors of prompts."""
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
        """Start to complete prompts, as `generate` does; the request ids to `collect` later, in prompt order.

        `stream_callback` is called with each delta of these prompts, from any call that waits for outputs.
        """
        return self._submit(self._sequences(prompts, sampling_params, lora), stream_callback)

    def _sequences(
        self, prompts: Prompts, sampling_params: SamplingParams | list[SamplingParams] | None, lora: str | None
    ) -> list[NewSequence]:
        """One sequence for each prompt; the arguments are those of `generate`."""
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
        """Run sequences whose ids come from `_ids`; these ids."""
        self._core.add_requests([sequence.request for sequence in sequences])
        states = {sequence.state.request_id: sequence.state for sequence in sequences}
        self._states |= states
        if stream_callback is not None:
            self._callbacks |= dict.fromkeys(states, stream_callback)
        return list(states)

    def collect(self, request_ids: list[int], use_tqdm: bool = False) -> list[RequestResult]:
        """Wait until these requests are complete; their results in this order. Each can be collected once."""
        results = self.io_processor.postprocess(self._wait(request_ids, use_tqdm))
        return [results[request_id] for request_id in request_ids]

    def _wait(self, request_ids: Sequence[int], use_tqdm: bool = False) -> list[RequestState]:
        """Wait until these requests are complete, and forget them; their states."""
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
        """End the core. What runs is aborted."""
        self._core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _adapter(self, name: str | None) -> int:
        """Number of the adapter of that name. Raises `ValueError` for an unknown one."""
        if name is None:
            return 0
        if name not in self._adapters:
            loaded = ", ".join(self._adapters) or "none"
            raise ValueError(f"lora is {name!r}, but the engine's adapters are: {loaded}; name it in Config.lora")
        return self._adapters[name]

    def _receive(self) -> set[int]:
        """Wait for a step's outputs and give them to their requests; the ids of those that are complete now.

        Callbacks are called last, and all of them, before the first error that one raises: every request has its
        outputs then.
        """
        step = self._core.get_outputs()
        assert step is not None
        self.stats = step.stats or self.stats
        finished = set()
        stopped = []
        streamed: list[tuple[StreamCallback, int, RequestDelta]] = []
        for output in step.outputs:
            state = self._states.get(output.request_id)
            # The core may still send outputs of a request that was interrupted, or that met its stop string.
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
        """Free the state of requests that were collected or interrupted."""
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._callbacks.pop(request_id, None)


def _listed(texts: Prompts) -> list[str | list[int]]:
    """The texts in a list of their own, as the caller may change his while the requests are live."""
    return [texts] if isinstance(texts, str) else [each if isinstance(each, str) else each.copy() for each in texts]


def _checked(params: SamplingParams) -> SamplingParams:
    """`params`, if its fields are of their types; the core would refuse others. Raises `TypeError`, `ValueError`."""
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling_params holds a {type(params).__name__}; it must be SamplingParams, or a list of them"
        )
    return msgspec.convert(msgspec.structs.asdict(params), SamplingParams)

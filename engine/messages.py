"""Typed messages between the front end (`CoreManager`) and the engine core; msgpack by msgspec, never pickle.

To the core: `Inbound`. From the core: `Outbound`, with one `StepOutputs` per engine step.
"""

import operator
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeAlias

import msgspec

from engine.sampling_params import SamplingParams


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities (natural, of the unmodified distribution) at one position.

    Requests hold thousands of them. Garbage collections visit tuples of numbers only once, but lists again and again.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    """The top-k tokens in descending order; the request sets k."""
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """The token's rank by probability, from 1; 0: unknown."""


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters of pooling: the request gets one vector and no tokens."""

    dimensions: int | None = None
    """Number of leading elements to which the vector is truncated (Matryoshka); None: all."""
    activate: bool = True
    """Whether the model's last function is applied: normalisation for embeddings, probabilities for classes."""
    first_text_tokens: int | None = None
    """Number of tokens of the first text of a pair, for models that embed both texts differently; None: one text."""


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """The tokens that one engine step sampled for one request. A request's last output has `finished` set.

    `finish_reason` is the engine's: `eos`, `max_tokens`, `stop_sequence`, `stop_{token_id}`, `grammar` (no token may
    follow), `pooled` (then `vector` is set), `abort` or `error` (then `error` has the reason); `openai_finish_reason`
    translates it.
    """

    request_id: int
    output_tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    queue_time: float | None = None
    """Seconds from the core's receipt to the first scheduled step; on a request's first output only."""
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of the prompt's tokens after the first; on the first output, if the request asks for them."""
    bad_request: bool = False
    """With `error`: whether the request is invalid; otherwise the engine failed."""
    is_poison: bool = False
    """With `error`: whether computing the request crashed the engine, so that it must not be tried again."""
    time: float | None = None
    """Time at which the tokens were read from the device. In the message it is in seconds since
    `AddRequest.sent_time`; the front end's journal converts it to its `time.monotonic` clock. None if the output did
    not come from a step."""
    vector: bytes | None = None
    """The vector of a request that pools its prompt, as little-endian float32."""


def terminal_output(
    request_id: int, reason: str, error: str | None = None, *, bad_request: bool = False, is_poison: bool = False
) -> RequestOutput:
    """Create the last output of a request that ends without a further token. `error` is a sentence for its client."""
    return RequestOutput(
        request_id,
        [],
        finished=True,
        finish_reason=reason,
        error=error,
        bad_request=bad_request,
        is_poison=is_poison,
    )


def openai_finish_reason(leave_reason: str | None) -> str | None:
    """Convert an engine finish reason to OpenAI's: `length` for `max_tokens`, `stop` for every kind of stop."""
    if leave_reason is None:
        return None
    if leave_reason in ("abort", "error"):
        return leave_reason
    return "length" if leave_reason == "max_tokens" else "stop"


class AddRequest(msgspec.Struct, tag="add", gc=False):
    """One sequence to run. The front end chooses its id, which is unique in the life of a core."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Initial value of the prefix-hash chain: requests with different salts never share blocks. None: no salt."""
    priority: int = 0
    """Requests with a lower value are served first."""
    adapter: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of a LoRA adapter, from 1 in the order of `Config.lora` and then of loading; 0: the base model alone."""
    resumed_token_ids: tuple[int, ...] = ()
    """Tokens that the sequence generated in a core that died; it continues after them."""
    suspect: bool = False
    """Whether the last core died in a step that computed it. Its first step then computes it alone."""
    owner: str = ""
    """The party among which the scheduler shares its time fairly."""
    pooling: PoolingParams | None = None
    """Pool the prompt to a vector, and generate nothing; `sampling_params` then has a `max_tokens` of 0."""
    weight: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """Relative share of the engine's tokens that its owner gets."""
    shares_tables: bool = False
    """Whether its `sampling_params` lack their tables, which equal those of the previous message: see
    `share_fields`."""
    shares_prompt: bool = False
    """Whether it lacks its prompt, which equals that of the previous message."""
    sent_time: float = 0.0
    """Time at which the front end sent it, on that host's `time.monotonic` clock; set by the journal."""


class AbortRequests(msgspec.Struct, tag="abort"):
    """End these sequences and free their blocks. Unknown or finished ids are ignored."""

    request_ids: list[int]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Abort all sequences, answer `Stopped`, and exit."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Attach a LoRA adapter between two steps, and answer `AdapterChanged`. No effect if the number is attached."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    """Number that no other adapter ever had, because it is part of the keys of cached prefixes."""
    name: str
    path: str
    """Its directory, on every host that has a rank."""
    at_once: bool = False
    """Whether to attach it before processing later messages; otherwise its files are read while steps run."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Remove an adapter that no live sequence uses, and answer `AdapterChanged`."""

    number: int


class ReleaseCache(msgspec.Struct, tag="release_cache", frozen=True):
    """Drop all cached prefixes, free the KV cache's memory on the host until a step needs it, and answer
    `CacheReleased`.

    No sequence may be live except those whose aborts were sent earlier.
    """


class SetLogLevel(msgspec.Struct, tag="log_level", frozen=True):
    """Set the log level."""

    level: str


Inbound: TypeAlias = AddRequest | AbortRequests | Shutdown | LoadAdapter | UnloadAdapter | ReleaseCache | SetLogLevel

_TABLES = ("logit_bias", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "bad_words", "grammar")
"""Sampling parameters that may have thousands of entries, and that all choices of a request share."""
_NO_TABLES = dict.fromkeys(_TABLES)


def _tables_of(params: SamplingParams) -> list[object]:
    return [getattr(params, name) for name in _TABLES]


def share_fields(messages: Iterable[Inbound]) -> Iterator[Inbound]:
    """Change messages that are sent together, so that prompts and tables which successive requests share are sent
    once.

    They are shared if they are the same objects, as for all choices of a request.
    """
    before: AddRequest | None = None
    for message in messages:
        if not isinstance(message, AddRequest):
            yield message
            continue
        previous, before = before, message
        changes: dict[str, Any] = {}
        if previous is not None:
            if message.prompt_token_ids is previous.prompt_token_ids:
                changes = {"prompt_token_ids": [], "shares_prompt": True}
            params = message.sampling_params
            tables = _tables_of(params)
            if any(tables) and not any(map(operator.is_not, tables, _tables_of(previous.sampling_params))):
                bare = msgspec.structs.replace(params, **_NO_TABLES)
                changes |= {"sampling_params": bare, "shares_tables": True}
        yield msgspec.structs.replace(message, **changes) if changes else message


def take_fields(message: AddRequest, previous: AddRequest | None) -> None:
    """Set the prompt and the tables of the previous message in a decoded message that shares them. Raises
    `ValueError` without one."""
    if not (message.shares_tables or message.shares_prompt):
        return
    if previous is None:
        raise ValueError(
            "shares_tables or shares_prompt is set, but no request was sent before this one in the same message"
        )
    if message.shares_prompt:
        message.prompt_token_ids = previous.prompt_token_ids
    if message.shares_tables:
        for name in _TABLES:
            # The parameters are frozen, and were checked as part of the other message.
            value = getattr(previous.sampling_params, name)
            msgspec.structs.force_setattr(message.sampling_params, name, value)


class ModelInfo(msgspec.Struct, frozen=True):
    """Properties of the loaded model that the front end needs."""

    architecture: str
    dtype: str
    device: str
    attention_backend: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    block_size: int
    num_kvcache_blocks: int
    own_cpus: list[int] = []
    """CPUs that the engine reserves; empty if it reserves none."""
    shares_prefixes: bool = True
    """Whether requests with equal prefixes share blocks."""
    kernels: str = ""
    """Digest, in hexadecimal digits, of the kernels and settings that affect rounding."""
    is_invariant: bool = False
    """Whether greedy and seeded answers are independent of other requests."""


class Ready(msgspec.Struct, tag="ready"):
    """The core has loaded the model and produced a token."""

    model: ModelInfo
    startup_seconds: dict[str, float]
    """Seconds spent by phase: import, load, warm-up."""


class Failed(msgspec.Struct, tag="failed"):
    """The core cannot continue; `error` is a sentence. `usage`: whether it is a mistake of the user.

    `killed`: whether another process killed one of its ranks. `collateral`: whether it ends because another replica in
    lockstep ended, so that none of its requests is the cause.
    """

    error: str
    usage: bool = False
    killed: bool = False
    collateral: bool = False


class SchedulerStats(msgspec.Struct, array_like=True):
    """Gauges after a step, and counters since the core started."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    step_kind: str
    """Kind of the step just read: `prefill`, `decode`, `mixed`, or `idle` for a message without a step."""
    step_seconds: float
    """Duration of the step just read, from its launch or the end of the previous step until it was read."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    device_memory: int = 0
    """Bytes of GPU memory that the core's process uses; 0 on a CPU."""
    device_memory_total: int = 0
    """Total bytes of the GPU's memory; 0 on a CPU."""
    num_drafts: int = 0
    """Number of times that a step verified drafts of a sequence."""
    accepted_by_position: tuple[int, ...] = ()
    """Number of accepted drafts by their position among a sequence's drafts, from the first."""
    sentinel_checks: int = 0
    """Number of served results that were computed again by torch and compared."""
    sentinel_mismatches: int = 0
    """Number of these results that differ by more than rounding explains."""


class StepOutputs(msgspec.Struct, tag="step"):
    """All outputs of one engine step."""

    outputs: list[RequestOutput]
    stats: SchedulerStats | None = None
    replica: int = 0
    """Number of the replica that sent it; set by the front end."""
    preempted: list[int] = []
    """Ids of requests that were preempted since the previous message."""


class AdapterChanged(msgspec.Struct, tag="adapter", frozen=True):
    """The answer to `LoadAdapter` and `UnloadAdapter`."""

    number: int
    error: str | None = None
    """Sentence that says why it failed; then nothing has changed. None on success."""


class CacheReleased(msgspec.Struct, tag="cache_released", frozen=True):
    """The answer to `ReleaseCache`."""


class Stopped(msgspec.Struct, tag="stopped"):
    """The core has aborted all sequences and exits."""


Outbound: TypeAlias = Ready | Failed | StepOutputs | AdapterChanged | CacheReleased | Stopped

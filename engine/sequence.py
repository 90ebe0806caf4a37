"""`Sequence`: one request's tokens, blocks and timing while the engine core runs it. Never crosses a socket."""

import itertools
import sys
import time
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Self

from engine.messages import AddRequest, PoolingParams, TokenLogprobs
from engine.sampling_params import SamplingParams
from kvcache.hashing import chain_salt
from models.config.rope import RopeContext

if TYPE_CHECKING:
    from engine.text.structured.matcher import Matcher


class SequenceStatus(Enum):
    """State in a sequence's life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    EXIT_ENGINE = auto()
    """Part of the contract only: the engine exits at a `Shutdown` message, and no sequence has this status."""


class SequenceType(Enum):
    """What a sequence computes in the current step; a preempted one prefills again."""

    DUMMY = auto()
    PREFILL = auto()
    DECODE = auto()


DEFAULT_SAMPLING_PARAMS = SamplingParams()


class Sequence:
    """A request's state in the core.

    Two counts determine what a step computes: `num_tokens`, the known tokens plus `num_placeholder`, those sampled but
    not read yet; and `num_computed_tokens`, the tokens whose KV is in the blocks of `block_table`, or will be once the
    scheduled steps have run. `token_ids` only grows, and `block_table` grows or is replaced, never cleared in place: a
    `ScheduledBatch` may keep a reference and a length instead of a copy. See docs/specification.md#sequence.
    """

    _ids = itertools.count()

    def __init__(
        self,
        token_ids: list[int],
        block_size: int,
        sampling_params: SamplingParams = DEFAULT_SAMPLING_PARAMS,
        stop_token_sequences: list[list[int]] | None = None,
        id: int | None = None,
        cache_salt: int | None = None,
        priority: int = 0,
        adapter: int = 0,
        resumed_token_ids: Iterable[int] = (),
        is_suspect: bool = False,
        sent_time: float | None = None,
        owner: str = "",
        pooling: PoolingParams | None = None,
        weight: float = 1.0,
    ) -> None:
        """`resumed_token_ids` were generated in a core that died; they are computed as the prompt is.

        `sent_time`, from which the times of outputs count, is on this host's `time.monotonic` clock; default: now.
        """
        if not token_ids:
            raise ValueError("a sequence needs at least 1 prompt token")
        self.id = next(Sequence._ids) if id is None else id
        self.block_size = block_size
        self.token_ids = [*token_ids, *resumed_token_ids]
        self.num_prompt_tokens = len(token_ids)
        self.num_placeholder = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.num_released_blocks = 0
        """Number of leading entries of the block table whose blocks were released, because no later token attends to
        them."""
        self.block_hashes: list[int] = []
        """Chained digests of the leading full blocks, extended as blocks fill; recomputed with another salt only."""
        self.num_published_blocks = 0
        self.published_uid = -1
        """Number of published blocks and uid of the last one, from which the block manager publishes the next."""
        self.adapter = adapter
        """Number of its LoRA adapter; 0: the base model alone."""
        self.rope_length = 0
        """The length that chooses its rotary frequencies; 0: the model's original context. See `follow_rope`."""
        self.rope_limit = sys.maxsize
        """Number of tokens at which its frequencies change; all its tokens are then computed again."""
        self._own_salt = cache_salt
        self.cache_salt = chain_salt(cache_salt, adapter)
        """Start of its prefix-hash chain, made of the caller's salt, the adapter and `rope_length`."""
        self.priority = priority
        self.owner = owner
        """The party among which the scheduler shares its time fairly."""
        self.weight = weight
        """Relative share of the engine's tokens that its owner gets."""
        self.last_turn = 0
        """Number of the latest step of decodes by turns that computed it; 0 before."""
        self.slot = -1
        """Its row in the worker while it runs, else -1."""

        self.is_suspect = is_suspect
        """Whether a core died in a step that computed it: it is computed alone in its next step."""
        self.status = SequenceStatus.WAITING
        self.type = SequenceType.DUMMY
        self.sampling_params = sampling_params
        self.temperature = sampling_params.temperature
        self.max_tokens = sampling_params.max_tokens
        self.ignore_eos = sampling_params.ignore_eos
        self.stop_strings = sampling_params.stop_strings
        self.stop_token_sequences = stop_token_sequences or sampling_params.stop_token_sequences or []
        self.end_tokens: frozenset[int | None] = frozenset()
        """Tokens that may end this sequence; set by the scheduler, as `token_limit` is."""
        self.token_limit = 0
        """Number of tokens, prompt included, at which it ends."""
        self.spec_token_ids: list[int] = []
        """Draft tokens for the next step."""
        self.matcher: Matcher | None = None
        """State of the request's grammar after the tokens generated so far; set before the sequence is queued."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None if sampling_params.prompt_logprobs is None else []
        """Log probabilities so far of the prompt's tokens after the first; None: not requested, or already sent."""
        self.pooling = pooling
        """How the prompt is pooled to a vector; then the sequence ends. None: it generates tokens."""

        self.sent_time = time.monotonic() if sent_time is None else sent_time
        self.arrive_time = time.monotonic()
        self.schedule_time = 0.0
        """Time at which a step of this sequence was first scheduled; 0 before."""
        self.first_token_time = self.arrive_time if len(self.token_ids) > len(token_ids) else 0.0
        """Time at which its first token was read; for a resumed sequence, whose first token was sent, its arrival; 0
        before."""
        self.leave_time = 0.0
        self.leave_reason: str | None = None

    @classmethod
    def from_request(cls, request: AddRequest, block_size: int, *, sent_time: float | None = None) -> Self:
        """Create the sequence of a message. `sent_time` as in the constructor."""
        return cls(
            request.prompt_token_ids,
            block_size,
            request.sampling_params,
            id=request.request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
            adapter=request.adapter,
            resumed_token_ids=request.resumed_token_ids,
            is_suspect=request.suspect,
            sent_time=sent_time,
            owner=request.owner,
            pooling=request.pooling,
            weight=request.weight,
        )

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of known tokens plus placeholders. Setting it beyond the known tokens makes the rest placeholders."""
        return len(self.token_ids) + self.num_placeholder

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if value < len(self.token_ids):
            raise ValueError(f"num_tokens is {value}, but {len(self.token_ids)} tokens are known")
        self.num_placeholder = value - len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Number of blocks for `num_tokens` tokens; the last one may be partly filled."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Number of tokens in the last of `num_blocks` blocks."""
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    @property
    def last_token(self) -> int:
        """The latest known token."""
        return self.token_ids[-1]

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def output_tokens(self) -> list[int]:
        """The tokens generated so far (the specification's name for `completion_token_ids`)."""
        return self.completion_token_ids

    @property
    def decode_limit(self) -> int:
        """Number of tokens at which it no longer decodes: it ends, or is computed again."""
        return min(self.token_limit, self.rope_limit)

    @property
    def num_useful_drafts(self) -> int:
        """Number of drafts that could be accepted before `decode_limit`, in addition to the token that each step
        adds."""
        # A step with drafts asks each of its rows, so this calls no other property.
        useful = min(self.token_limit, self.rope_limit) - len(self.token_ids) - self.num_placeholder - 1
        return useful if useful > 0 else 0

    @property
    def num_drafts(self) -> int:
        """Number of drafts that the next step verifies."""
        return min(len(self.spec_token_ids), self.num_useful_drafts)

    @property
    def num_cached_blocks(self) -> int:
        return self.num_cached_tokens // self.block_size

    @property
    def skips_cached_prefix(self) -> bool:
        """Whether every position must be computed, because the prompt's log probabilities are not sent yet."""
        return self.prompt_logprobs is not None

    @property
    def ends_with_stop_sequence(self) -> bool:
        """Whether the completion, without the prompt, ends with one of `stop_token_sequences`."""
        tokens, generated = self.token_ids, len(self.token_ids) - self.num_prompt_tokens
        if generated < self.sampling_params.min_tokens:
            return False
        return any(0 < len(stop) <= generated and tokens[-len(stop) :] == stop for stop in self.stop_token_sequences)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def follow_rope(self, rope: RopeContext) -> None:
        """Choose the rotary frequencies for its length. Called while none of its tokens is computed."""
        length = rope.length_of(self.num_prompt_tokens, len(self.token_ids))
        self.rope_limit = sys.maxsize if rope.grows or length else rope.original + 1
        if length != self.rope_length:
            self.rope_length = length
            self.cache_salt = chain_salt(self._own_salt, self.adapter, length)
            self.block_hashes = []

    def append_token(self, token_id: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token_id)

    def block(self, index: int) -> list[int]:
        """Return the tokens of block `index`; the last block may have fewer than `block_size`."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

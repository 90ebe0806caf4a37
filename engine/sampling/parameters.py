"""Sampling parameters: `SamplingColumns` stores those of each slot; `SamplingRows` holds those that one step needs.

The input batch writes a slot when its sequence starts, and gets the rows of each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.filters import FILTERS, FilteredRows
from engine.sampling_params import ReasoningBudget
from engine.sequence import Sequence as EngineSequence
from engine.text.structured.matcher import MaskedRow, Matcher, packed
from models.ops.counter_rng import request_key, row_keys, server_key, stream_keys
from models.ops.cpu.structures import Sampling

Table = TypeVar("Table")
Made = TypeVar("Made")

MIN_TEMPERATURE = 1e-5
"""Temperature below which the argmax is taken: the limit for small temperatures, without overflow."""

REPETITION, PRESENCE, FREQUENCY, BIAS = range(4)
"""Kinds of adjustments to single logits, in the order in which they are applied."""

_RANDOM, _REPETITION, _PRESENCE, _FREQUENCY, _BIAS, _FORBIDDEN, _LOGPROBS, _BAD_WORDS, _MASK, _BUDGET, _KEEP = (
    1 << bit for bit in range(11)
)
"""Flags of the features that a slot uses."""
_OF_TOKENS = _REPETITION | _PRESENCE | _FREQUENCY | _BAD_WORDS | _MASK
"""Features that depend on the tokens before the sampled one."""
_OF_OPERATORS = _RANDOM | _REPETITION | _PRESENCE | _FREQUENCY
"""Features that `models.ops.cpu.structures.Sampling` has."""


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of a step that are sampled at random. Arrays have one entry per row; `rows` are indices in the step."""

    rows: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """Top-k; the vocabulary's size excludes no token."""
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    key: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    """With `key` and a token id, determines the token's noise."""
    filtered: npt.NDArray[np.bool_]
    """Whether top-k, top-p or min-p may exclude a token."""

    @property
    def row_keys(self) -> npt.NDArray[np.uint64]:
        """Keys of the rows' noise."""
        return row_keys(self.key, self.position)

    def of_stream(self, stream: int) -> "RandomRows":
        """The rows with another stream's noise (`models.ops.counter_rng`)."""
        return replace(self, key=stream_keys(self.key, stream)) if stream else self

    def take(self, chosen: npt.NDArray[np.int64]) -> "RandomRows":
        """A subset of the rows."""
        return RandomRows(*(getattr(self, column.name)[chosen] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class Adjustments:
    """A change to single logits: `values[i]` applies to the token `token_ids[i]` of row `rows[i]`. # [num_changes]"""

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts that a drafter sampled from its own distributions, each verified at the position of a random row.

    The row after that of a sequence's last draft samples the token after the draft, or belongs to another sequence.
    """

    rows: npt.NDArray[np.int64]  # [D], ascending
    """The row at whose position the draft is verified."""
    sequences: npt.NDArray[np.int64]  # [D]
    """Equal for the drafts of a sequence."""
    token_ids: npt.NDArray[np.int64]  # [D]
    probabilities: torch.Tensor  # [D, V] float32, the distribution of each draft


class Later(NamedTuple):
    """Offsets by which the rows' positions are later than the host knows."""

    by: torch.Tensor  # [N] int64, on the device; negative for rows whose tokens are not used
    most: int
    """An upper bound, greater than every element of `by`."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of a step's rows. A field is None, or empty, if no row uses it."""

    random: RandomRows | None = None
    repetition: Adjustments | None = None
    """One entry per token of prompt and output, repeats included; the next two fields have one per output token."""
    presence: Adjustments | None = None
    frequency: Adjustments | None = None
    bias: Adjustments | None = None
    """Logit biases, and minus infinity for tokens that may not be sampled here."""
    masked: list[MaskedRow] | None = None
    """Rows that may sample only certain tokens."""
    num_logprobs: dict[int, int] | None = None
    """Number of requested alternatives, by row."""
    filters: list[FilteredRows] = field(default_factory=list)
    """Random rows with a filter that `TorchOps.sample` does not implement itself."""
    proposals: Proposals | None = None
    """Drafts that rejection sampling accepts or replaces."""
    later: Later | None = None
    """Set if the noise of some rows belongs to later positions; None if the host knows all positions."""

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its argmax, without changes to its logits or log probabilities."""
        return self.random is None and not (self.adjustments or self.masked or self.num_logprobs)

    @property
    def adjustments(self) -> list[tuple[int, Adjustments]]:
        """Adjustments that change a logit, with their kinds, in the order in which they are applied."""
        all_kinds = self.repetition, self.presence, self.frequency, self.bias
        return [(kind, each) for kind, each in enumerate(all_kinds) if each is not None and len(each.rows)]


class _PerTable(Generic[Table, Made]):
    """Caches a value computed from a table of parameters that all choices of a request share."""

    def __init__(self, make: Callable[[Table], Made]) -> None:
        self._make = make
        self._latest: tuple[Table, Made] | None = None

    def __call__(self, table: Table) -> Made:
        if self._latest is None or self._latest[0] is not table:
            self._latest = table, self._make(table)
        return self._latest[1]


class SamplingColumns:
    """Sampling parameters by slot, as columns; rarely used ones are in dictionaries by slot."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, seed: int) -> None:
        """`seed` is the server's, for requests without one."""
        self._vocab_size = vocab_size
        self._seed = seed
        self._needs = np.zeros(max_num_seqs, dtype=np.uint16)
        """Flags of the features that each slot uses; a step skips the features that none of its rows uses."""
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._filters = {each.name: np.zeros(max_num_seqs, dtype=each.dtype) for each in FILTERS}
        self._key = np.zeros(max_num_seqs, dtype=np.uint64)
        self._repetition = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """Sequence length from which the slot's forbidden tokens may be sampled."""
        self._bias_of = _PerTable(_bias_arrays)
        self._bad_words_of = _PerTable(BadWords)
        self._ends_of = _PerTable(self._known_tokens)
        self._bias: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        self._forbidden: dict[int, npt.NDArray[np.int64]] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._masked: dict[int, _Masked] = {}
        self._budgets: dict[int, _Budget] = {}
        self._budget_ends = np.zeros(max_num_seqs, dtype=np.int64)
        """Sequence length from which the slot's reasoning may have to be closed."""
        self._num_logprobs: dict[int, int] = {}

    def write(self, slot: int, seq: EngineSequence) -> None:
        """Overwrite a slot with a sequence's parameters."""
        params = seq.sampling_params
        needs = 0
        # Columns that are read regardless of `needs` hold neutral values for unused features.
        self._temperature[slot] = 0.0
        if params.temperature >= MIN_TEMPERATURE:
            needs |= _RANDOM
            self._temperature[slot] = params.temperature
            for name, column in self._filters.items():
                column[slot] = getattr(params, name)
            if any(each.keep is not None for each in FILTERS):
                needs |= _KEEP
            if params.seed is None:
                self._key[slot] = server_key(self._seed, seq.id)
            else:
                self._key[slot] = request_key(params.seed)
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot], self._frequency[slot] = params.presence_penalty, params.frequency_penalty
        if params.repetition_penalty != 1.0:
            needs |= _REPETITION
        if params.presence_penalty != 0.0:
            needs |= _PRESENCE
        if params.frequency_penalty != 0.0:
            needs |= _FREQUENCY
        if params.logit_bias:
            needs |= _BIAS
            self._bias[slot] = self._bias_of(params.logit_bias)
        ends = self._ends_of(seq.end_tokens)
        self._min_num_tokens[slot] = seq.num_prompt_tokens + params.min_tokens
        if params.min_tokens > 0 and seq.matcher is None:
            needs |= _FORBIDDEN
            self._forbidden[slot] = np.array(ends, dtype=np.int64)
        if params.bad_words:
            needs |= _BAD_WORDS
            self._bad_words[slot] = self._bad_words_of(params.bad_words)
        is_masked = seq.matcher is not None or params.allowed_token_ids is not None
        if params.reasoning_budget is not None:
            needs |= _BUDGET
            self._budgets[slot] = _Budget(params.reasoning_budget, self._vocab_size)
            self._budget_ends[slot] = seq.num_prompt_tokens + params.reasoning_budget.max_tokens
        if is_masked or params.reasoning_budget is not None:
            self._masked[slot] = _Masked(seq, ends, self._vocab_size)
        if is_masked:
            needs |= _MASK
        if params.logprobs is not None:
            needs |= _LOGPROBS
            self._num_logprobs[slot] = params.logprobs
        self._num_prompt_tokens[slot] = seq.num_prompt_tokens
        self._needs[slot] = needs

    def _known_tokens(self, token_ids: frozenset[int | None]) -> list[int]:
        """Drop the token ids outside the vocabulary."""
        return [token for token in token_ids if token is not None and token < self._vocab_size]

    def are_greedy(self, slots: npt.NDArray[np.int64]) -> bool:
        """Whether all these slots take their argmax, without changes to the logits or log probabilities."""
        return not any(self._needs[slots].tolist())

    def are_of_operators(self, slots: npt.NDArray[np.int64]) -> bool:
        """Whether `operands` includes all sampling parameters that these slots use."""
        return not (self._needs[slots] & ~np.uint16(_OF_OPERATORS)).any()

    def operands(self, tokens: npt.NDArray[np.int32]) -> Sampling:
        """The parameters and the token table of all slots, in the layout of the CPU's operators."""
        columns = (
            *(self._temperature, self._filters["top_k"], self._filters["top_p"], self._filters["min_p"], self._key),
            *(self._repetition, self._presence, self._frequency, self._num_prompt_tokens, tokens),
        )
        made = Sampling(*(column.ctypes.data for column in columns), known_stride=tokens.shape[1])
        made.kept = columns
        return made

    def need_last_token(self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]) -> bool:
        """Whether sampling in one of these slots, at these sequence lengths, depends on the previous token.

        # 2 x [num_slots]
        """
        flags = self._needs[slots]
        needs = int(np.bitwise_or.reduce(flags))
        if needs & (_OF_TOKENS | _BUDGET) == _BUDGET:
            return bool(self._are_due(slots, num_tokens, flags).any())
        return bool(needs & _OF_TOKENS)

    def _are_due(
        self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64], flags: npt.NDArray[np.uint16]
    ) -> npt.NDArray[np.bool_]:
        """Which slots have reached the token limit of their reasoning. # [num_slots]"""
        return (flags & _BUDGET).astype(np.bool_) & (num_tokens >= self._budget_ends[slots])

    def rows(
        self,
        slots: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        *,
        are_tokens_known: bool = True,
    ) -> SamplingRows:
        """The sampling parameters for the next token of each slot in `slots`. # [num_rows]

        `num_tokens` are the lengths of their sequences (the position that is sampled), `tokens` the table of all
        slots' tokens. # [num_rows], [max_num_seqs, max_model_len]
        `are_tokens_known`: if False, parameters that depend on the tokens before are left out.
        """
        flags = self._needs[slots]
        if not are_tokens_known:
            flags &= ~np.uint16(_OF_TOKENS | _BUDGET)
        needs = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        if needs == 0:
            return SamplingRows()

        def history(flag: int, penalties: npt.NDArray[np.float32], *, prompt: bool) -> Adjustments | None:
            if not needs & flag:
                return None
            rows = np.flatnonzero(flags & flag)
            at, ends = slots[rows], num_tokens[rows]
            begins = np.zeros_like(ends) if prompt else self._num_prompt_tokens[at]
            counts = ends - begins
            firsts = np.cumsum(counts) - counts
            columns = np.arange(counts.sum()) + np.repeat(begins - firsts, counts)
            ids = tokens[np.repeat(at, counts), columns].astype(np.int64)
            return Adjustments(np.repeat(rows, counts), ids, np.repeat(penalties[at], counts))

        random, filters = self._random_rows(slots, num_tokens, flags) if needs & _RANDOM else (None, [])
        return SamplingRows(
            random=random,
            repetition=history(_REPETITION, self._repetition, prompt=True),
            presence=history(_PRESENCE, self._presence, prompt=False),
            frequency=history(_FREQUENCY, self._frequency, prompt=False),
            bias=self._biases(slots, num_tokens, tokens, flags) if needs & (_BIAS | _FORBIDDEN | _BAD_WORDS) else None,
            masked=self._masked_rows(slots, num_tokens, tokens, flags) if needs & (_MASK | _BUDGET) else None,
            num_logprobs=self._logprob_rows(slots, flags) if needs & _LOGPROBS else None,
            filters=filters,
        )

    def _random_rows(
        self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64], flags: npt.NDArray[np.uint16]
    ) -> tuple[RandomRows, list[FilteredRows]]:
        rows = np.flatnonzero(flags & _RANDOM)
        at = slots[rows]
        temperature, built_in, others = self._temperature[at], dict[str, npt.NDArray[Any]](), list[FilteredRows]()
        is_filtered = np.zeros(len(rows), dtype=np.bool_)
        for each in FILTERS:
            values = self._filters[each.name][at]
            is_off = each.is_off(values, self._vocab_size)
            if each.keep is None:
                built_in[each.name] = values
                is_filtered |= ~is_off
            elif not is_off.all():
                others.append(FilteredRows(each.keep, rows[~is_off], temperature[~is_off], values[~is_off]))
        top_k = built_in["top_k"]
        built_in["top_k"] = np.where((top_k <= 0) | (top_k > self._vocab_size), self._vocab_size, top_k)
        random = RandomRows(
            rows=rows,
            temperature=temperature,
            key=self._key[at],
            position=num_tokens[rows],
            filtered=is_filtered,
            **built_in,
        )
        return random, others

    def _biases(
        self,
        slots: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        flags: npt.NDArray[np.uint16],
    ) -> Adjustments | None:
        changes: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []
        for row in np.flatnonzero(flags & _BIAS).tolist():
            changes.append((row, *self._bias[int(slots[row])]))
        for row in np.flatnonzero(flags & _FORBIDDEN).tolist():
            if num_tokens[row] < self._min_num_tokens[slots[row]]:
                ids = self._forbidden[int(slots[row])]
                changes.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))
        for row in np.flatnonzero(flags & _BAD_WORDS).tolist():
            slot = int(slots[row])
            ids = self._bad_words[slot].completing(tokens[slot, self._num_prompt_tokens[slot] : num_tokens[row]])
            changes.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))
        if not changes:
            return None
        return Adjustments(
            np.repeat([row for row, _, _ in changes], [len(ids) for _, ids, _ in changes]),
            np.concatenate([ids for _, ids, _ in changes]),
            np.concatenate([values for _, _, values in changes]),
        )

    def _masked_rows(
        self,
        slots: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        flags: npt.NDArray[np.uint16],
    ) -> list[MaskedRow]:
        rows = []
        is_due = self._are_due(slots, num_tokens, flags)
        for row in np.flatnonzero((flags & _MASK).astype(np.bool_) | is_due).tolist():
            slot = int(slots[row])
            masked = self._masked[slot]
            # A sequence that ended while the step ran still samples a token, which is discarded.
            if masked.is_over:
                continue
            closing = None
            if is_due[row]:
                budget = self._budgets[slot]
                closing = budget.closing(tokens[slot, self._num_prompt_tokens[slot] : num_tokens[row]])
                if budget.is_over:
                    self._needs[slot] &= ~np.uint16(_BUDGET)
            if closing is not None or flags[row] & _MASK:
                is_short = bool(num_tokens[row] < self._min_num_tokens[slot])
                unread = masked.unread(tokens[slot, : num_tokens[row]])
                if len(unread):
                    rows.append(masked.later_row(row, unread.tolist(), is_short, closing))
                else:
                    rows.append(masked.row(row, is_short, closing))
        return rows

    def _logprob_rows(self, slots: npt.NDArray[np.int64], flags: npt.NDArray[np.uint16]) -> dict[int, int]:
        return {int(row): self._num_logprobs[int(slots[row])] for row in np.flatnonzero(flags & _LOGPROBS)}


def _bias_arrays(bias: dict[int, float]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Token ids and the biases of their logits. # 2 x [num_biases]"""
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)


class BadWords:
    """Forbidden token sequences: the last token of each is forbidden where its other tokens were just generated."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._by_token_before_last: dict[int, list[Sequence[int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_token_before_last.setdefault(word[-2], []).append(word)

    def completing(self, generated: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The tokens that would complete a forbidden sequence after `generated`, which excludes the prompt."""
        begun = self._by_token_before_last.get(int(generated[-1])) if len(generated) else None
        if begun is None:
            return self._always
        completing = [word[-1] for word in begun if generated[1 - len(word) :].tolist() == list(word[:-1])]
        return np.concatenate([self._always, np.array(completing, dtype=np.int64)])


class _Budget:
    """The state of a slot whose reasoning is closed after a number of tokens."""

    def __init__(self, budget: ReasoningBudget, vocab_size: int) -> None:
        self._max_tokens = budget.max_tokens
        self._opening = budget.opening
        self._end = budget.closing[0][0]
        self._closing = [packed(token_ids, vocab_size) for token_ids in budget.closing]
        self.is_over = False
        """Whether the reasoning is closed for good: its end is so many tokens ago that it cannot be a draft."""

    def closing(self, generated: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """The mask of tokens that may follow `generated` to close the reasoning; None if any token may follow.

        It depends only on the sequence's tokens, so it is the same after a preemption or a restart.
        """
        if self._opening is not None:
            openings = np.flatnonzero(generated[:_LATEST_OPENING] == self._opening)
            if not len(openings):
                self.is_over = len(generated) > _LATEST_DRAFT
                return None
            generated = generated[openings[0] + 1 :]
        if len(generated) < self._max_tokens:
            return None
        ends = np.flatnonzero(generated == self._end)
        if not len(ends):
            return self._closing[0]
        # The model has closed its reasoning by itself.
        step = len(generated) - int(ends[0])
        self.is_over = step > _LATEST_DRAFT
        return self._closing[step] if ends[0] >= self._max_tokens and step < len(self._closing) else None


_LATEST_DRAFT = 64
"""Number of tokens after which an earlier token cannot be a draft that verification may still reject."""
_LATEST_OPENING = 4
"""Number of leading tokens within which a model opens its reasoning, since line breaks may precede it."""


class _Masked:
    """The state of a slot that may sample only certain tokens."""

    __slots__ = ("_allowed", "_ends", "_followed", "_late_ends", "_matcher", "_row", "_seq", "_unwanted_eos")

    def __init__(self, seq: EngineSequence, ends: list[int], vocab_size: int) -> None:
        self._seq = seq
        allowed = seq.sampling_params.allowed_token_ids
        self._matcher = seq.matcher
        self._allowed = None if allowed is None else packed(allowed, vocab_size)
        # The matcher allows the model's end tokens even if the request ignores them, so they are masked here.
        eos = () if seq.matcher is None else seq.matcher.eos_token_ids
        self._ends = [token for token in ends if token not in eos]
        self._unwanted_eos = [token for token in eos if token not in ends]
        self._late_ends = [*self._unwanted_eos, *ends]
        self._row: MaskedRow | None = None
        """The masked row of the last step, which stays the same for many steps in most sequences."""
        self._followed: tuple[int, list[int], Matcher | None] = 0, [], None
        """The sequence's length, the tokens after it, and the matcher advanced over them, for the next position."""

    @property
    def is_over(self) -> bool:
        """Whether the sequence has ended."""
        return self._seq.is_finished

    def unread(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The tokens before a position that the matcher has not read: drafts, and tokens of an unfinished step."""
        return tokens[len(tokens) if self._matcher is None else len(self._seq.token_ids) :]

    def later_row(
        self, row: int, unread: list[int], too_short: bool, due: npt.NDArray[np.int32] | None = None
    ) -> MaskedRow:
        """As `row`, after tokens that the matcher has not read. If it rejects these, any token may be sampled."""
        assert self._matcher is not None
        length, before, last = self._followed
        if last is not None and length == len(self._seq.token_ids) and before == unread[:-1]:
            matcher = last.after(unread[-1:])
        else:
            matcher = self._matcher.after(unread)
        self._followed = len(self._seq.token_ids), unread, matcher
        withheld = self._late_ends if too_short else self._unwanted_eos
        return MaskedRow(row, matcher, self._ends, withheld, self._allowed, due)

    def row(self, row: int, too_short: bool, due: npt.NDArray[np.int32] | None = None) -> MaskedRow:
        """The mask of row `row` of a step. `too_short`: the sequence has fewer than `min_tokens` tokens.

        `due`: see `MaskedRow`.
        """
        withheld = self._late_ends if too_short else self._unwanted_eos
        cached = self._row
        if cached is None or cached.row != row or cached.withheld is not withheld or cached.due is not due:
            self._row = cached = MaskedRow(row, self._matcher, self._ends, withheld, self._allowed, due)
        return cached

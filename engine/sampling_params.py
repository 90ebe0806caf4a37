"""`SamplingParams`: how one request's tokens are chosen and when it stops. Crosses the socket as is."""

import math

import msgspec

MAX_LOGPROBS = 20
"""Most alternatives of a token whose log probabilities a request may ask for (OpenAI's limit)."""


class ReasoningBudget(msgspec.Struct, frozen=True, array_like=True):
    """Most tokens of the reasoning with which an answer begins, and how it is closed after them."""

    max_tokens: int
    closing: list[list[int]]
    """What closes the reasoning: for each position the tokens that may be sampled there. The first position has one
    token, which marks the end wherever it is sampled."""
    opening: int | None = None
    """The token that opens the reasoning, among the first tokens of the answer; None: the prompt has opened it."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Sampling and stopping of one sequence. Raises `ValueError` naming field, value and limit.

    Temperature 0 is greedy. Filters apply in the order penalties and bias, temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    """0 computes the prompt and generates nothing."""
    ignore_eos: bool = False
    stop_strings: list[str] | None = None
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k tokens of highest probability; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the highest."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Key of the counter-based random generator, together with the position; None: the engine picks one."""
    logprobs: int | None = None
    """Report the log probabilities of the sampled token and of this many alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens after the first."""
    min_tokens: int = 0
    """EOS and stop tokens are not sampled before this many tokens."""
    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    """Token sequences that end the generation; they stay in the output."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    """Sample these tokens only."""
    bad_words: list[list[int]] | None = None
    """Token sequences that are never completed."""
    grammar: str | None = None
    """Sample only what this grammar allows, in the form of `engine.text.structured`."""
    reasoning_budget: ReasoningBudget | None = None
    """Close the reasoning after a number of tokens."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty; it must have at least 1 token id")
        for field, sequences in (("bad_words", self.bad_words), ("stop_token_sequences", self.stop_token_sequences)):
            if any(not sequence for sequence in sequences or ()):
                raise ValueError(f"{field} holds an empty sequence; each must have at least 1 token id")
        for token_id, bias in (self.logit_bias or {}).items():
            # A call for each of many biases would take most of the time of creating or decoding the parameters.
            if not (type(bias) is float and -100.0 <= bias <= 100.0):
                _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for text in self.stop_strings or ():
            if not text:
                raise ValueError("stop_strings holds an empty string; each must have at least 1 character")


def _within(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise unless `low <= value <= high` (`low < value` when `low_open`); NaN is outside every range."""
    if not isinstance(value, int | float):
        raise ValueError(f"{field} is {value!r}; it must be a number")
    if math.isnan(value) or value > high or value < low or (low_open and value == low):
        opening = f"above {low:g} and at most {high:g}" if low_open else f"between {low:g} and {high:g}"
        raise ValueError(f"{field} is {value:g}; it must be {opening}")

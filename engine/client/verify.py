"""`verify`: checks on this machine that answers do not depend on other requests, or on how they are computed.

Probes, some greedy and some sampled with a seed, are answered one at a time by a new engine. They are then answered
from cached prefixes, together with 64 other requests, by a restarted engine, and by one with few KV blocks, which
computes prompts in chunks and preempts sequences. All answers to a probe must have the same tokens.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.client.llm_engine import LLMEngine
from engine.config.config import Config
from engine.sampling_params import SamplingParams

COMPANY = 64
"""Number of other requests that run together with the probes."""
_CHUNK = 32
"""Most tokens of a step in the engine that computes prompts in chunks."""
_LENGTHS = (3, 40, 75, 100)
"""Tokens of the probes' prompts: less than a block, and more than one or two chunks."""
_TOKENS = 24
_PREEMPTING = 12
"""Number of sequences that share the few blocks."""
_SEED = 20240607

Answers = list[list[int]]


class Proof(NamedTuple):
    """The result of one way of computing the probes."""

    name: str
    num_answers: int
    evidence: str
    """Facts that show that the probes were computed in this way."""
    differing: tuple[str, ...] = ()
    """Descriptions of the probes whose answers differ from those computed alone."""
    skipped: str = ""
    """Reason why this way does not exist for the model; empty if it does."""

    @property
    def is_right(self) -> bool:
        """Whether no answer differed."""
        return not self.differing

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name:<14}not proven: {self.skipped}"
        verdict = "equal" if self.is_right else f"DIFFERENT: {'; '.join(self.differing)}"
        return f"{self.name:<14}{self.num_answers} answers {verdict} ({self.evidence})"


class Probe(NamedTuple):
    """A request whose answer is compared."""

    prompt: list[int]
    params: SamplingParams

    def __str__(self) -> str:
        kind = "greedy" if self.params.temperature == 0 else f"seed {self.params.seed}"
        return f"{len(self.prompt)} tokens, {kind}"


def verify(config: Config, start: Callable[[Config], LLMEngine] | None = None) -> Iterator[Proof]:
    """Yield each proof as soon as it is complete. Raises the errors of starting an engine.

    `start` creates an engine from a configuration. `max_num_seqs` is increased so that all requests run together.
    """
    make = start or (lambda each: LLMEngine(config=each))
    seqs = max(config.max_num_seqs, COMPANY + 2 * len(_LENGTHS))
    config = config.model_copy(update={"max_num_seqs": seqs})
    with make(config) as engine:
        info = engine.model_info
        probes = _probes(info.vocab_size, info.max_model_len)
        alone = _alone(engine, probes)
        yield Proof("alone", len(probes), f"{info.architecture} in {info.dtype} by {info.attention_backend}")
        yield _of_prefixes(engine, probes, alone)
        yield _in_company(engine, probes, alone)
    with make(config) as engine:
        found = _alone(engine, probes)
        yield Proof("restarted", len(probes), "by another process", _differing(probes, found, alone))
    yield from _with_little(make, config, probes, alone)


def _with_little(
    make: Callable[[Config], LLMEngine], config: Config, probes: Sequence[Probe], alone: Answers
) -> Iterator[Proof]:
    """Check prompts in chunks and preemptions, with an engine of short steps and few blocks."""
    size = config.kv_cache_block_size
    longest = max(len(probe.prompt) for probe in probes) + _TOKENS
    blocks = 2 * -(-longest // size) + 2
    little = {"max_num_batched_tokens": _CHUNK, "max_num_seqs": _PREEMPTING, "num_kvcache_blocks": blocks}
    with make(config.model_copy(update={**little, "enable_prefix_caching": False})) as engine:
        found = _alone(engine, probes)
        evidence = f"prompts of up to {max(_LENGTHS)} tokens, {_CHUNK} a step"
        yield Proof("chunked", len(probes), evidence, _differing(probes, found, alone))
        rng = random.Random(_SEED + 1)
        vocab_size, count = engine.model_info.vocab_size, _PREEMPTING - len(probes) // 2
        others = [_random_request(rng, vocab_size, 30) for _ in range(count)]
        found = _together(engine, probes, others)
        stats = engine.stats
        preemptions = 0 if stats is None else stats.preemptions
        if preemptions == 0:
            yield Proof("preempted", 0, "", skipped="no sequence was preempted")
            return
        yield Proof("preempted", len(probes), f"{preemptions} preemptions", _differing(probes, found, alone))


def _of_prefixes(engine: LLMEngine, probes: Sequence[Probe], alone: Answers) -> Proof:
    if not engine.model_info.shares_prefixes:
        return Proof("prefix hits", 0, "", skipped="this model shares no prefixes")
    before = 0 if engine.stats is None else engine.stats.prefix_hit_tokens
    found = _alone(engine, probes)
    hits = 0 if engine.stats is None else engine.stats.prefix_hit_tokens - before
    if hits == 0:
        return Proof("prefix hits", 0, "", skipped="no prefix was found in the cache")
    return Proof("prefix hits", len(probes), f"{hits} prompt tokens from the cache", _differing(probes, found, alone))


def _in_company(engine: LLMEngine, probes: Sequence[Probe], alone: Answers) -> Proof:
    rng = random.Random(_SEED)
    vocab_size = engine.model_info.vocab_size
    others = [_random_request(rng, vocab_size, rng.randrange(2, 60)) for _ in range(COMPANY)]
    found = _together(engine, probes, others)
    return Proof("in company", len(probes), f"of {COMPANY} other requests", _differing(probes, found, alone))


def _probes(vocab_size: int, max_model_len: int) -> list[Probe]:
    """Create prompts of random tokens, each once greedy and once with a seed."""
    rng = random.Random(_SEED + 2)
    made = []
    for number, length in enumerate(_LENGTHS):
        length = min(length, max_model_len - _TOKENS - 1)
        greedy = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
        seeded = SamplingParams(temperature=1.0, seed=number, max_tokens=_TOKENS, ignore_eos=True)
        made += [Probe(_tokens(rng, vocab_size, length), params) for params in (greedy, seeded)]
    return made


def _random_request(rng: random.Random, vocab_size: int, length: int) -> Probe:
    params = SamplingParams(temperature=0.7, seed=rng.randrange(1 << 30), max_tokens=_TOKENS, ignore_eos=True)
    return Probe(_tokens(rng, vocab_size, length), params)


def _tokens(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def _alone(engine: LLMEngine, probes: Sequence[Probe]) -> Answers:
    """Return each probe's answer, computed while no other request runs."""
    return [_together(engine, [probe], [])[0] for probe in probes]


def _together(engine: LLMEngine, probes: Sequence[Probe], others: Sequence[Probe]) -> Answers:
    """Return the probes' answers, when they are added between two halves of the other requests."""
    half = len(others) // 2
    every = [*others[:half], *probes, *others[half:]]
    results = engine.generate([each.prompt for each in every], [each.params for each in every], use_tqdm=False)
    for result in results:
        if result["finish_reason"] == "error":
            raise RuntimeError(f"a request failed: {result['error']}")
    return [result["token_ids"] for result in results[half : half + len(probes)]]


def _differing(probes: Sequence[Probe], found: Answers, expected: Answers) -> tuple[str, ...]:
    differing = []
    for probe, one, other in zip(probes, found, expected, strict=True):
        if one != other:
            index = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
            differing.append(f"the answer to {probe} from token {index} on")
    return tuple(differing)

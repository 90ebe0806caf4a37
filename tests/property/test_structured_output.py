"""Random schemas through the real engine, sampled at temperature 2 by a model of random weights.

Each answer that ends by itself is valid, for any batch, preemption and division into chunks.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.structured.compiler import GrammarCompiler
from engine.text.structured.matcher import Matchers
from engine.text.structured.spec import GrammarSpec, InvalidGrammar
from engine.text.tokenizer import Tokenizer
from models.architectures.config import ModelConfig
from tests.parity.checkpoints import make_checkpoint
from tests.parity.runners import load

MAX_TOKENS = 96
EXAMPLES = settings.default.max_examples * 3 // 5


class Engine:
    """Scheduler and runner of a tiny model, in this process."""

    def __init__(self, checkpoint: Any) -> None:
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        model = ModelConfig.from_checkpoint(checkpoint)
        # Few blocks and small steps: sequences are preempted, and prompts computed in chunks.
        self.config = Config(
            num_kvcache_blocks=22,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            scheduling_policy="mixed",
            eos_token_id=model.eos_token_ids[0],
        )
        self.runner = ModelRunner(load(checkpoint, self.config), 22)
        self.matchers = Matchers(lambda: self.tokenizer, model.vocab_size, model.eos_token_ids)
        self.matchers.load()
        self.compiler = GrammarCompiler(vocab_size=model.vocab_size)

    def generate(self, requests: list[SamplingParams]) -> list[Sequence]:
        """The finished sequences, all of one batch."""
        seqs = []
        for number, params in enumerate(requests):
            seqs.append(Sequence([40 + number] * 30, self.config.kv_cache_block_size, params, id=number))
            if params.grammar is not None:
                seqs[-1].matcher = self.matchers.matcher(params.grammar)
        scheduler = Scheduler(self.config)
        scheduler.extend(seqs)
        while (scheduled := scheduler.schedule()) is not None:
            batch, in_step = scheduled
            output = self.runner.forward(batch)
            assert not output.errors
            assert not output.refusals
            scheduler.postprocess(list(in_step.values()), output)
        scheduler.check_integrity()
        return seqs

    def text(self, seq: Sequence) -> str:
        return self.tokenizer.decode(seq.completion_token_ids)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.text.structured.compiler._WALL_SECONDS", 300.0)
        yield engine
    engine.compiler.close()


def strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.builds(lambda low, more: {"minLength": low, "maxLength": low + more}, *[st.integers(0, 6)] * 2)
    patterns = st.sampled_from(["^[a-z]{1,4}$", "^(a|bc)+d?$", "^\\d{2}-\\d{2}$", "^x"]).map(lambda p: {"pattern": p})
    formats = st.sampled_from(["date", "time", "uuid", "ipv4"]).map(lambda name: {"format": name})
    choices = st.lists(st.text(max_size=4), min_size=1, max_size=4, unique=True).map(lambda each: {"enum": each})
    return st.one_of(lengths, patterns, formats, choices).map(lambda rest: {"type": "string", **rest})


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.builds(
        lambda low, more: {"minimum": low, "maximum": low + more}, st.integers(-999, 999), st.integers(0, 999)
    )
    kinds = st.sampled_from([{"type": "integer"}, {"type": "number"}])
    multiples = st.sampled_from([{"type": "integer", "multipleOf": 7}, {"type": "integer", "exclusiveMinimum": 3}])
    return st.one_of(st.builds(lambda kind, bound: {**kind, **bound}, kinds, bounds), multiples)


def simple() -> st.SearchStrategy[dict[str, Any]]:
    constants = st.sampled_from([None, True, 3, -1.5, 'é\n"', [1, {"a": []}]]).map(lambda value: {"const": value})
    return st.one_of(
        strings(), numbers(), constants, st.just({"type": "boolean"}), st.just({"type": ["null", "boolean"]})
    )


def composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    )
    names = st.sampled_from(["a", "b", "key with space", 'é"', "$ref2"])
    objects = st.builds(
        lambda fields, optional: {
            "type": "object",
            "properties": fields,
            "required": [name for name in fields if name not in optional],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, min_size=1, max_size=3),
        st.sets(names, max_size=2),
    )
    either = st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    return st.one_of(arrays, tuples, objects, either)


SCHEMAS = st.recursive(simple(), composed, max_leaves=4)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**31), free=st.booleans())
def test_an_answer_that_ended_by_itself_is_valid(
    engine: Engine, schema: dict[str, Any], seed: int, free: bool
) -> None:
    try:
        grammar = engine.compiler.compile(GrammarSpec("json", schema))
    except InvalidGrammar:
        return
    requests = [
        SamplingParams(temperature=2.0, seed=seed + i, max_tokens=MAX_TOKENS, grammar=grammar, ignore_eos=i == 2)
        for i in range(3)
    ]
    if free:
        requests.append(SamplingParams(temperature=2.0, seed=seed, max_tokens=MAX_TOKENS))
    for seq in engine.generate(requests)[:3]:
        text = engine.text(seq)
        if seq.leave_reason == "max_tokens":
            assert len(seq.completion_token_ids) == MAX_TOKENS
        else:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


PIECES = st.tuples(
    st.sampled_from(["a", "[0-9]", "(x|yz)", "\\.", "\\d", "(b|c)"]), st.sampled_from(["", "+", "?", "*", "{1,3}"])
)
PATTERNS = st.lists(PIECES.map("".join), min_size=1, max_size=4).map("".join)


@settings(max_examples=EXAMPLES, deadline=None)
@given(pattern=PATTERNS, seed=st.integers(0, 2**31))
def test_an_answer_to_a_regex_matches_it(engine: Engine, pattern: str, seed: int) -> None:
    grammar = engine.compiler.compile(GrammarSpec("regex", pattern))
    requests = [SamplingParams(temperature=2.0, seed=seed + i, max_tokens=40, grammar=grammar) for i in range(3)]
    for seq in engine.generate(requests):
        if seq.leave_reason != "max_tokens":
            assert re.fullmatch(pattern, engine.text(seq), re.ASCII)


def test_a_neighbour_with_a_grammar_changes_nothing(engine: Engine) -> None:
    grammar = engine.compiler.compile(GrammarSpec("choice", ["yes", "no", "x" * 40]))
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, logprobs=2) for i in range(3)]
    together = engine.generate([SamplingParams(temperature=2.0, seed=1, max_tokens=40, grammar=grammar), *free])[1:]
    without = engine.generate([SamplingParams(temperature=2.0, seed=1, max_tokens=40), *free])[1:]
    assert [seq.token_ids for seq in together] == [seq.token_ids for seq in without]


def test_a_seeded_answer_is_the_same_alone_and_after_preemption(engine: Engine) -> None:
    grammar = engine.compiler.compile(
        GrammarSpec("json", {"type": "array", "items": {"type": "integer"}, "minItems": 9})
    )
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=60, grammar=grammar)
    (alone,) = engine.generate([params])
    crowd = engine.generate([params] * 8)
    assert alone.token_ids[30:] == crowd[0].token_ids[30:]

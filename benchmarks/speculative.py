"""Steps that verify drafts, against plain ones: `python -m benchmarks.speculative`.

Random weights in the shape of a 0.6B model through `LLMEngine`. Their greedy answers come to repeat themselves, and
are drafted well from then on; answers drawn at temperature 1 never do.
"""

import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from benchmarks.quantization import write_checkpoint
from benchmarks.report import Table
from engine.config import SpeculativeConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.spec_decode.drafts import Drafts

REPEATS = 3
STREAMS = (1, 4)
NUM_DRAFTS = 4
_CONTEXT, _NEW_TOKENS = 128, 96
_ANSWERS = {"greedy, which comes to repeat itself": 0.0, "drawn at temperature 1": 1.0}
_ROWS, _LENGTH = 64, 4096


def run(repeats: int = REPEATS, new_tokens: int = _NEW_TOKENS) -> Table:
    """Medians over `repeats` rounds, in which both take turns."""
    taken: dict[tuple[str, int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_checkpoint(Path(name))
        engines = {has_drafts: stack.enter_context(_engine(name, has_drafts)) for has_drafts in (False, True)}
        for engine in engines.values():
            _rate(engine, 1, 0.0, 4)
        for _ in range(repeats):
            for answers, temperature in _ANSWERS.items():
                for streams in STREAMS:
                    for has_drafts, engine in engines.items():
                        rate = _rate(engine, streams, temperature, new_tokens)
                        taken.setdefault((answers, streams, has_drafts), []).append(rate)
    rows = []
    for answers in _ANSWERS:
        for streams in STREAMS:
            plain, drafted = (taken[answers, streams, has_drafts] for has_drafts in (False, True))
            ratio = statistics.median(one / other for one, other in zip(drafted, plain, strict=True))
            medians = (f"{statistics.median(rates):.1f}" for rates in (plain, drafted))
            rows.append((answers, str(streams), *medians, f"{ratio:.2f} x"))
    return Table(
        "Speculative decoding",
        f"Random weights in the shape of a 0.6B model, bfloat16, {new_tokens} tokens after {_CONTEXT}, up to "
        f"{NUM_DRAFTS} drafts a sequence looked up in it; medians of {repeats} rounds in turn, and of their ratios. "
        f"The lookup for {_ROWS} sequences of {_LENGTH} tokens takes {_lookup_seconds() * 1e3:.2f} ms a step.",
        "faster where answers repeat themselves; at least 0.95 x where they never do.",
        ("answers", "streams", "tok/s", "with drafts", ""),
        rows,
    )


def _engine(model: str, has_drafts: bool) -> LLMEngine:
    return LLMEngine(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        num_kvcache_blocks=512,
        enable_prefix_caching=False,
        speculative_config={"num_speculative_tokens": NUM_DRAFTS} if has_drafts else None,
    )


def _rate(engine: LLMEngine, streams: int, temperature: float, new_tokens: int) -> float:
    """Tokens a second, of so many at once, their first ones left out."""
    prompts = [[3 + (7 * stream + 11 * place) % 1500 for place in range(_CONTEXT)] for stream in range(streams)]
    asked = SamplingParams(temperature=temperature, seed=5, max_tokens=new_tokens, ignore_eos=True)
    results = engine.generate(prompts, asked, use_tqdm=False)
    return sum(1 / each["tpot"] for each in results)


def _lookup_seconds() -> float:
    """Of one step of many long sequences, that have grown by a token each."""
    config = SimpleNamespace(speculative_config=SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS))
    # As many rows as may draft all that they are asked for.
    drafts, draw = Drafts(config, _ROWS * (1 + NUM_DRAFTS)), random.Random(0)
    seqs = [Sequence([draw.randrange(50) for _ in range(_LENGTH)], 16, id=row) for row in range(_ROWS)]
    for seq in seqs:
        seq.token_limit = 2 * _LENGTH
    found = []
    for _ in range(50):
        begin = time.perf_counter()
        drafts.propose(seqs, 1 << 20)
        found.append(time.perf_counter() - begin)
        for seq in seqs:
            seq.append_token(draw.randrange(50))
    return statistics.median(found)


if __name__ == "__main__":
    sys.stdout.write(run().markdown())

"""Decode speed of models on the CPU: rounded weights, drafts, and a mixture of experts; three tables."""

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from benchmarks.checkpoints import QWEN3_06B, write_random
from benchmarks.report import Table
from engine.client.llm_engine import LLMEngine
from engine.config.config import PrecisionConfig, SpeculativeConfig
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as EngineSequence
from engine.speculative.drafts import Drafts

if TYPE_CHECKING:
    from models.ops.cpu.runtime import Library


ROUNDINGS = ("auto", "int8", "int4")
QUANTIZATION_ROUNDS = 3
TEXTS_A_CATEGORY = 20
QUANTIZATION_STREAMS = (1, 8, 32)
_CONTEXT, _NEW_TOKENS = 128, 32


class Perplexity(NamedTuple):
    """Accuracy and perplexity of a model on held-out text, and on the assistant's turns alone, for which it was
    trained."""

    text: float
    answers: float


def perplexities(roundings: Sequence[str] = ROUNDINGS, each: int = TEXTS_A_CATEGORY) -> dict[str, Perplexity]:
    """Measure the embedded model for each storage of its weights, on `each` texts per category."""
    from tools.demo.examples import render_prompt
    from tools.demo.generate import as_text, held_out_texts

    texts = [text for found in held_out_texts(0, each).values() for text in found]
    asked = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    found = {}
    for rounding in roundings:
        with _engine(None, rounding) as engine:
            tokenize = engine.io_processor.tokenize
            prompts = [tokenize(as_text(text).removesuffix("\n")) for text in texts]
            starts = [len(tokenize(render_prompt(text))) for text in texts]
            results = engine.generate(prompts, asked, use_tqdm=False)
        # The first token has no prediction.
        losses = [[-entry.logprob for entry in result["prompt_logprobs"] or ()] for result in results]
        answers = [loss[max(0, start - 1) :] for loss, start in zip(losses, starts, strict=True)]
        found[rounding] = Perplexity(*(math.exp(statistics.fmean(chain(*each))) for each in (losses, answers)))
    return found


def quantization_table(repeats: int = QUANTIZATION_ROUNDS) -> Table:
    """Medians over `repeats` rounds, in each of which the three storages are measured in turn."""
    perplexity, speed = perplexities(), speeds(repeats)
    rows = []
    for rounding in ROUNDINGS:
        found, base = speed[rounding], speed["auto"]
        losses = zip(perplexity[rounding], perplexity["auto"], strict=True)
        rates = zip((*found.decode, found.prefill), (*base.decode, base.prefill), strict=True)
        rows.append(
            (
                "bfloat16" if rounding == "auto" else rounding,
                *(f"{one:.4g}" + ("" if found is base else f" ({one / other - 1:+.2%})") for one, other in losses),
                *(f"{one:.4g}" + ("" if found is base else f" ({one / other:.2f} x)") for one, other in rates),
                f"{found.num_bytes / 1e6:.0f} MB",
            )
        )
    decode = (f"decode tok/s, {streams} stream{'s' if streams > 1 else ''}" for streams in QUANTIZATION_STREAMS)
    return Table(
        "Quantisation",
        f"Perplexity of the embedded model on held-out text ({TEXTS_A_CATEGORY} texts a category), and on the answers "
        f"in it; speed of random weights in the shape of a 0.6B model after {_CONTEXT} tokens, medians of {repeats} "
        "rounds in turn; its process's own memory after loading.",
        "perplexity within 1 % (int8) and 4 % (int4); 1 stream at least 1.6 x (int8) and 2.3 x (int4).",
        ("", "perplexity", "of answers", *decode, "prefill tok/s", "memory"),
        rows,
    )


class Speed(NamedTuple):
    """Decoded tokens per second by number of `STREAMS`, prompt tokens per second, and the memory of a process that has
    just loaded the weights."""

    decode: tuple[float, ...]
    prefill: float
    num_bytes: int


def speeds(repeats: int) -> dict[str, Speed]:
    """Measure a model with each storage of its weights."""
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    num_bytes = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_checkpoint(Path(name))
        engines = {}
        for rounding in ROUNDINGS:
            before = _children_bytes()
            engines[rounding] = stack.enter_context(_engine(name, rounding))
            num_bytes[rounding] = _children_bytes() - before
            _times(engines[rounding], 1)
        for _ in range(repeats):
            for streams in QUANTIZATION_STREAMS:
                for rounding, engine in engines.items():
                    taken.setdefault((rounding, streams), []).append(_times(engine, streams))
    found = {}
    for rounding in ROUNDINGS:
        medians = [
            [statistics.median(times) for times in zip(*taken[rounding, of], strict=True)]
            for of in QUANTIZATION_STREAMS
        ]
        decode = tuple(streams / step for streams, (_, step) in zip(QUANTIZATION_STREAMS, medians, strict=True))
        found[rounding] = Speed(decode, QUANTIZATION_STREAMS[-1] * _CONTEXT / medians[-1][0], num_bytes[rounding])
    return found


def write_checkpoint(directory: Path) -> None:
    """Write a checkpoint of random weights with the sizes of Qwen3-0.6B."""
    from transformers import Qwen3Config

    config = Qwen3Config(**QWEN3_06B.sizes, max_position_embeddings=4096, tie_word_embeddings=True)
    write_random(directory, config)


def _engine(model: str | None, rounding: str) -> LLMEngine:
    quantization = PrecisionConfig.model_validate({"quantization": rounding})
    return LLMEngine(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        num_kvcache_blocks=1024,
        enable_prefix_caching=False,
        quantization_config=quantization,
    )


def _times(engine: LLMEngine, streams: int) -> tuple[float, float]:
    """Seconds to the first token of `streams` prompts that one step computes, and seconds for each further token."""
    prompts = [[3 + (7 * stream + 11 * place) % 1500 for place in range(_CONTEXT)] for stream in range(streams)]
    asked = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    results = engine.generate(prompts, asked, use_tqdm=False)
    return statistics.median(each["ttft"] for each in results), statistics.median(each["tpot"] for each in results)


def _children_bytes() -> int:
    """Return the private memory of this process's children, without the files that they map."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


# Steps that verify drafts, compared with plain steps: random weights with the sizes of a 0.6B model, through
# `LLMEngine`. Their greedy answers begin to repeat themselves, and are then drafted well; answers sampled at
# temperature 1 never are.

SPECULATION_ROUNDS = 3
SPECULATION_STREAMS = (1, 4)
NUM_DRAFTS = 4
_SPECULATIVE_CONTEXT, _SPECULATIVE_NEW_TOKENS = 128, 96
_ANSWERS = {"greedy, which comes to repeat itself": 0.0, "drawn at temperature 1": 1.0}
_ROWS, _LENGTH = 64, 4096


def speculation_table(repeats: int = SPECULATION_ROUNDS, new_tokens: int = _SPECULATIVE_NEW_TOKENS) -> Table:
    """Medians over `repeats` rounds, in each of which both are measured in turn."""
    taken: dict[tuple[str, int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_checkpoint(Path(name))
        engines = {
            has_drafts: stack.enter_context(_speculative_engine(name, has_drafts)) for has_drafts in (False, True)
        }
        for engine in engines.values():
            _rate(engine, 1, 0.0, 4)
        for _ in range(repeats):
            for answers, temperature in _ANSWERS.items():
                for streams in SPECULATION_STREAMS:
                    for has_drafts, engine in engines.items():
                        rate = _rate(engine, streams, temperature, new_tokens)
                        taken.setdefault((answers, streams, has_drafts), []).append(rate)
    rows = []
    for answers in _ANSWERS:
        for streams in SPECULATION_STREAMS:
            plain, drafted = (taken[answers, streams, has_drafts] for has_drafts in (False, True))
            ratio = statistics.median(one / other for one, other in zip(drafted, plain, strict=True))
            medians = (f"{statistics.median(rates):.1f}" for rates in (plain, drafted))
            rows.append((answers, str(streams), *medians, f"{ratio:.2f} x"))
    return Table(
        "Speculative decoding",
        f"Random weights in the shape of a 0.6B model, bfloat16, {new_tokens} tokens after a prompt of "
        f"{_SPECULATIVE_CONTEXT}, with up to {NUM_DRAFTS} drafts a sequence by n-gram lookup, and without; medians of "
        f"{repeats} rounds of each in turn, and of the rounds' ratios. The lookup for {_ROWS} sequences of {_LENGTH} "
        f"tokens takes {_lookup_seconds() * 1e3:.2f} ms a step.",
        "faster where answers repeat themselves; at least 0.95 x where they never do.",
        ("answers", "streams", "tok/s", "with drafts", ""),
        rows,
    )


def _speculative_engine(model: str, has_drafts: bool) -> LLMEngine:
    return LLMEngine(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        num_kvcache_blocks=512,
        enable_prefix_caching=False,
        speculative_config={"num_speculative_tokens": NUM_DRAFTS} if has_drafts else None,
    )


def _rate(engine: LLMEngine, streams: int, temperature: float, new_tokens: int) -> float:
    """Tokens per second of `streams` simultaneous requests, without their first tokens."""
    prompts = [
        [3 + (7 * stream + 11 * place) % 1500 for place in range(_SPECULATIVE_CONTEXT)] for stream in range(streams)
    ]
    asked = SamplingParams(temperature=temperature, seed=5, max_tokens=new_tokens, ignore_eos=True)
    results = engine.generate(prompts, asked, use_tqdm=False)
    return sum(1 / each["tpot"] for each in results)


def _lookup_seconds() -> float:
    """Measure lookup for one step of many long sequences that have each grown by a token."""
    config = SimpleNamespace(speculative_config=SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS))
    # The largest number of rows in which every row may draft as many tokens as it asks for.
    drafts, draw = Drafts(config, _ROWS * (1 + NUM_DRAFTS)), random.Random(0)
    seqs = [EngineSequence([draw.randrange(50) for _ in range(_LENGTH)], 16, id=row) for row in range(_ROWS)]
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


# A decode step of a mixture of experts, compared with reading its weights. Weights that a step does not use are not
# read, so the bound counts each expert once that this step's tokens were routed to.

EXPERT_STEPS = 15
BATCH = 8
_LAYERS = 3
_HIDDEN, _EXPERT = 2048, 768
_EXPERTS_FIELDS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2048,
    "moe_intermediate_size": _EXPERT,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_EXPERTS_CONTEXT = 64


def experts_table(repeats: int = EXPERT_STEPS) -> Table:
    """Medians over `repeats` steps of each kind, in turn."""
    import torch
    from torch import nn

    from models.ops.cpu import runtime

    operators = runtime.start(torch.get_num_threads())
    model = _model()
    whole = [layer.mlp for layer in model.model.layers]
    chosen: list[torch.Tensor] = []
    hooks = [mlp.gate.register_forward_hook(lambda _module, _args, output: chosen.append(output[1])) for mlp in whole]
    _step(model, None)()
    for hook in hooks:
        hook.remove()
    expert_bytes = 3 * 2 * _HIDDEN * _EXPERT
    active_bytes = sum(len(set(ids.flatten().tolist())) for ids in chosen) * expert_bytes
    memory = torch.zeros(active_bytes // 8, dtype=torch.int64)
    seconds: dict[str, list[float]] = {"whole": [], "dense": [], "read": []}
    steps = {"whole": _step(model, operators)}
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    steps["dense"] = _step(model, operators)
    for _ in range(repeats):
        for what, step in steps.items():
            for layer, mlp in zip(model.model.layers, whole, strict=True):
                layer.mlp = mlp if what == "whole" else nn.Identity()
            seconds[what].append(_time(step))
        seconds["read"].append(_time(memory.sum))
    medians = {what: statistics.median(found) for what, found in seconds.items()}
    bound = medians["read"] + medians["dense"]
    how = "torch" if operators is None else "the compiled operators"
    return Table(
        "Mixture of experts",
        f"A decode step of {BATCH} sequences, {_LAYERS} layers of {_EXPERTS_FIELDS['num_experts']} experts of which a "
        f"token takes {_EXPERTS_FIELDS['num_experts_per_tok']}, bfloat16, by {how}; medians of {repeats}.",
        "at most 1.3 times reading the chosen experts' weights once, plus the dense part.",
        ("", "ms", ""),
        [
            ("the step", f"{medians['whole'] * 1e3:.1f}", f"{medians['whole'] / bound:.2f} x the bound"),
            ("its dense part, experts left out", f"{medians['dense'] * 1e3:.1f}", ""),
            (
                f"reading {active_bytes / 1e6:.0f} MB of chosen experts",
                f"{medians['read'] * 1e3:.1f}",
                f"{active_bytes / medians['read'] / 1e9:.1f} GB/s",
            ),
        ],
    )


def _model() -> Any:
    """Create random weights whose routers distribute tokens like those of a trained model."""
    import torch

    from models.architectures.config import ModelConfig
    from models.architectures.qwen3_moe import Qwen3MoeForCausalLM
    from models.layers.parameter import fill_rows, pack_products
    from models.ops.cpu import runtime

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_EXPERTS_FIELDS))
        config = ModelConfig.from_checkpoint(Path(name))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if runtime.active():
        pack_products(model)
    for parameter in model.parameters():
        for place in range(len(parameter)) if parameter.dim() > 2 else (None,):
            fill_rows(parameter, 0, torch.empty(parameter.shape[-2:]).normal_(std=0.05), place)
    return model.eval()


def _step(model: Any, operators: "Library | None") -> Callable[[], object]:
    """A decode of `BATCH` sequences with some context each, as one call of the compiled operators where they run."""
    import numpy as np
    import torch

    from engine.runner.kv_cache import LayerCaches
    from models.attention.backend import AttentionBatch, select_backend
    from models.attention.context import Context, forward_context
    from models.attention.cpu_native import NativeMetaData
    from models.ops.cpu.program import record

    cpu, block_size = torch.device("cpu"), 16
    backend, blocks = select_backend(cpu), -(-(_EXPERTS_CONTEXT + 1) // 16)
    caches = LayerCaches(
        model.kv_cache_layers(),
        backend,
        block_size=block_size,
        num_slots=BATCH,
        dtype=torch.bfloat16,
        device=cpu,
        kv_dtype=None,
    )
    kv_cache_data = caches.allocate(BATCH * blocks)
    tables = np.arange(BATCH * blocks, dtype=np.int32).reshape(BATCH, blocks)
    slots = tables[:, _EXPERTS_CONTEXT // block_size].astype(np.int64) * block_size + _EXPERTS_CONTEXT % block_size
    ids, positions = torch.arange(BATCH), torch.full((BATCH,), _EXPERTS_CONTEXT)

    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=np.ones(BATCH, np.int64),
            seq_lens=np.full(BATCH, _EXPERTS_CONTEXT + 1),
            block_tables=tables,
            slot_mapping=slots,
            num_decodes=BATCH,
        )
    )

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = Context(positions=positions, is_prefill=False, batch_size=BATCH)
        with torch.inference_mode(), forward_context(metadata, context, kv_cache_data=kv_cache_data):
            return model(input_ids, positions)  # type: ignore[no-any-return]

    if operators is None:
        return lambda: forward(ids, positions)
    assert isinstance(metadata, NativeMetaData)
    program, native = record(operators, forward, BATCH), metadata.step
    return lambda: program.run(ids, positions, native)


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

"""Weights rounded to 8 and 4 bits, against bfloat16: `python -m benchmarks.quantization`.

Perplexity is the embedded model's on text that it was not trained on; speed and memory are those of random weights in
the shape of a 0.6B model, larger than caches. Both through `LLMEngine`, as users run it.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.peers.checkpoints import QWEN3_06B
from benchmarks.report import Table
from engine.config import QuantizationConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

ROUNDINGS = ("auto", "int8", "int4")
REPEATS = 3
TEXTS_A_CATEGORY = 20
STREAMS = (1, 8, 32)
_CONTEXT, _NEW_TOKENS = 128, 32
_FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    **QWEN3_06B.sizes,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


class Perplexity(NamedTuple):
    """Of held-out text, and of the assistant's part of it alone, which is what the model was taught."""

    text: float
    answers: float


def perplexities(roundings: Sequence[str] = ROUNDINGS, each: int = TEXTS_A_CATEGORY) -> dict[str, Perplexity]:
    """The embedded model's, by how its weights are stored, over `each` texts a category."""
    from models.demo.dialogue import render_prompt
    from models.demo.generate import as_text, held_out_texts

    texts = [text for found in held_out_texts(0, each).values() for text in found]
    asked = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    found = {}
    for rounding in roundings:
        with _engine(None, rounding) as engine:
            tokenize = engine.io_processor.tokenize
            prompts = [tokenize(as_text(text).removesuffix("\n")) for text in texts]
            starts = [len(tokenize(render_prompt(text))) for text in texts]
            results = engine.generate(prompts, asked, use_tqdm=False)
        # Of every token but the first.
        losses = [[-entry.logprob for entry in result["prompt_logprobs"] or ()] for result in results]
        answers = [loss[max(0, start - 1) :] for loss, start in zip(losses, starts, strict=True)]
        found[rounding] = Perplexity(*(math.exp(statistics.fmean(chain(*each))) for each in (losses, answers)))
    return found


def run(repeats: int = REPEATS) -> Table:
    """Medians over `repeats` rounds, in which the three take turns."""
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
    decode = (f"decode tok/s, {streams} stream{'s' if streams > 1 else ''}" for streams in STREAMS)
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
    """Tokens a second, by `STREAMS`, and of prompts; and the memory of the process that has just loaded."""

    decode: tuple[float, ...]
    prefill: float
    num_bytes: int


def speeds(repeats: int) -> dict[str, Speed]:
    """By how the weights are stored."""
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
            for streams in STREAMS:
                for rounding, engine in engines.items():
                    taken.setdefault((rounding, streams), []).append(_times(engine, streams))
    found = {}
    for rounding in ROUNDINGS:
        medians = [[statistics.median(times) for times in zip(*taken[rounding, of], strict=True)] for of in STREAMS]
        decode = tuple(streams / step for streams, (_, step) in zip(STREAMS, medians, strict=True))
        found[rounding] = Speed(decode, STREAMS[-1] * _CONTEXT / medians[-1][0], num_bytes[rounding])
    return found


def write_checkpoint(directory: Path) -> None:
    """Random weights, and the embedded model's tokenizer."""
    import torch
    from safetensors.torch import save_file

    from models.demo import CHECKPOINT_DIR

    sizes = QWEN3_06B.sizes
    hidden, intermediate, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = dim * sizes["num_attention_heads"], dim * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    whole = {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(sizes["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    whole["model.norm.weight"] = (hidden,)
    whole["model.embed_tokens.weight"] = (sizes["vocab_size"], hidden)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=draw)
        for name, shape in whole.items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_FIELDS))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((CHECKPOINT_DIR / file).read_bytes())


def _engine(model: str | None, rounding: str) -> LLMEngine:
    quantization = QuantizationConfig.model_validate({"quantization": rounding})
    return LLMEngine(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        num_kvcache_blocks=1024,
        enable_prefix_caching=False,
        quantization_config=quantization,
    )


def _times(engine: LLMEngine, streams: int) -> tuple[float, float]:
    """Seconds to the first token of so many prompts at once, which one step takes, and for each further token."""
    prompts = [[3 + (7 * stream + 11 * place) % 1500 for place in range(_CONTEXT)] for stream in range(streams)]
    asked = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    results = engine.generate(prompts, asked, use_tqdm=False)
    return statistics.median(each["ttft"] for each in results), statistics.median(each["tpot"] for each in results)


def _children_bytes() -> int:
    """Memory that this process's children share with nobody; files that they map are shared."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    sys.stdout.write(run().markdown())

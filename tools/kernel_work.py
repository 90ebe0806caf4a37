"""Problems of serving, and how each kernel's launch splits them: the input of `tools.kernel_prediction`.

Attention has 32 query heads, 8 KV heads and contexts of 1024 tokens, as in an 8B model; latents have DeepSeek-V3's
sizes; weights 4096 inputs and outputs; experts 8 of 128 for each token with 4096 inputs and 1536 features.
"""

from collections.abc import Callable, Mapping

import numpy as np

from models.ops.triton.grids import cdiv, num_pieces
from models.ops.triton.quantized_products import LOAD_WORDS
from tools.kernel_prediction import Work
from tools.kernels.compilation import Compilation

_CONTEXT, _WIDTH, _VOCABULARY = 1024, 4096, 151_936
_EXPERTS, _CHOSEN, _FEATURES = 128, 8, 1536


def work_of(one: Compilation) -> tuple[Work, ...]:
    """The problems predicted for a compilation; none for kernels that take a small part of a step."""
    name = one.kernel.__name__.removesuffix("_kernel")
    find = _FINDERS.get(name)
    return find(one) if find is not None else ()


def _bytes(kind: str) -> float:
    """Bits of a number to which a pointer of Triton's type points."""
    return {"*bf16": 2, "*fp16": 2, "*fp32": 4}.get(kind, 1)


def _attention_decode(one: Compilation) -> tuple[Work, ...]:
    blocks, constants = one.config.blocks, one.constexprs
    if constants["HAS_WINDOW"] or constants["QUERY_LEN"] > 1:
        return ()
    heads, head_dim, group = constants["KV_HEADS"], constants["HEAD_DIM"], constants["GROUP"]
    pieces = int(num_pieces(np.array([_CONTEXT]))[0])
    token = 2 * heads * head_dim * _bytes(one.signature["k_cache_ptr"])
    return tuple(
        Work(
            f"{rows} x 1k",
            programs=rows * pieces * heads * constants["TILES"],
            passes=cdiv(_CONTEXT // pieces, blocks["BLOCK_N"]),
            bytes=rows * _CONTEXT * token,
            extra=rows * pieces * heads * group * head_dim * 4 * 2,
            operations=rows * _CONTEXT * heads * group * head_dim * 4,
        )
        for rows in (1, 64)
    )


def _attention_prefill(one: Compilation) -> tuple[Work, ...]:
    constants = one.constexprs
    if constants["HAS_WINDOW"] or one.signature["q_ptr"] == "*fp32":
        return ()
    tokens = 2048
    heads, head_dim, group = constants["KV_HEADS"], constants["HEAD_DIM"], constants["GROUP"]
    tile = one.config.blocks["BLOCK_M"] // group
    return (
        Work(
            "2k prompt",
            programs=heads * cdiv(tokens, tile),
            # On average a query attends to half of the keys.
            passes=cdiv(tokens // 2, one.config.blocks["BLOCK_N"]),
            bytes=tokens * heads * head_dim * 2 * (2 + 2 * group),
            operations=tokens * tokens // 2 * heads * group * head_dim * 4,
        ),
    )


def _product(one: Compilation, weight_bytes: float, depth: int, bits: int) -> tuple[Work, ...]:
    blocks = one.config.blocks
    rows = {16: 1, 64: 64, 128: 2048}[int(one.variant.rsplit("m", 1)[1])]
    # A program computes the sums of all splits one after the other, or one of them.
    splits = 1 if one.constexprs["IS_WHOLE"] else one.constexprs["SPLITS"]
    return (
        Work(
            f"{rows} x 4k x 4k",
            programs=cdiv(rows, blocks["ROWS"]) * cdiv(_WIDTH, blocks["COLUMNS"]) * splits,
            passes=cdiv(cdiv(_WIDTH, depth), splits),
            bytes=_WIDTH * _WIDTH * weight_bytes + rows * _WIDTH * (2 + bits // 8),
            extra=rows * _WIDTH * 8 * splits if splits > 1 else 0,
            operations=2 * rows * _WIDTH * _WIDTH,
            bits=bits,
        ),
    )


def _fp8_gemm(one: Compilation) -> tuple[Work, ...]:
    return _product(one, 1 + 4 / 128, 128, 8 if one.constexprs["IS_ROUNDED"] else 16)


def _four_bit_gemm(one: Compilation) -> tuple[Work, ...]:
    scales = 1 / 32 if one.constexprs["IS_MXFP4"] else 3 / 128
    return _product(one, 0.5 + scales, one.config.blocks["DEPTH"], 16)


def _four_bit_vector(one: Compilation) -> tuple[Work, ...]:
    blocks, splits = one.config.blocks, one.constexprs["SPLITS"]
    scales = 1 / 32 if one.constexprs["IS_MXFP4"] else 3 / 128
    return (
        Work(
            "1 x 4k x 4k",
            programs=cdiv(_WIDTH, blocks["COLUMNS"]) * splits,
            passes=cdiv(cdiv(_WIDTH, blocks["LOADS"] * LOAD_WORDS.value * 8), splits),
            bytes=_WIDTH * _WIDTH * (0.5 + scales) + _WIDTH * 4,
            extra=_WIDTH * 8 * splits if splits > 1 else 0,
            # The matrix units compute none of it; a vector's sums are bounded by its instructions.
        ),
    )


def _dense_gemm(one: Compilation) -> tuple[Work, ...]:
    if one.signature["x"] == "*fp32":
        return ()
    return _product(one, 2, one.config.blocks["DEPTH"], 16)


def _experts(one: Compilation, weight_bytes: float, columns: str, depth: int, bits: int) -> tuple[Work, ...]:
    block = one.config.blocks["BLOCK_M"]
    is_gated = one.variant.split(" gate-up")[0] != one.variant
    # A block of 16 rows is for decodes, in which each expert has a few tokens; larger blocks are for prompts.
    tokens = {16: 64, 64: 1024, 128: 4096}[block]
    outputs, inputs = (_FEATURES, _WIDTH) if is_gated else (_WIDTH, _FEATURES)
    weights = _EXPERTS * outputs * inputs * (2 if is_gated else 1)
    blocks = _EXPERTS * cdiv(tokens * _CHOSEN, _EXPERTS * block)
    return (
        Work(
            f"{tokens} tokens",
            programs=blocks * cdiv(outputs, one.config.blocks[columns]),
            passes=cdiv(inputs, depth),
            bytes=weights * weight_bytes + tokens * _CHOSEN * outputs * 2 + tokens * inputs * 2,
            operations=2 * tokens * _CHOSEN * outputs * inputs * (2 if is_gated else 1),
            bits=bits,
        ),
    )


def _moe_gemm(one: Compilation) -> tuple[Work, ...]:
    return _experts(one, 2, "BLOCK_N", one.config.blocks["BLOCK_K"], 16)


def _moe_fp8_gemm(one: Compilation) -> tuple[Work, ...]:
    return _experts(one, 1 + 4 / 128, "COLUMNS", 128, 8 if one.constexprs["IS_ROUNDED"] else 16)


def _moe_four_bit_gemm(one: Compilation) -> tuple[Work, ...]:
    return _experts(one, 0.54, "COLUMNS", one.config.blocks["DEPTH"], 16)


def _moe_int8_gemm(one: Compilation) -> tuple[Work, ...]:
    return _experts(one, 1, "COLUMNS", one.config.blocks["DEPTH"], 8)


def _latent_attention(one: Compilation) -> tuple[Work, ...]:
    if one.constexprs["IS_SPARSE"]:
        return ()
    blocks, heads = one.config.blocks, int(one.variant.rsplit("h", 1)[1])
    # The same rule as the kernel's: a quarter or a half of RUN where a row is short.
    context = _CONTEXT * 4
    run = next(blocks["RUN"] // part for part in (4, 2, 1) if part == 1 or context <= 16 * blocks["RUN"] // part)
    runs = cdiv(context, run)
    latent = (one.constexprs["RANK"] + one.constexprs["ROPE"]) * _bytes(one.signature["vectors"])
    return tuple(
        Work(
            f"{rows} x 4k",
            programs=rows * runs * cdiv(heads, blocks["HEADS"]),
            passes=cdiv(run, blocks["KEYS"]),
            bytes=rows * context * latent,
            extra=rows * runs * heads * one.constexprs["RANK"] * 4 * 2,
            operations=rows * context * heads * (1088 * 2),
        )
        for rows in (1, 64)
    )


def _rms_norm(one: Compilation) -> tuple[Work, ...]:
    size = one.constexprs["SIZE"]
    if size < 1024 or not one.variant.endswith("add"):
        return ()
    return tuple(Work(f"{rows} rows", rows, 1, rows * size * 8) for rows in (64, 2048))


def _gated(one: Compilation) -> tuple[Work, ...]:
    if one.variant != "bf16 silu":
        return ()
    features = 3 * _WIDTH
    tiles = cdiv(features, one.config.blocks["FEATURES"])
    return tuple(Work(f"{rows} x 12k", rows * tiles, 1, rows * features * 6) for rows in (64, 2048))


def _quantize_groups(one: Compilation) -> tuple[Work, ...]:
    tiles = cdiv(_WIDTH // 128, one.config.blocks["GROUPS"])
    return tuple(Work(f"{rows} x 4k", rows * tiles, 1, rows * _WIDTH * 3) for rows in (1, 2048))


def _logits(one: Compilation) -> tuple[Work, ...]:
    tile = one.config.blocks["TILE"]
    rows = (1, 64)
    return tuple(Work(f"{n} x 152k", n * cdiv(_VOCABULARY, tile), 1, n * _VOCABULARY * 4) for n in rows)


def _step(heads: int, keys: int, values: int) -> Callable[[Compilation], tuple[Work, ...]]:
    def find(one: Compilation) -> tuple[Work, ...]:
        if "decode" not in one.variant:
            return ()
        programs = heads * cdiv(values, one.config.blocks["VALUES"])
        return tuple(
            Work(f"{rows} rows", rows * programs, 1, rows * heads * keys * values * 4 * 2) for rows in (1, 64)
        )

    return find


_FINDERS: Mapping[str, Callable[[Compilation], tuple[Work, ...]]] = {
    "attention_decode": _attention_decode,
    "attention_prefill": _attention_prefill,
    "dense_gemm": _dense_gemm,
    "fp8_gemm": _fp8_gemm,
    "four_bit_vector": _four_bit_vector,
    "four_bit_gemm": _four_bit_gemm,
    "moe_gemm": _moe_gemm,
    "moe_fp8_gemm": _moe_fp8_gemm,
    "moe_four_bit_gemm": _moe_four_bit_gemm,
    "moe_int8_gemm": _moe_int8_gemm,
    "latent_attention": _latent_attention,
    "rms_norm": _rms_norm,
    "gated": _gated,
    "quantize_groups": _quantize_groups,
    "argmax_tile": _logits,
    "weigh": _logits,
    "logprobs_tile": _logits,
    "gated_delta_step": _step(32, 128, 128),
    "state_space_step": _step(64, 128, 64),
}

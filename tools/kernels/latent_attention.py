"""The forms of the kernels of `models.ops.triton.latent_attention`, for each target."""

from models.ops.triton.configs import TARGETS, config_of
from models.ops.triton.latent_attention import (
    indexer_scores_kernel,
    latent_attention_kernel,
    latent_prefill_kernel,
    merge_latent_runs_kernel,
)
from tools.kernels.compilation import Compilation


def _compilations() -> tuple[Compilation, ...]:
    pointers = {
        "q": "*bf16",
        "q_rope": "*bf16",
        "block_tables": "*i32",
        "token_rows": "*i32",
        "token_lens": "*i32",
        "selected": "*i64",
    }
    sums = {"partial": "*fp32", "partial_lse": "*fp32"}
    strides = ("q_stride", "q_head_stride", "rope_stride", "rope_head_stride", "block_stride")
    integers = (*strides, "rank", "table_stride", "num_selected", "num_heads", "num_runs")
    scales = {"score_scale": "fp32", "value_scale": "fp32"}
    shape = {"BLOCK_SIZE": 16, "RANK": 512, "ROPE": 64, "RANK_TILE": 512, "ROPE_TILE": 64}
    fp8 = {"e4m3fn": "*fp8e4nv", "e4m3fnuz": "*fp8e4b8"}
    found = []
    for target in TARGETS.values():
        forms = [("decode", "*bf16", 16, False), ("decode", "*bf16", 128, False), ("sparse", "*bf16", 128, True)]
        if target.fp8 is not None:
            forms.append(("decode fp8", fp8[target.fp8], 16, False))
        for form, cache, heads, is_sparse in forms:
            found.append(
                Compilation(
                    kernel=latent_attention_kernel,
                    variant=f"{form} 512+64 h{heads}",
                    target=target,
                    config=config_of("latent_attention", target, heads=heads, sparse=is_sparse, element=2),
                    signature={"vectors": cache, **pointers, **sums, **scales, **dict.fromkeys(integers, "i32")},
                    constexprs={**shape, "IS_SPARSE": is_sparse},
                    divisible=frozenset(strides),
                    large=frozenset({"vectors", "partial"}),
                    has_dot=True,
                )
            )
        config = config_of("latent_attention", target, heads=16, sparse=False, element=2)
        found.append(
            Compilation(
                kernel=merge_latent_runs_kernel,
                variant="512",
                target=target,
                config=config_of("merge_latent_runs", target),
                signature={**sums, "token_lens": "*i32", "out": "*bf16", **dict.fromkeys(integers[-2:], "i32")}
                | {"num_seen": "i32"},
                constexprs={"RANK": 512, "RANK_TILE": 512, "RUN": config.blocks["RUN"]},
                large=frozenset({"partial"}),
            )
        )
    return tuple(found)


_LATENT_ATTENTION_COMPILATIONS = _compilations()

_STRIDES = ("q_stride", "q_head_stride", "rope_stride", "rope_head_stride", "key_stride", "shared_stride")

_LATENT_PREFILL_COMPILATIONS = tuple(
    Compilation(
        kernel=latent_prefill_kernel,
        variant="bf16 128+64",
        target=target,
        config=config_of("latent_prefill", target, element=2),
        signature={
            **dict.fromkeys(("q", "rotated", "expanded", "shared", "out"), "*bf16"),
            **dict.fromkeys(("carried", "carried_softmax"), "*fp32"),
            **dict.fromkeys((*_STRIDES, "num_heads"), "i32"),
            "pieces": "*i32",
            "scale": "fp32",
        },
        constexprs={
            "NOPE": 128,
            "ROPE": 64,
            "VALUE": 128,
            "NOPE_TILE": 128,
            "ROPE_TILE": 64,
            "VALUE_TILE": 128,
        },
        divisible=frozenset(_STRIDES),
        large=frozenset({"expanded", "carried"}),
        has_dot=True,
    )
    for target in TARGETS.values()
)

_INDEXER_SCORES_COMPILATIONS = tuple(
    Compilation(
        kernel=indexer_scores_kernel,
        variant="bf16 64x128",
        target=target,
        config=config_of("indexer_scores", target),
        signature={
            **dict.fromkeys(("q", "vectors"), "*bf16"),
            **dict.fromkeys(("weights", "scores"), "*fp32"),
            **dict.fromkeys(("block_tables", "token_rows", "token_lens"), "*i32"),
            **dict.fromkeys(("num_heads", "block_stride", "table_stride", "score_stride", "width"), "i32"),
        },
        constexprs={"BLOCK_SIZE": 16, "DIM": 128, "DIM_TILE": 128, "HEADS": 64},
        divisible=frozenset({"block_stride"}),
        large=frozenset({"vectors", "scores"}),
        has_dot=True,
    )
    for target in TARGETS.values()
)

COMPILATIONS = (*_LATENT_ATTENTION_COMPILATIONS, *_LATENT_PREFILL_COMPILATIONS, *_INDEXER_SCORES_COMPILATIONS)

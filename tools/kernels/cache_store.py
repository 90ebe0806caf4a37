"""The forms of the kernels of `models.ops.triton.cache_store`, for each target."""

from models.ops.triton.cache_store import latent_store_kernel, store_kernel, store_tiles, vector_store_kernel
from models.ops.triton.configs import TARGETS, Target, config_of
from tools.kernels.compilation import Compilation

_STRIDES = (
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    *("block_stride", "v_block_stride"),
)

_SCALARS = ("eps", "norm_offset", "k_scale", "v_scale", "limit")


def _compilation(
    variant: str,
    target: Target,
    cache_type: str,
    head_dim: int,
    rotary_dim: int,
    *,
    value_dim: int | None = None,
    is_rotated_first: bool = False,
) -> Compilation:
    value_dim = value_dim or head_dim
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache_type)
    pointers |= {"slots_ptr": "*i64", **dict.fromkeys(("cos_ptr", "sin_ptr", "q_scales_ptr"), "*fp32")}
    return Compilation(
        kernel=store_kernel,
        variant=variant,
        target=target,
        config=config_of("store", target),
        signature=pointers | dict.fromkeys(_STRIDES, "i32") | dict.fromkeys(_SCALARS, "fp32"),
        constexprs={
            "Q_HEADS": 32,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "V_DIM": value_dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": 16,
            "HAS_NORM": True,
            "IS_ROTATED_FIRST": is_rotated_first,
            "HAS_ROTATION": True,
            "HAS_Q_SCALES": is_rotated_first,
            "IS_FP8": "fp8" in cache_type,
            **store_tiles(head_dim, rotary_dim, value_dim),
        },
        divisible=frozenset(_STRIDES),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        # A thread may have one dimension of each norm's weight, in the three tiles of a head, and the query's scale.
        narrow_loads=6 + is_rotated_first,
    )


_STORE_COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _compilation("bf16 d128", target, "*bf16", 128, 128),
        _compilation("bf16 d80, 32 of it rotated", target, "*bf16", 80, 32),
        _compilation("bf16 d128, norms last, scaled queries", target, "*bf16", 128, 128, is_rotated_first=True),
        _compilation("bf16 d512", target, "*bf16", 512, 512),
        _compilation("bf16 d192, values of 128", target, "*bf16", 192, 64, value_dim=128),
        *((_compilation("FP8 d128", target, target.fp8_pointer, 128, 128),) if target.fp8 else ()),
    )
)

_POINTERS = dict.fromkeys(("q", "latent", "q_rope", "vectors", "weight", "rows"), "*bf16")

_INTEGERS = ("q_stride", "q_head_stride", "latent_stride", "block_stride", "num_heads", "row_stride")

_SIGNATURE = {
    **_POINTERS,
    "slots": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    **dict.fromkeys(("eps", "scale", "limit"), "fp32"),
    **dict.fromkeys(_INTEGERS, "i32"),
}

_LATENT = {"NOPE": 128, "RANK": 512, "ROPE": 64, "RANK_TILE": 512, "HALF_TILE": 32, "IS_INTERLEAVED": True}

_VECTOR = {"DIM": 128, "TILE": 128}

_LATENT_STORE_COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=f"{'bf16' if cache == 'bf16' else 'fp8'} {variant}",
        target=target,
        config=config_of(name, target),
        signature={**_SIGNATURE, "vectors": f"*{cache}"},
        constexprs={"BLOCK_SIZE": 16, "IS_FP8": cache != "bf16", **shape},
        divisible=frozenset(_INTEGERS) - {"num_heads"},
        large=frozenset({"vectors"}),
        has_wide_loads=False,
        # Dimensions that are rotated together lie side by side, two to a thread.
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for cache in ("bf16", {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8", None: None}[target.fp8])
    if cache is not None
    for kernel, name, variant, shape in (
        (latent_store_kernel, "latent_store", "512+64", _LATENT),
        (vector_store_kernel, "vector_store", "128", _VECTOR),
    )
)

COMPILATIONS = (*_STORE_COMPILATIONS, *_LATENT_STORE_COMPILATIONS)

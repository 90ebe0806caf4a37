"""The functions of the library that Kaon calls, by release, and a check of their signatures.

Names and arguments are those of github.com/ROCm/aiter from its first release to July 2026. A function that moved has
several homes; `accepts` says whether a release has an argument that only later ones have.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function that Kaon calls, with its arguments."""

    name: str
    homes: tuple[str, ...]
    """Modules that have the function, the latest release's first."""
    positional: int
    """Positional arguments."""
    keywords: tuple[str, ...] = ()


_UNIFIED = (
    *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal"),
    *("window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale"),
)
_PAGED = (
    *("out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "block_tables", "cu_query_lens"),
    *("context_lens", "max_context_len", "alibi_slopes", "kv_cache_dtype", "kv_cache_layout", "logits_soft_cap"),
    *("k_scale", "v_scale", "partition_size"),
)
_TRITON = "aiter.ops.triton"
_DIST = "aiter.dist"
CALLS: dict[str, tuple[Call, ...]] = {
    # (input, weight, epsilon); (out, input, residual_in, residual_out, weight, epsilon)
    "norm": (Call("rmsnorm2d_fwd", ("aiter",), 3), Call("rmsnorm2d_fwd_with_add", ("aiter",), 6)),
    # (out, input)
    "activation": (Call("silu_and_mul", ("aiter",), 2), Call("gelu_tanh_and_mul", ("aiter",), 2)),
    # `sinks` since the autumn of 2025. The module moved into `attention` at the turn of the year.
    "attention": (
        Call(
            "unified_attention",
            (f"{_TRITON}.attention.unified_attention", f"{_TRITON}.unified_attention"),
            0,
            _UNIFIED,
        ),
    ),
    # (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...)
    "prefill": (Call("flash_attn_varlen_func", ("aiter",), 7, ("softmax_scale", "causal", "window_size")),),
    # `sliding_window` since 2026.
    "decode": (Call("paged_attention_v1", ("aiter",), 0, _PAGED),),
    # (hidden_states, w1, w2, topk_weight, topk_ids, ...); (x, layout)
    "moe": (
        Call("fused_moe", ("aiter.fused_moe",), 5, ("activation", "quant_type", "w1_scale", "w2_scale")),
        Call("shuffle_weight", ("aiter.ops.shuffle",), 1, ("layout",)),
    ),
    # (XQ, WQ, x_scale, w_scale, dtype)
    "linear": (Call("gemm_a8w8_blockscale", ("aiter",), 5),),
    # `tgemm.mm(inp, weights, bias)`
    "gemm": (Call("tgemm.mm", ("aiter.tuned_gemm",), 3),),
    # (group, device, max_size); the module moved into `device_communicators` in the autumn of 2025.
    "all_reduce": (
        Call(
            "CustomAllreduce",
            (f"{_DIST}.device_communicators.custom_all_reduce", f"{_DIST}.custom_all_reduce"),
            2,
            ("max_size",),
        ),
    ),
}
"""By operator; the names are those of `models.ops.registry`."""
OPERATORS = tuple(CALLS)

_bound: dict[str, Callable[..., Any]] = {}


class DoesNotFit(Exception):
    """The library lacks a function, or the function has another signature; the message says which."""


def bind(operator: str) -> None:
    """Find the functions of an operator, for `function`. Raises `DoesNotFit`."""
    for call in CALLS[operator]:
        _bound[call.name] = _found(call)


def forget() -> None:
    """Forget the bound functions."""
    _bound.clear()


def function(name: str) -> Callable[..., Any]:
    """A bound function."""
    return _bound[name]


def accepts(name: str, keyword: str) -> bool:
    """Whether a bound function takes an argument that not all releases have."""
    try:
        return keyword in inspect.signature(_bound[name]).parameters
    except ValueError:
        return False


def member(name: str) -> Any:
    """A member of the library, such as `ActivationType.Silu`. Raises `DoesNotFit`."""
    return _reached(importlib.import_module("aiter"), name, "aiter")


def version() -> str:
    """Name and version of the installed library."""
    found = release()
    return "this aiter" if found is None else f"aiter {found}"


def release() -> str | None:
    """Version of the installed library; None where it is not installed as a package."""
    for name in ("amd-aiter", "aiter"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _found(call: Call) -> Callable[..., Any]:
    for home in call.homes:
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            # The module may be missing, but not the library, nor what the module needs.
            if error.name in (None, "aiter") or not home.startswith(str(error.name)):
                raise
            continue
        found: Callable[..., Any] = _reached(module, call.name, home)
        _require_fit(found, call)
        return found
    raise DoesNotFit(f"{version()} has no {call.homes[0]}")


def _reached(module: Any, name: str, home: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise DoesNotFit(f"{version()} has no {name}" + ("" if home == "aiter" else f" in {home}"))
        found = getattr(found, part)
    return found


def _require_fit(found: Callable[..., Any], call: Call) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # A compiled function has no signature; the probe calls it.
        return
    try:
        signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        raise DoesNotFit(f"{call.name} of {version()} has another signature: {error}") from None

"""CPU operators of mixtures of experts: routing, sorting of (token, expert) pairs by expert, and the weighted sum."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer
from models.ops.cpu.structures import Step


def float_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` with a float32 weight. # [rows, in_features] bf16 -> [rows, out_features] float32"""
    assert weight.is_contiguous()
    assert weight.dtype is torch.float32
    assert x.shape[1:] == weight.shape[1:]
    runtime = current()
    out = runtime.rows(len(x), len(weight), torch.float32)
    arguments = structures.FloatLinear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0), weight.shape[1], len(weight)
    )
    runtime.run(arguments, Step(num_tokens=len(x)), (x, weight, out))
    return out


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: int,
    renormalize: bool,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
    expert_scales: torch.Tensor | None = None,
    table: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select a token's experts, the best first; among equal scores the lower id. See `models.layers.routing`.

    # [tokens, experts] float32, 2 x [experts] float32 -> [tokens, top_k] float32, [tokens, top_k] int64

    `table`: the experts of each token id, and the step's token ids; experts are then looked up instead of selected by
    score. # [vocabulary, top_k], [tokens] int64
    """
    assert logits.dtype is torch.float32
    assert all(each is None or each.dtype is torch.float32 for each in (correction, expert_scales))
    runtime = current()
    num_tokens, experts = logits.shape
    weights = runtime.rows(num_tokens, top_k, torch.float32)
    ids = runtime.rows(num_tokens, top_k, torch.int64)
    arguments = structures.Route(
        logits.data_ptr(),
        logits.stride(0),
        pointer(correction),
        weights.data_ptr(),
        ids.data_ptr(),
        experts,
        top_k,
        num_groups,
        top_groups,
        scoring,
        renormalize,
        scaling_factor,
        pointer(expert_scales),
        None if table is None else table[0].data_ptr(),
    )
    step = Step(num_tokens=num_tokens, input_ids=None if table is None else table[1].data_ptr())
    runtime.run(arguments, step, (logits, correction, weights, ids, expert_scales, *(table or ())))
    return weights, ids


def sort_pairs(ids: torch.Tensor, experts: int, *, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of a token and one of its experts by expert.

    Returns the number of pairs of each expert, the token of each sorted pair, and the index of each pair after
    sorting.
    # [tokens, top_k] int64 -> [experts], [tokens * top_k], [tokens, top_k] int64

    `first`: the expert that is sorted first; the order is cyclic.
    """
    runtime = current()
    num_tokens, top_k = ids.shape
    counts = runtime.fixed(experts, torch.int64)
    tokens, places = (runtime.rows(num_tokens, top_k, torch.int64) for _ in range(2))
    arguments = structures.SortPairs(
        ids.data_ptr(), top_k, experts, first, counts.data_ptr(), tokens.data_ptr(), places.data_ptr()
    )
    runtime.run(arguments, Step(num_tokens=num_tokens), (ids, counts, tokens, places))
    return counts, tokens.view(-1), places


def combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up each token's expert outputs, weighted, in the order of its experts, and the gated shared output.

    # [tokens * top_k, size], [tokens, top_k] float32, [tokens, top_k] int64, [tokens, size] -> [tokens, size]

    `places`: the index of each pair in `products`, as `sort_pairs` returns it. `shared`: output of the shared experts.
    `gate` [tokens, 1] float32: logits of the gate of `shared`; None for a gate of 1.
    """
    assert gate is None or gate.dtype is torch.float32
    runtime = current()
    num_tokens, top_k = places.shape
    size = products.shape[1]
    out = runtime.rows(num_tokens, size)
    arguments = structures.Combine(
        products.data_ptr(),
        products.stride(0),
        weights.data_ptr(),
        places.data_ptr(),
        pointer(shared),
        0 if shared is None else shared.stride(0),
        pointer(gate),
        out.data_ptr(),
        out.stride(0),
        size,
        top_k,
    )
    runtime.run(arguments, Step(num_tokens=num_tokens), (products, weights, places, shared, gate, out))
    return out

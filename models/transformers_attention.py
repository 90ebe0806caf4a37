"""Our paged attention as an implementation of transformers' attention interface. Used by `TransformersModel`.

transformers calls one function of a registered name from every attention module. `watch_attention` records the calls
of a forward pass and refuses those that paged attention cannot answer; `install` gives each module that made one an
`Attention` of its own, over its own cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from models.base import KVCacheSpec
from models.errors import CheckpointError
from models.layers.attention import Attention

PAGED = "kaon"
"""The implementation's name. No mask function has it, so transformers makes no masks."""
_WATCHED = "kaon-watched"
"""The same for a pass that is recorded, with masks asked for, so that they can be judged."""
_ATTRIBUTE = "kaon_attention"
"""Where an attention module finds what answers its calls."""
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "dropout",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of a call that change nothing of the attention, or are read apart."""
_READ = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


class PagedAttention:
    """Answers one attention module's calls."""

    def __init__(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dtype: torch.dtype,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        has_sinks: bool,
    ) -> None:
        """For calls like one of `query`, `key` and `value`, computed and cached as `dtype`.

        # [1, heads, tokens, key_dim], [1, kv_heads, tokens, key_dim], [1, kv_heads, tokens, value_dim]
        """
        self.dtype = dtype
        self.key_dim, self.value_dim = key.shape[-1], value.shape[-1]
        # One cache shape serves both: the narrower is filled up with zeros, which add nothing to a score or a sum.
        self.head_dim = max(self.key_dim, self.value_dim)
        self.has_sinks = has_sinks
        self.attend = Attention(
            name,
            num_kv_heads=key.shape[1],
            head_dim=self.head_dim,
            scale=self.key_dim**-0.5 if scaling is None else float(scaling),
            sliding_window=sliding_window,
            soft_cap=softcap,
        )

    @property
    def cache_spec(self) -> KVCacheSpec:
        return self.attend.cache_spec

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """# [1, heads, tokens, key_dim], [1, kv_heads, tokens, key_dim], [1, kv_heads, tokens, value_dim]

        Gives [1, tokens, heads, value_dim].
        """
        q, k, v = (self._rows(part) for part in (query, key, value))
        out: torch.Tensor = self.attend(q, k, v, sinks if self.has_sinks else None)
        return out[..., : self.value_dim].to(query.dtype)[None]

    def _rows(self, part: torch.Tensor) -> torch.Tensor:
        """# [1, heads, tokens, dim] -> [tokens, heads, head_dim]"""
        rows = part[0].transpose(0, 1).to(self.dtype)
        if rows.shape[-1] < self.head_dim:
            return F.pad(rows, (0, self.head_dim - rows.shape[-1]))
        return rows.contiguous()


@contextmanager
def watch_attention(
    model: nn.Module, architecture: str, dtype: torch.dtype
) -> Iterator[dict[nn.Module, PagedAttention]]:
    """Record the attention that `model` computes inside: each module's, in the order of their calls.

    A recorded call answers zeros. Raises `CheckpointError` from inside for what paged attention does not compute, and
    at the end for windows that only its masks have, or only its calls.
    """
    found: dict[nn.Module, PagedAttention] = {}
    windows_of_masks: set[int] = set()

    def record(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any) -> Any:
        if module in found:
            raise CheckpointError(
                f"{architecture} runs one attention layer several times a token, which the general route cannot "
                "serve: each layer has one cache"
            )
        _refuse_call(architecture, module, query, key, value, call)
        found[module] = PagedAttention(
            f"attention.{len(found)}",
            query,
            key,
            value,
            dtype=dtype,
            scaling=call.get("scaling"),
            sliding_window=call.get("sliding_window"),
            softcap=call.get("softcap"),
            has_sinks=call.get("s_aux") is not None,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def judge_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_asked: Any) -> None:
        if not _is_causal(mask_function, local_size):
            raise CheckpointError(
                f"{architecture} masks other tokens than those after a token and those before a sliding window (as "
                "bidirectional and chunked attention do), which the general route cannot serve"
            )
        if local_size is not None:
            windows_of_masks.add(local_size)

    AttentionInterface.register(_WATCHED, _answer)
    AttentionMaskInterface.register(_WATCHED, judge_mask)
    modules = list(model.modules())
    for module in modules:
        setattr(module, _ATTRIBUTE, record)
    with using_attention(model, _WATCHED):
        yield found
    for module in modules:
        delattr(module, _ATTRIBUTE)
    windows = {attention.cache_spec.sliding_window for attention in found.values()} - {None}
    if differing := windows_of_masks ^ windows:
        raise CheckpointError(
            f"{architecture} has a sliding window of {differing.pop()} tokens only in its masks, or only in its "
            "calls for attention, so the general route cannot tell what it means"
        )


def install(found: dict[nn.Module, PagedAttention]) -> None:
    """Let the recorded modules attend over the forward context's cache wherever the model uses `PAGED`."""
    for module, attention in found.items():
        setattr(module, _ATTRIBUTE, _installed(attention))


@contextmanager
def using_attention(model: nn.Module, implementation: str) -> Iterator[None]:
    """Inside, every part of `model` computes attention by this implementation of transformers' interface."""
    previous: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            previous.setdefault(id(config), (config, config._attn_implementation))
    try:
        for config, _ in previous.values():
            config._attn_implementation = implementation
        yield
    finally:
        for config, own in previous.values():
            config._attn_implementation = own


def _answer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **call: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function: the module's own attention answers. # 3 x [1, heads, tokens, dim]"""
    return getattr(module, _ATTRIBUTE)(module, query, key, value, attention_mask=attention_mask, **call), None


def _installed(attention: PagedAttention) -> Callable[..., torch.Tensor]:
    def answer(
        _module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        return attention(query, key, value, call.get("s_aux"))

    return answer


def _refuse_call(
    architecture: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: dict[str, Any],
) -> None:
    causal = call.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise CheckpointError(
            f"{architecture} lets tokens see the tokens after them or another sequence's (attention that is not "
            "causal), which the general route cannot serve"
        )
    if others := sorted(name for name, given in call.items() if given is not None and name not in _HARMLESS | _READ):
        raise CheckpointError(
            f"{architecture} gives its attention {' and '.join(others)}, which the general route cannot serve; it "
            "serves causal attention with a sliding window, a soft cap and sinks"
        )
    if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
        raise CheckpointError(
            f"{architecture} attends with {query.shape[1]} heads of {query.shape[2]} tokens to {key.shape[1]} key "
            f"heads of {key.shape[2]}, which the general route cannot serve"
        )


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask of transformers lets a token see all before it, or `window` tokens, and nothing else."""
    edge = 64 if window is None else window
    queries = torch.tensor([0, 1, 2, edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge + 3])[:, None]
    keys = torch.arange(2 * edge + 5)[None]
    seen = keys <= queries
    if window is not None:
        seen = seen & (keys > queries - window)
    zero = torch.zeros((), dtype=torch.int64)
    found = cast(torch.Tensor, mask_function(zero, zero, queries, keys))
    return bool((found.expand(seen.shape) == seen).all())


AttentionInterface.register(PAGED, _answer)

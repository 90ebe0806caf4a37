"""Kaon's paged attention as an implementation of transformers' attention interface. Used by `TransformersModel`.

Every attention module of transformers calls one function, which is registered under the name of an implementation.
`watch_attention` records these calls in one forward pass and rejects those that paged attention cannot serve.
`install` then gives each recorded module a `PagedAttention` or an `IndexedAttention`, each with a cache of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from models.attention.backend import AttentionMetaData
from models.attention.context import get_forward_context
from models.attention.cpu_cache import to_cache
from models.errors import CheckpointError
from models.layers.attention import Attention
from models.layers.base import KVCacheSpec, VectorCacheSpec
from models.ops.types import AttentionOptions, VectorCache

PAGED = "kaon"
"""The implementation's name. No mask function is registered for it, so transformers makes no masks."""
_WATCHED = "kaon-watched"
"""The implementation's name during recording. It has a mask function, so that the masks can be checked."""
_ATTRIBUTE = "kaon_attention"
"""The attribute of an attention module that holds the function which serves its calls."""
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
"""Arguments of a call that do not change the attention, or that other code reads."""
_READ = frozenset({"attention_mask", "scaling", "sliding_window", "softcap", "s_aux"})
_METHOD = "_attn"
"""A method of older models' attention modules, which receives queries, keys and values, and returns the output."""
_METHODS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType(
    {
        "modeling_codegen.CodeGenAttention": lambda module: {"scaling": 1 / module.scale_attn},
        "modeling_gpt_neo.GPTNeoSelfAttention": lambda module: {
            "scaling": 1.0,
            "sliding_window": module.config.window_size if module.attention_type == "local" else None,
        },
        "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": lambda module: {"scaling": 1 / module.norm_factor},
        "modeling_openai.Attention": lambda module: {"scaling": None if module.scale else 1.0, "is_transposed": True},
    }
)
"""Attention modules that do not use transformers' interface but have such a method: the options of their calls."""


class PagedAttention:
    """Serves one attention module over the backend's paged keys and values."""

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
        """Take the shapes from a recorded call with `query`, `key` and `value`. Keys and values are cached as `dtype`.

        # [1, heads, tokens, key_dim], [1, kv_heads, tokens, key_dim], [1, kv_heads, tokens, value_dim]
        """
        self.dtype = dtype
        self.key_dim, self.value_dim = key.shape[-1], value.shape[-1]
        # Keys and values share one cache shape. The narrower one is padded with zeros, which change no result.
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
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        s_aux: torch.Tensor | None = None,
        **_call: Any,
    ) -> torch.Tensor:
        """Attend to the paged cache.

        # [B, heads, n, key_dim], [B, kv_heads, n, key_dim], [B, kv_heads, n, value_dim] -> [B, n, heads, value_dim]
        """
        q, k, v = (self._rows(part) for part in (query, key, value))
        out: torch.Tensor = self.attend(q, k, v, s_aux if self.has_sinks else None)
        # CodeGen rotates queries and keys in float32.
        return out[..., : self.value_dim].to(value.dtype).view(len(query), -1, *out.shape[1:-1], self.value_dim)

    def _rows(self, part: torch.Tensor) -> torch.Tensor:
        """# [B, heads, n, dim] -> [B * n, heads, head_dim]"""
        rows = part.transpose(1, 2).flatten(0, 1).to(self.dtype)
        if rows.shape[-1] < self.head_dim:
            return F.pad(rows, (0, self.head_dim - rows.shape[-1]))
        return rows.contiguous()


class IndexedCaches:
    """Replaces transformers' cache object in models with DeepSeek Sparse Attention, with paged caches.

    Layers of kind `indexed_attention` pass their latents and their indexer's keys to `past_key_values`, and pass the
    `indices` of the selected tokens to the attention interface. transformers' indexer knows one row of keys, so a
    step's sequences are presented as the concatenation of their whole contexts, with a mask by which each token sees
    only its own sequence. The indexer therefore computes (tokens of the step) x (sum of all contexts) scores. Each
    pass begins with a call of `watched` or `served`.
    """

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.index_specs: dict[int, VectorCacheSpec] = {}
        """The caches of index keys by layer index, filled by the recorded pass."""
        self._latents: dict[int, torch.Tensor] = {}
        self._row: _Row | None = None

    def watched(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Return model arguments for the recorded pass over one sequence, which uses no caches. # [1, tokens]"""
        self._row = None
        return self._arguments(tokens.new_ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril())

    def served(self, positions: torch.Tensor) -> dict[str, Any]:
        """Return model arguments for a pass over the current step's tokens. # [tokens]"""
        self._row = _Row.of_step(get_forward_context().attn_metadata, positions)
        return self._arguments(self._row.mask)

    def update(self, latent: torch.Tensor, rotated: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by a layer of transformers to extend its cache. Returns its inputs unchanged.

        The latents are kept for `take_latent`, since `IndexedAttention` writes them to the cache and reads earlier
        ones from there. `rotated`: the rotated key that all heads share. # [1, 1, tokens, rank], [1, 1, tokens,
        rope_dim]
        """
        if latent.shape[1] != 1 or rotated.shape[1] != 1:
            raise self.refusal("caches keys and values of every head in addition to its indexer")
        self._latents[layer] = torch.cat((latent[0, 0], rotated[0, 0]), -1)
        return latent, rotated

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Called by an indexer of transformers. Returns the keys to score. # [1, tokens, dim] -> [1, row, dim]"""
        if self._row is None:
            self.index_specs[layer] = VectorCacheSpec(f"indexer.{layer}", keys.shape[-1])
            return keys
        cache = get_forward_context().kv_cache_data[self.index_specs[layer].name]
        assert isinstance(cache, VectorCache)
        return self._row.exchange(keys[0], cache)[None]

    def take_latent(self, layer: int) -> torch.Tensor:
        """Return the latents that this layer passed to `update`. # [tokens, rank + rope_dim]"""
        if layer not in self._latents:
            raise self.refusal("attends to another layer's latents")
        return self._latents.pop(layer)

    def positions_of(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Convert selected indices in the row to positions in each token's own sequence; see `AttentionBackend`.

        # [1, tokens, K] int32 -> [tokens, K] int64, -1 for none
        """
        assert self._row is not None
        return self._row.positions_of(indices[0].long())

    def refusal(self, what: str) -> CheckpointError:
        """Make the error for a model that differs from DeepSeek's sparse attention; `what` is the predicate."""
        return CheckpointError(f"{self.architecture} {what}, which the general route cannot serve")

    def _arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        self._latents.clear()
        return {"past_key_values": self, "attention_mask": mask[None, None]}


class IndexedAttention:
    """Serves one attention module by the backend's latent attention over paged latents."""

    def __init__(
        self, name: str, module: nn.Module, caches: IndexedCaches, query: torch.Tensor, value: torch.Tensor, call: Any
    ) -> None:
        """Take the shapes from a recorded call.

        Raises `CheckpointError` if keys and values are not projected from latents by `kv_b_proj`.
        # [1, heads, tokens, nope_dim + rope_dim], [1, heads, tokens, value_dim]
        """
        self.layer = cast(int, module.layer_idx)
        self._caches = caches
        latent_dim = caches.take_latent(self.layer).shape[-1]
        kv_b = getattr(module, "kv_b_proj", None)
        if type(kv_b) is not nn.Linear or "bias" in dict(kv_b.named_parameters()):
            raise caches.refusal("computes keys and values from latents other than by a matrix kv_b_proj")
        self.kv_b: nn.Linear = kv_b
        rope_dim = latent_dim - kv_b.in_features
        features = query.shape[1] * (query.shape[-1] - rope_dim + value.shape[-1])
        if value.shape[1] != query.shape[1] or kv_b.out_features != features:
            raise caches.refusal("has a kv_b_proj whose output is not a key and a value for each head")
        if any(call.get(other) is not None for other in ("sliding_window", "softcap", "s_aux")):
            raise caches.refusal("has a sliding window, a soft cap or sinks over selected tokens")
        scaling = call.get("scaling")
        self.options = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else float(scaling))
        self.cache_spec = VectorCacheSpec(name, latent_dim)

    def __call__(
        self, query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, *, indices: torch.Tensor, **_call: Any
    ) -> torch.Tensor:
        """# [1, heads, tokens, dim], ..., [1, tokens, K] -> [1, tokens, heads, value_dim]"""
        context = get_forward_context()
        cache, metadata = context.kv_cache_data[self.cache_spec.name], context.attn_metadata
        assert isinstance(cache, VectorCache)
        q = query[0].transpose(0, 1).contiguous()
        kv_b = self.kv_b.weight.view(q.shape[1], -1, self.kv_b.in_features)
        latent, selected = self._caches.take_latent(self.layer), self._caches.positions_of(indices)
        out = metadata.backend.latent_attention(q, latent, kv_b, cache, metadata, self.options, selected)
        return out[None]


@dataclass(frozen=True, slots=True)
class _Row:
    """The concatenated contexts of a step's sequences, including the step's tokens."""

    slot_mapping: torch.Tensor  # [tokens] int64, the cache slot of each of the step's tokens
    starts: torch.Tensor  # [tokens] int64, the index in the row at which each token's sequence starts
    positions: torch.Tensor  # [tokens] int64
    block_tables: torch.Tensor  # [B, max_blocks] int32
    sequences: torch.Tensor  # [row] int64, the sequence of each token of the row
    offsets: torch.Tensor  # [row] int64, the position of each token of the row
    longest: int

    @classmethod
    def of_step(cls, metadata: AttentionMetaData, positions: torch.Tensor) -> "_Row":
        """# positions: [tokens]"""
        lengths = metadata.seq_lens.long()
        starts = lengths.cumsum(0) - lengths
        numbers = torch.arange(len(lengths), device=lengths.device)
        sequences = numbers.repeat_interleave(lengths)
        return cls(
            slot_mapping=metadata.slot_mapping,
            starts=starts.repeat_interleave(metadata.cu_seqlens_q.diff()),
            positions=positions,
            block_tables=metadata.block_tables,
            sequences=sequences,
            offsets=torch.arange(len(sequences), device=lengths.device) - starts[sequences],
            longest=int(lengths.max()),
        )

    @property
    def mask(self) -> torch.Tensor:
        """Whether each token attends to each index of the row. # [tokens, row] bool"""
        indices = torch.arange(len(self.sequences), device=self.starts.device)
        return (indices >= self.starts[:, None]) & (indices <= (self.starts + self.positions)[:, None])

    def exchange(self, vectors: torch.Tensor, cache: VectorCache) -> torch.Tensor:
        """Write the step's vectors to the cache, and read the vectors of the whole row.

        # [tokens, dim] -> [row, dim]
        """
        block_size = cache.vectors.shape[1]
        written = to_cache(vectors, cache.vectors.dtype)
        cache.vectors[self.slot_mapping // block_size, self.slot_mapping % block_size] = written
        blocks = self.block_tables[self.sequences, self.offsets // block_size].long()
        return cache.vectors[blocks, self.offsets % block_size].to(vectors.dtype)

    def positions_of(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Convert indices in the row to positions in each token's sequence, -1 for other sequences' or later tokens.

        Returns None if no context is longer than K, so that every token selected all visible ones.
        # [tokens, K] -> [tokens, K]
        """
        if self.longest <= indices.shape[1]:
            return None
        found = indices - self.starts[:, None]
        return found.masked_fill((found < 0) | (found > self.positions[:, None]), -1)


@contextmanager
def watch_attention(
    model: nn.Module, architecture: str, dtype: torch.dtype, indexed: IndexedCaches | None
) -> Iterator[dict[nn.Module, list[PagedAttention | IndexedAttention]]]:
    """Within the context, record the calls of each attention module of `model`; calls return zeros.

    `indexed`: the caches of a model with indexed attention, or None. A call that paged attention cannot serve raises
    `CheckpointError`.
    """
    found: dict[nn.Module, list[PagedAttention | IndexedAttention]] = {}
    masks = _Masks(architecture)

    def record(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any) -> Any:
        calls = found.setdefault(module, [])
        name = f"attention.{sum(map(len, found.values()))}"
        if indexed is not None and call.pop("indices", None) is not None:
            _refuse_call(architecture, module, query, key, value, call)
            calls.append(IndexedAttention(name, module, indexed, query, value, call))
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        _refuse_call(architecture, module, query, key, value, call)
        calls.append(
            PagedAttention(
                name,
                query,
                key,
                value,
                dtype=dtype,
                scaling=call.get("scaling"),
                sliding_window=masks.window(call),
                softcap=call.get("softcap"),
                has_sinks=call.get("s_aux") is not None,
            )
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    AttentionInterface.register(_WATCHED, _answer)
    AttentionMaskInterface.register(_WATCHED, masks.make)
    modules = list(model.modules())
    for module in modules:
        setattr(module, _ATTRIBUTE, record)
    with using_attention(model, _WATCHED):
        yield found
    for module in modules:
        delattr(module, _ATTRIBUTE)


def replace_methods(model: nn.Module) -> bool:
    """Have the attention methods in `_METHODS` call the attention attached to their modules; return whether there are
    such methods."""
    found = False
    for module in model.modules():
        kind = type(module)
        options = _METHODS.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
        if options is not None:
            setattr(module, _METHOD, partial(_answer_method, module, **options(module)))
            found = True
    return found


def _answer_method(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_unused: Any,
    is_transposed: bool = False,
    **call: Any,
) -> list[torch.Tensor | None]:
    """Return the output, and no weights. # 3 x [B, heads, n, dim] -> [B, heads, n, dim]

    Transposed keys are [B, heads, dim, n].
    """
    key = key.transpose(-1, -2) if is_transposed else key
    return [getattr(module, _ATTRIBUTE)(module, query, key, value, **call).transpose(1, 2), None]


def install(found: dict[nn.Module, list[PagedAttention | IndexedAttention]]) -> "Calls":
    """Attach each module's attention, which the implementation `PAGED` calls; return the count of calls."""
    calls = Calls()
    for module, attention in found.items():
        setattr(module, _ATTRIBUTE, calls.numbered(attention))
    return calls


class Calls:
    """Numbers the calls of each attention module in a pass: a module that is called several times has as many
    caches."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def restart(self) -> None:
        """Begin a pass."""
        self._counts.clear()

    def numbered(self, attention: list[PagedAttention | IndexedAttention]) -> Callable[..., torch.Tensor]:
        """Return the function that serves a module by `attention`, one for each call in a pass."""
        only = attention[0]
        if len(attention) == 1:
            return lambda _module, query, key, value, **call: only(query, key, value, **call)

        def answer(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any
        ) -> torch.Tensor:
            number = self._counts.get(id(module), 0)
            self._counts[id(module)] = number + 1
            return attention[number](query, key, value, **call)

        return answer


@contextmanager
def using_attention(model: nn.Module, implementation: str) -> Iterator[None]:
    """Within the context, all of `model` uses this implementation of transformers' attention interface, or `eager`."""
    methods = [module for module in model.modules() if _METHOD in vars(module)] if implementation == "eager" else []
    replaced = [vars(module).pop(_METHOD) for module in methods]
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
        for module, method in zip(methods, replaced, strict=True):
            setattr(module, _METHOD, method)


def _answer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **call: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function, which calls the attention attached to the module. # 3 x [1, heads, tokens, dim]"""
    return getattr(module, _ATTRIBUTE)(module, query, key, value, attention_mask=attention_mask, **call), None


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


class _Masks:
    """The masks that a model makes in the recorded pass. Only those that a call uses are checked."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._made: dict[int, tuple[torch.Tensor, bool, int | None]] = {}
        """Maps a mask's address to the mask, whether it is causal, and its window. Keeping the mask alive keeps its
        address unique."""

    def make(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        device: torch.device | str = "cpu",
        **_asked: Any,
    ) -> torch.Tensor:
        """The mask function that transformers calls. # -> [1, 1, q_length, kv_length]"""
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        self._made[_address(mask)] = mask, _is_causal(mask_function, local_size), local_size
        return mask

    def window(self, call: dict[str, Any]) -> int | None:
        """Return the sliding window of a call, or None.

        Raises `CheckpointError` if the call's mask is not that of causal or sliding-window attention.
        """
        given: int | None = call.get("sliding_window")
        mask = call.get("attention_mask")
        if mask is None:
            return given
        if _address(mask) not in self._made:
            raise CheckpointError(
                f"{self._architecture} gives its attention an attention_mask of its own, which the general route "
                "cannot serve; it serves causal attention with a sliding window, a soft cap and sinks"
            )
        _, is_causal, window = self._made[_address(mask)]
        if not is_causal:
            raise CheckpointError(
                f"{self._architecture} masks other tokens than those after a token and those before a sliding window "
                "(as bidirectional and chunked attention do), which the general route cannot serve"
            )
        # transformers' own attention reads the mask, so the call may omit the window, but must not contradict it.
        if given not in (None, window):
            raise CheckpointError(
                f"{self._architecture} has a sliding window of {given} tokens in its calls for attention and not in "
                "their masks, so the general route cannot serve it"
            )
        return window


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, which slices of a tensor share."""
    return tensor.untyped_storage().data_ptr()


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask of transformers is exactly causal, or causal with a sliding window; checked at sample
    positions."""
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

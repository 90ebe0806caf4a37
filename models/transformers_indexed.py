"""Attention to chosen tokens (DeepSeek Sparse Attention) on the general route. Used by `TransformersModel`.

transformers' layers of `indexed_attention` hand their latents and their indexer's keys to `past_key_values`, and give
the attention interface the `indices` of the tokens they chose. `IndexedCaches` stands in for that object over paged
caches: to the indexer, a step's sequences are one row of keys, one whole context after the other, under a mask by
which each token sees its own. Its scores are therefore of a step's tokens times all their contexts.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from models.attention.cache_dtype import to_cache
from models.base import VectorCacheSpec
from models.errors import CheckpointError
from models.forward_context import AttentionMetaData, get_forward_context
from models.kernels.types import AttentionOptions, VectorCache


class IndexedCaches:
    """What such a model is given as `past_key_values`. Each pass begins with `watched` or `served`."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.index_specs: dict[int, VectorCacheSpec] = {}
        """By number of the layer, once a pass has been watched."""
        self._latents: dict[int, torch.Tensor] = {}
        self._row: _Row | None = None

    def watched(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Arguments of a pass over one sequence, without caches, that shows what the layers keep. # [1, tokens]"""
        self._row = None
        return self._arguments(tokens.new_ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril())

    def served(self, positions: torch.Tensor) -> dict[str, Any]:
        """Arguments of a pass over the current step's tokens. # [tokens]"""
        self._row = _Row.of_step(get_forward_context().attn_metadata, positions)
        return self._arguments(self._row.mask)

    def update(self, latent: torch.Tensor, rotated: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by a layer, which goes on with the step's own: its attention reads the others from the cache.

        # [1, 1, tokens, rank], [1, 1, tokens, rope_dim], the key that all heads share
        """
        if latent.shape[1] != 1 or rotated.shape[1] != 1:
            raise self.refusal("caches keys and values of every head beside its indexer")
        self._latents[layer] = torch.cat((latent[0, 0], rotated[0, 0]), -1)
        return latent, rotated

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Called by an indexer, which scores the keys it gets back. # [1, tokens, dim] -> [1, row, dim]"""
        if self._row is None:
            self.index_specs[layer] = VectorCacheSpec(f"indexer.{layer}", keys.shape[-1])
            return keys
        cache = get_forward_context().kv_cache_data[self.index_specs[layer].name]
        assert isinstance(cache, VectorCache)
        return self._row.exchange(keys[0], cache)[None]

    def take_latent(self, layer: int) -> torch.Tensor:
        """What `update` got from this layer. # [tokens, rank + rope_dim]"""
        if layer not in self._latents:
            raise self.refusal("attends to another layer's latents")
        return self._latents.pop(layer)

    def positions_of(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Chosen places in the row, as positions in each token's own sequence; see `AttentionBackend`.

        # [1, tokens, K] int32 -> [tokens, K] int64, -1 for none
        """
        assert self._row is not None
        return self._row.positions_of(indices[0].long())

    def refusal(self, what: str) -> CheckpointError:
        """For a model that does something else than DeepSeek's sparse attention."""
        return CheckpointError(f"{self.architecture} {what}, which the general route cannot serve")

    def _arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        self._latents.clear()
        return {"past_key_values": self, "attention_mask": mask[None, None]}


class IndexedAttention:
    """Answers one attention module's calls by latent attention over the backend's paged latents."""

    def __init__(
        self, name: str, module: nn.Module, caches: IndexedCaches, query: torch.Tensor, value: torch.Tensor, call: Any
    ) -> None:
        """For calls like this one. # [1, heads, tokens, nope_dim + rope_dim], [1, heads, tokens, value_dim]

        Raises `CheckpointError` where keys and values are not what `kv_b_proj` makes of latents.
        """
        self.layer = cast(int, module.layer_idx)
        self._caches = caches
        latent_dim = caches.take_latent(self.layer).shape[-1]
        kv_b = getattr(module, "kv_b_proj", None)
        if type(kv_b) is not nn.Linear or "bias" in dict(kv_b.named_parameters()):
            raise caches.refusal("makes keys and values of latents by something else than a matrix kv_b_proj")
        self.kv_b: nn.Linear = kv_b
        rope_dim = latent_dim - kv_b.in_features
        features = query.shape[1] * (query.shape[-1] - rope_dim + value.shape[-1])
        if value.shape[1] != query.shape[1] or kv_b.out_features != features:
            raise caches.refusal("has a kv_b_proj that does not make a key and a value for each head")
        if any(call.get(other) is not None for other in ("sliding_window", "softcap", "s_aux")):
            raise caches.refusal("has a sliding window, a soft cap or sinks over chosen tokens")
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
    """The contexts of a step's sequences, one after the other, each as long as its tokens up to the step's last."""

    slot_mapping: torch.Tensor  # [tokens] int64, of the step's own tokens
    starts: torch.Tensor  # [tokens] int64, where the context of each token's sequence begins
    positions: torch.Tensor  # [tokens] int64
    block_tables: torch.Tensor  # [B, max_blocks] int32
    sequences: torch.Tensor  # [row] int64, whose token is at a place
    offsets: torch.Tensor  # [row] int64, its position
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
        """Whether a token sees a place. # [tokens, row] bool"""
        places = torch.arange(len(self.sequences), device=self.starts.device)
        return (places >= self.starts[:, None]) & (places <= (self.starts + self.positions)[:, None])

    def exchange(self, vectors: torch.Tensor, cache: VectorCache) -> torch.Tensor:
        """Write the step's vectors to the cache, and read the row's. # [tokens, dim] -> [row, dim]"""
        block_size = cache.vectors.shape[1]
        written = to_cache(vectors, cache.vectors.dtype)
        cache.vectors[self.slot_mapping // block_size, self.slot_mapping % block_size] = written
        blocks = self.block_tables[self.sequences, self.offsets // block_size].long()
        return cache.vectors[blocks, self.offsets % block_size].to(vectors.dtype)

    def positions_of(self, places: torch.Tensor) -> torch.Tensor | None:
        """None where every token has chosen all that it sees. # [tokens, K] -> [tokens, K], -1 for what is not seen"""
        if self.longest <= places.shape[1]:
            return None
        found = places - self.starts[:, None]
        return found.masked_fill((found < 0) | (found > self.positions[:, None]), -1)

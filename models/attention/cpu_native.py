"""The CPU attention backend over the compiled operators, where these compute a layer; torch computes the others."""

from dataclasses import dataclass, field

import torch

from models.attention.base import AttentionOptions, Rotation
from models.attention.cpu import CPUAttentionBackend
from models.attention.cpu_plan import CPUAttentionMetaData
from models.forward_context import AttentionMetaData, KVCacheTensor
from models.kernels.cpu import ops
from models.kernels.cpu.library import Step
from models.layers.norm import HeadNorms


@dataclass(slots=True, kw_only=True)
class NativeMetaData(CPUAttentionMetaData):
    """A step, also as the operators read it."""

    step: Step = field(init=False)

    def __post_init__(self) -> None:
        self.block_tables = self.block_tables.contiguous()
        self.step = ops.make_step(
            slots=self.slot_mapping,
            query_starts=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
        )


class NativeCPUAttentionBackend(CPUAttentionBackend):
    """Reads keys and values where they lie, decodes and spans of a prompt alike.

    A layer's values lie in another order than torch's code has them, so a layer is one backend's or the other's.
    """

    name = "cpu-native"
    _metadata_type = NativeMetaData

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # q [T, Hq, D], k and v [T, Hkv, D], [Hq] -> [T, Hq, D]"""
        assert isinstance(metadata, NativeMetaData)
        if not ops.attends(q, cache.k_cache):
            return super().forward(q, k, v, cache, metadata, options, sinks, norms, rotation)
        q, k, v = (_heads_in_a_row(part) for part in (q, k, v))
        ops.rope_store(q, k, v, cache.k_cache, cache.v_cache, metadata.step, norms=norms, rotation=rotation)
        return ops.attention(
            q, cache.k_cache, cache.v_cache, metadata.step, options, None if sinks is None else sinks.float()
        )


def _heads_in_a_row(part: torch.Tensor) -> torch.Tensor:
    """The same with the heads of a token one after the other. # [T, heads, D]"""
    return part if part.stride(1) == part.shape[2] and part.stride(2) == 1 else part.contiguous()
